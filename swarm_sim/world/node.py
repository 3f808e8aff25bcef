"""A simulated node: the protocol core that real nodes run, and around it, as event handlers, what node/service.py does with tasks.

Facts go into `Core.handle`, decisions are carried out against the world's network, DHT and compute. Nothing of the protocol is replaced or
patched: this file, talk.py and fetch.py stand where node/service.py, node/exchanger.py and node/catchup.py stand in a process, with
the same deadlines. A process can die (its events are void from then on, and it may come back with its checkpoint) or freeze.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

from blocktrain.protocol import facts as f
from blocktrain.protocol import limits
from blocktrain.protocol.core import Core, Settings
from blocktrain.protocol.ids import Digest, PeerId
from blocktrain.protocol.records import Announcement, Seen
from blocktrain.swarm_sim.world import fetch, talk
from blocktrain.swarm_sim.world.clock import Clock
from blocktrain.swarm_sim.world.compute import Compute, Toy

if TYPE_CHECKING:
    from blocktrain.swarm_sim.world.world import World

DHT_TIMEOUT_S: Final = 8.0  # as in node/service.py
MIN_TICK_S: Final = 0.05
CHECKPOINT_S: Final = 60.0
EXPIRY_STEP_S: Final = 0.001
RECORD_BYTES: Final = 420  # of one announcement on the wire, sealed


@dataclass(slots=True)
class Traffic:
    """What one node sent. A look-up or a store in the DHT is one message; its hops are counted apart."""

    messages: int = 0
    lookups: int = 0
    hops: int = 0
    sent_bytes: int = 0
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Who:
    """What makes a node: whose, which block, how fast, and whether it lies."""

    number: int
    peer: PeerId
    block: int
    round_s: float  # H steps on this computer
    lies: str = ""  # "", or one of talk.LIES
    bootstrap: bool = False


class Node:
    """One node of the world. `number` is also its host's."""

    def __init__(self, world: World, who: Who, compute: Compute, clock: Clock, settings: Settings) -> None:
        self.world = world
        self.who = who
        self.number, self.peer, self.block = who.number, who.peer, who.block
        self.compute = compute
        self.clock = clock
        self.settings = settings
        self.round_s = who.round_s
        self.epoch = 0
        self.frozen = False
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.up = False
        self.up_since = 0.0
        self.thawed_at = 0.0
        self.ever_up = False
        self.traffic = Traffic()
        self.talks: dict[bytes, talk.Side] = {}
        self.serving = 0  # downloads
        self.in_dht = False
        self.last_read_now = 0.0
        self._orders: list[f.Read] = []  # reads that the core ordered in one breath
        self._last_expiry = 0.0
        self.rng = Random(f"{world.seed} node {who.number}")
        self.core = self._new_core()
        self._tick_at = float("inf")
        self._training = False
        self._steps_at = 0.0
        self._round_mark = 0

    def _new_core(self) -> Core:
        return Core(self.peer, self.world.manifest, self.block, self.settings, self.rng)

    # ---- life -------------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The process comes up, for the first time or with its checkpoint."""
        if self.up:
            return
        world = self.world
        self.up, self.frozen, self.in_dht = True, False, False
        self.up_since = world.queue.now
        fresh = not self.ever_up or self.compute.round == 0
        self.core = self._new_core()
        self._tick_at = float("inf")
        self.ever_up = True
        world.dht.nodes += 1
        for watcher in world.watchers.started:
            watcher(self)
        self.tell(f.Began(self.compute.round, self.compute.digest, fresh))
        self.later(CHECKPOINT_S * self.rng.uniform(0.5, 1.0), self._checkpoint)

    def crash(self) -> None:
        """The process is gone at once. What others see of it is the end of their streams."""
        if not self.up:
            return
        self.up = self.frozen = self._training = False
        self.epoch += 1
        self.backlog.clear()
        self.world.dht.nodes -= 1
        talk.died(self)
        self.talks.clear()
        self.serving = 0
        self.compute.restart()
        for watcher in self.world.watchers.ended:
            watcher(self)

    def leave(self) -> None:
        """The user stops it: a tombstone, then the end."""
        if self.up:
            self.tell(f.Stopping())
            self.later(1.0, self.crash)

    def freeze(self) -> None:
        if self.up:
            self.frozen = True
            talk.stalled(self)

    def thaw(self) -> None:
        if self.up and self.frozen:
            self.frozen = False
            self.thawed_at = self.world.queue.now
            waiting, self.backlog = self.backlog, []
            for call, args in waiting:
                self.later(0.0, call, *args)

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call it in this life of the process."""
        queue = self.world.queue
        queue.at(queue.now + delay_s, self, call, *args)

    def read_clock(self) -> float:
        """This node's clock, which never goes back."""
        now = self.clock.read(self.world.queue.now)
        if now < self.last_read_now:
            return self.last_read_now
        self.last_read_now = now
        return now

    # ---- as checkers see it (checkers/scene.py) ---------------------------------------------------------------------------------

    @property
    def liar(self) -> bool:
        return bool(self.who.lies)

    @property
    def up_s(self) -> float:
        return self.world.queue.now - self.up_since

    @property
    def phase(self) -> str:
        return self.core.phase

    @property
    def round(self) -> int:
        return self.compute.round

    @property
    def digest(self) -> bytes:
        return self.compute.digest

    @property
    def accepted(self) -> int:
        return self.core.counters.accepted

    @property
    def overdue_s(self) -> float:
        current = self.core.current
        return 0.0 if current is None else self.read_clock() - current.deadline

    def waiting(self) -> tuple[str, str, float, str]:
        return self.core.waiting(self.read_clock())

    def missing(self) -> tuple[int, ...]:
        return self.core.members.missing(self.clock.read(self.world.queue.now), self.block)

    def known(self, block: int) -> set[int]:
        holders = self.core.members.holders(block, self.clock.read(self.world.queue.now))
        return {self.world.by_peer[member.peer].number for member in holders}

    # ---- facts in, decisions out ------------------------------------------------------------------------------------------------

    def tell(self, fact: f.Fact) -> None:
        """A fact for the core; its decisions are carried out."""
        for decision in self.decide(fact):
            self.carry_out(decision)
        if self._orders:
            self._read()
        self._plan_tick()

    def decide(self, fact: f.Fact) -> list[f.Decision]:
        trace = self.world.trace
        if trace is None:
            return self.core.handle(fact, self.read_clock())
        trace.fact(self, fact)
        decisions = self.core.handle(fact, self.read_clock())
        trace.decisions(self, decisions)
        return decisions

    def carry_out(self, decision: f.Decision) -> None:
        match decision:
            case f.Read():
                self._orders.append(decision)
            case f.Announce():
                self._announce(decision.phase)
            case f.SendOffer():
                talk.offer(self, decision)
            case f.PublishOwn():
                self.catch_up_steps()
                self.compute.publish_own(decision.round)
                self.new_round()
                self.published("own" if decision.round is None else "renumbered")
            case f.Train():
                if not self._training:
                    self._training = True
                    self._steps_at = self.world.queue.now
                    self.new_round()
            case f.Fetch():
                fetch.begin(self, decision)
            case f.Withdraw():
                talk.withdraw(self, decision.exchange)
            case f.Take() | f.Refuse():
                raise AssertionError("an answer to an offer goes through talk.py")

    def published(self, how: str, donor: PeerId | None = None) -> None:
        """The published state changed: tell the core and whoever watches."""
        for watcher in self.world.watchers.published:
            watcher(self, how, donor)
        self.tell(f.Published(self.compute.round, Digest(self.compute.digest)))

    def _plan_tick(self) -> None:
        """The core's next tick, at the time it asks for."""
        wake = self.core.wake_at()
        if wake < self._tick_at:
            self._tick_at = wake
            queue = self.world.queue
            queue.at(max(queue.now + MIN_TICK_S, self.clock.true(wake) + 1e-5), self, self._tick, wake)

    def _tick(self, planned: float) -> None:
        if planned != self._tick_at:
            return  # an earlier one took its place
        self._tick_at = float("inf")
        if self.read_clock() >= self.core.wake_at():
            self.tell(f.Tick())
        else:
            self._plan_tick()

    # ---- training ---------------------------------------------------------------------------------------------------------------

    def catch_up_steps(self) -> None:
        """Do the steps that the training thread has done by now."""
        if self._training:
            step_s = self.round_s / self.world.manifest.schedule.steps_per_round
            steps = int((self.world.queue.now - self._steps_at) / step_s + 1e-9)
            self._steps_at += steps * step_s
            self.compute.train(steps)

    def new_round(self) -> None:
        """Steps are counted from here: the next `Trained` comes after H of them."""
        self._round_mark += 1
        if self._training:
            self.later(self.round_s, self._trained, self._round_mark)

    def _trained(self, mark: int) -> None:
        if mark == self._round_mark:
            self.later(self.round_s, self._trained, mark)
            self.tell(f.Trained())

    def _checkpoint(self) -> None:
        if isinstance(self.compute, Toy):
            self.compute.save()
        self.later(CHECKPOINT_S, self._checkpoint)

    # ---- the directory ----------------------------------------------------------------------------------------------------------

    def _announce(self, phase: str) -> None:
        world, now = self.world, self.read_clock()
        numbers = self.core.members.to_announce(self.block, now)
        word = Announcement(world.run_id, self.block, phase, self.compute.round + talk.tale(self), self.compute.digest, 100.0, 0.0, 1, 1)
        expires_at = max(now + self.settings.ttl_s, self._last_expiry + EXPIRY_STEP_S)
        self._last_expiry = expires_at
        self._count_dht(len(numbers) + (phase != "left"))
        self.traffic.sent_bytes += RECORD_BYTES * (len(numbers) + 1)
        took_s = self._lookup_s()
        if took_s is not None:
            self.later(took_s, self._store, numbers, Seen(self.peer, word, expires_at))

    def _store(self, numbers: list[int], seen: Seen) -> None:
        dht, now = self.world.dht, self.world.queue.now
        for number in numbers:
            dht.store((self.block, number), seen, self.number, now)

    def _read(self) -> None:
        """Carry out the reads that were ordered together; they run side by side, and here they end together."""
        orders, self._orders = self._orders, []
        self._count_dht(sum(len(order.buckets) for order in orders))
        took_s = self._lookup_s()
        if took_s is None:
            self.later(DHT_TIMEOUT_S, self._read_failed, orders)
        else:
            self.later(took_s * max(len(order.buckets) for order in orders), self._saw, orders)

    def _read_failed(self, orders: list[f.Read]) -> None:
        for order in orders:
            self.tell(f.Saw(order.block, ()))

    def _saw(self, orders: list[f.Read]) -> None:
        dht, now, number = self.world.dht, self.world.queue.now, self.number
        count = 0
        for order in orders:
            block, buckets = order.block, order.buckets
            records = dht.read((block, buckets[0]), number, now)
            for bucket in buckets[1:]:
                records += dht.read((block, bucket), number, now)
            count += len(records)
            for decision in self.decide(f.Saw(block, records)):
                self.carry_out(decision)
        self.traffic.read_bytes += RECORD_BYTES * count
        if self._orders:
            self._read()
        self._plan_tick()

    def _count_dht(self, count: int) -> None:
        traffic = self.traffic
        traffic.messages += count
        traffic.lookups += count
        traffic.hops += count * self.world.hops

    def _lookup_s(self) -> float | None:
        """How long one look-up takes now; None where the DHT can't be reached from here."""
        world = self.world
        if not self.in_dht:
            self.in_dht = world.can_enter_dht(self)
            if not self.in_dht:
                return None
        other = world.rng.randrange(len(world.nodes))
        return world.hops * 2 * world.network.way_s(self.number, other)


def frame_count(size: int) -> int:
    """Frames of a bulk transfer."""
    return -(-size // limits.CHUNK_BYTES)
