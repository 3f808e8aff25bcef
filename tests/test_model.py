"""The block: equal everywhere from the seed, causal, and the same with a cache as without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from blocktrain.node.compute import flat
from blocktrain.node.compute.model import FULL_EMBEDDING_LAYERS, MAX_WINDOW, Block, Cache, Noisy
from blocktrain.protocol.manifest import Manifest, Model, Noise, Optimizer, Schedule

V, D, T, LAYERS = 64, 32, 48, 2


def a_manifest(seed: int = 5) -> Manifest:
    return Manifest(
        format=1,
        name="tiny",
        blocks=3,
        objective="evidence",
        tokenizer="sha256:" + "0" * 64,
        seed=seed,
        model=Model(width=D, layers=LAYERS, heads=4, context=T, vocabulary=V),
        noise=Noise(sigma_low=0.2, sigma_high=4.0, overlap=0.1, window_share=0.25),
        schedule=Schedule(steps_per_round=10, learning_rate=4e-3, warmup_rounds=1, planned_rounds=10, floor=0.1),
        optimizer=Optimizer(batch=4, accumulate=1, beta1=0.9, beta2=0.95, weight_decay=0.05, clip=1.0, warmup_steps=20),
    )


def tokens(rows: int, positions: int, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, positions), generator=torch.Generator().manual_seed(seed))


def digest_of(block: Block) -> str:
    return flat.digest(flat.to_bytes(flat.Flat(block).data)).hex()


@pytest.fixture
def block() -> Block:
    """A block whose every weight is at work, those that begin at zero too."""
    block = Block(a_manifest(), 1).requires_grad_(False)
    generator = torch.Generator().manual_seed(9)
    for parameter in block.parameters():
        if not parameter.any():
            parameter.normal_(0, 0.3, generator=generator)
    return block


def test_all_replicas_of_a_block_begin_with_the_same_bytes_on_every_machine() -> None:
    """The digest is written down: a change of it would split a run between versions."""
    assert digest_of(Block(a_manifest(), 1)) == digest_of(Block(a_manifest(), 1))
    assert digest_of(Block(a_manifest(), 1)) == "98fe46639bb7065b29824c0cccd09a8bd5b917301ff6f6b3e1b4c96e57cc4edf"


def test_blocks_and_seeds_begin_differently() -> None:
    digests = {digest_of(Block(a_manifest(seed), number)) for seed in (5, 6) for number in range(3)}
    assert len(digests) == 6


def test_initial_weights_look_normal_and_what_reads_noise_is_silent() -> None:
    block = Block(a_manifest(), 0).requires_grad_(False)
    assert abs(float(block.embedding.mean())) < 0.1
    assert 0.9 < float(block.embedding.std()) * FULL_EMBEDDING_LAYERS / LAYERS < 1.1
    assert 0.9 < float(block.head.std() * D**0.5) < 1.1
    for silent in (block.noise_in, block.offset, block.time_out, block.time_out_bias):
        assert not silent.any()


def test_targets_are_one_constant_of_the_run_and_no_parameter() -> None:
    first, second = Block(a_manifest(), 0), Block(a_manifest(), 2)
    assert torch.equal(first.targets, second.targets)
    assert torch.allclose(first.targets.norm(dim=1), torch.ones(V))
    assert "targets" not in dict(first.named_parameters()) | first.state_dict()
    assert not torch.equal(first.targets, Block(a_manifest(6), 0).targets)


def test_shapes_can_be_had_without_memory_for_them(block: Block) -> None:
    shapes = flat.shapes_of(a_manifest())
    assert list(shapes) == sorted(shapes)
    assert shapes == {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
    assert flat.count(shapes) == sum(parameter.numel() for parameter in block.parameters())


@pytest.mark.parametrize("changed", [0, 1, 20, T - 1])
def test_a_token_changes_no_position_before_it_and_every_kind_after(block: Block, changed: int) -> None:
    x = tokens(2, T)
    other = x.clone()
    other[:, changed] = (other[:, changed] + 1) % V
    before, after = block(x), block(other)
    assert before.shape == (2, T, V)
    assert before.dtype == torch.float32
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert (before[:, changed:] != after[:, changed:]).any(dim=2).all()


@pytest.mark.parametrize("cuts", [[1] * T, [7, 1, 20, 20], [T], [T - 1, 1]])
def test_passes_over_a_cache_give_what_one_pass_gives(block: Block, cuts: list[int]) -> None:
    x = tokens(2, T)
    cache = Cache(block, rows=2)
    parts = [block(part, cache=cache) for part in x.split(cuts, dim=1)]
    assert cache.length == T
    assert torch.allclose(torch.cat(parts, dim=1), block(x), atol=1e-5)


def test_a_cache_that_was_cut_back_has_forgotten(block: Block) -> None:
    x, draft = tokens(1, 30), tokens(1, 9, seed=1)
    cache = Cache(block)
    block(x[:, :20], cache=cache)
    block(draft, Noisy.tail(torch.randn(1, 5, D), 0.7, 9), cache=cache)
    cache.truncate(20)
    rest = block(x[:, 20:], cache=cache)
    assert torch.allclose(rest, block(x)[:, 20:], atol=1e-5)
    with pytest.raises(ValueError, match="cannot cut a cache of 30"):
        cache.truncate(31)


def test_a_pass_past_the_context_is_refused(block: Block) -> None:
    cache = Cache(block)
    block(tokens(1, T - 1), cache=cache)
    with pytest.raises(ValueError, match="do not fit a context"):
        block(tokens(1, 2), cache=cache)
    with pytest.raises(ValueError, match="do not fit a context"):
        block(tokens(1, T + 1))


def test_unknown_positions_see_the_last_known_token_and_their_distance_but_not_their_own_token(block: Block) -> None:
    x = tokens(1, 12)
    noisy = Noisy.tail(torch.randn(1, 5, D), 0.7, 12)
    logits = block(x, noisy)

    hidden = x.clone()
    hidden[:, 7:] = (hidden[:, 7:] + 1) % V
    assert torch.equal(block(hidden, noisy), logits)

    known = x.clone()
    known[:, 6] = (known[:, 6] + 1) % V
    assert (block(known, noisy)[:, 6:] != logits[:, 6:]).any(dim=2).all()

    nearer = Noisy(noisy.at_M, noisy.z_MD, noisy.sigma_M, noisy.offset_M.clamp(max=4))
    assert torch.equal(block(x, nearer)[:, :11], logits[:, :11])
    assert not torch.equal(block(x, nearer)[:, 11], logits[:, 11])


def test_noise_is_read_where_it_is_and_not_before(block: Block) -> None:
    x = tokens(2, 12)
    z = torch.randn(2, 4, D)
    other = z.clone()
    other[1, 2] += 1
    before, after = block(x, Noisy.tail(z, 0.7, 12)), block(x, Noisy.tail(other, 0.7, 12))
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1, :10], after[1, :10])
    assert (before[1, 10:] != after[1, 10:]).any(dim=1).all()
    assert torch.equal(before[:, :8], block(x)[:, :8]), "clean positions before a window know nothing of it"


def test_z_is_scaled_to_the_size_of_what_it_holds(block: Block) -> None:
    """c_in = 1/√(σ² + 1/d): z has d coordinates of variance 1/d, plus σ² of noise in each."""
    block.noise_in.copy_(torch.eye(D))
    block.time_out.zero_()
    block.time_out_bias.zero_()
    x, z = tokens(1, 6), torch.randn(3, D)
    sigma = torch.tensor([0.01, 0.5, 4.0])
    noisy = Noisy(torch.tensor([1, 3, 5]), z, sigma, torch.zeros(3, dtype=torch.int64))
    added = (block.embed(x, noisy) - block.embed(x, None))[0]
    assert torch.allclose(added[1::2], z / (sigma**2 + 1 / D).sqrt()[:, None], atol=1e-4)
    assert not added[0::2].any()


def test_a_noisy_position_whose_token_is_known_sees_it_and_no_distance(block: Block) -> None:
    x = tokens(1, 6)
    everywhere = Noisy(torch.arange(6), torch.randn(6, D), torch.full((6,), 0.7), torch.zeros(6, dtype=torch.int64))
    before = block(x, everywhere)
    block.offset.add_(1)
    assert torch.equal(block(x, everywhere), before)
    changed = x.clone()
    changed[0, 2] = (changed[0, 2] + 1) % V
    assert (block(changed, everywhere)[0, 2:] != before[0, 2:]).any(dim=1).all()


def test_a_window_must_follow_a_known_token_and_have_offsets() -> None:
    for window, positions in ((12, 12), (MAX_WINDOW, MAX_WINDOW + 16), (0, 12)):
        with pytest.raises(ValueError, match="a window of"):
            Noisy.tail(torch.zeros(1, window, D), 0.7, positions)


@pytest.mark.parametrize("want", [1, 3, 12])
def test_only_the_positions_wanted_are_scored(block: Block, want: int) -> None:
    x = tokens(2, 12)
    noisy = Noisy.tail(torch.randn(2, 5, D), 0.7, 12)
    assert torch.allclose(block(x, noisy, want=want), block(x, noisy)[:, -want:], atol=1e-6)


def test_computing_layers_twice_changes_memory_and_not_the_gradient() -> None:
    manifest = a_manifest()
    tokens = torch.randint(0, manifest.model.vocabulary, (2, 16), generator=torch.Generator().manual_seed(0))

    def gradients(recompute: bool) -> tuple[list[torch.Tensor], int]:
        block = Block(replace(manifest, optimizer=replace(manifest.optimizer, recompute=recompute)), 0)
        kept = 0

        def note(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = block(tokens).square().mean()
        loss.backward()
        return [parameter.grad for parameter in block.parameters() if parameter.grad is not None], kept

    plain, kept = gradients(False)
    again, kept_again = gradients(True)
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    assert kept_again < kept
