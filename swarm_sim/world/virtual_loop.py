"""An asyncio event loop whose time is virtual: where nothing is ready it leaps to the next timer instead of waiting for it.

For the few parts of node/ whose decisions are spread over awaits (node/placing.py), so that they too run in simulated time, many seeds a
second and the same each time. The world of world.py needs no loop: it steps the core.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

NOTHING_READY: Final[list[tuple[selectors.SelectorKey, int]]] = []


class _Leap(selectors.SelectSelector):
    """No file is ever ready; waiting moves time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits, and no timer runs: a deadlock in virtual time")
        self.now += max(0.0, timeout)
        return NOTHING_READY


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual seconds, beginning at 0 (at Unix seconds, floats are coarser than the loop's idea of "now")."""

    def __init__(self) -> None:
        self._leap = _Leap()
        super().__init__(self._leap)

    def time(self) -> float:
        return self._leap.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
