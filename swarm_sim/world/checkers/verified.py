"""Checker: nothing is applied that was not verified. It looks at the bytes themselves, with arithmetic of its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from blocktrain.protocol.ids import Digest
from blocktrain.swarm_sim.world.checkers.base import Checker
from blocktrain.swarm_sim.world.compute import Mixed, Toy, digest_of, unpack

if TYPE_CHECKING:
    from blocktrain.swarm_sim.world.node import Node
    from blocktrain.swarm_sim.world.talk import Side
    from blocktrain.swarm_sim.world.world import World

FARTHEST = 1e4  # a state of the toy that is a thousand times its size was made up


class Verified(Checker):
    """Every merge used and every state loaded has its digest, is made of numbers, and is of a plausible size."""

    name = "verified"

    world: World

    def __init__(self, world: World) -> None:
        super().__init__(world)
        world.watchers.adopted.append(self._adopted)
        world.watchers.loaded.append(self._loaded)

    def _adopted(self, side: Side, other: Side, mixed: Mixed) -> None:
        self._look(side.node, other.node, other.payload, other.terms().digest)

    def _loaded(self, node: Node, donor: Node, payload: bytes, digest: Digest) -> None:
        self._look(node, donor, payload, digest)

    def _look(self, node: Node, peer: Node, payload: bytes, digest: Digest) -> None:
        wrong = ""
        if not isinstance(node.compute, Toy):
            return
        if digest_of(payload) != digest:
            wrong = "without its digest"
        elif not math.isfinite(size := math.hypot(*unpack(payload))):
            wrong = "that is no number"
        elif size > FARTHEST:
            wrong = f"of norm {size:.3g}"
        if wrong:
            self.object(f"node {node.number} used a state {wrong} from node {peer.number}")
