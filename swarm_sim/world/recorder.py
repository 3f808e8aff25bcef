"""What a report shows of a world, sampled as it runs: loss, distance and holders of each block, lives, traffic, latency of a sweep."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Final

from blocktrain.protocol import chains
from blocktrain.protocol.errors import NoPeers
from blocktrain.swarm_sim.world.compute import Compute

if TYPE_CHECKING:
    from blocktrain.swarm_sim.world.node import Node
    from blocktrain.swarm_sim.world.world import World

MOST_COMPARED: Final = 24  # replicas of a block whose states are compared at a sample
HOP_S: Final = 0.008  # of compute, to verify a window (shared recipe's measurement)
BARS: Final = 400  # nodes of a Gantt chart


class Recorder:
    """Attach it to a world before it runs. Everything is kept as lists of (seconds, value)."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._rng = Random(f"{world.seed} recorder")  # looking must not change what is looked at
        blocks = range(world.plan.blocks)
        self.loss: dict[int, list[tuple[float, float]]] = {block: [] for block in blocks}
        self.distance: dict[int, list[tuple[float, float]]] = {block: [] for block in blocks}
        self.held: dict[int, list[tuple[float, float]]] = {block: [] for block in blocks}
        self.bytes_per_node: list[tuple[float, float]] = []
        self.messages_per_node: list[tuple[float, float]] = []
        self.sweep: list[tuple[float, float]] = []
        self.lives: dict[int, list[list[float]]] = {}
        self.counts: dict[str, int] = dict.fromkeys(("merged", "one_sided", "refused", "late", "lost", "declined"), 0)
        self._sent = (0, 0)
        world.watchers.sampled.append(self._sampled)
        world.watchers.started.append(self._started)
        world.watchers.ended.append(self._ended)
        world.watchers.ended_exchange.append(lambda node, peer, result: self._count(result.kind))

    def _count(self, kind: str) -> None:
        self.counts[kind] += 1

    def _started(self, node: Node) -> None:
        if node.number < BARS:
            self.lives.setdefault(node.number, []).append([self.world.elapsed_s, math.inf])

    def _ended(self, node: Node) -> None:
        if node.number < BARS:
            self.lives[node.number][-1][1] = self.world.elapsed_s

    def _sampled(self, at_s: float) -> None:
        world = self.world
        for block in range(world.plan.blocks):
            holders = world.holders(block)
            self.held[block].append((at_s, len(holders)))
            honest = [node for node in holders if not node.who.lies][:MOST_COMPARED]
            for node in honest:
                node.catch_up_steps()
            if honest:
                self.loss[block].append((at_s, sum(node.compute.loss() for node in honest) / len(honest)))
                self.distance[block].append((at_s, spread([node.compute for node in honest])))
        up = max(1, sum(node.up for node in world.nodes))
        sent = sum(node.traffic.sent_bytes for node in world.nodes), sum(node.traffic.messages for node in world.nodes)
        self.bytes_per_node.append((at_s, (sent[0] - self._sent[0]) / up))
        self.messages_per_node.append((at_s, (sent[1] - self._sent[1]) / up))
        self._sent = sent
        self.sweep.append((at_s, self._sweep_s()))

    def _sweep_s(self) -> float:
        """How long one traversal would take along the chain that the first living node plans; NaN where it can't go through."""
        world = self.world
        client = next((node for node in world.alive() if node.core.phase == "training"), None)
        if client is None:
            return math.nan
        own = (client.block, client.peer)
        try:
            chain = chains.plan(client.core.members, world.plan.blocks, client.clock.read(world.queue.now), self._rng, own=own)
        except NoPeers:
            return math.nan
        hops = [world.by_peer[peer].number for peer in chain.peers]
        stops = [client.number, *hops, client.number]
        if not all(world.network.callable(a, b) or a == b for a, b in pairwise(stops)):
            return math.nan
        return sum(world.network.way_s(a, b) for a, b in pairwise(stops) if a != b) + HOP_S * len(hops)


def spread(replicas: list[Compute]) -> float:
    """Mean distance of neighbours in a list: cheap, and for exchangeable replicas as good as that of all pairs."""
    if len(replicas) < 2:
        return 0.0
    return sum(a.distance(b) for a, b in pairwise(replicas)) / (len(replicas) - 1)
