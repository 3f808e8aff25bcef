"""Sweeps over real nodes: daemon, DHT and streams, with a client that finds the holders by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random

import openai
import pytest

from blocktrain.node import gateway
from blocktrain.node.client import SwarmClient
from blocktrain.node.compute.generation import Generation
from blocktrain.node.config import GatewayConfig
from blocktrain.node.identity import Identity
from blocktrain.node.network import Net
from blocktrain.node.runtime import Runtime
from blocktrain.node.tokenizer import Bytes
from blocktrain.node.traversal import Report
from blocktrain.protocol.errors import NoPeers
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import short
from blocktrain.protocol.records import Announcement, RunRecord
from blocktrain.protocol.sweep import AUTOREGRESSIVE, ONE_SWEEP, SPECULATIVE
from tests.sweeping import MANIFEST, Place, a_request, serve, state_of

pytestmark = pytest.mark.real
MakeNet = Callable[..., Awaitable[Net]]


class RealSwarm:
    """Real nodes that hold blocks and announce them; nothing trains."""

    def __init__(self, make: MakeNet) -> None:
        self._make = make
        self.nets: list[Net] = []
        self.places: list[Place] = []

    async def hold(self, *blocks: int) -> None:
        for block in blocks:
            net = await self._make(*self.nets[:1], greeting=Greeting(MANIFEST, "test"))
            self.nets.append(net)
            place = await serve(net.transport, net.directory.peer, block)
            self.places.append(place)
        for net, place in zip(self.nets, self.places, strict=True):
            await self.announce(net, place.block, place.server._states[-1].published.digest)

    async def announce(self, net: Net, block: int, digest: bytes, phase: str = "training") -> None:
        addresses = tuple(net.directory.addresses()[:1])
        word = Announcement(MANIFEST.run, block, phase, 1, digest, 100.0, 0.0, 1, 1, addresses)
        assert await net.directory.announce(word, 0, expires_at=time.time() + 60, timeout_s=10)
        record = RunRecord(MANIFEST.run, MANIFEST.name, 1, 1)
        assert await net.directory.announce_run(record, expires_at=time.time() + 60, timeout_s=10)

    async def client(self, **more: str) -> SwarmClient:
        net = await self._make(*self.nets, greeting=Greeting(MANIFEST, "test"), client_mode=True)
        client = SwarmClient(net, MANIFEST, Runtime(rng=Random(3)), **more)
        await client.look()
        return client

    def sessions(self) -> int:
        return sum(place.holder.sessions() + place.server.sessions() for place in self.places)


@pytest.fixture
async def swarm(net_factory: MakeNet, new_identity: Callable[[], Identity]) -> AsyncIterator[RealSwarm]:
    swarm = RealSwarm(net_factory)
    yield swarm
    for place in swarm.places:
        await place.server.stop()


async def text(client: SwarmClient, mode: str = SPECULATIVE, then: Callable[[], object] = lambda: None) -> tuple[Generation, Report]:
    async with client.generate(a_request(60, mode=mode)) as (sweep, report):
        async for _ in sweep.pieces():
            then()
        return sweep.result(), report


async def test_real_nodes_write_the_same_text_over_both_routes_and_are_measured(swarm: RealSwarm) -> None:
    await swarm.hold(0, 1, 2)
    along, around = await swarm.client(route="chain"), await swarm.client(route="star")
    for mode in (SPECULATIVE, AUTOREGRESSIVE, ONE_SWEEP):
        (one, said), (two, other) = await text(along, mode), await text(around, mode)
        assert one.data == two.data
        assert len(one.data) == 60
        assert (said.route, other.route) == ("chain", "star")
        assert [row[:2] for row in said.peers] == [(place.block, place.peer) for place in swarm.places]
    members = along.members.everybody(time.time())
    assert all(member.rtt_s is not None and 0 < member.rtt_s < 5 for member in members)
    async with asyncio.timeout(10):
        while swarm.sessions():  # noqa: ASYNC110 (what changes is inside the holders)
            await asyncio.sleep(0.01)


async def test_a_holder_whose_daemon_dies_is_replaced_and_the_text_stays(swarm: RealSwarm) -> None:
    await swarm.hold(0, 1, 2, 0, 1, 2)
    client = await swarm.client()
    expected, _ = await text(client)
    async with asyncio.timeout(60), client.generate(a_request(60)) as (sweep, report):
        killed = ""
        async for _ in sweep.pieces():
            if not killed:
                killed = report.peers[1][1]
                victim = next(net for net in swarm.nets if net.directory.peer == killed)
                assert victim.libp2p.daemon_pid is not None
                os.kill(victim.libp2p.daemon_pid, signal.SIGKILL)
    assert sweep.result().data == expected.data
    assert report.mended
    assert report.peers[1][1] not in ("", killed)
    assert not report.digests_changed


async def test_a_missing_block_is_named_with_who_held_it_last(swarm: RealSwarm) -> None:
    await swarm.hold(0, 1, 2)
    await swarm.announce(swarm.nets[2], 2, swarm.places[2].server._states[-1].published.digest, "left")
    client = await swarm.client()
    began = time.monotonic()
    with pytest.raises(NoPeers, match=f"block 2 has no holder; the last one seen was {short(swarm.places[2].peer)}"):
        await text(client)
    assert time.monotonic() - began < 5


async def test_a_state_that_changes_under_a_text_is_not_mixed_into_it(swarm: RealSwarm) -> None:
    await swarm.hold(0, 1, 2)
    client = await swarm.client()
    expected, _ = await text(client)
    rounds = iter(range(2, 100))

    def publish() -> None:
        number = next(rounds)
        for place in swarm.places:
            place.publish(number, state_of(place.block, seed=number))

    again, report = await text(client, then=publish)
    assert again.data == expected.data
    assert [row[2] for row in report.peers] == [1, 1, 1]


async def test_the_gateway_asks_the_swarm_and_a_client_that_goes_away_frees_its_sessions(swarm: RealSwarm) -> None:
    await swarm.hold(0, 1, 2)
    client = await swarm.client()
    config = GatewayConfig(port=0, max_tokens=100_000)
    wish = {"model": "tiny", "prompt": "The river", "seed": 7, "temperature": 0.9}
    async with gateway.listening(client, Bytes(), config, Runtime()) as url, openai.AsyncOpenAI(base_url=url, api_key="any") as api:
        whole = await api.completions.create(**wish, max_tokens=60)  # type: ignore[call-overload]
        origin = whole.model_extra["blocktrain"]
        assert [row["peer"] for row in origin["peers"]] == [place.peer for place in swarm.places]
        assert whole.choices[0].text == (await text(client))[0].text
        stream = await api.completions.create(**wish, max_tokens=100_000, stream=True)  # type: ignore[call-overload]
        async for _ in stream:
            break
        assert swarm.sessions()
        await stream.close()
        async with asyncio.timeout(20):
            while swarm.sessions():  # noqa: ASYNC110 (what changes is inside the holders)
                await asyncio.sleep(0.01)
