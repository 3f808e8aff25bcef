"""What research changes in a block: its model, its loss, its optimiser. Each is a switch of spec.Switches, and off by default.

Each variant fits the node's own interfaces (Block, Objective, Trainer), so that it trains by the same code as everything else, and could
move there if it won. Shapes as in node/compute/model.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blocktrain.node.compute.adamw import Optimizer
from blocktrain.node.compute.autoregressive import Autoregressive, cross_entropy
from blocktrain.node.compute.diffusionblocks import noisy_targets
from blocktrain.node.compute.evidence import Evidence, widened
from blocktrain.node.compute.model import Block, Noisy
from blocktrain.node.compute.objective import Objective, objective_of
from blocktrain.node.compute.trainer import Trainer
from blocktrain.protocol.manifest import Manifest
from blocktrain.swarm_sim.lab.spec import Switches

MUON_MOMENTUM: Final = 0.95


class BeliefBlock(Block):
    """Reads the belief of the block before: its expected embedding in Y at each position, through W from I/√2 (recipe §4)."""

    def __init__(self, manifest: Manifest, block: int, *, initial: bool = True) -> None:
        super().__init__(manifest, block, initial=initial)
        self.belief_in = nn.Parameter(torch.eye(self.width) * math.sqrt(self.width / 2))
        self.belief_RND: Tensor | None = None  # for the next pass; None: no upstream

    def embed(self, tokens_RN: Tensor, noisy: Noisy | None, said_RS: Tensor | None = None) -> Tensor:
        h_RND = super().embed(tokens_RN, noisy, said_RS)
        return h_RND if self.belief_RND is None else h_RND + F.linear(self.belief_RND, self.belief_in)


@torch.no_grad()
def believe(chain: Sequence[Block], tokens_RN: Tensor, noisy: Noisy | None = None) -> Tensor | None:
    """The belief that the block after `chain` reads, each block reading the one before: [R, N, D]; None of an empty chain."""
    belief: Tensor | None = None
    for block in chain:
        assert isinstance(block, BeliefBlock)
        block.belief_RND = belief
        belief = block(tokens_RN, noisy).softmax(-1) @ block.targets
    return belief


class TrueNoise(Autoregressive):
    """`evidence` with z at every position and every token known: the recipe's variant without clean positions."""

    def __init__(self, manifest: Manifest, block: int) -> None:
        self.low, self.high = map(math.log, widened(manifest, block))
        self.highest = manifest.sigma_interval(block)[1]

    def loss(self, block: Block, tokens_RT1: Tensor, generator: torch.Generator) -> Tensor:
        inputs, targets = tokens_RT1[:, :-1], tokens_RT1[:, 1:]
        sigma_R = (self.low + (self.high - self.low) * torch.rand(len(inputs), generator=generator)).exp().to(inputs.device)
        return cross_entropy(block(inputs, noisy_targets(block, targets, sigma_R, generator)), targets)


class Together(Evidence):
    """A block that learns beside its chain: from the block before's belief, or from the chain's log-probabilities.

    Attributes:
        chain: the blocks of this run in order, as they are at this moment; set before the first step.
    """

    def __init__(self, manifest: Manifest, block: int, switches: Switches) -> None:
        super().__init__(manifest, block)
        self.number, self.switches = block, switches
        self.chain: Sequence[Block] = ()

    def loss(self, block: Block, tokens_RT1: Tensor, generator: torch.Generator) -> Tensor:
        inputs, targets = tokens_RT1[:, :-1], tokens_RT1[:, 1:]
        noisy = self.draw(block, targets, generator)
        if self.switches.upstream is not None:
            belief = believe(self.chain[: self.number], inputs, noisy)
            if belief is not None:
                belief = belief * (torch.rand(len(inputs), 1, 1, generator=generator) >= self.switches.upstream).to(belief.device)
            assert isinstance(block, BeliefBlock)
            block.belief_RND = belief
        logits = block(inputs, noisy)
        if not self.switches.distill:
            return cross_entropy(logits, targets)
        with torch.no_grad():
            teacher = torch.stack([other(inputs).log_softmax(-1) for other in self.chain]).mean(0).softmax(-1)
        hard = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        soft = -(teacher * logits.log_softmax(-1)).sum(-1)
        share = torch.full_like(hard, self.switches.distill)
        if noisy is not None:  # what a clean chain knows is no answer to a window
            share = share.flatten().index_fill(0, noisy.at_M, 0.0).view_as(share)
        loss: Tensor = ((1 - share) * hard + share * soft).mean()
        return loss


class Muon:
    """Muon for the layers' matrices (one moment, orthogonalised), at AdamW's size of update (arXiv 2502.16982); `adamw` for the rest.

    Its moment lies where AdamW would have its first, so that checkpoints are the same.
    """

    def __init__(self, adamw: Optimizer, turned: Sequence[nn.Parameter]) -> None:
        self._adamw, self._turned = adamw, turned
        self.state, self.param_groups = adamw.state, adamw.param_groups
        self._decay = adamw.param_groups[0]["weight_decay"]
        ours = {id(parameter) for parameter in turned}
        for group in self.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ours]
        for parameter in turned:
            del self.state[parameter]["exp_avg_sq"]

    @torch.no_grad()
    def step(self) -> None:
        self._adamw.step()
        rate = self.param_groups[0]["lr"]
        for parameter in self._turned:
            gradient, moment = parameter.grad, self.state[parameter]["exp_avg"]
            assert gradient is not None
            moment.mul_(MUON_MOMENTUM).add_(gradient)
            update = orthogonal(gradient + MUON_MOMENTUM * moment) * (0.2 * math.sqrt(max(parameter.shape)))
            parameter.mul_(1 - rate * self._decay).sub_(update, alpha=rate)


class MuonTrainer(Trainer):
    """The node's trainer with that optimiser."""

    def _make_optimizer(self) -> Optimizer:
        turned = [p for name, p in self.block.named_parameters() if name.startswith("layers.") and p.ndim == 2]
        return Muon(super()._make_optimizer(), turned)


def orthogonal(matrix: Tensor) -> Tensor:
    """Singular values brought near 1 by five Newton-Schulz steps (Jordan 2024), the rest kept."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x: Tensor = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def model_of(switches: Switches) -> type[Block]:
    """The kind of block that these switches ask for."""
    return BeliefBlock if switches.upstream is not None else Block


def trainer_of(switches: Switches) -> type[Trainer]:
    """The node's trainer of that kind of block."""
    base = MuonTrainer if switches.muon else Trainer
    return type(base.__name__, (base,), {"model": model_of(switches)})


def training_objective(manifest: Manifest, block: int, switches: Switches) -> Objective:
    """The objective that these switches train by."""
    if switches.true_noise:
        return TrueNoise(manifest, block)
    if switches.upstream is not None or switches.distill:
        return Together(manifest, block, switches)
    return objective_of(manifest, block)
