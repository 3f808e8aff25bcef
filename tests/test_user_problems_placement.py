"""What users of such swarms complained about, by number: everybody moves together, or leaves a hole (20)."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from random import Random

import pytest

from blocktrain.node.config import Training
from blocktrain.node.identity import Identity
from blocktrain.node.network import Net
from blocktrain.node.placing import Pace, choose_block
from blocktrain.protocol.manifest import Manifest
from tests.conftest import MakeNet
from tests.swarm_kit import Live, Nodes, manifest, until

pytestmark = pytest.mark.real
PACE = Pace(pause_s=0.7, at_most_s=60.0)
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
    caplog.set_level(logging.INFO, "blocktrain.node")
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
