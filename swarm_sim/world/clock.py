"""Virtual time: one queue of events for the whole world, and clocks that are wrong by a little.

Nothing sleeps and nothing runs in parallel: the queue pops the earliest event, moves time there, and calls it. Equal times are ordered by
when they were asked for, so a seed gives one story. An event belongs to one life of one node (or to the world itself): what was planned for
a process that has died since is dropped, and what arrives at a frozen one waits until it thaws, as in a stopped process.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

EPOCH_S = 1_700_000_000.0  # Unix seconds at which every world begins


class Life(Protocol):
    """What owns an event: a process. `epoch` changes with every death; `frozen` holds events back in `backlog`."""

    epoch: int
    frozen: bool
    backlog: list[tuple[Callable[..., None], tuple[Any, ...]]]


class Queue:
    """Events in order of time. `now` is the world's true time in Unix seconds."""

    def __init__(self) -> None:
        self.now = EPOCH_S
        self.handled = 0
        self._heap: list[tuple[float, int, Life | None, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, life: Life | None, call: Callable[..., None], *args: Any) -> None:
        """Call it at `when` (at once where that is past), if that life still lasts."""
        self._count += 1
        epoch = 0 if life is None else life.epoch
        heapq.heappush(self._heap, (max(when, self.now), self._count, life, epoch, call, args))

    def run(self, until: float) -> None:
        """Everything up to `until`; time stands there afterwards."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            self.now, _, life, epoch, call, args = pop(heap)
            if life is not None:
                if life.epoch != epoch:
                    continue
                if life.frozen:
                    life.backlog.append((call, args))
                    continue
            self.handled += 1
            call(*args)
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
