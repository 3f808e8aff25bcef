"""Checker: what a block has learnt is not lost. While anybody holds it, its newest round lives on; what a node saved comes back with it.

Replicas are a few rounds apart at all times, and the newest of them may be the one that dies: what counts is that none of the others is
further behind it than a node may be before it takes state instead of averaging. A node that is renumbered (order.py) loses nothing but a
number: then the newest round is that of those who hold the block. And a round that a node has by the word of a liar alone, more than those
few beyond all other honest holders, was never come to: it counts from when another honest one, who has it not from the liar, is near it.
"""

from __future__ import annotations

from blocktrain.protocol.core import FETCH_WHEN_BEHIND
from blocktrain.swarm_sim.world.checkers.base import Checker
from blocktrain.swarm_sim.world.checkers.scene import Actor, Scene


class Kept(Checker):
    """Follows the newest round of each block, and what is left of it among its holders."""

    name = "kept"

    def __init__(self, world: Scene) -> None:
        super().__init__(world)
        self.newest: dict[int, int] = {}  # block → round
        self._misled: set[int] = set()
        world.watchers.published.append(self._published)
        world.watchers.sampled.append(self._sampled)

    def _published(self, node: Actor, how: str, donor: str | None) -> None:
        if node.liar:
            return
        here = [other for other in self.world.holders(node.block) if not other.liar and other is not node]
        others = [other.round for other in here if other.number not in self._misled]
        if any(round >= node.round - FETCH_WHEN_BEHIND for round in others) or how == "renumbered":
            self._misled.discard(node.number)
        elif donor is not None and self.world.lies(donor):
            self._misled.add(node.number)
        if how == "renumbered":
            self.newest[node.block] = max((other.round for other in self.world.holders(node.block) if not other.liar), default=0)
        elif node.number not in self._misled:
            self.newest[node.block] = max(self.newest.get(node.block, 0), node.round)

    def _sampled(self, at_s: float) -> None:
        for block, newest in self.newest.items():
            left = [node.round for node in self.world.holders(block) if not node.liar]
            if left and max(left) < newest - FETCH_WHEN_BEHIND:
                self.object(f"block {block} had come to round {newest}, and its holders have no more than round {max(left)}")
                self.newest[block] = max(left)

    def finish(self) -> None:
        for block, newest in self.newest.items():
            left = [node.round for node in self.world.holders(block) if not node.liar]
            if left and max(left) < newest:  # that nobody holds it is another checker's
                self.object(f"block {block} had come to round {newest}, and in the end it has round {max(left)}")
