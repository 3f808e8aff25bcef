"""Exchanges against every kind of partner, over a network in memory: what is not whole, agreed and plausible changes no bit of a block."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from blocktrain.node.compute import codecs, flat
from blocktrain.node.compute.replica import TorchReplica
from blocktrain.node.exchanger import Exchanger, Side
from blocktrain.node.ports import Buffer, Published, Stream, Swap, Trial
from blocktrain.protocol import acceptance, limits
from blocktrain.protocol import facts as f
from blocktrain.protocol.errors import BlocktrainError
from blocktrain.protocol.exchange import Result
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import NO_DIGEST, Digest
from blocktrain.protocol.messages import EXCHANGE, Accept, Chunk, Decline, End, Offer, Outcome, Seal
from tests.merges import Snapshot, snapshot_of
from tests.swarm_kit import manifest, replica, until
from tests.twins import Swarm, Twin, peer_named

RUN = manifest()
ID = b"e" * 16
PATIENT_S = 10.0  # τ where nothing ought to be late
SHORT_S = 0.3  # τ where something is
CODEC = "fp32"


@dataclass
class Party:
    """A twin with a replica of block 0 and an exchanger; `facts` is what its core would hear."""

    twin: Twin
    replica: TorchReplica
    facts: list[f.Fact] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.exchanger = Exchanger(
            Side(self.twin.peer, RUN, 0, CODEC, 10.0, streams=1), self.twin.transport, self.replica, self.facts.append, time.time
        )

    async def offer_to(self, other: Party, tau_s: float = PATIENT_S) -> Result:
        await self.exchanger.offer(f.SendOffer(ID, other.twin.peer, time.time() + tau_s))
        return self.ended()

    async def answer(self, stream: Stream, tau_s: float = PATIENT_S) -> None:
        """The honest responder, as the service is one."""
        offer, _ = await stream.receive(timeout_s=5)
        assert isinstance(offer, Offer)
        await self.exchanger.take(f.Take(offer.exchange, stream.peer, time.time() + tau_s), offer, stream)

    def ended(self) -> Result:
        (end,) = [fact for fact in self.facts if isinstance(fact, f.Ended)]
        self.facts.clear()
        return end.result

    async def bits(self) -> tuple[Digest, object, bytes]:
        """Live parameters, published word, published state."""
        published, state = self.replica.state()
        return (await snapshot_of(self.replica, "fp32")).digest, published, bytes(state)

    async def accept(self, offer: Offer, **changes: object) -> tuple[Accept, Snapshot]:
        mine = await snapshot_of(self.replica, CODEC)
        return replace(Accept(offer.exchange, 3, mine.weight, len(mine.payload), CODEC), **changes), mine  # type: ignore[arg-type]

    async def proposal(self, **changes: object) -> tuple[Offer, Snapshot]:
        mine = await snapshot_of(self.replica, CODEC)
        offer = Offer(ID, RUN.run, 0, "block", 3, CODEC, mine.weight, len(mine.payload))
        return replace(offer, **changes), mine  # type: ignore[arg-type]


@dataclass
class Pair:
    swarm: Swarm
    honest: Party
    other: Party


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Two replicas of one block with different data; the second's twin does what the test says."""
    swarm = Swarm()
    names = sorted(("left", "right"), key=peer_named)
    parties = [Party(swarm.node(name, Greeting(RUN, "test")), replica(RUN, 0, seed)) for seed, name in enumerate(names)]
    for party in parties:  # a few steps apart, so that a merge is something else than either
        told = asyncio.Event()
        party.replica.start(told.set)
        await until(lambda party=party: party.replica.progress().steps >= 3, "training does not step")
        # A replica cannot be paused: a thread whose trainer is asked nothing more would train on, and bits could not be compared.
        party.replica._thread._on_round = None
    await asyncio.gather(*(settled(party) for party in parties))
    yield Pair(swarm, *parties)
    await swarm.close()
    for party in parties:
        await party.replica.stop()


async def settled(party: Party) -> None:
    """Wait for the step in hand: two snapshots in a row are the same."""
    while (await snapshot_of(party.replica, "fp32")).digest != (await snapshot_of(party.replica, "fp32")).digest:
        pass


async def merge_works(pair: Pair) -> None:
    """The next exchange between the two is an honest one, and both end with the same state."""
    pair.other.facts.clear()
    pair.honest.facts.clear()
    await pair.other.twin.transport.serve(EXCHANGE, pair.other.answer)
    assert (await pair.honest.offer_to(pair.other)).kind == "merged"
    await until(lambda: any(isinstance(fact, f.Ended) for fact in pair.other.facts), "the responder does not end")
    assert pair.other.ended().kind == "merged"
    assert pair.honest.replica.published() == pair.other.replica.published()
    assert pair.honest.replica.published().round > 0
    assert bytes(pair.honest.replica.state()[1]) == bytes(pair.other.replica.state()[1])


# ---- two honest sides -----------------------------------------------------------------------------------------------------------------


async def test_both_sides_publish_the_same_bits_and_say_so(pair: Pair) -> None:
    before = await pair.honest.bits(), await pair.other.bits()
    await merge_works(pair)
    assert (await pair.honest.bits()) != before[0]
    assert (await pair.other.bits()) != before[1]


async def test_replicas_that_trained_apart_for_many_rounds_can_still_average(pair: Pair) -> None:
    """Own rounds are published, too; what is allowed is measured from where the two last were together, not from the round before."""
    for party in (pair.honest, pair.other):
        party.replica.start(lambda: None)
    for _ in range(5):
        for party in (pair.honest, pair.other):
            steps = party.replica.progress().steps
            await until(lambda party=party, steps=steps: party.replica.progress().steps >= steps + 60, "training does not step")
            await party.replica.publish_own()
    for party in (pair.honest, pair.other):
        party.replica._thread._on_round = None
        await settled(party)
        await party.replica.publish_own()  # nothing was trained since: the drift from this one is nothing
    size = pair.honest.replica.state_bytes // 4
    ours, theirs = (flat.from_bytes(party.replica.state()[1], size) for party in (pair.honest, pair.other))
    assert flat.distance(ours, theirs) > acceptance.MIN_DRIFT_SHARE * flat.norm(ours)  # or else they were never in doubt
    await merge_works(pair)


async def test_what_a_merge_gained_each_side_speaks_for_the_other_the_next_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[acceptance.Measures, float]] = []
    judge = acceptance.judge

    def listen(measures: acceptance.Measures, margin: float, credit: float) -> None:
        asked.append((measures, credit))
        judge(measures, margin, credit)

    monkeypatch.setattr(acceptance, "judge", listen)
    await merge_works(pair)
    await merge_works(pair)
    first, second = asked[:2], asked[2:]
    gains = sorted(acceptance.credited(0.0, measures) for measures, _ in first)
    assert gains[-1] > 0, "a mean of two that trained apart is better than one of them"
    assert [credit for _, credit in first] == [0.0, 0.0]
    assert sorted(credit for _, credit in second) == gains


async def test_a_slow_link_is_no_fault(pair: Pair) -> None:
    pair.swarm.delay(pair.honest.twin, pair.other.twin, 0.05)
    await merge_works(pair)


# ---- we offer, and the other side breaks it off at some point ---------------------------------------------------------------------------

Trick = Callable[[Stream, Party, Offer], Awaitable[None]]


async def send_whole(stream: Stream, payload: Buffer, digest: Digest) -> None:
    """All chunks and the seal."""
    view = memoryview(payload)
    for begin in range(0, len(view), limits.CHUNK_BYTES):
        await stream.send(Chunk(begin), view[begin : begin + limits.CHUNK_BYTES], timeout_s=1)
    await stream.send(Seal(digest), timeout_s=1)


async def receive_whole(stream: Stream) -> None:
    """All chunks of the other side, and its seal."""
    while not isinstance((await stream.receive(timeout_s=5, max_body=limits.MAX_BODY_BYTES))[0], Seal):
        pass


async def forever() -> None:
    await asyncio.Event().wait()


async def say_nothing(stream: Stream, me: Party, offer: Offer) -> None:
    await forever()


async def hang_up(stream: Stream, me: Party, offer: Offer) -> None:
    await stream.close()


async def decline(stream: Stream, me: Party, offer: Offer) -> None:
    await stream.send(Decline(offer.exchange, "busy", 1.0), timeout_s=1)


async def answer_something_else(stream: Stream, me: Party, offer: Offer) -> None:
    await stream.send(Chunk(0), b"xy", timeout_s=1)


async def accept_another(stream: Stream, me: Party, offer: Offer) -> None:
    await stream.send((await me.accept(offer, exchange=b"x" * 16))[0], timeout_s=1)


async def accept_in_another_codec(stream: Stream, me: Party, offer: Offer) -> None:
    await stream.send((await me.accept(offer, codec="int8"))[0], timeout_s=1)


async def accept_with_a_huge_size(stream: Stream, me: Party, offer: Offer) -> None:
    await stream.send((await me.accept(offer, size=limits.MAX_STATE_BYTES))[0], timeout_s=1)
    message, _ = await stream.receive(timeout_s=5)
    assert isinstance(message, End)
    assert message.reason == "malformed"


async def transfer_nothing(stream: Stream, me: Party, offer: Offer) -> None:
    await stream.send((await me.accept(offer))[0], timeout_s=1)
    await forever()


async def transfer_half(stream: Stream, me: Party, offer: Offer) -> None:
    accept, mine = await me.accept(offer)
    await stream.send(accept, timeout_s=1)
    await stream.send(Chunk(0), mine.payload[: len(mine.payload) // 2], timeout_s=1)
    await stream.close()


async def give_up_in_the_middle(stream: Stream, me: Party, offer: Offer) -> None:
    await stream.send((await me.accept(offer))[0], timeout_s=1)
    await stream.send(End("failed", "the disk burns"), timeout_s=1)


async def transfer_too_much(stream: Stream, me: Party, offer: Offer) -> None:
    accept, mine = await me.accept(offer)
    await stream.send(accept, timeout_s=1)
    await send_whole(stream, bytes(mine.payload) + b"more", mine.digest)


async def transfer_out_of_order(stream: Stream, me: Party, offer: Offer) -> None:
    await stream.send((await me.accept(offer))[0], timeout_s=1)
    await stream.send(Chunk(4096), bytes(4096), timeout_s=1)


async def transfer_empty_chunks(stream: Stream, me: Party, offer: Offer) -> None:
    await stream.send((await me.accept(offer))[0], timeout_s=1)
    for _ in range(1000):
        await stream.send(Chunk(0), timeout_s=1)


async def transfer_other_bytes(stream: Stream, me: Party, offer: Offer) -> None:
    accept, mine = await me.accept(offer)
    await stream.send(accept, timeout_s=1)
    await send_whole(stream, bytes(len(mine.payload)), mine.digest)
    await receive_whole(stream)


def transfer(change: Callable[[torch.Tensor], torch.Tensor]) -> Trick:
    async def poisoned(stream: Stream, me: Party, offer: Offer) -> None:
        _, mine = await me.accept(offer)
        coder = codecs.codec_of(CODEC)
        payload = coder.encode(change(coder.decode(mine.payload, me.replica.state_bytes // 4).clone()))
        await stream.send((await me.accept(offer))[0], timeout_s=1)
        await send_whole(stream, payload, flat.digest(payload))
        await receive_whole(stream)
        await stream.receive(timeout_s=5)

    return poisoned


def with_nan(state: torch.Tensor) -> torch.Tensor:
    state[7] = float("nan")
    return state


REFUSED: dict[str, tuple[Trick, float, Result | str, bool]] = {
    "silent": (say_nothing, SHORT_S, "late", False),
    "hangs up": (hang_up, PATIENT_S, "lost", False),
    "declines": (decline, PATIENT_S, "declined", False),
    "answers something else": (answer_something_else, PATIENT_S, "refused", True),
    "another exchange": (accept_another, PATIENT_S, "refused", True),
    "another codec": (accept_in_another_codec, PATIENT_S, "refused", True),
    "huge size": (accept_with_a_huge_size, PATIENT_S, "refused", True),
    "frozen before the transfer": (transfer_nothing, SHORT_S, "late", False),
    "gone in the transfer": (transfer_half, PATIENT_S, "lost", False),
    "gives up in the transfer": (give_up_in_the_middle, PATIENT_S, "lost", False),
    "too long": (transfer_too_much, PATIENT_S, "refused", True),
    "out of order": (transfer_out_of_order, PATIENT_S, "refused", True),
    "empty chunks": (transfer_empty_chunks, PATIENT_S, "refused", True),
    "wrong digest": (transfer_other_bytes, PATIENT_S, "refused", True),
    "not finite": (transfer(with_nan), PATIENT_S, "refused", True),
    "far away": (transfer(lambda state: state + 100), PATIENT_S, "refused", True),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_an_offer_that_goes_wrong_ends_with_a_reason_changes_no_bit_and_the_next_one_works(pair: Pair, name: str) -> None:
    trick, tau_s, kind, offence = REFUSED[name]
    before = await pair.honest.bits()

    async def handler(stream: Stream) -> None:
        offer, _ = await stream.receive(timeout_s=5)
        assert isinstance(offer, Offer)
        await trick(stream, pair.other, offer)

    await pair.other.twin.transport.serve(EXCHANGE, handler)
    result = await pair.honest.offer_to(pair.other, tau_s)
    assert (result.kind, result.offence) == (kind, offence), result
    assert result.why
    assert (await pair.honest.bits()) == before
    await merge_works(pair)


@pytest.mark.parametrize("sent", [b"\xc1" * 300, b"\xff" * 16, bytes(8), b"GET / HTTP/1.1\r\n\r\n"])
async def test_bytes_that_are_no_message_are_an_offence(pair: Pair, sent: bytes) -> None:
    before = await pair.honest.bits()

    async def raw(caller: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await forever()

    await pair.other.twin.wire.handle(EXCHANGE, raw)
    result = await pair.honest.offer_to(pair.other)
    assert (result.kind, result.offence) == ("refused", True)
    assert (await pair.honest.bits()) == before
    await merge_works(pair)


async def test_nobody_there_is_lost_and_a_partner_that_dies_in_the_transfer_too(pair: Pair) -> None:
    before = await pair.honest.bits()
    pair.swarm.kill(pair.other.twin)
    result = await pair.honest.offer_to(pair.other)
    assert (result.kind, result.offence) == ("lost", False)
    pair.swarm.revive(pair.other.twin)

    async def die(stream: Stream) -> None:
        offer, _ = await stream.receive(timeout_s=5)
        assert isinstance(offer, Offer)
        await stream.send((await pair.other.accept(offer))[0], timeout_s=1)
        await stream.receive(timeout_s=5, max_body=limits.MAX_BODY_BYTES)
        pair.swarm.kill(pair.other.twin)

    await pair.other.twin.transport.serve(EXCHANGE, die)
    assert (await pair.honest.offer_to(pair.other)).kind == "lost"
    assert (await pair.honest.bits()) == before
    pair.swarm.revive(pair.other.twin)
    await merge_works(pair)


# ---- the end of an exchange: each side decides for itself -------------------------------------------------------------------------------


def after_the_transfer(end: Callable[[Stream, Outcome], Awaitable[None]]) -> Trick:
    async def behave(stream: Stream, me: Party, offer: Offer) -> None:
        accept, mine = await me.accept(offer)
        await stream.send(accept, timeout_s=1)
        await send_whole(stream, mine.payload, mine.digest)
        await receive_whole(stream)
        outcome, _ = await stream.receive(timeout_s=5)
        assert isinstance(outcome, Outcome)
        await end(stream, outcome)

    return behave


async def leave(stream: Stream, outcome: Outcome) -> None:
    await stream.close()


async def refuse(stream: Stream, outcome: Outcome) -> None:
    await stream.send(Outcome(False, NO_DIGEST, "norm: too far"), timeout_s=1)


async def claim_another(stream: Stream, outcome: Outcome) -> None:
    await stream.send(Outcome(True, b"?" * 32), timeout_s=1)


async def talk_nonsense(stream: Stream, outcome: Outcome) -> None:
    await stream.send(Chunk(0), timeout_s=1)


@pytest.mark.parametrize(
    ("end", "offence", "why"),
    [
        (leave, False, "hung up"),
        (refuse, False, "they refused: norm: too far"),
        (claim_another, True, "another digest"),
        (talk_nonsense, False, "Chunk in place of an outcome"),
    ],
)
async def test_a_merge_that_only_we_use_is_one_sided_and_ours(
    pair: Pair, end: Callable[[Stream, Outcome], Awaitable[None]], offence: bool, why: str
) -> None:
    trick = after_the_transfer(end)

    async def handler(stream: Stream) -> None:
        offer, _ = await stream.receive(timeout_s=5)
        assert isinstance(offer, Offer)
        await trick(stream, pair.other, offer)

    await pair.other.twin.transport.serve(EXCHANGE, handler)
    result = await pair.honest.offer_to(pair.other)
    assert (result.kind, result.offence) == ("one_sided", offence)
    assert why in result.why
    assert pair.honest.replica.published().round == 4  # theirs was 3
    await merge_works(pair)


@pytest.mark.parametrize(("most", "round"), [(2, 3), (40, 41), (200, 71)])
async def test_a_round_of_theirs_counts_as_far_as_the_core_says_on_either_side(pair: Pair, most: int, round: int) -> None:
    """They have round 70, we 2: the bits of the merge are the same whatever we believe."""
    digest = pair.other.replica.published().digest
    await pair.other.replica.load(bytes(pair.other.replica.state()[1]), 70, digest)
    digest = pair.honest.replica.published().digest
    await pair.honest.replica.load(bytes(pair.honest.replica.state()[1]), 2, digest)
    await pair.other.twin.transport.serve(EXCHANGE, pair.other.answer)
    await pair.honest.exchanger.offer(f.SendOffer(ID, pair.other.twin.peer, time.time() + PATIENT_S, reach=100, most=most))
    assert pair.honest.ended().kind == "merged"
    ours, theirs = pair.honest.replica.published(), pair.other.replica.published()
    assert (ours.round, theirs.round) == (round, 71)
    assert ours.digest == theirs.digest


async def test_a_download_during_an_exchange_makes_its_merge_void_and_nothing_of_it_counts(pair: Pair) -> None:
    """The merge was computed from a block that is not there any more."""
    donor_state = bytes(pair.other.replica.state()[1])
    digest = pair.other.replica.published().digest
    adopt = pair.honest.replica.adopt

    async def overtaken(trial: Trial, *, keep: bool = False) -> Published:
        await pair.honest.replica.load(donor_state, 70, digest)
        return await adopt(trial, keep=keep)

    pair.honest.replica.adopt = overtaken  # type: ignore[method-assign]
    await pair.other.twin.transport.serve(EXCHANGE, pair.other.answer)
    result = await pair.honest.offer_to(pair.other)
    assert (result.kind, result.offence) == ("lost", False)
    assert "downloaded state" in result.why
    assert pair.honest.replica.published().round == 70
    pair.honest.replica.adopt = adopt  # type: ignore[method-assign]
    await until(lambda: any(isinstance(fact, f.Ended) for fact in pair.other.facts), "the responder does not end")
    assert pair.other.ended().kind == "one_sided"


# ---- they offer -------------------------------------------------------------------------------------------------------------------------


async def offer_and(pair: Pair, act: Callable[[Stream, Snapshot], Awaitable[None]], tau_s: float = PATIENT_S, **changes: object) -> Result:
    """The other side begins an exchange with the honest one and then does as it likes."""
    await pair.honest.twin.transport.serve(EXCHANGE, lambda stream: pair.honest.answer(stream, tau_s))
    offer, mine = await pair.other.proposal(**changes)
    stream = await pair.other.twin.transport.open(pair.honest.twin.peer, EXCHANGE, timeout_s=1)
    try:
        await stream.send(offer, timeout_s=1)
        await act(stream, mine)
        await until(lambda: any(isinstance(fact, f.Ended) for fact in pair.honest.facts), "the responder does not end")
    finally:
        await stream.close()
    return pair.honest.ended()


async def nothing_more(stream: Stream, mine: Snapshot) -> None:
    return None


async def hear_what_is_wrong(stream: Stream, mine: Snapshot) -> None:
    message, _ = await stream.receive(timeout_s=5)
    assert isinstance(message, End)
    assert message.reason == "malformed"
    assert f"ours has {len(mine.payload)}" in message.detail


async def vanish(stream: Stream, mine: Snapshot) -> None:
    await stream.close()


async def half(stream: Stream, mine: Snapshot) -> None:
    await stream.send(Chunk(0), mine.payload[:1000], timeout_s=1)
    await stream.close()


async def too_much(stream: Stream, mine: Snapshot) -> None:
    await stream.send(Chunk(0), bytes(mine.payload) + b"!", timeout_s=1)


async def other_bytes(stream: Stream, mine: Snapshot) -> None:
    await send_whole(stream, bytes(len(mine.payload)), mine.digest)


async def offer_again(stream: Stream, mine: Snapshot) -> None:
    await stream.send(Decline(ID, "busy"), timeout_s=1)


@pytest.mark.parametrize(
    ("act", "tau_s", "changes", "kind", "offence"),
    [
        (nothing_more, SHORT_S, {}, "late", False),
        (vanish, PATIENT_S, {}, "lost", False),
        (half, PATIENT_S, {}, "lost", False),
        (too_much, PATIENT_S, {}, "refused", True),
        (other_bytes, PATIENT_S, {}, "refused", True),
        (offer_again, PATIENT_S, {}, "lost", False),
        (hear_what_is_wrong, PATIENT_S, {"size": 4}, "refused", True),
        (hear_what_is_wrong, PATIENT_S, {"size": limits.MAX_STATE_BYTES}, "refused", True),
    ],
    ids=["silent", "vanishes", "half", "too much", "wrong digest", "something else", "tiny", "huge"],
)
async def test_a_taken_offer_that_goes_wrong_changes_no_bit_and_the_next_one_works(
    pair: Pair, act: Callable[[Stream, Snapshot], Awaitable[None]], tau_s: float, changes: dict[str, object], kind: str, offence: bool
) -> None:
    before = await pair.honest.bits()
    result = await offer_and(pair, act, tau_s, **changes)
    assert (result.kind, result.offence) == (kind, offence), result
    assert (await pair.honest.bits()) == before
    await merge_works(pair)


async def test_a_claim_of_boundless_work_moves_the_merge_no_further_than_the_bound(pair: Pair) -> None:
    """5 : 1 at most, whatever the offer says."""
    ours = flat.from_bytes((await snapshot_of(pair.honest.replica, "fp32")).payload, pair.honest.replica.state_bytes // 4)
    theirs = flat.from_bytes((await snapshot_of(pair.other.replica, "fp32")).payload, pair.honest.replica.state_bytes // 4)

    async def complete(stream: Stream, mine: Snapshot) -> None:
        await stream.receive(timeout_s=5)
        await send_whole(stream, mine.payload, mine.digest)
        await receive_whole(stream)
        await stream.send(Outcome(False, NO_DIGEST, "no"), timeout_s=1)
        await stream.receive(timeout_s=5)

    assert (await offer_and(pair, complete, weight=1e15)).kind == "one_sided"
    merged = flat.from_bytes(pair.honest.replica.state()[1], pair.honest.replica.state_bytes // 4)
    moved = float(torch.linalg.vector_norm(merged - ours) / torch.linalg.vector_norm(theirs - ours))
    assert 0.49 < moved < 5 / 6 + 0.01  # one half where we ourselves have worked for as long as counts at most


# ---- what the core must always hear -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [BlocktrainError("training stopped"), RuntimeError("a bug")])
async def test_our_own_failure_ends_the_exchange_for_the_core_too(pair: Pair, error: Exception) -> None:
    """Else a node would wait for ever for an exchange that nobody carries out."""

    async def broken(codec: str, reference: bytes = b"") -> Swap:
        raise error

    mine, pair.honest.replica.begin = pair.honest.replica.begin, broken  # type: ignore[method-assign, assignment]
    result = await offer_and(pair, nothing_more)
    assert result == Result("lost", "our side failed")
    pair.honest.replica.begin = mine  # type: ignore[method-assign]
    await merge_works(pair)


async def test_a_node_that_stops_in_mid_exchange_ends_it(pair: Pair) -> None:
    await pair.honest.twin.transport.serve(EXCHANGE, pair.honest.answer)
    offer, _ = await pair.other.proposal()
    stream = await pair.other.twin.transport.open(pair.honest.twin.peer, EXCHANGE, timeout_s=1)
    await stream.send(offer, timeout_s=1)
    assert isinstance((await stream.receive(timeout_s=5))[0], Accept)
    pair.swarm.kill(pair.honest.twin)
    await until(lambda: any(isinstance(fact, f.Ended) for fact in pair.honest.facts), "the exchange does not end")
    assert pair.honest.ended() == Result("lost", "cut off")
    await stream.close()


async def test_a_withdrawn_offer_says_nothing(pair: Pair) -> None:
    asked = asyncio.Event()

    async def handler(stream: Stream) -> None:
        await stream.receive(timeout_s=5)
        asked.set()
        await forever()

    await pair.other.twin.transport.serve(EXCHANGE, handler)
    offering = asyncio.create_task(pair.honest.exchanger.offer(f.SendOffer(ID, pair.other.twin.peer, time.time() + 60)))
    await asyncio.wait_for(asked.wait(), 5)
    offering.cancel()
    await asyncio.gather(offering, return_exceptions=True)
    assert pair.honest.facts == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"block": 1}, "block"),
        ({"run": b"r" * 32}, "block"),
        ({"part": "shared"}, "block"),
        ({"codec": "sparse"}, "codec"),
        ({}, ""),
    ],
)
async def test_what_is_not_ours_to_average_is_declined_before_anything_is_computed(
    pair: Pair, changes: dict[str, object], why: str
) -> None:
    offer, _ = await pair.other.proposal(**changes)
    assert pair.honest.exchanger.objection(offer) == why
