"""A client's chain over real streams in memory: holders that die, freeze, are cut off, are full, or tell nonsense."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from blocktrain.node import legs, traversal
from blocktrain.node.compute.evaluation import chain_loss
from blocktrain.protocol import limits
from blocktrain.protocol.errors import NoPeers
from blocktrain.protocol.messages import LINK, SWEEP, Ask, End, Link, Message, Open, Step
from blocktrain.protocol.sweep import AUTOREGRESSIVE, ONE_SWEEP, SPECULATIVE
from tests.sweeping import MANIFEST, World, a_request, state_of, written

A, B = ("a0", "a1", "a2"), ("b0", "b1", "b2")
MODES = (SPECULATIVE, AUTOREGRESSIVE, ONE_SWEEP)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.add(*A, *B)
    world.prefer(*A)
    yield world
    await world.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that tests can wait for."""
    monkeypatch.setattr(traversal, "USUAL_S", 0.3)
    monkeypatch.setattr(traversal, "SECOND_CHANCE_S", 0.02)
    monkeypatch.setattr(legs, "PING_TIMEOUT_S", 0.3)
    monkeypatch.setattr(limits, "OPEN_TIMEOUT_S", 1.0)
    monkeypatch.setattr(limits, "HOP_TIMEOUT_S", 1.0)


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not met():  # noqa: ASYNC110 (what changes is inside the holders)
            await asyncio.sleep(0.01)


async def nobody_has_sessions(world: World, but: str = "") -> None:
    await until(lambda: not any(count for name, count in world.sessions().items() if name != but))


async def plain(world: World, mode: str = SPECULATIVE) -> bytes:
    """What is written where nothing happens."""
    async with world.chain() as chain:
        return (await written(chain, a_request(mode=mode))).data


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("route", ["chain", "star"])
async def test_both_routes_write_the_same_text(world: World, mode: str, route: str) -> None:
    text = await plain(world, mode)
    async with world.chain(route=route) as chain:
        done = await written(chain, a_request(mode=mode))
        assert done.data == text
        assert len(done.data) == 40
        assert chain.report.route == route
        assert [(block, peer) for block, peer, _, _ in chain.report.peers] == [(n, world.places[f"a{n}"].peer) for n in range(3)]
        assert not chain.report.mended
    await nobody_has_sessions(world)


async def test_the_loss_is_the_same_over_both_routes(world: World) -> None:
    windows = [[(7 * row + place) % 256 for place in range(20)] for row in range(5)]
    losses = []
    for route in ("chain", "star"):
        async with world.chain(route=route) as chain:
            losses.append(await chain_loss(chain, MANIFEST, windows))
    assert losses[0] == losses[1]


async def test_the_route_is_what_the_round_trips_say(world: World) -> None:
    async with world.chain() as chain:
        await written(chain, a_request(5, mode=AUTOREGRESSIVE))
        assert chain.report.route == "star", "one round trip instead of two"
    async with world.chain() as chain:
        await written(chain, a_request(5))
        assert chain.report.route == "chain", "a draft takes two turns as a star: no gain with three blocks"
    async with world.chain() as chain:
        await written(chain, a_request(5, mode=ONE_SWEEP))
        assert chain.report.route == "chain", "z travels"


@pytest.mark.parametrize("route", ["chain", "star"])
@pytest.mark.parametrize("victim", A)
@pytest.mark.parametrize("how", ["kill", "cut"])
async def test_a_holder_that_is_lost_in_the_middle_changes_nothing_in_the_text(
    world: World, quick: None, victim: str, how: str, route: str
) -> None:
    peer = world.places[victim].peer

    def lose() -> None:
        if how == "kill":
            world.swarm.kill(peer)
        else:
            for other in (*world.swarm.wires,):
                world.swarm.cut(peer, other)

    text = await plain(world)
    async with world.chain(route=route) as chain:
        done = await written(chain, a_request(), [lose])
        assert done.data == text
        assert (int(victim[1:]), world.places[f"b{victim[1:]}"].peer) in [row[:2] for row in chain.report.peers]
        assert len(chain.report.mended) == 1
        assert not chain.report.digests_changed
        assert done.traversals <= 41


async def test_another_state_that_takes_over_is_said() -> None:
    world = World()
    await world.add(*A, "b0", "b2")
    await world.add("b1", seed=9)
    world.prefer(*A)
    async with world.chain() as chain:
        await written(chain, a_request(), [lambda: world.swarm.kill(world.places["a1"].peer)])
        assert chain.report.digests_changed
        assert chain.report.peers[1][1] == world.places["b1"].peer
    await world.close()


async def test_a_text_stays_with_its_states_while_holders_publish_newer_ones(world: World) -> None:
    """The survivors and the replacement are asked for the states that served before, not for their newest."""

    def publish_everywhere() -> None:
        for place in world.places.values():
            place.publish(2, state_of(place.block, seed=9))

    text = await plain(world)
    async with world.chain() as chain:
        done = await written(chain, a_request(), [publish_everywhere, lambda: world.swarm.kill(world.places["a0"].peer)])
        assert done.data == text
        assert chain.report.mended
        assert not chain.report.digests_changed


async def test_two_holders_that_cannot_reach_each_other_are_bypassed(world: World, quick: None) -> None:
    a0, a1 = world.places["a0"].peer, world.places["a1"].peer
    text = await plain(world)
    async with world.chain(route="chain") as chain:
        done = await written(chain, a_request(), [lambda: world.swarm.cut(a0, a1)])
        assert done.data == text
        assert chain.report.route == "star"
        assert [row[1] for row in chain.report.peers] == [world.places[name].peer for name in A], "nobody is to blame"


async def test_a_noisy_window_is_carried_by_hand_where_holders_cannot_reach_each_other(world: World, quick: None) -> None:
    world.swarm.cut(world.places["a0"].peer, world.places["a1"].peer)
    async with world.chain() as chain:
        bypassed = await written(chain, a_request(mode=ONE_SWEEP))
        assert chain.report.route == "star"
    world.swarm.heal(world.places["a0"].peer, world.places["a1"].peer)
    assert bypassed.data == await plain(world, ONE_SWEEP)


async def test_a_block_that_nobody_holds_is_named_at_once() -> None:
    world = World()
    await world.add(*A)
    world.leave("a2")
    with pytest.raises(NoPeers, match=r"block 2 has no holder; the last one seen was \S+, \d+ s ago"):
        await world.chain().__aenter__()
    async with world.chain(require_all=False) as chain:
        done = await written(chain, a_request(5, allow_missing=True))
        assert done.missing == (2,)
    await world.close()


async def test_the_last_holder_of_a_block_dies(quick: None) -> None:
    world = World()
    await world.add(*A)
    with pytest.raises(NoPeers, match="block 1: no holder is left"):
        async with world.chain() as chain:
            await written(chain, a_request(), [lambda: world.swarm.kill(world.places["a1"].peer)])
    async with world.chain(require_all=False) as chain:
        done = await written(chain, a_request(allow_missing=True))
        assert len(done.data) == 40
        assert done.missing == (1,)
        assert done.blocks == (0, 2)
        assert chain.report.missing == [1]
    await nobody_has_sessions(world, but="a1")
    await world.close()


async def test_a_holder_that_was_only_away_for_a_moment_goes_on(world: World, quick: None) -> None:
    for name in B:
        world.swarm.kill(world.places[name].peer)

    def blink() -> None:
        world.swarm.kill(world.places["a1"].peer)
        world.swarm.revive(world.places["a1"].peer)

    async with world.chain() as chain:
        done = await written(chain, a_request(), [blink])
        assert len(done.data) == 40
        assert len(chain.report.mended) >= 1


async def test_a_full_holder_is_waited_for_where_it_is_the_only_one(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from blocktrain.node.compute import serving

    monkeypatch.setattr(serving, "BUSY_RETRY_S", 0.05)
    world = World()
    await world.add("a0", "a2")
    await world.add("a1", max_sessions=1)
    async with world.chain() as first:
        await written(first, a_request(3))
        async with world.chain() as second:
            waiting = asyncio.create_task(written(second, a_request(3)))
            await until(lambda: bool(second.report.mended))
            assert "busy" in second.report.mended[0]
            await first._close()
            assert len((await waiting).data) == 3
        assert not world.members.avoided(world.places["a1"].peer, time.time()), "a full holder did nothing wrong"
    await world.close()


async def test_a_full_holder_is_passed_by_where_there_are_others(world: World) -> None:
    world.places["a1"].server.most_sessions = 0
    async with world.chain() as chain:
        assert len((await written(chain, a_request())).data) == 40
        assert chain.report.peers[1][1] == world.places["b1"].peer


async def test_a_session_that_its_holder_forgot_is_opened_again(world: World) -> None:
    text = await plain(world)
    async with world.chain() as chain:
        server = world.places["a2"].server
        done = await written(chain, a_request(), [lambda: [server.close(name) for name in list(server._sessions)] and None])
        assert done.data == text
        assert len(chain.report.mended) == 1
        assert chain.report.peers[2][1] == world.places["a2"].peer, "nobody is to blame"


async def test_a_client_that_is_cancelled_leaves_no_session(world: World) -> None:
    started = asyncio.Event()

    async def work() -> None:
        async with world.chain() as chain:
            await written(chain, a_request(10_000), [started.set])

    task = asyncio.create_task(work())
    await started.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await nobody_has_sessions(world)


async def test_a_client_that_dies_leaves_no_session(world: World) -> None:
    chain = world.chain()
    await chain.__aenter__()
    await written(chain, a_request(5))
    assert sum(world.sessions().values())
    world.swarm.kill(world.client.peer)
    await nobody_has_sessions(world)


async def test_a_long_text_outlives_the_idle_time_of_the_holders_behind_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hear nothing from the client itself while it is served."""
    world = World()
    await world.add(*A, idle_s=0.5)
    monkeypatch.setattr(limits, "HOP_TIMEOUT_S", 1.0)
    async with world.chain(route="chain") as chain:
        loop = asyncio.get_running_loop()
        until = loop.time() + 2.0
        await chain.traverse(Step(0, 0, 1, 1, b"The river"))
        sequence = 0
        while loop.time() < until:
            sequence += 1
            await chain.traverse(Step(sequence, 0, 1, 1, b"The river"))
        assert chain.report.mended == []
        await nobody_has_sessions(world)  # but in the end they are given up
    await world.close()


@pytest.mark.parametrize("route", ["chain", "star"])
@pytest.mark.parametrize("lie", ["nan", "short", "blocks", "tokens"])
async def test_a_holder_that_answers_nonsense_is_replaced_and_put_off_for_long(world: World, lie: str, route: str) -> None:
    text = await plain(world)
    liar = world.places["a2"]
    inner = liar.server.step

    async def lying(session: bytes, step: Step, body: memoryview) -> tuple[Step, bytes]:
        onward, out = await inner(session, step, body)
        if lie == "nan":
            return onward, b"\xff\xff" * (len(out) // 2)
        if lie == "short":
            return onward, out[:-2]
        if lie == "blocks":
            return replace(onward, blocks=(2,) if route == "chain" else (1,)), out
        return replace(onward, drafted=200), out

    liar.server.step = lying  # type: ignore[method-assign]
    async with world.chain(route=route) as chain:
        done = await written(chain, a_request())
        assert done.data == text
        assert chain.report.peers[2][1] == world.places["b2"].peer
    assert world.members.offence_s(liar.peer, time.time()) > 0


async def test_clients_that_break_the_rules_are_told_and_hurt_nobody(world: World) -> None:
    """Whatever one stream says, the others' sessions go on, and none of its own is left."""
    a0 = world.places["a0"]
    hello = Open(bytes(16), MANIFEST.run, 0, bytes(32))
    wrong: list[tuple[str, list[Message], str]] = [
        (SWEEP, [Ask("ping")], "malformed"),
        (SWEEP, [replace(hello, run=bytes(32))], "incompatible"),
        (SWEEP, [replace(hello, block=1)], "unknown"),
        (SWEEP, [hello, Step(0, 5, 1, 1, b"abc")], "malformed"),
        (SWEEP, [hello, Step(0, 0, 1, 1, b"")], "malformed"),
        (SWEEP, [hello, Step(0, 0, 200, 60000, b"ab" * 200)], "malformed"),
        (SWEEP, [hello, Step(0, 0, 1, 9, b"abc", draft=250)], "malformed"),
        (SWEEP, [hello, hello], "malformed"),
        (SWEEP, [replace(hello, next_peer=world.client.peer, next_block=1), Step(0, 0, 1, 1, b"abc")], "gone"),
        (LINK, [Link(bytes(range(16)), MANIFEST.run, 0)], "unknown"),
        (LINK, [hello], "malformed"),
    ]
    async with world.chain(route="chain") as chain:
        first = await written(chain, a_request(5))
        for kind, messages, reason in wrong:
            stream = await world.client.transport.open(a0.peer, kind, timeout_s=5)
            for message in messages:
                await stream.send(message, timeout_s=5)
            answer: Message | None = None
            while not isinstance(answer, End):
                answer, _ = await stream.receive(timeout_s=15, max_body=limits.MAX_BODY_BYTES)
            assert answer.reason == reason, (kind, messages)
            await stream.close()
        again = await written(chain, a_request(5))
        assert again.data == first.data
        assert not chain.report.mended
    await nobody_has_sessions(world)
