"""Checker: per-node messages and bytes per round stay bounded, whatever happens and however large the swarm is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blocktrain.protocol.core import MAX_OTHER_BLOCKS_READ
from blocktrain.protocol.pairing import MAX_TRIES
from blocktrain.swarm_sim.world.checkers.base import Checker

if TYPE_CHECKING:
    from blocktrain.swarm_sim.world.world import World

WINDOW_S = 60.0
STORES = 8  # records of a node: its own buckets, and the run's
READS = 3  # keys of a block, while joining


class Traffic(Checker):
    """Adds up what each node sent in each minute, and compares it with what its settings allow."""

    name = "traffic"

    world: World

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._before: dict[int, tuple[int, int]] = {}
        self._at_s = 0.0
        world.watchers.sampled.append(self._sampled)

    def _sampled(self, at_s: float) -> None:
        world, plan = self.world, self.world.plan
        seconds = at_s - self._at_s
        if seconds < WINDOW_S:
            return
        self._at_s = at_s
        refreshes = seconds / plan.refresh_s + 2
        lookups = refreshes * (READS * (1 + min(MAX_OTHER_BLOCKS_READ, plan.blocks - 1)) + STORES) + 40  # and the quick reads of a start
        for node in world.nodes:
            messages, sent = node.traffic.messages, node.traffic.sent_bytes
            last_messages, last_sent = self._before.get(node.number, (0, 0))
            self._before[node.number] = messages, sent
            partners = sum(1 for other in world.nodes if other.block == node.block)
            rounds = seconds / min(node.round_s, plan.round_s) + 2
            exchanges = rounds * (MAX_TRIES + 1) * 2 + seconds / 2  # our own, those of others, and what is declined
            allowed = lookups + exchanges * (3 + world.exchange_frames) + 4 * partners
            if messages - last_messages > allowed:
                self.object(f"node {node.number} sent {messages - last_messages} messages in {seconds:.0f} s; {allowed:.0f} are allowed")
            most = exchanges * (world.exchange_bytes + 1000) + lookups * 1000 + world.state_bytes * (partners + 3)
            if sent - last_sent > most:
                self.object(f"node {node.number} sent {sent - last_sent} bytes in {seconds:.0f} s; {most:.0f} are allowed")
