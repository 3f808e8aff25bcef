"""Checker: views converge after healing. In the end everybody who is up knows whom it must know, and nobody who is long gone.

In a small swarm that is everybody; in a crowded block, whose holders are spread over many keys, so many partners that averaging mixes.
"""

from __future__ import annotations

from blocktrain.protocol.buckets import PER_BUCKET
from blocktrain.swarm_sim.world.checkers.base import Checker
from blocktrain.swarm_sim.world.checkers.scene import Actor, Scene

ENOUGH = 8  # partners of a crowded block


class Views(Checker):
    """Compares views with the truth at the story's end."""

    name = "views"

    def __init__(self, world: Scene) -> None:
        super().__init__(world)
        self._lag_s = self.lag_s()
        self._gone_since: dict[int, float] = {}
        world.watchers.ended.append(self._ended)
        world.watchers.started.append(self._started)

    def _started(self, node: Actor) -> None:
        self._gone_since.pop(node.number, None)

    def _ended(self, node: Actor) -> None:
        self._gone_since[node.number] = self.world.elapsed_s

    def finish(self) -> None:
        world = self.world
        settled = {n.number: n for n in world.alive() if n.up_s > self._lag_s}
        gone = {number for number, since in self._gone_since.items() if world.elapsed_s - since > self._lag_s}
        for node in settled.values():
            for block in range(world.plan.blocks):
                known = node.known(block)
                truth = {number for number, other in settled.items() if other.block == block} - {node.number}
                for number in sorted(known & gone):
                    self.object(f"node {node.number} still counts node {number}, gone since {self._gone_since[number]:.0f} s")
                if len(truth) <= PER_BUCKET:
                    if truth - known:
                        self.object(f"node {node.number} does not see {sorted(truth - known)} of block {block}")
                elif block == node.block and len(known & truth) < ENOUGH:
                    self.object(f"node {node.number} knows only {len(known & truth)} of the {len(truth)} others of its crowded block")
