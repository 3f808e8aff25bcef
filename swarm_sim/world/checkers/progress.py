"""Checker: progress after healing. In the liveness phase everybody who is up trains on.

And averages, wherever there is an honest replica to average with.
"""

from __future__ import annotations

from blocktrain.swarm_sim.world.checkers.base import Checker
from blocktrain.swarm_sim.world.checkers.scene import Actor, Scene

GRACE_ROUNDS = 5.0


class Progress(Checker):
    """Notes where everybody stands some rounds after healing, and compares at the end."""

    name = "progress"

    def __init__(self, world: Scene) -> None:
        super().__init__(world)
        self._start: dict[int, tuple[int, int, int]] = {}  # number → epoch, round, accepted
        self._from_s = (world.plan.heal_at_s + world.plan.end_s) / 2
        world.watchers.sampled.append(self._sampled)
        world.watchers.published.append(self._published)

    def _published(self, node: Actor, how: str, donor: str | None) -> None:
        """One that is renumbered (order.py) has come further, and counts from another number."""
        if how == "renumbered" and node.number in self._start:
            epoch, _, accepted = self._start[node.number]
            self._start[node.number] = epoch, node.round - 1, accepted

    def _sampled(self, at_s: float) -> None:
        if at_s >= self._from_s and not self._start:
            self._start = {n.number: (n.epoch, n.round, n.accepted) for n in self.world.alive() if self._settled(n)}

    def _settled(self, node: Actor) -> bool:
        return node.up_s > self.world.plan.grace_s

    def finish(self) -> None:
        world = self.world
        seconds = world.plan.end_s - self._from_s
        here = [node for node in world.alive() if node.number in self._start and self._start[node.number][0] == node.epoch]
        for node in here:
            _, round, accepted = self._start[node.number]
            rounds = seconds / node.round_s
            if rounds < GRACE_ROUNDS:
                continue
            phase, what, phase_s, _ = node.waiting()
            just_begun = phase == node.phase and phase_s <= node.round_s  # a download in the last seconds is no end
            if node.phase != "training" and not just_begun:
                self.object(f"node {node.number} is {node.phase} in the end: {what}")
            elif node.round <= round:
                self.object(f"node {node.number} stayed at round {round} for {seconds:.0f} s")
            honest = [n for n in here if n.block == node.block and not n.liar and n is not node]
            if (
                honest
                and not world.plan.hopeless
                and not node.liar
                and node.accepted == accepted
                and any(world.can_meet(node.number, n.number) for n in honest)
            ):
                self.object(f"node {node.number} averaged with nobody for {seconds:.0f} s, with {len(honest)} honest replicas around")
