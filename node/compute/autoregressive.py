"""A block without noise: a plain causal language model. The control beside every number of the noisy objectives (recipe §3)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from blocktrain.node.compute.model import Block, Cache, Noisy
from blocktrain.node.compute.objective import Sweep


class Autoregressive:
    """Mean cross-entropy of the next token; a chain is the mean of its blocks' log-probabilities."""

    sweep: Sweep = "additive"

    def loss(self, block: Block, tokens_RT1: Tensor, generator: torch.Generator) -> Tensor:
        return cross_entropy(block(tokens_RT1[:, :-1]), tokens_RT1[:, 1:])

    @torch.no_grad()
    def score(self, block: Block, tokens_RT1: Tensor) -> Tensor:
        logits_RTV = block(tokens_RT1[:, :-1])
        return F.cross_entropy(logits_RTV.transpose(1, 2), tokens_RT1[:, 1:], reduction="none")

    @torch.no_grad()
    def contribute(
        self, block: Block, tokens_RN: Tensor, cache: Cache | None = None, noisy: Noisy | None = None, want: int | None = None
    ) -> Tensor:
        logits: Tensor = block(tokens_RN, noisy, cache, want)
        return logits.log_softmax(-1)


def cross_entropy(logits_RTV: Tensor, targets_RT: Tensor) -> Tensor:
    """Mean nats per token."""
    return F.cross_entropy(logits_RTV.flatten(0, 1), targets_RT.flatten())
