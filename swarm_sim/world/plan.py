"""What happens in a world, as data: who is there, and a list of events drawn from a seed. Data can be printed, replayed and shrunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

KINDS: Final = (
    "start",  # the process comes up
    "crash",  # the process dies, its host stays
    "vanish",  # the host loses power
    "leave",  # the user stops it
    "freeze",
    "thaw",
    "cut",  # these hosts are cut off from all others
    "join-net",  # the cut heals
    "clog",  # value: seconds on every message in and out
    "loss",  # value: share of packets lost, everywhere
    "slow",  # value: how many times slower it trains from now on
)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens `at_s` seconds after the world began, to the nodes `who`."""

    at_s: float
    kind: str
    who: tuple[int, ...] = ()
    value: float = 0.0

    def __str__(self) -> str:
        who = ",".join(map(str, self.who[:12])) + (f",… ({len(self.who)} nodes)" if len(self.who) > 12 else "")
        return f"{self.at_s:8.1f} s  {self.kind:<9} {who}{f'  {self.value:g}' if self.value else ''}"


@dataclass(frozen=True, slots=True)
class Person:
    """What one node is like."""

    block: int
    speed: float = 1.0  # rounds take this many times longer
    up: float = 12.5e6  # bytes a second
    down: float = 25e6
    nat: bool = False
    relayed: bool = True
    skew_s: float = 0.0
    drift: float = 0.0
    lies: str = ""


@dataclass(frozen=True)
class Plan:
    """A whole story. The safety phase ends at `heal_at_s`; then the net is whole, everybody thaws, `revived` come back, and in the
    liveness phase, up to `end_s`, the swarm must recover."""

    people: tuple[Person, ...]
    events: tuple[Event, ...]
    blocks: int
    heal_at_s: float
    end_s: float
    revived: tuple[int, ...] = ()
    round_s: float = 30.0
    refresh_s: float = 10.0
    ttl_s: float = 30.0
    tau_s: float = 20.0
    grace_s: float = 90.0  # by which a node that came up must train along with the others
    state_bytes: int = 4_000_000
    topology: str = "pairs"
    spread_s: float = 0.04  # of the hosts over the plane: one way across it
    loss: float = 0.0
    dead_blocks: tuple[int, ...] = ()  # blocks that nobody holds at the end, by the story's own intention
    hopeless: bool = False  # the deadline is meant to be missed: nobody is asked to average


Scenario = Callable[[int, Random], Plan]
