"""Checker: consensus distance falls. Honest replicas of a block end much closer together than their own data would leave them.

The toy's replicas are pulled apart by their data all the time; averaging holds them together. The mean distance between honest
replicas over the second half of the liveness phase must stay below a share of what it is without averaging.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING

from blocktrain.swarm_sim.world.checkers.base import Checker
from blocktrain.swarm_sim.world.compute import LR, Toy
from blocktrain.swarm_sim.world.world import PULL

if TYPE_CHECKING:
    from blocktrain.swarm_sim.world.world import World

SHARE = 0.75  # of the distance without averaging
ROUNDS = 12  # of averaging, before anything is asked
MOST = 16  # replicas of a block that are compared


class Consensus(Checker):
    """Samples the distances near the end."""

    name = "consensus"

    world: World

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._distances: dict[int, list[float]] = {}
        self._from_s = (world.plan.heal_at_s + world.plan.end_s) / 2
        world.watchers.sampled.append(self._sampled)

    def _sampled(self, at_s: float) -> None:
        world = self.world
        if at_s < self._from_s or at_s - world.plan.heal_at_s < ROUNDS * world.plan.round_s:
            return
        for block in range(world.plan.blocks):
            replicas = []
            for node in world.holders(block):
                settled = world.queue.now - node.up_since > ROUNDS * world.plan.round_s * 0.9
                if not node.who.lies and settled and node.round_s <= 2 * world.plan.round_s and isinstance(node.compute, Toy):
                    node.catch_up_steps()
                    replicas.append(node.compute)
            pairs = [a.distance(b) for a, b in combinations(replicas[:MOST], 2)]
            if len(replicas) >= 3:
                self._distances.setdefault(block, []).append(sum(pairs) / len(pairs))

    def finish(self) -> None:
        world = self.world
        steps = world.manifest.schedule.steps_per_round * ROUNDS
        alone = (
            PULL * math.sqrt(6.0) * (1 - (1 - LR) ** steps) * 0.9
        )  # mean distance of two normal points in three dimensions, and then some
        for block, distances in self._distances.items() if not world.plan.hopeless else ():
            mean = sum(distances) / len(distances)
            if not mean <= SHARE * alone:
                self.object(f"replicas of block {block} stay {mean:.3g} apart; averaging should keep them below {SHARE * alone:.3g}")
