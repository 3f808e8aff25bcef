"""Carries out exchanges: the I/O and the compute that protocol/exchange.py orders, for one node.

One method a side. Both take a snapshot, stream it to each other at once (transfer.py) while the replica encodes the one and merges the
other off the loop, let it measure the merge, ask `acceptance.judge`, adopt, and tell each other the outcome. Training goes on all the
while; the only thing that touches the live block is `adopt`, after every check. Whatever goes wrong ends as one `Ended` fact with a
reason, and only then streams are closed: a peer that does not listen any more cannot hold up the next round.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass

from blocktrain.node.events import Note, silent
from blocktrain.node.ports import Replica, Stream, Swap, Terms, Transport, Trial
from blocktrain.node.transfer import Transfer
from blocktrain.protocol import acceptance, limits
from blocktrain.protocol.errors import Malformed, NetworkFault, PeerFault, Unfit
from blocktrain.protocol.exchange import Exchange, Result, streams_for
from blocktrain.protocol.facts import Answered, Ended, Fact, Published, SendOffer, Take
from blocktrain.protocol.ids import NO_DIGEST, PeerId
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import CODECS, EXCHANGE, Accept, Decline, End, Lane, Message, Offer, Outcome

OUTCOME_TIMEOUT_S = 15.0  # beyond τ, to hear what the other side made of it
CLOSE_TIMEOUT_S = 2.0  # for streams, when all is said
FULL_CODEC = "bf16"  # where a sparse snapshot has no reference
RTT_GROWTH = 1.25  # from exchange to exchange, at most
MAX_KNOWN = 1024  # peers whose link and last merge we remember


@dataclass(frozen=True)
class Side:
    """Our side of every exchange. `streams`: how many to stripe over; None: as many as the link needs."""

    me: PeerId
    manifest: Manifest
    block: int
    codec: str
    margin: float
    streams: int | None = None


@dataclass
class Known:
    """What earlier exchanges with a peer told."""

    rate_bytes_per_s: float | None = None  # of one direction
    rtt_s: float | None = None
    reference: bytes = NO_DIGEST  # our last merge with it that both sides keep
    credit: float = 0.0  # what merges with it gained us (acceptance.credited)

    def met(self, rtt_s: float | None) -> None:
        """A round trip as it was just now. A busy moment on either side is not a longer link: it grows slowly, and falls at once."""
        if rtt_s is not None:
            self.rtt_s = rtt_s if self.rtt_s is None else min(rtt_s, RTT_GROWTH * self.rtt_s)


@dataclass(frozen=True)
class Timing:
    """The last transfer, for measurements. Times are time.monotonic()."""

    first_chunk_at: float = 0.0
    verified_at: float = 0.0
    payload_bytes: int = 0
    lanes: int = 0


@dataclass(frozen=True)
class _Expected:
    """A transfer that more streams may join."""

    transfer: Transfer
    peer: PeerId
    streams: int


@dataclass(frozen=True)
class _Swapped:
    """What an exchange has when both snapshots are through."""

    stream: Stream
    mine: Swap
    transfer: Transfer
    keep: bool


class Exchanger:
    """`report` takes facts, `note` what machines may want to know (neither may block); `clock` is Unix seconds.

    Attributes:
        side: our side; may be replaced between exchanges.
        timing: of the last transfer.
    """

    def __init__(
        self,
        side: Side,
        transport: Transport,
        replica: Replica,
        report: Callable[[Fact], None],
        clock: Callable[[], float],
        note: Note = silent,
    ) -> None:
        self.side = side
        self.timing = Timing()
        self._transport = transport
        self._replica = replica
        self._report = report
        self._clock = clock
        self._note = note
        self._known: OrderedDict[PeerId, Known] = OrderedDict()
        self._expected: dict[bytes, _Expected] = {}

    async def offer(self, order: SendOffer) -> None:
        """Offer an exchange and see it through. Reports Answered and Ended; reports nothing if cancelled (withdrawn)."""
        self._note("exchange", exchange=order.exchange, peer=order.peer, ours=True, ends_at=order.deadline)
        exchange = Exchange(self.side.me, order.peer, order.exchange, ours=True, now=self._clock(), tau_s=order.deadline - self._clock())
        began = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(max(0.0, order.deadline - self._clock())):
                    swapped = await self._propose(exchange, order, stack)
                result = swapped if isinstance(swapped, Result) else await self._settle(exchange, swapped)
            except TimeoutError:
                result = exchange.late()
            except NetworkFault as fault:
                result = exchange.silent(str(fault))
            except PeerFault as fault:
                result = exchange.refused(fault.why, offence=True)
            self._report(Ended(order.exchange, order.peer, result, time.monotonic() - began))

    async def _propose(self, exchange: Exchange, order: SendOffer, stack: contextlib.AsyncExitStack) -> _Swapped | Result:
        """From the snapshot to the end of the transfer, or to the answer that ends the exchange. Streams are left to `stack`."""
        streams = self.side.streams or streams_for(self._know(order.peer).rate_bytes_per_s, self._know(order.peer).rtt_s)
        joined: asyncio.Future[Transfer] = asyncio.get_running_loop().create_future()
        await stack.enter_async_context(self._lanes(order, streams - 1, joined))
        opening = asyncio.create_task(self._open(order), name="exchange open")
        try:
            mine = await self._snapshot_for(order.peer)  # a step of training may be in hand; the stream opens meanwhile
            stream, hearing = await opening
        except BaseException:
            await _abandon(opening)
            raise
        stack.push_async_callback(_close, stream)
        stack.push_async_callback(_drop, hearing)
        offer = self._offer(order, mine, streams)
        await stream.send(offer, timeout_s=limits.OPEN_TIMEOUT_S)
        answer, _ = await _heard(hearing, limits.OPEN_TIMEOUT_S)
        self._know(order.peer).met(stream.rtt_s)
        try:
            result = self._answer(exchange, answer, offer, order.reach)
            if result is not None:
                return result
            assert isinstance(answer, Accept)
            transfer = Transfer(mine, answer.size, offer.streams)
        except PeerFault as fault:
            await _object(stream, fault)
            raise
        self._report(Answered(order.exchange))
        mine.meet(Terms(order.peer, min(answer.round, order.most), answer.weight, answer.codec), mine_first=exchange.mine_first)
        joined.set_result(transfer)
        await transfer.run(stream)
        return _Swapped(stream, mine, transfer, offer.keep)

    async def _open(self, order: SendOffer) -> tuple[Stream, asyncio.Task[tuple[Message, memoryview]]]:
        """A stream, and what listens on it at once: a hello that waited for our snapshot would make the link look long."""
        stream = await self._transport.open(order.peer, EXCHANGE, timeout_s=limits.OPEN_TIMEOUT_S)
        left_s = max(0.0, order.deadline - self._clock()) + limits.OPEN_TIMEOUT_S
        return stream, asyncio.create_task(stream.receive(timeout_s=left_s), name="exchange answer")

    async def take(self, order: Take, offer: Offer, stream: Stream) -> None:
        """Accept an offer that the core decided to take, and see it through. Reports Ended."""
        self._note("exchange", exchange=order.exchange, peer=order.peer, ours=False, ends_at=order.deadline)
        exchange = Exchange(self.side.me, order.peer, order.exchange, ours=False, now=self._clock(), tau_s=order.deadline - self._clock())
        began = time.monotonic()
        transfer: Transfer | None = None
        try:
            async with asyncio.timeout(max(0.0, order.deadline - self._clock())):
                mine = await self._replica.begin(offer.codec, offer.reference)
                transfer = Transfer(mine, offer.size, offer.streams)
                mine.meet(Terms(order.peer, min(offer.round, order.most), offer.weight, offer.codec), mine_first=exchange.mine_first)
                self._expected[offer.exchange] = _Expected(transfer, order.peer, offer.streams)
                accept = Accept(order.exchange, mine.round, mine.weight, mine.size, offer.codec)
                await stream.send(accept, timeout_s=limits.OPEN_TIMEOUT_S)
                await transfer.run(stream)
            result = await self._settle(exchange, _Swapped(stream, mine, transfer, offer.keep))
        except TimeoutError:
            result = exchange.late()
        except NetworkFault as fault:
            result = exchange.silent(str(fault))
        except PeerFault as fault:
            result = exchange.refused(fault.why, offence=True)
            if transfer is None:
                await _object(stream, fault)
        except BaseException as error:
            # Cut off, or our own failure. The core must never wait for an exchange that nobody carries out.
            why = "cut off" if isinstance(error, asyncio.CancelledError) else "our side failed"
            self._report(Ended(order.exchange, order.peer, exchange.silent(why), time.monotonic() - began))
            raise
        finally:
            self._expected.pop(offer.exchange, None)
            if transfer is not None:
                transfer.end()
        self._report(Ended(order.exchange, order.peer, result, time.monotonic() - began))
        if result.kind == "merged":
            await _hung_up(stream)

    async def lane(self, first: Lane, stream: Stream) -> None:
        """One more stream for an exchange that we took. Raises: NetworkFault: it is over; lanes may come too late."""
        expected = self._expected.get(first.exchange)
        if expected is None or expected.peer != stream.peer or expected.transfer.lanes >= expected.streams:
            raise NetworkFault("a lane of no exchange that is under way")
        await expected.transfer.help(stream, closes=False)

    def objection(self, offer: Offer) -> str:
        """A decline reason for what the core does not look at, or ""."""
        if offer.block != self.side.block or offer.part != "block":
            return "block"
        if offer.run != self.side.manifest.run:
            return "block"
        known = offer.codec in CODECS and (offer.codec != "sparse" or self._replica.has_reference(offer.reference))
        return "" if known else "codec"

    # ---- what we know of a peer ---------------------------------------------------------------------------------------------------

    def _know(self, peer: PeerId) -> Known:
        known = self._known.setdefault(peer, Known())
        self._known.move_to_end(peer)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return known

    async def _snapshot_for(self, peer: PeerId) -> Swap:
        """Ours, for an offer: sparse only where both sides keep a merge that it can be relative to."""
        if self.side.codec != "sparse":
            return await self._replica.begin(self.side.codec)
        reference = self._know(peer).reference
        if not self._replica.has_reference(reference):
            return await self._replica.begin(FULL_CODEC)
        return await self._replica.begin("sparse", reference)

    def _offer(self, order: SendOffer, mine: Swap, streams: int) -> Offer:
        side, known = self.side, self._know(order.peer)
        return Offer(
            exchange=order.exchange,
            run=side.manifest.run,
            block=side.block,
            part="block",
            round=mine.round,
            codec=mine.codec,
            weight=mine.weight,
            size=mine.size,
            reference=known.reference if mine.codec == "sparse" else NO_DIGEST,
            streams=streams,
            keep=side.codec == "sparse",
        )

    def _answer(self, exchange: Exchange, answer: Message, offer: Offer, reach: int) -> Result | None:
        """The end of an exchange by the answer to our offer, or None where it goes on."""
        if isinstance(answer, Decline):
            if answer.reason == "codec":  # the other side does not keep our last merge any more
                self._know(exchange.peer).reference = NO_DIGEST
            return exchange.declined(answer.reason, answer.retry_after_s)
        if isinstance(answer, End):
            return exchange.declined(answer.reason, answer.retry_after_s)
        if not isinstance(answer, Accept):
            raise Malformed(f"{type(answer).__name__} in answer to an offer")
        wrong = exchange.accepted(answer, offer, reach)
        if wrong:
            raise Malformed(wrong)
        return None

    def _measured(self, peer: PeerId, transfer: Transfer, verified_at: float) -> None:
        began_at = transfer.began_at or verified_at
        size = transfer.size
        self.timing = Timing(began_at, verified_at, size, transfer.lanes)
        self._know(peer).rate_bytes_per_s = size / max(1e-6, verified_at - began_at)

    @contextlib.asynccontextmanager
    async def _lanes(self, order: SendOffer, count: int, joined: asyncio.Future[Transfer]) -> AsyncIterator[None]:
        """The other streams of an exchange that we offer: opened at once, used from its acceptance on, when it has `joined` its transfer.

        So they cost no round trip. One that cannot be opened is left out.
        """

        async def lane() -> None:
            with contextlib.suppress(NetworkFault, PeerFault):
                stream = await self._transport.open(order.peer, EXCHANGE, timeout_s=limits.OPEN_TIMEOUT_S)
                try:
                    transfer = await asyncio.shield(joined)
                    await stream.send(Lane(order.exchange), timeout_s=limits.OPEN_TIMEOUT_S)
                    await transfer.help(stream, closes=True)
                finally:
                    await _close(stream)

        lanes = [asyncio.create_task(lane(), name="exchange-lane") for _ in range(count)]
        try:
            yield
        finally:
            if joined.done():
                joined.result().end()
            else:
                joined.cancel()
            if lanes:
                _, open_still = await asyncio.wait(lanes, timeout=CLOSE_TIMEOUT_S)
                for task in open_still:
                    task.cancel()
                await asyncio.gather(*lanes, return_exceptions=True)

    # ---- the end ------------------------------------------------------------------------------------------------------------------

    async def _settle(self, exchange: Exchange, swapped: _Swapped) -> Result:
        """Verify, merge, judge, adopt; then tell and hear. Only the transfer before this is bound by τ; this is our own compute."""
        outcome: Outcome
        refusal: Result | None = None
        transfer = swapped.transfer
        assert transfer.seal is not None, "the transfer is through"
        trial: Trial | None = None
        try:
            trial = await swapped.mine.finish(transfer.seal)
            self._measured(exchange.peer, transfer, trial.verified_at)
            acceptance.judge(trial.measures, self.side.margin, self._know(exchange.peer).credit)
        except PeerFault as fault:
            self._note_judged(exchange, trial, fault.why)
            refusal = exchange.refused(fault.why, offence=not isinstance(fault, Unfit))
            outcome = Outcome(False, NO_DIGEST, fault.why[: limits.MAX_TEXT_CHARS])
        else:
            self._note_judged(exchange, trial, "")
            published = await self._replica.adopt(trial, keep=swapped.keep)
            known = self._know(exchange.peer)
            known.credit = acceptance.credited(known.credit, trial.measures)
            exchange.judged(trial.digest)  # not before: a download can make the merge void, and then nothing of it is used
            details = {"round": published.round, "digest": published.digest, "peer": exchange.peer}
            self._note("published", how="merged", exchange=exchange.id, **details)
            self._report(Published(published.round, published.digest))
            outcome = Outcome(True, trial.digest)
        try:
            if refusal is not None:  # what they make of it changes nothing any more; our place for the next exchange is worth more
                await swapped.stream.send(outcome, timeout_s=OUTCOME_TIMEOUT_S)
                return refusal
            heard = await _tell_and_hear(swapped, outcome)
        except NetworkFault as fault:
            return refusal or exchange.silent(str(fault))
        if not isinstance(heard, Outcome):
            return exchange.silent(f"{type(heard).__name__} in place of an outcome")
        result = exchange.heard(heard)
        if result.kind == "merged" and swapped.keep:
            self._know(exchange.peer).reference = outcome.merged
        return result

    def _note_judged(self, exchange: Exchange, trial: Trial | None, why: str) -> None:
        """What was measured of a merge. `trial` None: it did not come to that."""
        measured = {} if trial is None else {**asdict(trial.measures), "merge": trial.digest}
        self._note("judged", exchange=exchange.id, peer=exchange.peer, ok=not why, reason=why, **measured)


async def _tell_and_hear(swapped: _Swapped, outcome: Outcome) -> Message:
    """Neither waits for the other's before it tells its own: that would be another way over the link."""
    await swapped.stream.send(outcome, timeout_s=OUTCOME_TIMEOUT_S)
    if swapped.transfer.outcome is not None:
        return swapped.transfer.outcome
    heard, _ = await swapped.stream.receive(timeout_s=OUTCOME_TIMEOUT_S)
    return heard


async def _hung_up(stream: Stream) -> None:
    """Wait until the offerer, who reads our outcome last, hangs up: if we did, what it has not read yet would be lost."""
    with contextlib.suppress(NetworkFault, PeerFault):
        await stream.receive(timeout_s=OUTCOME_TIMEOUT_S)


async def _abandon(opening: asyncio.Task[tuple[Stream, asyncio.Task[tuple[Message, memoryview]]]]) -> None:
    """A stream that is not needed any more, and may be open by now."""
    opening.cancel()
    with contextlib.suppress(NetworkFault, asyncio.CancelledError):
        stream, hearing = await opening
        await _drop(hearing)
        await _close(stream)


async def _heard(hearing: asyncio.Task[tuple[Message, memoryview]], timeout_s: float) -> tuple[Message, memoryview]:
    """Raises: NetworkFault: nothing in time; and what `Stream.receive` does."""
    done, _ = await asyncio.wait({hearing}, timeout=timeout_s)
    if not done:
        raise NetworkFault(f"sent nothing for {timeout_s:.3g} s")
    return hearing.result()


async def _drop(hearing: asyncio.Task[tuple[Message, memoryview]]) -> None:
    """Nobody listens any more."""
    hearing.cancel()
    await asyncio.gather(hearing, return_exceptions=True)


async def _object(stream: Stream, fault: PeerFault) -> None:
    """Say what is wrong with their terms before we hang up: the other side may be honest, and of another version."""
    with contextlib.suppress(NetworkFault):
        await stream.send(End("malformed", fault.why[: limits.MAX_TEXT_CHARS]), timeout_s=CLOSE_TIMEOUT_S)


async def _close(stream: Stream) -> None:
    """Not for long: a stream that ended badly has nothing to wait for."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await stream.close()
