"""A pseudo-random order of n things that takes no memory: where does the i-th come from? Computed, not stored.

A Feistel network over a rectangle of at least n cells (format-preserving encryption, in the manner of NIST SP 800-38G's FF1 but with a
plain mixer: order, not secrecy, is wanted). Cells beyond n are walked through: the network maps them on until a cell below n comes out,
which keeps it a permutation. There are less than √n of those, so that hardly ever happens.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Final

import numpy as np

ROUNDS: Final = 8
_A: Final = np.uint64(0xBF58476D1CE4E5B9)  # splitmix64's constants
_B: Final = np.uint64(0x94D049BB133111EB)

Array = np.ndarray[Any, np.dtype[np.uint64]]


class Permutation:
    """Of 0 … n−1, by a key. Equal on every machine: whole numbers only."""

    def __init__(self, n: int, key: str) -> None:
        assert 0 < n < 2**62, "a permutation needs something to order"
        self._n = np.uint64(n)
        rows = math.isqrt(n - 1) + 1
        self._rows = np.uint64(rows)
        self._columns = np.uint64(-(-n // rows))
        digest = hashlib.sha512(key.encode()).digest()
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)
        assert len(self._keys) == ROUNDS

    def __call__(self, index: np.ndarray[Any, Any]) -> Array:
        """Where the things at `index` (each below n) come from."""
        out = self._once(index.astype(np.uint64))
        beyond = out >= self._n
        while beyond.any():
            out[beyond] = self._once(out[beyond])
            beyond = out >= self._n
        return out

    def _once(self, cell: Array) -> Array:
        left, right = cell // self._columns, cell % self._columns
        for number, key in enumerate(self._keys):
            if number % 2:
                left = (left + _mix(right + key)) % self._rows
            else:
                right = (right + _mix(left + key)) % self._columns
        return left * self._columns + right


def _mix(value: Array) -> Array:
    """splitmix64's finaliser, cut to 62 bits so that a sum cannot wrap."""
    value = (value ^ (value >> np.uint64(30))) * _A
    value = (value ^ (value >> np.uint64(27))) * _B
    return (value ^ (value >> np.uint64(31))) >> np.uint64(2)
