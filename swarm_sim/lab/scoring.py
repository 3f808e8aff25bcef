"""What trained blocks are worth: nats per byte on held-out windows, of each alone and of all together, in every way of reading them.

The same windows for everything: `WINDOWS` of them, evenly over the held-out tail. Shapes: R windows, T positions, V vocabulary, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from blocktrain.node.compute.diffusionblocks import DiffusionBlocks, noisy_targets, sweep
from blocktrain.node.compute.model import Block, Noisy
from blocktrain.node.compute.objective import objective_of
from blocktrain.node.corpus import Corpus
from blocktrain.node.data import load_tokens
from blocktrain.node.tokenizer import load_tokenizer
from blocktrain.protocol.manifest import Manifest
from blocktrain.swarm_sim.lab.train import Result
from blocktrain.swarm_sim.lab.variants import BeliefBlock

WINDOWS: Final = 480
_ROWS: Final = 32  # windows scored at once
_NOISE_SEED: Final = 1


@lru_cache(maxsize=4)
def corpus_of(data: tuple[str, ...], context: int) -> Corpus:
    return load_tokens(data, load_tokenizer("bytes", 256), context)


def windows(data: tuple[str, ...], context: int) -> Tensor:
    """int64 [R, T + 1]."""
    return torch.from_numpy(corpus_of(data, context).heldout_windows(WINDOWS))


def _batches(tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for begin in range(0, len(tokens), _ROWS):
        rows = tokens[begin : begin + _ROWS]
        yield rows[:, :-1], rows[:, 1:]


def _nats(log_probs_RTV: Tensor, targets_RT: Tensor) -> float:
    """Summed, not averaged."""
    return float(-log_probs_RTV.gather(2, targets_RT[..., None]).sum(dtype=torch.float64))


Reading = Callable[[Tensor], list[Tensor]]  # tokens [R, T] → log-probabilities [R, T, V] of each block in turn


def alone(manifest: Manifest, blocks: Sequence[Block]) -> Reading:
    """Every block by itself, as it contributes to an additive sweep (`diffusionblocks`: from pure noise)."""
    return lambda tokens: [objective_of(manifest, block.block).contribute(block, tokens) for block in blocks]


def upstream(blocks: Sequence[Block], *, missing: int | None = None) -> Reading:
    """Each block reads the belief of the one before; without block `missing`, of the one before that."""

    @torch.no_grad()
    def read(tokens: Tensor) -> list[Tensor]:
        belief: Tensor | None = None
        out = []
        for block in blocks:
            if block.block == missing:
                continue
            assert isinstance(block, BeliefBlock)
            block.belief_RND = belief
            logits = block(tokens)
            out.append(logits.log_softmax(-1))
            belief = logits.softmax(-1) @ block.targets
        return out

    return read


def in_sequence(manifest: Manifest, blocks: Sequence[Block]) -> Reading:
    """The paper's sampler: z passes from block to block."""
    generator = torch.Generator().manual_seed(_NOISE_SEED)
    return lambda tokens: [logits.log_softmax(-1) for logits in sweep(manifest, blocks, tokens, generator)]


def from_noise(manifest: Manifest, blocks: Sequence[Block]) -> Reading:
    """z passes from block to block through blocks of `evidence`, all positions noisy and known (the true-noise variant)."""
    generator = torch.Generator().manual_seed(_NOISE_SEED)

    @torch.no_grad()
    def read(tokens: Tensor) -> list[Tensor]:
        count = tokens.numel()
        z = torch.randn(count, manifest.model.width, generator=generator) * manifest.noise.sigma_high
        zeros, out = torch.zeros(count, dtype=torch.int64), []
        for block in blocks:
            low, high = manifest.sigma_interval(block.block)
            logits = block(tokens, Noisy(torch.arange(count), z, torch.full((count,), high), zeros))
            out.append(logits.log_softmax(-1))
            z = z + (low - high) / high * (z - logits.softmax(-1).flatten(0, 1) @ block.targets)
        return out

    return read


def score(reading: Reading, tokens: Tensor) -> dict[str, Any]:
    """Mean nats per byte: `blocks` (each), `mean` (of log-probabilities, normalised), `mixture` (of probabilities), `last`, `best`."""
    per_block: list[float] = []
    mean = mixture = 0.0
    for inputs, targets in _batches(tokens):
        logs = reading(inputs)
        per_block = per_block or [0.0] * len(logs)
        for i, log_probs in enumerate(logs):
            per_block[i] += _nats(log_probs, targets)
        stacked = torch.stack(logs)
        mean += _nats(stacked.mean(0).log_softmax(-1), targets)
        mixture += _nats(stacked.logsumexp(0) - np.log(len(logs)), targets)
    count = tokens.shape[0] * (tokens.shape[1] - 1)
    blocks = [total / count for total in per_block]
    return {"blocks": blocks, "mean": mean / count, "mixture": mixture / count, "last": blocks[-1], "best": min(blocks)}


def denoised(manifest: Manifest, blocks: Sequence[Block], tokens: Tensor) -> list[float]:
    """Nats per byte of each block where z is the true target plus noise, σ of its own interval as in training: what leaks through z."""
    generator = torch.Generator().manual_seed(_NOISE_SEED)
    out = []
    with torch.no_grad():
        for block in blocks:
            objective, total = DiffusionBlocks(manifest, block.block), 0.0
            for inputs, targets in _batches(tokens):
                noisy = noisy_targets(block, targets, objective.draw_sigma(len(inputs), generator), generator)
                total += _nats(block(inputs, noisy).log_softmax(-1), targets)
            out.append(total / (tokens.shape[0] * (tokens.shape[1] - 1)))
    return out


def learned_weights(reading: Reading, tokens: Tensor) -> dict[str, Any]:
    """Weights of the blocks' log-probabilities fitted on every other window, and the nats of both on the remaining windows."""
    fit, test = tokens[::2], tokens[1::2]
    logs = [torch.stack(reading(inputs)) for inputs, _ in _batches(fit)]
    stacked = torch.cat([part.flatten(1, 2) for part in logs], 1)[:, ::4]  # every fourth position: three weights need no more
    targets = fit[:, 1:].flatten()[::4]
    weights = torch.full((len(stacked),), 1 / len(stacked), requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=15)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(torch.einsum("b,bnv->nv", weights, stacked), targets)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    final = weights.detach()
    plain = weighted = 0.0
    for inputs, true in _batches(test):
        parts = torch.stack(reading(inputs))
        plain += _nats(parts.mean(0).log_softmax(-1), true)
        weighted += _nats(torch.einsum("b,brtv->rtv", final, parts).log_softmax(-1), true)
    count = test.shape[0] * (test.shape[1] - 1)
    return {"weights": [round(float(w), 4) for w in final], "plain": plain / count, "weighted": weighted / count}


def blocks_of(results: Sequence[Result], *, tail: bool = False) -> list[Block]:
    """All members of several trainings, by block number."""
    found = [block for result in results for block in result.blocks(tail=tail)]
    return sorted(found, key=lambda block: block.block)


def sigma_table(manifest: Manifest, sigmas: Sequence[float], data: tuple[str, ...]) -> tuple[list[float], list[float]]:
    """For each σ: nats that z gives about a byte of this text by Bayes' rule, and nats lost by trusting a z that is pure noise."""
    generator = torch.Generator().manual_seed(_NOISE_SEED)
    frequencies = torch.bincount(windows(data, manifest.model.context).flatten(), minlength=256).float()
    prior = (frequencies / frequencies.sum()).clamp(min=1e-30).log()
    y = torch.multinomial(frequencies, 20_000, replacement=True, generator=generator)
    targets = Block(manifest, 0).targets
    bare = float(F.cross_entropy(prior.expand(len(y), -1), y))
    given: list[float] = []
    lost: list[float] = []
    for sigma in sigmas:
        noise = sigma * torch.randn(len(y), targets.shape[1], generator=generator)
        for z, out, sign in ((targets[y] + noise, given, -1), (noise, lost, 1)):
            out.append(sign * (float(F.cross_entropy(z @ targets.T / sigma**2 + prior, y)) - bare))
    return given, lost
