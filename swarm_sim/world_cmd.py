"""`blocktrain-sim world`, `world replay` and `world search`, from their options to their exit codes."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter
from cyclopts.validators import Number

from blocktrain.node.commands import frame
from blocktrain.protocol.errors import UsageError

WORLD_HELP: Final = """A swarm in virtual time: the nodes' own protocol core, with simulated network, DHT, clocks and compute.

Exits with 0 only if everything held that must hold; what did not is printed with the command that replays it."""
STDOUT: Final = Path("-")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WorldOptions:
    """One story."""

    nodes: Annotated[int, Parameter(validator=Number(gte=1, lte=20_000), help="How many nodes there are, or come to be.")] = 12
    scenario: Annotated[str, Parameter(help="What befalls them; `list` prints all stories.")] = "churn"
    seed: Annotated[int, Parameter(validator=Number(gte=0), help="Everything random comes from it.")] = 0
    minutes: Annotated[
        float, Parameter(validator=Number(gte=0, lte=100_000), help="Virtual minutes; without it, as long as the story is.")
    ] = 0.0
    out: Annotated[Path | None, Parameter(help="Folder for report.html and report.json.")] = None
    json: Annotated[Path | None, Parameter(help="Write the report's JSON here; - is standard output.")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """A seed again."""

    seed: Annotated[int, Parameter(validator=Number(gte=0), help="The seed that failed.")]
    scenario: Annotated[str, Parameter(help="Without it, the one that `search` takes for this seed.")] = ""
    nodes: Annotated[int, Parameter(validator=Number(gte=0, lte=20_000), help="Without it, as many as `search` takes.")] = 0
    minutes: Annotated[float, Parameter(validator=Number(gte=0, lte=100_000), help="Virtual minutes.")] = 0.0
    trace: Annotated[Path | None, Parameter(help="Write every fact and decision here, a line each; - is standard output.")] = None
    shrink: Annotated[bool, Parameter(negative="--no-shrink", help="Where it fails, look for the few events that matter.")] = True
    out: Annotated[Path | None, Parameter(help="Folder for report.html and report.json.")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Many seeds."""

    seeds: Annotated[int, Parameter(validator=Number(gte=1, lte=10_000_000), help="How many seeds.")] = 200
    first: Annotated[int, Parameter(validator=Number(gte=0), help="The first of them.")] = 0
    scenario: Annotated[str, Parameter(help="Only this story; without it, all of them in turns.")] = ""
    nodes: Annotated[int, Parameter(validator=Number(gte=0, lte=20_000), help="This many nodes; without it, 4 to 14 by the seed.")] = 0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ChooseOptions:
    """Crowds of `--block auto` nodes."""

    seeds: Annotated[int, Parameter(validator=Number(gte=1, lte=10_000_000), help="How many seeds.")] = 200
    first: Annotated[int, Parameter(validator=Number(gte=0), help="The first of them.")] = 0
    nodes: Annotated[int, Parameter(validator=Number(gte=1, lte=200), help="How many start together.")] = 8
    blocks: Annotated[int, Parameter(validator=Number(gte=1, lte=64), help="Blocks of the run.")] = 4
    tell: Annotated[bool, Parameter(negative="", help="Print who claimed and took which block, and when.")] = False


def app() -> App:
    """The command group, to be put under `blocktrain-sim`."""
    group = App(name="world", help=WORLD_HELP)
    group.default(world)
    group.command(replay)
    group.command(search)
    group.command(choose)
    return group


def world(options: WorldOptions = WorldOptions()) -> int:
    """Tell one story and say what came of it."""
    from blocktrain.swarm_sim.local_cmd import check_target
    from blocktrain.swarm_sim.world.scenarios import SCENARIOS
    from blocktrain.swarm_sim.world.story import Case

    if options.scenario == "list":
        for name, scenario in SCENARIOS.items():
            print(f"{name:<16} {(scenario.__doc__ or '').strip().splitlines()[0]}")
        return 0
    _check(options.scenario)
    check_target(options.json)
    return _tell(Case(options.seed, options.scenario, options.nodes, options.minutes), options.out, options.json)


def replay(options: ReplayOptions) -> int:
    """Run a seed again: the same story to the last bit, however often, and on any machine."""
    from blocktrain.swarm_sim.world.story import Case

    _check(options.scenario)
    return _tell(
        Case(options.seed, options.scenario, options.nodes, options.minutes), options.out, None, trace=options.trace, shorten=options.shrink
    )


def search(options: SearchOptions = SearchOptions()) -> int:
    """Run many seeds under all checkers; stop at the first that fails, and shrink it."""
    from blocktrain.swarm_sim.world import story

    _check(options.scenario)
    began = time.monotonic()
    for verdict in story.search(options.first, options.seeds, options.scenario, options.nodes):
        if not verdict.ok:
            _print_failure(verdict, shorten=True)
            return 1
        if (verdict.case.seed - options.first + 1) % 50 == 0:
            frame.say(f"{verdict.case.seed - options.first + 1} seeds held, {time.monotonic() - began:.0f} s")
    print(f"{options.seeds} seeds from {options.first} on: everything held")
    return 0


def choose(options: ChooseOptions = ChooseOptions()) -> int:
    """Let crowds of nodes choose their blocks by delayed and lost views of the DHT: an even division must come of it, and stay."""
    from blocktrain.swarm_sim.world import choosing

    failed = 0
    for choice in choosing.search(options.first, options.seeds, options.nodes, options.blocks):
        if options.tell:
            for said in choice.diary:
                print(f"{said.at_s:8.1f} s  node {said.node:<3} {said.phase:<9} block {said.block}")
        if choice.violations:
            failed += 1
            frame.say(f"seed {choice.seed} did not hold:")
            for violation in choice.violations[:8]:
                frame.say(str(violation))
            frame.say(f"replay it with: {choice.command()}")
    print(f"{options.seeds} seeds from {options.first} on: {failed or 'none'} did not hold")
    return int(failed > 0)


def _check(scenario: str) -> None:
    """Raises: UsageError."""
    from blocktrain.swarm_sim.world.scenarios import SCENARIOS

    if scenario and scenario not in SCENARIOS:
        raise UsageError(f'--scenario: "{scenario}" is not one of {", ".join(SCENARIOS)}')


def _tell(case: object, out: Path | None, target: Path | None, *, trace: Path | None = None, shorten: bool = False) -> int:
    from blocktrain.swarm_sim.world import story
    from blocktrain.swarm_sim.world.page import page_of
    from blocktrain.swarm_sim.world.recorder import Recorder

    assert isinstance(case, story.Case)
    recorders: list[Recorder] = []
    began = time.process_time()
    verdict = story.tell(case, keep=trace is not None, prepare=lambda world: recorders.append(Recorder(world)))
    page = page_of(verdict, recorders[0])
    try:
        if trace is not None:
            text = "\n".join(verdict.trace.lines) + "\n"
            print(text, end="") if trace == STDOUT else trace.write_text(text, encoding="utf-8")
        if target is not None:
            text = json.dumps(page.as_json(), indent=1)
            print(text) if target == STDOUT else target.write_text(text + "\n", encoding="utf-8")
        if out is not None:
            frame.say(f"report: {page.write(out)}")
    except OSError as error:
        raise UsageError(f"the report could not be written: {error}") from error
    say = frame.say if STDOUT in (target, trace) else print
    facts = page.facts
    for key in (
        "scenario",
        "nodes",
        "blocks",
        "virtual_s",
        "ends_of_exchanges",
        "messages_per_node_round",
        "dht_hops_per_node_round",
        "trace",
    ):
        value = facts[key]
        say(f"{key:<24} {value if not isinstance(value, float) else f'{value:.2f}'}")
    say(f"{'processor seconds':<24} {time.process_time() - began:.1f}")
    if verdict.ok:
        say("everything that must hold held")
        return 0
    _print_failure(verdict, shorten=shorten)
    return 1


def _print_failure(verdict: object, *, shorten: bool) -> None:
    from blocktrain.swarm_sim.world import story

    assert isinstance(verdict, story.Verdict)
    frame.say(f"seed {verdict.case.seed} ({verdict.case.scenario}, {verdict.case.nodes} nodes) did not hold:")
    for violation in verdict.violations[:8]:
        frame.say(str(violation))
    if shorten and verdict.case.nodes <= 64:
        events = story.shrink(verdict)
        frame.say(f"{len(events)} of its {len(verdict.plan.events)} events are enough:")
        for event in events:
            frame.say(str(event))
    frame.say(f"replay it with: {verdict.case.command()}")
