"""One state from several donors at once: ranges of bytes over streams, cut while they run so that nobody waits for the slowest.

The first donor says which state it has (round and digest) and begins to send all of it. Whoever else has that very state takes the
second half of the longest range that is left, and so on; a donor that dies gives back what it did not send, and the others send it. Bytes
of different states never meet: each range is asked for by the digest of the whole, and the whole is checked against it at the end.
Each shard comes from one donor and is checked when it is complete (shards.py); who sends another than the one it vouched for is named
and dropped, and the others send that, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from blocktrain.node import shards
from blocktrain.node.ports import Stream, Transport
from blocktrain.protocol import limits
from blocktrain.protocol.errors import Malformed, NetworkFault, PeerFault
from blocktrain.protocol.ids import Digest, PeerId, short
from blocktrain.protocol.messages import STATE, Chunk, End, Have, Want

MAX_DONORS: Final = 4  # that feed one download
LANES: Final = 2  # streams to one donor: over a long link one stream does not fill it
SMALL_BYTES: Final = 4 * 1024 * 1024  # a state up to here comes over one stream
MIN_CUT_SHARDS: Final = 2  # a range shorter than this is not cut any more


class NotNow(NetworkFault):
    """A donor that answered, but has nothing for us at the moment: busy, or its state is not newer. Nothing to hold against it."""


@dataclass(frozen=True)
class Wish:
    """What is wanted: `want` says whose state, between these rounds, of this size by our own shape."""

    want: Want
    at_least: int
    at_most: int
    size: int


@dataclass(frozen=True)
class Download:
    """A complete state as it arrived; not yet checked against its digest (the replica does that, off the loop)."""

    donor: PeerId  # who said which state it is, or, where that one was dropped, another who has it
    round: int
    digest: Digest
    payload: bytearray
    helpers: tuple[PeerId, ...] = ()  # who else sent parts of it


@dataclass(eq=False)
class _Range:
    """Bytes that one stream is to bring. `at` moves as they come; `end` comes nearer when somebody takes the rest over.

    It begins and ends where a shard does. `sure`: up to there they were checked.
    """

    at: int
    end: int
    sure: int
    asked: int = 0  # where the donor will end, who knows nothing of that


@dataclass
class Job:
    """One download from a leader and its helpers. `failed`: what went wrong with whom."""

    transport: Transport
    wish: Wish
    leader: PeerId
    failed: dict[PeerId, Exception] = field(default_factory=dict)
    payload: bytearray = field(default_factory=bytearray)
    brought: dict[PeerId, int] = field(default_factory=dict)  # bytes by donor
    vouched: set[PeerId] = field(default_factory=set)  # who says that the shards are those of `_listed`
    denied: set[PeerId] = field(default_factory=set)  # who says that the state has others: one side lies
    _listed: bytes = b""
    _have: Have | None = None
    _active: list[_Range] = field(default_factory=list)
    _loose: list[_Range] = field(default_factory=list)

    async def run(self, others: Sequence[PeerId]) -> Download:
        """Raises: NetworkFault, PeerFault: the leader's, or that nobody is left who has its state."""
        size = self.wish.size
        self.payload = bytearray(size)
        alone = size <= SMALL_BYTES
        whole = _Range(0, size, 0)
        self._active.append(whole)
        stream = await self._open(self.leader, whole)  # the leader's first stream tells the state; its failure is the job's
        async with asyncio.TaskGroup() as lanes:
            lanes.create_task(self._lane(self.leader, stream, whole), name=f"state from {short(self.leader)}")
            if not alone:
                for _ in range(LANES - 1):
                    lanes.create_task(self._lane(self.leader), name=f"state from {short(self.leader)}")
                for peer in others[: MAX_DONORS - 1]:
                    lanes.create_task(self._helper(peer), name=f"state from {short(peer)}")
        while self._loose:  # a donor died after the others had nothing left to do
            able = [peer for peer in self.brought if peer not in self.failed]
            if not able:
                fault = self.failed.get(self.leader)
                raise (
                    fault
                    if isinstance(fault, PeerFault | NetworkFault)
                    else NetworkFault(f"{short(self.leader)}: its state is not to be had any more")
                )
            before = sum(piece.end - piece.at for piece in self._loose)
            async with asyncio.TaskGroup() as lanes:
                for peer in able:
                    lanes.create_task(self._lane(peer), name=f"rest of the state from {short(peer)}")
            if self._loose and before == sum(piece.end - piece.at for piece in self._loose):
                raise self._gone()
        assert self._have is not None, "the leader's first stream was opened"
        helpers = tuple(peer for peer, count in self.brought.items() if count and peer != self.leader)
        source = helpers[0] if self.leader in self.failed and helpers else self.leader
        return Download(source, self._have.round, Digest(self._have.digest), self.payload, helpers)

    def _gone(self) -> NetworkFault:
        return NetworkFault(f"{short(self.leader)}: its state is not to be had any more")

    async def _helper(self, peer: PeerId) -> None:
        async with asyncio.TaskGroup() as lanes:
            for _ in range(LANES):
                lanes.create_task(self._lane(peer))

    async def _lane(self, peer: PeerId, stream: Stream | None = None, piece: _Range | None = None) -> None:
        """One stream after the other from one donor, as long as there is something to bring."""
        while (piece := piece or self._take()) is not None:
            try:
                stream = stream or await self._open(peer, piece)
                await self._read(peer, stream, piece)
            except NotNow:
                return
            except (NetworkFault, PeerFault) as fault:
                self.failed[peer] = fault
                return
            finally:
                self._active.remove(piece)
                piece.at = piece.sure  # nobody vouches for half a shard
                if piece.at < piece.end:
                    self._loose.append(piece)
                if stream is not None:
                    await stream.close()
            stream = piece = None

    def _take(self) -> _Range | None:
        """What nobody brings, or the second half of the longest range under way."""
        if self._loose:
            piece = self._loose.pop()
        else:
            longest = max(self._active, key=lambda each: each.end - each.at, default=None)
            if longest is None or longest.end - longest.at < MIN_CUT_SHARDS * shards.SHARD_BYTES:
                return None
            middle = -(-(longest.at + longest.end) // (2 * shards.SHARD_BYTES)) * shards.SHARD_BYTES
            piece = _Range(middle, longest.end, middle)
            longest.end = middle
        self._active.append(piece)
        return piece

    async def _open(self, peer: PeerId, piece: _Range) -> Stream:
        """Ask for a range, and check what is offered."""
        want = self.wish.want
        digest = self._have.digest if self._have is not None else want.digest
        piece.asked = piece.end
        first = self._have is None
        asked = Want(want.run, want.block, want.part, digest, piece.at, 0 if first else piece.end - piece.at, shards=first)
        listed_bytes = shards.list_bytes(self.wish.size) if first else 0
        stream = await self.transport.open(peer, STATE, timeout_s=limits.OPEN_TIMEOUT_S)
        try:
            await stream.send(asked, timeout_s=limits.OPEN_TIMEOUT_S)
            timeout_s = limits.OPEN_TIMEOUT_S + self.wish.size / shards.HASHED_BYTES_PER_S
            have, listed = await stream.receive(timeout_s=timeout_s, max_body=listed_bytes)
            if isinstance(have, End):
                raise (NotNow if have.reason in ("busy", "unknown") else NetworkFault)(said(peer, have))
            if not isinstance(have, Have):
                raise Malformed(f"{type(have).__name__} in answer to a wish for state", peer)
            self._check(peer, have, asked)
            if first:
                if len(listed) != listed_bytes or shards.name(bytes(listed)) != have.shards:
                    raise Malformed("a list of shards that is not the one it names", peer)
                self._listed = bytes(listed)
        except BaseException:
            await stream.close()
            raise
        self._have = self._have or have
        self.vouched.add(peer)
        self.brought.setdefault(peer, 0)
        return stream

    def _check(self, peer: PeerId, have: Have, asked: Want) -> None:
        size = self.wish.size
        if have.size != size or have.offset != asked.offset or have.length != (asked.length or size):
            raise Malformed(f"a state of {have.size} bytes; our block has {size}", peer)
        if have.round < self.wish.at_least:
            raise NotNow(f"{short(peer)}: its state is of round {have.round}, older than {self.wish.at_least}")
        if have.round > self.wish.at_most:
            # Not held against it: its record may be older than its state, and we cannot tell.
            raise NotNow(f"{short(peer)}: its state is of round {have.round}; nobody announced one beyond {self.wish.at_most}")
        if self._have is not None and have.digest != self._have.digest:
            raise Malformed("another state than was asked for", peer)
        if self._have is not None and have.shards != self._have.shards:
            self.denied.add(peer)
            raise NotNow(f"{short(peer)}: it lists other shards of this state than {short(self.leader)}")

    async def _read(self, peer: PeerId, stream: Stream, piece: _Range) -> None:
        """Bring a range, or what is left of it when others have taken the end over."""
        size = self.wish.size
        while piece.at < piece.end:
            message, body = await stream.receive(timeout_s=limits.STALL_TIMEOUT_S, max_body=limits.MAX_BODY_BYTES)
            if isinstance(message, End):
                raise NetworkFault(f"{said(peer, message)} at byte {piece.at} of {size}")
            if not isinstance(message, Chunk) or message.offset != piece.at or not body or piece.at + len(body) > piece.asked:
                raise Malformed(f"a broken transfer at byte {piece.at} of {size}", peer)
            fresh = body[: piece.end - piece.at]  # beyond that somebody else brings it
            self.payload[piece.at : piece.at + len(fresh)] = fresh
            piece.at += len(fresh)
            self._make_sure(peer, piece)
        if piece.end == piece.asked:
            end, _ = await stream.receive(timeout_s=limits.STALL_TIMEOUT_S)
            if not isinstance(end, End) or end.reason != "ok":
                raise Malformed("a transfer without its end", peer)

    def _make_sure(self, peer: PeerId, piece: _Range) -> None:
        """Check the shards that are complete. Raises: Malformed: one is not what this very donor said it was."""
        while piece.sure < piece.at:
            end = min(piece.sure + shards.SHARD_BYTES, self.wish.size)
            if piece.at < end:
                return
            if not shards.fits(self._listed, self.payload, piece.sure):
                raise Malformed(f"bytes {piece.sure} to {end} of the state are not those that it vouched for", peer)
            self.brought[peer] += end - piece.sure
            piece.sure = end


def said(donor: PeerId, end: End) -> str:
    return f"{short(donor)}: {end.reason}{f', {end.detail}' if end.detail else ''}"
