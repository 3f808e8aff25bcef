"""The merge of two encoded snapshots in one pass: decode both, weigh them, take their difference, digest and norms, piece by piece.

A state is many times larger than the CPU's cache, so every pass over it costs as much as all the arithmetic in it. Here each piece is
brought in once. Bit-identical on both sides: see `flat.merge`.
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
        difference: [P] float32, the merge minus our own encoded snapshot.
    """

    state: Tensor
    difference: Tensor
    digest: Digest
    own_norm: float
    distance: float  # |theirs - ours|
    drift: float  # |ours - published|
    along: float  # cosine between where they and where we went since our published state; 0 where one did not move


def combine(ours: Read, theirs: Read, published: Tensor, shares: tuple[float, float], *, mine_first: bool) -> Combined:
    """Merge by `shares`, (first's, second's); `mine_first`: the first is ours. NaN and infinity show in `distance`."""
    size = published.numel()
    state, difference = flat.empty(size), flat.empty(size)
    room = torch.empty(min(size, flat.PIECE))
    other = torch.empty_like(room)
    hasher = blake3.blake3()
    own, apart, moved, their_moved, dot = 0.0, 0.0, 0.0, 0.0, 0.0
    for piece in flat.pieces(size):
        mine, yours = ours(piece), theirs(piece)
        first, second = (mine, yours) if mine_first else (yours, mine)
        merged, spare, move = state[piece], room[: len(mine)], other[: len(mine)]
        torch.mul(first, shares[0], out=merged)
        torch.mul(second, shares[1], out=spare)
        merged += spare
        hasher.update(flat.to_bytes(merged))
        torch.sub(merged, mine, out=difference[piece])
        own += _square(mine)
        apart += _square(torch.sub(yours, mine, out=spare))
        moved += _square(torch.sub(mine, published[piece], out=move))
        their_moved += _square(torch.add(spare, move, out=spare))
        dot += float(torch.dot(spare, move))
    both = math.sqrt(moved) * math.sqrt(their_moved) if math.isfinite(moved * their_moved) else 0.0
    along = dot / both if both > 0 else 0.0
    return Combined(state, difference, Digest(hasher.digest()), math.sqrt(own), math.sqrt(apart), math.sqrt(moved), along)


def _square(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) ** 2
