"""Downloads of state from every kind of donor, over a network in memory: only a whole, right and newer state is ever taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest

from blocktrain.node import catchup, download, shards
from blocktrain.node.catchup import Donor, Download, NotNow, fetch
from blocktrain.node.compute import flat
from blocktrain.node.compute.replica import TorchReplica
from blocktrain.node.ports import Buffer, Published, Stream
from blocktrain.protocol import limits
from blocktrain.protocol.errors import NetworkFault, PeerFault
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import NO_DIGEST, Digest, PeerId
from blocktrain.protocol.messages import STATE, Chunk, End, Have, Message, Want
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

    async def fetch(self, *donors: Twin, at_least: int = 1, at_most: int = 10**6, want: Want = WANT) -> Outcome:
        async def apply(download: Download) -> Published:
            self.taken.append(download)
            try:
                return await self.replica.load(download.payload, download.round, download.digest)
            except PeerFault as fault:
                raise fault.by(download.donor) from None

        peers = [donor.peer for donor in donors]
        size = self.replica.state_bytes
        return await fetch(self.joiner.transport, want, peers, at_least, size, at_most=at_most, rng=Random(3), apply=apply)


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


async def test_30_an_older_state_than_wanted_is_not_taken_and_nobodys_fault(world: World) -> None:
    old, new = await world.donor("old", round=3), await world.donor("new", round=9)
    for donors in ((old, new), (new, old)):
        published, failed = await world.fetch(*donors, at_least=9)
        assert published is not None
        assert published.round == 9
        assert all(isinstance(fault, NotNow) for fault in failed.values())
    published, failed = await world.fetch(old, at_least=9)
    assert published is None
    assert "older than 9" in str(failed[old.peer])


async def test_a_state_far_beyond_all_announcements_is_not_taken_and_not_held_against_the_donor(world: World) -> None:
    """It may be a liar's; or an honest and fast one's, whose announcement is some seconds old."""
    far = await world.donor("far", round=300)
    published, failed = await world.fetch(far, at_most=57)
    assert published is None
    assert isinstance(failed[far.peer], NotNow)
    assert world.replica.published().round == 0


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
    listed = shards.hashes(world.payload())
    await stream.send(Have(9, b"d" * 32, 2**30, 0, 2**30, shards.name(listed)), listed, timeout_s=1)


async def only_a_part(world: World, stream: Stream) -> None:
    size = world.replica.state_bytes
    listed = shards.hashes(world.payload())
    await stream.send(Have(9, b"d" * 32, size, 0, size // 2, shards.name(listed)), listed, timeout_s=1)


async def have(world: World, stream: Stream, payload: bytes, listed: bytes | None = None) -> None:
    listed = shards.hashes(payload) if listed is None else listed
    await stream.send(Have(9, flat.digest(payload), len(payload), 0, len(payload), shards.name(listed)), listed, timeout_s=1)


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


async def whole(world: World, stream: Stream, sent: bytes, announced: bytes, listed: bytes) -> None:
    await have(world, stream, announced, shards.hashes(listed))
    await stream.send(Chunk(0), sent, timeout_s=1)
    await stream.send(End("ok"), timeout_s=1)


async def wrong_digest(world: World, stream: Stream) -> None:
    await whole(world, stream, world.payload(1), world.payload(2), world.payload(1))


async def wrong_shards(world: World, stream: Stream) -> None:
    await whole(world, stream, world.payload(1), world.payload(2), world.payload(2))


async def without_a_list(world: World, stream: Stream) -> None:
    await have(world, stream, world.payload(), b"")


async def with_another_list(world: World, stream: Stream) -> None:
    payload, listed = world.payload(), shards.hashes(world.payload(2))
    await stream.send(Have(9, flat.digest(payload), len(payload), 0, len(payload), b"n" * 32), listed, timeout_s=1)


async def not_finite(world: World, stream: Stream) -> None:
    state = np.frombuffer(world.payload(), "<f4").copy()
    state[5] = np.nan
    await whole(world, stream, *[state.tobytes()] * 3)


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
        (out_of_order, True),
        (wrong_digest, True),
        (wrong_shards, True),
        (without_a_list, True),
        (with_another_list, True),
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


async def test_a_donor_that_sends_the_whole_state_and_no_end_is_named_and_its_state_is_good(world: World) -> None:
    bad = world.swarm.node("bad", Greeting(RUN, "test"))

    async def handler(stream: Stream) -> None:
        await stream.receive(timeout_s=5)
        await without_end(world, stream)

    await bad.transport.serve(STATE, handler)
    published, failed = await world.fetch(bad)
    assert published == Published(9, flat.digest(world.payload()))
    assert "without its end" in str(failed[bad.peer])


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


async def test_one_peer_has_few_streams_so_that_it_cannot_take_all_places(world: World) -> None:
    donor = await world.donor("donor", payload=bytes(8 * 1024 * 1024))
    greedy, answer = await ask(world, "greedy", donor)
    assert isinstance(answer, Have)
    streams = [greedy]
    for _ in range(download.LANES):
        stream = await world.swarm.node("greedy", Greeting(RUN, "test")).transport.open(donor.peer, STATE, timeout_s=1)
        await stream.send(WANT, timeout_s=1)
        refusal, _ = await stream.receive(timeout_s=5)
        streams.append(stream)
    assert isinstance(refusal, End)
    assert refusal.reason == "busy"
    modest, answer = await ask(world, "modest", donor)
    assert isinstance(answer, Have)
    for stream in (*streams, modest):
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


# ---- several donors at once -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that even a small state is worth being cut up."""
    monkeypatch.setattr(download, "SMALL_BYTES", 0)
    monkeypatch.setattr(shards, "SHARD_BYTES", 2048)
    monkeypatch.setattr(limits, "CHUNK_BYTES", 1024)


class Slow:
    """A donor's stream that sends nothing but its first answer until all donors have been asked: so all can take part."""

    def __init__(self, stream: Stream, all_asked: asyncio.Event) -> None:
        self._stream = stream
        self._all_asked = all_asked
        self.peer = stream.peer
        self.receive = stream.receive
        self.close = stream.close

    async def send(self, message: Message, body: Buffer = b"", *, timeout_s: float) -> None:
        if isinstance(message, Chunk):
            async with asyncio.timeout(10):
                await self._all_asked.wait()
        await self._stream.send(message, body, timeout_s=timeout_s)


async def serve_together(world: World, payloads: dict[str, bytes]) -> list[Twin]:
    """Donors that begin to send when the joiner has asked all of them."""
    asked: set[str] = set()
    all_asked = asyncio.Event()
    twins = []
    for name, payload in payloads.items():
        twin = world.swarm.node(name, Greeting(RUN, "test"))
        donor = Donor(RUN, 0, Shelf(7, payload))  # type: ignore[arg-type]

        async def handle(stream: Stream, name: str = name, donor: Donor = donor) -> None:
            asked.add(name)
            if len(asked) == len(payloads):
                all_asked.set()
            await donor.handle(Slow(stream, all_asked))  # type: ignore[arg-type]

        await twin.transport.serve(STATE, handle)
        twins.append(twin)
    return twins


async def test_all_donors_of_one_state_send_parts_of_it(world: World, in_small_pieces: None) -> None:
    donors = await serve_together(world, dict.fromkeys(("one", "two", "three"), world.payload()))
    published, failed = await world.fetch(*donors)
    assert published == Published(7, flat.digest(world.payload()))
    assert failed == {}
    assert len(world.taken[0].helpers) == 2
    assert bytes(world.replica.state()[1]) == world.payload()


async def test_states_that_differ_are_never_mixed(world: World, in_small_pieces: None) -> None:
    donors = await serve_together(world, {"one": world.payload(1), "two": world.payload(2)})
    published, failed = await world.fetch(*donors)
    assert published is not None
    assert failed == {}
    assert world.taken[0].helpers == ()
    assert bytes(world.replica.state()[1]) in (world.payload(1), world.payload(2))


Alter = Callable[[int, bytes], bytes]  # a chunk's offset and its right bytes → those that are sent, or b"" to hang up


async def serve_altered(world: World, name: str, alter: Alter, payload: bytes, listed: bytes | None = None) -> Twin:
    """A donor that says it has `payload` and lists its shards (or `listed`), and sends what `alter` makes of it."""
    twin = world.swarm.node(name, Greeting(RUN, "test"))
    listed = shards.hashes(payload) if listed is None else listed

    async def handle(stream: Stream) -> None:
        want, _ = await stream.receive(timeout_s=5)
        assert isinstance(want, Want)
        end = want.offset + want.length if want.length else len(payload)
        word = Have(7, flat.digest(payload), len(payload), want.offset, end - want.offset, shards.name(listed))
        await stream.send(word, listed if want.shards else b"", timeout_s=1)
        for offset in range(want.offset, end, 1024):
            body = alter(offset, payload[offset : min(end, offset + 1024)])
            if not body:
                return
            await stream.send(Chunk(offset), body, timeout_s=5)
        await stream.send(End("ok"), timeout_s=5)

    await twin.transport.serve(STATE, handle)
    return twin


def keep(offset: int, body: bytes) -> bytes:
    return body


def spoil(offset: int, body: bytes) -> bytes:
    return bytes(len(body))


def spoil_later(offset: int, body: bytes) -> bytes:
    return body if offset < 4096 else spoil(offset, body)


async def test_28_a_donor_that_dies_in_mid_transfer_costs_only_what_it_had_not_sent(world: World, in_small_pieces: None) -> None:
    good = await world.donor("good")
    dying = await serve_altered(world, "dying", lambda offset, body: body if offset < 5000 else b"", world.payload())
    job = download.Job(world.joiner.transport, download.Wish(WANT, 1, 100, world.replica.state_bytes), dying.peer)
    whole = await job.run([good.peer])
    assert bytes(whole.payload) == world.payload()
    assert whole.helpers == (good.peer,)
    assert isinstance(job.failed[dying.peer], NetworkFault)
    assert job.brought[dying.peer] == 4096  # two whole shards; the third was not finished
    assert job.brought[good.peer] == world.replica.state_bytes - 4096


async def test_a_donor_that_sends_another_shard_is_named_and_dropped_and_the_others_go_on(world: World, in_small_pieces: None) -> None:
    good = await world.donor("good")
    other = await world.donor("other")
    for name, alter in (("liar", spoil), ("late liar", spoil_later)):
        liar = await serve_altered(world, name, alter, world.payload())
        for donors in ((good, liar, other), (liar, good, other)):
            job = download.Job(world.joiner.transport, download.Wish(WANT, 1, 100, world.replica.state_bytes), donors[0].peer)
            whole = await job.run([donor.peer for donor in donors[1:]])
            assert bytes(whole.payload) == world.payload()
            assert set(job.failed) <= {liar.peer}
            if donors[0] is liar:
                assert "not those that it vouched for" in str(job.failed[liar.peer])
                assert isinstance(job.failed[liar.peer], PeerFault)
                assert whole.donor != liar.peer


async def test_who_lists_other_shards_than_the_state_has_is_named_whether_it_leads_or_helps(world: World, in_small_pieces: None) -> None:
    good = await world.donor("good")
    liar = await serve_altered(world, "liar", spoil, world.payload(), shards.hashes(bytes(world.replica.state_bytes)))
    for donors in ((good, liar), (liar, good)):
        transport, want, size = world.joiner.transport, WANT, world.replica.state_bytes

        class InOrder(Random):
            def sample(self, population, k, **more):  # type: ignore[no-untyped-def]
                return list(population)

        async def apply(whole: Download) -> Published:
            return await world.replica.load(whole.payload, whole.round, whole.digest)

        peers = [donor.peer for donor in donors]
        published, failed = await fetch(transport, want, peers, 1, size, rng=InOrder(), apply=apply)
        assert published == Published(7, flat.digest(world.payload()))
        assert good.peer not in failed
        assert isinstance(failed[liar.peer], PeerFault), failed


async def test_a_state_that_a_download_began_with_is_there_for_its_rest_though_newer_ones_are_published(world: World) -> None:
    old, new = world.payload(1), world.payload(2)
    shelf = Shelf(7, old)
    twin = world.swarm.node("donor", Greeting(RUN, "test"))
    await twin.transport.serve(STATE, Donor(RUN, 0, shelf).handle)  # type: ignore[arg-type]
    first, answer = await ask(world, "joiner", twin)
    assert isinstance(answer, Have)
    shelf.word, shelf.payload = Published(8, flat.digest(new)), memoryview(new)
    stream = await world.joiner.transport.open(twin.peer, STATE, timeout_s=1)
    await stream.send(replace(WANT, digest=flat.digest(old), offset=4, length=8), timeout_s=1)
    answer, _ = await stream.receive(timeout_s=5)
    assert answer == Have(7, flat.digest(old), len(old), 4, 8, shards.name(shards.hashes(old)))
    chunk, body = await stream.receive(timeout_s=5, max_body=64)
    assert (chunk, bytes(body)) == (Chunk(4), old[4:12])
    await stream.close()
    await first.close()


async def test_29_of_many_joiners_at_once_no_donor_serves_more_than_its_share(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    donors = [world.swarm.node(f"donor {number}", Greeting(RUN, "test")) for number in range(3)]
    serving = [Donor(RUN, 0, Shelf(7, world.payload())) for _ in donors]  # type: ignore[arg-type]
    most = [0, 0, 0]
    for twin, donor_side in zip(donors, serving, strict=True):
        await twin.transport.serve(STATE, donor_side.handle)
    joiners = [world.swarm.node(f"joiner {number}", Greeting(RUN, "test")) for number in range(6)]
    for joiner in joiners:
        for donor in donors:
            world.swarm.delay(joiner, donor, 0.02)
    taken = []

    async def apply(whole: Download) -> Published:
        taken.append(whole)
        return Published(whole.round, whole.digest)

    async def join(number: int) -> None:
        rng = Random(number)
        for _ in range(100):
            published, _ = await fetch(
                joiners[number].transport, WANT, [donor.peer for donor in donors], 1, world.replica.state_bytes, rng=rng, apply=apply
            )
            if published is not None:
                return
            await asyncio.sleep(0.02)  # as the core does, with longer pauses: all donors were busy
        raise AssertionError("never served")

    async def count() -> None:
        while True:
            most[:] = [max(before, now.serving) for before, now in zip(most, serving, strict=True)]
            await asyncio.sleep(0.005)

    counting = asyncio.create_task(count())
    await asyncio.gather(*(join(number) for number in range(6)))
    counting.cancel()
    assert len(taken) == 6
    assert max(most) <= 3, most  # six joiners over three donors, and one more
