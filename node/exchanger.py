"""Carries out exchanges: the I/O and the compute that protocol/exchange.py orders, for one node.

One method a side. Both take a snapshot, stream their encoded snapshots at once, let the replica compute and measure the merge off the
loop, ask `acceptance.judge`, adopt, and tell each other the outcome. Training goes on all the while; the only thing that touches the live
block is `adopt`, after every check. Whatever goes wrong ends as one `Ended` fact with a reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from blocktrain.node.ports import Replica, Snapshot, Stream, Terms, Transport
from blocktrain.protocol import acceptance, limits
from blocktrain.protocol.errors import Malformed, NetworkFault, PeerFault
from blocktrain.protocol.exchange import Exchange, Result
from blocktrain.protocol.facts import Answered, Ended, Fact, Published, SendOffer, Take
from blocktrain.protocol.ids import NO_DIGEST, Digest, PeerId
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import CODECS, EXCHANGE, Accept, Chunk, Decline, End, Message, Offer, Outcome

OUTCOME_TIMEOUT_S = 15.0  # beyond τ, to hear what the other side made of it


@dataclass(frozen=True)
class Side:
    """Our side of every exchange."""

    me: PeerId
    manifest: Manifest
    block: int
    codec: str
    margin: float


class Exchanger:
    """`report` takes facts (it must not block); `clock` is Unix seconds."""

    def __init__(
        self, ours: Side, transport: Transport, replica: Replica, report: Callable[[Fact], None], clock: Callable[[], float]
    ) -> None:
        self._ours = ours
        self._transport = transport
        self._replica = replica
        self._report = report
        self._clock = clock

    async def offer(self, order: SendOffer) -> None:
        """Offer an exchange and see it through. Reports Answered and Ended; reports nothing if cancelled (withdrawn)."""
        exchange = Exchange(self._ours.me, order.peer, order.exchange, ours=True, now=self._clock(), tau_s=order.deadline - self._clock())
        began = time.monotonic()
        stream: Stream | None = None
        try:
            async with asyncio.timeout(max(0.0, order.deadline - self._clock())):
                mine = await self._replica.snapshot(self._ours.codec)
                stream = await self._transport.open(order.peer, EXCHANGE, timeout_s=limits.OPEN_TIMEOUT_S)
                offer = self._offer(order.exchange, mine)
                await stream.send(offer, timeout_s=limits.OPEN_TIMEOUT_S)
                answer, _ = await stream.receive(timeout_s=limits.OPEN_TIMEOUT_S)
                result = _answer(exchange, answer, offer)
                if result is None:
                    assert isinstance(answer, Accept)
                    self._report(Answered(order.exchange))
                    terms = Terms(order.peer, answer.round, answer.weight, Digest(answer.digest), answer.codec)
                    payload = await _swap(stream, mine, answer.size)
            if result is None:
                result = await self._settle(exchange, stream, mine, payload, terms)
        except TimeoutError:
            result = exchange.late()
        except NetworkFault as fault:
            result = exchange.silent(str(fault))
        except PeerFault as fault:
            result = exchange.refused(fault.why, offence=True)
        finally:
            if stream is not None:
                await stream.close()
        self._report(Ended(order.exchange, order.peer, result, time.monotonic() - began))

    async def take(self, order: Take, offer: Offer, stream: Stream) -> None:
        """Accept an offer that the core decided to take, and see it through. Reports Ended."""
        exchange = Exchange(self._ours.me, order.peer, order.exchange, ours=False, now=self._clock(), tau_s=order.deadline - self._clock())
        began = time.monotonic()
        terms = Terms(order.peer, offer.round, offer.weight, Digest(offer.digest), offer.codec)
        try:
            async with asyncio.timeout(max(0.0, order.deadline - self._clock())):
                mine = await self._replica.snapshot(offer.codec)
                await stream.send(
                    Accept(order.exchange, mine.round, mine.weight, mine.digest, len(mine.payload), offer.codec),
                    timeout_s=limits.OPEN_TIMEOUT_S,
                )
                payload = await _swap(stream, mine, offer.size)
            result = await self._settle(exchange, stream, mine, payload, terms)
        except TimeoutError:
            result = exchange.late()
        except NetworkFault as fault:
            result = exchange.silent(str(fault))
        except PeerFault as fault:
            result = exchange.refused(fault.why, offence=True)
        except BaseException as error:
            # Cut off, or our own failure. The core must never wait for an exchange that nobody carries out.
            why = "cut off" if isinstance(error, asyncio.CancelledError) else "our side failed"
            self._report(Ended(order.exchange, order.peer, exchange.silent(why), time.monotonic() - began))
            raise
        self._report(Ended(order.exchange, order.peer, result, time.monotonic() - began))

    def objection(self, offer: Offer) -> str:
        """A decline reason for what the core does not look at, or ""."""
        if offer.block != self._ours.block or offer.part != "block":
            return "block"
        if offer.run != self._ours.manifest.run:
            return "block"
        return "" if offer.codec in CODECS and offer.codec != "sparse" else "codec"

    def _offer(self, exchange: bytes, mine: Snapshot) -> Offer:
        ours = self._ours
        return Offer(
            exchange=exchange,
            run=ours.manifest.run,
            block=ours.block,
            part="block",
            round=mine.round,
            codec=mine.codec,
            weight=mine.weight,
            digest=mine.digest,
            size=len(mine.payload),
        )

    async def _settle(self, exchange: Exchange, stream: Stream, mine: Snapshot, payload: bytearray, terms: Terms) -> Result:
        """Verify, merge, judge, adopt; then tell and hear. Only the transfer before this is bound by τ; this is our own compute."""
        outcome: Outcome
        refusal: Result | None = None
        try:
            trial = await self._replica.consider(mine, payload, terms, mine_first=exchange.mine_first)
            acceptance.judge(trial.measures, self._ours.margin)
        except PeerFault as fault:
            refusal = exchange.refused(fault.why, offence=True)
            outcome = Outcome(False, NO_DIGEST, fault.why[: limits.MAX_TEXT_CHARS])
        else:
            published = await self._replica.adopt(trial, mine)
            exchange.judged(trial.digest)  # not before: a download can make the merge void, and then nothing of it is used
            self._report(Published(published.round, published.digest))
            outcome = Outcome(True, trial.digest)
        try:
            if exchange.ours:
                await stream.send(outcome, timeout_s=OUTCOME_TIMEOUT_S)
                heard, _ = await stream.receive(timeout_s=OUTCOME_TIMEOUT_S)
            else:
                heard, _ = await stream.receive(timeout_s=OUTCOME_TIMEOUT_S)
                await stream.send(outcome, timeout_s=OUTCOME_TIMEOUT_S)
        except NetworkFault as fault:
            return refusal or exchange.silent(str(fault))
        if refusal is not None:
            return refusal
        if isinstance(heard, Outcome):
            return exchange.heard(heard)
        return exchange.silent(f"{type(heard).__name__} in place of an outcome")


def _answer(exchange: Exchange, answer: Message, offer: Offer) -> Result | None:
    """The end of an exchange by the answer to our offer, or None where it goes on."""
    if isinstance(answer, Decline):
        return exchange.declined(answer.reason)
    if isinstance(answer, End):
        return exchange.declined(answer.reason)
    if not isinstance(answer, Accept):
        raise Malformed(f"{type(answer).__name__} in answer to an offer")
    wrong = exchange.accepted(answer, offer)
    if wrong:
        raise Malformed(wrong)
    if answer.size != offer.size:
        raise Malformed(f"a snapshot of {answer.size} bytes; ours has {offer.size}")
    return None


async def _swap(stream: Stream, mine: Snapshot, size: int) -> bytearray:
    """Send our snapshot and receive theirs, both at once. `size` is what they announced; the codec checks it against the shape."""
    if size != len(mine.payload):
        raise Malformed(f"a snapshot of {size} bytes; ours has {len(mine.payload)}")
    theirs = bytearray(size)

    async def send() -> None:
        for offset in range(0, len(mine.payload), limits.CHUNK_BYTES):
            await stream.send(Chunk(offset), mine.payload[offset : offset + limits.CHUNK_BYTES], timeout_s=limits.STALL_TIMEOUT_S)

    async def receive() -> None:
        filled = 0
        while filled < size:
            message, body = await stream.receive(timeout_s=limits.STALL_TIMEOUT_S, max_body=limits.MAX_BODY_BYTES)
            if not isinstance(message, Chunk):
                detail = f": {message.detail}" if isinstance(message, End) and message.detail else ""
                raise NetworkFault(f"{type(message).__name__} in the middle of a transfer{detail}")
            if message.offset != filled or not body or filled + len(body) > size:
                raise Malformed(f"a chunk of {len(body)} bytes at {message.offset}; expected one at {filled} of {size}")
            theirs[filled : filled + len(body)] = body
            filled += len(body)

    sending = asyncio.create_task(send(), name="exchange-send")
    try:
        await receive()
        await sending
    finally:
        if not sending.done():
            sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    return theirs
