"""A real node whose partner dies, freezes, lies or is cut off in the middle of an exchange.

Each time: training goes on, the round ends by its deadline, the node says why, and the next round works. The partner is a network node
of its own (daemon, streams, replica, exchanger), driven by the test, so that it can fail at an exact point. A node's own daemon is killed
in test_service.py, where the node is a process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest

from blocktrain.node import exchanger
from blocktrain.node.compute import flat
from blocktrain.node.compute.replica import TorchReplica
from blocktrain.node.config import Gossip
from blocktrain.node.exchanger import Exchanger, Side
from blocktrain.node.network import Net
from blocktrain.node.ports import Buffer, Published, Stream, Swap, Trial
from blocktrain.node.transport import Reader, Writer
from blocktrain.protocol import facts as f
from blocktrain.protocol import limits, messages
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import Digest
from blocktrain.protocol.messages import EXCHANGE, Accept, Chunk, Message, Offer, Seal
from blocktrain.protocol.records import Announcement
from blocktrain.swarm_sim.delay import Proxy
from tests.swarm_kit import Live, Nodes, manifest, replica, until

pytestmark = pytest.mark.real

MakeNet = Callable[..., Awaitable[Net]]
Handler = Callable[[Stream], Awaitable[None]]
RUN = manifest()
TAU_S = 3.0
OUTCOME_S = 3.0  # beyond τ, for the other side's outcome
SLACK_S = 8.0  # a busy machine
CHUNKS = 5


@pytest.fixture(autouse=True)
def short_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanger, "OUTCOME_TIMEOUT_S", OUTCOME_S)
    piece = 256 * -(-flat.count(flat.shapes_of(RUN)) // (256 * CHUNKS))
    monkeypatch.setattr(flat, "PIECE", piece)
    monkeypatch.setattr(limits, "CHUNK_BYTES", 4 * piece)  # of fp32: a piece a chunk


@dataclass
class Trap:
    """Counts what an exchange does, and springs before one of those things."""

    point: tuple[str, int] | None = None
    spring: Callable[[], None] = lambda: None
    done: dict[str, int] = field(default_factory=dict)
    sprung_at: float = 0.0

    async def at(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1
        if self.point == (what, self.done[what]):
            self.sprung_at = time.monotonic()
            self.spring()
            await asyncio.Event().wait()  # whoever is dead does nothing more


class TrappedStream:
    def __init__(self, stream: Stream, trap: Trap) -> None:
        self._stream, self._trap = stream, trap

    @property
    def peer(self) -> str:
        return self._stream.peer

    @property
    def rtt_s(self) -> float | None:
        return self._stream.rtt_s

    async def send(self, message: Message, body: Buffer = b"", *, timeout_s: float) -> None:
        await self._trap.at("send")
        await self._stream.send(message, body, timeout_s=timeout_s)

    async def receive(self, *, timeout_s: float, max_body: int = 0) -> tuple[Message, memoryview]:
        await self._trap.at("receive")
        return await self._stream.receive(timeout_s=timeout_s, max_body=max_body)

    async def close(self) -> None:
        await self._stream.close()


class TrappedSwap:
    """The moment of an exchange when both snapshots are through."""

    def __init__(self, inner: Swap, trap: Trap) -> None:
        self._inner, self._trap = inner, trap

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def finish(self, digest: Digest) -> Trial:
        await self._trap.at("finish")
        return await self._inner.finish(digest)


class TrappedReplica:
    """And the one when the merge was judged."""

    def __init__(self, inner: TorchReplica, trap: Trap) -> None:
        self._inner, self._trap = inner, trap

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def begin(self, codec: str, reference: bytes = b"") -> TrappedSwap:
        return TrappedSwap(await self._inner.begin(codec, reference), self._trap)

    async def adopt(self, trial: Trial, *, keep: bool = False) -> Published:
        await self._trap.at("adopt")
        return await self._inner.adopt(trial, keep=keep)


class Scene:
    """A training host, and partners that come one after the other."""

    def __init__(self, nodes: Nodes, make_net: MakeNet, inner: TorchReplica) -> None:
        self.nodes = nodes
        self._make_net = make_net
        self._inner = inner
        self.ended: list[f.Ended] = []
        self.host: Live

    async def begin(self) -> None:
        self.host = await self.nodes.start(pace_s=0.05, gossip=Gossip(codec="fp32", tau_s=TAU_S, heldout_margin=10.0))
        self.host.node.exchanger.side = replace(self.host.node.exchanger.side, streams=1)  # so that what is sent can be counted
        handle = self.host.node.core.handle

        def recorded(fact: f.Fact, now: float) -> list[f.Decision]:
            if isinstance(fact, f.Ended):
                self.ended.append(fact)
            return handle(fact, now)

        self.host.node.core.handle = recorded  # type: ignore[method-assign]
        await until(lambda: self.host.round >= 1, self.host.said)

    async def partner(self, through: str = "") -> Net:
        """A network node that knows the host by its address, or by another that leads there."""
        return await self._make_net(through or self.host.address, greeting=Greeting(RUN, "test"))

    async def catch_up(self) -> None:
        """The partners' replica does not train; this brings it to where the host is."""
        published, state = self.host.replica.state()
        await self._inner.load(bytes(state), published.round, published.digest)

    async def announce(self, net: Net) -> None:
        await self.catch_up()
        word = Announcement(
            run=RUN.run, block=0, phase="training", round=max(1, self.host.round), digest=bytes(32), tokens_per_s=100.0, load=0.0,
            protocol_min=1, protocol_max=1, addresses=tuple(net.directory.addresses()[:1]),
        )  # fmt: skip
        assert await net.directory.announce(word, 0, expires_at=time.time() + 60, timeout_s=8)

    async def honest(self, net: Net, trap: Trap) -> None:
        """An exchanger that takes every offer, until the trap springs."""
        side = Side(net.directory.peer, RUN, 0, "fp32", 10.0)
        took = Exchanger(side, net.transport, TrappedReplica(self._inner, trap), lambda fact: None, time.time)  # type: ignore[arg-type]

        async def take(plain: Stream) -> None:
            stream = TrappedStream(plain, trap)
            offer, _ = await stream.receive(timeout_s=10)
            assert isinstance(offer, Offer)
            await self.catch_up()
            await took.take(f.Take(offer.exchange, plain.peer, time.time() + TAU_S), offer, stream)  # type: ignore[arg-type]

        await net.transport.serve(EXCHANGE, take)

    def with_peer(self, net: Net) -> list[f.Ended]:
        return [fact for fact in self.ended if fact.peer == net.directory.peer]

    async def works_with(self, net: Net) -> None:
        await until(lambda: [fact for fact in self.with_peer(net) if fact.result.kind == "merged"], self.host.said)

    async def goes_wrong_with(self, net: Net, since: Callable[[], float], kinds: set[str], within_s: float) -> f.Ended:
        """All that is promised, after something happened at `since()`. `kinds`: how the exchange may end for the host."""
        before = len(self.with_peer(net))
        await until(since, lambda: (self.host.said(), "the partner was not asked"))
        steps, round = self.host.replica.progress().steps, self.host.round
        await until(lambda: self.with_peer(net)[before:], self.host.said, deadline_s=within_s + SLACK_S)
        took_s = time.monotonic() - since()
        end = self.with_peer(net)[before]
        assert took_s <= within_s + SLACK_S
        assert end.result.kind in kinds, end.result
        assert end.result.why or end.result.kind == "merged"
        core = self.host.node.core
        if end.result.kind == "one_sided":
            assert core.counters.one_sided
        elif end.result.kind != "merged":
            assert end.result.why[:40] in core.members.why(net.directory.peer)
            assert getattr(core.counters, end.result.kind) >= 1
        await until(lambda: self.host.replica.progress().steps > steps + 5, "training does not go on")
        await until(lambda: self.host.round > round, self.host.said)
        return end


@pytest.fixture
async def scene(net_factory: MakeNet) -> AsyncIterator[Scene]:
    nodes, inner = Nodes(net_factory, RUN), replica(RUN, 0, 77)
    made = Scene(nodes, net_factory, inner)
    await made.begin()
    yield made
    await nodes.close()
    await inner.stop()


# send: accept, chunks, seal, outcome; receive: offer, chunks, seal, outcome
POINTS: dict[str, tuple[tuple[str, int], set[str]]] = {
    "before it reads the offer": (("receive", 1), {"lost", "late"}),
    "before it answers": (("send", 1), {"lost", "late"}),
    "before its first chunk": (("send", 2), {"lost", "late"}),
    "before it takes a chunk": (("receive", 2), {"lost", "late", "one_sided"}),  # all of its own may have come
    "in the middle of its chunks": (("send", 4), {"lost", "late"}),
    "in the middle of ours": (("receive", 4), {"lost", "late", "one_sided"}),
    "before its last chunk": (("send", 1 + CHUNKS), {"lost", "late"}),
    "before its seal": (("send", 2 + CHUNKS), {"lost", "late"}),
    "before it merges": (("finish", 1), {"one_sided", "lost"}),
    "before it uses the merge": (("adopt", 1), {"one_sided", "lost"}),
    "before it hears our outcome": (("receive", 3 + CHUNKS), {"one_sided", "lost", "merged"}),  # its own may have come
    "before it tells its own": (("send", 3 + CHUNKS), {"one_sided"}),
}


async def test_a_partner_is_killed_at_each_point_of_an_exchange(scene: Scene) -> None:
    for name, (point, kinds) in POINTS.items():
        net = await scene.partner()
        trap = Trap(spring=lambda net=net: os.kill(net.libp2p.daemon_pid, signal.SIGKILL))  # type: ignore[misc]
        await scene.honest(net, trap)
        await scene.announce(net)
        await scene.works_with(net)  # the round after what went wrong with the one before
        what, number = point
        trap.done.clear()
        trap.point = (what, number)
        end = await scene.goes_wrong_with(net, lambda trap=trap: trap.sprung_at, kinds, TAU_S + OUTCOME_S)  # type: ignore[misc]
        assert end.result.kind in kinds, name
    last = await scene.partner()
    await scene.honest(last, Trap())
    await scene.announce(last)
    await scene.works_with(last)


@pytest.mark.parametrize(
    ("point", "kinds"),
    [(("send", 1), {"late", "lost"}), (("send", 4), {"late", "lost"}), (("send", 3 + CHUNKS), {"one_sided"})],
    ids=["before it answers", "in the middle", "before its outcome"],
)
async def test_a_partner_is_frozen(scene: Scene, point: tuple[str, int], kinds: set[str]) -> None:
    """Its connection stays open, and nothing comes any more."""
    net = await scene.partner()
    trap = Trap(point, spring=lambda: os.kill(net.libp2p.daemon_pid, signal.SIGSTOP))
    await scene.honest(net, trap)
    await scene.announce(net)
    try:
        await scene.goes_wrong_with(net, lambda: trap.sprung_at, kinds, TAU_S + OUTCOME_S)
    finally:
        os.kill(net.libp2p.daemon_pid, signal.SIGCONT)
    trap.point = None
    await scene.catch_up()
    await scene.works_with(net)  # itself again


async def test_a_link_is_cut_in_an_exchange_and_healed(scene: Scene) -> None:
    """Bytes wait, and nobody is told."""
    proxy = Proxy()
    port = int(scene.host.address.split("/tcp/")[1].split("/")[0])
    outside = await proxy.open(port)
    link = proxy.links[outside]
    try:
        net = await scene.partner(scene.host.address.replace(f"/tcp/{port}/", f"/tcp/{outside}/"))
        trap = Trap(("send", 4), spring=lambda: setattr(link, "up", False))
        await scene.honest(net, trap)
        await scene.announce(net)
        await scene.goes_wrong_with(net, lambda: trap.sprung_at, {"late", "lost"}, TAU_S + OUTCOME_S)
        trap.point = None
        link.up = True
        await scene.catch_up()
        await scene.works_with(net)
    finally:
        link.up = True
        await proxy.close()


# ---- partners that lie ------------------------------------------------------------------------------------------------------------------


async def accept(stream: Stream, offer: Offer, round: int | None = None, snapshot: bool = True) -> None:
    await stream.send(Accept(offer.exchange, offer.round if round is None else round, 1.0, offer.size, offer.codec), timeout_s=5)
    for begin in range(0, offer.size if snapshot else 0, limits.CHUNK_BYTES):
        await stream.send(Chunk(begin), bytes(min(limits.CHUNK_BYTES, offer.size - begin)), timeout_s=5)


async def short(stream: Stream, offer: Offer) -> None:
    await accept(stream, offer, snapshot=False)
    await stream.send(Chunk(0), bytes(limits.CHUNK_BYTES), timeout_s=5)
    await stream.close()


async def long(stream: Stream, offer: Offer) -> None:
    await accept(stream, offer)
    await stream.send(Chunk(offer.size), bytes(1), timeout_s=5)
    await asyncio.Event().wait()


async def wrong_round(stream: Stream, offer: Offer) -> None:
    await accept(stream, offer, round=offer.round + 10_000, snapshot=False)
    await asyncio.Event().wait()


async def other_bytes(stream: Stream, offer: Offer) -> None:
    await accept(stream, offer)
    await stream.send(Seal(bytes(32)), timeout_s=5)
    await asyncio.Event().wait()


LIES: dict[str, tuple[Callable[[Stream, Offer], Awaitable[None]], str, str]] = {
    "a short stream": (short, "lost", ""),
    "a long stream": (long, "refused", "not a missing piece"),
    "the wrong round": (wrong_round, "refused", "round: ours"),
    "other bytes than announced": (other_bytes, "refused", "digest"),
}


@pytest.mark.parametrize("name", LIES)
async def test_a_partner_lies(scene: Scene, name: str) -> None:
    lie, kind, why = LIES[name]
    net = await scene.partner()
    asked_at = 0.0

    async def answer(stream: Stream) -> None:
        nonlocal asked_at
        offer, _ = await stream.receive(timeout_s=10)
        assert isinstance(offer, Offer)
        asked_at = time.monotonic()
        await lie(stream, offer)

    await net.transport.serve(EXCHANGE, answer)
    await scene.announce(net)
    end = await scene.goes_wrong_with(net, lambda: asked_at, {kind}, TAU_S)
    assert why in end.result.why
    honest = await scene.partner()
    await scene.honest(honest, Trap())
    await scene.announce(honest)
    await scene.works_with(honest)


async def test_a_partner_answers_with_garbage(scene: Scene) -> None:
    net = await scene.partner()
    asked_at = 0.0

    async def garbage(peer: str, reader: Reader, writer: Writer) -> None:
        nonlocal asked_at
        asked_at = time.monotonic()
        writer.write(messages.to_frame(Greeting(RUN, "test").hello(time.time())) + b"\xc1" * 999)
        await writer.drain()
        await asyncio.Event().wait()

    await net.libp2p.handle(EXCHANGE, garbage)  # type: ignore[arg-type]
    await scene.announce(net)
    await scene.goes_wrong_with(net, lambda: asked_at, {"refused"}, TAU_S)
    honest = await scene.partner()
    await scene.honest(honest, Trap())
    await scene.announce(honest)
    await scene.works_with(honest)
