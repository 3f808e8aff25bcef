"""A client's open chain: one session across the holders of a run, moved to other holders when one fails.

Implements the `Traversals` port of the generation engine over real streams. One stream goes to every holder; a step enters at the first (or
at all of them: route `star`), and the last answers. Every stream is listened to all the time, because the holder whose stream ends, or who
says that the next one is gone, is the one to replace. Then a new session is opened on the mended chain and the caches are filled again
from the tokens that we keep; nobody else's state is needed. A holder that is frozen says nothing: at the deadline all are pinged, and those
that do not answer are replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

from blocktrain.node.join import ask
from blocktrain.node.ports import Stream, Transport
from blocktrain.protocol import chains, limits, sweep
from blocktrain.protocol.chains import Chain, Hop
from blocktrain.protocol.errors import Malformed, NetworkFault, PeerFault
from blocktrain.protocol.ids import NO_DIGEST, PeerId, short
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.membership import Members
from blocktrain.protocol.messages import SWEEP, Close, End, Open, Ready, Scored, Step

log = logging.getLogger("blocktrain.client")

PING_TIMEOUT_S = 2.0
MAX_MENDS = 8  # of one traversal; a swarm that fails more often than that is not there


@dataclass
class Leg:
    """One holder of the open chain."""

    hop: Hop
    stream: Stream
    ready: Ready
    listening: asyncio.Task[None]


@dataclass
class Report:
    """What the answer says about where it came from (honest answers): filled while the chain is used."""

    peers: list[tuple[int, PeerId, int, str]] = field(default_factory=list)  # block, peer, round, digest (hex)
    mended: list[str] = field(default_factory=list)  # who was replaced, and why
    digests_changed: bool = False  # a replacement had another state: the text is not what one state would have written
    compute_s: float = 0.0
    traversals: int = 0


class Broken(Exception):
    """The open chain cannot go on. `culprits` are the peers to replace; none where nobody is to blame."""

    def __init__(self, why: str, culprits: list[PeerId], offence: bool = False) -> None:
        super().__init__(why)
        self.culprits = culprits
        self.offence = offence


class SwarmChain:
    """Use as `async with`. `clock` is Unix seconds; `look` reads the directory again into `members`."""

    def __init__(
        self,
        transport: Transport,
        manifest: Manifest,
        members: Members,
        *,
        look: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
        rng: Random,
        require_all: bool = True,
    ) -> None:
        self._transport = transport
        self._manifest = manifest
        self._shape = sweep.Shape.of(manifest)
        self._members = members
        self._look = look
        self._clock = clock
        self._rng = rng
        self._require_all = require_all
        self._chain: Chain | None = None
        self._legs: list[Leg] = []
        self._scored: asyncio.Queue[tuple[Scored, memoryview] | Broken] = asyncio.Queue()
        self._recall = sweep.Recall(self._shape)
        self.report = Report()

    async def __aenter__(self) -> SwarmChain:
        self._chain = self._plan()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    @property
    def chain(self) -> Chain:
        assert self._chain is not None
        return self._chain

    async def traverse(self, step: Step, body: bytes = b"") -> tuple[Scored, memoryview]:
        """One traversal, mended as often as needed.

        Raises: NoPeers: a block has no holder left. NetworkFault: the swarm fails faster than it can be mended.
        """
        for _ in range(MAX_MENDS):
            try:
                fresh = not self._legs
                if fresh:
                    await self._open()
                steps = self._recall.again(step) if fresh else [step]
                for one in steps:
                    scored, out = await self._once(one, body if one is steps[-1] else b"")
                self._recall.note(step, scored.tokens)
                self.report.traversals += 1
                self.report.compute_s += scored.compute_s
                return scored, out
            except Broken as broken:
                await self._mend(broken)
        raise NetworkFault(f"the chain was mended {MAX_MENDS} times for one traversal; last: {self.report.mended[-1]}")

    # ---- one session ------------------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """A new session on all holders of the planned chain, opened at once."""
        session = self._rng.randbytes(16)
        hops = self.chain.hops
        self._scored = asyncio.Queue()
        results = await asyncio.gather(
            *(self._open_leg(session, hop, hops[index + 1] if index + 1 < len(hops) else None) for index, hop in enumerate(hops)),
            return_exceptions=True,
        )
        broken: Broken | None = None
        for result in results:
            if isinstance(result, Leg):
                self._legs.append(result)
            elif isinstance(result, Broken):
                broken = broken or Broken(str(result), [], result.offence)
                broken.culprits += result.culprits
            elif isinstance(result, BaseException):
                raise result
        if broken is not None:
            raise broken
        for leg in self._legs:
            before = next((row for row in self.report.peers if row[0] == leg.hop.block), None)
            if before is not None and before[3] != leg.ready.digest.hex():
                self.report.digests_changed = True
            self.report.peers = [row for row in self.report.peers if row[0] != leg.hop.block]
            self.report.peers.append((leg.hop.block, leg.hop.peer, leg.ready.round, leg.ready.digest.hex()))
        self.report.peers.sort()

    async def _open_leg(self, session: bytes, hop: Hop, onward: Hop | None) -> Leg:
        stream: Stream | None = None
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            stream = await self._transport.open(hop.peer, SWEEP, timeout_s=limits.OPEN_TIMEOUT_S)
            request = Open(
                session=session,
                run=self._manifest.run,
                block=hop.block,
                digest=NO_DIGEST,
                next_peer=onward.peer if onward else "",
                next_block=onward.block if onward else -1,
            )
            await stream.send(request, timeout_s=limits.OPEN_TIMEOUT_S)
            ready, _ = await stream.receive(timeout_s=limits.OPEN_TIMEOUT_S)
            if isinstance(ready, End):
                raise NetworkFault(f"{ready.reason}{f', {ready.detail}' if ready.detail else ''}")
            if not isinstance(ready, Ready) or ready.block != hop.block:
                raise Malformed(f"{type(ready).__name__} in answer to Open")
        except (NetworkFault, PeerFault) as fault:
            if stream is not None:
                await stream.close()
            raise Broken(f"block {hop.block} at {short(hop.peer)}: {fault}", [hop.peer], isinstance(fault, PeerFault)) from None
        self._members.succeeded(hop.peer, self._clock(), (loop.time() - began) / 2)
        listening = asyncio.create_task(self._listen(hop, stream), name=f"sweep-{short(hop.peer)}")
        return Leg(hop, stream, ready, listening)

    async def _listen(self, hop: Hop, stream: Stream) -> None:
        """Pass on what a holder says. Its silence is no fault here: a traversal has its own deadline."""
        try:
            while True:
                message, body = await stream.receive(timeout_s=3600.0, max_body=limits.MAX_BODY_BYTES)
                if isinstance(message, Scored):
                    self._scored.put_nowait((message, body))
                elif isinstance(message, End):
                    culprit = self._after(hop) if message.reason == "gone" else hop.peer
                    self._scored.put_nowait(Broken(message.detail or message.reason, [culprit]))
                    return
                else:
                    raise Malformed(f"{type(message).__name__} inside a session")
        except (NetworkFault, PeerFault) as fault:
            why = f"block {hop.block} at {short(hop.peer)}: {fault}"
            self._scored.put_nowait(Broken(why, [hop.peer], isinstance(fault, PeerFault)))

    def _after(self, hop: Hop) -> PeerId:
        hops = self.chain.hops
        place = hops.index(hop)
        return hops[min(place + 1, len(hops) - 1)].peer

    async def _once(self, step: Step, body: bytes) -> tuple[Scored, memoryview]:
        first = self._legs[0]
        deadline_s = limits.HOP_TIMEOUT_S + len(self._legs)
        try:
            async with asyncio.timeout(deadline_s):
                await first.stream.send(step, body, timeout_s=limits.HOP_TIMEOUT_S)
                while True:
                    heard = await self._scored.get()
                    if isinstance(heard, Broken):
                        raise heard
                    if heard[0].sequence == step.sequence:
                        self._check(step, *heard)
                        return heard
        except NetworkFault as fault:
            raise Broken(f"block {first.hop.block} at {short(first.hop.peer)}: {fault}", [first.hop.peer]) from None
        except TimeoutError:
            raise Broken(f"no answer in {deadline_s:.0f} s", await self._silent()) from None

    def _check(self, step: Step, scored: Scored, body: memoryview) -> None:
        """The answer is the last holder's word; it must at least have the sizes that were asked for."""
        rows = step.rows * step.want + sweep.rows_of_draft(scored.drafted)
        wrong = scored.want != step.want or scored.drafted > step.draft
        if not step.noisy and len(body) != rows * self._shape.row_bytes:
            wrong = True
        if wrong or len(scored.tokens) != scored.drafted * self._shape.token_bytes:
            last = self._legs[-1].hop
            raise Broken(f"block {last.block} at {short(last.peer)}: an answer of the wrong size", [last.peer], True)

    async def _silent(self) -> list[PeerId]:
        """Who does not answer a ping now."""

        async def alive(peer: PeerId) -> bool:
            with contextlib.suppress(NetworkFault, PeerFault):
                await ask(self._transport, peer, "ping", timeout_s=PING_TIMEOUT_S)
                return True
            return False

        peers = [leg.hop.peer for leg in self._legs]
        answers = await asyncio.gather(*(alive(peer) for peer in peers))
        return [peer for peer, answered in zip(peers, answers, strict=True) if not answered]

    async def _mend(self, broken: Broken) -> None:
        """Close the session, put the culprits off, and plan a chain without them."""
        log.info("mending the chain: %s", broken)
        self.report.mended.append(str(broken))
        await self._close()
        now = self._clock()
        for peer in broken.culprits:
            (self._members.offended if broken.offence else self._members.failed)(peer, now, str(broken))
        excluded: set[PeerId] = set(broken.culprits)
        await self._look()
        self._chain = self._plan(excluded)

    def _plan(self, exclude: set[PeerId] | None = None) -> Chain:
        now = self._clock()
        if self._chain is None:
            return chains.plan(self._members, self._manifest.blocks, now, self._rng, require_all=self._require_all)
        chain = self._chain
        for hop in chain.hops:
            if hop.peer in (exclude or ()):
                chain = chains.replace(chain, hop.block, self._members, now, self._rng, exclude=exclude or frozenset())
        return chain

    async def _close(self) -> None:
        legs, self._legs = self._legs, []
        for leg in legs:
            leg.listening.cancel()
        await asyncio.gather(*(leg.listening for leg in legs), return_exceptions=True)
        await asyncio.gather(*(self._goodbye(leg) for leg in legs))

    async def _goodbye(self, leg: Leg) -> None:
        with contextlib.suppress(NetworkFault, PeerFault):
            await leg.stream.send(Close(leg.ready.session), timeout_s=1.0)
            await leg.stream.receive(timeout_s=1.0)
        await leg.stream.close()
