"""Both encoded snapshots of an exchange, in the memory of one state.

Ours as it was copied fills a buffer of P float32 parameters. Of each piece, ours in encoded form takes less than half of its place, so
theirs fits behind it; and where both were, the merge fits in the end. So an exchange takes one state beside the published one, from the
copy of the live block to what is published next. What is computed from the two (our decoded snapshot, the merge, the difference) is made
piece by piece when it is needed, and is the same each time. For codecs that are light to decode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocktrain.node.compute import flat
from blocktrain.node.compute.codecs import Codec
from blocktrain.node.compute.merging import weigh
from blocktrain.node.compute.piecemeal import Reading
from blocktrain.node.ports import Buffer


def fits(coder: Codec, size: int) -> bool:
    """Whether a pair of snapshots of `size` parameters can be kept so."""
    counts = {piece.stop - piece.start for piece in (slice(0, min(size, flat.PIECE)), *flat.pieces(size))}
    return coder.light and all(2 * coder.encoded_bytes(count) <= 4 * count for count in counts)


class Pair:
    """`place_P` [P] float32, contiguous on the CPU: our copy now, the merge when it is settled. Not for two threads at a time.

    What `ours`, `theirs` and `merge` return is written over by the next call of the same one, or of `merge`.
    """

    def __init__(self, coder: Codec, place_P: Tensor) -> None:
        self._coder = coder
        self._place = place_P
        self._bytes = place_P.numpy().data.cast("B")
        self._rooms = flat.empty(2 * flat.PIECE).view(2, -1)  # ours and theirs, a piece of each at a time
        self._settled = False

    def keep_ours(self, piece: slice, payload: Buffer) -> None:
        """From here on the piece is what others decode of it."""
        self._bytes[self._part(piece, 0)] = payload

    def keep_theirs(self, piece: slice, payload: Buffer) -> None:
        """Ours of this piece is kept already."""
        self._bytes[self._part(piece, 1)] = payload

    def payload(self, piece: slice) -> memoryview:
        """Ours of a piece that is kept, encoded. To be copied at once: it is gone when both snapshots are."""
        return self._bytes[self._part(piece, 0)]

    def ours(self, piece: slice) -> Tensor:
        assert not self._settled, "the snapshots are gone"
        return self._decoded(piece, 0)

    def theirs(self, piece: slice) -> Tensor:
        assert not self._settled, "the snapshots are gone"
        return self._decoded(piece, 1)

    def merge(self, piece: slice, shares: tuple[float, float]) -> Tensor:
        """`shares`: (ours, theirs)."""
        mine, theirs = self.ours(piece), self.theirs(piece)
        return weigh(mine, theirs, shares, out=mine, room=theirs)

    def reading_ours(self) -> Reading:
        return Reading(self.ours, self._place.numel())

    def reading_merge(self, shares: tuple[float, float]) -> Reading:
        return Reading(lambda piece: self.merge(piece, shares), self._place.numel())

    def settle(self, live_P: Tensor, shares: tuple[float, float]) -> Tensor:
        """live_P += merge - ours. Returns the merge, [P], which has taken the place of both snapshots: once only."""
        assert not self._settled, "the snapshots are gone"
        self._settled = True
        for piece in flat.pieces(self._place.numel()):
            mine, theirs = self._decoded(piece, 0), self._decoded(piece, 1)
            merged = weigh(mine, theirs, shares, out=self._place[piece], room=theirs)  # over what both were decoded from
            live_P[piece] += torch.sub(merged, mine, out=mine)
        return self._place

    def _part(self, piece: slice, which: int) -> slice:
        size = self._coder.encoded_bytes(piece.stop - piece.start)
        begin = 4 * piece.start + which * size
        return slice(begin, begin + size)

    def _decoded(self, piece: slice, which: int) -> Tensor:
        count = piece.stop - piece.start
        return self._coder.reader(self._bytes[self._part(piece, which)], count, room=self._rooms[which])(slice(0, count))
