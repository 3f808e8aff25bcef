"""DHT records: they stay small, say only what the rules allow, and their signature binds place, writer, content and time."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol import ids, limits, records, schema, wire
from blocktrain.protocol.errors import Malformed
from blocktrain.protocol.ids import PeerId, RunId
from blocktrain.protocol.records import Announcement, RunRecord, Seen

RUN = RunId(bytes(range(32)))
ANNOUNCEMENT = Announcement(RUN, 2, "training", 17, b"d" * 32, 1234.5, 1.0, 1, 1, ("/ip4/203.0.113.7/tcp/31337",))
LARGEST = Announcement(
    RunId(b"\xff" * 32),
    limits.MAX_BLOCKS - 1,
    max(records.PHASES, key=len),
    records.MAX_ROUND,
    b"\xff" * 32,
    123456789.123,
    1e6 - 0.1,
    1_000_000,
    1_000_000,
    ("/ip6/2001:db8:ffff:ffff:ffff:ffff:ffff:ffff/tcp/65535", "/ip4/255.255.255.255/tcp/65535"),
)

announcements = st.builds(
    Announcement,
    run=st.binary(min_size=32, max_size=32),
    block=st.integers(0, limits.MAX_BLOCKS - 1),
    phase=st.sampled_from(records.PHASES),
    round=st.integers(0, records.MAX_ROUND),
    digest=st.binary(min_size=32, max_size=32),
    tokens_per_s=st.floats(0, 1e12),
    load=st.floats(0, 1e6),
    protocol_min=st.integers(1, 1_000_000),
    protocol_max=st.integers(1, 1_000_000),
    addresses=st.lists(st.from_regex(r"/ip4/[0-9]{1,3}\.[0-9]{1,3}\.0\.1/tcp/[0-9]{1,5}", fullmatch=True), max_size=2).map(tuple),
)


@given(announcements)
def test_every_announcement_comes_back_and_stays_small(announcement: Announcement) -> None:
    data = records.pack_record(announcement)
    assert len(data) <= limits.MAX_ANNOUNCEMENT_BYTES
    assert records.unpack_announcement(data) == announcement


def test_the_largest_announcement_with_two_addresses_fits() -> None:
    assert len(records.pack_record(LARGEST)) <= limits.MAX_ANNOUNCEMENT_BYTES


def test_of_two_addresses_too_long_for_the_record_the_first_is_kept() -> None:
    longest = dataclasses.replace(LARGEST, addresses=("a" * limits.MAX_ADDRESS_CHARS, "b" * limits.MAX_ADDRESS_CHARS))
    data = records.pack_record(longest)
    assert len(data) <= limits.MAX_ANNOUNCEMENT_BYTES
    assert records.unpack_announcement(data) == dataclasses.replace(longest, addresses=longest.addresses[:1])


def test_an_address_too_long_for_the_rules_is_left_out_rather_than_making_the_record_invalid() -> None:
    long = dataclasses.replace(
        ANNOUNCEMENT, addresses=("/dns4/" + "a" * limits.MAX_ADDRESS_CHARS, "/ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.5/tcp/1")
    )
    assert records.unpack_announcement(records.pack_record(long)).addresses == ("/ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.5/tcp/1")


def test_a_run_record_comes_back_and_stays_small() -> None:
    record = RunRecord(RUN, "n" * 64, 1, 1_000_000)
    assert records.unpack_run_record(records.pack_record(record)) == record
    assert len(records.pack_record(RunRecord(RUN, "\U0001f600" * 64, 1_000_000, 1_000_000))) <= limits.MAX_ANNOUNCEMENT_BYTES


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("run", b"short", "run has 5 bytes; it must have 32"),
        ("block", -1, "block is -1"),
        ("block", limits.MAX_BLOCKS, "block is 1024"),
        ("phase", "sleeping", "phase is sleeping; it must be one of choosing, joining"),
        ("round", records.MAX_ROUND + 1, "round is"),
        ("digest", b"d" * 33, "digest has 33 bytes"),
        ("tokens_per_s", -1.0, "tokens_per_s is -1"),
        ("load", "much", "load must be a number, not str"),
        ("addresses", ["a"] * 3, "addresses has 3 items; at most 2"),
        ("addresses", ["x" * 129], r"addresses\[0\] has 129 characters"),
        ("addresses", ["/ip4/1.2.3.4\x1b[31m"], r"addresses\[0\] holds control characters"),
        ("addresses", "ab", "addresses must be a list, not str"),
    ],
)
def test_an_announcement_that_breaks_a_rule_is_refused_with_the_fields_name(field: str, value: object, why: str) -> None:
    fields: dict[str, Any] = {**schema.encode(ANNOUNCEMENT), field: value}
    with pytest.raises(Malformed, match=why):
        records.unpack_announcement(wire.pack(fields))


def test_an_announcement_over_the_bound_is_refused_unread() -> None:
    with pytest.raises(Malformed, match="401 bytes where at most 400"):
        records.unpack_announcement(bytes(401))


def test_a_later_versions_extra_key_does_not_hide_the_announcement() -> None:
    assert records.unpack_announcement(wire.pack({**schema.encode(ANNOUNCEMENT), "colour": "blue"})) == ANNOUNCEMENT


@given(st.binary(max_size=120))
def test_any_bytes_are_a_record_or_malformed(data: bytes) -> None:
    for unpack in (records.unpack_announcement, records.unpack_run_record):
        with pytest.raises(Malformed):
            unpack(data)


def test_a_record_that_is_no_map_is_malformed() -> None:
    with pytest.raises(Malformed, match="a record is a map"):
        records.unpack_announcement(wire.pack([1, 2]))


def test_what_is_signed_differs_whenever_key_writer_value_or_expiry_differ() -> None:
    base = (b"key", b"writer", b"value", 1000.0)
    others = [(b"kex", *base[1:]), (b"key", b"writes", *base[2:]), (*base[:2], b"valuf", 1000.0), (*base[:3], 1000.001)]
    shifted = [(b"keyw", b"riter", b"value", 1000.0), (b"key", b"writerv", b"alue", 1000.0)]
    for one, other in combinations([base, *others, *shifted], 2):
        assert records.signed_bytes(*one) != records.signed_bytes(*other)
    assert records.signed_bytes(b"key", b"writer", b"value", 1000) == records.signed_bytes(*base)


def test_a_signature_cannot_be_carried_to_another_key_writer_value_or_expiry() -> None:
    private = Ed25519PrivateKey.generate()
    peer = ids.peer_id_of_key(private.public_key().public_bytes_raw())
    value = records.pack_record(ANNOUNCEMENT)
    signature = private.sign(records.signed_bytes(b"key", ids.peer_bytes(peer), value, 1000.0))
    verify = private.public_key().verify
    verify(signature, records.signed_bytes(b"key", ids.peer_bytes(peer), value, 1000.0))
    forged = records.pack_record(dataclasses.replace(ANNOUNCEMENT, round=18))
    for moved in (
        records.signed_bytes(b"other key", ids.peer_bytes(peer), value, 1000.0),
        records.signed_bytes(b"key", b"another writer", value, 1000.0),
        records.signed_bytes(b"key", ids.peer_bytes(peer), forged, 1000.0),
        records.signed_bytes(b"key", ids.peer_bytes(peer), value, 1030.0),
    ):
        with pytest.raises(InvalidSignature):
            verify(signature, moved)


def test_keys_of_different_runs_blocks_and_buckets_differ() -> None:
    other = RunId(bytes(32))
    keys = [records.runs_key(), *(records.block_key(run, block, bucket) for run in (RUN, other) for block in (0, 1) for bucket in (0, 1))]
    assert len(set(keys)) == 9
    assert all(key[:2] == ("blocktrain", 1) for key in keys)


def test_of_two_records_the_strictly_later_expiry_holds() -> None:
    old, same, later = (Seen(PeerId("p"), ANNOUNCEMENT, expiry) for expiry in (10.0, 10.0, 10.5))
    assert records.newer(None, old) is old
    assert records.newer(old, same) is old
    assert records.newer(old, later) is later
    assert records.newer(later, old) is later
