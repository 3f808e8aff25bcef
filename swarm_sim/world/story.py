"""One seed, from its plan to its verdict; many seeds, until one fails; and a failing one, shrunk to the events that matter.

A seed chooses the scenario and the number of nodes unless they are given, so `search` walks through all of them. Shrinking runs the story
again without some of its events, and keeps what still fails by the same checker: everything else stays as the seed drew it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from blocktrain.swarm_sim.world.checkers import ALL, Checker, Violation
from blocktrain.swarm_sim.world.plan import Event, Plan
from blocktrain.swarm_sim.world.scenarios import SCENARIOS
from blocktrain.swarm_sim.world.world import Trace, World

SAMPLE_S: Final = 5.0
FEWEST, MOST = 4, 14  # nodes that a seed chooses
SHRINK_RUNS: Final = 120


@dataclass(frozen=True)
class Case:
    """What to run. Empty and zero: as the seed chooses."""

    seed: int
    scenario: str = ""
    nodes: int = 0
    minutes: float = 0.0  # 0: the scenario's own length

    def drawn(self) -> Case:
        """With the choices that the seed makes."""
        rng = Random(f"{self.seed} case")
        names = list(SCENARIOS)
        scenario, nodes = names[self.seed % len(names)], rng.randrange(FEWEST, MOST + 1)
        return replace(self, scenario=self.scenario or scenario, nodes=self.nodes or nodes)

    def plan(self) -> Plan:
        case = self.drawn()
        plan = SCENARIOS[case.scenario](case.nodes, Random(f"{self.seed} {case.scenario}"))
        if self.minutes:
            scale = 60 * self.minutes / plan.end_s
            events = tuple(replace(event, at_s=event.at_s * scale) for event in plan.events)
            plan = replace(plan, end_s=60 * self.minutes, heal_at_s=plan.heal_at_s * scale, events=events)
        return plan

    def command(self) -> str:
        """The command that runs exactly this again."""
        case = self.drawn()
        minutes = f" --minutes {self.minutes:g}" if self.minutes else ""
        return f"blocktrain-sim world replay --seed {self.seed} --scenario {case.scenario} --nodes {case.nodes}{minutes}"


@dataclass(frozen=True)
class Verdict:
    """What came of it."""

    case: Case
    plan: Plan
    violations: tuple[Violation, ...]
    trace: Trace
    world: World

    @property
    def ok(self) -> bool:
        return not self.violations


def tell(case: Case, plan: Plan | None = None, *, keep: bool = False, prepare: Callable[[World], None] | None = None) -> Verdict:
    """Run a case under all checkers. `keep`: the trace's lines; `prepare`: who else wants to watch."""
    plan = plan or case.plan()
    trace = Trace(keep=keep)
    world = World(plan, case.seed, trace=trace)
    checkers: list[Checker] = [checker(world) for checker in ALL]
    if prepare is not None:
        prepare(world)
    world.sample_every(SAMPLE_S)
    world.run()
    for checker in checkers:
        checker.finish()
    found = sorted((v for checker in checkers for v in checker.violations), key=lambda violation: violation.at_s)
    return Verdict(case.drawn(), plan, tuple(found), trace, world)


def search(first: int, count: int, scenario: str = "", nodes: int = 0) -> Iterator[Verdict]:
    """The verdicts of `count` seeds."""
    for seed in range(first, first + count):
        yield tell(Case(seed, scenario, nodes))


def shrink(failed: Verdict) -> tuple[Event, ...]:
    """A shorter list of events with which the same checker still objects; every event of it is needed, as far as the runs allow."""
    wanted = failed.violations[0].checker
    events, runs = list(failed.plan.events), 0
    size = max(1, len(events) // 2)
    while runs < SHRINK_RUNS:
        begin = 0
        removed = False
        while begin < len(events) and runs < SHRINK_RUNS:
            fewer = events[:begin] + events[begin + size :]
            runs += 1
            verdict = tell(failed.case, replace(failed.plan, events=tuple(fewer)))
            if any(violation.checker == wanted for violation in verdict.violations):
                events, removed = fewer, True
            else:
                begin += size
        if size == 1 and not removed:
            break
        size = max(1, size // 2)
    return tuple(events)
