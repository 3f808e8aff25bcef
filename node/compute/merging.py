"""The merge of two encoded snapshots: weigh them, digest, norms, all while a piece is in the CPU's cache.

A state is many times larger than that cache, so every pass over it costs as much as all the arithmetic in it. Here each piece is brought
in once, as soon as both sides of it are there. Bit-identical on both sides: see `flat.merge`. P is the number of parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import blake3
import torch
from torch import Tensor

from blocktrain.node.compute import flat
from blocktrain.node.compute.codecs import Read
from blocktrain.protocol.ids import Digest


@dataclass(frozen=True)
class Combined:
    """A merge and what was measured on the way. Norms are Euclidean over all parameters.

    Attributes:
        state: [P] float32, the merge; None where it was not to be kept.
    """

    state: Tensor | None
    digest: Digest
    own_norm: float
    distance: float  # |theirs - ours|
    drift: float  # |ours - published|
    along: float  # cosine between where they and where we went since our published state, without what is `aside`; 0 where one did not move


class Merging:
    """A merge that grows piece by piece, in order. NaN and infinity show in the distance."""

    def __init__(self, published: Tensor, shares: tuple[float, float], *, keep: bool = True, aside: slice = slice(0, 0)) -> None:
        """`shares`: (ours, theirs). `keep`: in memory of its own; else it is measured and digested only.

        `aside`: parameters whose way tells nothing of who went it: a table of which each replica moves the rows that its own text names.
        """
        self.shares = shares
        self._aside = aside
        self._published = published
        self._state = flat.empty(published.numel()) if keep else None
        self._one, self._two = flat.empty(2 * flat.PIECE).view(2, -1)
        self._hasher = blake3.blake3()
        self._own = 0.0
        # Of where we and they went since our published state: squares and product, of all that counts for the way and of what is aside.
        self._ways, self._ways_aside = _Ways(), _Ways()

    def add(self, piece: slice, mine: Tensor, theirs: Tensor) -> None:
        """The next piece."""
        # Where the merge will be is room for what is asked before.
        one, two = self._one[: len(mine)] if self._state is None else self._state[piece], self._two[: len(mine)]
        torch.sub(mine, self._published[piece], out=one)
        torch.sub(theirs, self._published[piece], out=two)
        inside, outside = _parted(piece, self._aside)
        for ways, parts in ((self._ways, outside), (self._ways_aside, inside)):
            for part in parts:
                ways.add(one[part], two[part])
        self._own += _dot(mine, mine)
        self._hasher.update(flat.to_bytes(weigh(mine, theirs, self.shares, out=one, room=two)))

    def result(self) -> Combined:
        """When all pieces were added. Its rooms are given back."""
        self._one = self._two = torch.empty(0)
        ways, aside = self._ways, self._ways_aside
        distance = math.sqrt(ways.apart() + aside.apart())
        drift = math.sqrt(ways.ours + aside.ours)
        return Combined(self._state, Digest(self._hasher.digest()), math.sqrt(self._own), distance, drift, ways.cosine())


@dataclass
class _Ways:
    """Two ways from one place, as sums over some parameters: the squares of ours and of theirs, and their product."""

    ours: float = 0.0
    theirs: float = 0.0
    product: float = 0.0

    def add(self, ours: Tensor, theirs: Tensor) -> None:
        self.ours += _dot(ours, ours)
        self.theirs += _dot(theirs, theirs)
        self.product += _dot(ours, theirs)

    def apart(self) -> float:
        """The square of the distance of their ends; NaN or infinite where a parameter is."""
        square = self.ours + self.theirs - 2 * self.product
        return 0.0 if square < 0 else square  # rounding, where they are the same

    def cosine(self) -> float:
        """0 where one did not move, and where a parameter is not finite."""
        both = math.sqrt(self.ours) * math.sqrt(self.theirs) if math.isfinite(self.ours * self.theirs) else 0.0
        return self.product / both if both > 0 else 0.0


def weigh(mine: Tensor, theirs: Tensor, shares: tuple[float, float], *, out: Tensor, room: Tensor) -> Tensor:
    """mine · shares[0] + theirs · shares[1] into `out`, which may be `mine`; `room` is written over, and may be `theirs`.

    Two products and a sum, each rounded by itself. A sum has the same bits in either order, so it is the same on both sides.
    """
    torch.mul(mine, shares[0], out=out)
    torch.mul(theirs, shares[1], out=room)
    out += room
    return out


def combine(ours: Read, theirs: Read, published: Tensor, shares: tuple[float, float], *, mine_first: bool) -> Combined:
    """The merge of two whole snapshots. `shares`: (the first's, the second's); `mine_first`: the first is ours."""
    merging = Merging(published, shares if mine_first else shares[::-1])
    for piece in flat.pieces(published.numel()):
        merging.add(piece, ours(piece), theirs(piece))
    return merging.result()


def difference(merge: Tensor, ours: Tensor) -> Tensor:
    """The merge minus our own snapshot, written over that."""
    for piece in flat.pieces(merge.numel()):
        torch.sub(merge[piece], ours[piece], out=ours[piece])
    return ours


def _parted(piece: slice, aside: slice) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The parts of a piece that are `aside`, and those that are not, counted from where it begins."""
    size = piece.stop - piece.start
    begin, end = max(piece.start, aside.start) - piece.start, min(piece.stop, aside.stop) - piece.start
    if begin >= end:
        return (), (slice(0, size),)
    return (slice(begin, end),), tuple(part for part in (slice(0, begin), slice(end, size)) if part.start < part.stop)


def _dot(one: Tensor, two: Tensor) -> float:
    return float(torch.dot(one, two))
