"""Published states over streams: serving them to joiners, and downloading one when we are the joiner.

A donor streams its published state, which is immutable, so training and averaging go on (hivemind's averager locks its state meanwhile). It
serves a bounded number of downloads at once and says "busy" beyond that, so that a crowd of joiners spreads over the donors. A joiner takes
the state of one donor, with the help of all that have the very same one (download.py). It is applied only when it is complete and its
digest, its size and every number in it are right; else the next donor is asked. What is downloaded is the donor's newest state, which may
be newer than the announcement that led us there, never older.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from random import Random

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


class Donor:
    """Serves our published state. Never that of a replica that has not trained or downloaded anything."""

    def __init__(self, manifest: Manifest, block: int, replica: Replica) -> None:
        self._manifest = manifest
        self._block = block
        self._replica = replica
        self._serving: Counter[PeerId] = Counter()  # streams by peer: few each
        self._kept: dict[Digest, tuple[float, Published, memoryview]] = {}  # what downloads began with

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
        published, payload = self._state(Digest(want.digest))
        end = len(payload) if want.length == 0 else min(len(payload), want.offset + want.length)
        start = min(want.offset, end)
        await stream.send(Have(published.round, published.digest, len(payload), start, end - start), timeout_s=limits.OPEN_TIMEOUT_S)
        for offset in range(start, end, limits.CHUNK_BYTES):
            piece = payload[offset : min(end, offset + limits.CHUNK_BYTES)]
            await stream.send(Chunk(offset), piece, timeout_s=limits.STALL_TIMEOUT_S)
        await stream.send(End("ok"), timeout_s=limits.STALL_TIMEOUT_S)

    def _state(self, digest: Digest) -> tuple[Published, memoryview]:
        """The state that was asked for. One that a download began with is kept a while, though we have published newer ones since."""
        now = time.monotonic()
        kept = self._kept.pop(digest, None)
        published, payload = kept[1:] if kept is not None else self._replica.state()
        self._kept[published.digest] = now, published, payload
        for old in [each for each, (at, *_) in self._kept.items() if now - at > KEPT_S] or list(self._kept)[:-MAX_KEPT]:
            del self._kept[old]
        return published, payload

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
        published, others = await _lead_by(transport, wish, leader, order, failed, apply)
        if published is None and others and not isinstance(failed.get(leader), NotNow):
            # Put together from several donors it was wrong: who lied cannot be told, so the leader is asked for all of it.
            published, _ = await _lead_by(transport, wish, leader, (), failed, apply)
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
) -> tuple[Published | None, tuple[PeerId, ...]]:
    """One download of the leader's state with the help of others. Where a whole one was refused, also who had helped."""
    job = Job(transport, wish, leader)
    helpers: tuple[PeerId, ...] = ()
    fault: Exception | None = None
    try:
        async with asyncio.timeout(limits.STATE_TIMEOUT_S):
            download = await job.run(others)
        helpers = download.helpers
        return await apply(download), helpers
    except TimeoutError:
        fault = NetworkFault(f"{short(leader)}: no whole state in {limits.STATE_TIMEOUT_S:.0f} s")
    except (NetworkFault, PeerFault) as error:
        fault = error
    finally:
        failed.update(job.failed)
    if helpers:
        failed.pop(leader, None)
    else:
        failed[leader] = fault
    return None, helpers
