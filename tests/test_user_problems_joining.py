"""What users of such swarms complained about, by number: bootstraps that are gone (2), nodes alone without knowing (4), clocks (11)."""

from __future__ import annotations

import asyncio
import io
import logging
import time
from pathlib import Path
from random import Random

import pytest

from blocktrain.node import launch, planning, snapshot
from blocktrain.node.config import Files, Gossip, Network, NodeConfig, Training
from blocktrain.node.planning import make_plan
from blocktrain.node.runtime import Runtime
from blocktrain.node.store import Store
from blocktrain.protocol import core
from blocktrain.protocol.errors import RefusedBySwarm, Unreachable, UsageError
from tests.conftest import LOOPBACK, MakeNet
from tests.swarm_kit import TEXT, Nodes, manifest, until
from tests.test_network import dead

pytestmark = pytest.mark.real
IDLE = Training(block=0, train=False)


def joiner(*peers: str, block: int | None = None, store: Path | None = None, run: str = "", wait: bool = False) -> NodeConfig:
    network = Network(initial_peers=peers, host_maddrs=LOOPBACK, wait=wait)
    return NodeConfig(network=network, training=Training(block=block), files=Files(store=store), run=run)


def real(offset_s: float = 0.0) -> Runtime:
    return Runtime(clock=lambda: time.time() + offset_s, rng=Random(1))


async def test_02_with_all_initial_peers_dead_each_is_named_and_told_to_wait_it_tries_until_one_answers(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = dead()
    with pytest.raises(Unreachable) as caught:
        await make_plan(joiner(gone, block=0), real())
    assert gone in str(caught.value)
    assert "connection refused" in str(caught.value)
    assert caught.value.exit_code == 3

    monkeypatch.setattr(planning, "RETRY_FIRST_S", 0.1)
    host = await nodes.start(0, training=IDLE)
    peers = [gone]
    tries = []

    async def try_once(config: NodeConfig, runtime: Runtime) -> planning.Plan:
        tries.append(runtime.clock())
        if len(tries) == 3:
            peers.append(host.address)
        return await from_swarm(joiner(*peers, block=0), runtime)

    from_swarm = planning._from_swarm
    monkeypatch.setattr(planning, "_from_swarm", try_once)
    plan = await make_plan(joiner(gone, block=0, wait=True), real())
    assert plan.manifest == nodes.run
    assert len(tries) >= 3
    assert sum("trying again" in record.getMessage() for record in caplog.records if record.levelno >= logging.INFO) <= 1  # once a minute


async def test_02_a_node_whose_initial_peers_are_gone_for_good_goes_on_from_the_addresses_that_it_kept(
    nodes: Nodes, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    host = await nodes.start(0, training=IDLE)
    with Store.open(folder, nodes.run.run, 1) as store:
        store.save_manifest(nodes.run.to_bytes())
        with pytest.raises(Unreachable):  # nothing kept yet
            await make_plan(joiner(dead(), store=folder), real())
        store.save_peers([host.address])
    config = joiner(dead(), store=folder)
    plan = await make_plan(config, real())
    assert (plan.manifest, plan.block, plan.known_peers) == (nodes.run, 1, (host.address,))
    settings = planning.settings_for(plan, config).network
    again = await nodes.start(plan.block, *settings.initial_peers, training=IDLE)
    await until(lambda: again.knows(host) and host.knows(again), again.said)


async def test_02_without_a_store_named_the_one_that_was_joined_by_these_addresses_is_found_and_no_other(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    host, gone = await nodes.start(0, training=IDLE), dead()
    with Store.open(None, nodes.run.run, 1) as store:
        store.save_manifest(nodes.run.to_bytes())
        store.save_peers([host.address, gone])
    assert (await make_plan(joiner(gone), real())).block == 1
    with pytest.raises(Unreachable):  # the address of another swarm, mistyped
        await make_plan(joiner(dead()), real())


async def test_04_a_node_that_sees_nobody_of_its_run_says_isolated_and_stops_saying_it(
    nodes: Nodes, net_factory: MakeNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "ISOLATED_AFTER_S", 1.0)
    hub = await net_factory()  # a DHT node that holds no block
    alone = await nodes.start(0, hub.directory.addresses()[0])
    await until(lambda: alone.node.core.waiting(time.time())[0] == "isolated", alone.said)
    other = await nodes.start(1, hub.directory.addresses()[0])
    await until(lambda: alone.node.core.waiting(time.time())[0] == "training", alone.said)
    await other.stop()
    await until(lambda: alone.node.core.waiting(time.time())[0] == "isolated", alone.said)


@pytest.mark.parametrize(("ahead_s", "words"), [(12.0, "ahead of"), (-45.0, "behind")])
async def test_11_a_clock_that_is_far_off_is_refused_with_its_seconds_and_the_remedy(nodes: Nodes, ahead_s: float, words: str) -> None:
    host = await nodes.start(0, training=IDLE)
    with pytest.raises(RefusedBySwarm, match=rf"clock is {abs(ahead_s):.0f}\.\d s {words} that of 1 peer.*timedatectl") as caught:
        await make_plan(joiner(host.address, block=0), real(ahead_s))
    assert caught.value.exit_code == 6


async def test_11_a_clock_within_bounds_is_told_at_joining(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "blocktrain.node")
    host = await nodes.start(0, training=IDLE)
    await host.node.announced.wait()
    plan = await make_plan(joiner(host.address, block=0), real(3.0))
    assert plan.block == 0
    assert any("clock is 3.0 s ahead of that of 1 peer" in record.getMessage() for record in caplog.records), caplog.text


async def test_11_a_clock_that_goes_wrong_later_is_told_and_ends_the_node_with_its_state_saved(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("BLOCKTRAIN_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(snapshot, "CLOCK_CHECK_S", 0.1)
    monkeypatch.setattr(snapshot, "WRONG_FOR_S", 1.0)
    (tmp_path / "text").write_bytes(bytes(TEXT.astype("u1")) * 4)
    host = await nodes.start(0)
    others = [host, await nodes.start(0, host), await nodes.start(0, host)]
    off = [0.0]
    runtime = Runtime(clock=lambda: time.time() + off[0], rng=Random(3))
    network = Network(initial_peers=(host.address,), host_maddrs=LOOPBACK, ttl_s=6.0, refresh_s=0.7)
    store = tmp_path / "store"
    training = Training(block=0, data=(str(tmp_path / "text"),))
    config = NodeConfig(network=network, training=training, gossip=Gossip(codec="fp32", heldout_margin=10.0), files=Files(store=store))
    running = asyncio.create_task(launch.run_node(config, runtime))
    clocks: list[snapshot.Clocks] = []
    met = snapshot.Clocks.met
    monkeypatch.setattr(snapshot.Clocks, "met", lambda self, each: (clocks.append(self), met(self, each)))
    try:
        await until(lambda: running.done() or (clocks and len(clocks[0]._fresh(asked_only=True)) >= snapshot.JUDGES), host.said)
        assert not running.done(), running
        off[0] = 25.0
        with pytest.raises(RefusedBySwarm, match=r"clock is 25 s ahead of its peers'.*timedatectl.*state is saved") as caught:
            async with asyncio.timeout(60):
                await running
        assert caught.value.exit_code == 6
    finally:
        runtime.stop.set()
        await asyncio.gather(running, return_exceptions=True)
    with Store.open(store, nodes.run.run, 0) as saved:
        assert saved.load_manifest() == nodes.run
        assert saved.checkpoint_round
    assert not any(other.node.fatal.done() for other in others)


async def test_a_joiner_without_a_block_is_shown_who_holds_what_and_told_what_to_type(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    host = await nodes.start(1, training=IDLE)
    await host.node.announced.wait()
    with pytest.raises(UsageError) as caught:
        await make_plan(joiner(host.address), real())
    for words in ("block 0: held by nobody", "block 1: held by 1", f"blocktrain-node --block auto --initial-peers {host.address}"):
        assert words in str(caught.value)


async def test_a_joiner_of_several_runs_is_shown_all_and_told_how_to_choose(nodes: Nodes) -> None:
    host = await nodes.start(0, training=IDLE)
    other = await nodes.start(0, host.address, training=IDLE, run=manifest(name='"another"'))
    await asyncio.gather(host.node.announced.wait(), other.node.announced.wait())
    with pytest.raises(UsageError, match=r"choose one with --run.*(tiny.*another|another.*tiny)"):
        await make_plan(joiner(host.address, block=0), real())
    assert (await make_plan(joiner(host.address, block=0, run="another"), real())).manifest.name == "another"
