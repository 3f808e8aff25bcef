"""DHT records: who announces what, under which key, signed by whom, and which of two records wins.

Two kinds. A *run record* says "I know this run" under ("blocktrain", 1, "runs"); it is how a joiner finds runs from an
initial peer alone. An *announcement* says "I hold this block" under ("blocktrain", 1, run, block, bucket). The subkey is
always the peer id's 38 bytes and the value is signed with the key inside it, over key, subkey, value and expiry, so nobody can write,
prolong or replay another's record elsewhere. Strictly later expiry wins; leaving is a tombstone (phase "left") with a later expiry.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from blocktrain.protocol import limits, schema, wire
from blocktrain.protocol.errors import Malformed
from blocktrain.protocol.ids import DIGEST_BYTES, PeerId, RunId
from blocktrain.protocol.schema import Choice, Float, Int, Many, Raw, Text

NAMESPACE: Final = ("blocktrain", 1)
SIGNATURE_BYTES: Final = 64
MAX_ROUND: Final = 2**40

PHASES: Final = ("choosing", "joining", "training", "serving", "left")  # "choosing": a claim only; "serving": held, but not trained
Key = tuple[str | int | bytes, ...]


def runs_key() -> Key:
    return (*NAMESPACE, "runs")


def block_key(run: RunId, block: int, bucket: int) -> Key:
    return (*NAMESPACE, run, block, bucket)


@dataclass(frozen=True)
class RunRecord:
    """One peer's word that a run exists. The manifest itself is fetched over a stream and checked against `run`."""

    run: RunId = schema.field(Raw(DIGEST_BYTES, DIGEST_BYTES))
    name: str = schema.field(Text(64, 1))
    protocol_min: int = schema.field(Int(1, 1_000_000))
    protocol_max: int = schema.field(Int(1, 1_000_000))


@dataclass(frozen=True, slots=True)
class Announcement:
    """One peer's word about its replica. At most `limits.MAX_ANNOUNCEMENT_BYTES` packed."""

    run: RunId = schema.field(Raw(DIGEST_BYTES, DIGEST_BYTES))
    block: int = schema.field(Int(0, limits.MAX_BLOCKS - 1))
    phase: str = schema.field(Choice(PHASES))
    round: int = schema.field(Int(0, MAX_ROUND))  # of the published state; 0 is the untrained start
    digest: bytes = schema.field(Raw(DIGEST_BYTES, DIGEST_BYTES))  # of the published state
    tokens_per_s: float = schema.field(Float(0.0, 1e12))
    load: float = schema.field(Float(0.0, 1e6))  # sweep sessions open
    protocol_min: int = schema.field(Int(1, 1_000_000))
    protocol_max: int = schema.field(Int(1, 1_000_000))
    addresses: tuple[str, ...] = schema.field(Many(Text(limits.MAX_ADDRESS_CHARS), limits.MAX_ADDRESSES), ())


@dataclass(frozen=True, slots=True)
class Seen:
    """A verified announcement as it was read: whose, and until when it holds."""

    peer: PeerId
    announcement: Announcement
    expires_at: float


def pack_record(record: Announcement | RunRecord) -> bytes:
    """The record's bytes. Addresses that are too long are left out, and those for which there is no room, the last first."""
    if isinstance(record, Announcement):
        short = tuple(address for address in record.addresses if len(address) <= limits.MAX_ADDRESS_CHARS)
        record = dataclasses.replace(record, addresses=short[: limits.MAX_ADDRESSES])
    data = wire.pack(schema.encode(record))
    while len(data) > limits.MAX_ANNOUNCEMENT_BYTES and isinstance(record, Announcement) and record.addresses:
        record = dataclasses.replace(record, addresses=record.addresses[:-1])
        data = wire.pack(schema.encode(record))
    assert len(data) <= limits.MAX_ANNOUNCEMENT_BYTES, f"our own record has {len(data)} bytes"
    return data


def unpack_announcement(data: bytes) -> Announcement:
    """Raises: Malformed."""
    return schema.decode(Announcement, _map(data))


def unpack_run_record(data: bytes) -> RunRecord:
    """Raises: Malformed."""
    return schema.decode(RunRecord, _map(data))


def _map(data: bytes) -> dict[str, object]:
    value = wire.unpack(data, limits.MAX_ANNOUNCEMENT_BYTES)
    if not isinstance(value, dict):
        raise Malformed("a record is a map")
    return value


def signed_bytes(key: bytes, subkey: bytes, value: bytes, expires_at: float) -> bytes:
    """What a record's signature covers. `key` is the DHT's hashed key, `subkey` the writer's binary peer id."""
    return wire.pack(["blocktrain-record", 1, key, subkey, value, float(expires_at)])


def newer(old: Seen | None, new: Seen) -> Seen:
    """Which of two records of one peer and block holds: the later expiry (the DHT's own rule)."""
    return new if old is None or new.expires_at > old.expires_at else old
