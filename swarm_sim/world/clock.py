"""Virtual time: one queue of events for the whole world, and clocks that are wrong by a little.

Nothing sleeps and nothing runs in parallel: the queue pops the earliest event, moves time there, and calls it. Equal times are ordered by
when they were asked for, so a seed gives one story. An event belongs to one life of one node (or to the world itself): what was planned for
a process that has died since is dropped, and what arrives at a frozen one waits until it thaws, as in a stopped process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Final, Protocol, TypeAlias

SLOT_S: Final = 0.0625
EPOCH_S = 1_700_000_000.0  # Unix seconds at which every world begins


class Life(Protocol):
    """What owns an event: a process. `epoch` changes with every death; `frozen` holds events back in `backlog`."""

    epoch: int
    frozen: bool
    backlog: list[tuple[Callable[..., None], tuple[Any, ...]]]


_Event: TypeAlias = tuple[float, int, Life | None, int, Callable[..., None], tuple[Any, ...]]


class Queue:
    """Events in order of time. `now` is the world's true time in Unix seconds.

    Events stand in slots of `SLOT_S`, and only the present slot is kept in order, as a heap: it is small, where all that is planned is not.
    """

    def __init__(self) -> None:
        self.now = EPOCH_S
        self.handled = 0
        self._count = 0
        self._slot = int(EPOCH_S / SLOT_S)
        self._heap: list[_Event] = []  # of the present slot
        self._later: defaultdict[int, list[_Event]] = defaultdict(list)  # of those to come

    def at(self, when: float, life: Life | None, call: Callable[..., None], *args: Any) -> None:
        """Call it at `when` (at once where that is past), if that life still lasts."""
        when = when if when > self.now else self.now
        self._count += 1
        event = when, self._count, life, 0 if life is None else life.epoch, call, args
        slot = int(when / SLOT_S)
        if slot == self._slot:
            heappush(self._heap, event)
        else:
            self._later[slot].append(event)

    def run(self, until: float) -> None:
        """Everything up to `until`; time stands there afterwards."""
        last = int(until / SLOT_S)
        while True:
            heap = self._heap
            while heap and heap[0][0] <= until:
                self.now, _, life, epoch, call, args = heappop(heap)
                if life is not None:
                    if life.epoch != epoch:
                        continue
                    if life.frozen:
                        life.backlog.append((call, args))
                        continue
                self.handled += 1
                call(*args)
            if self._slot >= last:
                break
            self._slot += 1
            self._heap = self._later.pop(self._slot, [])
            self._heap.sort()
        self.now = until


@dataclass(slots=True)
class Clock:
    """A node's own clock: off by `skew_s`, and drifting by `drift` seconds a second since the world began."""

    skew_s: float = 0.0
    drift: float = 0.0

    def read(self, now: float) -> float:
        """Unix seconds by this clock at true time `now`."""
        return now + self.skew_s + self.drift * (now - EPOCH_S)

    def true(self, read: float) -> float:
        """The true time at which this clock shows `read`."""
        return (read - self.skew_s + self.drift * EPOCH_S) / (1.0 + self.drift)
