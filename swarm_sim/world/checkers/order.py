"""Checker: no published state goes back in (round, digest) within one life of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blocktrain.protocol.ids import PeerId
from blocktrain.swarm_sim.world.checkers.base import Checker

if TYPE_CHECKING:
    from blocktrain.swarm_sim.world.node import Node
    from blocktrain.swarm_sim.world.world import World


class Order(Checker):
    """A newer state is never replaced by an older one, and a round's state never changes but by a download of that very round."""

    name = "order"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._last: dict[int, tuple[int, bytes]] = {}
        world.watchers.started.append(self._started)
        world.watchers.published.append(self._published)

    def _started(self, node: Node) -> None:
        self._last[node.number] = node.compute.round, node.compute.digest

    def _published(self, node: Node, how: str, donor: PeerId | None) -> None:
        round, digest = node.compute.round, node.compute.digest
        before, old = self._last[node.number]
        self._last[node.number] = round, digest
        if round < before:
            self.object(f"node {node.number} went back from round {before} to {round} ({how})")
        elif round == before and digest != old and how != "fetched":
            self.object(f"node {node.number} has another state of round {round} ({how})")
