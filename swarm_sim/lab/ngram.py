"""An interpolated byte n-gram with Witten-Bell smoothing: the yardstick that small neural runs do not reach (recipe §4).

P_k(y | c, the last k bytes) = (n(c, y) + t(c) P_{k-1}(y)) / (n(c) + t(c)), where n counts and t(c) is how many different bytes followed c;
P_{-1} is uniform. Counted once over the whole text, as sorted arrays. "Order 5" is five bytes of context.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class ByteNgram:
    """Counts of contexts of 0 … `order` bytes of `text` (integers 0 … 255)."""

    def __init__(self, text: Array, order: int = 5) -> None:
        self.order = order
        self._levels: list[tuple[Array, Array, Array, Array, Array]] = []
        values = text.astype(np.uint64)
        for k in range(order + 1):
            keys = _keys(values, k)
            pairs, pair_counts = np.unique(keys, return_counts=True)
            contexts, first = np.unique(pairs >> np.uint64(8), return_index=True)
            totals = np.add.reduceat(pair_counts, first)
            kinds = np.diff(np.append(first, len(pairs)))
            self._levels.append((pairs, pair_counts, contexts, totals, kinds))

    def nats(self, windows: Array) -> Array:
        """-ln P of every byte after the first, given those before it in its window: windows [R, N + 1] → [R, N]."""
        out = np.empty((windows.shape[0], windows.shape[1] - 1))
        for row, window in enumerate(windows):
            out[row] = -np.log(self._probabilities(window.astype(np.uint64)))
        return out

    def _probabilities(self, window: Array) -> Array:
        """Of window[1:]."""
        chances = np.full(len(window) - 1, 1 / 256)
        for k, (pairs, pair_counts, contexts, totals, kinds) in enumerate(self._levels):
            begin = max(0, k - 1)  # earlier positions do not have k bytes before them
            keys = _keys(window, k)
            keys = keys[len(keys) - (len(chances) - begin) :]
            counted = _look(pairs, pair_counts, keys)
            above = keys >> np.uint64(8)
            total, kind = _look(contexts, totals, above), _look(contexts, kinds, above)
            mixed = (counted + kind * chances[begin:]) / np.maximum(total + kind, 1)
            chances[begin:] = np.where(total > 0, mixed, chances[begin:])
        return chances


def _keys(values: Array, k: int) -> Array:
    """k bytes of context and the byte after them, as one number, for each place that has them."""
    keys = values[k:].copy()
    for back in range(1, k + 1):
        keys += values[k - back : len(values) - back] << np.uint64(8 * back)
    return keys


def _look(known: Array, values: Array, keys: Array) -> Array:
    """values of keys, 0 where unknown."""
    place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[place] == keys, values[place], 0)
