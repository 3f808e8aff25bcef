"""The merge of two encoded snapshots in one pass: decode both, weigh them, take their difference, digest and norms, piece by piece.

A state is many times larger than the CPU's cache, so every pass over it costs as much as all the arithmetic in it. Here each piece is
brought in once. Bit-identical on both sides: see `flat.merge`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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


def combine(
    ours: Read, theirs: Read, published: Tensor, shares: tuple[float, float], *, mine_first: bool, out: Tensor | None = None
) -> Combined:
    """Merge by `shares`, (first's, second's), into `out`; `mine_first`: the first is ours. NaN and infinity show in `distance`."""
    size = published.numel()
    state = flat.empty(size) if out is None else out
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
        own += _square(mine)
        apart += _square(torch.sub(yours, mine, out=spare))
        moved += _square(torch.sub(mine, published[piece], out=move))
        their_moved += _square(torch.add(spare, move, out=spare))
        dot += float(torch.dot(spare, move))
    both = math.sqrt(moved) * math.sqrt(their_moved) if math.isfinite(moved * their_moved) else 0.0
    along = dot / both if both > 0 else 0.0
    return Combined(state, Digest(hasher.digest()), math.sqrt(own), math.sqrt(apart), math.sqrt(moved), along)


def differences(merge: Tensor, ours: Read) -> Iterator[tuple[slice, Tensor]]:
    """The merge minus our own encoded snapshot, piece by piece; a buffer that the next piece may overwrite."""
    room = torch.empty(min(merge.numel(), flat.PIECE))
    for piece in flat.pieces(merge.numel()):
        yield piece, torch.sub(merge[piece], ours(piece), out=room[: piece.stop - piece.start])


def difference(merge: Tensor, ours: Read) -> Tensor:
    """The merge minus our own encoded snapshot, [P] in memory of its own."""
    out = flat.empty(merge.numel())
    for piece, part in differences(merge, ours):
        out[piece] = part
    return out


def _square(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) ** 2
