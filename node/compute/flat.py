"""All parameters of a block as one buffer, in name order: a snapshot is one copy, a merge one addition, a state one piece of bytes.

P is the number of parameters. States travel and are digested as float32, little endian.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import blake3
import numpy as np
import torch
from torch import Tensor, nn

from blocktrain.node.compute.model import Block
from blocktrain.node.ports import Buffer
from blocktrain.node.room import room
from blocktrain.protocol.errors import PeerFault
from blocktrain.protocol.ids import Digest
from blocktrain.protocol.manifest import Manifest

PIECE: Final = 1 << 17  # elements per call over a whole state: temporaries stay in the CPU's cache, and no call is long
_DIGEST_BYTES: Final = 4 << 20  # per call of the hash


class Flat:
    """Moves a block's parameters into one buffer, on the device where they are, and gives them a gradient buffer if wanted.

    Attributes:
        data: [P] float32; the block's parameters are views of it.
        grad: [P] float32, the parameters' gradients; None without gradients.
        shapes: name → shape, in name order.
    """

    def __init__(self, block: nn.Module, *, gradients: bool = False) -> None:
        named = dict(sorted(block.named_parameters()))
        self.shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        self.data = torch.cat([parameter.detach().reshape(-1) for parameter in named.values()])
        self.grad = torch.zeros_like(self.data) if gradients else None
        grads = self.views(self.grad) if self.grad is not None else {}
        for name, view in self.views(self.data).items():
            named[name].data = view
            named[name].requires_grad_(gradients)
            if gradients:
                named[name].grad = grads[name]

    @property
    def size(self) -> int:
        return self.data.numel()

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """A buffer of P elements as named tensors that share its memory."""
        return views(self.shapes, buffer)


def views(shapes: Mapping[str, tuple[int, ...]], buffer: Tensor) -> dict[str, Tensor]:
    """A buffer as the named tensors of `shapes`, one after the other; they share its memory."""
    out: dict[str, Tensor] = {}
    begin = 0
    for name, shape in shapes.items():
        end = begin + int(np.prod(shape))
        out[name] = buffer[begin:end].view(shape)
        begin = end
    return out


def shapes_of(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Name → shape of the parameters of any block of a run, in name order. Allocates nothing."""
    with torch.device("meta"):
        block = Block(manifest, 0)
    return {name: tuple(parameter.shape) for name, parameter in sorted(block.named_parameters())}


def count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """P of these shapes."""
    return sum(int(np.prod(shape)) for shape in shapes.values())


def place(shapes: Mapping[str, tuple[int, ...]], name: str) -> slice:
    """Where a parameter lies in a state; an empty slice if there is none of this name."""
    begin = 0
    for each, shape in shapes.items():
        end = begin + int(np.prod(shape))
        if each == name:
            return slice(begin, end)
        begin = end
    return slice(0, 0)


def to_bytes(state: Tensor) -> memoryview:
    """A CPU buffer of float32 as read-only bytes, without a copy where the machine is little endian."""
    return state.numpy().astype("<f4", copy=False).data.cast("B").toreadonly()


def from_bytes(payload: Buffer, size: int) -> Tensor:
    """A state of `size` parameters as it travelled, copied. Raises: PeerFault: other than 4 bytes a parameter."""
    view = memoryview(payload).cast("B")
    if len(view) != 4 * size:
        raise PeerFault(f"a state of {len(view)} bytes; this block's has {4 * size}")
    out = empty(size)
    out.numpy()[:] = np.frombuffer(view, "<f4")
    return out


def empty(size: int) -> Tensor:
    """A state, its values not set yet."""
    return torch.from_numpy(memory(4 * size).view(np.float32))


def memory(size_bytes: int) -> np.ndarray[Any, Any]:
    """Bytes [size_bytes], uint8, their values not set yet, which go back to the system as soon as nobody holds them (room.py)."""
    return np.frombuffer(room(size_bytes), np.uint8)


def digest(payload: Buffer) -> Digest:
    """blake3 of bytes."""
    hasher = blake3.blake3()
    view = memoryview(payload).cast("B")
    for begin in range(0, len(view), _DIGEST_BYTES):
        hasher.update(view[begin : begin + _DIGEST_BYTES])
    return Digest(hasher.digest())


def pieces(size: int) -> Iterator[slice]:
    """Slices over `size` elements, each of at most PIECE."""
    for begin in range(0, size, PIECE):
        yield slice(begin, min(size, begin + PIECE))


def norm(a: Tensor) -> float:
    """Euclidean norm; NaN or infinite where an element is. (Some 15 times faster than asking each element.)"""
    return float(norm_on_device(a))


def norm_on_device(a: Tensor) -> Tensor:
    """The same as a float64 scalar, without waiting for the device. Summed over pieces: float32 would drown in billions of squares."""
    norms = torch.stack([torch.linalg.vector_norm(a[piece]) for piece in pieces(a.numel())])
    return norms.double().square().sum().sqrt()


def distance(a: Tensor, b: Tensor) -> float:
    """Euclidean norm of a - b."""
    squares = [torch.linalg.vector_norm(a[piece] - b[piece]) for piece in pieces(a.numel())]
    return float(torch.linalg.vector_norm(torch.stack(squares).double()))


def merge(first: Tensor, second: Tensor, shares: tuple[float, float], out: Tensor | None = None) -> Tensor:
    """first · shares[0] + second · shares[1], bit-identical on every machine. `first` is the lower peer id's.

    Two products and a sum, each rounded by itself, on the CPU: a fused multiply-add would round differently from machine to machine.
    """
    out = empty(first.numel()) if out is None else out
    for piece in pieces(first.numel()):
        torch.mul(first[piece], shares[0], out=out[piece])
        out[piece] += second[piece] * shares[1]
    return out
