"""Sparse snapshots: they never add error, what is not sent is never lost, and both sides end on the same bits."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from blocktrain.node.compute import flat
from blocktrain.node.compute.codecs import SPARSE_BLOCK, Sparse
from blocktrain.node.compute.replica import MAX_REFERENCES, TorchReplica
from blocktrain.protocol.errors import PeerFault
from tests.merges import exchange, live, move, snapshot_of
from tests.swarm_kit import manifest, replica

RUN = manifest()


def states(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """A state and a reference that differs from it by small amounts of very different size."""
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(size, generator=generator)
    return reference + torch.randn(size, generator=generator).pow(3) * 0.01, reference


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 3000), seed=st.integers(0, 1000), kept=st.sampled_from((4, 56, 108)))
def test_the_largest_differences_are_sent_in_two_sizes_and_the_rest_stays_the_reference(size: int, seed: int, kept: int) -> None:
    state, reference = states(size, seed)
    codec = Sparse(kept)
    out = codec.decode(codec.encode(state, reference), size, reference)
    wanted, got = (state - reference).numpy(), (out - reference).numpy()
    for begin in range(0, size, SPARSE_BLOCK):
        block, sent = wanted[begin : begin + SPARSE_BLOCK], got[begin : begin + SPARSE_BLOCK]
        changed = sent != 0
        assert changed.sum() <= kept
        assert np.abs(block[~changed]).max(initial=0) <= np.abs(block[changed]).min(initial=math.inf) + 1e-6
        assert (np.sign(sent[changed]) == np.sign(block[changed])).all()
        assert (np.diff(np.sort(np.abs(sent[changed]))) > 1e-5).sum() <= 1, "two sizes, as far as float32 adds them to a reference exactly"


@settings(deadline=None, max_examples=50)
@given(values=hnp.arrays(np.float32, st.integers(1, 600), elements=st.floats(-1e6, 1e6, width=32)), kept=st.sampled_from((4, 108)))
def test_a_snapshot_is_never_further_from_the_state_than_the_reference_is(values: np.ndarray, kept: int) -> None:
    state, reference = torch.from_numpy(values.copy()), torch.zeros(len(values))
    codec = Sparse(kept)
    out = codec.decode(codec.encode(state, reference), len(values), reference)
    assert flat.distance(out, state) <= 1.001 * flat.norm(state) + 1e-30


@pytest.mark.parametrize(("tail", "most"), [(0.5, 0.3), (1.0, 0.15), (3.0, 0.3)], ids=["thin", "normal", "heavy"])
def test_little_is_left_out_whatever_the_tails(tail: float, most: float) -> None:
    """As a share of the energy. Replicas that train with Adam differ by nearly normal numbers."""
    difference = torch.randn(50_000, generator=torch.Generator().manual_seed(1))
    difference = difference.sign() * difference.abs().pow(tail)
    codec, reference = Sparse(), torch.zeros(50_000)
    left = flat.distance(codec.decode(codec.encode(difference, reference), 50_000, reference), difference) ** 2
    assert left < most * flat.norm(difference) ** 2


@given(size=st.integers(1, 10**9))
def test_a_sparse_snapshot_has_less_than_a_sixteenth_of_the_bytes(size: int) -> None:
    blocks = math.ceil(size / SPARSE_BLOCK)
    assert Sparse().encoded_bytes(size) <= 0.985 * 4 * SPARSE_BLOCK * blocks / 16


def test_what_is_left_out_is_sent_later_until_nothing_is_left() -> None:
    state, reference = states(2000, 3)
    codec = Sparse()
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
    for changed in (0, 255):  # fewer or more values than there are
        other = bytearray(payload)
        other[4 * blocks] = changed
        with pytest.raises(PeerFault, match="does not keep 108 of every 256"):
            codec.decode(other, 1000, reference)
    payload[:2] = payload[2:4] = b"\xc0\x7f"  # NaN
    assert not math.isfinite(flat.norm(codec.decode(payload, 1000, reference)))


# ---- two replicas -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def pair() -> AsyncIterator[tuple[TorchReplica, TorchReplica]]:
    both = replica(RUN, 0, 0), replica(RUN, 0, 1)
    yield both
    for each in both:
        await each.stop()


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
        await snapshot_of(low, "sparse", first)
