"""Canonical msgpack and frames: equal values give equal bytes, and hostile bytes give Malformed, nothing else."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol import limits, wire
from blocktrain.protocol.errors import Malformed

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=12
)


@given(VALUES)
def test_every_value_comes_back_as_it_went(value: object) -> None:
    assert wire.unpack(wire.pack(value), 1 << 20) == value


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=8), st.randoms(use_true_random=False))
def test_equal_maps_give_equal_bytes_whatever_their_order(value: dict[str, object], rng: random.Random) -> None:
    keys = list(value)
    rng.shuffle(keys)
    assert wire.pack({key: value[key] for key in keys}) == wire.pack(value)


def test_tuples_pack_like_lists_and_minus_zero_like_zero() -> None:
    assert wire.pack((1, (2,))) == wire.pack([1, [2]])
    assert wire.pack({"x": -0.0}) == wire.pack({"x": 0.0})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [float("-inf")]])
def test_floats_that_are_not_finite_cannot_be_packed(value: object) -> None:
    with pytest.raises(ValueError, match="finite"):
        wire.pack(value)


@pytest.mark.parametrize("value", [{1: 2}, {"a": {b"k": 1}}, {1, 2}, object(), bytearray(b"x"), 1j])
def test_what_has_no_canonical_form_cannot_be_packed(value: object) -> None:
    with pytest.raises(TypeError):
        wire.pack(value)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_value_or_malformed(data: bytes) -> None:
    try:
        value = wire.unpack(data, 64)
    except Malformed as fault:
        line = str(fault)
    else:
        line = type(value).__name__
    assert len(line) < 200


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (wire.pack([1]) + b"\x00", "ExtraData"),
        (b"\xd4\x05x", "extension 5"),
        (b"\x81\x01\x02", "not msgpack"),  # a key that is a number
        (b"\xa2\xff\xfe", "not msgpack"),  # text that is not UTF-8
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),  # a list that claims 4 G items
        (b"\xc6\xff\xff\xff\xff", "not msgpack"),  # bytes that claim 4 GB
        (b"\x91" * 60_000, "not msgpack"),  # nested deeper than the stack
    ],
)
def test_hostile_bytes_are_malformed(data: bytes, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        wire.unpack(data, limits.MAX_HEADER_BYTES)


@pytest.mark.parametrize("around", [b"", b"\x91", b"\x81\xa1t", b"\x92\x01\x81\xa1x\x91"])
def test_msgpacks_own_timestamps_are_an_extension_too(around: bytes) -> None:
    with pytest.raises(Malformed, match="timestamp"):
        wire.unpack(around + b"\xd6\xff\x00\x00\x00\x01", 64)


def test_more_bytes_than_allowed_are_not_even_parsed() -> None:
    with pytest.raises(Malformed, match="11 bytes where at most 10"):
        wire.unpack(bytes(11), 10)


def test_a_header_of_the_greatest_length_cannot_claim_more_memory_than_it_has() -> None:
    bombs = [b"\xdd\x7f\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xdc\xff\xff" + b"\xc0" * 60_000]
    tracemalloc.start()
    for bomb in bombs:
        with pytest.raises(Malformed):
            wire.unpack(bomb, limits.MAX_HEADER_BYTES)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * limits.MAX_HEADER_BYTES


def test_a_frame_says_the_lengths_of_its_header_and_body() -> None:
    data = wire.frame({"t": "x"}, 1000)
    header_bytes, body_bytes = wire.prefix(data[: wire.PREFIX_BYTES])
    assert (header_bytes, body_bytes) == (len(data) - wire.PREFIX_BYTES, 1000)
    assert wire.unpack(data[wire.PREFIX_BYTES :], header_bytes) == {"t": "x"}


@pytest.mark.parametrize(
    ("header_bytes", "body_bytes", "why"),
    [
        (0, 0, "header of 0 bytes"),
        (limits.MAX_HEADER_BYTES + 1, 0, "header of 69633 bytes; at most 69632"),
        (1, limits.MAX_BODY_BYTES + 1, "body of 4194305 bytes; at most 4194304"),
        (2**32 - 1, 2**32 - 1, "header of 4294967295"),
    ],
)
def test_lengths_over_the_bounds_are_refused_before_anything_is_read(header_bytes: int, body_bytes: int, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        wire.prefix(header_bytes.to_bytes(4, "big") + body_bytes.to_bytes(4, "big"))


@given(st.binary(max_size=16))
def test_any_prefix_is_two_lengths_within_bounds_or_malformed(data: bytes) -> None:
    try:
        header_bytes, body_bytes = wire.prefix(data)
    except Malformed:
        return
    assert len(data) == wire.PREFIX_BYTES
    assert 0 < header_bytes <= limits.MAX_HEADER_BYTES
    assert body_bytes <= limits.MAX_BODY_BYTES
