"""What an objective is to the rest: a training loss, a score, and a part in a sweep (recipe §2, §3).

A sweep is *additive* where every block adds its log-probabilities to an accumulator, in any order; it is *sequential* where z itself
passes from block to block and the last block is read (`protocol.sweep.SEQUENTIAL`). All ways to make text work with both; asking all
holders at once needs an additive one.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from blocktrain.node.compute.model import Block, Cache, Noisy
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.manifest import OBJECTIVES, Manifest

Sweep = Literal["additive", "sequential"]


class Objective(Protocol):
    """How one block is trained and read. Stateless: what is drawn comes from the generator given."""

    sweep: Sweep

    def loss(self, block: Block, tokens_RT1: Tensor, generator: torch.Generator) -> Tensor:
        """Mean training loss, a scalar with gradient, nats per token.

        Args:
            tokens_RT1: int64, [rows, T + 1], on the block's device.
            generator: a CPU generator, so that a run repeats on every device.
        """
        ...

    def score(self, block: Block, tokens_RT1: Tensor) -> Tensor:
        """Nats of every true next token, [rows, T], from this block alone and without noise. No gradient."""
        ...

    def contribute(
        self, block: Block, tokens_RN: Tensor, cache: Cache | None = None, noisy: Noisy | None = None, want: int | None = None
    ) -> Tensor:
        """What this block adds to the accumulator of an additive sweep: log-probabilities [rows, want, V], float32. No gradient."""
        ...


def objective_of(manifest: Manifest, block: int) -> Objective:
    """The run's objective as block `block` trains it.

    Raises: UsageError: an objective that this version does not have.
    """
    from blocktrain.node.compute.autoregressive import Autoregressive
    from blocktrain.node.compute.diffusionblocks import DiffusionBlocks
    from blocktrain.node.compute.evidence import Evidence

    if manifest.objective == "evidence":
        return Evidence(manifest, block)
    if manifest.objective == "autoregressive":
        return Autoregressive()
    if manifest.objective == "diffusionblocks":
        return DiffusionBlocks(manifest, block)
    raise UsageError(f"this version cannot train the objective {manifest.objective!r}; use {', '.join(OBJECTIVES)}")
