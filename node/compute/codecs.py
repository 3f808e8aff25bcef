"""How a snapshot travels: fp32, bf16 or int8 in blocks. What a codec loses stays with the sender as error feedback (design §5).

Decoding is exact arithmetic, so both sides of an exchange decode the same numbers from the same bytes. Everything runs on the CPU in
pieces. P is the number of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from blocktrain.node.compute import flat
from blocktrain.node.ports import Buffer
from blocktrain.protocol.errors import PeerFault

INT8_BLOCK: Final = 256  # values that share a scale: 1.6 % of scales, and an outlier spoils only its neighbours


class Codec(Protocol):
    """Encodes states of any size. `reference`: a state that both sides hold, for codecs that send differences; others ignore it."""

    def encoded_bytes(self, size: int) -> int:
        """Bytes of an encoded state of `size` parameters."""
        ...

    def encode(self, state_P: Tensor, reference_P: Tensor | None = None) -> memoryview:
        """A CPU float32 state as read-only bytes, of which nobody else holds the memory."""
        ...

    def decode(self, payload: Buffer, size: int, reference_P: Tensor | None = None) -> Tensor:
        """The state [size] float32, in memory of its own. Raises: PeerFault: not exactly the bytes that this size needs."""
        ...


class Fp32:
    """4 bytes a parameter, nothing lost."""

    def encoded_bytes(self, size: int) -> int:
        return 4 * size

    def encode(self, state_P: Tensor, reference_P: Tensor | None = None) -> memoryview:
        return flat.to_bytes(state_P.clone())

    def decode(self, payload: Buffer, size: int, reference_P: Tensor | None = None) -> Tensor:
        return flat.from_bytes(_exactly(payload, self.encoded_bytes(size)), size)


class Bf16:
    """2 bytes a parameter: the upper half of each float32, rounded to nearest even."""

    def encoded_bytes(self, size: int) -> int:
        return 2 * size

    def encode(self, state_P: Tensor, reference_P: Tensor | None = None) -> memoryview:
        half = torch.empty(state_P.numel(), dtype=torch.bfloat16)
        for piece in flat.pieces(state_P.numel()):
            half[piece].copy_(state_P[piece])
        return half.view(torch.int16).numpy().astype("<i2", copy=False).data.cast("B").toreadonly()

    def decode(self, payload: Buffer, size: int, reference_P: Tensor | None = None) -> Tensor:
        bits = np.frombuffer(_exactly(payload, self.encoded_bytes(size)), "<i2")
        out = torch.empty(size)
        half = torch.empty(min(size, flat.PIECE), dtype=torch.bfloat16)
        for piece in flat.pieces(size):
            part = half[: piece.stop - piece.start]
            part.view(torch.int16).numpy()[:] = bits[piece]
            out[piece].copy_(part)
        return out


class Int8:
    """1 byte a parameter and a float32 scale for every 256: first all scales, then all values. Off by at most half a scale."""

    def encoded_bytes(self, size: int) -> int:
        return 4 * _blocks(size) + size

    def encode(self, state_P: Tensor, reference_P: Tensor | None = None) -> memoryview:
        size = state_P.numel()
        scales = np.empty(_blocks(size), "<f4")
        out = np.empty(self.encoded_bytes(size), np.uint8)
        values = out[4 * len(scales) :].view(np.int8)
        for piece in flat.pieces(size):
            rows = _rows(state_P[piece])
            scale = rows.abs().amax(dim=1) / 127
            divisor = torch.where(scale > 0, scale, 1.0)  # all zeros, or so small that their scale is: they become zeros
            coded = (rows / divisor[:, None]).round_().clamp_(-127, 127).to(torch.int8)
            values[piece] = coded.flatten()[: piece.stop - piece.start].numpy()
            scales[piece.start // INT8_BLOCK : piece.start // INT8_BLOCK + len(scale)] = scale.numpy()
        out[: 4 * len(scales)] = scales.view(np.uint8)
        return out.data.toreadonly()

    def decode(self, payload: Buffer, size: int, reference_P: Tensor | None = None) -> Tensor:
        view = _exactly(payload, self.encoded_bytes(size))
        blocks = _blocks(size)
        scales = torch.from_numpy(np.frombuffer(view[: 4 * blocks], "<f4").astype(np.float32))
        values = np.frombuffer(view[4 * blocks :], np.int8)
        out = torch.empty(size)
        for piece in flat.pieces(size):
            rows = _rows(torch.from_numpy(values[piece].astype(np.float32)))
            rows *= scales[piece.start // INT8_BLOCK : piece.start // INT8_BLOCK + len(rows), None]
            out[piece] = rows.flatten()[: piece.stop - piece.start]
        return out


CODECS: Final[Mapping[str, Codec]] = {"fp32": Fp32(), "bf16": Bf16(), "int8": Int8()}


def codec_of(name: str) -> Codec:
    """Raises: PeerFault: a codec that this version does not have."""
    codec = CODECS.get(name)
    if codec is None:
        raise PeerFault(f"the codec {name[:20]!r} is not known here; known are {', '.join(CODECS)}")
    return codec


def _exactly(payload: Buffer, size: int) -> memoryview:
    view = memoryview(payload).cast("B")
    if len(view) != size:
        raise PeerFault(f"an encoded snapshot of {len(view)} bytes; this block's has {size}")
    return view


def _blocks(size: int) -> int:
    return -(-size // INT8_BLOCK)


def _rows(values: Tensor) -> Tensor:
    """Values in rows of one block each, the last filled up with zeros."""
    missing = -values.numel() % INT8_BLOCK
    if missing:
        values = torch.cat((values, values.new_zeros(missing)))
    return values.view(-1, INT8_BLOCK)
