"""Checker: every block is held, or reported missing; and what is held is not reported missing by those who could know.

A node's word may lag behind the truth by a record's life, a refresh and the look-ups; across a cut, or with messages lost, it may be
wrong about what is held.
"""

from __future__ import annotations

from blocktrain.swarm_sim.world.checkers.base import Checker
from blocktrain.swarm_sim.world.checkers.scene import Scene


class Coverage(Checker):
    """Looks at every sample at what every settled node says of every block."""

    name = "coverage"

    def __init__(self, world: Scene) -> None:
        super().__init__(world)
        self._held_since: dict[int, float] = {}
        self._lost_since: dict[int, float] = dict.fromkeys(range(world.plan.blocks), 0.0)
        self._lag_s = self.lag_s()
        world.watchers.sampled.append(self._sampled)

    def _sampled(self, at_s: float) -> None:
        world = self.world
        for block in range(world.plan.blocks):
            held = any(not node.frozen for node in world.holders(block))
            if held:
                self._lost_since.pop(block, None)
                self._held_since.setdefault(block, at_s)
            else:
                self._held_since.pop(block, None)
                self._lost_since.setdefault(block, at_s)
        gone = [block for block, since in self._lost_since.items() if at_s - since > self._lag_s and self._nobody_up(block)]
        calm = at_s > world.settled_at_s + self._lag_s
        kept = [block for block, since in self._held_since.items() if at_s - since > self._lag_s] if calm else []
        if not gone and not kept:
            return
        for node in world.alive():
            if node.up_s < self._lag_s or node.phase not in ("training", "serving"):
                continue
            missing = node.missing()
            for block in gone:
                if block not in missing:
                    self.object(
                        f"block {block} has had no holder since {self._lost_since[block]:.0f} s, and node {node.number} does not say so"
                    )
            for block in kept:
                if block in missing:
                    self.object(
                        f"block {block} has been held since {self._held_since[block]:.0f} s, and node {node.number} reports it missing"
                    )

    def _nobody_up(self, block: int) -> bool:
        return not any(node.up and node.block == block for node in self.world.nodes)
