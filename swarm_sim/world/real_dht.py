"""hivemind's DHT measured with real nodes, to check the model of dht.py: how many requests a look-up makes, and how many in a row.

The nodes are node/libp2p.py's, in this process, on loopback. The one place where requests are made (`call_find` of its DHT protocol) is
wrapped to count. A request's depth is one more than that of the answer in which its peer was first named; a peer that was known before
has depth 1.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from blocktrain.node import identity
from blocktrain.node.daemon import Settings
from blocktrain.node.libp2p import Libp2p
from blocktrain.protocol.ids import PeerId, RunId
from blocktrain.protocol.records import Announcement, block_key, pack_record

LOOKUPS: Final = 12
TIMEOUT_S: Final = 30.0
RUN: Final = RunId(bytes(32))
LIFE_S: Final = 100.0


class Counter:
    """Counts the requests of one node's look-ups, and their depth."""

    def __init__(self, node: Libp2p) -> None:
        self.requests = 0
        self.depth = 0
        self._known: dict[str, int] = {}
        protocol: Any = node._dht.protocol
        ask = protocol.call_find

        async def counted(peer: Any, keys: Any) -> Any:
            depth = self._known.get(str(peer), 1)
            self.requests += 1
            self.depth = max(self.depth, depth)
            answer = await ask(peer, keys)
            for _, nearest in (answer or {}).values():
                for named in nearest.values():
                    self._known.setdefault(str(named), depth + 1)
            return answer

        protocol.call_find = counted
        self._protocol = protocol

    def begin(self) -> None:
        self.requests = self.depth = 0
        self._known = {str(peer): 1 for peer in self._protocol.routing_table.peer_id_to_uid}


@contextlib.asynccontextmanager
async def swarm(size: int) -> AsyncIterator[list[Libp2p]]:
    """So many nodes, each introduced to the first."""
    nodes: list[Libp2p] = []
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(size):
            who = stack.enter_context(identity.temporary())
            node = Libp2p(Settings(host_maddrs=("/ip4/127.0.0.1/tcp/0",), local=True), who, time.time)
            await node.start()
            stack.push_async_callback(node.stop)
            if nodes:
                addresses = [text for text in await nodes[0].addresses() if "127.0.0.1" in text]
                await node.connect(PeerId(nodes[0].peer), addresses, timeout_s=TIMEOUT_S)
                await node.ping(PeerId(nodes[0].peer), timeout_s=TIMEOUT_S)
                await node.look_around(timeout_s=TIMEOUT_S)
            nodes.append(node)
        yield nodes


async def measure(size: int) -> tuple[list[int], list[int]]:
    """Requests, and depths, of look-ups of announcements by nodes that did not write them."""
    requests: list[int] = []
    depths: list[int] = []
    async with swarm(size) as nodes:
        word = Announcement(RUN, 0, "training", 1, bytes(32), 1.0, 0.0, 1, 1)
        for number, node in enumerate(nodes[: min(size, 4)]):
            await node.store(block_key(RUN, 0, number), pack_record(word), expires_at=time.time() + LIFE_S, timeout_s=TIMEOUT_S)
        readers = nodes[-min(4, size - 1) :]
        counters = {reader.peer: Counter(reader) for reader in readers}
        for turn in range(LOOKUPS):
            reader = readers[turn % len(readers)]
            counter = counters[reader.peer]
            counter.begin()
            await reader.get(block_key(RUN, 0, turn % min(size, 4)), timeout_s=TIMEOUT_S)
            requests.append(counter.requests)
            depths.append(counter.depth)
    return requests, depths
