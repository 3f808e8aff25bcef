"""How a snapshot travels: fp32, bf16, int8 in blocks, or sparse. What a codec loses stays with the sender as error feedback (design §5).

Decoding is exact arithmetic, so both sides of an exchange decode the same numbers from the same bytes. Everything runs on the CPU in
pieces that stay in its cache. P is the number of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from blocktrain.node.compute import flat
from blocktrain.node.ports import Buffer
from blocktrain.protocol.errors import PeerFault

INT8_BLOCK: Final = 256  # values that share a scale: 1.6 % of scales, and an outlier spoils only its neighbours
SPARSE_BLOCK: Final = 256  # an index in it is one byte
SPARSE_BITS: Final = 4
SPARSE_KEPT: Final = 40  # of every 256 differences: 40 indices, 40 half bytes and a scale are 64 bytes, 1/16 of fp32

Read: TypeAlias = Callable[[slice], Tensor]  # one of `flat.pieces` → its values; a buffer that the next call may overwrite


class Codec(Protocol):
    """Encodes states of any size. `reference`: a state that both sides hold, for codecs that send differences; others ignore it."""

    def encoded_bytes(self, size: int) -> int:
        """Bytes of an encoded state of `size` parameters."""
        ...

    def encode(self, state_P: Tensor, reference_P: Tensor | None = None) -> memoryview:
        """A CPU float32 state as read-only bytes, of which nobody else holds the memory."""
        ...

    def reader(self, payload: Buffer, size: int, reference_P: Tensor | None = None) -> Read:
        """Decodes piece by piece. Raises: PeerFault: not exactly the bytes that this size needs; also while reading."""
        ...

    def decode(self, payload: Buffer, size: int, reference_P: Tensor | None = None) -> Tensor:
        """The state [size] float32, in memory of its own. Raises: PeerFault: as `reader`."""
        ...


class _Whole:
    """`decode` by `reader`."""

    def encoded_bytes(self, size: int) -> int:
        raise NotImplementedError

    def reader(self, payload: Buffer, size: int, reference_P: Tensor | None = None) -> Read:
        raise NotImplementedError

    def decode(self, payload: Buffer, size: int, reference_P: Tensor | None = None) -> Tensor:
        read = self.reader(payload, size, reference_P)
        out = flat.empty(size)
        for piece in flat.pieces(size):
            out[piece] = read(piece)
        return out

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

    def reader(self, payload: Buffer, size: int, reference_P: Tensor | None = None) -> Read:
        values = np.frombuffer(self._checked(payload, size), "<f4")
        buffer = _buffer(size)

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
        bits = np.empty(state_P.numel(), np.int16)
        half = torch.from_numpy(bits).view(torch.bfloat16)
        for piece in flat.pieces(state_P.numel()):
            half[piece].copy_(state_P[piece])
        return _bytes(bits.astype("<i2", copy=False))

    def reader(self, payload: Buffer, size: int, reference_P: Tensor | None = None) -> Read:
        bits = np.frombuffer(self._checked(payload, size), "<i2")
        half = _buffer(size, torch.bfloat16)
        buffer = _buffer(size)

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
        out = np.empty(self.encoded_bytes(size), np.uint8)
        values = torch.from_numpy(out[4 * len(scales) :].view(np.int8))
        for piece in flat.pieces(size):
            rows = _rows(state_P[piece], INT8_BLOCK)
            scale, coded = _quantised(rows, 127)
            values[piece].copy_(coded.flatten()[: piece.stop - piece.start])
            scales[_of_blocks(piece, INT8_BLOCK)] = scale.numpy()
        out[: 4 * len(scales)] = scales.view(np.uint8)
        return out.data.toreadonly()

    def reader(self, payload: Buffer, size: int, reference_P: Tensor | None = None) -> Read:
        view = self._checked(payload, size)
        blocks = _blocks(size, INT8_BLOCK)
        scales = torch.from_numpy(np.frombuffer(view[: 4 * blocks], "<f4").astype(np.float32))
        values = np.frombuffer(view[4 * blocks :], np.int8)
        buffer = torch.zeros(min(_blocks(size, INT8_BLOCK) * INT8_BLOCK, flat.PIECE))

        def read(piece: slice) -> Tensor:
            count = piece.stop - piece.start
            buffer[:count].numpy()[:] = values[piece]
            scale = scales[_of_blocks(piece, INT8_BLOCK)]
            rows = buffer[: len(scale) * INT8_BLOCK].view(-1, INT8_BLOCK)
            rows *= scale[:, None]
            return buffer[:count]

        return read


class Sparse(_Whole):
    """The largest differences from the reference: of every 256 the same number, so that the size is fixed and an index is a byte.

    All scales (float32, one for every 256), then all indices (rising in their block), then all values: whole numbers of `bits` bits, two
    4-bit ones to a byte, the first in the lower half. What is left out is a difference again next time, in the sender's live copy.
    """

    def __init__(self, bits: int = SPARSE_BITS, kept: int = SPARSE_KEPT) -> None:
        assert bits in (4, 8)
        assert kept % 2 == 0
        self._bits = bits
        self._kept = kept
        self._most = 127 if bits == 8 else 7

    def encoded_bytes(self, size: int) -> int:
        return _blocks(size, SPARSE_BLOCK) * (4 + self._kept + self._kept * self._bits // 8)

    def encode(self, state_P: Tensor, reference_P: Tensor | None = None) -> memoryview:
        assert reference_P is not None, "a sparse snapshot needs a reference"
        size = state_P.numel()
        out = np.empty(self.encoded_bytes(size), np.uint8)
        scales, indices, values = self._parts(out, size)
        for piece in flat.pieces(size):
            rows = _rows(state_P[piece] - reference_P[piece], SPARSE_BLOCK)
            index = rows.abs().topk(self._kept, dim=1, sorted=False).indices.sort(dim=1).values
            scale, coded = _quantised(rows.gather(1, index), self._most)
            blocks = _of_blocks(piece, SPARSE_BLOCK)
            scales[blocks] = scale.numpy()
            indices[blocks] = index.numpy()
            values[blocks] = self._packed(coded.numpy().view(np.uint8))
        return out.data.toreadonly()

    def reader(self, payload: Buffer, size: int, reference_P: Tensor | None = None) -> Read:
        if reference_P is None:
            raise PeerFault("a sparse snapshot, and no reference was agreed on")
        scales, indices, values = self._parts(np.frombuffer(self._checked(payload, size), np.uint8), size)
        if self._kept > 1 and (indices[:, 1:] <= indices[:, :-1]).any():
            raise PeerFault("a sparse snapshot whose indices do not rise")
        buffer = torch.zeros(min(_blocks(size, SPARSE_BLOCK) * SPARSE_BLOCK, flat.PIECE))

        def read(piece: slice) -> Tensor:
            count = piece.stop - piece.start
            blocks = _of_blocks(piece, SPARSE_BLOCK)
            buffer[:count] = reference_P[piece]
            scale = torch.from_numpy(scales[blocks].astype(np.float32))
            index = torch.from_numpy(indices[blocks].astype(np.int64))
            value = torch.from_numpy(self._unpacked(values[blocks]).astype(np.float32)) * scale[:, None]
            buffer[: len(scale) * SPARSE_BLOCK].view(-1, SPARSE_BLOCK).scatter_add_(1, index, value)
            return buffer[:count]

        return read

    def _parts(self, whole: np.ndarray[Any, Any], size: int) -> tuple[np.ndarray[Any, Any], ...]:
        """Scales [blocks], indices [blocks, kept] and values [blocks, bytes] of an encoded state, as views of it."""
        blocks = _blocks(size, SPARSE_BLOCK)
        first, second = 4 * blocks, (4 + self._kept) * blocks
        return whole[:first].view("<f4"), whole[first:second].reshape(blocks, -1), whole[second:].reshape(blocks, -1)

    def _packed(self, coded: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return coded if self._bits == 8 else (coded[:, ::2] & 15) | (coded[:, 1::2] << 4)

    def _unpacked(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if self._bits == 8:
            return values.view(np.int8)
        out = np.empty((len(values), self._kept), np.int8)
        out[:, ::2] = (values << 4).view(np.int8) >> 4  # the shift back brings the sign along
        out[:, 1::2] = values.view(np.int8) >> 4
        return out


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
    scale = torch.linalg.vector_norm(rows, float("inf"), dim=1) / most
    divisor = torch.where(scale > 0, scale, 1.0)  # all zeros, or so small that their scale is: they become zeros
    return scale, (rows / divisor[:, None]).round_().clamp_(-most, most).to(torch.int8)


def _bytes(array: np.ndarray[Any, Any]) -> memoryview:
    return array.data.cast("B").toreadonly()


def _buffer(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(min(size, flat.PIECE), dtype=dtype)


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
