"""A swarm seen from outside: its records, and each node's own word where it answers."""

from __future__ import annotations

import random
import time

import pytest

from blocktrain.node import join, survey
from blocktrain.node.config import ClientConfig
from blocktrain.node.recipe_file import load_recipe
from blocktrain.node.runtime import Runtime
from blocktrain.node.status import Status
from blocktrain.protocol.errors import NoPeers
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.messages import INFO
from blocktrain.protocol.records import Announcement, RunRecord

pytestmark = pytest.mark.real

MANIFEST = load_recipe("tiny")
LIFE_S = 30.0


async def announce(net, block: int) -> None:  # type: ignore[no-untyped-def]
    expires_at = time.time() + LIFE_S
    word = Announcement(
        run=MANIFEST.run, block=block, phase="training", round=7, digest=bytes([block]) * 32, tokens_per_s=5.0, load=0.0,
        protocol_min=1, protocol_max=1, addresses=(),
    )  # fmt: skip
    assert await net.directory.announce(word, 0, expires_at=expires_at, timeout_s=5)
    assert await net.directory.announce_run(RunRecord(MANIFEST.run, MANIFEST.name, 1, 1), expires_at=expires_at, timeout_s=5)


async def test_a_node_that_answers_speaks_for_itself_and_a_silent_one_is_shown_by_its_record(net_factory) -> None:  # type: ignore[no-untyped-def]
    greeting = Greeting(MANIFEST, "test")
    talker = await net_factory(greeting=greeting)
    silent = await net_factory(talker, greeting=greeting)
    word = Status(name="talker", block=2, round=9, loss=1.5, phase="training", peer="somebody else")
    await talker.transport.serve(INFO, join.Info(MANIFEST, word.to_json).handle)
    await announce(talker, block=0)
    await announce(silent, block=1)

    address = talker.directory.addresses()[0]
    first, second = await survey.statuses(ClientConfig(initial_peers=(address,)), Runtime(rng=random.Random(0)))
    assert (first.name, first.round, first.loss) == ("talker", 9, 1.5)
    assert (first.block, first.peer) == (0, talker.directory.peer)  # by its signed record, not by its word
    assert (second.block, second.round, second.phase) == (1, 7, "training")
    assert second.peer == silent.directory.peer
    assert "tells us" in second.waiting_for
    assert first.coverage == second.coverage == (1, 1, 0)


async def test_a_swarm_without_a_run_says_so(net_factory) -> None:  # type: ignore[no-untyped-def]
    alone = await net_factory()
    with pytest.raises(NoPeers):
        await survey.statuses(ClientConfig(initial_peers=(alone.directory.addresses()[0],), timeout_s=0.5), Runtime(rng=random.Random(0)))
