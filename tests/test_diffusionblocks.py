"""The papers' objective: its partition, its preconditioning, its sampler, and what leaks through z when σ is small."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from blocktrain.node.compute.diffusionblocks import LEAST_WEIGHTED_SIGMA, SHARED, DiffusionBlocks, noisy_targets, sweep, weight
from blocktrain.node.compute.evidence import widened
from blocktrain.node.compute.model import SIGMA_DATA, Block, Cache, Noisy
from blocktrain.node.compute.objective import objective_of
from blocktrain.protocol.manifest import Manifest
from blocktrain.swarm_sim.lab.presets import Preset, manifest

T = 128


def a_run(sigma: tuple[float, float] = (1.0, 10.0), blocks: int = 3) -> Manifest:
    return manifest(Preset(32, 1, blocks), "diffusionblocks", 40, 3, sigma=sigma)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_tokens(rows: int = 4, positions: int = T + 1) -> torch.Tensor:
    return torch.randint(0, 256, (rows, positions), generator=generator(5))


def test_every_block_owns_an_equal_share_of_a_log_normal() -> None:
    run = a_run(blocks=4)
    edges = run.sigma_edges()
    assert (edges[0], edges[-1]) == (1.0, 10.0)
    assert all(low < high for low, high in pairwise(edges))
    assert edges[2] == pytest.approx(10**0.5), "the median is the geometric middle"
    drawn = torch.special.ndtri(torch.linspace(0.0228, 0.9772, 100_001, dtype=torch.float64))
    sigma = (torch.tensor(10.0).log() * (0.5 + drawn / 4)).exp()
    for low, high in pairwise(edges):
        assert float(((sigma >= low) & (sigma < high)).double().mean()) == pytest.approx(0.25, abs=0.002)


def test_a_block_draws_from_its_widened_interval_only() -> None:
    run = a_run()
    for block in range(3):
        low, high = widened(run, block)
        sigma = DiffusionBlocks(run, block).draw_sigma(4000, generator())
        assert low * 0.9999 <= float(sigma.min()) < low * 1.05
        assert high * 0.95 < float(sigma.max()) <= high * 1.0001


def test_the_loss_is_weighted_as_in_edm_and_held_at_small_sigma() -> None:
    sigma = torch.tensor([1.0, 10.0, LEAST_WEIGHTED_SIGMA, 0.01])
    expected = (sigma**2 + SIGMA_DATA**2) / (sigma * SIGMA_DATA) ** 2
    assert torch.allclose(weight(sigma)[:3], expected[:3])
    assert weight(sigma)[3] == weight(sigma)[2]


def test_the_output_is_skip_times_z_plus_out_times_the_network_read_against_unit_rows() -> None:
    run = a_run()
    block = Block(run, 0).requires_grad_(False)
    tokens, sigma = some_tokens(2), torch.tensor([1.5, 6.0])
    noisy = noisy_targets(block, tokens[:, 1:], sigma, generator())
    table = F.normalize(block.embedding, dim=1)
    assert torch.allclose(table.norm(dim=1), torch.ones(256))
    with_network = block(tokens[:, :-1], noisy)
    block.head.zero_()
    skipped = block(tokens[:, :-1], noisy)
    z = noisy.z_MD.view(2, T, -1)
    skip = SIGMA_DATA**2 / (sigma**2 + SIGMA_DATA**2)
    assert torch.allclose(skipped, skip[:, None, None] * z @ table.T, atol=1e-5)
    assert not torch.allclose(with_network, skipped, atol=0.1)


def test_the_embedding_begins_the_same_in_all_blocks_and_learns_through_context_targets_and_logits() -> None:
    run = a_run()
    first, second = Block(run, 0), Block(run, 1)
    assert SHARED == ("embedding",)
    assert torch.equal(first.embedding, second.embedding)
    assert not torch.equal(first.layers[0].up, second.layers[0].up)  # type: ignore[arg-type]
    objective_of(run, 0).loss(first, some_tokens(), generator()).backward()
    assert first.embedding.grad is not None
    assert float(first.embedding.grad.abs().sum()) > 0


def test_the_sweep_hands_z_from_block_to_block() -> None:
    """The first block reads pure noise of σ_max; each next one reads z moved towards the expected embedding, at its own σ."""
    run = a_run()
    blocks = [Block(run, number).requires_grad_(False) for number in range(3)]
    tokens = some_tokens(2)[:, :-1]
    logits = list(sweep(run, blocks, tokens, generator(9)))
    z = torch.randn(2 * T, 32, generator=generator(9)) * 10.0
    everywhere, zeros = torch.arange(2 * T), torch.zeros(2 * T, dtype=torch.int64)
    for block, given in zip(blocks, logits, strict=True):
        low, high = run.sigma_interval(block.block)
        expected = block(tokens, Noisy(everywhere, z, torch.full((2 * T,), high), zeros))
        assert torch.allclose(given, expected, atol=1e-5)
        estimate = expected.softmax(-1).flatten(0, 1) @ block.targets
        z = z + (low - high) * (z - estimate) / high


def test_positions_without_z_read_the_same_noise_with_and_without_a_cache() -> None:
    run = a_run()
    block, objective = Block(run, 1).requires_grad_(False), objective_of(run, 1)
    tokens = some_tokens(1, 20)
    whole = objective.contribute(block, tokens)
    cache = Cache(block)
    pieces = torch.cat([objective.contribute(block, part, cache) for part in tokens.split(7, dim=1)], 1)  # type: ignore[no-untyped-call]
    assert torch.allclose(whole, pieces, atol=1e-4)
    assert torch.allclose(objective.score(block, tokens), -whole[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2), atol=1e-4)


def test_small_sigma_leaks_the_target_and_is_worthless_from_noise() -> None:
    """The paper's own finding (its table 1) in miniature: below σ 0.5 the target is in the input, and pure noise is believed as well."""
    run = a_run((0.1, 0.5), blocks=1)
    text = torch.tensor(list(b"the river runs down to the sea; it is long and slow. " * 40))
    block, objective, draw = Block(run, 0), DiffusionBlocks(run, 0), generator()
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for _ in range(80):
        begins = torch.randint(0, len(text) - T - 1, (4,), generator=draw)
        batch = torch.stack([text[begin : begin + T + 1] for begin in begins.tolist()])
        optimizer.zero_grad()
        objective.loss(block, batch, draw).backward()
        torch.nn.utils.clip_grad_norm_(block.parameters(), 1.0)
        optimizer.step()
    held = text[torch.randint(0, len(text), (8, T + 1), generator=draw)]  # its bytes in no order: the context cannot help
    with torch.no_grad():
        noisy = noisy_targets(block, held[:, 1:], torch.full((8,), 0.1), draw)
        told = F.cross_entropy(block(held[:, :-1], noisy).flatten(0, 1), held[:, 1:].flatten())
    assert float(told) < 2.4, "the letters' frequencies alone leave 2.7: the rest is read off z"
    assert float(objective.score(block, held).mean()) > 6.0
