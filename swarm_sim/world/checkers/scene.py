"""What a checker sees of a swarm, whichever kind it is: the virtual world, or what the processes of a real one logged (chaos_scene.py).

The common vocabulary: nodes come up, publish states and end; now and then everybody is looked at. Of each node some things are true (is it
up, does it lie), and others are what it says of itself (its phase, whom it knows, which blocks it reports missing).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol


class Frame(Protocol):
    """The story's bounds. Times in seconds; those that end in `_at_s` or `end_s` are since its beginning."""

    @property
    def blocks(self) -> int: ...

    @property
    def heal_at_s(self) -> float:
        """The safety phase ends here: whatever happens to nodes has happened, and the swarm must recover."""
        ...

    @property
    def end_s(self) -> float: ...

    @property
    def ttl_s(self) -> float: ...

    @property
    def refresh_s(self) -> float: ...

    @property
    def grace_s(self) -> float:
        """How long a node may take from its start until it trains along with the others."""
        ...

    @property
    def hopeless(self) -> bool:
        """Nobody is asked to average: the links are meant to be too bad for it."""
        ...


class Actor(Protocol):
    """One node."""

    # ---- what is true of it -----------------------------------------------------------------------------------------------------

    @property
    def number(self) -> int: ...

    @property
    def block(self) -> int: ...

    @property
    def liar(self) -> bool: ...

    @property
    def up(self) -> bool: ...

    @property
    def frozen(self) -> bool: ...

    @property
    def epoch(self) -> int:
        """Counts its lives."""
        ...

    @property
    def up_s(self) -> float:
        """Seconds since it came up."""
        ...

    @property
    def round_s(self) -> float:
        """How long its rounds take."""
        ...

    @property
    def in_dht(self) -> bool:
        """Whether it has found anybody to ask at all."""
        ...

    @property
    def phase(self) -> str: ...

    @property
    def round(self) -> int:
        """Of its published state."""
        ...

    @property
    def digest(self) -> bytes: ...

    @property
    def accepted(self) -> int:
        """Merges that were used, in this life."""
        ...

    @property
    def overdue_s(self) -> float:
        """How far the exchange in hand is beyond its deadline; not above 0 where there is none."""
        ...

    # ---- what it says -----------------------------------------------------------------------------------------------------------

    def waiting(self) -> tuple[str, str, float, str]:
        """Phase, what it waits for, seconds in the phase, what comes next."""
        ...

    def missing(self) -> Collection[int]:
        """Blocks that it reports as held by nobody."""
        ...

    def known(self, block: int) -> set[int]:
        """The numbers of those that it counts as holders of a block, itself left out."""
        ...


class Hook(Protocol):
    """A list of functions that are told when a node comes up or ends."""

    def append(self, watcher: Callable[[Actor], None], /) -> None: ...


class PublishedHook(Protocol):
    """Of functions that are told of a new published state: whose, and how it came about (merged, own, fetched)."""

    def append(self, watcher: Callable[[Actor, str, str | None], None], /) -> None: ...


class SampledHook(Protocol):
    """Of functions that are told that it is time to look at everybody: seconds since the beginning."""

    def append(self, watcher: Callable[[float], None], /) -> None: ...


class Hooks(Protocol):
    @property
    def started(self) -> Hook: ...

    @property
    def ended(self) -> Hook: ...

    @property
    def published(self) -> PublishedHook: ...

    @property
    def sampled(self) -> SampledHook: ...


class Scene(Protocol):
    """A swarm."""

    @property
    def plan(self) -> Frame: ...

    @property
    def watchers(self) -> Hooks: ...

    @property
    def elapsed_s(self) -> float: ...

    @property
    def settled_at_s(self) -> float:
        """From here on links are whole."""
        ...

    @property
    def skew_s(self) -> float:
        """The most by which a clock is off, at any time of the story."""
        ...

    @property
    def nodes(self) -> Sequence[Actor]: ...

    def alive(self) -> Sequence[Actor]:
        """Those that are up and not frozen."""
        ...

    def holders(self, block: int) -> Sequence[Actor]:
        """Who truly holds a block now: up, and past joining."""
        ...

    def lies(self, peer: str) -> bool:
        """Whether the node of this peer id is a liar."""
        ...

    def can_meet(self, one: int, other: int) -> bool:
        """Whether one of two nodes can call the other."""
        ...
