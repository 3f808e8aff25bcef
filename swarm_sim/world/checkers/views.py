"""Checker: views converge after healing. In the end everybody who is up knows whom it must know, and nobody who is long gone.

In a small swarm that is everybody; in a crowded block, whose holders are spread over many keys, so many partners that averaging mixes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blocktrain.protocol.buckets import PER_BUCKET
from blocktrain.swarm_sim.world.checkers.base import Checker

if TYPE_CHECKING:
    from blocktrain.swarm_sim.world.node import Node
    from blocktrain.swarm_sim.world.world import World

SLACK_S = 15.0
ENOUGH = 8  # partners of a crowded block


class Views(Checker):
    """Compares views with the truth at the story's end."""

    name = "views"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        skews = [abs(node.clock.skew_s) + abs(node.clock.drift) * world.plan.end_s for node in world.nodes]
        self._lag_s = world.plan.ttl_s + world.plan.refresh_s + SLACK_S + 2 * max(skews, default=0.0)
        self._gone_since: dict[int, float] = {}
        world.watchers.ended.append(self._ended)
        world.watchers.started.append(self._started)

    def _started(self, node: Node) -> None:
        self._gone_since.pop(node.number, None)

    def _ended(self, node: Node) -> None:
        self._gone_since[node.number] = self.world.elapsed_s

    def finish(self) -> None:
        world, now = self.world, self.world.queue.now
        settled = {n.number: n for n in world.alive() if now - n.up_since > self._lag_s}
        gone = {number for number, since in self._gone_since.items() if world.elapsed_s - since > self._lag_s}
        for node in settled.values():
            for block in range(world.plan.blocks):
                known = {world.by_peer[m.peer].number for m in node.core.members.holders(block, node.clock.read(now))}
                truth = {number for number, other in settled.items() if other.block == block} - {node.number}
                for number in sorted(known & gone):
                    self.object(f"node {node.number} still counts node {number}, gone since {self._gone_since[number]:.0f} s")
                if len(truth) <= PER_BUCKET:
                    if truth - known:
                        self.object(f"node {node.number} does not see {sorted(truth - known)} of block {block}")
                elif block == node.block and len(known & truth) < ENOUGH:
                    self.object(f"node {node.number} knows only {len(known & truth)} of the {len(truth)} others of its crowded block")
