"""Checker: averaging holds a block together. Honest replicas end much closer together than training alone would leave them.

What the protocol promises: over the second half of the liveness phase, the mean distance between honest replicas of a block that train at
the usual speed is at most `SHARE` of what the block's honest replicas would have come apart in `ROUNDS` rounds without averaging. That is
no constant: it depends on how far apart their data pull these replicas, and on how slow the slowest of them are, since who averages with
one that lags is drawn back by it. The toy is exact, so it is computed, at every look: all honest holders begin where the middle of the
usual ones was, and each trains alone for as long as `ROUNDS` usual rounds take.

It does not promise that any two of them are close at any moment: partners are drawn by chance, and in a block of four of which one takes
ten times longer for an exchange, one of the others may have met only the slow one for some rounds. Of 4000 stories the middle block
comes to 0.13 and the worst to 0.62 (behind NATs that let only one of four be called); without averaging 567 of 572 are above `SHARE`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from blocktrain.swarm_sim.world.checkers.base import Checker
from blocktrain.swarm_sim.world.compute import Toy

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
        self._distances: dict[int, list[tuple[float, float]]] = {}  # block → at each look: as they are, as they would be alone
        self._from_s = (world.plan.heal_at_s + world.plan.end_s) / 2
        world.watchers.sampled.append(self._sampled)

    def _sampled(self, at_s: float) -> None:
        world, round_s = self.world, self.world.plan.round_s
        if at_s < self._from_s or at_s - world.plan.heal_at_s < ROUNDS * round_s:
            return
        steps = world.manifest.schedule.steps_per_round * ROUNDS
        for block in range(world.plan.blocks):
            usual: list[Toy] = []
            everybody: list[tuple[Toy, float]] = []  # and the steps of its own that it does meanwhile
            for node in world.holders(block):
                if node.who.lies or not isinstance(node.compute, Toy):
                    continue
                node.catch_up_steps()
                everybody.append((node.compute, steps * round_s / node.round_s))
                if node.round_s <= 2 * round_s and world.queue.now - node.up_since > ROUNDS * round_s * 0.9:
                    usual.append(node.compute)
            if len(usual) >= 3:
                middle = _middle([replica.live for replica in usual])
                start = _middle([replica.alone(middle, -steps) for replica in usual])
                alone = [replica.alone(start, own_steps) for replica, own_steps in everybody[:MOST]]
                together = [replica.live for replica in usual[:MOST]]
                self._distances.setdefault(block, []).append((_apart(together), _apart(alone)))

    def finish(self) -> None:
        for block, distances in self._distances.items() if not self.world.plan.hopeless else ():
            together, alone = (sum(each) / len(distances) for each in zip(*distances, strict=True))
            if not together <= SHARE * alone:
                self.object(f"replicas of block {block} stay {together:.3g} apart; averaging should keep them below {SHARE * alone:.3g}")


def _middle(states: Sequence[Sequence[float]]) -> list[float]:
    return [sum(axis) / len(states) for axis in zip(*states, strict=True)]


def _apart(states: Sequence[Sequence[float]]) -> float:
    """The mean distance of all pairs."""
    pairs = [math.dist(a, b) for a, b in combinations(states, 2)]
    return sum(pairs) / len(pairs)
