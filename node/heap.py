"""One heap for all threads of a process. Linux with glibc; elsewhere as it is."""

from __future__ import annotations

import contextlib
import ctypes
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
