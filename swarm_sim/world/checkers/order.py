"""Checker: no published state goes back in (round, digest) within one life of a node."""

from __future__ import annotations

from blocktrain.swarm_sim.world.checkers.base import Checker
from blocktrain.swarm_sim.world.checkers.scene import Actor, Scene


class Order(Checker):
    """A newer state is never replaced by an older one, and a round's state never changes but by a download of that very round."""

    name = "order"

    def __init__(self, world: Scene) -> None:
        super().__init__(world)
        self._last: dict[int, tuple[int, bytes]] = {}
        world.watchers.started.append(self._started)
        world.watchers.published.append(self._published)

    def _started(self, node: Actor) -> None:
        self._last[node.number] = node.round, node.digest

    def _published(self, node: Actor, how: str, donor: str | None) -> None:
        round, digest = node.round, node.digest
        before, old = self._last[node.number]
        self._last[node.number] = round, digest
        if round < before:
            self.object(f"node {node.number} went back from round {before} to {round} ({how})")
        elif round == before and digest != old and how != "fetched":
            self.object(f"node {node.number} has another state of round {round} ({how})")
