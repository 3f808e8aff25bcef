"""The loss of any state on our held-out batch: what a merge, a download or a published state is judged by.

On the CPU a state is read where it lies: the parameters of a block without memory of its own become views of it for as long as that takes.
One that is nowhere as a whole is made a tile at a time (piecemeal.py). On a GPU it is copied into a second block there.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from blocktrain.node.compute import memory
from blocktrain.node.compute.flat import Flat, views
from blocktrain.node.compute.model import Block
from blocktrain.node.compute.objective import objective_of
from blocktrain.node.compute.piecemeal import Piecemeal, Reading, stand_in
from blocktrain.node.room import give_back as give_back_rooms
from blocktrain.protocol.manifest import Manifest

PASS_BYTES: Final = 1 << 20  # of the widest activation: windows are measured together as long as that is no larger


class Gauge:
    """Not for two threads at a time. P is the number of parameters."""

    def __init__(self, manifest: Manifest, block: int, windows_RT1: Tensor, device: torch.device) -> None:
        """`windows_RT1`: int64 [rows, T + 1], never trained on."""
        self._block = Block(manifest, block, initial=False).to(device)
        self._objective = objective_of(manifest, block)
        self._windows_RT1 = windows_RT1.to(device)
        widest = 4 * 4 * manifest.model.width * (windows_RT1.shape[1] - 1)  # bytes of a window's, inside a layer
        self._rows = max(1, PASS_BYTES // widest) if device.type == "cpu" else len(windows_RT1)
        self._flat: Flat | None = None
        if device.type != "cpu":
            self._flat = Flat(self._block)
            return
        named = dict(sorted(self._block.named_parameters()))
        self._shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        self._parameters = list(named.values())
        for parameter in self._parameters:
            parameter.requires_grad_(False)
        self._let_go()

    def loss(self, state_P: Tensor | Reading) -> float:
        """Mean nats per token of a float32 state in CPU memory, which must not change meanwhile."""
        if self._flat is not None:
            if isinstance(state_P, Reading):
                state_P.fill(0, self._flat.data)
            else:
                self._flat.data.copy_(state_P)
            return self._score()
        give_back_rooms()  # where that of chunks was is room for activations
        try:
            if not isinstance(state_P, Reading):
                for parameter, view in zip(self._parameters, views(self._shapes, state_P).values(), strict=True):
                    parameter.data = view
                return self._score()
            begin = 0
            begins: dict[Tensor, int] = {}
            for parameter, shape in zip(self._parameters, self._shapes.values(), strict=True):
                parameter.data = stand_in(shape)
                begins[parameter] = begin
                begin += parameter.numel()
            with Piecemeal(state_P, begins):
                return self._score()
        finally:
            self._let_go()
            memory.give_back()

    def _score(self) -> float:
        scores = [self._objective.score(self._block, windows) for windows in torch.split(self._windows_RT1, self._rows)]
        return float(torch.cat(scores).mean())

    def _let_go(self) -> None:
        """Hold nobody's memory."""
        for parameter in self._parameters:
            parameter.data = torch.empty(0)
