"""A block at work whose parameters are nowhere as a whole: each is made when an operation asks for it, a tile at a time.

While an exchange is judged, its merge exists as two encoded snapshots. To measure it on held-out text needs every parameter of it once,
and no two of them at the same time. Matrices are multiplied by a few rows at a time and embeddings looked up likewise, so that what exists
at once is a tile and what flows through the block, however large the block is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from blocktrain.node.compute import flat
from blocktrain.node.compute.codecs import Read
from blocktrain.node.room import room

TILE: Final = 1 << 17  # elements of a matrix that exist at once


class Reading:
    """A state of `size` parameters that is made piece by piece, as it is read. For one thread."""

    def __init__(self, read: Read, size: int) -> None:
        """`read`: the values of one of `flat.pieces`, which stay until it is called again."""
        self.size = size
        self._read = read
        self._at = -1  # which piece was made last
        self._piece = torch.empty(0)

    def fill(self, begin: int, out: Tensor) -> Tensor:
        """The parameters from `begin` on into a contiguous buffer, which is returned."""
        done, count = 0, out.numel()
        to = out.view(-1)
        while done < count:
            at, skipped = divmod(begin + done, flat.PIECE)
            if at != self._at:
                self.let_go()
                self._piece = self._read(slice(at * flat.PIECE, min(self.size, (at + 1) * flat.PIECE)))
                self._at = at
            part = self._piece[skipped : skipped + count - done]
            to[done : done + part.numel()] = part
            done += part.numel()
        return out

    def let_go(self) -> None:
        """Keep no piece: there is to be one at a time."""
        self._at, self._piece = -1, torch.empty(0)


def stand_in(shape: tuple[int, ...]) -> Tensor:
    """Looks like a float32 parameter, and has no memory. Not a number, so that a use of it that nobody caught does not go unseen."""
    return torch.full((), float("nan")).expand(shape)


class Piecemeal(TorchFunctionMode):
    """While it is entered, operations on parameters that are stand-ins get the values of a reading. Without gradients."""

    def __init__(self, reading: Reading, begins: Mapping[Tensor, int]) -> None:
        """`begins`: parameter → where it begins in the state."""
        super().__init__()
        self._reading = reading
        self._begins = begins
        self._room = flat.empty(TILE)
        self._rooms = _Rooms()
        self._fresh: Tensor | None = None  # the newest product, which only its caller has: it may be written over

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # its shape, type or device, which a stand-in has as well
            return func(*args, **(kwargs or {}))
        if func is F.linear and not kwargs and len(args) == 2 and self._is_ours(args[1]):
            return self._linear(*args)
        if func is F.gelu and len(args) == 1 and args[0] is self._fresh:
            return torch.ops.aten.gelu_(*args, **(kwargs or {}))
        if func is F.embedding and not kwargs and len(args) == 2 and self._is_ours(args[1]):
            return self._embedding(*args)
        return func(*(self._whole(each) for each in args), **{name: self._whole(each) for name, each in (kwargs or {}).items()})

    def _is_ours(self, value: object) -> bool:
        return isinstance(value, Tensor) and value in self._begins

    def _whole(self, value: Any) -> Any:
        return self._reading.fill(self._begins[value], torch.empty(value.shape)) if self._is_ours(value) else value

    def _tiles(self, weight: Tensor) -> Iterator[tuple[slice, Callable[[], Tensor]]]:
        """Slices of the rows of a matrix, and what makes them; each overwrites the one before."""
        rows, width = weight.shape
        begin, many = self._begins[weight], max(1, TILE // width)
        room = self._room[: many * width].view(many, width) if many * width <= TILE else torch.empty(many, width)
        for first in range(0, rows, many):
            tile = slice(first, min(rows, first + many))
            yield tile, lambda tile=tile: self._reading.fill(begin + tile.start * width, room[: tile.stop - tile.start])  # type: ignore[misc]

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        self._fresh = None
        flat_x = x.reshape(-1, x.shape[-1])
        out = self._rooms.take(len(flat_x) * weight.shape[0]).view(len(flat_x), -1)
        for tile, make in self._tiles(weight):
            torch.mm(flat_x, make().t(), out=out[:, tile])
        self._fresh = out.view(*x.shape[:-1], -1)
        return self._fresh

    def _embedding(self, at: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty(*at.shape, weight.shape[1])
        flat_at, flat_out = at.reshape(-1), out.view(-1, weight.shape[1])
        for tile, make in self._tiles(weight):
            (here,) = ((flat_at >= tile.start) & (flat_at < tile.stop)).nonzero(as_tuple=True)
            if len(here):
                flat_out[here] = make()[flat_at[here] - tile.start]
        return out


class _Rooms:
    """Memory for results, in turns: that of one which nobody has any more is the next one's. On the heap each would leave a hole."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self, size: int) -> Tensor:
        """[size] float32, its values not set yet."""
        fitting = [index for index, memory in enumerate(self._free) if len(memory) >= 4 * size]
        if fitting:
            memory = self._free.pop(min(fitting, key=lambda index: len(self._free[index])))
        else:
            self._free.clear()  # all too small: what comes next is served by the larger one
            memory = room(4 * size)
        array = np.frombuffer(memory, np.float32, size)
        weakref.finalize(array, self._free.append, memory).atexit = False
        return torch.from_numpy(array)
