"""A state's shards: equal pieces of its bytes, each with a hash, so that what a donor sends is checked as it comes and a liar has a name.

The hashes are the donor's word until the whole state has its digest. Whoever sends a shard that does not fit the very list that it
vouched for contradicts itself; and if every shard fits and the whole does not, the list was a lie of all who vouched for it.
"""

from __future__ import annotations

from typing import Final

from blake3 import blake3

from blocktrain.node.ports import Buffer

SHARD_BYTES: Final = 1024 * 1024  # hashed in a third of a millisecond, so between two turns of the event loop
HASH_BYTES: Final = 32
HASHED_BYTES_PER_S: Final = 256e6  # at least, on a slow machine: how long a donor may take before it answers


def list_bytes(size: int) -> int:
    """Length of the list for a state of `size` bytes: 2 MiB for the largest."""
    return HASH_BYTES * -(-size // SHARD_BYTES)


def hashes(payload: Buffer) -> bytes:
    """The hashes of all shards, one after the other. Slow for a large state: not on the event loop."""
    view = memoryview(payload).cast("B")
    return b"".join(blake3(view[start : start + SHARD_BYTES]).digest() for start in range(0, len(view), SHARD_BYTES))


def name(listed: bytes) -> bytes:
    """What stands for a whole list: its own hash, 32 bytes."""
    return blake3(listed).digest()


def fits(listed: bytes, payload: Buffer, start: int) -> bool:
    """Whether the shard of `payload` that begins at byte `start` is the listed one."""
    view = memoryview(payload).cast("B")
    place = HASH_BYTES * (start // SHARD_BYTES)
    return blake3(view[start : start + SHARD_BYTES]).digest() == listed[place : place + HASH_BYTES]
