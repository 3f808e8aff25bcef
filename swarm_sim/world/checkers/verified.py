"""Nothing is applied that was not verified, in the world: the evidence is the bytes themselves, with arithmetic of its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from blocktrain.protocol.ids import Digest
from blocktrain.swarm_sim.world.checkers.used import Evidence, Used
from blocktrain.swarm_sim.world.compute import Mixed, Toy, digest_of, unpack

if TYPE_CHECKING:
    from blocktrain.swarm_sim.world.node import Node
    from blocktrain.swarm_sim.world.talk import Side
    from blocktrain.swarm_sim.world.world import World

FARTHEST = 1e4  # a state of the toy that is a thousand times its size was made up


class Verified(Used):
    """Looks at what every merge and every download brought."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        world.watchers.adopted.append(self._adopted)
        world.watchers.loaded.append(self._loaded)

    def _adopted(self, side: Side, other: Side, mixed: Mixed) -> None:
        self._look(side.node, other.node, other.payload, other.terms().digest)

    def _loaded(self, node: Node, donor: Node, payload: bytes, digest: Digest) -> None:
        self._look(node, donor, payload, digest)

    def _look(self, node: Node, peer: Node, payload: bytes, digest: Digest) -> None:
        if isinstance(node.compute, Toy):
            right = digest_of(payload) == digest
            self.look(node, f"node {peer.number}", Evidence(right, math.hypot(*unpack(payload)) if right else 0.0, FARTHEST))
