"""One node's life: facts into the protocol core, decisions out of it.

Everything that happens is told to the core as a fact; what the core decides is carried out here, each decision in a task of the node's
own TaskGroup. The core is synchronous and runs on the event loop only, so there are no locks. Leaving the group is the shutdown.
A training round can be followed by file names: trainer (H steps) → service → core → exchanger → replica → service (publish).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from blocktrain.node import logs
from blocktrain.node.catchup import Donor, Download, NotNow, fetch
from blocktrain.node.config import NodeConfig
from blocktrain.node.events import Events
from blocktrain.node.exchanger import Exchanger, Side
from blocktrain.node.holder import Holder
from blocktrain.node.join import DialBack, Info
from blocktrain.node.ports import Directory, Published, Replica, Server, Stream, Transport
from blocktrain.protocol import facts as f
from blocktrain.protocol import limits
from blocktrain.protocol.core import Core, Settings
from blocktrain.protocol.errors import Malformed, NetworkFault, PeerFault
from blocktrain.protocol.ids import NO_DIGEST, short
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import EXCHANGE, INFO, LINK, STATE, SWEEP, Decline, Lane, Offer, Want
from blocktrain.protocol.records import Announcement, RunRecord, Seen

log = logging.getLogger("blocktrain.node")

DHT_TIMEOUT_S = 8.0  # one read or write; below the refresh, so that they never pile up
LEAVE_TIMEOUT_S = 1.5  # to write the tombstone when the node ends
MIN_TICK_S = 0.05
CLASH_MARGIN_S = 0.5  # copies of one record, in several buckets, may differ by less


@dataclass(frozen=True)
class Parts:
    """What a node is made of. Tests put twins here."""

    transport: Transport
    directory: Directory
    replica: Replica
    server: Server
    dial_back: DialBack | None = None  # how to find out whether a peer can be reached; None: not here
    events: Events | None = None  # who keeps what happens, for machines


class Node:
    """Run it with `async with asyncio.TaskGroup`: see `run`. `clock` is Unix seconds."""

    def __init__(
        self,
        config: NodeConfig,
        manifest: Manifest,
        block: int,
        parts: Parts,
        *,
        clock: Callable[[], float],
        rng: Random,
        status_json: Callable[[], str],
    ) -> None:
        self.config = config
        self.manifest = manifest
        self.block = block
        self.parts = parts
        self.clock = clock
        self.me = parts.directory.peer
        self._events = parts.events or Events(None, clock)
        settings = Settings(
            ttl_s=config.network.ttl_s,
            refresh_s=config.network.refresh_s,
            tau_s=config.gossip.tau_s,
            topology=config.gossip.topology,
            train=config.training.train,
            expects_peers=bool(config.network.initial_peers),
            hosts=config.new_run is not None,
        )
        self.core = Core(self.me, manifest, block, settings, rng)
        side = Side(self.me, manifest, block, config.gossip.codec, config.gossip.heldout_margin)
        self.exchanger = Exchanger(side, parts.transport, parts.replica, self.tell, clock, self._events.note)
        self.holder = Holder(manifest, block, parts.server, parts.transport)
        self._donor = Donor(manifest, block, parts.replica)
        self._info = Info(manifest, status_json, parts.dial_back)
        self._rng = rng
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._offers: dict[bytes, asyncio.Task[None]] = {}
        self._poke = asyncio.Event()
        self._may_train = False  # the core said so
        self._training = False
        self.paused = config.training.paused
        self._start_round = 0
        self._own_read: asyncio.Task[None] | None = None  # the latest read of our own block
        self._double_expires_at = 0.0  # of the newest record that somebody else wrote under our identity
        self.rounds_done = asyncio.Event()  # set when `--rounds` are done
        self.announced = asyncio.Event()  # set after the first announcement was stored
        self.fatal: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    # ---- life -------------------------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event, *, fresh: bool) -> None:
        """Serve and train until `stop` is set, then say goodbye. The caller closes the parts."""
        transport = self.parts.transport
        published, state = self.parts.replica.published(), self.parts.replica.state()[1]
        self.parts.server.refresh(published, state)
        self._start_round = published.round
        for kind, handler in (
            (INFO, self._info.handle),
            (EXCHANGE, self._inbound_exchange),
            (STATE, self._donor.handle),
            (SWEEP, self.holder.handle_sweep),
            (LINK, self.holder.handle_link),
        ):
            await transport.serve(kind, handler)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            ticking = tasks.create_task(self._tick(), name="tick")
            self.tell(f.Began(published.round, published.digest, fresh))
            await stop.wait()
            ticking.cancel()
            self._tasks = None
            for task in list(self._running):  # an announcement that is under way must not come after the goodbye
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await self._leave()

    async def _leave(self) -> None:
        for decision in self.core.handle(f.Stopping(), self.clock()):
            if isinstance(decision, f.Announce):
                with contextlib.suppress(TimeoutError, NetworkFault):
                    async with asyncio.timeout(LEAVE_TIMEOUT_S):
                        await self._announce(decision.phase)

    async def _tick(self) -> None:
        while True:
            self._poke.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(MIN_TICK_S, self.core.wake_at() - self.clock())):
                    await self._poke.wait()
            if self.clock() >= self.core.wake_at():
                self.tell(f.Tick())

    async def failure(self) -> BaseException:
        """Waits for what ends the node against its will: training that cannot go on, or a bug."""
        training = asyncio.create_task(self.parts.replica.failed(), name="training failed")
        try:
            await asyncio.wait((self.fatal, training), return_when=asyncio.FIRST_COMPLETED)
            return self.fatal.result() if self.fatal.done() else training.result()
        finally:
            training.cancel()

    # ---- facts in, decisions out ------------------------------------------------------------------------------------------------

    def tell(self, fact: f.Fact) -> None:
        """A fact for the core; its decisions are carried out. On the event loop only; never blocks."""
        self._log(fact)
        if isinstance(fact, f.Published):
            self._published(fact)
        decisions = self.core.handle(fact, self.clock())
        self._events.fact(fact, self.core.phase)
        for decision in decisions:
            self._carry_out(decision)
        self._poke.set()

    def _carry_out(self, decision: f.Decision) -> None:
        match decision:
            case f.SendOffer():
                task = self._spawn(self._offer(decision), f"offer to {short(decision.peer)}")
                if task is not None:
                    self._offers[decision.exchange] = task
            case f.Withdraw():
                task = self._offers.pop(decision.exchange, None)
                if task is not None:
                    task.cancel()
            case f.PublishOwn():
                self._spawn(self._publish_own(decision), "own round")
            case f.Fetch():
                self._spawn(self._fetch(decision), "fetch")
            case f.Train():
                self._train()
            case f.Announce():
                self._spawn(self._announce_quietly(decision.phase), "announce")
            case f.Read():
                task = self._spawn(self._read(decision), f"read block {decision.block}")
                self._own_read = task if decision.block == self.block else self._own_read
            case f.Take() | f.Refuse():
                raise AssertionError("an answer to an offer goes through _inbound_exchange")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None] | None:
        if self._tasks is None:  # stopping: nothing new is begun
            work.close()
            return None
        task = self._tasks.create_task(self._guarded(work, name), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: work.close())  # a task that is cancelled before its first step never awaits it
        return task

    async def _guarded(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """A task's edge: expected faults are talk, anything else ends the node with its reason."""
        try:
            await work
        except (NetworkFault, PeerFault) as fault:
            log.debug("%s: %s", name, fault)
        except Exception as error:
            if not self.fatal.done():
                self.fatal.set_result(error)

    # ---- training and exchanges -------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        self._may_train = True
        self._start_training()

    def resume(self) -> None:
        """Begin to train, where `--paused` held that back."""
        self.paused = False
        self._start_training()

    def _start_training(self) -> None:
        if self._may_train and not self.paused and not self._training:
            self._training = True
            self.parts.replica.start(lambda: self.tell(f.Trained()))

    async def _offer(self, order: f.SendOffer) -> None:
        try:
            await self.exchanger.offer(order)
        finally:
            self._offers.pop(order.exchange, None)

    async def _inbound_exchange(self, stream: Stream) -> None:
        offer, _ = await stream.receive(timeout_s=limits.OPEN_TIMEOUT_S)
        if isinstance(offer, Lane):
            await self.exchanger.lane(offer, stream)
            return
        if not isinstance(offer, Offer):
            raise Malformed(f"{type(offer).__name__} on an exchange stream")
        why = self.exchanger.objection(offer)
        answer: f.Take | f.Refuse = f.Refuse(offer.exchange, stream.peer, why, 3600.0)
        if not why:
            for decision in self.core.handle(f.Offered(stream.peer, offer), self.clock()):
                if isinstance(decision, f.Take | f.Refuse):
                    answer = decision
                else:
                    self._carry_out(decision)
        if isinstance(answer, f.Refuse):
            await stream.send(Decline(offer.exchange, answer.reason, answer.retry_after_s), timeout_s=limits.OPEN_TIMEOUT_S)
            return
        await self.exchanger.take(answer, offer, stream)

    async def _publish_own(self, order: f.PublishOwn) -> None:
        before = self.parts.replica.published().round
        published = await self.parts.replica.publish_own(order.round)
        how = "renumbered" if published.round < before else "own"
        if how == "renumbered":
            log.warning("round %d is one that nobody else believes; our state goes on as one of round %d", before, published.round)
        self._events.note("published", how=how, round=published.round, digest=published.digest)
        self.tell(f.Published(published.round, published.digest))

    def _published(self, fact: f.Published) -> None:
        """The new state is what we serve; `--rounds` counts it."""
        self.parts.server.refresh(*self.parts.replica.state())
        wanted = self.config.training.rounds
        if wanted is not None and fact.round - self._start_round >= wanted:
            self.rounds_done.set()

    async def _fetch(self, order: f.Fetch) -> None:
        replica = self.parts.replica

        async def apply(download: Download) -> Published:
            try:
                loaded = await replica.load(download.payload, download.round, download.digest)
            except PeerFault as fault:
                raise fault.by(download.donor) from None
            self._events.note("published", how="fetched", round=loaded.round, digest=loaded.digest, peer=download.donor)
            return loaded

        want = Want(self.manifest.run, self.block, "block", NO_DIGEST)
        published, failed = await fetch(
            self.parts.transport,
            want,
            order.donors,
            order.round,
            replica.state_bytes,
            at_most=order.most,
            rng=self._rng,
            apply=apply,
        )
        for donor, fault in failed.items():
            if not isinstance(fault, NotNow):
                self.tell(f.Blamed(donor, str(fault), isinstance(fault, PeerFault)))
        if published is None:
            self.tell(f.FetchEnded("; ".join(str(fault) for fault in failed.values()) or "no donor"))
            return
        self.tell(f.Published(published.round, published.digest))
        self.tell(f.FetchEnded(""))

    # ---- the directory ----------------------------------------------------------------------------------------------------------

    async def _announce_quietly(self, phase: str) -> None:
        """Where a read of our block is under way, after it: what another process wrote under our identity would else be gone from sight."""
        if self._own_read is not None and phase != "left":
            await asyncio.wait([self._own_read], timeout=DHT_TIMEOUT_S)
        try:
            await self._announce(phase)
        except (NetworkFault, TimeoutError) as fault:
            log.debug("announcement not stored: %s", fault)

    async def _announce(self, phase: str) -> None:
        now, progress = self.clock(), self.parts.replica.progress()
        published = self.parts.replica.published()
        network = self.config.network
        announcement = Announcement(
            run=self.manifest.run,
            block=self.block,
            phase=phase,
            round=published.round,
            digest=published.digest,
            tokens_per_s=progress.tokens_per_s,
            load=float(self.holder.sessions()),
            protocol_min=limits.PROTOCOL_MIN,
            protocol_max=limits.PROTOCOL_MAX,
            addresses=tuple(self.parts.directory.addresses())[: limits.MAX_ADDRESSES],
        )
        expires_at = now + network.ttl_s
        stored = False
        for bucket in self.core.members.to_announce(self.block, now):
            stored |= await self.parts.directory.announce(announcement, bucket, expires_at=expires_at, timeout_s=DHT_TIMEOUT_S)
        if phase != "left":
            record = RunRecord(self.manifest.run, self.manifest.name, limits.PROTOCOL_MIN, limits.PROTOCOL_MAX)
            await self.parts.directory.announce_run(record, expires_at=expires_at, timeout_s=DHT_TIMEOUT_S)
        if stored and not self.announced.is_set():
            self.announced.set()
            log.info("announced: the swarm knows that we hold block %d", self.block)

    async def _read(self, order: f.Read) -> None:
        seen = []
        try:
            for bucket in order.buckets:
                seen += await self.parts.directory.read_block(self.manifest.run, order.block, bucket, timeout_s=DHT_TIMEOUT_S)
        except (NetworkFault, TimeoutError) as fault:
            log.debug("read of block %d failed: %s", order.block, fault)
        self._look_for_double(seen)
        self.tell(f.Saw(order.block, tuple(seen)))

    def _look_for_double(self, seen: Sequence[Seen]) -> None:
        """Say so where somebody else renews records under our identity from other addresses: a copied key file.

        One such record may be left of an earlier life of ours; a second, later one is not.
        """
        ours = set(self.parts.directory.addresses())
        for each in seen:
            theirs = each.announcement.addresses
            if each.peer != self.me or not theirs or ours & set(theirs):
                continue
            if 0 < self._double_expires_at < each.expires_at - CLASH_MARGIN_S:
                text = f"another node uses our identity {short(self.me)} at {theirs[0]}: both lose connections; give one its own --identity"
                logs.say_once_a_minute(log, logging.WARNING, "double", text)
            self._double_expires_at = max(self._double_expires_at, each.expires_at)

    # ---- talk -------------------------------------------------------------------------------------------------------------------

    def _log(self, fact: f.Fact) -> None:
        match fact:
            case f.Ended(result=result) if result.kind == "merged":
                log.info("round %d: merged with %s in %.1f s", self.core.round, short(fact.peer), fact.took_s)
            case f.Ended(result=result):
                bad = result.kind in ("refused", "one_sided")
                kind, why = result.kind.replace("_", "-"), result.why or "no reason given"
                key = f"{self.me}/{fact.peer}/{kind}/{why.partition(':')[0]}"
                words = f"exchange with {fact.peer if bad else short(fact.peer)} {kind}: {why}"
                # A merge that does not suit us is nobody's fault: an untrained partner's hurts, and so does noise late in a run.
                logs.say_once_a_minute(log, logging.WARNING if result.offence else logging.INFO, key, words)
            case f.FetchEnded(why=""):
                log.info("downloaded the state of round %d", self.core.round)
            case f.FetchEnded(why=why):
                log.warning("state could not be downloaded: %s", why)
            case _:
                pass
