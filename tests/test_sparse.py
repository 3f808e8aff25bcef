"""Sparse snapshots: what is sent is within half a step, what is not sent is never lost, and both sides end on the same bits."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blocktrain.node.compute import codecs, flat
from blocktrain.node.compute.codecs import SPARSE_BLOCK, SPARSE_KEPT, Sparse
from blocktrain.node.compute.replica import MAX_REFERENCES, TorchReplica
from blocktrain.node.ports import Snapshot, Terms
from blocktrain.protocol.errors import PeerFault
from blocktrain.protocol.ids import PeerId
from tests.swarm_kit import manifest, replica

RUN = manifest()
THEM = PeerId("12D3KooWthem")


def states(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """A state and a reference that differs from it by small amounts of very different size."""
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(size, generator=generator)
    return reference + torch.randn(size, generator=generator).pow(3) * 0.01, reference


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 3000), seed=st.integers(0, 1000), bits=st.sampled_from((4, 8)), kept=st.sampled_from((2, 28, 40)))
def test_what_is_sent_is_within_half_a_step_and_what_is_not_stays_the_reference(size: int, seed: int, bits: int, kept: int) -> None:
    state, reference = states(size, seed)
    codec = Sparse(bits, kept)
    out = codec.decode(codec.encode(state, reference), size, reference)
    wanted, got = state - reference, out - reference
    for begin in range(0, size, SPARSE_BLOCK):
        block, sent = wanted[begin : begin + SPARSE_BLOCK], got[begin : begin + SPARSE_BLOCK]
        step = float(block.abs().max()) / (127 if bits == 8 else 7)
        changed = out[begin : begin + SPARSE_BLOCK] != reference[begin : begin + SPARSE_BLOCK]
        assert changed.sum() <= kept
        largest = block.abs().topk(min(kept, len(block))).indices
        assert (sent[largest] - block[largest]).abs().max() <= 0.5 * step + 1e-6


@given(size=st.integers(1, 10**9))
def test_a_sparse_snapshot_has_a_sixteenth_of_the_bytes(size: int) -> None:
    blocks = math.ceil(size / SPARSE_BLOCK)
    assert Sparse().encoded_bytes(size) <= 4 * SPARSE_BLOCK * blocks / 16


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_left_out_is_sent_later_until_nothing_is_left(bits: int) -> None:
    state, reference = states(2000, 3)
    codec = Sparse(bits, SPARSE_KEPT)
    begin = flat.distance(state, reference)
    before = math.inf
    for _ in range(40):
        reference = codec.decode(codec.encode(state, reference), 2000, reference)
        distance = flat.distance(state, reference)
        assert distance <= before * 1.0001
        before = distance
    assert before < 1e-3 * begin


def test_hostile_sparse_snapshots_are_the_peers_fault() -> None:
    state, reference = states(1000, 1)
    codec = Sparse()
    payload = bytearray(codec.encode(state, reference))
    with pytest.raises(PeerFault, match="bytes"):
        codec.decode(payload[:-1], 1000, reference)
    with pytest.raises(PeerFault, match="no reference"):
        codec.decode(payload, 1000)
    blocks = math.ceil(1000 / SPARSE_BLOCK)
    twice = bytearray(payload)
    twice[4 * blocks + 1] = twice[4 * blocks]  # the same index twice: a sum whose order nobody has agreed on
    with pytest.raises(PeerFault, match="rise"):
        codec.decode(twice, 1000, reference)
    payload[:4] = np.float32(np.nan).tobytes()
    assert not math.isfinite(flat.norm(codec.decode(payload, 1000, reference)))


# ---- two replicas -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def pair() -> AsyncIterator[tuple[TorchReplica, TorchReplica]]:
    both = replica(RUN, 0, 0), replica(RUN, 0, 1)
    yield both
    for each in both:
        await each.stop()


def terms(snapshot: Snapshot) -> Terms:
    return Terms(THEM, snapshot.round, snapshot.weight, snapshot.digest, snapshot.codec)


async def live(each: TorchReplica) -> Tensor:
    return codecs.codec_of("fp32").decode((await each.snapshot("fp32")).payload, each.state_bytes // 4)


async def move(each: TorchReplica, seed: int) -> None:
    """As training would, without its time: every parameter by a little."""
    step = torch.randn(each.state_bytes // 4, generator=torch.Generator().manual_seed(seed)) * 1e-3
    await each._between_steps(lambda trainer: trainer.add(step))


async def exchange(low: TorchReplica, high: TorchReplica, codec: str, reference: bytes = b"") -> bytes:
    mine, theirs = await low.snapshot(codec, reference), await high.snapshot(codec, reference)
    at_low = await low.consider(mine, theirs.payload, terms(theirs), mine_first=True)
    at_high = await high.consider(theirs, mine.payload, terms(mine), mine_first=False)
    assert at_low.digest == at_high.digest
    await low.adopt(at_low, mine, keep=True)
    await high.adopt(at_high, theirs, keep=True)
    assert bytes(low.state()[1]) == bytes(high.state()[1])
    return at_low.digest


async def test_sparse_exchanges_keep_the_mean_and_bring_two_replicas_together(pair: tuple[TorchReplica, TorchReplica]) -> None:
    low, high = pair
    reference = await exchange(low, high, "bf16")
    await move(low, 1)
    await move(high, 2)
    mean, apart = (await live(low) + await live(high)) / 2, flat.distance(await live(low), await live(high))
    for _ in range(40):
        reference = await exchange(low, high, "sparse", reference)
    assert flat.distance(await live(low), await live(high)) < 0.1 * apart
    assert flat.distance((await live(low) + await live(high)) / 2, mean) < 1e-3 * apart


async def test_only_the_last_merges_can_be_a_reference(pair: tuple[TorchReplica, TorchReplica]) -> None:
    low, high = pair
    first = await exchange(low, high, "bf16")
    for seed in range(MAX_REFERENCES):
        await move(low, seed)
        assert low.has_reference(first)
        last = await exchange(low, high, "bf16")
    assert not low.has_reference(first)
    assert low.has_reference(last)
    with pytest.raises(PeerFault, match="not kept"):
        await low.snapshot("sparse", first)
