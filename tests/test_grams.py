"""Hashed n-grams: the same rows on every machine, nothing of the future or of a hidden token, and the same over a cache as without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from blocktrain.node.compute import flat
from blocktrain.node.compute.batching import forward_each
from blocktrain.node.compute.grams import Grams
from blocktrain.node.compute.model import Block, Cache, Noisy
from blocktrain.node.compute.objective import objective_of
from blocktrain.node.compute.worker import Worker
from blocktrain.protocol import sweep
from blocktrain.protocol.manifest import Grams as Wanted
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import Step
from blocktrain.protocol.sweep import Shape, pack_tokens
from tests.test_model import D, T, V, a_manifest, digest_of, tokens

LONGEST = 4
ROWS = [[[3, 8, 76], [2, 65, 32], [52, 36, 34], [20, 66, 22], [20, 58, 34], [20, 58, 29]]]
BEGINS = "51e3df9fe645903ec91c58517e29f3dfc91240567330d1f07f5681b27bd5cd1f"


def a_run(objective: str = "evidence") -> Manifest:
    return replace(a_manifest(), objective=objective, grams=Wanted(longest=LONGEST, rows=97, row_width=6))


def at_work(run: Manifest, number: int = 1) -> Block:
    """A block whose every weight is at work, those that begin at zero too."""
    block = Block(run, number).requires_grad_(False)
    generator = torch.Generator().manual_seed(9)
    for parameter in block.parameters():
        if not parameter.any():
            parameter.normal_(0, 0.3, generator=generator)
    return block


@pytest.fixture(params=["evidence", "autoregressive", "diffusionblocks"])
def block(request: pytest.FixtureRequest) -> Block:
    return at_work(a_run(request.param))


def rows_of(block: Block, x: Tensor) -> Tensor:
    grams = block.grams
    assert isinstance(grams, Grams)
    return grams.rows_of(grams.said(x))


def test_the_rows_of_a_text_are_the_same_everywhere() -> None:
    """Written down: replicas that looked elsewhere in their tables could not be averaged."""
    rows = rows_of(Block(a_run(), 1), torch.tensor([[0, 1, 63, 63, 63, 63]]))
    assert rows.tolist() == ROWS
    assert digest_of(Block(a_run(), 1)) == BEGINS


def test_large_token_ids_stay_whole_numbers() -> None:
    """The largest vocabulary, the longest strings: reckoned once more with numbers that cannot overflow."""
    run = replace(a_run(), grams=Wanted(longest=8, rows=2**26, row_width=1))
    with torch.device("meta"):
        assert Grams(run, 0).table.shape == (2**26, 1)
    grams = Grams(replace(run, grams=replace(run.grams, rows=1009)), 0)
    x = torch.randint(0, 1_000_000, (1, 20), generator=torch.Generator().manual_seed(0))
    x[0, 5:] = 999_999
    said, prime = grams.said(x)[0].tolist(), 2**31 - 1
    factors, salts, mix = grams.factors.tolist(), grams.salts.tolist(), int(grams.mix)
    for place, found in enumerate(grams.rows_of(grams.said(x))[0].tolist()):
        window = said[place : place + 8]
        for length, row in enumerate(found, 2):
            total = sum(token * factor for token, factor in list(zip(window, factors, strict=True))[-length:])
            hashed = (total + salts[length - 2]) % prime
            assert row == (hashed ^ (hashed >> 15)) * mix % prime % 1009


def test_a_fresh_block_is_one_without_a_table_and_blocks_mix_up_other_strings() -> None:
    x = tokens(2, T)
    without = Block(a_manifest(), 1).requires_grad_(False)
    assert torch.equal(Block(a_run(), 1).requires_grad_(False)(x), without(x))
    assert digest_of(Block(a_manifest(), 1)) == "98fe46639bb7065b29824c0cccd09a8bd5b917301ff6f6b3e1b4c96e57cc4edf"
    assert not torch.equal(rows_of(Block(a_run(), 0), x), rows_of(Block(a_run(), 1), x))
    names = set(dict(Block(a_run(), 1).named_parameters())) - set(dict(without.named_parameters()))
    assert names == {"grams.table", "grams.project"}
    assert flat.shapes_of(a_run())["grams.table"] == (97, 6)


def test_strings_spread_over_the_whole_table() -> None:
    rows = rows_of(Block(a_run(), 1), tokens(64, T))
    counts = torch.bincount(rows.flatten(), minlength=97).float()
    assert len(counts) == 97
    assert float(counts.min()) > 0.6 * float(counts.mean())
    assert float(counts.max()) < 1.6 * float(counts.mean())


def test_an_ngram_sees_its_own_length_back_and_nothing_after(block: Block) -> None:
    x = tokens(1, 20)
    changed = x.clone()
    changed[0, 10] = (changed[0, 10] + 1) % V
    before, after = rows_of(block, x), rows_of(block, changed)
    assert torch.equal(before[0, :10], after[0, :10])
    for length in range(2, LONGEST + 1):
        differs = (before[0, :, length - 2] != after[0, :, length - 2]).nonzero().flatten().tolist()
        assert differs == list(range(10, 10 + length))
    here, there = block(x), block(changed)
    assert torch.equal(here[:, :10], there[:, :10])


def test_an_unknown_token_is_never_read_and_the_last_known_ones_string_stands_in() -> None:
    block = at_work(a_run())
    x = tokens(2, 14)
    noisy = Noisy.tail(torch.randn(2, 5, D), 0.7, 14)
    logits = block(x, noisy)
    hidden = x.clone()
    hidden[:, 9:] = (hidden[:, 9:] + 7) % V
    assert torch.equal(block(hidden, noisy), logits)
    assert block.grams is not None
    block.noise_in.zero_()
    block.offset.zero_()
    block.time_out.zero_()
    block.time_out_bias.zero_()
    read = block.embed(x, noisy)
    assert torch.allclose(read[:, 9:], read[:, 8:9].expand(2, 5, D), atol=1e-6)
    known = x.clone()
    known[:, 6] = (known[:, 6] + 1) % V
    assert (block.embed(known, noisy)[:, 9:] != read[:, 9:]).any(dim=2).all(), "two tokens before the last known one"


@pytest.mark.parametrize("cuts", [[1] * T, [7, 1, 20, 20], [2, 3, 43], [T]])
def test_passes_over_a_cache_give_what_one_pass_gives(block: Block, cuts: list[int]) -> None:
    x = tokens(2, T)
    cache = Cache(block, rows=2)
    looked_up: list[Tensor] = []
    assert block.grams is not None
    block.grams.register_forward_pre_hook(lambda module, inputs: looked_up.append(inputs[0].view(2, -1, LONGEST - 1)))
    parts = [block(part, cache=cache) for part in x.split(cuts, dim=1)]
    assert torch.equal(torch.cat(looked_up, dim=1), rows_of(block, x)), "the very same rows"
    assert torch.allclose(torch.cat(parts, dim=1), block(x), atol=1e-5)


def test_a_cache_that_was_cut_back_has_forgotten_the_strings_too(block: Block) -> None:
    x, draft = tokens(1, 30), tokens(1, 9, seed=1)
    cache = Cache(block)
    block(x[:, :20], cache=cache)
    block(draft, Noisy.tail(torch.randn(1, 5, D), 0.7, 9), cache=cache)
    cache.truncate(20)
    assert torch.allclose(block(x[:, 20:], cache=cache), block(x)[:, 20:], atol=1e-5)
    cache.truncate(0)
    assert torch.allclose(block(draft, cache=cache), block(draft), atol=1e-5)


def test_several_texts_in_one_pass_have_each_its_own_strings() -> None:
    block = at_work(a_run("autoregressive"))
    lengths, x = (0, 3, 17), tokens(3, 20)
    caches = [Cache(block) for _ in lengths]
    for row, (length, cache) in enumerate(zip(lengths, caches, strict=True)):
        if length:
            block(x[row : row + 1, :length], cache=cache)
    new = tokens(3, 4, seed=2)
    together = forward_each(block, new, caches, want=4)
    for row, length in enumerate(lengths):
        whole = torch.cat((x[row : row + 1, :length], new[row : row + 1]), dim=1)
        assert torch.allclose(together[row : row + 1], block(whole)[:, length:], atol=1e-5)


def test_a_holder_scores_a_drafted_text_as_it_would_without_a_cache() -> None:
    """Drafting a token at a time, then scoring all at once in a second session: the same rows of log-probabilities."""
    run = a_run()
    worker, shape = Worker(run, at_work(run, 0)), Shape.of(run)
    text = tokens(1, 12)[0].tolist()
    drafting = Step(sequence=0, position=0, rows=1, want=6, draft=5, tokens=pack_tokens(text, shape), temperature=0.0)
    answer, body = worker.step(worker.cache(), drafting, b"")
    every = sweep.unpack_tokens(answer.tokens, shape)
    assert len(every) == 17
    scored = worker.step(worker.cache(), Step(sequence=1, position=0, rows=1, want=6, tokens=pack_tokens(every, shape)), b"")[1]
    mine, theirs = (torch.frombuffer(bytearray(part[: 6 * shape.row_bytes]), dtype=torch.float16).float() for part in (body, scored))
    assert torch.allclose(mine, theirs, atol=0.01)


def test_only_rows_that_occurred_have_a_gradient_and_all_objectives_train_them(block: Block) -> None:
    run = a_run({True: "diffusionblocks"}.get(block.literal, "evidence"))
    fresh = Block(run, 1)
    x = tokens(2, 17)
    objective_of(run, 1).loss(fresh, x, torch.Generator().manual_seed(0)).backward()
    assert fresh.grams is not None
    gradient = fresh.grams.table.grad
    assert gradient is not None
    touched = set(rows_of(fresh, x[:, :-1]).flatten().tolist())
    assert {row for row in range(97) if gradient[row].any()} <= touched
    assert gradient.any()
