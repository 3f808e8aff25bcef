"""The default objective: next-token prediction, with a small share of noisy windows and the exact Bayes evidence of z (recipe §3).

Most positions are clean. With probability `noise.window_share` a sequence ends in a window of w ∈ {4, 8, 16, 32, 64} positions: the
first, whose token is known, stays clean; at the others the token is unknown and z = Y[target] + σε stands in, σ log-uniform in the
block's widened interval. Each position of a window is one fewer that teaches what follows known text, so the longest are the rarest.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from blocktrain.node.compute.autoregressive import Autoregressive, cross_entropy
from blocktrain.node.compute.model import MAX_WINDOW, Block, Noisy
from blocktrain.protocol.manifest import Manifest

WINDOWS: Final = (4, 4, 8, 8, 16, 16, 32, 32, MAX_WINDOW)  # drawn from evenly


class Evidence(Autoregressive):
    """Training with windows; scored and swept like the plain objective, since clean positions are all that those read."""

    def __init__(self, manifest: Manifest, block: int) -> None:
        self.share = manifest.noise.window_share
        self.sigma_low, self.sigma_high = widened(manifest, block)
        self.windows = torch.tensor([min(window, manifest.model.context) for window in WINDOWS])

    def loss(self, block: Block, tokens_RT1: Tensor, generator: torch.Generator) -> Tensor:
        inputs, targets = tokens_RT1[:, :-1], tokens_RT1[:, 1:]
        return cross_entropy(block(inputs, self.draw(block, targets, generator)), targets)

    def draw(self, block: Block, targets_RT: Tensor, generator: torch.Generator) -> Noisy | None:
        """The noisy windows of one batch, or None where it has none."""
        rows, positions = targets_RT.shape
        device = targets_RT.device
        chosen_R = torch.rand(rows, generator=generator) < self.share
        window_R = self.windows[torch.randint(len(self.windows), (rows,), generator=generator)] * chosen_R
        log_low, log_high = math.log(self.sigma_low), math.log(self.sigma_high)
        sigma_R = (log_low + (log_high - log_low) * torch.rand(rows, generator=generator)).exp()
        offset_RT = torch.arange(positions) - (positions - window_R)[:, None]
        at_M = (offset_RT > 0).flatten().nonzero().squeeze(1)
        if not len(at_M):
            return None
        sigma_M = sigma_R[at_M // positions]
        noise_MD = torch.randn(len(at_M), block.width, generator=generator) * sigma_M[:, None]
        offset_M = offset_RT.flatten()[at_M]
        at_M = at_M.to(device, non_blocking=True)
        z_MD = block.targets[targets_RT.flatten()[at_M]] + noise_MD.to(device, non_blocking=True)
        return Noisy(at_M, z_MD, sigma_M.to(device, non_blocking=True), offset_M.to(device, non_blocking=True))


def widened(manifest: Manifest, block: int) -> tuple[float, float]:
    """The σ interval that a block trains on: its own, widened at both ends by `noise.overlap` of its log-width (arXiv 2506.14202)."""
    low, high = manifest.sigma_interval(block)
    factor = (high / low) ** manifest.noise.overlap
    return low / factor, high * factor
