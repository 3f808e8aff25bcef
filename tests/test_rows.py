"""Rows of log-probabilities on the wire: whole, or the likeliest tokens and the mass of the rest; and what a chain loses by that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.node.compute import rows
from blocktrain.node.compute.evaluation import chain_loss
from blocktrain.node.compute.generation import TextSweep, Traversals
from blocktrain.node.compute.model import Block
from blocktrain.node.compute.offline import OfflineChain
from blocktrain.node.compute.sampling import to_half
from blocktrain.node.compute.worker import load_block
from blocktrain.protocol import sweep
from blocktrain.protocol.errors import PeerFault
from blocktrain.protocol.manifest import OBJECTIVES, Manifest
from blocktrain.protocol.sweep import SEQUENTIAL, Shape, kept_of
from blocktrain.swarm_sim.lab import vocabulary
from tests.sweeping import MANIFEST, World, a_request, state_of

V, K = 300, 24
SPARSE = Shape(V, 32, 8, 3, kept=K)
WORDS = replace(MANIFEST, model=replace(MANIFEST.model, vocabulary=5000), tokenizer="sha256:" + "0" * 64)


def some_rows(count: int = 5, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, spread, (count, V))
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    return to_half(values.astype(np.float32))


def probabilities(row: np.ndarray, terms: int = 1) -> np.ndarray:
    return np.exp(row.astype(np.float64) / terms)


def test_large_vocabularies_travel_as_their_likeliest_tokens_and_small_ones_whole() -> None:
    assert kept_of(256) == 0
    assert Shape(256, 32, 8, 3).row_bytes == 512
    assert 0 < kept_of(50_000) < 5_000
    assert Shape(50_000, 32, 8, 3, kept=100).row_bytes == 100 * (2 + 2) + 2
    assert Shape(200_000, 32, 8, 3, kept=100).row_bytes == 100 * (4 + 2) + 2
    whole = some_rows()
    dense = replace(SPARSE, kept=0)
    assert np.array_equal(rows.unpack(rows.pack(whole, dense, 1), dense), whole)


@pytest.mark.parametrize("terms", [1, 3])
def test_the_likeliest_keep_their_values_and_the_others_their_joint_mass(terms: int) -> None:
    whole = (some_rows().astype(np.float32) * terms).astype(np.float16)
    packed = rows.pack(whole, SPARSE, terms)
    assert len(packed) == len(whole) * SPARSE.row_bytes
    for before, after in zip(whole, rows.unpack(packed, SPARSE), strict=True):
        kept = np.argsort(-before, kind="stable")[:K]
        others = np.setdiff1d(np.arange(V), kept)
        assert np.array_equal(after[kept], before[kept])
        assert len(set(after[others].tolist())) == 1
        mass = probabilities(before[others], terms).sum()
        assert probabilities(after[others], terms).sum() == pytest.approx(mass, rel=0.01), "as exact as fp16 is"


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.2, 4.0]))
def test_what_was_read_travels_on_unchanged_whatever_ties_there_are(seed: int, spread: float) -> None:
    read = rows.settled(np.round(some_rows(3, seed, spread)), SPARSE, 2)
    assert np.array_equal(rows.settled(read, SPARSE, 2), read)


def test_rows_that_no_holder_makes_are_refused() -> None:
    good = bytearray(rows.pack(some_rows(1), SPARSE, 1))
    twice, outside = good.copy(), good.copy()
    twice[2:4] = twice[0:2]
    outside[2 * K - 2 : 2 * K] = V.to_bytes(2, "little")
    for bad in (twice, outside):
        with pytest.raises(PeerFault, match="accumulator"):
            rows.unpack(bytes(bad), SPARSE)


def test_the_more_tokens_travel_the_nearer_a_chain_is_to_whole_rows() -> None:
    own = [some_rows(40, seed) for seed in range(3)]
    whole = vocabulary.chain_of(own, replace(SPARSE, kept=0))
    far = [np.abs(vocabulary.chain_of(own, replace(SPARSE, kept=kept)) - whole).sum(axis=1).mean() / 2 for kept in (8, 64, V - 1)]
    assert far[0] > far[1] > far[2]
    assert far[2] < 0.005


# ---- in a sweep -------------------------------------------------------------------------------------------------------------------------


def some_blocks(run: Manifest) -> list[Block]:
    return [load_block(Block(run, number).requires_grad_(False), state_of(number, manifest=run)) for number in range(run.blocks)]


async def text_of(chain: Traversals, run: Manifest, draft: int) -> bytes:
    def as_numbers(tokens: Sequence[int], last: bool) -> bytes:
        return b"".join(token.to_bytes(2, "big") for token in tokens)

    text = TextSweep(chain, run, a_request(12, draft=draft, adapt=False), decode=as_numbers)
    async for _ in text.pieces():
        pass
    return text.result().data


@pytest.mark.parametrize("objective", OBJECTIVES)
async def test_a_swarm_with_many_words_writes_the_same_text_by_every_route_and_at_every_draft(objective: str) -> None:
    run = replace(WORDS, objective=objective)
    world = World(manifest=run)
    await world.add("a0", "a1", "a2")
    routes = ("chain",) if objective in SEQUENTIAL else ("chain", "star")
    texts = []
    for draft in (1, 5):
        async with OfflineChain(run, some_blocks(run)) as offline:
            texts.append(await text_of(offline, run, draft))
        for route in routes:
            async with world.chain(route=route) as chain:
                texts.append(await text_of(chain, run, draft))
                assert not chain.report.mended
    assert len(texts[0]) == 24
    assert len(set(texts)) == 1
    await world.close()


async def test_the_loss_over_many_words_is_that_of_whole_rows_where_all_but_one_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = some_blocks(WORDS)
    tokens = torch.randint(0, 5000, (3, 20), generator=torch.Generator().manual_seed(2))
    logs = torch.stack([block(tokens[:, :-1]).log_softmax(-1) for block in blocks]).mean(0).log_softmax(-1)
    whole = float(-logs.gather(2, tokens[:, 1:, None]).mean())
    found = []
    for kept in (4999, sweep.KEPT_TOKENS):
        monkeypatch.setattr(sweep, "KEPT_TOKENS", kept)
        async with OfflineChain(WORDS, blocks) as chain:
            found.append(await chain_loss(chain, WORDS, tokens.tolist()))
    assert found[0].nats == pytest.approx(whole, abs=0.01)
    assert found[1].tokens == 57
    assert abs(found[1].nats - whole) < 1.0, "a word that no row names has an even share of what is left"
