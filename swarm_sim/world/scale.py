"""How a swarm's costs grow from ten nodes to ten thousand: the same world, quiet, at a real node's settings, with a few probes.

Probes: a newcomer starts and is timed until others list it and until it has averaged; a node loses power and is timed until nobody lists
it; all replicas of a block are pushed apart and timed until averaging has taken nine tenths of that distance away.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Final

from blocktrain.protocol import limits
from blocktrain.swarm_sim.world.compute import DIM, Toy
from blocktrain.swarm_sim.world.node import Node
from blocktrain.swarm_sim.world.plan import Event, Person, Plan
from blocktrain.swarm_sim.world.recorder import spread
from blocktrain.swarm_sim.world.world import World

BLOCKS: Final = 4  # as in the paper's asynchrony experiments
ROUND_S: Final = 30.0
REFRESH_S: Final = limits.REFRESH_S
LISTED_BY: Final = 8  # replicas that must list a newcomer
WATCHED: Final = 40  # who knew a dead node
KICK: Final = 6.0  # by which replicas are pushed apart
STEP_S: Final = 1.0
PROBE_S: Final = 240.0  # after which a probe is given up


@dataclass(frozen=True)
class Timing:
    """When what happens, in virtual seconds."""

    join_s: float = 30.0  # over which everybody starts
    settled_s: float = 150.0  # when counting begins: every level of the keys' tree has been found by then
    window_s: float = 60.0  # of counting


TIMING: Final = Timing()


@dataclass(frozen=True)
class Growth:
    """What was measured at one size. None: it did not come to pass in time."""

    nodes: int
    messages: float  # a node and round; a look-up counts as one
    lookups: float
    hops: float  # of all look-ups of a node in a round, as modelled
    sent_bytes: float
    records_read: float
    seen_s: float | None
    met_s: float | None
    forgotten_s: float | None
    mixing_rounds: float | None


@contextmanager
def without_collector() -> Iterator[None]:
    """A world makes millions of objects and no cycles: looking for them would take a tenth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def quiet(nodes: int, blocks: int, seconds: float, seed: int, *, extra: int = 0, join_s: float = TIMING.join_s) -> World:
    """Ordinary homes that all stay; `extra` nodes are there but not started."""
    rng = Random(f"{seed} quiet {nodes}")
    people = [
        Person(number % blocks, rng.uniform(0.95, 1.05), rng.uniform(2e6, 2.5e7), rng.uniform(5e6, 5e7), skew_s=rng.uniform(-0.3, 0.3))
        for number in range(nodes + extra)
    ]
    events = [Event(0.0, "start", (0,)), *(Event(rng.uniform(0.5, join_s), "start", (number,)) for number in range(1, nodes))]
    plan = Plan(tuple(people), tuple(events), blocks, seconds, seconds, round_s=ROUND_S, refresh_s=REFRESH_S)
    return World(plan, seed)


def virtual_time(nodes: int, blocks: int, seconds: float, seed: int) -> float:
    """Processor seconds that so many virtual seconds take, start included."""
    with without_collector():
        began = time.process_time()
        quiet(nodes, blocks, seconds, seed).run()
        return time.process_time() - began


def grow(nodes: int, seed: int, *, probes: bool = True, timing: Timing = TIMING) -> Growth:
    """Measure one size."""
    blocks = min(BLOCKS, max(1, nodes // 3))
    with without_collector():
        counted_s = timing.settled_s + timing.window_s
        world = quiet(nodes, blocks, counted_s + 4 * PROBE_S, seed, extra=1, join_s=timing.join_s)
        world.run(timing.settled_s)
        before = _sums(world)
        world.run(counted_s)
        rounds = timing.window_s / ROUND_S
        messages, lookups, hops, sent, read = ((b - a) / nodes / rounds for a, b in zip(before, _sums(world), strict=True))
        seen_s = met_s = forgotten_s = mixing = None
        if probes:
            seen_s, met_s = _newcomer(world, world.nodes[nodes])
            forgotten_s = _dead(world, world.nodes[nodes - 1])
            mixing = _mixing(world, 0)
        return Growth(nodes, messages, lookups, hops, sent, read, seen_s, met_s, forgotten_s, mixing)


def _sums(world: World) -> tuple[float, ...]:
    traffic = [node.traffic for node in world.nodes]
    return (
        sum(t.messages for t in traffic),
        sum(t.lookups for t in traffic),
        sum(t.hops for t in traffic),
        sum(t.sent_bytes for t in traffic),
        sum(t.read_bytes for t in traffic) / 420,
    )


def _lists(node: Node, other: Node) -> bool:
    return any(member.peer == other.peer for member in node.core.members.holders(other.block, node.read_clock()))


def _newcomer(world: World, node: Node) -> tuple[float | None, float | None]:
    """Seconds until enough replicas list it, and until its first merge."""
    began = world.elapsed_s
    node.start()
    mates = [other for other in world.alive() if other.block == node.block and other is not node]
    seen_s: float | None = None
    while world.elapsed_s < began + PROBE_S:
        world.run(world.elapsed_s + STEP_S)
        if seen_s is None and _at_least(mates, node, min(LISTED_BY, len(mates))):
            seen_s = world.elapsed_s - began
        if seen_s is not None and node.core.counters.accepted:
            return seen_s, world.elapsed_s - began
    return seen_s, None


def _at_least(mates: list[Node], node: Node, wanted: int) -> bool:
    listed = 0
    for mate in mates:
        listed += _lists(mate, node)
        if listed >= wanted:
            return True
    return False


def _dead(world: World, node: Node) -> float | None:
    """Seconds until none of those who listed it does."""
    knew = [other for other in world.alive() if other is not node and other.block == node.block and _lists(other, node)][:WATCHED]
    began = world.elapsed_s
    world.befall(Event(0.0, "vanish", (node.number,)))
    while world.elapsed_s < began + PROBE_S:
        world.run(world.elapsed_s + STEP_S)
        knew = [other for other in knew if _lists(other, node)]
        if not knew:
            return world.elapsed_s - began
    return None


def _mixing(world: World, block: int) -> float | None:
    """Rounds until nine tenths of a distance between all replicas of a block are averaged away."""
    rng = Random(f"{world.seed} kick")
    replicas = [node for node in world.holders(block) if isinstance(node.compute, Toy)]
    if len(replicas) < 2:
        return None
    for node in replicas:
        node.catch_up_steps()
    calm = spread([node.compute for node in replicas])
    for node in replicas:
        assert isinstance(node.compute, Toy)
        node.compute.kick([rng.gauss(0, KICK) for _ in range(DIM)])
    apart = spread([node.compute for node in replicas])
    began = world.elapsed_s
    while world.elapsed_s < began + PROBE_S * 2:
        world.run(world.elapsed_s + STEP_S * 5)
        for node in replicas:
            node.catch_up_steps()
        if spread([node.compute for node in replicas]) - calm <= 0.1 * (apart - calm):
            return (world.elapsed_s - began) / ROUND_S
    return None
