"""Names of things: peers, runs, digests.

A peer id is libp2p's: the multihash of the public key, in base58. For Ed25519 the multihash is the identity, so the key can be
read out of the id, and a record signed by that key proves who wrote it without asking anybody.
https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

from __future__ import annotations

import hashlib
from typing import NewType

from blocktrain.protocol.errors import Malformed

PeerId = NewType("PeerId", str)  # base58, "12D3KooW…"
RunId = NewType("RunId", bytes)  # sha256 of the canonical manifest, 32 bytes
Digest = NewType("Digest", bytes)  # blake3 of a state's or a transfer's bytes, 32 bytes

DIGEST_BYTES = 32
NO_DIGEST = Digest(bytes(DIGEST_BYTES))

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_INDEX = {char: index for index, char in enumerate(_ALPHABET)}
_ED25519_PREFIX = bytes.fromhex("002408011220")  # identity multihash, 36 bytes, protobuf(key type 1, 32 bytes)
_ED25519_ID_BYTES = 38


def base58_encode(data: bytes) -> str:
    number = int.from_bytes(data, "big")
    out: list[str] = []
    while number:
        number, digit = divmod(number, 58)
        out.append(_ALPHABET[digit])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(out))


def base58_decode(text: str) -> bytes:
    """Raises: Malformed: a character outside the alphabet, or more than 128 of them."""
    if len(text) > 128:
        raise Malformed("base58 text is too long")
    number = 0
    for char in text:
        if char not in _INDEX:
            raise Malformed(f"{char!r} is not a base58 character")
        number = number * 58 + _INDEX[char]
    body = number.to_bytes((number.bit_length() + 7) // 8, "big")
    zeros = len(text) - len(text.lstrip("1"))
    return bytes(zeros) + body


def peer_id_of_key(public_key: bytes) -> PeerId:
    """The peer id of an Ed25519 public key of 32 bytes."""
    assert len(public_key) == 32
    return PeerId(base58_encode(_ED25519_PREFIX + public_key))


def key_of_peer_id(peer: PeerId) -> bytes:
    """The Ed25519 public key inside a peer id.

    Raises: Malformed: the id is not that of an Ed25519 key.
    """
    return key_of_peer_bytes(base58_decode(peer))


def key_of_peer_bytes(raw: bytes) -> bytes:
    """The Ed25519 public key inside a binary peer id of 38 bytes. Raises: Malformed."""
    if len(raw) != _ED25519_ID_BYTES or not raw.startswith(_ED25519_PREFIX):
        raise Malformed("the peer id does not hold an Ed25519 key")
    return raw[len(_ED25519_PREFIX) :]


def peer_bytes(peer: PeerId) -> bytes:
    return base58_decode(peer)


def short(peer: str) -> str:
    """The last six characters of a peer id: what tables and logs call a peer."""
    return peer[-6:]


def run_name(run: bytes) -> str:
    """The first twelve hex digits of a run id: what people type."""
    return run.hex()[:12]


def bucket_of(peer: PeerId, buckets: int) -> int:
    """The DHT bucket of a peer: the leading bits of sha256(peer id). `buckets` is a power of two."""
    return int.from_bytes(hashlib.sha256(peer_bytes(peer)).digest()[:8], "big") * buckets >> 64
