"""Real nodes together in this process, each with its own daemon, DHT and streams: joining, averaging, sweeping, and under attack."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable

import psutil
import pytest

from blocktrain.node import client
from blocktrain.node.config import ClientConfig, GenerateConfig, Gossip, Training
from blocktrain.node.network import Net
from blocktrain.node.ports import Stream
from blocktrain.node.runtime import Runtime
from blocktrain.node.snapshot import Clocks
from blocktrain.protocol import facts, limits, messages
from blocktrain.protocol.errors import Incompatible, NetworkFault, NoPeers
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import short
from blocktrain.protocol.messages import EXCHANGE, INFO, LINK, STATE, SWEEP, Accept, Ask, Chunk, Decline, End, Offer, Want
from blocktrain.protocol.records import Announcement
from tests.swarm_kit import Live, Nodes, manifest, until

pytestmark = pytest.mark.real

MakeNet = Callable[..., Awaitable[Net]]


def announcement(nodes: Nodes, net: Net, *, block: int = 0, round: int = 1, digest: bytes = bytes(32)) -> Announcement:
    return Announcement(
        run=nodes.run.run, block=block, phase="training", round=round, digest=digest, tokens_per_s=100.0, load=0.0,
        protocol_min=1, protocol_max=1, addresses=tuple(net.directory.addresses()[:1]),
    )  # fmt: skip


async def announce(nodes: Nodes, net: Net, **what: int) -> None:
    """A record like that of a node, which there is not."""
    word = announcement(nodes, net, **what)  # type: ignore[arg-type]
    assert await net.directory.announce(word, 0, expires_at=time.time() + 60, timeout_s=8)


async def generate(address: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """`blocktrain generate --json`, in this process."""
    wish = GenerateConfig(prompt="the river", max_tokens=12, seed=1, json=True)
    capsys.readouterr()
    assert await client.generate(ClientConfig(initial_peers=(address,)), wish, b"the river", Runtime(rng=random.Random(1))) == 0
    said = json.loads(capsys.readouterr().out)
    assert isinstance(said, dict)
    return said


# ---- the main job -----------------------------------------------------------------------------------------------------------------------


async def test_a_joiner_starts_at_the_swarms_round_and_both_average_to_the_same_bits(nodes: Nodes) -> None:
    host = await nodes.start()
    await until(lambda: host.round >= 5, host.said)
    assert host.accepted == 0  # alone, its rounds are its own, and it says so
    assert "no other replica" in host.node.core.waiting(time.time())[1]
    behind = host.round
    joiner = await nodes.start(0, host)
    await until(lambda: joiner.phase == "training", joiner.said)
    assert joiner.node.core.counters.fetched == 1
    assert joiner.history[1].round >= behind  # its first word after the untrained start
    await until(lambda: host.accepted >= 4 and joiner.accepted >= 4, lambda: (host.said(), joiner.said()))
    both = set(host.history) & set(joiner.history)  # a state is named by its round and digest
    assert len(both) >= 4
    rounds = [published.round for published in host.history]
    assert rounds == sorted(rounds)
    await joiner.stop()
    await until(lambda: not host.knows(joiner), "a node that said goodbye is still in view")  # long before its record would have ended
    done = host.round
    await until(lambda: host.round >= done + 2, host.said)


async def test_a_node_with_a_round_that_nobody_believes_takes_theirs_and_averages_on(nodes: Nodes) -> None:
    """As one that got its state from a liar who made the round up, when nobody else was in sight."""
    host = await nodes.start()
    await until(lambda: host.round >= 2, host.said)
    others = [host, await nodes.start(0, host)]
    misled = await nodes.start(0, host)
    everybody = [*others, misled]
    await until(lambda: all(one.knows(other) or one is other for one in everybody for other in everybody), misled.said)
    await until(lambda: all(one.accepted for one in everybody), misled.said)
    state = misled.replica.state()
    tall = await misled.replica.load(bytes(state[1]), 10**6, state[0].digest)
    misled.node.tell(facts.Published(tall.round, tall.digest))
    await until(lambda: misled.round < 10**5, lambda: (misled.said(), [other.said() for other in others]))
    merged = misled.accepted
    await until(lambda: misled.accepted >= merged + 3, misled.said)
    assert all(published.round < 10**5 for other in others for published in other.history)


async def test_a_partner_that_freezes_in_an_exchange_holds_up_neither_training_nor_the_next_rounds(
    nodes: Nodes, net_factory: MakeNet
) -> None:
    host = await nodes.start(gossip=Gossip(codec="fp32", tau_s=1.0, heldout_margin=10.0))
    frozen = await net_factory(host.address, greeting=Greeting(nodes.run, "test"))
    asked = asyncio.Event()

    async def accept_and_freeze(stream: Stream) -> None:
        offer, _ = await stream.receive(timeout_s=10)
        assert isinstance(offer, Offer)
        await stream.send(Accept(offer.exchange, 1, 0.0, offer.size, offer.codec), timeout_s=10)
        asked.set()
        await asyncio.Event().wait()

    await frozen.transport.serve(EXCHANGE, accept_and_freeze)
    await announce(nodes, frozen)
    await asyncio.wait_for(asked.wait(), 30)
    steps = host.replica.progress().steps
    await until(lambda: host.node.core.counters.late, host.said)
    assert host.replica.progress().steps > steps
    own = host.round
    await until(lambda: host.round >= own + 3, host.said)
    avoided = [member for member in host.node.core.everybody(time.time()) if member.peer == frozen.directory.peer]
    assert "not complete after 1 s" in host.node.core.members.why(avoided[0].peer)
    honest = await nodes.start(0, host)
    await until(lambda: host.accepted >= 2 and honest.accepted >= 2, lambda: (host.said(), honest.said()))


async def test_a_text_takes_a_holder_of_every_block_and_a_missing_block_is_named(nodes: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    host = await nodes.start(0)
    second = await nodes.start(1, host)
    await until(lambda: host.node.announced.is_set() and second.node.announced.is_set() and host.round and second.round, host.said)
    with pytest.raises(NoPeers, match=r"block 2"):
        await generate(second.address, capsys)
    third = await nodes.start(2, second)  # by another address than the host's
    await until(lambda: third.round and third.node.announced.is_set(), third.said)
    said = await generate(host.address, capsys)
    assert len(str(said["text"]).encode()) >= 12
    assert third.node.holder.tokens_served > 0
    assert host.node.core.members.coverage(time.time(), 0)[0] == 1


async def test_19_a_holder_that_does_not_train_is_never_asked_to_average(nodes: Nodes) -> None:
    host = await nodes.start()
    await until(lambda: host.round >= 2, host.said)
    spectator = await nodes.start(0, host, training=Training(block=0, train=False))
    await until(lambda: spectator.phase == "serving" and host.knows(spectator), spectator.said)
    done = host.round
    await until(lambda: host.round >= done + 4, host.said)
    assert host.node.core.counters.declined == host.accepted == spectator.accepted == 0
    assert spectator.replica.progress().steps == 0
    assert spectator.round >= 2  # it has the swarm's state to serve


# ---- who does not belong ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"sigma_high": "3.0"}, {"seed": "1"}], ids=["sigma", "run"])
async def test_a_peer_of_another_run_or_partition_is_refused_on_both_sides_with_field_ours_and_theirs(
    nodes: Nodes, net_factory: MakeNet, caplog: pytest.LogCaptureFixture, changes: dict[str, str]
) -> None:
    host = await nodes.start()
    await until(lambda: host.round, host.said)
    other = manifest(**changes)
    stranger = await net_factory(host.address, greeting=Greeting(other, "test"))
    caplog.clear()
    stream = await stranger.transport.open(host.peer, EXCHANGE, timeout_s=10)
    await stream.send(Offer(b"e" * 16, other.run, 0, "block", 1, "fp32", 1.0, 100), timeout_s=10)
    with pytest.raises(Incompatible) as fault:
        await stream.receive(timeout_s=10)
    await stream.close()
    field = "sigma partition" if "sigma_high" in changes else "run"
    assert f"{field}: ours " in str(fault.value)
    assert "theirs" in str(fault.value)
    here = f"peer {short(stranger.directory.peer)} cannot work with us: {field}: ours "
    await until(lambda: any(here in line for line in caplog.messages), lambda: caplog.messages)
    assert host.node.core.counters.accepted == 0


async def test_the_distance_of_clocks_is_measured(nodes: Nodes, net_factory: MakeNet) -> None:
    host = await nodes.start()
    clocks = Clocks(lambda: time.time() + 20)
    ahead = await net_factory(host.address, greeting=Greeting(nodes.run, "test"), clock=lambda: time.time() + 20, on_hello=clocks.met)
    stream = await ahead.transport.open(host.peer, INFO, timeout_s=10)
    await stream.send(Ask("ping"), timeout_s=10)
    await stream.receive(timeout_s=10)
    await stream.close()
    skew_s = clocks.skew_s()
    assert skew_s is not None
    assert -25 < skew_s < -15


# ---- attacks ----------------------------------------------------------------------------------------------------------------------------


async def still_works(nodes: Nodes, host: Live) -> None:
    """The node under attack trains on, and an honest node joins it and averages."""
    assert not host.node.fatal.done()
    honest = await nodes.start(0, host)
    before = host.accepted
    await until(lambda: host.accepted >= before + 2 and honest.accepted >= 2, lambda: (host.said(), honest.said()))


def lines_of(caplog: pytest.LogCaptureFixture, peer: str) -> list[str]:
    loud = [record for record in caplog.records if record.levelno >= logging.INFO and record.name.startswith("blocktrain")]
    return [record.getMessage() for record in loud if short(peer) in record.getMessage() or peer in record.getMessage()]


async def test_random_bytes_on_every_kind_of_stream(
    nodes: Nodes, net_factory: MakeNet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "OPEN_TIMEOUT_S", 2.0)
    caplog.set_level(logging.INFO)
    host = await nodes.start()
    attacker = await net_factory(host.address, greeting=Greeting(nodes.run, "test"))
    caplog.clear()
    rng = random.Random(5)
    hello = messages.to_frame(Greeting(nodes.run, "test").hello(time.time()))
    offer = Offer(b"e" * 16, nodes.run.run, 0, "block", 1, "fp32", 1.0, 100)
    frames = [messages.to_frame(each) for each in (offer, Ask("status"), Want(nodes.run.run, 0, "block", bytes(32)), Chunk(2**35))]

    async def throw(kind: str) -> None:
        if rng.random() < 0.5:
            sent = hello + rng.choice(frames)[: rng.randrange(1, 60)]
        elif rng.random() < 0.5:
            good = bytearray(hello + rng.choice(frames))
            for _ in range(3):
                good[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
            sent = bytes(good)
        else:
            sent = rng.choice((hello, b"")) + rng.randbytes(rng.randrange(2000))
        with contextlib.suppress(Exception):  # the host may hang up at any moment
            _, writer = await attacker.libp2p.open_stream(host.peer, kind, timeout_s=10)
            writer.write(sent)
            await writer.drain()
            writer.close()

    for _ in range(12):
        await asyncio.gather(*(throw(kind) for kind in (EXCHANGE, STATE, SWEEP, LINK, INFO)))
    await until(lambda: not host.net.transport.serving, "streams of the attacker are still served")
    assert len(lines_of(caplog, attacker.directory.peer)) <= 2, lines_of(caplog, attacker.directory.peer)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    await still_works(nodes, host)


async def test_offers_of_absurd_sizes_rounds_and_weights(nodes: Nodes, net_factory: MakeNet, caplog: pytest.LogCaptureFixture) -> None:
    host = await nodes.start()
    await until(lambda: host.round >= 2, host.said)
    before = psutil.Process().memory_info().rss
    right = host.replica.state_bytes
    absurd = [
        {"size": limits.MAX_STATE_BYTES},
        {"size": 0},
        {"round": 2**40},
        {"weight": 1e15},
        {"block": 2},
        {"codec": "sparse", "reference": b"r" * 32},
        {"codec": "int8", "size": 1},
        {"run": b"r" * 32},
    ]
    answers = []
    for number, changes in enumerate(absurd):  # each a stranger, since an offender is not listened to again so soon
        attacker = await net_factory(host.address, greeting=Greeting(nodes.run, "test"), client_mode=True)
        offer = Offer(**{
            "exchange": bytes([number]) * 16, "run": nodes.run.run, "block": 0, "part": "block", "round": host.round, "codec": "fp32",
            "weight": 1.0, "size": right, **changes,
        })  # fmt: skip
        stream = await attacker.transport.open(host.peer, EXCHANGE, timeout_s=10)
        await stream.send(offer, timeout_s=10)
        with contextlib.suppress(NetworkFault):  # it may hang up without a word
            answer, _ = await stream.receive(timeout_s=10)
            answers.append(answer)
            if isinstance(answer, Accept):
                await stream.send(Chunk(0), bytes(right), timeout_s=10)
        await stream.close()
    assert [answer.reason for answer in answers if isinstance(answer, Decline)].count("block") == 2
    assert {answer.reason for answer in answers if isinstance(answer, Decline)} >= {"block", "codec", "ahead"}
    await until(lambda: host.node.core.current is None, host.said)
    assert host.accepted == 0
    assert host.node.core.counters.refused >= 2
    assert psutil.Process().memory_info().rss - before < 300 * 1024 * 1024
    await still_works(nodes, host)


async def test_a_thousand_quick_streams_and_a_flood_of_chunks(nodes: Nodes, net_factory: MakeNet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    host = await nodes.start()
    attacker = await net_factory(host.address, greeting=Greeting(nodes.run, "test"))
    caplog.clear()
    steps = host.replica.progress().steps

    async def knock(kind: str) -> None:
        with contextlib.suppress(Exception):
            _, writer = await attacker.libp2p.open_stream(host.peer, kind, timeout_s=20)
            writer.close()

    for _ in range(20):
        await asyncio.gather(*(knock(kind) for kind in (EXCHANGE, STATE, SWEEP, LINK, INFO) for _ in range(10)))

    stream = await attacker.transport.open(host.peer, EXCHANGE, timeout_s=10)
    with contextlib.suppress(Exception):
        for _ in range(60):  # 30 MB that nobody asked for
            await stream.send(Chunk(0), bytes(limits.CHUNK_BYTES), timeout_s=10)
    await stream.close()
    await until(lambda: not host.net.transport.serving, "streams of the attacker are still served")
    assert host.replica.progress().steps > steps
    assert len(lines_of(caplog, attacker.directory.peer)) <= 3, lines_of(caplog, attacker.directory.peer)
    gc.collect()
    await still_works(nodes, host)


async def test_forged_and_boastful_records_keep_nobody_from_averaging(nodes: Nodes, net_factory: MakeNet) -> None:
    """One signs a record of a round that it does not have; its record is real, its state is not there."""
    host = await nodes.start()
    boaster = await net_factory(host.address, greeting=Greeting(nodes.run, "test"))
    await until(lambda: host.round >= 3, host.said)
    await announce(nodes, boaster, round=10**9)
    joiner = await nodes.start(0, host)
    await until(lambda: joiner.phase == "training", joiner.said)
    assert joiner.round >= 3  # from the host: what the boaster has is nothing
    before = host.accepted
    await until(lambda: host.accepted >= before + 3 and joiner.accepted >= 3, lambda: (host.said(), joiner.said()))


async def test_a_peer_that_lets_every_exchange_hang_does_not_keep_the_others_out(nodes: Nodes, net_factory: MakeNet) -> None:
    gossip = Gossip(codec="fp32", tau_s=1.0, heldout_margin=10.0)
    host = await nodes.start(gossip=gossip)
    attacker = await net_factory(host.address, greeting=Greeting(nodes.run, "test"))
    await until(lambda: host.round >= 2, host.said)
    declined = asyncio.Event()

    async def hang() -> None:
        while True:
            with contextlib.suppress(Exception):
                stream = await attacker.transport.open(host.peer, EXCHANGE, timeout_s=10)
                offer = Offer(random.Random().randbytes(16), nodes.run.run, 0, "block", host.round, "fp32", 1.0, host.replica.state_bytes)
                await stream.send(offer, timeout_s=10)
                answer, _ = await stream.receive(timeout_s=10)
                if isinstance(answer, Decline) and answer.reason == "put-off":
                    declined.set()
                elif isinstance(answer, Accept):
                    await stream.receive(timeout_s=10, max_body=limits.MAX_BODY_BYTES)
                    await stream.receive(timeout_s=10)
                await stream.close()

    hanging = asyncio.create_task(hang())
    try:
        async with asyncio.timeout(60):
            await declined.wait()
        honest = await nodes.start(0, host, gossip=gossip)
        await until(lambda: host.accepted >= 3 and honest.accepted >= 3, lambda: (host.said(), honest.said()))
    finally:
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)


async def test_an_unknown_question_gets_an_end_with_a_reason(nodes: Nodes, net_factory: MakeNet) -> None:
    host = await nodes.start()
    asker = await net_factory(host.address, greeting=Greeting(nodes.run, "test"), client_mode=True)
    for kind in (INFO, STATE, EXCHANGE, SWEEP, LINK):
        stream = await asker.transport.open(host.peer, kind, timeout_s=10)
        await stream.send(End("ok"), timeout_s=10)
        answer, _ = await stream.receive(timeout_s=10)
        assert isinstance(answer, End)
        assert answer.reason == "malformed"
        await stream.close()
