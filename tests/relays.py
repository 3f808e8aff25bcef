"""Four public relays in one process, for tests/test_nat.py: `python -m tests.relays HOST…` prints their addresses and waits to be ended."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack

from blocktrain.node.config import Network
from blocktrain.node.network import open_network
from blocktrain.protocol.handshake import Greeting

PORT = 4001


async def main(hosts: list[str]) -> None:
    async with AsyncExitStack() as stack:
        known: tuple[str, ...] = ()
        for host in hosts:
            config = Network(initial_peers=known[:1], host_maddrs=(f"/ip4/{host}/tcp/{PORT}",), public=True)
            net = await stack.enter_async_context(open_network(config, None, Greeting(None, "relay"), time.time))
            address = next(text for text in net.directory.addresses() if host in text)
            known += (address,)
        print(*known, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
