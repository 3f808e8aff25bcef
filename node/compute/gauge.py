"""The loss of any state on our held-out batch: what a merge, a download or a published state is judged by.

On the CPU a state is read where it lies: the parameters of a block without memory of its own become views of it for as long as that takes.
On a GPU it is copied into a second block there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocktrain.node.compute.flat import Flat, views
from blocktrain.node.compute.model import Block
from blocktrain.node.compute.objective import objective_of
from blocktrain.protocol.manifest import Manifest


class Gauge:
    """Not for two threads at a time. P is the number of parameters."""

    def __init__(self, manifest: Manifest, block: int, windows_RT1: Tensor, device: torch.device) -> None:
        """`windows_RT1`: int64 [rows, T + 1], never trained on."""
        self._block = Block(manifest, block, initial=False).to(device)
        self._objective = objective_of(manifest, block)
        self._windows_RT1 = windows_RT1.to(device)
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

    def loss(self, state_P: Tensor) -> float:
        """Mean nats per token of a float32 state in CPU memory, which must not change meanwhile."""
        if self._flat is not None:
            self._flat.data.copy_(state_P)
            return self._score()
        for parameter, view in zip(self._parameters, views(self._shapes, state_P).values(), strict=True):
            parameter.data = view
        try:
            return self._score()
        finally:
            self._let_go()

    def _score(self) -> float:
        return float(self._objective.score(self._block, self._windows_RT1).mean())

    def _let_go(self) -> None:
        """Hold nobody's memory."""
        for parameter in self._parameters:
            parameter.data = torch.empty(0)
