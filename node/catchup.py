"""Published states over streams: serving them to joiners, and downloading one when we are the joiner.

A donor streams its published state, which is immutable, so training and averaging go on (hivemind's averager locks its state meanwhile). It
serves a bounded number of downloads at once and says "busy" beyond that, so that a crowd of joiners spreads over the donors. A download is
applied only when it is complete and its digest, its size and every number in it are right; else the next donor is asked. What is
downloaded is the donor's newest state, which may be newer than the announcement that led us there, never older.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random

from blocktrain.node.ports import Published, Replica, Stream, Transport
from blocktrain.protocol import limits
from blocktrain.protocol.errors import Malformed, NetworkFault, PeerFault
from blocktrain.protocol.ids import NO_DIGEST, Digest, PeerId, short
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import STATE, Chunk, End, Have, Want
from blocktrain.protocol.records import MAX_ROUND

MAX_DOWNLOADS_SERVED = 3  # at once; the link is shared with exchanges and sweeps
BUSY_RETRY_S = 2.0


class NotNow(NetworkFault):
    """A donor that answered, but has nothing for us at the moment: busy, or its state is not newer. Nothing to hold against it."""


class Donor:
    """Serves our published state. Never that of a replica that has not trained or downloaded anything."""

    def __init__(self, manifest: Manifest, block: int, replica: Replica) -> None:
        self._manifest = manifest
        self._block = block
        self._replica = replica
        self._serving: set[PeerId] = set()  # one download each, so that one peer cannot take all places

    async def handle(self, stream: Stream) -> None:
        want, _ = await stream.receive(timeout_s=limits.OPEN_TIMEOUT_S)
        if not isinstance(want, Want):
            raise Malformed(f"{type(want).__name__} on a state stream")
        refusal = self._refusal(want, stream.peer)
        if refusal is not None:
            await stream.send(refusal, timeout_s=limits.OPEN_TIMEOUT_S)
            return
        self._serving.add(stream.peer)
        try:
            async with asyncio.timeout(limits.STATE_TIMEOUT_S):  # whoever reads one byte in ten seconds does not keep his place for ever
                await self._send(stream, want)
        finally:
            self._serving.discard(stream.peer)

    async def _send(self, stream: Stream, want: Want) -> None:
        published, payload = self._replica.state()
        end = len(payload) if want.length == 0 else min(len(payload), want.offset + want.length)
        start = min(want.offset, end)
        await stream.send(Have(published.round, published.digest, len(payload), start, end - start), timeout_s=limits.OPEN_TIMEOUT_S)
        for offset in range(start, end, limits.CHUNK_BYTES):
            piece = payload[offset : min(end, offset + limits.CHUNK_BYTES)]
            await stream.send(Chunk(offset), piece, timeout_s=limits.STALL_TIMEOUT_S)
        await stream.send(End("ok"), timeout_s=limits.STALL_TIMEOUT_S)

    def _refusal(self, want: Want, peer: PeerId) -> End | None:
        published = self._replica.published()
        if want.run != self._manifest.run or want.block != self._block or want.part != "block":
            return End("unknown", f"we hold block {self._block} of another kind")
        if published.round == 0:
            return End("unknown", "our replica has no rounds yet")
        if want.digest not in (NO_DIGEST, published.digest):
            return End("unknown", "that state is not our published one (any more)")
        if peer in self._serving or len(self._serving) >= MAX_DOWNLOADS_SERVED:
            return End("busy", f"{len(self._serving)} downloads are under way", BUSY_RETRY_S)
        return None


@dataclass(frozen=True)
class Download:
    """A complete state as it arrived; not yet checked against its digest (the replica does that, off the loop)."""

    donor: PeerId
    round: int
    digest: Digest
    payload: bytearray


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
    failed: dict[PeerId, Exception] = {}
    for donor in rng.sample(list(donors), len(donors)):
        try:
            async with asyncio.timeout(limits.STATE_TIMEOUT_S):
                download = await _from(transport, donor, want, (at_least, at_most), size)
            return await apply(download), failed
        except TimeoutError:
            failed[donor] = NetworkFault(f"{short(donor)}: no whole state in {limits.STATE_TIMEOUT_S:.0f} s")
        except (NetworkFault, PeerFault) as fault:
            failed[donor] = fault
    return None, failed


async def _from(transport: Transport, donor: PeerId, want: Want, rounds: tuple[int, int], size: int) -> Download:
    at_least, at_most = rounds
    stream = await transport.open(donor, STATE, timeout_s=limits.OPEN_TIMEOUT_S)
    try:
        await stream.send(want, timeout_s=limits.OPEN_TIMEOUT_S)
        have, _ = await stream.receive(timeout_s=limits.OPEN_TIMEOUT_S)
        if isinstance(have, End):
            raise (NotNow if have.reason in ("busy", "unknown") else NetworkFault)(_said(donor, have))
        if not isinstance(have, Have):
            raise Malformed(f"{type(have).__name__} in answer to a wish for state", donor)
        if have.size != size or have.offset != 0 or have.length != size:
            raise Malformed(f"a state of {have.size} bytes; our block has {size}", donor)
        if have.round < at_least:
            raise NotNow(f"{short(donor)}: its state is of round {have.round}, older than {at_least}")
        if have.round > at_most:
            raise Malformed(f"a state of round {have.round}; nobody else is beyond {at_most}", donor)
        payload = bytearray(size)
        filled = 0
        while filled < size:
            message, body = await stream.receive(timeout_s=limits.STALL_TIMEOUT_S, max_body=limits.MAX_BODY_BYTES)
            if isinstance(message, End):
                raise NetworkFault(f"{_said(donor, message)} at byte {filled} of {size}")
            if not isinstance(message, Chunk) or message.offset != filled or not body or filled + len(body) > size:
                raise Malformed(f"a broken transfer at byte {filled} of {size}", donor)
            payload[filled : filled + len(body)] = body
            filled += len(body)
        end, _ = await stream.receive(timeout_s=limits.STALL_TIMEOUT_S)
        if not isinstance(end, End) or end.reason != "ok":
            raise Malformed("a transfer without its end", donor)
        return Download(donor, have.round, Digest(have.digest), payload)
    finally:
        await stream.close()


def _said(donor: PeerId, end: End) -> str:
    return f"{short(donor)}: {end.reason}{f', {end.detail}' if end.detail else ''}"
