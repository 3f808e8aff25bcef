"""A client's open chain: one session across the holders of a run, moved to other holders when one fails.

Implements the `Traversals` port of the generation engine over real streams. There are two routes: along the `chain`, from holder to holder,
the last one answers; or as a `star`, where the client asks every holder itself and adds up, in the chain's order and with the chain's
rounding, so that both give the same numbers to the last bit. When a session breaks, a new one is opened on the mended chain and the caches
are filled again from the tokens that we keep; nobody else's state is needed. Holders are asked for the very states that served before,
so that a text goes on as it would have; where that cannot be, the report says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final, Literal

import numpy as np

from blocktrain.node.compute import rows as wire
from blocktrain.node.legs import Broken, Leg, Session
from blocktrain.node.ports import Transport
from blocktrain.protocol import chains, sweep
from blocktrain.protocol.chains import Chain, Hop
from blocktrain.protocol.errors import NetworkFault, NoPeers, UsageError
from blocktrain.protocol.ids import NO_DIGEST, PeerId
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.membership import Members
from blocktrain.protocol.messages import Scored, Step

log = logging.getLogger("blocktrain.client")

MAX_MENDS: Final = 8  # of one traversal; a swarm that fails more often than that is not there
MAX_WAIT_S: Final = 30.0  # for holders that have no room, over one traversal
SECOND_CHANCE_S: Final = 0.5  # before a holder that nobody can replace is called again
USUAL_S: Final = 2.0  # an answer that takes longer is asked after, until it is known what is usual
LATER: Final = 4.0  # times what is usual

Route = Literal["chain", "star"]


@dataclass
class Report:
    """What the answer says about where it came from (honest answers): filled while the chain is used."""

    peers: list[tuple[int, PeerId, int, str]] = field(default_factory=list)  # block, peer, round, digest (hex)
    missing: list[int] = field(default_factory=list)  # blocks that nobody serves
    mended: list[str] = field(default_factory=list)  # what broke, in order
    digests_changed: bool = False  # a replacement had another state: the text is not what one state would have written
    route: Route = "chain"
    compute_s: float = 0.0
    traversals: int = 0
    drafted_here: bool = False  # by a block that the client holds, not by the first holder


@dataclass
class _Trouble:
    """What went wrong during one traversal, so that its mending ends."""

    failed: set[PeerId] = field(default_factory=set)
    second_chances: set[PeerId] = field(default_factory=set)
    waited_s: float = 0.0


class SwarmChain:
    """Use as `async with`. `clock` is Unix seconds; `look` reads the directory again into `members`.

    Args:
        require_all: a block without a holder is an error; otherwise its share is missing, and the report says so.
        route: "chain", "star", or "auto": what is expected to be faster by the measured round trips.
    """

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
        route: str = "auto",
    ) -> None:
        self._transport = transport
        self.manifest = manifest
        self._shape = sweep.Shape.of(manifest)
        self._members = members
        self._look = look
        self._clock = clock
        self._rng = rng
        self._require_all = require_all
        self._wish = route
        self._chain: Chain | None = None
        self._session: Session | None = None
        self._recall = sweep.Recall(self._shape)
        self._usual_s = USUAL_S
        self.report = Report()

    async def __aenter__(self) -> SwarmChain:
        """Raises: NoPeers: a block has no holder. UsageError: a route that the run's objective does not have."""
        if self._shape.sequential and self._wish == "star":
            raise UsageError(f"route star: blocks of {self.manifest.objective!r} hand z on, one to the next; use chain or auto")
        self._chain = chains.plan(self._members, self.manifest.blocks, self._clock(), self._rng, require_all=self._require_all)
        self.report.missing = list(self._chain.missing)
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
        trouble = _Trouble()
        for _ in range(MAX_MENDS):
            try:
                fresh = self._session is None
                if self._session is None:
                    self._session = await self._open(step)
                steps = self._recall.again(step) if fresh else [step]
                for one in steps:
                    scored, out = await self._once(self._session, one)
                self._recall.note(step, scored.tokens)
                self.report.traversals += 1
                self.report.compute_s += scored.compute_s
                return scored, out
            except Broken as broken:
                await self._mend(broken, trouble)
        raise NetworkFault(f"the chain was mended {MAX_MENDS} times for one traversal; last: {self.report.mended[-1]}")

    # ---- one session ------------------------------------------------------------------------------------------------------------

    async def _open(self, step: Step) -> Session:
        """A new session on all holders of the planned chain, and what the report says about them."""
        route = self._route(step)
        before = {block: bytes.fromhex(digest) for block, _, _, digest in self.report.peers}
        session = await Session.open(
            self._transport,
            self.manifest,
            [replace(hop, digest=before.get(hop.block, NO_DIGEST)) for hop in self.chain.hops],
            self._rng.randbytes(16),
            linked=route == "chain",
            met=lambda peer: self._members.succeeded(peer, self._clock()),
        )
        self.report.route = route
        served = {leg.hop.block: leg.hop for leg in session.legs}
        self.report.peers = [(block, hop.peer, hop.round, hop.digest.hex()) for block, hop in sorted(served.items())]
        self.report.digests_changed |= any(before.get(block, hop.digest) != hop.digest for block, hop in served.items())
        self._chain = replace(self.chain, hops=tuple(served.get(hop.block, hop) for hop in self.chain.hops))
        return session

    def _route(self, step: Step) -> Route:
        if len(self.chain.hops) == 1 or ((step.noisy or self._shape.sequential) and self._wish == "auto"):
            return "chain"  # z goes from block to block: asking everybody takes B turns then
        if self._wish == "auto":
            return chains.cheaper_route(self.chain, drafts=step.draft > 0)
        return "star" if self._wish == "star" else "chain"

    async def _once(self, session: Session, step: Step) -> tuple[Scored, memoryview]:
        began = asyncio.get_running_loop().time()
        usual_s = max(self._usual_s, USUAL_S if step.position == 0 else 0.0)
        if self.report.route == "chain":
            await session.send(session.legs[0], step)
            leg, scored, body = await session.answer(step.sequence, usual_s=usual_s)
            self._check(leg, step, scored, body)
        elif step.noisy or self._shape.sequential:
            scored, body = await self._relay(session, step, usual_s)
        else:
            scored, body = await self._star(session, step, usual_s)
        self._usual_s = max(USUAL_S / 4, LATER * (asyncio.get_running_loop().time() - began))
        return scored, body

    async def _star(self, session: Session, step: Step, usual_s: float) -> tuple[Scored, memoryview]:
        """Ask all holders; where there is something to draft, the first one first, since the others score what it wrote."""
        first, others = session.legs[0], session.legs[1:]
        answers: dict[int, tuple[Scored, memoryview]] = {}
        asked = replace(step, draft=0)

        async def collect(count: int, want: Step) -> None:
            for _ in range(count):
                leg, scored, body = await session.answer(step.sequence, usual_s=usual_s)
                self._check(leg, want, scored, body)
                answers[leg.hop.block] = (scored, body)

        await session.send(first, step)
        if step.draft:
            await collect(1, step)
            drafted, _ = answers[first.hop.block]
            asked = replace(asked, tokens=step.tokens + drafted.tokens)
        await asyncio.gather(*(session.send(leg, asked) for leg in others))
        await collect(len(session.legs) - len(answers), asked)
        return self._added(session, answers, step)

    def _added(self, session: Session, answers: dict[int, tuple[Scored, memoryview]], step: Step) -> tuple[Scored, memoryview]:
        """The sum of the answers as the chain would have made it: in its order, rounded to fp16 after each."""
        order = [leg.hop.block for leg in session.legs]
        head, head_body = answers[order[0]]
        size = step.rows * step.want * self._shape.row_bytes
        total = wire.unpack(head_body[:size], self._shape)
        compute_s = head.compute_s
        for terms, block in enumerate(order[1:], 2):
            scored, body = answers[block]
            added = (total.astype(np.float32) + wire.unpack(body, self._shape)).astype(np.float16)
            total = wire.settled(added, self._shape, terms)
            compute_s += scored.compute_s
        return replace(head, blocks=tuple(order), compute_s=compute_s), memoryview(
            wire.pack(total, self._shape, len(order)) + bytes(head_body[size:])
        )

    async def _relay(self, session: Session, step: Step, usual_s: float) -> tuple[Scored, memoryview]:
        """From holder to holder by way of us: where z travels, and the holders cannot reach each other."""
        body = memoryview(b"")
        for leg in session.legs:
            await session.send(leg, step, bytes(body))
            _, scored, body = await session.answer(step.sequence, usual_s=usual_s)
            self._check(leg, step, scored, body)
            drafted = scored.tokens if step.draft else b""
            step = replace(
                step, blocks=scored.blocks, compute_s=scored.compute_s, tokens=step.tokens + drafted, draft=0, drafted=scored.drafted
            )
        return scored, body

    def _check(self, leg: Leg, step: Step, scored: Scored, body: memoryview) -> None:
        """The answer is a holder's word; it must at least be of its block, of the sizes that were asked for, and log-probabilities.

        Every holder checks what it is handed, so what is wrong here is the fault of who answers.
        """
        blocks = tuple(hop.block for hop in self.chain.hops) if self.report.route == "chain" else (*step.blocks, leg.hop.block)
        rows = step.rows * step.want + sweep.rows_of_draft(scored.drafted)
        z_bytes = sweep.rows_of_z(step, self._shape, step.draft) * self._shape.z_bytes
        fits = (
            leg.hop.block == blocks[-1]
            and scored.blocks == blocks
            and (scored.want, scored.drafted) == (step.want, step.draft + step.drafted)
            and len(scored.tokens) == scored.drafted * self._shape.token_bytes
            and len(body) == rows * self._shape.row_bytes + z_bytes
        )
        if not fits or not wire.fair(body[: rows * self._shape.row_bytes], self._shape):
            raise Broken(f"block {leg.hop.block}: an answer that does not fit what was asked", [leg.hop.peer], offence=True)

    async def _close(self, gone: set[PeerId] | None = None) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close(gone or ())

    # ---- mending ----------------------------------------------------------------------------------------------------------------

    async def _mend(self, broken: Broken, trouble: _Trouble) -> None:
        """Close the session, put the culprits off, and plan a chain without them."""
        log.info("mending the chain: %s", broken)
        self.report.mended.append(str(broken))
        await self._close(broken.culprits)
        if broken.relay:
            if self._wish == "star":
                raise NetworkFault(str(broken))  # nothing went from holder to holder: nobody can say who was late
            self._wish = "star"
            return
        now = self._clock()
        for peer in broken.culprits:
            if not broken.retry_after_s:
                (self._members.offended if broken.offence else self._members.failed)(peer, now, str(broken))
        trouble.failed |= broken.culprits
        if broken.culprits:
            await self._look()
        for hop in self.chain.hops:
            if hop.peer in broken.culprits:
                await self._replace(hop, broken, trouble)

    async def _replace(self, hop: Hop, broken: Broken, trouble: _Trouble) -> None:
        """Another holder for one block. Where there is none: wait for the busy one, call a failed one once more, or do without."""
        try:
            self._chain = chains.replace(self.chain, hop.block, self._members, self._clock(), self._rng, exclude=trouble.failed)
            return
        except NoPeers as nobody:
            refused = nobody
        if broken.retry_after_s and trouble.waited_s + broken.retry_after_s <= MAX_WAIT_S:
            trouble.waited_s += broken.retry_after_s
            await asyncio.sleep(broken.retry_after_s)
            trouble.failed.discard(hop.peer)
            return
        known = {member.peer for member in self._members.holders(hop.block, self._clock()) if not member.offender}
        once_more = sorted(known - trouble.second_chances, key=lambda peer: peer != hop.peer)
        if once_more and not broken.retry_after_s:
            trouble.second_chances.add(once_more[0])
            await asyncio.sleep(SECOND_CHANCE_S)
            if once_more[0] != hop.peer:
                others = known - {once_more[0]}
                self._chain = chains.replace(self.chain, hop.block, self._members, self._clock(), self._rng, exclude=others)
            return
        left = tuple(other for other in self.chain.hops if other.block != hop.block)
        if self._require_all or not left:
            raise NoPeers(f"{refused} (last: {broken})")
        self._chain = Chain(left, tuple(sorted((*self.chain.missing, hop.block))))
        self.report.missing = list(self.chain.missing)
