"""Checker: no published state goes back in (round, digest) within one life of a node.

But for one that is renumbered: whose round nobody else believes may give up that number, and only then. What it has learnt it keeps.
"""

from __future__ import annotations

import statistics

from blocktrain.protocol.acceptance import FAR_BEHIND_ROUNDS
from blocktrain.swarm_sim.world.checkers.base import Checker
from blocktrain.swarm_sim.world.checkers.scene import Actor, Scene


class Order(Checker):
    """A newer state is never replaced by an older one, and a round's state never changes but by a download of that very round."""

    name = "order"

    def __init__(self, world: Scene) -> None:
        super().__init__(world)
        self._last: dict[int, tuple[int, bytes]] = {}
        self._past: dict[int, list[tuple[float, int]]] = {}  # of each node: since when it had which round
        world.watchers.started.append(self._started)
        world.watchers.published.append(self._published)

    def _started(self, node: Actor) -> None:
        self._last[node.number] = node.round, node.digest
        self._note(node)

    def _published(self, node: Actor, how: str, donor: str | None) -> None:
        round, digest = node.round, node.digest
        before, old = self._last[node.number]
        self._last[node.number] = round, digest
        self._note(node)
        if how == "renumbered":
            if not self._alone_with(node, before):
                self.object(f"node {node.number} gave up round {before} for {round}, and others could have followed it there")
        elif round < before:
            self.object(f"node {node.number} went back from round {before} to {round} ({how})")
        elif round == before and digest != old and how != "fetched":
            self.object(f"node {node.number} has another state of round {round} ({how})")

    def _alone_with(self, node: Actor, before: int) -> bool:
        """Whether its round was beyond the reach of most holders, as their records may still have it, and the new one is not."""
        others = [self._lowest_told(other) for other in self.world.holders(node.block) if other is not node]
        middle = statistics.median_low([before, *others])
        return len(others) >= 2 and before - middle >= FAR_BEHIND_ROUNDS and node.round - middle <= 2 * FAR_BEHIND_ROUNDS

    def _note(self, node: Actor) -> None:
        """Its round from now on. What it was before counts for as long as a record lives."""
        since = self.world.elapsed_s - self.world.plan.ttl_s
        past = self._past.setdefault(node.number, [])
        while len(past) > 1 and past[1][0] <= since:
            del past[0]
        past.append((self.world.elapsed_s, node.round))

    def _lowest_told(self, node: Actor) -> int:
        since = self.world.elapsed_s - self.world.plan.ttl_s
        past = self._past[node.number]
        ended = sum(at_s <= since for at_s, _ in past[1:])  # so many of the first were replaced too long ago
        return min(round for _, round in past[ended:])
