"""Snapshots striped over several streams: every byte once, in its place, or nothing at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.node import transfer
from blocktrain.node.compute import flat
from blocktrain.node.compute.replica import TorchReplica
from blocktrain.node.exchanger import Exchanger, Side
from blocktrain.node.ports import Buffer, Stream, Terms, Trial
from blocktrain.node.transfer import Transfer
from blocktrain.protocol import facts as f
from blocktrain.protocol import limits
from blocktrain.protocol.errors import Malformed, NetworkFault
from blocktrain.protocol.exchange import MAX_STREAMS, WINDOW_BYTES, streams_for
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import Digest
from blocktrain.protocol.messages import EXCHANGE, Accept, Chunk, Lane, Message, Offer
from tests.merges import snapshot_of
from tests.swarm_kit import manifest, replica
from tests.twins import Swarm, Twin, peer_named

RUN = manifest()
CHUNK = 4096


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small block has many."""
    monkeypatch.setattr(limits, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(transfer, "LANE_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(flat, "PIECE", CHUNK // 4)


@dataclass
class Party:
    """A twin that exchanges; what it heard, and the streams that came in."""

    twin: Twin
    replica: TorchReplica
    facts: list[f.Fact] = field(default_factory=list)
    lanes: int = 0

    def __post_init__(self) -> None:
        side = Side(self.twin.peer, RUN, 0, "fp32", 10.0, streams=4)
        self.exchanger = Exchanger(side, self.twin.transport, self.replica, self.facts.append, time.time)

    async def inbound(self, stream: Stream) -> None:
        first, _ = await stream.receive(timeout_s=5)
        if isinstance(first, Lane):
            self.lanes += 1
            await self.exchanger.lane(first, stream)
        else:
            assert isinstance(first, Offer)
            await self.exchanger.take(f.Take(first.exchange, stream.peer, time.time() + 10), first, stream)

    async def ended(self) -> f.Ended:
        async with asyncio.timeout(10):
            while not (ends := [fact for fact in self.facts if isinstance(fact, f.Ended)]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        self.facts.clear()
        return ends[0]


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Party, Party]]:
    swarm = Swarm()
    parties = [Party(swarm.node(name, Greeting(RUN, "test")), replica(RUN, 0, seed)) for seed, name in enumerate(("left", "right"))]
    swarm.delay(parties[0].twin, parties[1].twin, 0.003)
    await parties[1].twin.transport.serve(EXCHANGE, parties[1].inbound)
    yield parties[0], parties[1]
    await swarm.close()
    for party in parties:
        await party.replica.stop()


async def offer(pair: tuple[Party, Party]) -> tuple[f.Ended, f.Ended]:
    one, other = pair
    await one.exchanger.offer(f.SendOffer(b"e" * 16, other.twin.peer, time.time() + 10))
    return await one.ended(), await other.ended()


async def test_a_striped_exchange_is_an_exchange(pair: tuple[Party, Party]) -> None:
    one, other = pair
    here, there = await offer(pair)
    assert (here.result.kind, there.result.kind) == ("merged", "merged")
    assert bytes(one.replica.state()[1]) == bytes(other.replica.state()[1])


class Bytes:
    """A `Swap` of plain bytes: ours to give, theirs to take, chunk by chunk. `slow`: the merge waits for this before each piece."""

    codec, round, weight = "fp32", 0, 0.0

    def __init__(self, ours: bytes, slow: asyncio.Event | None = None) -> None:
        self.ours, self.theirs = ours, bytearray()
        self._given, self._slow = 0, slow

    @property
    def size(self) -> int:
        return len(self.ours)

    @property
    def digest(self) -> Digest:
        assert self._given >= len(self.ours)
        return flat.digest(self.ours)

    async def give(self, most_bytes: int) -> memoryview:
        assert most_bytes >= CHUNK
        self._given += CHUNK
        return memoryview(self.ours)[self._given - CHUNK : self._given]

    async def take(self, data: Buffer) -> None:
        if self._slow is not None:
            await self._slow.wait()
        self.theirs += data

    def meet(self, terms: Terms, *, mine_first: bool) -> None:
        raise AssertionError("not part of a transfer")

    async def finish(self, digest: Digest) -> Trial:
        raise AssertionError("not part of a transfer")


class Line:
    """One end of a stream that holds one message at a time each way, so that all lanes are needed; may be cut after some."""

    peer = peer_named("somebody")
    rtt_s = None

    def __init__(self, out: asyncio.Queue[tuple[Message, bytes]], into: asyncio.Queue[tuple[Message, bytes]], cut_after: int) -> None:
        self._out, self._into, self._left = out, into, cut_after
        self.sent = 0

    async def send(self, message: Message, body: Buffer = b"", *, timeout_s: float) -> None:
        if self._left == 0:
            raise NetworkFault("cut")
        self._left -= 1
        self.sent += 1
        await self._out.put((message, bytes(body)))

    async def receive(self, *, timeout_s: float, max_body: int = 0) -> tuple[Message, memoryview]:
        message, body = await self._into.get()
        return message, memoryview(body)

    async def close(self) -> None:
        pass

    def pace(self, ahead_bytes: int) -> None:
        pass


def lines(count: int, cut: int | None = None) -> list[tuple[Line, Line]]:
    """Pairs of ends; the `cut`th is cut after three messages of the first end."""
    out = []
    for index in range(count):
        there, back = asyncio.Queue[tuple[Message, bytes]](1), asyncio.Queue[tuple[Message, bytes]](1)
        out.append((Line(there, back, 3 if index == cut else -1), Line(back, there, -1)))
    return out


async def stripe(lanes: list[tuple[Line, Line]], one: Transfer, other: Transfer) -> list[BaseException | None]:
    """Run both sides over all lanes. What each side's `run` raised."""
    sides = (one, other)
    helpers = [asyncio.ensure_future(sides[i].help(ends[i], closes=i == 0)) for ends in lanes[1:] for i in (0, 1)]
    async with asyncio.timeout(10):
        ends = await asyncio.gather(*(sides[i].run(lanes[0][i]) for i in (0, 1)), return_exceptions=True)
    one.end()
    other.end()
    for helper in helpers:
        helper.cancel()
    await asyncio.gather(*helpers, return_exceptions=True)
    return ends


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, 100 * CHUNK, 100 * CHUNK + 1])
async def test_every_byte_arrives_once_in_its_place_whichever_stream_carried_it(size: int) -> None:
    here, there = Random(1).randbytes(size), Random(2).randbytes(size)
    mine, yours = Bytes(here), Bytes(there)
    one, other = Transfer(mine, size, 4), Transfer(yours, size, 4)
    lanes = lines(4)
    assert await stripe(lanes, one, other) == [None, None]
    assert (mine.theirs, yours.theirs) == (there, here)
    assert (one.seal, other.seal) == (flat.digest(there), flat.digest(here))
    if size >= 100 * CHUNK:
        assert all(end.sent > 5 for ends in lanes for end in ends)


async def test_a_lane_that_breaks_ends_the_transfer() -> None:
    data = bytes(100 * CHUNK)
    one, other = Transfer(Bytes(data), len(data), 4), Transfer(Bytes(data), len(data), 4)
    here = asyncio.ensure_future(stripe(lines(4, cut=2), one, other))
    async with asyncio.timeout(10):
        while not one.over:  # noqa: ASYNC110
            await asyncio.sleep(0)
    other.end()  # its lanes are closed by the exchange of the other side, here by us
    failed, _ = await here
    assert isinstance(failed, NetworkFault)


async def test_what_waits_for_the_merge_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast they send: we read no more than a few chunks ahead, and go on where the merge does."""
    monkeypatch.setattr(transfer, "WAITING_BYTES", 10 * CHUNK)
    data, merges = Random(1).randbytes(100 * CHUNK), asyncio.Event()
    slow, quick = Bytes(data, merges), Bytes(data)
    one, other = Transfer(slow, len(data), 4), Transfer(quick, len(data), 4)
    lanes = lines(4)
    here = asyncio.ensure_future(stripe(lanes, one, other))
    for _ in range(2000):  # turns of the loop: by then all that can move has moved
        await asyncio.sleep(0)
    read = sum(ends[1].sent for ends in lanes)
    assert 10 <= read < 30
    merges.set()
    assert await here == [None, None]
    assert slow.theirs == data


async def test_what_a_slow_lane_holds_up_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The merge waits for a chunk on one lane: the others, which cannot bring it, are not read on for ever, and go on when it is there."""
    monkeypatch.setattr(transfer, "WAITING_BYTES", 10 * CHUNK)
    data, arrives = Random(1).randbytes(200 * CHUNK), asyncio.Event()
    behind = Bytes(data)
    one, other = Transfer(behind, len(data), 4), Transfer(Bytes(data), len(data), 4)
    lanes = lines(4)
    receive = lanes[2][0].receive

    async def late(**settings: Any) -> tuple[Message, memoryview]:
        await arrives.wait()
        return await receive(**settings)

    monkeypatch.setattr(lanes[2][0], "receive", late)
    here = asyncio.ensure_future(stripe(lanes, one, other))
    for _ in range(3000):  # turns of the loop: by then all that can move has moved
        await asyncio.sleep(0)
    assert not one.over
    assert 10 * CHUNK < one._waiting_bytes <= 14 * CHUNK, "a chunk more for each lane"
    arrives.set()
    assert await here == [None, None]
    assert behind.theirs == data


async def test_a_lane_without_an_exchange_is_told_so(pair: tuple[Party, Party]) -> None:
    one, other = pair
    stream = await one.twin.transport.open(other.twin.peer, EXCHANGE, timeout_s=5)
    await stream.send(Lane(b"x" * 16), timeout_s=5)
    answer, _ = await stream.receive(timeout_s=5)
    assert getattr(answer, "reason", None) == "late"
    await stream.close()


@pytest.mark.parametrize(
    ("streams", "offsets"),
    [(1, (CHUNK,)), (1, (0, 0)), (4, (0, 0)), (4, (CHUNK, 0)), (4, (0, CHUNK // 2)), (4, (10**9,))],
    ids=["a gap on the only stream", "twice", "twice, striped", "falling on one stream", "overlap", "past the end"],
)
async def test_chunks_that_are_not_a_missing_piece_are_an_offence(
    pair: tuple[Party, Party], streams: int, offsets: tuple[int, ...]
) -> None:
    one, other = pair

    async def answer(stream: Stream) -> None:
        first, _ = await stream.receive(timeout_s=5)
        assert isinstance(first, Offer)
        mine = await snapshot_of(other.replica, "fp32")
        await stream.send(Accept(first.exchange, 0, 0.0, first.size, "fp32"), timeout_s=5)
        for offset in offsets:
            await stream.send(Chunk(offset), mine.payload[:CHUNK], timeout_s=5)
        while True:
            await stream.receive(timeout_s=5, max_body=CHUNK)

    await other.twin.transport.serve(EXCHANGE, answer)
    one.exchanger.side = replace(one.exchanger.side, streams=streams)
    before = one.replica.published()
    await one.exchanger.offer(f.SendOffer(b"e" * 16, other.twin.peer, time.time() + 10))
    end = await one.ended()
    assert (end.result.kind, end.result.offence) == ("refused", True)
    assert one.replica.published() == before


async def test_a_snapshot_of_another_size_is_never_waited_for() -> None:
    with pytest.raises(Malformed):
        Transfer(Bytes(b"abc"), 4)


async def test_an_ended_transfer_takes_no_lane_any_more(pair: tuple[Party, Party]) -> None:
    one, other = pair
    assert [end.result.kind for end in await offer(pair)] == ["merged", "merged"]
    stream = await one.twin.transport.open(other.twin.peer, EXCHANGE, timeout_s=5)
    await stream.send(Lane(b"e" * 16), timeout_s=5)
    answer, _ = await stream.receive(timeout_s=5)
    assert getattr(answer, "reason", None) == "late"
    with pytest.raises(NetworkFault):
        await stream.receive(timeout_s=5)
    await stream.close()


@given(rate=st.none() | st.floats(0, 1e12), rtt=st.none() | st.floats(0, 100))
def test_the_number_of_streams_is_bounded_and_grows_with_the_link(rate: float | None, rtt: float | None) -> None:
    streams = streams_for(rate, rtt)
    assert 1 <= streams <= MAX_STREAMS
    if rate is not None and rtt is not None:
        assert streams_for(rate * 2, rtt) >= streams


def test_a_link_that_windows_limit_gets_one_stream_more_each_time() -> None:
    rtt_s, window = 0.1, WINDOW_BYTES
    streams = 1
    for expected in range(2, MAX_STREAMS + 1):
        streams = streams_for(streams * window / rtt_s, rtt_s)
        assert streams == expected
    assert streams_for(100e6 / 8, 0.04) == 5
    assert streams_for(100e6 / 8, 0.001) == 1
