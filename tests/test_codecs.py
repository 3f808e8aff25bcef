"""How states travel and merge: what each codec may lose, what it refuses, and that both sides of a merge get the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from blocktrain.node.compute import flat
from blocktrain.node.compute.codecs import CODECS, INT8_BLOCK, codec_of
from blocktrain.protocol.errors import PeerFault
from blocktrain.protocol.exchange import shares

NAMES = sorted(CODECS)
FINITE = st.floats(-(2.0**99), 2.0**99, width=32)
STATES = hnp.arrays(np.float32, st.integers(1, 3 * INT8_BLOCK), elements=FINITE)
FEW = settings(max_examples=30)
ANY_FLOAT = st.floats(width=32, allow_nan=True, allow_infinity=True)


def tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.copy())


def round_trip(name: str, state: Tensor) -> Tensor:
    codec = codec_of(name)
    return codec.decode(codec.encode(state), state.numel())


def gaussian(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


# ---- what is lost ----------------------------------------------------------------------------------------------------------------------


@FEW
@given(STATES)
def test_fp32_loses_nothing(values: np.ndarray) -> None:
    assert torch.equal(round_trip("fp32", tensor(values)), tensor(values))


@FEW
@given(STATES)
def test_bf16_is_off_by_at_most_half_of_its_last_bit(values: np.ndarray) -> None:
    error = np.abs(round_trip("bf16", tensor(values)).numpy() - values)
    assert (error <= np.abs(values) * 2.0**-8 + 2.0**-134).all()


@FEW
@given(STATES)
@example(gaussian(40 * INT8_BLOCK, 5).numpy())
def test_int8_is_off_by_at_most_half_a_step_of_its_block(values: np.ndarray) -> None:
    decoded = round_trip("int8", tensor(values)).numpy()
    for begin in range(0, len(values), INT8_BLOCK):
        block = values[begin : begin + INT8_BLOCK].astype(np.float64)
        step = np.abs(block).max() / 127
        error = np.abs(decoded[begin : begin + INT8_BLOCK].astype(np.float64) - block)
        assert (error <= step * 0.5001 + 2.0**-142).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_decoded_state_encodes_to_itself(name: str) -> None:
    """So a state that went through several hands loses its bits once."""
    once = round_trip(name, gaussian(10_000, 1))
    assert torch.allclose(round_trip(name, once), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_errors_have_no_direction(name: str) -> None:
    """The mean over many parameters survives: rounding is to nearest, not down."""
    state = gaussian(200_000, 2)
    assert abs(float((round_trip(name, state) - state).mean())) < 2e-5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, INT8_BLOCK - 1, INT8_BLOCK, INT8_BLOCK + 1, flat.PIECE - 1, flat.PIECE + 77])
def test_sizes_at_the_edges_of_blocks_and_pieces(name: str, size: int) -> None:
    state = gaussian(size, 3)
    codec = codec_of(name)
    payload = codec.encode(state)
    assert len(payload) == codec.encoded_bytes(size)
    assert payload.readonly
    assert flat.distance(codec.decode(payload, size), state) <= 0.02 * flat.norm(state)


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_is_a_copy_and_decoding_makes_another(name: str) -> None:
    state = gaussian(1000, 4)
    codec = codec_of(name)
    payload = codec.encode(state)
    before = bytes(payload)
    state.zero_()
    codec.decode(payload, 1000).zero_()
    assert bytes(payload) == before


# ---- what is refused -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(size=st.integers(1, 700), data=st.data())
def test_any_other_number_of_bytes_is_the_peers_fault(name: str, size: int, data: st.DataObject) -> None:
    codec = codec_of(name)
    wrong = data.draw(st.integers(0, 3000).filter(lambda n: n != codec.encoded_bytes(size)))
    with pytest.raises(PeerFault, match="bytes"):
        codec.decode(bytes(wrong), size)


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(payload=st.binary(min_size=2000, max_size=2000))
def test_arbitrary_bytes_of_the_right_number_decode_to_a_state(name: str, payload: bytes) -> None:
    """Whether it is a sensible one is asked after: NaN and infinity show in the norm."""
    codec = codec_of(name)
    size = next(size for size in range(2000, 0, -1) if codec.encoded_bytes(size) <= 2000)
    state = codec.decode(payload[: codec.encoded_bytes(size)], size)
    assert state.shape == (size,)
    assert bool(np.isfinite(flat.norm(state))) <= bool(torch.isfinite(state).all())


def test_an_unknown_codec_is_the_peers_fault() -> None:
    with pytest.raises(PeerFault, match="'zip' is not known here; known are"):
        codec_of("zip")


@FEW
@given(hnp.arrays(np.float32, st.integers(1, 50), elements=ANY_FLOAT))
def test_the_norm_shows_what_is_not_finite(values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        assert not np.isfinite(flat.norm(tensor(values)))


def test_a_state_of_another_size_is_the_peers_fault() -> None:
    with pytest.raises(PeerFault, match="a state of 8 bytes; this block's has 12"):
        flat.from_bytes(bytes(8), 3)


@FEW
@given(STATES)
def test_a_state_survives_its_bytes(values: np.ndarray) -> None:
    payload = flat.to_bytes(tensor(values))
    assert bytes(payload) == values.astype("<f4").tobytes()
    assert torch.equal(flat.from_bytes(payload, len(values)), tensor(values))


# ---- merging ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(seed=st.integers(0, 2**32), mine=st.floats(0, 1e9), theirs=st.floats(0, 1e9))
def test_both_sides_compute_the_same_bits(name: str, seed: int, mine: float, theirs: float) -> None:
    """Each from its own snapshot and the other's payload, in the order of the peer ids."""
    codec = codec_of(name)
    low, high = gaussian(1000, seed), gaussian(1000, seed + 1)
    low_payload, high_payload = codec.encode(low), codec.encode(high)
    parts = shares(mine, theirs, 1000.0)
    at_low = flat.merge(codec.decode(low_payload, 1000), codec.decode(bytes(high_payload), 1000), parts)
    at_high = flat.merge(codec.decode(bytes(low_payload), 1000), codec.decode(high_payload, 1000), parts)
    assert flat.digest(flat.to_bytes(at_low)) == flat.digest(flat.to_bytes(at_high))


@FEW
@given(STATES, st.floats(0, 1))
def test_a_merge_is_two_products_and_a_sum_each_rounded(values: np.ndarray, share: float) -> None:
    """The same as numpy's, which never fuses: this is what makes it equal from machine to machine."""
    other = np.ascontiguousarray(values[::-1]) * np.float32(0.3)
    expected = values * np.float32(share) + other * np.float32(1 - share)
    merged = flat.merge(tensor(values), tensor(other), (share, 1 - share))
    assert merged.numpy().tobytes() == expected.tobytes()


def test_a_merge_over_several_pieces_has_no_seam() -> None:
    size = 2 * flat.PIECE + 5
    a, b = gaussian(size, 1), gaussian(size, 2)
    assert torch.equal(flat.merge(a, b, (0.25, 0.75)), a * 0.25 + b * 0.75)
    assert flat.norm(a) == pytest.approx(float(a.double().norm()), rel=1e-4)
    assert flat.distance(a, b) == pytest.approx(float((a - b).double().norm()), rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_error_feedback_keeps_the_mean_of_two_replicas(name: str) -> None:
    """live += merge - own encoded snapshot, on both sides with equal weights: what the codec loses is lost to nobody."""
    codec = codec_of(name)
    lives = [gaussian(5000, 1), gaussian(5000, 2)]
    mean = (lives[0] + lives[1]) / 2
    encoded = [round_trip(name, live) for live in lives]
    merged = flat.merge(encoded[0], encoded[1], shares(7.0, 7.0, 1.0))
    after = [live + (merged - own) for live, own in zip(lives, encoded, strict=True)]
    assert torch.allclose((after[0] + after[1]) / 2, mean, atol=1e-6)
    assert flat.distance(after[0], after[1]) <= 0.03 * flat.distance(lives[0], lives[1]) or name == "fp32"
    assert codec.encoded_bytes(5000) == len(codec.encode(after[0]))
