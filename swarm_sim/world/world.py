"""The world: hosts, links, DHT, nodes and what befalls them, stepped event by event in virtual time.

Why direct stepping of the core, and not an asyncio loop with virtual time under node/service.py: the decisions are all in the core, which
is synchronous, so stepping it needs no tasks; a thousand nodes for an hour are some two million events, and an event here costs a
function call, where a task costs ten; and determinism is a property of one heap instead of one of every library under an event loop.
The price is that the I/O around the core (node/service.py, exchanger.py, catchup.py) is modelled, in node.py, talk.py and fetch.py;
`blocktrain-sim local` is where the real one runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from blocktrain.protocol import facts as f
from blocktrain.protocol.core import Settings
from blocktrain.protocol.exchange import Result
from blocktrain.protocol.ids import Digest, PeerId, peer_id_of_key, short
from blocktrain.protocol.manifest import Manifest, Model, Noise, Optimizer, Schedule
from blocktrain.swarm_sim.world import dht, talk
from blocktrain.swarm_sim.world.clock import EPOCH_S, Clock, Queue
from blocktrain.swarm_sim.world.compute import DIM, Compute, Mixed, Toy
from blocktrain.swarm_sim.world.links import Host, Network
from blocktrain.swarm_sim.world.node import Node, Who, frame_count
from blocktrain.swarm_sim.world.plan import Event, Person, Plan

SETTLE_S: Final = 0.3  # to verify, merge and measure
PULL: Final = 1.0  # of a replica's own data away from the optimum
BOOTSTRAPS: Final = 1  # of the first nodes: those that everybody is given as --initial-peers

Build = Callable[[Manifest, int, int], Compute]  # (manifest, block, node's number) → a replica


def manifest_of(blocks: int) -> Manifest:
    """The run of a world: only its schedule and its number of blocks matter to the core."""
    return Manifest(
        format=1, name="world", blocks=blocks, objective="evidence", tokenizer="bytes", seed=0,
        model=Model(32, 1, 2, 32, 256), noise=Noise(0.2, 4.0, 0.1, 0.25), schedule=Schedule(20, 4e-3, 3, 100, 0.1),
        optimizer=Optimizer(8, 1, 0.9, 0.95, 0.05, 1.0, 20),
    )  # fmt: skip


@dataclass
class Watchers:
    """Who is told of what. Lists of functions, so that a world without checkers pays nothing."""

    started: list[Callable[[Node], None]] = field(default_factory=list)
    ended: list[Callable[[Node], None]] = field(default_factory=list)
    published: list[Callable[[Node, str, PeerId | None], None]] = field(default_factory=list)
    adopted: list[Callable[[talk.Side, talk.Side, Mixed], None]] = field(default_factory=list)
    loaded: list[Callable[[Node, Node, bytes, Digest], None]] = field(default_factory=list)
    ended_exchange: list[Callable[[Node, Node, Result], None]] = field(default_factory=list)
    sampled: list[Callable[[float], None]] = field(default_factory=list)


class Trace:
    """Everything that a core heard and decided, as lines; their digest is what two runs of one seed must share."""

    def __init__(self, *, keep: bool) -> None:
        self.lines: list[str] = []
        self.count = 0
        self._keep = keep
        self._hash = hashlib.sha256()

    def fact(self, node: Node, fact: f.Fact) -> None:
        self.add(node, f"> {_told(fact)}")

    def decisions(self, node: Node, decisions: Sequence[f.Decision]) -> None:
        for decision in decisions:
            self.add(node, f"< {_told(decision)}")

    def add(self, node: Node, text: str) -> None:
        line = f"{node.world.elapsed_s:.6f} {node.number} {text}"
        self.count += 1
        self._hash.update(line.encode())
        if self._keep:
            self.lines.append(line)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def _told(item: f.Fact | f.Decision) -> str:
    """A fact or a decision in one short line."""
    name = type(item).__name__
    match item:
        case f.Saw():
            records = [(short(seen.peer), seen.announcement.round, round(seen.expires_at, 3)) for seen in item.records]
            return f"{name} block {item.block}: {records}"
        case f.Offered():
            return f"{name} by {short(item.peer)}, round {item.offer.round}"
        case f.Ended():
            return f"{name} {short(item.peer)}: {item.result.kind} {item.result.why} after {item.took_s:.6f}"
        case f.Published():
            return f"{name} {item.round} {item.digest.hex()[:12]}"
        case f.PublishOwn(round=int()):
            return f"{name} as {item.round}"
        case f.SendOffer() | f.Take() | f.Refuse():
            return f"{name} {short(item.peer)} {getattr(item, 'reason', '')}"
        case _:
            return f"{name} {getattr(item, 'phase', '')}{getattr(item, 'buckets', '')}{getattr(item, 'why', '')}"


class World:
    """One story. `run(until_s)` steps it; what happens can be watched."""

    def __init__(
        self, plan: Plan, seed: int, *, trace: Trace | None = None, build: Build | None = None, manifest: Manifest | None = None
    ) -> None:
        self.plan = plan
        self.seed = seed
        self.trace = trace
        self.rng = Random(f"{seed} world")
        self.queue = Queue()
        self.manifest = manifest or manifest_of(plan.blocks)
        self.run_id = self.manifest.run  # digested once
        self.watchers = Watchers()
        self.state_bytes = plan.state_bytes
        self.exchange_bytes = plan.state_bytes // 2  # bf16
        self.exchange_frames = frame_count(self.exchange_bytes)
        self.settle_s = SETTLE_S
        self.hops = 1
        self.network = Network([self._host(person) for person in plan.people], self.rng)
        self.network.loss = plan.loss
        self.dht = dht.Dht(self.network)
        self.nodes = self._nodes(build)
        self.by_peer = {node.peer: node for node in self.nodes}
        self.settled_at_s = plan.heal_at_s
        for event in plan.events:
            self.queue.at(EPOCH_S + event.at_s, None, self.befall, event)
        self.queue.at(EPOCH_S + plan.heal_at_s, None, self.heal)
        self.queue.at(EPOCH_S, None, self._count_hops)

    @property
    def elapsed_s(self) -> float:
        return self.queue.now - EPOCH_S

    def _host(self, person: Person) -> Host:
        spread = self.plan.spread_s
        return Host(self.rng.uniform(0, spread), self.rng.uniform(0, spread), person.up, person.down, person.nat, person.relayed)

    def _nodes(self, build: Build | None) -> list[Node]:
        plan = self.plan
        pulls = _pulls(plan, Random(f"{self.seed} pulls"))
        optimum = [Random(f"{self.seed} optimum {block}").uniform(-5, 5) for block in range(plan.blocks)]
        schedule, optimizer = self.manifest.schedule, self.manifest.optimizer
        nodes = []
        for number, person in enumerate(plan.people):
            peer = peer_id_of_key(hashlib.sha256(f"{self.seed} {number}".encode()).digest())
            who = Who(number, peer, person.block, plan.round_s * person.speed, person.lies, number < BOOTSTRAPS)
            compute: Compute = (
                build(self.manifest, person.block, number)
                if build
                else Toy(
                    [optimum[person.block]] * DIM, pulls[number], schedule.steps_per_round, optimizer.batch * self.manifest.model.context
                )
            )
            settings = Settings(
                ttl_s=plan.ttl_s, refresh_s=plan.refresh_s, tau_s=plan.tau_s, topology=plan.topology, expects_peers=number >= BOOTSTRAPS
            )
            nodes.append(Node(self, who, compute, Clock(person.skew_s, person.drift), settings))
        return nodes

    # ---- time -------------------------------------------------------------------------------------------------------------------

    def run(self, until_s: float | None = None) -> None:
        """Up to `until_s` after the beginning; to the plan's end without it."""
        self.queue.run(EPOCH_S + (self.plan.end_s if until_s is None else until_s))

    def sample_every(self, seconds: float) -> None:
        """Call `watchers.sampled` now and then."""

        def sample() -> None:
            for watcher in self.watchers.sampled:
                watcher(self.elapsed_s)
            self.queue.at(self.queue.now + seconds, None, sample)

        self.queue.at(self.queue.now, None, sample)

    def _count_hops(self) -> None:
        self.hops = dht.hops(self.dht.nodes)
        self.queue.at(self.queue.now + 5.0, None, self._count_hops)

    # ---- what befalls nodes -----------------------------------------------------------------------------------------------------

    def befall(self, event: Event) -> None:
        """Let an event happen. What makes no sense any more (a dead node is killed) does nothing."""
        network, hosts = self.network, self.network.hosts
        match event.kind:
            case "cut":
                network.partition(event.who)
                self.dht.cut_at = self.queue.now
                for node in self.nodes:
                    for side in list(node.talks.values()):
                        if not network.connected(node.number, self.by_peer[side.exchange.peer].number):
                            talk.stall(side)
            case "join-net":
                for host in hosts:
                    host.side = 0
                network.split = False
            case "loss":
                network.loss = event.value
            case _:
                for number in event.who:
                    self._befall_one(self.nodes[number], event)

    def _befall_one(self, node: Node, event: Event) -> None:
        host = self.network.hosts[node.number]
        match event.kind:
            case "start":
                host.gone = False
                node.start()
            case "crash":
                node.crash()
            case "vanish":
                host.gone = True
                node.crash()
            case "leave":
                node.leave()
            case "freeze":
                node.freeze()
            case "thaw":
                node.thaw()
            case "clog":
                host.clog_s = event.value
            case "slow":
                node.round_s = self.plan.round_s * event.value

    def heal(self) -> None:
        """The end of the safety phase: the net is whole, everybody thaws, and those that the plan names come back."""
        self.network.heal()
        for node in self.nodes:
            node.thaw()
        for number in self.plan.revived:
            self.network.hosts[number].gone = False
            self.nodes[number].start()

    # ---- what is true -----------------------------------------------------------------------------------------------------------

    def alive(self) -> list[Node]:
        """Who is up and moves. Who thaws at this very moment has not yet heard what came meanwhile."""
        return [node for node in self.nodes if node.up and not node.frozen and node.thawed_at < self.queue.now]

    def holders(self, block: int) -> list[Node]:
        """Who truly holds a block now: up, past joining, and seen by the others in principle."""
        return [node for node in self.nodes if node.up and node.block == block and node.core.phase in ("training", "serving")]

    @property
    def skew_s(self) -> float:
        """The most by which a clock is off, at any time of the story."""
        return max((abs(node.clock.skew_s) + abs(node.clock.drift) * self.plan.end_s for node in self.nodes), default=0.0)

    def lies(self, peer: str) -> bool:
        return self.by_peer[PeerId(peer)].liar

    def can_meet(self, one: int, other: int) -> bool:
        """Whether one of two nodes can call the other."""
        return self.network.callable(one, other) or self.network.callable(other, one)

    def can_enter_dht(self, node: Node) -> bool:
        """Whether a process that just started finds its way in: through an initial peer, or an address that it remembers from before."""
        if node.number < BOOTSTRAPS:
            return True
        known: Sequence[int] = range(BOOTSTRAPS)
        if node.epoch:  # it was in the swarm before: the addresses in its store
            known = range(len(self.nodes))
        return any(self.nodes[number].up and self.network.connected(node.number, number) for number in known if number != node.number)


def _pulls(plan: Plan, rng: Random) -> list[list[float]]:
    """Where each replica's data pulls it; over a block they sum to zero."""
    pulls = [[rng.gauss(0, PULL) for _ in range(DIM)] for _ in plan.people]
    for block in range(plan.blocks):
        members = [number for number, person in enumerate(plan.people) if person.block == block]
        for axis in range(DIM):
            mean = sum(pulls[number][axis] for number in members) / max(1, len(members))
            for number in members:
                pulls[number][axis] -= mean
    return pulls
