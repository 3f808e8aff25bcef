"""Sealed records: what we put into the DHT, and the only thing that we let out of it or keep for others.

hivemind's DHT protects nothing by itself. A sealed value is msgpack [payload, signature]; the signature covers the hashed key, the subkey
(the writer's peer id, which holds its key), payload and expiry (`records.signed_bytes`). Every record on every node of ours passes `open`:
no value without a subkey, no payload that is not one of our two records, no expiry beyond the cap, no signature of another. Verified ones
are remembered, because the same record comes again from each of its holders, every few seconds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from blocktrain.node.identity import Identity
from blocktrain.protocol import limits, records, wire
from blocktrain.protocol.errors import Malformed

MAX_SEALED_BYTES: Final = limits.MAX_ANNOUNCEMENT_BYTES + records.SIGNATURE_BYTES + 16  # and msgpack's framing
MAX_LIFE_S: Final = limits.MAX_RECORD_LIFE_S + limits.MAX_CLOCK_SKEW_S  # the writer's clock may be ahead of ours
REMEMBERED: Final = 2 * limits.MAX_MEMBERS  # verified records, about 1 KB each
_SUBKEY_PREFIX: Final = b"\xc4\x26"  # msgpack: 38 bytes follow
_SUBKEY_BYTES: Final = 40


class Seals:
    """Seals our records and opens everybody's. `clock` is Unix seconds, as the swarm has it."""

    def __init__(self, identity: Identity, clock: Callable[[], float]) -> None:
        self._identity = identity
        self._clock = clock
        self._verified: OrderedDict[tuple[bytes, bytes, bytes, float], bytes] = OrderedDict()
        self.refused = 0  # records that did not verify, since the start

    def seal(self, key: bytes, payload: bytes, expires_at: float) -> bytes:
        """The value for our own subkey. `key` is the DHT's hash of the key."""
        signed = records.signed_bytes(key, self._identity.peer_bytes, payload, expires_at)
        return wire.pack([payload, self._identity.sign(signed)])

    def open(self, key: bytes, subkey: object, value: object, expires_at: object) -> bytes | None:
        """The payload of a record that is sound, else None. All arguments come from peers: `subkey` is packed, as it travels."""
        if not (isinstance(subkey, bytes) and isinstance(value, bytes) and isinstance(expires_at, float)):
            self.refused += 1
            return None
        name = (key, subkey, value, expires_at)
        payload = self._verified.get(name)
        if payload is None:
            try:
                payload = self._verify(key, subkey, value, expires_at)
            except Malformed:
                self.refused += 1
                return None
            self._verified[name] = payload
            if len(self._verified) > REMEMBERED:
                self._verified.popitem(last=False)
        else:
            self._verified.move_to_end(name)
        return payload

    def _verify(self, key: bytes, subkey: bytes, value: bytes, expires_at: float) -> bytes:
        if len(subkey) != _SUBKEY_BYTES or not subkey.startswith(_SUBKEY_PREFIX):
            raise Malformed("a record's subkey is its writer's peer id")
        if not math.isfinite(expires_at) or expires_at > self._clock() + MAX_LIFE_S:
            raise Malformed("a record that would live too long")
        payload, signature = split(value)
        try:
            records.unpack_announcement(payload)
        except Malformed:
            records.unpack_run_record(payload)
        writer = subkey[len(_SUBKEY_PREFIX) :]
        if not Identity.verify(writer, signature, records.signed_bytes(key, writer, payload, expires_at)):
            raise Malformed("a record's signature is not its writer's")
        return payload


def split(value: bytes) -> tuple[bytes, bytes]:
    """Payload and signature of a sealed value. Raises: Malformed."""
    parts = wire.unpack(value, MAX_SEALED_BYTES)
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, bytes) for part in parts):
        raise Malformed("a sealed record is a payload and a signature")
    payload, signature = parts
    if len(signature) != records.SIGNATURE_BYTES:
        raise Malformed(f"a signature of {len(signature)} bytes")
    return payload, signature
