"""Published states over streams: serving them to joiners, and downloading one when we are the joiner.

A donor streams its published state, which is immutable, so training and averaging go on (hivemind's averager locks its state meanwhile). It
serves a bounded number of downloads at once and says "busy" beyond that, so that a crowd of joiners spreads over the donors. A joiner takes
the state of one donor, with the help of all that have the very same one (download.py); every shard is checked as it comes. It is applied
only when it is complete and its digest, its size and every number in it are right; else all who vouched for it are named, and the next
donor is asked. What is downloaded is the donor's newest state, which may be newer than the announcement that led us there, never older.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from blocktrain.node import shards
from blocktrain.node.download import LANES, Download, Job, NotNow, Wish
from blocktrain.node.ports import Published, Replica, Stream, Transport
from blocktrain.protocol import limits
from blocktrain.protocol.errors import Malformed, NetworkFault, PeerFault
from blocktrain.protocol.ids import NO_DIGEST, Digest, PeerId, short
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import Chunk, End, Have, Want
from blocktrain.protocol.records import MAX_ROUND

MAX_DOWNLOADS_SERVED = 3  # at once; the link is shared with exchanges and sweeps
BUSY_RETRY_S = 2.0
MAX_KEPT = 2  # states that are kept for downloads under way
KEPT_S = 60.0  # after the last stream that asked for it began
__all__ = ["BUSY_RETRY_S", "MAX_DOWNLOADS_SERVED", "Donor", "Download", "NotNow", "fetch"]


@dataclass
class _Kept:
    """A state that downloads began with. Its shards are hashed when somebody first asks, once."""

    published: Published
    payload: memoryview
    asked_at: float = 0.0
    _shards: bytes = b""
    _hashing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def shards(self) -> bytes:
        async with self._hashing:
            self._shards = self._shards or await asyncio.to_thread(shards.hashes, self.payload)
        return self._shards


class Donor:
    """Serves our published state. Never that of a replica that has not trained or downloaded anything."""

    def __init__(self, manifest: Manifest, block: int, replica: Replica) -> None:
        self._manifest = manifest
        self._block = block
        self._replica = replica
        self._serving: Counter[PeerId] = Counter()  # streams by peer: few each
        self._kept: dict[Digest, _Kept] = {}  # what downloads began with

    @property
    def serving(self) -> int:
        """Peers that are downloading from us now."""
        return len(self._serving)

    async def handle(self, stream: Stream) -> None:
        want, _ = await stream.receive(timeout_s=limits.OPEN_TIMEOUT_S)
        if not isinstance(want, Want):
            raise Malformed(f"{type(want).__name__} on a state stream")
        refusal = self._refusal(want, stream.peer)
        if refusal is not None:
            await stream.send(refusal, timeout_s=limits.OPEN_TIMEOUT_S)
            return
        self._serving[stream.peer] += 1
        try:
            async with asyncio.timeout(limits.STATE_TIMEOUT_S):  # whoever reads one byte in ten seconds does not keep his place for ever
                await self._send(stream, want)
        finally:
            self._serving[stream.peer] -= 1
            self._serving += Counter()  # drop the zeros

    async def _send(self, stream: Stream, want: Want) -> None:
        state = self._state(Digest(want.digest))
        published, payload = state.published, state.payload
        end = len(payload) if want.length == 0 else min(len(payload), want.offset + want.length)
        start = min(want.offset, end)
        listed = await state.shards() if want.shards or want.digest != NO_DIGEST else b""
        name = shards.name(listed) if listed else b""
        have = Have(published.round, published.digest, len(payload), start, end - start, name)
        await stream.send(have, listed if want.shards else b"", timeout_s=limits.OPEN_TIMEOUT_S)
        for offset in range(start, end, limits.CHUNK_BYTES):
            piece = payload[offset : min(end, offset + limits.CHUNK_BYTES)]
            await stream.send(Chunk(offset), piece, timeout_s=limits.STALL_TIMEOUT_S)
        await stream.send(End("ok"), timeout_s=limits.STALL_TIMEOUT_S)

    def _state(self, digest: Digest) -> _Kept:
        """The state that was asked for. One that a download began with is kept a while, though we have published newer ones since."""
        now = time.monotonic()
        state = self._kept.pop(digest, None)
        if state is None:
            published, payload = self._replica.state()
            state = self._kept.pop(published.digest, None) or _Kept(published, payload)
        state.asked_at = now
        self._kept[state.published.digest] = state
        for old in [each for each, kept in self._kept.items() if now - kept.asked_at > KEPT_S] or list(self._kept)[:-MAX_KEPT]:
            del self._kept[old]
        return state

    def _refusal(self, want: Want, peer: PeerId) -> End | None:
        published = self._replica.published()
        if want.run != self._manifest.run or want.block != self._block or want.part != "block":
            return End("unknown", f"we hold block {self._block} of another kind")
        if published.round == 0:
            return End("unknown", "our replica has no rounds yet")
        if want.digest not in (NO_DIGEST, published.digest, *self._kept):
            return End("unknown", "that state is not our published one (any more)")
        if self._serving[peer] >= LANES or (peer not in self._serving and len(self._serving) >= MAX_DOWNLOADS_SERVED):
            return End("busy", f"{len(self._serving)} downloads are under way", BUSY_RETRY_S)
        return None


async def fetch(
    transport: Transport,
    want: Want,
    donors: Sequence[PeerId],
    at_least: int,
    size: int,
    *,
    at_most: int = MAX_ROUND,
    rng: Random,
    apply: Callable[[Download], Awaitable[Published]],
) -> tuple[Published | None, dict[PeerId, Exception]]:
    """Download from the donors, in random order, until one download is whole and `apply` took it.

    Args:
        at_least: the lowest round worth having.
        at_most: the highest that is believed.
        size: the state's bytes by our own shape.
    Returns: the new published state (None where no donor served), and what went wrong with each donor that failed.
    """
    wish = Wish(want, at_least, at_most, size)
    failed: dict[PeerId, Exception] = {}
    order = rng.sample(list(donors), len(donors))
    while order:
        leader = order.pop(0)
        published = await _lead_by(transport, wish, leader, order, failed, apply)
        if published is not None:
            return published, failed
        order = [peer for peer in order if peer not in failed]
    return None, failed


async def _lead_by(
    transport: Transport,
    wish: Wish,
    leader: PeerId,
    others: Sequence[PeerId],
    failed: dict[PeerId, Exception],
    apply: Callable[[Download], Awaitable[Published]],
) -> Published | None:
    """One download of the leader's state with the help of others. What went wrong with whom is added to `failed`."""
    job = Job(transport, wish, leader)
    fault: Exception
    try:
        async with asyncio.timeout(limits.STATE_TIMEOUT_S):
            download = await job.run(others)
        try:
            published = await apply(download)
        except PeerFault as refused:
            # Every shard was the listed one: whoever sent any of them vouched for the list.
            failed.update({peer: PeerFault(refused.why, peer) for peer in job.vouched})
            raise
        failed.update({peer: PeerFault("it lists other shards than those of the state", peer) for peer in job.denied})
        return published
    except TimeoutError:
        fault = NetworkFault(f"{short(leader)}: no whole state in {limits.STATE_TIMEOUT_S:.0f} s")
    except (NetworkFault, PeerFault) as error:
        fault = error
    finally:
        failed.update(job.failed)
    failed[leader] = fault
    return None
