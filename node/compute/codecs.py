"""How a snapshot travels: fp32, bf16, int8 in blocks, or sparse. What a codec loses stays with the sender as error feedback (design §5).

Decoding is exact arithmetic, so both sides of an exchange decode the same numbers from the same bytes. Everything runs on the CPU in
pieces that stay in its cache. P is the number of parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from blocktrain.node.compute import flat
from blocktrain.node.ports import Buffer
from blocktrain.protocol.errors import PeerFault

BLOCK: Final = 256  # what codecs deal in; a power of two, as `flat.PIECE` is
INT8_BLOCK: Final = BLOCK  # values that share a scale: 1.6 % of scales, and an outlier spoils only its neighbours
SPARSE_BLOCK: Final = BLOCK
SPARSE_KEPT: Final = 108  # of every 256 differences: two sizes, a map and 108 quarter bytes are 63 bytes; 1/16 of fp32 would be 64
_FITS: Final = 2  # of the two sizes to the kept differences; more change nothing

Read: TypeAlias = Callable[[slice], Tensor]  # one of `flat.pieces` → its values; a buffer that the next call may overwrite


def read_all(read: Read, out_P: Tensor) -> Tensor:
    """Fill `out_P`, and return it."""
    for piece in flat.pieces(out_P.numel()):
        out_P[piece] = read(piece)
    return out_P


class Codec(Protocol):
    """Encodes states of any size. `reference`: a state that both sides hold, for codecs that send differences; others ignore it.

    Attributes:
        light: decoding takes no longer than a few copies and needs no reference, so that it may be done again rather than kept.
    """

    light: bool

    def encoded_bytes(self, size: int) -> int:
        """Bytes of an encoded state of `size` parameters."""
        ...

    def encode(self, state_P: Tensor, reference_P: Tensor | None = None) -> memoryview:
        """A CPU float32 state as read-only bytes, of which nobody else holds the memory."""
        ...

    def reader(self, payload: Buffer, size: int, reference_P: Tensor | None = None, room: Tensor | None = None) -> Read:
        """Decodes piece by piece. Raises: PeerFault: not exactly the bytes that this size needs; also while reading.

        `room`: float32 for a piece in whole `BLOCK`s, where the values go that it returns; by default memory of its own.
        """
        ...

    def decode(self, payload: Buffer, size: int, reference_P: Tensor | None = None) -> Tensor:
        """The state [size] float32, in memory of its own. Raises: PeerFault: as `reader`."""
        ...


class _Whole:
    """`decode` by `reader`."""

    light = True

    def encoded_bytes(self, size: int) -> int:
        raise NotImplementedError

    def reader(self, payload: Buffer, size: int, reference_P: Tensor | None = None, room: Tensor | None = None) -> Read:
        raise NotImplementedError

    def decode(self, payload: Buffer, size: int, reference_P: Tensor | None = None) -> Tensor:
        return read_all(self.reader(payload, size, reference_P), flat.empty(size))

    def _checked(self, payload: Buffer, size: int) -> memoryview:
        view = memoryview(payload).cast("B")
        if len(view) != self.encoded_bytes(size):
            raise PeerFault(f"an encoded snapshot of {len(view)} bytes; this block's has {self.encoded_bytes(size)}")
        return view


class Fp32(_Whole):
    """4 bytes a parameter, nothing lost."""

    def encoded_bytes(self, size: int) -> int:
        return 4 * size

    def encode(self, state_P: Tensor, reference_P: Tensor | None = None) -> memoryview:
        return flat.to_bytes(flat.empty(state_P.numel()).copy_(state_P))

    def reader(self, payload: Buffer, size: int, reference_P: Tensor | None = None, room: Tensor | None = None) -> Read:
        values = np.frombuffer(self._checked(payload, size), "<f4")
        buffer = _buffer(size) if room is None else room

        def read(piece: slice) -> Tensor:
            out = buffer[: piece.stop - piece.start]
            out.numpy()[:] = values[piece]
            return out

        return read


class Bf16(_Whole):
    """2 bytes a parameter: the upper half of each float32, rounded to nearest even."""

    def encoded_bytes(self, size: int) -> int:
        return 2 * size

    def encode(self, state_P: Tensor, reference_P: Tensor | None = None) -> memoryview:
        bits = flat.memory(2 * state_P.numel()).view(np.int16)
        half = torch.from_numpy(bits).view(torch.bfloat16)
        for piece in flat.pieces(state_P.numel()):
            half[piece].copy_(state_P[piece])
        return _bytes(bits.astype("<i2", copy=False))

    def reader(self, payload: Buffer, size: int, reference_P: Tensor | None = None, room: Tensor | None = None) -> Read:
        view = self._checked(payload, size)
        bits = np.frombuffer(view, "<i2")
        buffer = _buffer(size) if room is None else room
        if not view.readonly and sys.byteorder == "little":  # PyTorch wraps no memory that it must not write to
            whole = torch.from_numpy(bits).view(torch.bfloat16)
            return lambda piece: buffer[: piece.stop - piece.start].copy_(whole[piece])
        half = _buffer(size, torch.bfloat16)

        def read(piece: slice) -> Tensor:
            part = half[: piece.stop - piece.start]
            part.view(torch.int16).numpy()[:] = bits[piece]
            return buffer[: piece.stop - piece.start].copy_(part)

        return read


class Int8(_Whole):
    """1 byte a parameter and a float32 scale for every 256: first all scales, then all values. Off by at most half a scale."""

    def encoded_bytes(self, size: int) -> int:
        return 4 * _blocks(size, INT8_BLOCK) + size

    def encode(self, state_P: Tensor, reference_P: Tensor | None = None) -> memoryview:
        size = state_P.numel()
        scales = np.empty(_blocks(size, INT8_BLOCK), "<f4")
        out = flat.memory(self.encoded_bytes(size))
        values = torch.from_numpy(out[4 * len(scales) :].view(np.int8))
        for piece in flat.pieces(size):
            rows = _rows(state_P[piece], INT8_BLOCK)
            scale, coded = _quantised(rows, 127)
            values[piece].copy_(coded.flatten()[: piece.stop - piece.start])
            scales[_of_blocks(piece, INT8_BLOCK)] = scale.numpy()
        out[: 4 * len(scales)] = scales.view(np.uint8)
        return out.data.toreadonly()

    def reader(self, payload: Buffer, size: int, reference_P: Tensor | None = None, room: Tensor | None = None) -> Read:
        view = self._checked(payload, size)
        blocks = _blocks(size, INT8_BLOCK)
        scales = torch.from_numpy(np.frombuffer(view[: 4 * blocks], "<f4").astype(np.float32))
        values = np.frombuffer(view[4 * blocks :], np.int8)
        buffer = _in_blocks(size) if room is None else room

        def read(piece: slice) -> Tensor:
            count = piece.stop - piece.start
            buffer[:count].numpy()[:] = values[piece]
            scale = scales[_of_blocks(piece, INT8_BLOCK)]
            rows = buffer[: len(scale) * INT8_BLOCK].view(-1, INT8_BLOCK)
            rows *= scale[:, None]
            return buffer[:count]

        return read


class Sparse(_Whole):
    """The largest differences from the reference: `kept` of every 256, each as its sign and one of two sizes.

    What replicas differ by after some steps of Adam has thin tails: a sixth of the differences holds not half of their energy, so at a
    given number of bytes many rough values say more than few fine ones. The two sizes are fitted to each 256 by the means of the smaller
    and of the larger kept ones, so a snapshot is never further from the state than the reference is. What is left out is a difference
    again next time, in the sender's live copy.

    All pairs of sizes (bfloat16, the smaller first), then all maps of what is kept (32 bytes, lowest bit first), then all values: 2 bits
    each, in the order of the map, the first lowest; bit 0 is "minus", bit 1 "the larger size".
    """

    light = False

    def __init__(self, kept: int = SPARSE_KEPT) -> None:
        assert 0 < kept < SPARSE_BLOCK
        assert kept % 4 == 0
        self._kept = kept

    def encoded_bytes(self, size: int) -> int:
        return _blocks(size, SPARSE_BLOCK) * (4 + SPARSE_BLOCK // 8 + self._kept // 4)

    def encode(self, state_P: Tensor, reference_P: Tensor | None = None) -> memoryview:
        assert reference_P is not None, "a sparse snapshot needs a reference"
        size = state_P.numel()
        out = flat.memory(self.encoded_bytes(size))
        sizes, maps, values = self._parts(out, size)
        for piece in flat.pieces(size):
            rows = _rows(state_P[piece] - reference_P[piece], SPARSE_BLOCK)
            mask = torch.zeros_like(rows, dtype=torch.bool)
            mask.scatter_(1, rows.abs().topk(self._kept, dim=1, sorted=False).indices, True)
            kept = rows[mask].view(-1, self._kept)
            two, large = _two_sizes(kept.abs())
            codes = ((kept < 0) + 2 * large.to(torch.uint8)).numpy().reshape(len(kept), -1, 4)
            blocks = _of_blocks(piece, SPARSE_BLOCK)
            sizes[blocks] = two.bfloat16().view(torch.int16).numpy()
            maps[blocks] = np.packbits(mask.numpy(), axis=1, bitorder="little")
            values[blocks] = codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6
        return out.data.toreadonly()

    def reader(self, payload: Buffer, size: int, reference_P: Tensor | None = None, room: Tensor | None = None) -> Read:
        if reference_P is None:
            raise PeerFault("a sparse snapshot, and no reference was agreed on")
        sizes, maps, values = self._parts(np.frombuffer(self._checked(payload, size), np.uint8), size)
        buffer = _in_blocks(size) if room is None else room

        def read(piece: slice) -> Tensor:
            count = piece.stop - piece.start
            blocks = _of_blocks(piece, SPARSE_BLOCK)
            mask = np.unpackbits(maps[blocks], axis=1, bitorder="little").view(bool)
            if (np.count_nonzero(mask, axis=1) != self._kept).any():
                raise PeerFault(f"a sparse snapshot that does not keep {self._kept} of every {SPARSE_BLOCK}")
            two = torch.from_numpy(sizes[blocks].astype(np.int16)).view(torch.bfloat16).float()
            signed = torch.stack((two[:, 0], -two[:, 0], two[:, 1], -two[:, 1]), dim=1)  # by code
            codes = np.stack([values[blocks] >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(len(two), -1)
            buffer[:count] = reference_P[piece]
            rows = buffer[: len(two) * SPARSE_BLOCK].view(-1, SPARSE_BLOCK)
            rows[torch.from_numpy(mask)] += signed.gather(1, torch.from_numpy(codes.astype(np.int64))).flatten()
            return buffer[:count]

        return read

    def _parts(self, whole: np.ndarray[Any, Any], size: int) -> tuple[np.ndarray[Any, Any], ...]:
        """Sizes [blocks, 2], maps [blocks, 32] and values [blocks, bytes] of an encoded state, as views of it."""
        blocks = _blocks(size, SPARSE_BLOCK)
        first, second = 4 * blocks, (4 + SPARSE_BLOCK // 8) * blocks
        return whole[:first].view("<i2").reshape(blocks, 2), whole[first:second].reshape(blocks, -1), whole[second:].reshape(blocks, -1)


CODECS: Final[Mapping[str, Codec]] = {"fp32": Fp32(), "bf16": Bf16(), "int8": Int8()}
DIFFERENCES: Final[Mapping[str, Codec]] = {"sparse": Sparse()}  # these need a reference


def codec_of(name: str) -> Codec:
    """Raises: PeerFault: a codec that this version does not have."""
    codec = CODECS.get(name) or DIFFERENCES.get(name)
    if codec is None:
        raise PeerFault(f"the codec {name[:20]!r} is not known here; known are {', '.join((*CODECS, *DIFFERENCES))}")
    return codec


def _quantised(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """A scale for each row, and the row in whole numbers of it, from -most to most, int8."""
    scale = rows.abs().amax(dim=1) / most  # twenty times as fast as their norm of order infinity
    divisor = torch.where(scale > 0, scale, 1.0)  # all zeros, or so small that their scale is: they become zeros
    return scale, (rows / divisor[:, None]).round_().clamp_(-most, most).to(torch.int8)


def _two_sizes(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the two sizes [rows, 2] that stand for its magnitudes with little error, and which of them are the larger one, bool."""
    border = magnitudes.mean(dim=1, keepdim=True)
    total, count = magnitudes.sum(dim=1, keepdim=True), magnitudes.shape[1]
    for _ in range(_FITS):
        large = magnitudes > border
        many = large.sum(dim=1, keepdim=True)
        of_large = (magnitudes * large).sum(dim=1, keepdim=True)
        two = torch.cat(((total - of_large) / (count - many).clamp(min=1), of_large / many.clamp(min=1)), dim=1).clamp_(min=0)
        border = two.mean(dim=1, keepdim=True)
    return two, large


def _bytes(array: np.ndarray[Any, Any]) -> memoryview:
    return array.data.cast("B").toreadonly()


def _buffer(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(min(size, flat.PIECE), dtype=dtype)


def _in_blocks(size: int) -> Tensor:
    return torch.zeros(min(_blocks(size, BLOCK) * BLOCK, flat.PIECE))


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _of_blocks(piece: slice, block: int) -> slice:
    """The blocks of a piece; pieces begin where blocks do."""
    return slice(piece.start // block, _blocks(piece.stop, block))


def _rows(values: Tensor, block: int) -> Tensor:
    """Values in rows of one block each, the last filled up with zeros."""
    missing = -values.numel() % block
    if missing:
        values = torch.cat((values, values.new_zeros(missing)))
    return values.view(-1, block)
