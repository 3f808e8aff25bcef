"""The two snapshots of one exchange in compute: ours on its way out, theirs on its way in, and the merge of what is there of both.

A snapshot travels as *pieces*: every `flat.PIECE` parameters are encoded by themselves, one after the other, so that the first are on the
wire, and merged over there, while the last are not encoded yet. Where the codec allows it an exchange holds one buffer of P parameters
(pair.py); else two, ours as others decode it and the merge; and what waits to be sent or merged. All are scratch: nothing is used before
theirs is complete, its digest is right, and the merge was judged. Runs on the replica's worker, never on two threads at once.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import blake3
import numpy as np
from torch import Tensor

from blocktrain.node.compute import flat
from blocktrain.node.compute.codecs import Codec
from blocktrain.node.compute.merging import Combined, Merging
from blocktrain.node.compute.pair import Pair, fits
from blocktrain.node.compute.trainer import TrainingFailed
from blocktrain.node.ports import Buffer
from blocktrain.node.room import room
from blocktrain.protocol.errors import PeerFault
from blocktrain.protocol.ids import Digest

NOT_FINITE: Final = "training stopped: the parameters are not finite; the run's schedule.learning_rate may be too high"


class Halves:
    """Both snapshots of an exchange.

    Attributes:
        ours: [P] float32 on the CPU: our parameters; where they were encoded, room for either `pair` or what others decode of them.
        pair: both encoded snapshots; None: ours lies in `ours`, and the merge in memory of its own.
        size: bytes of each encoded snapshot.
        checks: whether what is not finite is refused to be sent.
    """

    def __init__(
        self,
        coder: Codec,
        ours: Tensor,
        published: Tensor,
        reference: Tensor | None = None,
        *,
        whole: bool = False,
        aside: slice = slice(0, 0),
    ) -> None:
        """`published`: our published state when `ours` was taken; `reference`: the state that a sparse snapshot is relative to;
        `whole`: the merge and ours are wanted as a whole, whatever memory it takes; `aside`: as `Merging` has it."""
        self.ours = ours
        self.pair = Pair(coder, ours) if not whole and fits(coder, ours.numel()) else None
        self.size = coder.encoded_bytes(ours.numel())
        self.checks = True
        self._coder = coder
        self._aside = aside
        self._published = published
        self._reference = reference
        self._pieces = list(flat.pieces(ours.numel()))
        self._encoded = self._given = 0  # pieces of ours that are
        self._merged = 0  # pieces of theirs that are
        self._unsent: deque[memoryview] = deque()  # encoded and not given yet, where there is no pair that has them
        self._coming: deque[memoryview] = deque()  # bytes of theirs that do not fill a piece yet
        self._coming_bytes = self._came_bytes = 0
        self._sent, self._came = blake3.blake3(), blake3.blake3()
        self._merging: Merging | None = None

    # ---- ours -------------------------------------------------------------------------------------------------------------------

    def give(self, most_bytes: int) -> memoryview:
        """The next bytes of our encoded snapshot: pieces of so many bytes together, one at least; nothing after the last.

        Raises: TrainingFailed: our own parameters are not numbers any more, so that nobody may get them.
        """
        one = self._coder.encoded_bytes(min(flat.PIECE, self.ours.numel()))
        last = min(len(self._pieces), self._given + max(1, most_bytes // one))
        given = self._pieces[self._given : last]
        out = room(sum(self._coder.encoded_bytes(piece.stop - piece.start) for piece in given))
        begin = 0
        for _ in given:
            payload = self._give()
            out[begin : begin + len(payload)] = payload
            begin += len(payload)
        return out.toreadonly()

    def _give(self) -> memoryview:
        """The next piece of ours, which may have been encoded before it was asked for, as the other side is ahead of us."""
        piece = self._pieces[self._given]
        self._given += 1
        if self._given > self._encoded:
            return self._encode()
        return self._unsent.popleft() if self.pair is None else self.pair.payload(piece)

    @property
    def digest(self) -> Digest:
        """Of our encoded snapshot, when all of it was given."""
        assert self._encoded == len(self._pieces)
        return Digest(self._sent.digest())

    def _encode(self) -> memoryview:
        """The next piece of ours, which from here on is what the others see of it."""
        piece = self._pieces[self._encoded]
        values = self.ours[piece]
        if self.checks and not np.isfinite(flat.norm(values)):
            raise TrainingFailed(NOT_FINITE)
        payload = self._coder.encode(values, self._reference_of(piece))
        self._sent.update(payload)
        if self.pair is not None:
            self.pair.keep_ours(piece, payload)
        else:
            values.copy_(self._decoded(piece, payload))
        self._encoded += 1
        return payload

    def _decoded(self, piece: slice, payload: memoryview) -> Tensor:
        count = piece.stop - piece.start
        return self._coder.reader(payload, count, self._reference_of(piece))(slice(0, count))

    def _reference_of(self, piece: slice) -> Tensor | None:
        return None if self._reference is None else self._reference[piece]

    # ---- theirs -----------------------------------------------------------------------------------------------------------------

    def meet(self, shares: tuple[float, float], *, mine_first: bool) -> None:
        """Theirs will come, to be merged by these shares: (the first's, the second's); `mine_first`: the first is ours."""
        self._merging = Merging(self._published, shares if mine_first else shares[::-1], keep=self.pair is None, aside=self._aside)

    def take(self, data: Buffer) -> None:
        """The next bytes of theirs. Raises: PeerFault: more than a snapshot has, or not decodable."""
        view = memoryview(data).cast("B")
        self._came_bytes += len(view)
        if self._came_bytes > self.size:
            raise PeerFault(f"an encoded snapshot of {self._came_bytes} bytes or more; this block's has {self.size}")
        self._came.update(view)
        self._coming.append(view)
        self._coming_bytes += len(view)
        while self._merged < len(self._pieces):
            piece = self._pieces[self._merged]
            payload = self._next(self._coder.encoded_bytes(piece.stop - piece.start))
            if payload is None:
                return
            self._merge(piece, payload)

    def _next(self, size: int) -> memoryview | None:
        """So many of the bytes that came, or None while there are fewer."""
        if self._coming_bytes < size:
            return None
        self._coming_bytes -= size
        first = self._coming.popleft()
        if len(first) < size:
            first = memoryview(b"".join((first, *self._coming)))
            self._coming.clear()
        if len(first) > size:
            self._coming.appendleft(first[size:])
        return first[:size]

    def _merge(self, piece: slice, payload: memoryview) -> None:
        assert self._merging is not None, "nobody said under which terms"
        while self._encoded <= self._merged:
            ours = self._encode()
            if self.pair is None:
                self._unsent.append(ours)
        if self.pair is not None:
            self.pair.keep_theirs(piece, payload)
            self._merging.add(piece, self.pair.ours(piece), self.pair.theirs(piece))
        else:
            self._merging.add(piece, self.ours[piece], self._decoded(piece, payload))
        self._merged += 1

    @property
    def shares(self) -> tuple[float, float]:
        """(Ours, theirs), as `meet` was told."""
        assert self._merging is not None, "nobody said under which terms"
        return self._merging.shares

    def finish(self, digest: Digest) -> Combined:
        """The merge, when all of theirs is there and has this digest. Raises: PeerFault."""
        assert self._merging is not None, "nobody said under which terms"
        if self._came_bytes != self.size:
            raise PeerFault(f"an encoded snapshot of {self._came_bytes} bytes; this block's has {self.size}")
        if self._came.digest() != digest:
            raise PeerFault("the snapshot does not have the digest that was announced")
        return self._merging.result()
