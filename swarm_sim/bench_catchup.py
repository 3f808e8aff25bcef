"""`blocktrain-sim bench catchup`: how fast a joiner gets a state, against a raw stream of the same bytes over the same link.

Donors are processes of their own on this machine, each with the same made-up state. In turns: the raw stream (libp2p's, without frames or
checks, kept in memory as a download is), a download from one donor, and one from two. A download counts from the wish to the checked
digest.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, cast

from blake3 import blake3

from blocktrain.node import runtime
from blocktrain.node.catchup import Donor, Download, fetch
from blocktrain.node.config import Network
from blocktrain.node.network import Net, open_network
from blocktrain.node.ports import Published, Replica
from blocktrain.node.recipe_file import parse_recipe, ready_text
from blocktrain.protocol.errors import NetworkFault
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import NO_DIGEST, Digest, PeerId
from blocktrain.protocol.messages import STATE, Want
from blocktrain.swarm_sim.benches import Bench, Numbers, Session

RAW: Final = "/blocktrain/bench/raw"
LOOPBACK: Final = ("/ip4/127.0.0.1/tcp/0",)
STATE_BYTES: Final = 64 * 1024 * 1024
PAIRS, BRIEF_PAIRS = 9, 3
START_TIMEOUT_S: Final = 60.0
TRANSFER_TIMEOUT_S: Final = 120.0
MANIFEST: Final = parse_recipe(ready_text("tiny"), "tiny")
KEYS: Final = {
    "download": (
        "state_bytes",
        "raw_stream_bytes_per_s",
        "one_donor_bytes_per_s",
        "two_donors_bytes_per_s",
        "one_donor_share_of_raw",
        "two_donors_share_of_raw",
        "pairs",
    ),
}


def run(session: Session) -> None:
    session.measure("download", lambda: _in_a_nodes_loop(session))


def _in_a_nodes_loop(session: Session) -> Numbers:
    numbers: dict[str, object] = {}

    async def measure(real: runtime.Runtime) -> int:
        numbers.update(await _measure(BRIEF_PAIRS if session.brief else PAIRS, session.say))
        return 0

    if runtime.run(measure):
        raise NetworkFault("the download could not be measured; the reason stands above")
    return numbers


async def _measure(pairs: int, say: Callable[[str], None]) -> Numbers:
    async with _donors(2) as addresses, _net(*addresses) as net:
        peers = [PeerId(address.rsplit("/", 1)[1]) for address in addresses]
        await _raw(net, peers[0])  # warm
        rates: dict[str, list[float]] = {"raw": [], "one": [], "two": []}
        for number in range(pairs):
            for name, work in (
                ("raw", lambda: _raw(net, peers[0])),
                ("one", lambda: _download(net, peers[:1])),
                ("two", lambda: _download(net, peers)),
            ):
                rates[name].append(STATE_BYTES / await _timed(work))
            say(f"turn {number + 1} of {pairs}: " + ", ".join(f"{name} {each[-1] / 1e6:.0f} MB/s" for name, each in rates.items()))
    median = {name: statistics.median(each) for name, each in rates.items()}
    share = {name: statistics.median(a / b for a, b in zip(rates[name], rates["raw"], strict=True)) for name in ("one", "two")}
    return {
        "state_bytes": STATE_BYTES,
        "raw_stream_bytes_per_s": median["raw"],
        "one_donor_bytes_per_s": median["one"],
        "two_donors_bytes_per_s": median["two"],
        "one_donor_share_of_raw": share["one"],
        "two_donors_share_of_raw": share["two"],
        "pairs": pairs,
    }


async def _timed(work: Callable[[], Awaitable[None]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def _raw(net: Net, peer: PeerId) -> None:
    reader, writer = await net.libp2p.open_stream(peer, RAW, timeout_s=10)
    try:
        async with asyncio.timeout(TRANSFER_TIMEOUT_S):
            payload, filled = bytearray(STATE_BYTES), 0
            while filled < STATE_BYTES:
                data = await reader.read(1 << 20)
                if not data:
                    raise NetworkFault("the raw stream ended early")
                payload[filled : filled + len(data)] = data
                filled += len(data)
    finally:
        writer.close()


async def _download(net: Net, peers: list[PeerId]) -> None:
    async def apply(whole: Download) -> Published:
        if blake3(whole.payload).digest() != whole.digest:
            raise NetworkFault("a download of other bytes")
        return Published(whole.round, whole.digest)

    want = Want(MANIFEST.run, 0, "block", NO_DIGEST)
    published, failed = await fetch(net.transport, want, peers, 1, STATE_BYTES, rng=random.Random(0), apply=apply)
    if published is None:
        raise NetworkFault("; ".join(str(fault) for fault in failed.values()))


# ---- the donors -----------------------------------------------------------------------------------------------------------------------


class _Shelf:
    """The part of a replica that a donor needs."""

    def __init__(self) -> None:
        payload = random.Random(0).randbytes(STATE_BYTES)
        self._word = Published(7, Digest(blake3(payload).digest()))
        self._payload = memoryview(payload)

    def published(self) -> Published:
        return self._word

    def state(self) -> tuple[Published, memoryview]:
        return self._word, self._payload


@contextlib.asynccontextmanager
async def _net(*initial: str) -> AsyncIterator[Net]:
    config = Network(initial_peers=initial, host_maddrs=LOOPBACK)
    async with open_network(config, None, Greeting(MANIFEST, "bench"), time.time) as net:
        yield net


@contextlib.asynccontextmanager
async def _donors(count: int) -> AsyncIterator[list[str]]:
    command = [sys.executable, "-m", "blocktrain.swarm_sim.bench_catchup"]
    processes = [await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            lines = [await process.stdout.readline() for process in processes if process.stdout is not None]
        yield [line.decode().strip() for line in lines]
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()  # its end is the donor's sign to stop
        for process in processes:
            try:
                async with asyncio.timeout(10):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def _donate(real: runtime.Runtime) -> int:
    shelf = _Shelf()
    payload = shelf.state()[1]

    async def raw(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            for start in range(0, STATE_BYTES, 1 << 18):
                writer.write(payload[start : start + (1 << 18)])
                await writer.drain()
            await reader.read(1)  # who receives the last byte hangs up

    async with _net() as net:
        await net.libp2p.handle(RAW, raw)
        await net.transport.serve(STATE, Donor(MANIFEST, 0, cast("Replica", shelf)).handle)
        print(net.directory.addresses()[0], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    return 0


BENCH: Final = Bench("catchup", KEYS, run)

if __name__ == "__main__":
    sys.exit(runtime.run(_donate))
