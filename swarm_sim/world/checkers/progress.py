"""Checker: progress after healing. In the liveness phase everybody who is up trains on.

And averages, wherever there is an honest replica to average with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blocktrain.swarm_sim.world.checkers.base import Checker

if TYPE_CHECKING:
    from blocktrain.swarm_sim.world.node import Node
    from blocktrain.swarm_sim.world.world import World

GRACE_ROUNDS = 5.0
GRACE_S = 90.0


class Progress(Checker):
    """Notes where everybody stands some rounds after healing, and compares at the end."""

    name = "progress"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._start: dict[int, tuple[int, int, int]] = {}  # number → epoch, round, accepted
        self._from_s = (world.plan.heal_at_s + world.plan.end_s) / 2
        world.watchers.sampled.append(self._sampled)

    def _sampled(self, at_s: float) -> None:
        if at_s >= self._from_s and not self._start:
            self._start = {n.number: (n.epoch, n.core.round, n.core.counters.accepted) for n in self.world.alive() if self._settled(n)}

    def _settled(self, node: Node) -> bool:
        return self.world.queue.now - node.up_since > GRACE_S

    def finish(self) -> None:
        world = self.world
        seconds = world.plan.end_s - self._from_s
        here = [node for node in world.alive() if node.number in self._start and self._start[node.number][0] == node.epoch]
        for node in here:
            _, round, accepted = self._start[node.number]
            rounds = seconds / node.round_s
            if rounds < GRACE_ROUNDS:
                continue
            if node.core.phase != "training":
                self.object(f"node {node.number} is {node.core.phase} in the end: {node.core.waiting(node.read_clock())[1]}")
            elif node.core.round <= round:
                self.object(f"node {node.number} stayed at round {round} for {seconds:.0f} s")
            honest = [n for n in here if n.block == node.block and not n.who.lies and n is not node]
            if (
                honest
                and not world.plan.hopeless
                and not node.who.lies
                and node.core.counters.accepted == accepted
                and self._can_meet(node, honest)
            ):
                self.object(f"node {node.number} averaged with nobody for {seconds:.0f} s, with {len(honest)} honest replicas around")

    def _can_meet(self, node: Node, others: list[Node]) -> bool:
        network = self.world.network
        return any(network.callable(node.number, n.number) or network.callable(n.number, node.number) for n in others)
