"""Downloads of state from every kind of donor, over a network in memory: only a whole, right and newer state is ever taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest

from blocktrain.node import catchup
from blocktrain.node.catchup import Donor, Download, NotNow, fetch
from blocktrain.node.compute import flat
from blocktrain.node.compute.replica import TorchReplica
from blocktrain.node.ports import Published, Stream
from blocktrain.protocol import limits
from blocktrain.protocol.errors import NetworkFault, PeerFault
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import NO_DIGEST, Digest, PeerId
from blocktrain.protocol.messages import STATE, Chunk, End, Have, Want
from tests.swarm_kit import manifest, replica, until
from tests.twins import Swarm, Twin

RUN = manifest()
WANT = Want(RUN.run, 0, "block", NO_DIGEST)
Outcome = tuple[Published | None, dict[PeerId, Exception]]


class Shelf:
    """The part of a replica that a donor needs: a published state."""

    def __init__(self, round: int, payload: bytes) -> None:
        self.word = Published(round, flat.digest(payload))
        self.payload = memoryview(payload)

    def published(self) -> Published:
        return self.word

    def state(self) -> tuple[Published, memoryview]:
        return self.word, self.payload


@dataclass
class World:
    swarm: Swarm
    joiner: Twin
    replica: TorchReplica
    taken: list[Download] = field(default_factory=list)

    def payload(self, seed: int = 1) -> bytes:
        """A plausible state of the right size."""
        return np.random.default_rng(seed).normal(0, 0.02, self.replica.state_bytes // 4).astype("<f4").tobytes()

    async def donor(self, name: str, round: int = 7, payload: bytes | None = None) -> Twin:
        twin = self.swarm.node(name, Greeting(RUN, "test"))
        donor = Donor(RUN, 0, Shelf(round, self.payload() if payload is None else payload))  # type: ignore[arg-type]
        await twin.transport.serve(STATE, donor.handle)
        return twin

    async def fetch(self, *donors: Twin, at_least: int = 1, want: Want = WANT) -> Outcome:
        async def apply(download: Download) -> Published:
            self.taken.append(download)
            try:
                return await self.replica.load(download.payload, download.round, download.digest)
            except PeerFault as fault:
                raise fault.by(download.donor) from None

        peers = [donor.peer for donor in donors]
        return await fetch(self.joiner.transport, want, peers, at_least, self.replica.state_bytes, rng=Random(3), apply=apply)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    swarm = Swarm()
    mine = replica(RUN)
    yield World(swarm, swarm.node("joiner", Greeting(RUN, "test")), mine)
    await swarm.close()
    await mine.stop()


async def test_a_download_makes_us_what_the_donor_is(world: World) -> None:
    donor = await world.donor("donor", round=7)
    published, failed = await world.fetch(donor)
    assert published == Published(7, flat.digest(world.payload()))
    assert failed == {}
    assert bytes(world.replica.state()[1]) == world.payload()


async def test_an_untrained_replica_is_never_a_donor(world: World) -> None:
    donor = await world.donor("donor", round=0)
    published, failed = await world.fetch(donor)
    assert published is None
    assert isinstance(failed[donor.peer], NotNow)
    assert "no rounds yet" in str(failed[donor.peer])


@pytest.mark.parametrize(
    "want",
    [replace(WANT, block=1), replace(WANT, run=b"r" * 32), replace(WANT, part="shared"), replace(WANT, digest=b"d" * 32)],
    ids=["block", "run", "part", "digest"],
)
async def test_what_a_donor_does_not_have_it_refuses_with_a_reason(world: World, want: Want) -> None:
    donor = await world.donor("donor")
    published, failed = await world.fetch(donor, want=want)
    assert published is None
    assert isinstance(failed[donor.peer], NotNow)
    assert "unknown" in str(failed[donor.peer])


async def test_an_older_state_than_wanted_is_not_taken_and_nobodys_fault(world: World) -> None:
    old, new = await world.donor("old", round=3), await world.donor("new", round=9)
    for donors in ((old, new), (new, old)):
        published, failed = await world.fetch(*donors, at_least=9)
        assert published is not None
        assert published.round == 9
        assert all(isinstance(fault, NotNow) for fault in failed.values())
    published, failed = await world.fetch(old, at_least=9)
    assert published is None
    assert "older than 9" in str(failed[old.peer])


async def test_a_newer_state_than_announced_is_welcome(world: World) -> None:
    published, _ = await world.fetch(await world.donor("donor", round=12), at_least=7)
    assert published is not None
    assert published.round == 12


# ---- donors that fail -------------------------------------------------------------------------------------------------------------------

Fail = Callable[[World, Stream], Awaitable[None]]


async def silent(world: World, stream: Stream) -> None:
    await asyncio.Event().wait()


async def vanish(world: World, stream: Stream) -> None:
    await stream.close()


async def nonsense(world: World, stream: Stream) -> None:
    await stream.send(Chunk(0), b"state?", timeout_s=1)


async def of_another_size(world: World, stream: Stream) -> None:
    await stream.send(Have(9, b"d" * 32, 2**30, 0, 2**30), timeout_s=1)


async def only_a_part(world: World, stream: Stream) -> None:
    size = world.replica.state_bytes
    await stream.send(Have(9, b"d" * 32, size, 0, size // 2), timeout_s=1)


async def have(world: World, stream: Stream, payload: bytes) -> None:
    await stream.send(Have(9, flat.digest(payload), len(payload), 0, len(payload)), timeout_s=1)


async def truncated(world: World, stream: Stream) -> None:
    payload = world.payload()
    await have(world, stream, payload)
    await stream.send(Chunk(0), payload[: len(payload) // 2], timeout_s=1)
    await stream.close()


async def gave_up(world: World, stream: Stream) -> None:
    await have(world, stream, world.payload())
    await stream.send(End("late", "stopping"), timeout_s=1)


async def overlong(world: World, stream: Stream) -> None:
    payload = world.payload()
    await have(world, stream, payload)
    await stream.send(Chunk(0), payload + b"more", timeout_s=1)


async def without_end(world: World, stream: Stream) -> None:
    payload = world.payload()
    await have(world, stream, payload)
    await stream.send(Chunk(0), payload, timeout_s=1)
    await stream.send(Chunk(len(payload)), timeout_s=1)


async def out_of_order(world: World, stream: Stream) -> None:
    await have(world, stream, world.payload())
    await stream.send(Chunk(8), bytes(8), timeout_s=1)


async def whole(world: World, stream: Stream, sent: bytes, announced: bytes) -> None:
    await stream.send(Have(9, flat.digest(announced), len(sent), 0, len(sent)), timeout_s=1)
    await stream.send(Chunk(0), sent, timeout_s=1)
    await stream.send(End("ok"), timeout_s=1)


async def wrong_digest(world: World, stream: Stream) -> None:
    await whole(world, stream, world.payload(1), world.payload(2))


async def not_finite(world: World, stream: Stream) -> None:
    state = np.frombuffer(world.payload(), "<f4").copy()
    state[5] = np.nan
    await whole(world, stream, state.tobytes(), state.tobytes())


@pytest.mark.parametrize(
    ("fail", "offence"),
    [
        (silent, False),
        (vanish, False),
        (nonsense, True),
        (of_another_size, True),
        (only_a_part, True),
        (truncated, False),
        (gave_up, False),
        (overlong, True),
        (without_end, True),
        (out_of_order, True),
        (wrong_digest, True),
        (not_finite, True),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_donor_that_fails_costs_nothing_and_the_next_is_asked(
    world: World, monkeypatch: pytest.MonkeyPatch, fail: Fail, offence: bool
) -> None:
    monkeypatch.setattr(limits, "OPEN_TIMEOUT_S", 1.0)
    monkeypatch.setattr(limits, "STALL_TIMEOUT_S", 1.0)
    bad = world.swarm.node("bad", Greeting(RUN, "test"))

    async def handler(stream: Stream) -> None:
        await stream.receive(timeout_s=5)
        await fail(world, stream)

    await bad.transport.serve(STATE, handler)
    before = bytes(world.replica.state()[1])
    published, failed = await world.fetch(bad)
    assert published is None
    fault = failed[bad.peer]
    assert isinstance(fault, PeerFault if offence else NetworkFault), fault
    assert not isinstance(fault, NotNow)
    assert bytes(world.replica.state()[1]) == before
    assert world.replica.published().round == 0
    good = await world.donor("good")
    published, failed = await world.fetch(bad, good)
    assert published is not None
    assert published.round == 7
    assert bytes(world.replica.state()[1]) == world.payload()


async def test_a_donor_too_slow_for_a_whole_state_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STATE_TIMEOUT_S", 0.3)
    donor = await world.donor("donor")
    world.swarm.delay(world.joiner, donor, 0.2)
    published, failed = await world.fetch(donor)
    assert published is None
    assert "no whole state in" in str(failed[donor.peer])


# ---- the donor's side -------------------------------------------------------------------------------------------------------------------


async def ask(world: World, name: str, donor: Twin) -> tuple[Stream, Have | End]:
    """Begin a download and read no further."""
    stream = await world.swarm.node(name, Greeting(RUN, "test")).transport.open(donor.peer, STATE, timeout_s=1)
    await stream.send(WANT, timeout_s=1)
    answer, _ = await stream.receive(timeout_s=5)
    assert isinstance(answer, Have | End)
    return stream, answer


async def test_a_donor_serves_so_many_at_once_says_busy_and_has_room_again_after(world: World) -> None:
    donor = await world.donor("donor", payload=bytes(8 * 1024 * 1024))  # more than fits into the buffers of a reader who does not read
    busy = []
    for number in range(catchup.MAX_DOWNLOADS_SERVED):
        stream, answer = await ask(world, f"reader {number}", donor)
        assert isinstance(answer, Have)
        busy.append(stream)
    stream, answer = await ask(world, "one too many", donor)
    assert isinstance(answer, End)
    assert (answer.reason, answer.retry_after_s) == ("busy", catchup.BUSY_RETRY_S)
    await stream.close()
    for stream in busy:
        await stream.close()
    await until(lambda: not donor.transport.serving, "the donor still serves")
    stream, answer = await ask(world, "later", donor)
    assert isinstance(answer, Have)
    await stream.close()


async def test_one_peer_has_one_download_so_that_it_cannot_take_all_places(world: World) -> None:
    donor = await world.donor("donor", payload=bytes(8 * 1024 * 1024))
    first, answer = await ask(world, "greedy", donor)
    assert isinstance(answer, Have)
    second = await world.swarm.node("greedy", Greeting(RUN, "test")).transport.open(donor.peer, STATE, timeout_s=1)
    await second.send(WANT, timeout_s=1)
    refusal, _ = await second.receive(timeout_s=5)
    assert isinstance(refusal, End)
    assert refusal.reason == "busy"
    third, answer = await ask(world, "modest", donor)
    assert isinstance(answer, Have)
    for stream in (first, second, third):
        await stream.close()


async def test_a_reader_that_hardly_reads_loses_its_place(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STATE_TIMEOUT_S", 0.3)
    donor = await world.donor("donor", payload=bytes(8 * 1024 * 1024))
    stream, answer = await ask(world, "slow", donor)
    assert isinstance(answer, Have)
    await until(lambda: not donor.transport.serving, "the slow reader keeps its place", 10.0)
    await stream.close()


async def test_a_busy_donor_is_passed_over_without_blame(world: World) -> None:
    busy = world.swarm.node("busy", Greeting(RUN, "test"))

    async def handler(stream: Stream) -> None:
        await stream.receive(timeout_s=5)
        await stream.send(End("busy", "3 downloads are under way", 2.0), timeout_s=1)

    await busy.transport.serve(STATE, handler)
    good = await world.donor("good")
    for donors in ((busy, good), (good, busy)):
        published, failed = await world.fetch(*donors)
        assert published is not None
        assert all(isinstance(fault, NotNow) for fault in failed.values())


async def test_a_part_of_a_state_can_be_asked_for(world: World) -> None:
    payload = world.payload()
    donor = await world.donor("donor", payload=payload)
    stream = await world.joiner.transport.open(donor.peer, STATE, timeout_s=1)
    await stream.send(replace(WANT, offset=100, length=50), timeout_s=1)
    answer, _ = await stream.receive(timeout_s=5)
    assert answer == Have(7, Digest(flat.digest(payload)), len(payload), 100, 50)
    chunk, body = await stream.receive(timeout_s=5, max_body=50)
    assert (chunk, bytes(body)) == (Chunk(100), payload[100:150])
    end, _ = await stream.receive(timeout_s=5)
    assert isinstance(end, End)
    assert end.reason == "ok"
    await stream.close()


async def test_a_part_beyond_the_end_is_empty(world: World) -> None:
    donor = await world.donor("donor")
    stream = await world.joiner.transport.open(donor.peer, STATE, timeout_s=1)
    await stream.send(replace(WANT, offset=limits.MAX_STATE_BYTES, length=limits.MAX_STATE_BYTES), timeout_s=1)
    answer, _ = await stream.receive(timeout_s=5)
    assert isinstance(answer, Have)
    assert answer.length == 0
    await stream.close()
