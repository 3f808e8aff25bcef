"""Streams of messages: hellos, bounds, deadlines and hanging up. Half of it in memory, half over real daemons."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from blocktrain.node import transport
from blocktrain.node.network import Net
from blocktrain.node.ports import Busy, Stream, UnknownState
from blocktrain.node.transport import Met
from blocktrain.protocol import ids, limits, manifest, messages
from blocktrain.protocol.errors import Incompatible, Malformed, NetworkFault, UsageError
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.messages import EXCHANGE, INFO, Answer, Ask, Chunk, End
from tests.conftest import MakeNet
from tests.twins import Swarm, Twin

RECIPE = Path(__file__).resolve().parents[1] / "node" / "recipes" / "tiny.toml"
WAIT_S = 10.0


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    made = Swarm()
    yield made
    await made.close()


async def echo(stream: Stream) -> None:
    """Answers every Ask with an Answer that carries the same body, until an End comes."""
    while True:
        message, body = await stream.receive(timeout_s=WAIT_S, max_body=limits.MAX_BODY_BYTES)
        if isinstance(message, End):
            return
        assert isinstance(message, Ask)
        await stream.send(Answer(message.what), body, timeout_s=WAIT_S)


async def ask(stream: Stream, body: bytes = b"") -> bytes:
    await stream.send(Ask("ping"), body, timeout_s=WAIT_S)
    message, answer = await stream.receive(timeout_s=WAIT_S, max_body=limits.MAX_BODY_BYTES)
    assert message == Answer("ping"), message
    return bytes(answer)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines that a person would see."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("blocktrain") and record.levelno >= logging.INFO]


# ---- in memory ------------------------------------------------------------------------------------------------------------------------


async def test_a_question_and_its_answer(swarm: Swarm) -> None:
    a, b = swarm.node("a"), swarm.node("b")
    await b.transport.serve(INFO, echo)
    stream = await a.transport.open(b.peer, INFO, timeout_s=WAIT_S)
    assert await ask(stream, b"body") == b"body"
    assert await ask(stream) == b""
    await stream.send(End("ok"), timeout_s=WAIT_S)
    await stream.close()
    assert a.transport.traffic.bytes_out == b.transport.traffic.bytes_in > 0
    assert a.transport.traffic.bytes_in == b.transport.traffic.bytes_out > 0


async def test_both_learn_round_trip_and_skew_from_the_hellos(swarm: Swarm) -> None:
    met: list[Met] = []
    a = swarm.node("a", on_hello=met.append)
    b = swarm.node("b", clock=lambda: time.time() + 7.0, on_hello=met.append)
    await b.transport.serve(INFO, echo)
    swarm.delay(a, b, 0.1)
    stream = await a.transport.open(b.peer, INFO, timeout_s=WAIT_S)
    await ask(stream)
    await stream.close()
    asked, asking = met
    assert (asked.peer, asked.rtt_s) == (a.peer, None)
    assert asked.skew_s == pytest.approx(-7.1, abs=0.09)
    assert asking.peer == b.peer
    assert asking.rtt_s is not None
    assert asking.rtt_s >= 0.2
    assert asking.skew_s == pytest.approx(7.0, abs=0.09)


@pytest.mark.parametrize(
    ("error", "reason", "said"),
    [
        (Malformed("bad shape"), "malformed", 1),
        (Busy(3.0), "busy", 0),
        (UnknownState("gone"), "unknown", 0),
        (TimeoutError(), "late", 1),
        (NetworkFault("the third one hung up"), "late", 1),
        (UsageError("no"), "refused", 1),
        (RuntimeError("a bug of ours"), "failed", 1),
    ],
)
async def test_what_a_handler_raises_reaches_the_caller_as_an_end(
    swarm: Swarm, caplog: pytest.LogCaptureFixture, error: Exception, reason: str, said: int
) -> None:
    caplog.set_level(logging.INFO)
    a, b = swarm.node(f"a {reason} {type(error).__name__}"), swarm.node("b")

    async def handler(stream: Stream) -> None:
        await stream.receive(timeout_s=WAIT_S)
        raise error

    await b.transport.serve(INFO, handler)
    for _ in range(3):
        stream = await a.transport.open(b.peer, INFO, timeout_s=WAIT_S)
        await stream.send(Ask("ping"), timeout_s=WAIT_S)
        message, _ = await stream.receive(timeout_s=WAIT_S)
        await stream.close()
        assert isinstance(message, End)
        assert message.reason == reason
        assert message.retry_after_s == (3.0 if reason == "busy" else 0.0)
    lines = warnings_of(caplog)
    assert len(lines) == said, "three times the same is one line a minute"
    assert all(ids.short(a.peer) in line for line in lines)
    assert not any(record.exc_info for record in caplog.records if record.levelno >= logging.INFO)


async def test_peers_of_another_run_are_told_which_and_their_requests_are_not_served(
    swarm: Swarm, caplog: pytest.LogCaptureFixture
) -> None:
    table = tomllib.loads(RECIPE.read_text())
    ours, theirs = manifest.from_table(table), manifest.from_table({**table, "seed": table["seed"] + 1})
    a, b = swarm.node("a", Greeting(ours, "t")), swarm.node("b", Greeting(theirs, "t"))
    served: list[str] = []

    async def handler(stream: Stream) -> None:
        served.append(stream.peer)
        await stream.send(End("ok"), timeout_s=WAIT_S)

    await b.transport.serve(INFO, handler)
    for _ in range(2):
        stream = await a.transport.open(b.peer, INFO, timeout_s=WAIT_S)
        await stream.send(Ask("ping"), timeout_s=WAIT_S)
        with pytest.raises(Incompatible) as caught:
            await stream.receive(timeout_s=WAIT_S)
        await stream.close()
        assert caught.value.peer == b.peer
        assert ours.run.hex()[:12] in caught.value.why
        assert theirs.run.hex()[:12] in caught.value.why
    assert served == []
    lines = warnings_of(caplog)
    assert len([line for line in lines if ids.short(b.peer) in line]) == 1
    assert len([line for line in lines if ids.short(a.peer) in line]) == 1
    a.transport.greeting = Greeting(None, "a client that has not chosen")
    stream = await a.transport.open(b.peer, INFO, timeout_s=WAIT_S)
    await stream.send(Ask("ping"), timeout_s=WAIT_S)
    assert await stream.receive(timeout_s=WAIT_S) == (End("ok"), b"")
    await stream.close()
    assert served == [a.peer]


async def test_one_peer_cannot_take_all_places(swarm: Swarm) -> None:
    greedy, modest, host = swarm.node("greedy"), swarm.node("modest"), swarm.node("host")
    release = asyncio.Event()

    async def handler(stream: Stream) -> None:
        await stream.receive(timeout_s=WAIT_S)
        await release.wait()
        await stream.send(Answer("ping"), timeout_s=WAIT_S)

    await host.transport.serve(INFO, handler)

    async def first_answer(node: Twin) -> str:
        stream = await node.transport.open(host.peer, INFO, timeout_s=WAIT_S)
        try:
            await stream.send(Ask("ping"), timeout_s=WAIT_S)
            message, _ = await stream.receive(timeout_s=WAIT_S)
            return message.reason if isinstance(message, End) else "answered"
        except NetworkFault:
            return "dropped"
        finally:
            await stream.close()

    held = [asyncio.create_task(first_answer(greedy)) for _ in range(limits.MAX_STREAMS_PER_PEER)]
    while host.transport.serving < limits.MAX_STREAMS_PER_PEER:  # noqa: ASYNC110 lets the streams run
        await asyncio.sleep(0)
    assert await first_answer(greedy) == "busy"
    waiting = asyncio.create_task(first_answer(modest))
    while host.transport.serving <= limits.MAX_STREAMS_PER_PEER:  # noqa: ASYNC110 lets the streams run
        await asyncio.sleep(0)
    release.set()
    assert await waiting == "answered"
    assert set(await asyncio.gather(*held)) == {"answered"}
    assert await first_answer(greedy) == "answered", "the places are free again"


async def test_silence_ends_with_the_deadline_and_the_stream_can_be_read_on(swarm: Swarm) -> None:
    a, b = swarm.node("a"), swarm.node("b")
    await b.transport.serve(INFO, echo)
    stream = await a.transport.open(b.peer, INFO, timeout_s=WAIT_S)
    assert await ask(stream) == b""
    swarm.cut(a, b)
    await stream.send(Ask("ping"), b"late" * 1000, timeout_s=WAIT_S)
    with pytest.raises(NetworkFault, match="sent nothing"):
        await stream.receive(timeout_s=0.05, max_body=10_000)
    with pytest.raises(NetworkFault, match="no answer"):
        await a.transport.open(b.peer, INFO, timeout_s=0.05)
    swarm.heal(a, b)
    message, body = await stream.receive(timeout_s=WAIT_S, max_body=10_000)
    assert (message, bytes(body)) == (Answer("ping"), b"late" * 1000)
    await stream.close()


async def test_a_body_where_none_is_expected_and_a_longer_one_than_expected_are_faults(swarm: Swarm) -> None:
    a, b = swarm.node("a"), swarm.node("b")
    await b.transport.serve(INFO, echo)
    for allowed in (0, 99):
        stream = await a.transport.open(b.peer, INFO, timeout_s=WAIT_S)
        await stream.send(Ask("ping"), bytes(100), timeout_s=WAIT_S)
        with pytest.raises(Malformed, match="body of 100 bytes") as caught:
            await stream.receive(timeout_s=WAIT_S, max_body=allowed)
        assert caught.value.peer == b.peer
        await stream.close()


async def test_who_writes_last_over_a_slow_link_waits_until_it_was_read(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds would do for a small message; a large one may still lie in buffers then."""
    monkeypatch.setattr(transport, "LINGER_S", 0.01)
    monkeypatch.setattr(transport, "SLOWEST_BYTES_PER_S", 100_000)
    a, b = swarm.node("a"), swarm.node("b")
    body, got = bytes(200_000), asyncio.get_running_loop().create_future()

    async def handler(stream: Stream) -> None:
        _, read = await stream.receive(timeout_s=WAIT_S, max_body=len(body))
        got.set_result(bytes(read))

    await b.transport.serve(INFO, handler)
    swarm.delay(a, b, 0.1)
    stream = await a.transport.open(b.peer, INFO, timeout_s=WAIT_S)
    await stream.send(Ask("ping"), body, timeout_s=WAIT_S)
    await stream.close()  # drops what is under way, in this network as in libp2p
    async with asyncio.timeout(WAIT_S):
        assert await got == body


async def test_a_dead_peer_is_a_fault_at_once_and_nobody_calls_himself(swarm: Swarm) -> None:
    a, b = swarm.node("a"), swarm.node("b")
    await b.transport.serve(INFO, echo)
    stream = await a.transport.open(b.peer, INFO, timeout_s=WAIT_S)
    await ask(stream)
    swarm.kill(b)
    with pytest.raises(NetworkFault, match="hung up"):
        await stream.receive(timeout_s=WAIT_S)
    with pytest.raises(NetworkFault, match="hung up"):
        await stream.send(Ask("ping"), timeout_s=WAIT_S)
    await stream.close()
    with pytest.raises(NetworkFault):
        await a.transport.open(b.peer, INFO, timeout_s=WAIT_S)
    with pytest.raises(NetworkFault, match="itself"):
        await a.transport.open(a.peer, INFO, timeout_s=WAIT_S)


# ---- over real daemons ----------------------------------------------------------------------------------------------------------------


@pytest.mark.real
async def test_megabytes_both_ways_at_once_arrive_whole(net_factory: MakeNet) -> None:
    host = await net_factory()
    caller = await net_factory(host)
    pieces, piece = 24, hashlib.sha256(b"x").digest() * (limits.CHUNK_BYTES // 32)

    async def swap(stream: Stream) -> str:
        async def write() -> None:
            for number in range(pieces):
                await stream.send(Chunk(number * len(piece)), piece, timeout_s=WAIT_S)

        async def read() -> str:
            digest = hashlib.sha256()
            for number in range(pieces):
                message, body = await stream.receive(timeout_s=WAIT_S, max_body=limits.CHUNK_BYTES)
                assert message == Chunk(number * len(piece))
                digest.update(body)
            return digest.hexdigest()

        _, seen = await asyncio.gather(write(), read())
        return seen

    heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def handler(stream: Stream) -> None:
        heard.set_result(await swap(stream))
        await stream.send(End("ok"), timeout_s=WAIT_S)

    await host.transport.serve(EXCHANGE, handler)
    stream = await caller.transport.open(host.directory.peer, EXCHANGE, timeout_s=WAIT_S)
    whole = hashlib.sha256(piece * pieces).hexdigest()
    assert await swap(stream) == whole
    assert await stream.receive(timeout_s=WAIT_S) == (End("ok"), b"")
    await stream.close()
    assert await heard == whole


@pytest.mark.real
async def test_fifty_streams_that_end_right_after_a_large_last_message_lose_nothing(net_factory: MakeNet) -> None:
    host = await net_factory()
    caller = await net_factory(host)
    body = bytes(range(256)) * 4096  # 1 MiB
    got: list[int] = []
    done = asyncio.Event()

    async def handler(stream: Stream) -> None:
        message, there = await stream.receive(timeout_s=WAIT_S, max_body=len(body))
        if message == Ask("status"):  # the caller's body was the last message
            got.append(len(there))
            done.set()
        else:
            await stream.send(Answer("ping"), body, timeout_s=WAIT_S)

    await host.transport.serve(INFO, handler)
    for turn in range(50):
        stream = await caller.transport.open(host.directory.peer, INFO, timeout_s=WAIT_S)
        if turn % 2:
            await stream.send(Ask("ping"), timeout_s=WAIT_S)
            _, back = await stream.receive(timeout_s=WAIT_S, max_body=len(body))
            assert back == body
        else:
            done.clear()
            await stream.send(Ask("status"), body, timeout_s=WAIT_S)
        await stream.close()
        if not turn % 2:
            async with asyncio.timeout(WAIT_S):
                await done.wait()
    assert got == [len(body)] * 25


@pytest.mark.real
async def test_a_handler_that_raises_is_an_end_and_the_next_stream_works(net_factory: MakeNet) -> None:
    host = await net_factory()
    caller = await net_factory(host)
    failures = iter([RuntimeError("boom"), Malformed("bad")])

    async def handler(stream: Stream) -> None:
        error = next(failures, None)
        if error is not None:
            raise error
        await echo(stream)

    await host.transport.serve(INFO, handler)
    for expected in ("failed", "malformed"):
        stream = await caller.transport.open(host.directory.peer, INFO, timeout_s=WAIT_S)
        await stream.send(Ask("ping"), bytes(100_000), timeout_s=WAIT_S)
        message, _ = await stream.receive(timeout_s=WAIT_S)
        await stream.close()
        assert isinstance(message, End)
        assert message.reason == expected
    stream = await caller.transport.open(host.directory.peer, INFO, timeout_s=WAIT_S)
    assert await ask(stream, b"well") == b"well"
    await stream.close()


HOSTILE = {
    "random": b"\x93\x1f" * 500,
    "huge length": b"\xff\xff\xff\xff\xff\xff\xff\xff" + bytes(100),
    "empty header": bytes(8),
    "huge body": (1).to_bytes(4, "big") + (2**31).to_bytes(4, "big") + b"\x80",
    "not a hello": messages.to_frame(Ask("ping")),
    "half a frame": messages.to_frame(Ask("ping"))[:11],
    "silence": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.real
async def test_hostile_bytes_end_by_the_deadline_with_one_line_and_hurt_nobody(
    net_factory: MakeNet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(limits, "OPEN_TIMEOUT_S", 0.5)
    host = await net_factory()
    served: list[str] = []

    async def handler(stream: Stream) -> None:
        served.append(stream.peer)
        await echo(stream)

    await host.transport.serve(INFO, handler)
    attacker = await net_factory(host)
    caplog.clear()

    async def attack(sent: bytes) -> None:
        reader, writer = await attacker.libp2p.open_stream(host.directory.peer, INFO, timeout_s=WAIT_S)
        writer.write(sent)
        async with asyncio.timeout(WAIT_S):
            while await reader.read(65536):  # the host says End, and waits for us to hang up
                pass
        writer.close()

    await asyncio.gather(*(attack(sent) for sent in HOSTILE.values()))
    lines = [line for line in warnings_of(caplog) if ids.short(attacker.directory.peer) in line]
    assert len(lines) == 1
    assert served == []
    assert host.transport.serving == 0
    honest = await net_factory(host)
    stream = await honest.transport.open(host.directory.peer, INFO, timeout_s=WAIT_S)
    assert await ask(stream, b"still here") == b"still here"
    await stream.close()


@pytest.mark.real
async def test_a_peer_that_dies_in_mid_stream_is_noticed_at_once(net_factory: MakeNet) -> None:
    host = await net_factory()
    caller = await net_factory(host)
    await host.transport.serve(INFO, echo)
    stream = await caller.transport.open(host.directory.peer, INFO, timeout_s=WAIT_S)
    await ask(stream)
    kill(host)
    with pytest.raises(NetworkFault, match="hung up"):
        await stream.receive(timeout_s=WAIT_S)
    await stream.close()
    with pytest.raises(NetworkFault):
        await caller.transport.open(host.directory.peer, INFO, timeout_s=WAIT_S)


@pytest.mark.real
async def test_a_kind_that_is_not_served_and_a_peer_that_nobody_knows_are_refused_with_a_reason(net_factory: MakeNet) -> None:
    host = await net_factory()
    caller = await net_factory(host)
    with pytest.raises(NetworkFault, match="does not speak our protocol"):
        await caller.transport.open(host.directory.peer, EXCHANGE, timeout_s=WAIT_S)
    with pytest.raises(NetworkFault, match="nobody knows where it is"):
        await caller.transport.open(ids.peer_id_of_key(bytes(32)), EXCHANGE, timeout_s=WAIT_S)


def kill(net: Net) -> None:
    """SIGKILL a node's daemon: what the others see when its whole process dies."""
    import os
    import signal

    assert net.libp2p.daemon_pid is not None
    os.kill(net.libp2p.daemon_pid, signal.SIGKILL)
