"""What users of such swarms complained about, by number: everybody moves together, or leaves a hole (20)."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random

import pytest

from blocktrain.node import launch
from blocktrain.node.config import Network, NodeConfig, Training
from blocktrain.node.identity import Identity
from blocktrain.node.network import Net
from blocktrain.node.placing import Pace, choose_block
from blocktrain.node.runtime import Runtime
from blocktrain.protocol.manifest import Manifest
from tests.conftest import LOOPBACK, MakeNet
from tests.swarm_kit import TEXT, Live, Nodes, manifest, until

pytestmark = pytest.mark.real
PACE = Pace(at_most_s=60.0)
IDLE = Training(block=0, train=False)  # who holds what is all that matters here


class Auto:
    """Nodes that choose their block as `--block auto` does: by a client's connection first, then under the same identity for good."""

    def __init__(self, make_net: MakeNet, new_identity: Callable[[], Identity], run: Manifest) -> None:
        self._make_net = make_net
        self._new_identity = new_identity
        self.run = run
        self.swarms: list[Nodes] = []

    async def start(self, number: int, hub: Net) -> Live:
        who = self._new_identity()
        swarm = Nodes(functools.partial(self._make_net, who=who), self.run)
        swarm.ttl_s, swarm.refresh_s = 25.0, 3.0
        self.swarms.append(swarm)
        client = await self._make_net(hub, who=who, client_mode=True)
        block = await choose_block(client, self.run, clock=time.time, rng=Random(number), pace=PACE)
        await client.libp2p.stop()
        return await swarm.start(block, hub.directory.addresses()[0], training=IDLE)


@pytest.fixture
async def auto(net_factory: MakeNet, new_identity: Callable[[], Identity]) -> AsyncIterator[Auto]:
    made = Auto(net_factory, new_identity, manifest(blocks="4"))
    yield made
    for swarm in reversed(made.swarms):
        await swarm.close()


async def test_20_eight_auto_nodes_started_together_on_four_blocks_end_two_each_and_say_why(
    auto: Auto, net_factory: MakeNet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "blocktrain.node")
    hub = await net_factory()
    lives = await asyncio.gather(*(auto.start(number, hub) for number in range(8)))
    assert Counter(live.node.block for live in lives) == {0: 2, 1: 2, 2: 2, 3: 2}
    for live in lives:
        await until(lambda live=live: live.node.core.members.coverage(time.time(), live.node.block) == (2, 2, 2, 2), live.said)  # type: ignore[misc]
    assert all(not live.node.core.members.choosers(time.time()) for live in lives)
    assert sum("needs us most" in record.getMessage() for record in caplog.records) == 8
    late = await auto.start(9, hub)
    await until(lambda: sum(lives[0].node.core.members.coverage(time.time(), lives[0].node.block)) == 9, lives[0].said)
    assert max(Counter(live.node.block for live in (*lives, late)).values()) == 3


async def test_20_a_node_that_may_move_leaves_a_full_block_for_one_that_nobody_holds_and_goes_on_there(
    net_factory: MakeNet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("BLOCKTRAIN_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(launch, "MOVE_REST_TTLS", 0.0)
    nodes = Nodes(net_factory, manifest(blocks="2"))
    host = await nodes.start(0, training=IDLE)
    (tmp_path / "text").write_bytes(bytes(TEXT.astype("u1")) * 4)
    network = Network(initial_peers=(host.address,), host_maddrs=LOOPBACK, ttl_s=4.0, refresh_s=0.5)
    training = Training(block=0, may_move=True, data=(str(tmp_path / "text"),))
    runtime = Runtime(rng=Random(5))
    running = asyncio.create_task(launch.run_node(NodeConfig(network=network, training=training), runtime))

    def holders(block: int) -> list[str]:
        assert not running.done(), running
        return [member.phase for member in host.node.core.members.holders(block, time.time())]

    try:
        await until(lambda: holders(0) == ["training"], host.said)
        await until(lambda: holders(1) == ["training"], host.said)
        assert holders(0) == []
    finally:
        runtime.stop.set()
        assert await running == 0
        await nodes.close()
    stores = sorted(path.name for path in (tmp_path / "data" / "blocktrain").glob("*/*"))
    assert stores == ["block-0", "block-1"]  # what it trained before is kept
