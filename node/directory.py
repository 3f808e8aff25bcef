"""The swarm's notice board: our announcements into the DHT, everybody's out of it.

`Libp2p` stores and finds sealed records and lets nothing through that its writer did not sign; this file turns them into what the protocol
talks about, checks that a record says what its key says, and keeps our own records growing in expiry, without which a node that left and
came back would stay a ghost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from blocktrain.node import dialing, logs
from blocktrain.protocol import ids, records
from blocktrain.protocol.errors import Malformed
from blocktrain.protocol.ids import PeerId, RunId
from blocktrain.protocol.records import Announcement, Key, RunRecord, Seen

log = logging.getLogger(__name__)

EXPIRY_STEP_S = 0.001  # by how much a record outlives the one that it replaces, at least


class SealedRecord(Protocol):
    """What `get` finds: verified, still packed."""

    @property
    def peer(self) -> PeerId: ...
    @property
    def payload(self) -> bytes: ...
    @property
    def expires_at(self) -> float: ...


class Dht(Protocol):
    """What `Libp2p` gives."""

    @property
    def peer(self) -> PeerId: ...

    async def addresses(self) -> list[str]: ...

    async def store(self, key: Key, payload: bytes, *, expires_at: float, timeout_s: float) -> bool: ...

    async def get(self, key: Key, *, timeout_s: float) -> Sequence[SealedRecord]: ...

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None: ...


class DhtDirectory:
    """`ports.Directory`. `clock` is Unix seconds, as the swarm has it."""

    def __init__(self, dht: Dht, clock: Callable[[], float], *, swarm_is_loopback: bool) -> None:
        self._dht = dht
        self._clock = clock
        self._swarm_is_loopback = swarm_is_loopback
        self._addresses: list[str] = []
        self._last_expiry: dict[Key, float] = {}
        self.dropped = 0  # records that were sound but said something else than their key

    @property
    def peer(self) -> PeerId:
        return self._dht.peer

    def addresses(self) -> Sequence[str]:
        """Our addresses with /p2p/, the best first (`dialing.to_share`), as of the last `refresh_addresses`."""
        return list(self._addresses)

    async def refresh_addresses(self) -> None:
        """Ask the daemon again: a relay's address comes late, a laptop changes networks. Raises: NetworkFault."""
        self._addresses = dialing.to_share(await self._dht.addresses(), self.peer, self._swarm_is_loopback)

    async def announce(self, announcement: Announcement, bucket: int, *, expires_at: float, timeout_s: float) -> bool:
        """Put our announcement into a bucket of its block. True if somebody has it now."""
        key = records.block_key(announcement.run, announcement.block, bucket)
        return await self._put(key, records.pack_record(announcement), expires_at, timeout_s)

    async def announce_run(self, record: RunRecord, *, expires_at: float, timeout_s: float) -> bool:
        return await self._put(records.runs_key(), records.pack_record(record), expires_at, timeout_s)

    async def _put(self, key: Key, payload: bytes, expires_at: float, timeout_s: float) -> bool:
        first = key not in self._last_expiry
        expires_at = self._last_expiry[key] = max(expires_at, self._last_expiry.get(key, 0.0) + EXPIRY_STEP_S)  # two at once never tie
        stored = await self._dht.store(key, payload, expires_at=expires_at, timeout_s=timeout_s)
        if not stored and first:
            # Refused at the first try: an earlier life of ours may have left a record that lives longer (another --ttl-s).
            left = [record.expires_at for record in await self._find(key, timeout_s) if record.peer == self.peer]
            if left and max(left) >= expires_at:
                expires_at = self._last_expiry[key] = max(*left, self._last_expiry[key]) + EXPIRY_STEP_S
                stored = await self._dht.store(key, payload, expires_at=expires_at, timeout_s=timeout_s)
        return stored

    async def read_block(self, run: RunId, block: int, bucket: int, *, timeout_s: float) -> list[Seen]:
        """Who announced this block in this bucket, ourselves included. Raises: NetworkFault."""
        found: list[Seen] = []
        for record in await self._find(records.block_key(run, block, bucket), timeout_s):
            try:
                announcement = records.unpack_announcement(record.payload)
                if (announcement.run, announcement.block) != (run, block):
                    raise Malformed(f"announces block {announcement.block} under the key of another")
            except Malformed as fault:
                self._drop(record.peer, fault)
                continue
            if record.peer != self.peer:
                self._dht.learn(record.peer, announcement.addresses)
            found.append(Seen(record.peer, announcement, record.expires_at))
        return found

    async def read_runs(self, *, timeout_s: float) -> list[tuple[PeerId, RunRecord, float]]:
        """Who says which runs exist, with the record's expiry. Raises: NetworkFault."""
        found: list[tuple[PeerId, RunRecord, float]] = []
        for record in await self._find(records.runs_key(), timeout_s):
            try:
                found.append((record.peer, records.unpack_run_record(record.payload), record.expires_at))
            except Malformed as fault:
                self._drop(record.peer, fault)
        return found

    async def _find(self, key: Key, timeout_s: float) -> list[SealedRecord]:
        now = self._clock()
        return [record for record in await self._dht.get(key, timeout_s=timeout_s) if record.expires_at > now]

    def _drop(self, peer: PeerId, fault: Malformed) -> None:
        self.dropped += 1
        text = f"dropped a record of peer {ids.short(peer)}: {fault.why}"
        logs.say_once_a_minute(log, logging.WARNING, f"record {peer}", text)
