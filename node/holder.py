"""A holder's side of sweeps: sessions that clients open here, and the links along which a traversal travels from holder to holder.

A client opens one stream to every holder of its chain, so each can tell it directly what went wrong, and a session is gone when its stream
is. A step comes from the client (to the first holder, or to all of them when the client adds up itself) or over the link from
the holder before; it goes on to `next_peer` over a link of our own, or back to the client as `Scored` where there is none. The
session's id, drawn by the client, is what entitles a link to use it. All compute happens in the server's thread.

A session is in use while steps come, whichever way they come: holders behind the first hear from their client only at its end. One that
nobody used for `SESSION_IDLE_S` ends with notice. Whatever ends a session also ends the links into it and the one that leads on from it.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Final

from blocktrain.node.ports import Busy, Published, Server, Stream, Transport, UnknownState
from blocktrain.protocol import limits, sweep
from blocktrain.protocol.errors import Malformed, NetworkFault, PeerFault
from blocktrain.protocol.ids import Digest, PeerId, short
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import LINK, Close, End, Link, Open, Ready, Step

FOREVER_S: Final = 86_400.0  # of a wait that something else ends: the session's idle time
MAX_LINKS: Final = 2  # into one session: the one in use, and one that is being replaced


@dataclass(eq=False)
class Session:
    """One client's session here. Its deadlines are moved from outside: `idle` by every step, those of the links by its end."""

    opened: Open
    client: Stream
    published: Published
    idle: asyncio.Timeout
    link: Stream | None = None  # to the next holder, opened by the first step
    links_in: set[asyncio.Timeout] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one step at a time, and one writer on each stream


class Holder:
    """Serves `SWEEP` and `LINK` streams of one block."""

    def __init__(
        self, manifest: Manifest, block: int, server: Server, transport: Transport, *, idle_s: float = limits.SESSION_IDLE_S
    ) -> None:
        self._manifest = manifest
        self._block = block
        self._shape = sweep.Shape.of(manifest)
        self._server = server
        self._transport = transport
        self._idle_s = idle_s
        self._sessions: dict[bytes, Session] = {}
        self.tokens_served = 0

    def sessions(self) -> int:
        return len(self._sessions)

    async def handle_sweep(self, stream: Stream) -> None:
        """One client's stream: Open → Ready, then its steps until it closes, leaves, or uses it no more."""
        opened, _ = await stream.receive(timeout_s=limits.OPEN_TIMEOUT_S)
        if not isinstance(opened, Open):
            raise Malformed(f"{type(opened).__name__} on a sweep stream")
        refusal = self._objection(opened)
        if refusal is not None:
            await stream.send(refusal, timeout_s=limits.OPEN_TIMEOUT_S)
            return
        try:
            published = await self._server.open(opened.session, Digest(opened.digest))
        except Busy as busy:
            await stream.send(End("busy", str(busy), busy.retry_after_s), timeout_s=limits.OPEN_TIMEOUT_S)
            return
        except UnknownState as gone:
            await stream.send(End("unknown", str(gone)), timeout_s=limits.OPEN_TIMEOUT_S)
            return
        try:
            async with asyncio.timeout(self._idle_s) as idle:
                session = self._sessions[opened.session] = Session(opened, stream, published, idle)
                try:
                    ready = Ready(opened.session, self._block, published.round, published.digest)
                    await stream.send(ready, timeout_s=limits.OPEN_TIMEOUT_S)
                    await self._client_steps(session)
                finally:
                    self._close(session)
                    if session.link is not None:
                        await session.link.close()
        except TimeoutError:
            why = f"the session was not used for {self._idle_s:g} s and has ended here"
            await stream.send(End("late", why), timeout_s=limits.OPEN_TIMEOUT_S)

    async def handle_link(self, stream: Stream) -> None:
        """The holder before us, for one session: its steps until it closes or the session ends."""
        link, _ = await stream.receive(timeout_s=limits.OPEN_TIMEOUT_S)
        if not isinstance(link, Link):
            raise Malformed(f"{type(link).__name__} on a link stream")
        session = self._sessions.get(link.session)
        if session is None or link.run != self._manifest.run or link.block != self._block or len(session.links_in) >= MAX_LINKS:
            await stream.send(End("unknown", "no such session here"), timeout_s=limits.OPEN_TIMEOUT_S)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as end_of_session:
                session.links_in.add(end_of_session)
                try:
                    ready = Ready(link.session, self._block, session.published.round, session.published.digest)
                    await stream.send(ready, timeout_s=limits.OPEN_TIMEOUT_S)
                    while True:
                        step, body = await stream.receive(timeout_s=FOREVER_S, max_body=limits.MAX_BODY_BYTES)
                        if not isinstance(step, Step):
                            return
                        await self._work(session, step, body)
                finally:
                    session.links_in.discard(end_of_session)

    def _close(self, session: Session) -> None:
        del self._sessions[session.opened.session]
        self._server.close(session.opened.session)
        for link in session.links_in:
            link.reschedule(asyncio.get_running_loop().time())

    def _objection(self, opened: Open) -> End | None:
        if opened.run != self._manifest.run:
            return End("incompatible", "another run")
        if opened.block != self._block:
            return End("unknown", f"we hold block {self._block}, not {opened.block}")
        if opened.session in self._sessions:
            return End("refused", "that session is open already")
        if len(self._sessions) >= limits.MAX_SESSIONS:
            return End("busy", f"{len(self._sessions)} sessions are open", 1.0)
        return None

    async def _client_steps(self, session: Session) -> None:
        while True:
            message, body = await session.client.receive(timeout_s=FOREVER_S, max_body=limits.MAX_BODY_BYTES)
            if isinstance(message, Close):
                async with session.lock:
                    await session.client.send(End("ok"), timeout_s=limits.OPEN_TIMEOUT_S)
                return
            if not isinstance(message, Step):
                raise Malformed(f"{type(message).__name__} inside a session")
            await self._work(session, message, body)

    async def _work(self, session: Session, step: Step, body: memoryview) -> None:
        """Our part of one traversal. What goes wrong further down the chain is told to the client, on its own stream."""
        async with session.lock:
            loop = asyncio.get_running_loop()
            if not session.idle.expired():
                session.idle.reschedule(loop.time() + self._idle_s + limits.HOP_TIMEOUT_S)
            try:
                onward, onward_body = await self._server.step(session.opened.session, step, body)
            except PeerFault as fault:
                await self._tell(session, End("malformed", fault.why[: limits.MAX_TEXT_CHARS]))
                raise
            except UnknownState as gone:  # it was evicted: the client opens a new one
                await self._tell(session, End("unknown", str(gone)))
                return
            self.tokens_served += step.want * step.rows
            if not session.opened.next_peer:
                scored = sweep.scored(onward, self._shape)
                await session.client.send(scored, onward_body, timeout_s=limits.HOP_TIMEOUT_S)
                return
            try:
                link = await self._link(session)
                await link.send(onward, onward_body, timeout_s=limits.HOP_TIMEOUT_S)
            except (NetworkFault, PeerFault) as fault:
                why = f"block {session.opened.next_block} at {short(session.opened.next_peer)}: {fault}"
                if session.link is not None:
                    await session.link.close()
                    session.link = None
                await self._tell(session, End("gone", why[: limits.MAX_TEXT_CHARS]))

    async def _link(self, session: Session) -> Stream:
        """The stream to the next holder, opened when the first step needs it (its session there is open by then)."""
        if session.link is None:
            opened = session.opened
            link = await self._transport.open(PeerId(opened.next_peer), LINK, timeout_s=limits.OPEN_TIMEOUT_S)
            session.link = link
            await link.send(Link(opened.session, opened.run, max(opened.next_block, 0)), timeout_s=limits.OPEN_TIMEOUT_S)
            ready, _ = await link.receive(timeout_s=limits.OPEN_TIMEOUT_S)
            if not isinstance(ready, Ready):
                detail = ready.detail if isinstance(ready, End) else type(ready).__name__
                raise NetworkFault(f"no link: {detail}")
        return session.link

    async def _tell(self, session: Session, end: End) -> None:
        await session.client.send(end, timeout_s=limits.OPEN_TIMEOUT_S)
