"""Peer ids as libp2p makes them, base58, and buckets."""

from __future__ import annotations

import base58
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import example, given
from hypothesis import strategies as st

from blocktrain.protocol import ids
from blocktrain.protocol.errors import Malformed
from blocktrain.protocol.ids import PeerId

# https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md#test-vectors, and the zero key of the spec's peer-id-auth walkthrough
SEED = bytes.fromhex("7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d")
KEY = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
PEER = PeerId("12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq")
OTHER = PeerId("12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA")  # also an example of the spec
RSA_PEER = PeerId("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N")  # a sha256 of a key: the key is not inside

peers = st.binary(min_size=32, max_size=32).map(ids.peer_id_of_key)


def test_the_specs_key_has_the_specs_peer_id() -> None:
    assert Ed25519PrivateKey.from_private_bytes(SEED).public_key().public_bytes_raw() == KEY
    assert ids.peer_id_of_key(KEY) == PEER
    assert ids.key_of_peer_id(PEER) == KEY
    assert ids.peer_bytes(PEER).hex() == "002408011220" + KEY.hex()


@given(st.binary(min_size=32, max_size=32))
def test_the_key_is_read_back_out_of_every_ed25519_peer_id(key: bytes) -> None:
    assert ids.key_of_peer_id(ids.peer_id_of_key(key)) == key


@pytest.mark.parametrize("peer", [RSA_PEER, PeerId(""), PeerId(PEER[:-1]), PeerId(PEER + "1"), PeerId("1" + PEER)])
def test_an_id_without_an_ed25519_key_is_malformed(peer: PeerId) -> None:
    with pytest.raises(Malformed, match="does not hold an Ed25519 key"):
        ids.key_of_peer_id(peer)


@given(st.binary(max_size=80))
@example(b"")
@example(bytes(5))
@example(bytes.fromhex("0000287fb4cd"))
def test_base58_agrees_with_the_base58_package(data: bytes) -> None:
    text = ids.base58_encode(data)
    assert text == base58.b58encode(data).decode()
    assert ids.base58_decode(text) == data


def test_base58_agrees_with_its_draft_standards_examples() -> None:
    assert ids.base58_encode(b"Hello World!") == "2NEpo7TZRRrLZSi2U"
    assert ids.base58_encode(bytes.fromhex("0000287fb4cd")) == "11233QC4"


@pytest.mark.parametrize("text", ["0", "O", "I", "l", "a b", "é", "1\n"])
def test_a_character_outside_the_alphabet_is_malformed(text: str) -> None:
    with pytest.raises(Malformed, match="is not a base58 character"):
        ids.base58_decode(text)


def test_endless_base58_is_refused_before_it_is_computed() -> None:
    ids.base58_decode("z" * 128)
    with pytest.raises(Malformed, match="too long"):
        ids.base58_decode("z" * 129)


@given(st.text(max_size=60))
def test_any_text_is_a_peer_id_or_malformed(text: str) -> None:
    try:
        key = ids.key_of_peer_id(PeerId(text))
    except Malformed:
        return
    assert ids.peer_id_of_key(key) == text


@given(peers)
def test_buckets_split_in_halves_as_their_number_doubles(peer: PeerId) -> None:
    assert ids.bucket_of(peer, 1) == 0
    for level in (1, 2, 4, 8, 16, 32):
        assert ids.bucket_of(peer, 2 * level) // 2 == ids.bucket_of(peer, level)
        assert ids.bucket_of(peer, level) in range(level)


def test_a_peers_bucket_is_the_same_on_every_machine() -> None:
    assert [ids.bucket_of(peer, 64) for peer in (PEER, OTHER)] == [55, 42]


def test_people_see_the_end_of_a_peer_id_and_the_start_of_a_run() -> None:
    assert ids.short(PEER) == "o7R3pq"
    assert ids.run_name(bytes(range(32))) == "000102030405"
