"""A network in memory: the ports `Transport` and `Directory` for as many nodes as a test likes, with delays, cuts and deaths at will.

The streams are the real `Libp2pTransport` over pipes in memory, so hellos, bounds, deadlines and hanging up are the real ones; only libp2p
is missing. Closing drops what is under way, as libp2p does. No hivemind, no processes, no chance: the same calls give the same run.

    swarm = Swarm()
    a, b = swarm.node("a"), swarm.node("b")
    await b.transport.serve(INFO, handler)
    stream = await a.transport.open(b.peer, INFO, timeout_s=1)
    swarm.delay(a, b, 0.05); swarm.cut(a, b); swarm.heal(a, b); swarm.refuse(a, b, opens=2); swarm.kill(b); swarm.revive(b)
    await swarm.close()
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from blocktrain.node.intake import Intake
from blocktrain.node.transport import Libp2pTransport, Met, Reader, Writer
from blocktrain.protocol import ids, records
from blocktrain.protocol.errors import NetworkFault
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import PeerId, RunId
from blocktrain.protocol.records import Announcement, Key, RunRecord, Seen

Inbound = Callable[[PeerId, Reader, Writer], Awaitable[None]]


def peer_named(name: str) -> PeerId:
    """The same well-formed peer id for the same name, always."""
    return ids.peer_id_of_key(hashlib.sha256(name.encode()).digest())


@dataclass
class Link:
    """What lies between two nodes, both ways."""

    delay_s: float = 0.0
    up: bool = True
    refusals: int = 0  # the next so many opens fail


class Pipe:
    """One direction of a stream: a queue of bytes under way, into an asyncio reader."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.reader = Intake()
        self.reader.set_transport(cast(asyncio.Transport, self))
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._room = asyncio.Event()
        self._room.set()
        self.ended = False

    def pause_reading(self) -> None:
        self._room.clear()

    def resume_reading(self) -> None:
        self._room.set()

    def put(self, data: bytes) -> None:
        due = self._loop.time() + self.link.delay_s
        if self._under_way:
            due = max(due, self._under_way[-1][0])  # bytes do not overtake each other
        self._under_way.append((due, data))
        self._loop.call_at(due, self.pump)

    def pump(self) -> None:
        """Deliver what is due, unless the link is cut."""
        while self.link.up and not self.ended and self._under_way and self._under_way[0][0] <= self._loop.time() + 1e-9:
            self.reader.feed_data(self._under_way.popleft()[1])

    def end(self) -> None:
        """The end of file; what is under way is lost."""
        if not self.ended:
            self.ended = True
            self._under_way.clear()
            self.reader.feed_eof()
            self._room.set()

    async def room(self) -> None:
        await self._room.wait()


class PipeWriter:
    """The half of `asyncio.StreamWriter` that transports use. It is its own transport."""

    def __init__(self, out: Pipe, back: Pipe) -> None:
        self._out = out
        self._back = back
        self.transport = self

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._out.ended:
            raise ConnectionResetError
        self._out.put(bytes(data))

    async def drain(self) -> None:
        await asyncio.sleep(0)  # so that what was written can arrive, and fill the other side's buffer
        await self._out.room()
        if self._out.ended:
            raise ConnectionResetError

    def close(self) -> None:
        """Hangs up both ways; the other side learns it after the delay, at once if the link is cut (it may never)."""
        if self._out.ended:
            return
        loop = asyncio.get_running_loop()
        self._back.end()
        if self._out.link.up:
            loop.call_later(self._out.link.delay_s, self._out.end)

    abort = close

    def is_closing(self) -> bool:
        return self._out.ended or self._back.ended

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Bounds are the pipe's."""


@dataclass
class Twin:
    """One node of the network in memory. `wire` is what `Libp2p` would be."""

    peer: PeerId
    wire: TwinWire
    transport: Libp2pTransport
    directory: TwinDirectory


class Swarm:
    """The network, and what is wrong with it. `clock` is Unix seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.board: dict[Key, dict[PeerId, tuple[Announcement | RunRecord, float]]] = {}
        self.board_down = False  # every read and write of the directory fails
        self.wires: dict[PeerId, TwinWire] = {}
        self._links: dict[frozenset[PeerId], Link] = {}
        self._pipes: list[tuple[PeerId, PeerId, Pipe, Pipe]] = []
        self._tasks: dict[asyncio.Task[Any], PeerId] = {}

    def node(
        self,
        name: str,
        greeting: Greeting | None = None,
        clock: Callable[[], float] | None = None,
        on_hello: Callable[[Met], None] = lambda met: None,
    ) -> Twin:
        """A node whose peer id follows from its name. Its `clock` may differ from the swarm's."""
        peer = peer_named(name)
        wire = self.wires[peer] = TwinWire(self, peer)
        transport = Libp2pTransport(wire, greeting or Greeting(None, "twin"), clock or self.clock, on_hello)
        return Twin(peer, wire, transport, TwinDirectory(self, peer))

    def link(self, a: Twin | PeerId, b: Twin | PeerId) -> Link:
        return self._links.setdefault(frozenset((_peer(a), _peer(b))), Link())

    def delay(self, a: Twin | PeerId, b: Twin | PeerId, delay_s: float) -> None:
        """What is written from now on takes so long, each way."""
        self.link(a, b).delay_s = delay_s

    def cut(self, a: Twin | PeerId, b: Twin | PeerId) -> None:
        """Silence between two: nothing arrives, nobody hears of it. Their records do not reach each other either."""
        self.link(a, b).up = False

    def heal(self, a: Twin | PeerId, b: Twin | PeerId) -> None:
        """End a cut; what was written meanwhile arrives."""
        self.link(a, b).up = True
        for one, other, there, back in self._pipes:
            if {one, other} == {_peer(a), _peer(b)}:
                there.pump()
                back.pump()

    def refuse(self, a: Twin | PeerId, b: Twin | PeerId, opens: int) -> None:
        """The next `opens` streams between two cannot be opened."""
        self.link(a, b).refusals = opens

    def kill(self, node: Twin | PeerId) -> None:
        """The node's process is gone: its streams end, its handlers stop, nobody can dial it. Its records live on till they expire."""
        peer = _peer(node)
        self.wires[peer].alive = False
        for one, other, there, back in self._pipes:
            if peer in (one, other):
                there.end()
                back.end()
        for task, owner in list(self._tasks.items()):
            if owner == peer:
                task.cancel()

    def revive(self, node: Twin | PeerId) -> None:
        self.wires[_peer(node)].alive = True

    def start(self, owner: PeerId, handler: Inbound, caller: PeerId, reader: Reader, writer: Writer) -> None:
        task = asyncio.ensure_future(handler(caller, reader, writer))
        self._tasks[task] = owner
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def pair(self, a: PeerId, b: PeerId) -> tuple[Pipe, Pipe]:
        self._pipes = [each for each in self._pipes if not (each[2].ended and each[3].ended)]
        there, back = Pipe(self.link(a, b)), Pipe(self.link(a, b))
        self._pipes.append((a, b, there, back))
        return there, back

    async def close(self) -> None:
        """Stop all handlers."""
        for peer in self.wires:
            self.kill(peer)
        while self._tasks:
            await asyncio.wait(list(self._tasks))


class TwinWire:
    """`transport.Wire` in memory."""

    def __init__(self, swarm: Swarm, peer: PeerId) -> None:
        self.peer = peer
        self.alive = True
        self.handlers: dict[str, Inbound] = {}
        self.opened = 0  # streams that this node tried to open
        self._swarm = swarm

    async def open_stream(self, peer: PeerId, kind: str, *, timeout_s: float) -> tuple[Reader, Writer]:
        self.opened += 1
        other, link = self._swarm.wires.get(peer), self._swarm.link(self.peer, peer)
        if not self.alive:
            raise NetworkFault("this node is dead")
        if other is None or not other.alive:
            raise NetworkFault("nobody listens there (connection refused)")
        if link.refusals > 0:
            link.refusals -= 1
            raise NetworkFault("nobody listens there (connection refused)")
        wait_s = 2 * link.delay_s
        await asyncio.sleep(min(wait_s, timeout_s) if link.up else timeout_s)
        if wait_s > timeout_s or not link.up:
            raise NetworkFault(f"no answer within {timeout_s:.3g} s")
        if kind not in other.handlers:
            raise NetworkFault("it does not speak our protocol")
        there, back = self._swarm.pair(self.peer, peer)
        self._swarm.start(peer, other.handlers[kind], self.peer, there.reader, cast(Writer, PipeWriter(back, there)))
        return back.reader, cast(Writer, PipeWriter(there, back))

    async def handle(self, kind: str, handler: Inbound) -> None:
        self.handlers[kind] = handler


@dataclass
class TwinDirectory:
    """`ports.Directory` on the swarm's board."""

    swarm: Swarm
    peer: PeerId
    shared: list[str] = field(default_factory=list)

    def addresses(self) -> Sequence[str]:
        return self.shared or [f"/ip4/127.0.0.1/tcp/1/p2p/{self.peer}"]

    async def announce(self, announcement: Announcement, bucket: int, *, expires_at: float, timeout_s: float) -> bool:
        return self._put(records.block_key(announcement.run, announcement.block, bucket), announcement, expires_at)

    async def announce_run(self, record: RunRecord, *, expires_at: float, timeout_s: float) -> bool:
        return self._put(records.runs_key(), record, expires_at)

    async def read_block(self, run: RunId, block: int, bucket: int, *, timeout_s: float) -> list[Seen]:
        found = self._get(records.block_key(run, block, bucket))
        return [Seen(peer, record, expires_at) for peer, record, expires_at in found if isinstance(record, Announcement)]

    async def read_runs(self, *, timeout_s: float) -> list[tuple[PeerId, RunRecord, float]]:
        return [(peer, record, expires_at) for peer, record, expires_at in self._get(records.runs_key()) if isinstance(record, RunRecord)]

    def _put(self, key: Key, record: Announcement | RunRecord, expires_at: float) -> bool:
        """Strictly later expiry wins, as in the DHT."""
        assert expires_at <= self.swarm.clock() + 130, "validators would refuse a record that lives so long"
        if self.swarm.board_down or not self.swarm.wires[self.peer].alive:
            return False
        records.pack_record(record)  # must fit
        held = self.swarm.board.setdefault(key, {})
        if self.peer in held and held[self.peer][1] >= expires_at:
            return False
        held[self.peer] = (record, expires_at)
        return True

    def _get(self, key: Key) -> list[tuple[PeerId, Announcement | RunRecord, float]]:
        if self.swarm.board_down or not self.swarm.wires[self.peer].alive:
            raise NetworkFault("the DHT did not answer in time")
        now = self.swarm.clock()
        return [
            (peer, record, expires_at)
            for peer, (record, expires_at) in self.swarm.board.get(key, {}).items()
            if expires_at > now and (peer == self.peer or self.swarm.link(self.peer, peer).up)
        ]


def _peer(node: Twin | PeerId) -> PeerId:
    return node.peer if isinstance(node, Twin) else node
