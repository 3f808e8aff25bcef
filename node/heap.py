"""One heap for all threads of a process (Linux with glibc; elsewhere as it is), and what of it Python need not look through for ever."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from typing import Final

_M_ARENA_MAX: Final = -8  # of glibc's mallopt


def share() -> None:
    """Let every thread allocate from the same heap. Before there are threads.

    glibc gives each thread one of its own and keeps up to 64 MiB of what was freed in each. With one for all, the memory of activations
    that training has done with serves the check of a merge, and what nobody needs can go back. Training is as fast as before.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def settle() -> None:
    """All that lives now is there to stay, until `unsettle`. When what a long-running program needs is imported and built.

    Python's collector goes through every object now and then, with all threads stopped: what PyTorch and the rest of a node bring with
    them takes it tens of milliseconds each time, in the middle of a step or a sweep, and holds no garbage.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def unsettle() -> None:
    """What was there to stay may go now."""
    gc.unfreeze()
