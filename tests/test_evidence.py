"""The objective: what σ means, what a training batch looks like, and that the loss falls where there is something to learn."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from blocktrain.node.compute.autoregressive import Autoregressive
from blocktrain.node.compute.evidence import Evidence, widened
from blocktrain.node.compute.model import MAX_WINDOW, Block, Noisy
from blocktrain.node.compute.objective import objective_of
from blocktrain.protocol.manifest import Manifest, Model, Noise, Optimizer, Schedule

T = 64


def a_manifest(width: int = 32, objective: str = "evidence", share: float = 0.25) -> Manifest:
    return Manifest(
        format=1,
        name="tiny",
        blocks=3,
        objective=objective,
        tokenizer="bytes",
        seed=5,
        model=Model(width=width, layers=1, heads=4, context=T, vocabulary=256),
        noise=Noise(sigma_low=0.2, sigma_high=4.0, overlap=0.1, window_share=share),
        schedule=Schedule(steps_per_round=10, learning_rate=4e-3, warmup_rounds=1, planned_rounds=10, floor=0.1),
        optimizer=Optimizer(batch=4, accumulate=1, beta1=0.9, beta2=0.95, weight_decay=0.05, clip=1.0, warmup_steps=20),
    )


def text() -> Tensor:
    """English that Python carries, as bytes."""
    return torch.from_numpy(np.frombuffer("\n".join(topics.values()).encode(), np.uint8).astype(np.int64))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch_of(source: Tensor, rows: int, draw: torch.Generator) -> Tensor:
    begins = torch.randint(0, len(source) - T - 1, (rows,), generator=draw)
    return torch.stack([source[begin : begin + T + 1] for begin in begins.tolist()])


# ---- what σ means ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evidence_only() -> Block:
    """A block whose own opinion is nothing: its logits at noisy positions are the evidence of z alone."""
    block = Block(a_manifest(width=128), 0).requires_grad_(False)
    block.head.zero_()
    return block


@pytest.mark.parametrize(
    ("sigma", "given", "lost"),
    [(0.1, 3.14, 19.0), (0.3, 2.79, 4.0), (0.5, 1.55, 1.67), (0.7, 0.89, 0.87), (1.0, 0.44, 0.44), (2.0, 0.13, 0.11), (5.0, 0.03, 0.015)],
)
def test_the_evidence_of_z_is_exact_bayes(evidence_only: Block, sigma: float, given: float, lost: float) -> None:
    """The recipe's table: nats that z gives about a byte of English, and nats lost by trusting a z that is pure noise."""
    rows, draw = 128, generator(1)
    frequencies = torch.bincount(text(), minlength=256).float()
    log_prior = (frequencies / frequencies.sum()).clamp(min=1e-30).log()
    y = torch.multinomial(frequencies, rows * T, replacement=True, generator=draw)
    noise = sigma * torch.randn(rows * T, 128, generator=draw)
    everywhere = torch.arange(rows * T)

    def nats(z: Tensor) -> float:
        noisy = Noisy(everywhere, z, torch.full((rows * T,), sigma), torch.zeros(rows * T, dtype=torch.int64))
        logits: Tensor = evidence_only(torch.zeros(rows, T, dtype=torch.int64), noisy)
        return float(F.cross_entropy(logits.flatten(0, 1) + log_prior, y))

    alone = float(F.cross_entropy(log_prior.expand(rows * T, -1), y))
    assert alone - nats(evidence_only.targets[y] + noise) == pytest.approx(given, rel=0.1, abs=0.03)
    assert nats(noise) - alone == pytest.approx(lost, rel=0.1, abs=0.03)


def test_the_blocks_intervals_cover_all_noise_and_overlap() -> None:
    manifest = a_manifest()
    intervals = [widened(manifest, block) for block in range(3)]
    assert all(upper[0] < lower[1] for upper, lower in pairwise(intervals)), "neighbours overlap"
    assert intervals[0][1] > 4.0, "block 0 is the noisiest"
    assert intervals[2][0] < 0.2
    own = manifest.sigma_interval(1)
    width = math.log(own[1] / own[0])
    assert math.log(intervals[1][1] / intervals[1][0]) == pytest.approx(1.2 * width)


# ---- a training batch ------------------------------------------------------------------------------------------------------------------


def test_windows_are_as_the_recipe_says() -> None:
    manifest = a_manifest()
    block, objective = Block(manifest, 1), Evidence(manifest, 1)
    rows = 2000
    targets = torch.randint(0, 256, (rows, T), generator=generator(3))
    noisy = objective.draw(block, targets, generator())
    assert noisy is not None
    row, place = noisy.at_M // T, noisy.at_M % T

    lengths = Counter(row.tolist())
    assert set(lengths.values()) == {w - 1 for w in (4, 8, 16, 32, MAX_WINDOW)}, "the first position of a window stays clean"
    assert 0.21 < len(lengths) / rows < 0.29
    assert all(count > 40 for count in Counter(lengths.values()).values()), "every size is drawn"
    assert (place == T - 1).sum() == len(lengths), "windows end the sequence"
    starts = place - noisy.offset_M
    assert all(len(set(starts[row == number].tolist())) == 1 for number in list(lengths)[:20]), "offsets count from one known token"

    low, high = widened(manifest, 1)
    assert noisy.sigma_M.min() >= low
    assert noisy.sigma_M.max() <= high
    middle = float((noisy.sigma_M.log() < math.log(low * high) / 2).float().mean())
    assert 0.4 < middle < 0.6, "σ is log-uniform"
    residual = (noisy.z_MD - block.targets[targets.flatten()[noisy.at_M]]) / noisy.sigma_M[:, None]
    assert abs(float(residual.mean())) < 0.01
    assert 0.99 < float(residual.std()) < 1.01, "z is the target's row plus σ times normal noise"


def test_a_context_shorter_than_a_window_still_trains() -> None:
    manifest = replace(a_manifest(share=1.0), model=Model(width=32, layers=1, heads=4, context=8, vocabulary=256))
    block = Block(manifest, 0)
    tokens = torch.randint(0, 256, (16, 9), generator=generator())
    noisy = Evidence(manifest, 0).draw(block, tokens[:, 1:], generator())
    assert noisy is not None
    assert noisy.offset_M.max() == 7
    assert math.isfinite(float(Evidence(manifest, 0).loss(block, tokens, generator()).detach()))


def test_without_windows_the_objective_is_the_plain_one() -> None:
    block = Block(a_manifest(), 0)
    tokens = batch_of(text(), 4, generator())
    plain = Autoregressive().loss(block, tokens, generator())
    assert torch.equal(Evidence(a_manifest(share=0.0), 0).loss(block, tokens, generator()), plain)
    assert not torch.equal(Evidence(a_manifest(share=1.0), 0).loss(block, tokens, generator()), plain)


def test_score_and_contribution_agree_with_the_training_loss() -> None:
    block = Block(a_manifest(), 0)
    objective = objective_of(a_manifest(), 0)
    tokens = batch_of(text(), 4, generator())
    score = objective.score(block, tokens)
    added = objective.contribute(block, tokens[:, :-1])
    assert score.shape == (4, T)
    assert torch.allclose(added.exp().sum(-1), torch.ones(4, T), atol=1e-5)
    assert torch.allclose(-added.gather(2, tokens[:, 1:, None]).squeeze(2), score, atol=1e-5)
    assert float(score.mean()) == pytest.approx(float(Autoregressive().loss(block, tokens, generator()).detach()), abs=1e-5)


# ---- learning --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["evidence", "autoregressive"])
def test_the_loss_of_a_tiny_corpus_falls_far_below_its_letter_frequencies(name: str) -> None:
    manifest = a_manifest(objective=name)
    source = torch.from_numpy(np.frombuffer(b"the river runs down to the sea; " * 40, np.uint8).astype(np.int64))
    block, objective, draw = Block(manifest, 2), objective_of(manifest, 2), generator()
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2, betas=(0.9, 0.95))
    held = batch_of(source, 8, generator(99))
    first = float(objective.score(block, held).mean())
    for _ in range(40):
        optimizer.zero_grad()
        objective.loss(block, batch_of(source, 8, draw), draw).backward()
        optimizer.step()
    assert first > 5
    assert float(objective.score(block, held).mean()) < 0.6, "letter frequencies alone leave 2.5"


def test_a_trained_window_uses_z_and_its_distance() -> None:
    """With unknown bytes, less noise must mean less loss, and the block must beat the evidence of z alone."""
    manifest = a_manifest(share=1.0)
    source = torch.from_numpy(np.frombuffer(b"the river runs down to the sea; " * 40, np.uint8).astype(np.int64))
    block, objective, draw = Block(manifest, 1), Evidence(manifest, 1), generator()
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for _ in range(60):
        optimizer.zero_grad()
        objective.loss(block, batch_of(source, 8, draw), draw).backward()
        optimizer.step()
    held = batch_of(source, 16, generator(99))
    targets = held[:, -15:]

    def loss_at(sigma: float) -> tuple[float, float]:
        z = block.targets[targets] + sigma * torch.randn(16, 15, block.width, generator=generator(7))
        with torch.no_grad():
            logits = block(held[:, :-1], Noisy.tail(z, sigma, T), want=15)
        alone = (z @ block.targets.T) / sigma**2
        return tuple(float(F.cross_entropy(x.flatten(0, 1), targets.flatten())) for x in (logits, alone))  # type: ignore[return-value]

    (clear, _), (hazy, alone) = loss_at(0.55), loss_at(1.4)
    assert clear < hazy
    assert hazy < alone - 0.5
