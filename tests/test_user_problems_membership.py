"""What users of such swarms complained about, by number: who is there, for how long, and what a node says about it.

Real nodes in this process, with records that live 6 s and are renewed every 0.7 s (by default 30 and 10): the promised deadlines, in their
proportion.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import time
from collections.abc import Callable

import pytest

from blocktrain.node.catchup import Donor
from blocktrain.node.config import Gossip, Training
from blocktrain.node.identity import Identity
from blocktrain.node.placing import look
from blocktrain.protocol.membership import Members
from tests.conftest import MakeNet
from tests.swarm_kit import Live, Nodes, until

pytestmark = pytest.mark.real
IDLE = Training(block=0, train=False)
TTL_S, REFRESH_S = 6.0, 0.7  # of swarm_kit's nodes
SLACK_S = 10.0  # of a loaded machine


async def kill(live: Live) -> None:
    """As SIGKILL would: no farewell. Its daemon dies, and with it every connection."""
    assert live.net.libp2p.daemon_pid is not None
    os.kill(live.net.libp2p.daemon_pid, signal.SIGKILL)
    await live.net.died.wait()


def quiet(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines that look like trouble."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]


async def test_08_a_healthy_start_says_nothing_that_looks_like_an_error(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    host = await nodes.start(0, pace_s=0.1)
    joiner = await nodes.start(0, host, pace_s=0.1)
    await until(lambda: joiner.accepted and host.accepted, joiner.said)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert "Traceback" not in caplog.text


async def test_14_a_killed_peer_is_avoided_after_its_first_failed_call_and_gone_within_one_life_of_its_record(nodes: Nodes) -> None:
    host = await nodes.start(0)
    victim, other = await nodes.start(0, host), await nodes.start(0, host)
    await until(lambda: host.knows(victim) and other.knows(victim) and host.accepted and other.accepted, host.said)
    await kill(victim)
    killed_at = time.monotonic()
    for live in (host, other):
        await until(lambda live=live: live.node.core.members.avoided(victim.peer, time.time()) > 0 or not live.knows(victim), live.said)  # type: ignore[misc]
    for live in (host, other):
        await until(lambda live=live: not live.knows(victim), live.said)  # type: ignore[misc]
    assert time.monotonic() - killed_at < TTL_S + SLACK_S
    before = host.accepted
    await until(lambda: host.accepted > before, host.said)


async def test_15_a_dead_peer_costs_few_calls_and_few_lines(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "blocktrain")
    host = await nodes.start(0)
    victim = await nodes.start(0, host)
    await until(lambda: host.accepted, host.said)
    called = []
    offer = host.node.exchanger.offer

    async def count(order):  # type: ignore[no-untyped-def]
        called.append(order.peer)
        await offer(order)

    host.node.exchanger.offer = count  # type: ignore[method-assign]
    await kill(victim)
    called.clear()
    caplog.clear()
    rounds = host.round
    await until(lambda: not host.knows(victim) and host.round > rounds + 5, host.said)
    # Back-offs of 2, 4, 8 s in a life of 6 s: three calls at most, and one for the call that was under way.
    assert called.count(victim.peer) <= 4
    assert sum(victim.peer[-6:] in record.getMessage() and record.levelno >= logging.WARNING for record in caplog.records) <= 1
    assert quiet(caplog) == []


async def test_16_a_node_restarted_under_its_identity_is_seen_again_soon(
    net_factory: MakeNet, new_identity: Callable[[], Identity], nodes: Nodes
) -> None:
    who = new_identity()
    swarm = Nodes(functools.partial(net_factory, who=who), nodes.run)
    host = await nodes.start(0, training=IDLE)
    first = await swarm.start(1, host, training=IDLE)
    await until(lambda: host.knows(first), host.said)
    await kill(first)
    first.stopping.set()
    await first.stop()
    restarted_at = time.monotonic()
    again = await swarm.start(2, host, training=IDLE)
    await until(lambda: [m.block for m in host.node.core.everybody(time.time()) if m.peer == who.peer_id] == [2], host.said)
    assert time.monotonic() - restarted_at < 15 + SLACK_S
    await again.stop()


async def test_17_two_halves_that_were_cut_have_one_view_again(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    from blocktrain.node import bootstrap
    from tests.test_network import forget

    monkeypatch.setattr(bootstrap, "CHECK_S", 0.5)
    monkeypatch.setattr(bootstrap, "PAUSE_S", 3.0)
    hub = await nodes.start(0, training=IDLE)
    lives = [hub, *[await nodes.start(number % 3, hub, training=IDLE) for number in (1, 2, 3)]]

    def whole(live: Live) -> bool:
        return len(live.node.core.everybody(time.time())) == 3

    for live in lives:
        await until(lambda live=live: whole(live), live.said)  # type: ignore[misc]
    for here in lives[:2]:
        for there in lives[2:]:
            await forget(here.net, there.net)
            await forget(there.net, here.net)
    healed_at = time.monotonic()
    for live in lives:
        await until(lambda live=live: whole(live), live.said)  # type: ignore[misc]
    assert time.monotonic() - healed_at < 60


async def test_18_eight_replicas_of_one_block_are_all_visible_and_one_that_leaves_and_comes_back_at_once_too(
    net_factory: MakeNet, nodes: Nodes, new_identity: Callable[[], Identity]
) -> None:
    hub = await nodes.start(0, training=IDLE)
    who = new_identity()
    swarm = Nodes(functools.partial(net_factory, who=who), nodes.run)
    leaver = await swarm.start(1, hub, training=IDLE)
    await asyncio.gather(*(nodes.start(1, hub, training=IDLE) for _ in range(7)))
    await until(lambda: len(hub.node.core.members.holders(1, time.time())) == 8, hub.said)
    await leaver.stop()
    await until(lambda: not hub.knows(leaver), hub.said, 10 + SLACK_S)
    again = await swarm.start(1, hub, training=IDLE)
    await until(lambda: hub.knows(again), hub.said)
    await again.stop()
    await until(lambda: not hub.knows(again), hub.said, 10 + SLACK_S)


async def test_19_a_client_that_looks_on_is_no_replica_and_is_asked_for_nothing(net_factory: MakeNet, nodes: Nodes) -> None:
    host = await nodes.start(0)
    client = await net_factory(host.address, client_mode=True)
    members = Members(nodes.run.run, nodes.run.blocks, client.directory.peer)
    await host.node.announced.wait()
    await look(client, nodes.run, members, time.time)
    assert members.coverage(time.time(), None)[0] == 1
    rounds = host.round
    await until(lambda: host.round >= rounds + 3, host.said)
    assert host.node.core.everybody(time.time()) == []
    assert host.node.core.counters.accepted == 0


async def test_27_a_joiner_gets_its_state_while_its_donors_average_and_they_lose_no_round(nodes: Nodes) -> None:
    host = await nodes.start(0)
    other = await nodes.start(0, host)
    await until(lambda: host.accepted >= 2 and other.accepted >= 2, host.said)
    late = [live.node.core.counters.late + live.node.core.counters.lost for live in (host, other)]
    joiner = await nodes.start(0, host)
    await until(lambda: joiner.node.core.counters.fetched == 1, joiner.said)
    assert joiner.history[1].round >= 2  # it starts at the swarm's round
    before = host.accepted, other.accepted
    await until(lambda: host.accepted > before[0] and other.accepted > before[1] and joiner.accepted, host.said)
    assert [live.node.core.counters.late + live.node.core.counters.lost for live in (host, other)] == late


async def test_28_a_joiner_whose_download_outlasts_many_rounds_is_taken_in_at_once_after_it(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Donor._send

    async def slowly(self: Donor, stream, want) -> None:  # type: ignore[no-untyped-def]
        started = host.round
        await until(lambda: host.round >= started + 5, host.said)
        await send(self, stream, want)

    host = await nodes.start(0)
    other = await nodes.start(0, host)
    await until(lambda: host.accepted >= 2 and other.accepted >= 2, host.said)
    monkeypatch.setattr(Donor, "_send", slowly)
    joiner = await nodes.start(0, host)
    await until(lambda: joiner.node.core.counters.fetched, joiner.said)
    await until(lambda: joiner.accepted, joiner.said)
    assert joiner.node.core.counters.fetched <= 2  # at most one try more


async def test_33_a_lone_replica_trains_on_and_says_that_its_rounds_are_its_own(nodes: Nodes) -> None:
    alone = await nodes.start(0, pace_s=0.0)
    await until(lambda: alone.replica.progress().loss is not None and alone.round >= 2, alone.said)
    first = alone.replica.progress().heldout
    await until(lambda: (now := alone.replica.progress().heldout) is not None and first is not None and now < first, alone.said)
    assert alone.accepted == 0
    assert alone.node.core.counters.own_rounds >= 2
    assert "rounds are our own" in alone.node.core.waiting(time.time())[1]


async def test_34_every_moment_has_a_phase_a_reason_and_a_next_action_and_no_line_is_repeated(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "blocktrain")
    said = []
    host = await nodes.start(0)
    joiner = await nodes.start(0, host, gossip=Gossip(codec="fp32", tau_s=3.0, heldout_margin=10.0))

    def listen(live: Live) -> bool:
        said.append(live.node.core.waiting(time.time()))
        return live.accepted >= 3

    await until(lambda: listen(host) and listen(joiner), host.said)
    assert all(phase and waits and then and seconds >= 0 for phase, waits, seconds, then in said)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    rounds = [line for line in lines if line.startswith("round ")]
    others = [line for line in lines if line not in rounds]
    assert len(others) == len(set(others)) or max(map(others.count, others)) <= 2, others  # two nodes speak here
