"""The thread for work that can wait: one job at a time, in order, behind training.

How far behind depends on the machine. Where some core has had time to spare, the thread takes only what is left over (Linux's idle class):
the kernel then counts a core where it runs as free, so that a daemon that wakes goes there, and not in front of training. Where no core has
time to spare, as with several training nodes on few cores, what is left over is nothing, and an exchange would miss its deadline: then it
has a share, at a low priority. A thread without privileges cannot leave the idle class, so there is one for each; jobs go to the other
when none is under way. Only one of both ever works.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import psutil

from blocktrain.node.compute.thread import NICENESS, yield_to_others

T = TypeVar("T")
BACKGROUND_NICENESS: Final = NICENESS + 5  # an exchange can wait where no core is to spare; training is what it is for
SPARE_CORES: Final = 0.25  # idle time of all our cores, per second, from which on what is left over is enough
LOOK_EVERY_S: Final = 1.0


class Background:
    """Runs jobs for one event loop. `spare`: cores that were idle of late."""

    def __init__(self, spare: Callable[[], float] | None = None) -> None:
        self._spare = spare or Spare().cores
        self._shared = ThreadPoolExecutor(1, "blocktrain-compute", yield_to_others, (BACKGROUND_NICENESS,))
        self._leftover = ThreadPoolExecutor(1, "blocktrain-leftover", _take_what_is_left)
        self._now = self._shared
        self._under_way = 0

    async def run(self, job: Callable[[], T]) -> T:
        """Its result, or what it raises. A job that has begun is not cut off if the caller is: the next one waits for it."""
        if self._under_way == 0:
            self._now = self._leftover if self._spare() >= SPARE_CORES else self._shared
        future = self._now.submit(job)
        self._under_way += 1
        loop = asyncio.get_running_loop()

        def ended(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
                loop.call_soon_threadsafe(self._ended)

        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def _ended(self) -> None:
        self._under_way -= 1

    def stop(self) -> None:
        """Waits for nothing; jobs that have not begun are dropped."""
        for pool in (self._shared, self._leftover):
            pool.shutdown(wait=False, cancel_futures=True)


class Spare:
    """How many of the cores that we may use had nothing to do, since the look before. `idle_s`: their idle seconds, all together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, idle_s: Callable[[], float] | None = None) -> None:
        self._clock, self._idle_s = clock, idle_s or _idle_s
        self._cores = 0.0
        self._before = self._clock(), self._idle_s()

    def cores(self) -> float:
        """0 before there is a second to go by."""
        now, (then, idle_then_s) = self._clock(), self._before
        if now - then >= LOOK_EVERY_S:
            self._before = now, self._idle_s()
            self._cores = (self._before[1] - idle_then_s) / (now - then)
        return self._cores


def _idle_s() -> float:
    ours = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    return float(sum(times.idle for core, times in enumerate(psutil.cpu_times(percpu=True)) if core in ours))


def _take_what_is_left() -> None:
    """Elsewhere, or where the kernel does not let us, at the lowest priority that there is."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            return
    yield_to_others(BACKGROUND_NICENESS)
