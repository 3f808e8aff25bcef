"""Checker: every node's wait has a reason, and an end. No exchange, download or first look lasts beyond its deadline."""

from __future__ import annotations

from blocktrain.protocol import limits
from blocktrain.swarm_sim.world.checkers.base import Checker
from blocktrain.swarm_sim.world.checkers.scene import Scene
from blocktrain.swarm_sim.world.talk import OUTCOME_TIMEOUT_S

SLACK_S = 5.0
JOINING_S = 120.0  # without a word from the DHT at all


class Waits(Checker):
    """Asks every node at every sample what it waits for."""

    name = "waits"

    def __init__(self, world: Scene) -> None:
        super().__init__(world)
        world.watchers.sampled.append(self._sampled)

    def _sampled(self, at_s: float) -> None:
        for node in self.world.alive():
            if node.up_s < 1.0:
                continue
            phase, why, seconds, then = node.waiting()
            if not (phase and why and then):
                self.object(f"node {node.number} waits without a word: {(phase, why, then)}")
            overdue_s = node.overdue_s
            if overdue_s > OUTCOME_TIMEOUT_S + limits.OPEN_TIMEOUT_S + SLACK_S:
                self.object(f"node {node.number} has waited {overdue_s:.0f} s beyond its exchange's deadline")
            if phase == "fetching" and seconds > limits.STATE_TIMEOUT_S + SLACK_S:
                self.object(f"node {node.number} has been fetching for {seconds:.0f} s")
            if phase == "joining" and seconds > JOINING_S and node.in_dht:
                self.object(f"node {node.number} has been joining for {seconds:.0f} s: {why}")
