"""AdamW by PyTorch's fused kernel, called without `torch.optim`.

`torch.optim.AdamW` calls the very same kernel, but building one imports PyTorch's compiler: 1 s of CPU and 70 MB in every node.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Optimizer(Protocol):
    """What a trainer uses of an optimiser: what `torch.optim.Optimizer` looks like."""

    param_groups: list[dict[str, Any]]
    state: Any  # parameter → name → tensor

    def step(self) -> Any: ...


class FusedAdamW:
    """Decoupled weight decay (arXiv 1711.05101), bit for bit `torch.optim.AdamW(fused=True)`.

    `groups` are of torch.optim's kind, with params, lr and weight_decay. The caller puts each parameter's `exp_avg`, `exp_avg_sq` and
    `step` into `state`, where it wants them to be, before the first step. Every parameter has a gradient, always the same tensor.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> None:
        self.param_groups = groups
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._betas = betas
        self._eps = eps

    @torch.no_grad()
    def step(self) -> None:
        """One update of all parameters from their gradients."""
        for group in self.param_groups:
            parameters = group["params"]
            states = [self.state[parameter] for parameter in parameters]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                lr=group["lr"],
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=group["weight_decay"],
                eps=self._eps,
                amsgrad=False,
                maximize=False,
            )
