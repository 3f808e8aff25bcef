"""Memory for what comes and goes in bulk, beside malloc's.

malloc's would leave holes. A chunk that is freed between two that live stays a hole of its heap until something fits it; over an exchange
they come to tens of MiB that nobody uses and nobody else gets. (malloc cannot be told to ask the system for each large block itself:
training, whose activations come and go at every step, would take half as long again.) To ask the system for each chunk costs as much as
all else that is done with it, since every page has to be cleared; so a few that nobody holds any more are kept for the next.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import weakref
from collections import deque
from typing import Final

MAPPED_BYTES: Final = 128 * 1024  # from here on memory is not malloc's
KEPT: Final = 8  # rooms that nobody holds
_KEPT_BYTES: Final = 512 * 1024  # each of those: a chunk
_HUGE_BYTES: Final = 2 * 1024 * 1024  # a huge page

_free: deque[mmap.mmap] = deque(maxlen=KEPT)  # the last one is the last that was used, and may be in the CPU's cache


def room(size_bytes: int) -> memoryview:
    """So many writable bytes, their values not set, which go back as soon as nobody holds them or a view of them.

    Huge pages where there are any and one is filled: the first touch then costs a tenth.
    """
    if size_bytes < MAPPED_BYTES:
        return memoryview(bytearray(size_bytes))
    if size_bytes > _KEPT_BYTES:
        return memoryview(_mapped(size_bytes))
    import numpy as np  # late: who only asks for a status needs no bulk

    memory = _taken()
    held = np.frombuffer(memory, np.uint8, size_bytes)
    weakref.finalize(held, _free.append, memory).atexit = False
    return held.data


def give_back() -> None:
    """Keep none that nobody holds."""
    _free.clear()


def _taken() -> mmap.mmap:
    """A room that is kept, or a new one; they are all of one size. Any thread may ask."""
    with contextlib.suppress(IndexError):
        return _free.pop()
    return _mapped(_KEPT_BYTES)


def _mapped(size_bytes: int) -> mmap.mmap:
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    mapped = mmap.mmap(-1, size_bytes, **private)
    if size_bytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped
