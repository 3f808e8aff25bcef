"""A network between processes of one machine: a TCP proxy in user space, with delay, rate, loss and resets that change at run time.

A node listens on one port and announces another, the proxy's (`--host-maddrs`, `--announce-maddrs`), so that whoever dials it goes through
the proxy: the connection's bytes, both ways, arrive `delay_s` later and no faster than `rate_bytes_per_s`. It needs no privileges. The
proxy is a process of its own, so that its work does not queue behind that of whoever measures; `Emulator` starts and steers it.
Delays are good to about a millisecond, a timer's step; connecting itself is not delayed. TCP under us loses nothing, so a lost packet is
what its receiver sees of one: a wait for the second try, also of all that is behind it. The sender's window does not shrink for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

from blocktrain.protocol.errors import BlocktrainError

PIECE_BYTES: Final = 64 * 1024
PACKET_BYTES: Final = 1448  # of data in a packet of a common network
AGAIN_S: Final = 0.2  # beyond a round trip, until a lost packet is sent again: Linux' shortest wait
MOST_UNDER_WAY: Final = 64 * 1024 * 1024  # of one direction; more waits at the sender, as in a full network


@dataclass
class Link:
    """What lies before one port. Shared by all its connections; may be changed at any time."""

    target: int
    delay_s: float = 0.0  # one way
    rate_bytes_per_s: float = 0.0  # each way, for each connection; 0: any
    up: bool = True  # False: bytes wait, nobody is told
    jitter_s: float = 0.0  # up to so much more delay, drawn for each piece
    loss: float = 0.0  # share of packets
    connections: set[asyncio.Task[None]] = field(default_factory=set)


class Direction:
    """One direction of one connection."""

    def __init__(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._link, self._reader, self._writer = link, reader, writer
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._free_at = 0.0  # when the wire has sent what was put on it
        self._rng = random.Random()
        self._changed = asyncio.Event()

    async def read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._bytes > MOST_UNDER_WAY:
                self._changed.clear()
                await self._changed.wait()
            data = await self._reader.read(PIECE_BYTES)
            now, rate = loop.time(), self._link.rate_bytes_per_s
            self._free_at = max(now, self._free_at) + (len(data) / rate if rate else 0.0)
            self._waiting.append((self._free_at + self._link.delay_s + self._trouble_s(len(data)), data))
            self._bytes += len(data)
            self._changed.set()
            if not data:
                return

    def _trouble_s(self, size: int) -> float:
        """How much later than the delay this piece arrives."""
        link = self._link
        if not (link.jitter_s or link.loss):
            return 0.0
        lost = self._rng.random() > (1.0 - link.loss) ** -(-size // PACKET_BYTES)
        return self._rng.uniform(0.0, link.jitter_s) + (2 * link.delay_s + AGAIN_S if lost else 0.0)

    async def write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._waiting:
                self._changed.clear()
                await self._changed.wait()
            due, data = self._waiting[0]
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            while not self._link.up:  # noqa: ASYNC110 (orders come once in a while)
                await asyncio.sleep(0.01)
            self._waiting.popleft()
            self._bytes -= len(data)
            self._changed.set()
            if not data:
                if self._writer.can_write_eof():
                    self._writer.write_eof()
                return
            self._writer.write(data)
            await self._writer.drain()


class Proxy:
    """Ports with links behind them, in this process's event loop."""

    def __init__(self) -> None:
        self.links: dict[int, Link] = {}
        self._servers: list[asyncio.Server] = []

    async def open(self, target: int) -> int:
        """A new port on loopback that leads to port `target`."""
        link = Link(target)

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            link.connections.add(task)
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await _carry(link, reader, writer)
            link.connections.discard(task)

        server = await asyncio.start_server(accepted, "127.0.0.1", 0)
        self._servers.append(server)
        port = int(server.sockets[0].getsockname()[1])
        self.links[port] = link
        return port

    def reset(self, port: int) -> None:
        """Cut off all connections of a port; new ones are taken."""
        for task in self.links[port].connections:
            task.cancel()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        tasks = [task for link in self.links.values() for task in link.connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _carry(link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, until both directions have ended."""
    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", link.target)
    try:
        directions = (Direction(link, reader, far_writer), Direction(link, far_reader, writer))
        async with asyncio.TaskGroup() as tasks:
            for direction in directions:
                tasks.create_task(direction.read())
                tasks.create_task(direction.write())
    except* OSError:
        pass  # one side hung up the hard way: so do we
    finally:
        for one in (writer, far_writer):
            one.transport.abort()


# ---- as a process of its own ------------------------------------------------------------------------------------------------------


class Emulator:
    """The proxy's process. Leaving the `with` block ends it."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-P", "-m", "blocktrain.swarm_sim.delay"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # which ends it
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def open(self, targets: Sequence[int]) -> list[int]:
        """A port in front of each of these."""
        return [int(port) for port in self._ask({"do": "open", "targets": list(targets)})]

    def set(
        self,
        ports: Sequence[int],
        *,
        delay_s: float = 0.0,
        rate_bytes_per_s: float = 0.0,
        up: bool = True,
        jitter_s: float = 0.0,
        loss: float = 0.0,
    ) -> None:
        """From now on, for all connections of these ports."""
        quality = {"delay_s": delay_s, "rate_bytes_per_s": rate_bytes_per_s, "up": up, "jitter_s": jitter_s, "loss": loss}
        self._ask({"do": "set", "ports": list(ports), "quality": quality})

    def reset(self, ports: Sequence[int]) -> None:
        """Cut off all connections of these ports."""
        self._ask({"do": "reset", "ports": list(ports)})

    def _ask(self, order: dict[str, object]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            raise BlocktrainError("the network emulator has ended") from None


async def _serve() -> None:
    """Orders as lines of JSON on stdin, answers on stdout, until stdin ends."""
    proxy, loop = Proxy(), asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        order, answer = json.loads(line), list[int]()
        if order["do"] == "open":
            answer = [await proxy.open(target) for target in order["targets"]]
        for port in order.get("ports", ()):
            if order["do"] == "reset":
                proxy.reset(port)
            else:
                for name, value in order["quality"].items():
                    setattr(proxy.links[port], name, value)
        print(json.dumps(answer), flush=True)
    await proxy.close()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve())
