"""The objective of the papers, as they state it: the baseline of `evidence` (recipe §2; arXiv 2506.14202, 2606.24722).

Every position carries a noisy copy z = Y[target] + σε of its target, Y being the normalised embedding table, which learns. σ is log-normal,
cut into B intervals of equal probability, each widened for training. The network F is preconditioned as in EDM (arXiv 2206.00364,
table 1) and the loss is w(σ) times the cross-entropy. A sweep is sequential: z from pure noise at the largest σ, one Euler step a block,
the last block is read. The embedding is the part that all blocks share: whoever trains several blocks averages it (`SHARED`).

What the papers do not say is chosen here and named: σ_data, the log-normal's deviation (protocol/manifest.py), one σ a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from blocktrain.node.compute.evidence import widened
from blocktrain.node.compute.model import SIGMA_DATA, Block, Cache, Noisy
from blocktrain.node.compute.objective import Sweep
from blocktrain.protocol.manifest import SIGMA_DEVIATIONS, Manifest

SHARED: Final = ("embedding",)  # parameters that are averaged across blocks
LEAST_WEIGHTED_SIGMA: Final = 0.3  # w(σ) grows without bound as σ falls: it is held from here down


class DiffusionBlocks:
    """Trained on its own interval of σ, read from pure noise.

    Attributes:
        deviations: (low, high) of ln σ in standard deviations of the whole run's log-normal: the block's widened interval.
    """

    sweep: Sweep = "sequential"

    def __init__(self, manifest: Manifest, block: int) -> None:
        low, high = math.log(manifest.noise.sigma_low), math.log(manifest.noise.sigma_high)
        self.middle, self.deviation = (low + high) / 2, (high - low) / (2 * SIGMA_DEVIATIONS)
        first, last = ((math.log(sigma) - self.middle) / self.deviation for sigma in widened(manifest, block))
        self.deviations = (first, last)

    def loss(self, block: Block, tokens_RT1: Tensor, generator: torch.Generator) -> Tensor:
        inputs, targets = tokens_RT1[:, :-1], tokens_RT1[:, 1:]
        sigma_R = self.draw_sigma(len(inputs), generator).to(inputs.device)
        logits = block(inputs, noisy_targets(block, targets, sigma_R, generator))
        nats_R = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)
        loss: Tensor = (weight(sigma_R) * nats_R).mean()
        return loss

    def draw_sigma(self, rows: int, generator: torch.Generator) -> Tensor:
        """One σ a sequence, from the log-normal inside the block's widened interval: [rows]."""
        below = torch.special.ndtr(torch.tensor(self.deviations, dtype=torch.float64))
        share = below[0] + (below[1] - below[0]) * torch.rand(rows, generator=generator, dtype=torch.float64)
        sigma: Tensor = (self.middle + self.deviation * torch.special.ndtri(share)).exp().float()
        return sigma

    @torch.no_grad()
    def score(self, block: Block, tokens_RT1: Tensor) -> Tensor:
        """From pure noise at this block's largest σ: nobody knows the target, so there is no other honest reading."""
        logits = block(tokens_RT1[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), tokens_RT1[:, 1:], reduction="none")

    @torch.no_grad()
    def contribute(
        self, block: Block, tokens_RN: Tensor, cache: Cache | None = None, noisy: Noisy | None = None, want: int | None = None
    ) -> Tensor:
        """Positions without z read pure noise, as the lab's mean over all blocks has it; in a sweep every one has a z."""
        logits: Tensor = block(tokens_RN, noisy, cache, want)
        return logits.log_softmax(-1)


def weight(sigma_R: Tensor) -> Tensor:
    """w(σ) = (σ² + σ_d²) / (σ σ_d)² (EDM table 1, as the paper has it before its cross-entropy)."""
    held = sigma_R.clamp(min=LEAST_WEIGHTED_SIGMA)
    return (held.square() + SIGMA_DATA**2) / (held * SIGMA_DATA).square()


def noisy_targets(block: Block, targets_RT: Tensor, sigma_R: Tensor, generator: torch.Generator) -> Noisy:
    """z = Y[target] + σε at every position, all tokens known."""
    rows, positions = targets_RT.shape
    epsilon = torch.randn(rows * positions, block.width, generator=generator).to(targets_RT.device)
    sigma_M = sigma_R.repeat_interleave(positions)
    z = block.targets[targets_RT.flatten()] + epsilon * sigma_M[:, None]
    return _everywhere(z, sigma_M)


@torch.no_grad()
def sweep(manifest: Manifest, blocks: Sequence[Block], tokens_RN: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """The paper's sampler along the chain: each block's logits [R, N, V] in turn; the last one's are the answer.

    z starts as noise at σ_max. Block b reads it at the upper end σ of its interval and moves it on to σ' of the next one (of the last
    block: its lower end): D = softmax(logits) Y, z ← z + (σ' - σ)(z - D)/σ. The true context is visible (teacher-forced).
    """
    rows, positions = tokens_RN.shape
    z = torch.randn(rows * positions, manifest.model.width, generator=generator).to(tokens_RN.device) * manifest.noise.sigma_high
    for block in blocks:
        low, sigma = manifest.sigma_interval(block.block)
        logits: Tensor = block(tokens_RN, _everywhere(z, torch.full((rows * positions,), sigma, device=z.device)))
        yield logits
        estimate = logits.softmax(-1).flatten(0, 1) @ block.targets
        z = z + (low - sigma) / sigma * (z - estimate)


def _everywhere(z_MD: Tensor, sigma_M: Tensor) -> Noisy:
    count, device = len(z_MD), z_MD.device
    return Noisy(torch.arange(count, device=device), z_MD, sigma_M, torch.zeros(count, dtype=torch.int64, device=device))
