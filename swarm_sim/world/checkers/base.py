"""What every checker is: it watches a swarm through its hooks, and notes what must not be."""

from __future__ import annotations

from dataclasses import dataclass

from blocktrain.swarm_sim.world.checkers.scene import Scene

SLACK_S = 15.0  # of look-ups that hang, beyond a record's life and a refresh
MOST_KEPT = 20  # violations of one checker; the first is what matters


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be, seen `at_s` after the beginning."""

    at_s: float
    checker: str
    what: str

    def __str__(self) -> str:
        return f"{self.at_s:8.1f} s  {self.checker}: {self.what}"


class Checker:
    """Base of all checkers. A subclass has a `name`, hooks itself to the scene when made, and looks once more in `finish`."""

    name = ""

    def __init__(self, world: Scene) -> None:
        self.world = world
        self.violations: list[Violation] = []

    def finish(self) -> None:
        """The story has ended."""

    def lag_s(self) -> float:
        """By how much a settled node's word on others may lag behind the truth."""
        world = self.world
        return world.plan.ttl_s + world.plan.refresh_s + SLACK_S + 2 * world.skew_s

    def object(self, what: str) -> None:
        if len(self.violations) < MOST_KEPT:
            self.violations.append(Violation(self.world.elapsed_s, self.name, what))
