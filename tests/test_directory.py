"""The notice board: real nodes see each other's records, and nobody can forge, overwrite or hide another's."""

from __future__ import annotations

import time

import pytest

from blocktrain.protocol.ids import Digest, RunId
from blocktrain.protocol.records import Announcement
from tests.conftest import MakeNet

pytestmark = pytest.mark.real

RUN = RunId(bytes(range(32)))


def announcement(block: int = 0, phase: str = "training", round: int = 1, addresses: tuple[str, ...] = ()) -> Announcement:
    return Announcement(RUN, block, phase, round, Digest(bytes(32)), 100.0, 0.0, 1, 1, addresses)


async def test_two_nodes_see_each_others_announcement(net_factory: MakeNet) -> None:
    host = await net_factory()
    joiner = await net_factory(host)
    now = time.time()
    for net, block in ((host, 0), (joiner, 0)):
        assert await net.directory.announce(announcement(block), 0, expires_at=now + 30, timeout_s=5)
    for net in (host, joiner):
        seen = await net.directory.read_block(RUN, 0, 0, timeout_s=5)
        assert {each.peer for each in seen} == {host.directory.peer, joiner.directory.peer}
        assert all(each.expires_at == now + 30 for each in seen)
