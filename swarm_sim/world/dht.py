"""The DHT as a model: what is stored is found after about log2(n) hops, until it expires. Its effects are modelled, not its routing.

Modelled, and stated in docs/scale.md: a look-up takes `hops(n)` round trips one after the other; a strictly later expiry wins; records
outlive their writer until they expire; across a partition a record is found only if it was written before the cut. `bench world` checks
the hops against hivemind's DHT. Signatures are not made or checked here: this is the port in whose place node/libp2p.py verifies them.
"""

from __future__ import annotations

import math
from typing import Final

from blocktrain.protocol.ids import PeerId
from blocktrain.protocol.records import Seen
from blocktrain.swarm_sim.world.links import Network

PRUNE_S: Final = 5.0  # how often a key is rid of what expired
GRACE_S: Final = 15.0  # kept beyond expiry, since the readers' clocks differ; they drop what has expired by theirs
BUCKET_SIZE: Final = 20  # hivemind's: one request answers with so many of the nearest peers

Key = tuple[int, int]  # block, bucket


def hops(nodes: int) -> int:
    """Round trips, one after the other, of a look-up among `nodes`: one where all fit in a routing table's bucket, then log2 beyond it."""
    return 1 if nodes <= BUCKET_SIZE else 1 + math.ceil(math.log2(nodes / BUCKET_SIZE))


class _Table:
    """What is stored under one key."""

    __slots__ = ("origin", "pruned_at", "records", "whole")

    def __init__(self) -> None:
        self.records: dict[PeerId, Seen] = {}
        self.origin: dict[PeerId, tuple[int, float]] = {}  # writer's host, and when it wrote
        self.pruned_at = 0.0
        self.whole: tuple[Seen, ...] | None = ()  # all records, for who reads before they change again

    def prune(self, now: float) -> None:
        self.pruned_at = now
        for peer in [peer for peer, seen in self.records.items() if seen.expires_at + GRACE_S < now]:
            del self.records[peer], self.origin[peer]
            self.whole = None


class Dht:
    """All records of a run. `nodes`, the number of DHT nodes alive, is kept by the world."""

    def __init__(self, network: Network) -> None:
        self.nodes = 0
        self.cut_at = 0.0  # when the partition began
        self._network = network
        self._tables: dict[Key, _Table] = {}

    def store(self, key: Key, seen: Seen, host: int, now: float) -> bool:
        """False: a record that lives as long or longer is there already."""
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = _Table()
        old = table.records.get(seen.peer)
        if old is not None and seen.expires_at <= old.expires_at:
            return False
        table.records[seen.peer] = seen
        table.origin[seen.peer] = (host, now)
        table.whole = None
        return True

    def read(self, key: Key, host: int, now: float) -> tuple[Seen, ...]:
        """What is found under a key from this host; some of it may just have expired."""
        table = self._tables.get(key)
        if table is None:
            return ()
        if now - table.pruned_at > PRUNE_S:
            table.prune(now)
        if not self._network.split:
            if table.whole is None:
                table.whole = tuple(table.records.values())
            return table.whole
        hosts, origin, side = self._network.hosts, table.origin, self._network.hosts[host].side
        return tuple(seen for peer, seen in table.records.items() if hosts[origin[peer][0]].side == side or origin[peer][1] < self.cut_at)
