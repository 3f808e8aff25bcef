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
        state: [P] float32, the merge.
    """

    state: Tensor
    digest: Digest
    own_norm: float
    distance: float  # |theirs - ours|
    drift: float  # |ours - published|
    along: float  # cosine between where they and where we went since our published state; 0 where one did not move


class Merging:
    """A merge that grows piece by piece, in order. NaN and infinity show in the distance."""

    def __init__(self, published: Tensor, shares: tuple[float, float], *, mine_first: bool) -> None:
        """`shares`: (first's, second's); `mine_first`: the first is ours."""
        self._published = published
        self._mine, self._theirs = shares if mine_first else (shares[1], shares[0])
        self._state = flat.empty(published.numel())
        self._room = torch.empty(min(published.numel(), flat.PIECE))
        self._hasher = blake3.blake3()
        self._own = self._apart = self._moved = self._their_moved = self._dot = 0.0

    def add(self, piece: slice, mine: Tensor, theirs: Tensor) -> None:
        """The next piece."""
        one, two = self._state[piece], self._room[: len(mine)]  # where the merge will be is room for what is asked before
        torch.sub(theirs, mine, out=one)
        self._apart += _dot(one, one)
        torch.sub(mine, self._published[piece], out=two)
        self._moved += _dot(two, two)
        one += two  # theirs - published
        self._their_moved += _dot(one, one)
        self._dot += _dot(one, two)
        self._own += _dot(mine, mine)
        # Two products and a sum, each rounded by itself. A sum has the same bits in either order, so it is the same on both sides.
        torch.mul(mine, self._mine, out=one)
        torch.mul(theirs, self._theirs, out=two)
        one += two
        self._hasher.update(flat.to_bytes(one))

    def result(self) -> Combined:
        """When all pieces were added."""
        both = math.sqrt(self._moved) * math.sqrt(self._their_moved) if math.isfinite(self._moved * self._their_moved) else 0.0
        along = self._dot / both if both > 0 else 0.0
        norms = math.sqrt(self._own), math.sqrt(self._apart), math.sqrt(self._moved)
        return Combined(self._state, Digest(self._hasher.digest()), *norms, along)


def combine(ours: Read, theirs: Read, published: Tensor, shares: tuple[float, float], *, mine_first: bool) -> Combined:
    """The merge of two whole snapshots."""
    merging = Merging(published, shares, mine_first=mine_first)
    for piece in flat.pieces(published.numel()):
        merging.add(piece, ours(piece), theirs(piece))
    return merging.result()


def difference(merge: Tensor, ours: Tensor) -> Tensor:
    """The merge minus our own snapshot, written over that."""
    for piece in flat.pieces(merge.numel()):
        torch.sub(merge[piece], ours[piece], out=ours[piece])
    return ours


def _dot(one: Tensor, two: Tensor) -> float:
    return float(torch.dot(one, two))
