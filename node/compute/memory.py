"""What PyTorch's libraries keep of memory that nobody uses. See also node/heap.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch


def give_back() -> None:
    """Free what MKL keeps for this thread's next matrix product, some 8 MiB. For threads that multiply rarely."""
    free = _free_buffers()
    if free is not None:
        free()


@cache
def _free_buffers() -> Callable[[], Any] | None:
    """MKL's `mkl_thread_free_buffers`, in a PyTorch that has it."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        free: Callable[[], Any] = ctypes.CDLL(str(library)).mkl_serv_thread_free_buffers
    except (OSError, AttributeError):
        return None
    return free
