"""Sweeps through nodes that are processes of their own: frozen, killed, and gone for so long that their records have ended."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from blocktrain.node.client import SwarmClient
from blocktrain.node.compute.generation import Generation, Request
from blocktrain.node.config import ClientConfig
from blocktrain.node.runtime import Runtime
from blocktrain.node.traversal import Report
from blocktrain.protocol.errors import NoPeers
from blocktrain.protocol.ids import short
from blocktrain.protocol.sweep import Sampling
from tests.swarm_kit import Program, Programs, recipe

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
REQUEST = Request(tuple(b"the river"), 60, sampling=Sampling(0.9, seed=7), draft=4)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    made = Programs(tmp_path)
    made.recipe.write_text(recipe(blocks="2"))
    yield made
    made.close()


def swarm_of(programs: Programs, *blocks: int) -> list[Program]:
    """Nodes that hold the blocks' initial states and do not train, so that replicas agree on every bit."""
    host = programs.start("--paused", host=True, block=blocks[0])
    address = str(host.wait(lambda status: status["addresses"])["addresses"][0])
    nodes = [host, *(programs.start("--paused", block=block, peers=(address,)) for block in blocks[1:])]
    for node in nodes:
        node.wait(lambda status: sum(status["coverage"]) == len(blocks))
    return nodes


async def asked(address: str, victims: list[Program], lose: Callable[[Program], None]) -> tuple[Generation, Generation, Report, float]:
    """A text in peace; then the same, while the holder of block 1 is lost after the first piece; and the longest wait for a piece."""
    async with SwarmClient.connect(ClientConfig(initial_peers=(address,)), Runtime(rng=Random(3))) as client:
        async with client.generate(REQUEST) as (text, _):
            async for _ in text.pieces():
                pass
        longest, lost = 0.0, False
        async with client.generate(REQUEST) as (again, report):
            began = time.monotonic()
            async for _ in again.pieces():
                longest, began = max(longest, time.monotonic() - began), time.monotonic()
                if not lost:
                    lose(next(node for node in victims if node.status()["peer"] == report.peers[1][1]))
                    lost = True
        return text.result(), again.result(), report, longest


def test_a_frozen_holder_then_a_killed_one_is_replaced_and_a_block_without_any_is_named(programs: Programs) -> None:
    host, first, second = swarm_of(programs, 0, 1, 1)
    address = str(host.status()["addresses"][0])
    frozen: list[Program] = []

    def freeze(node: Program) -> None:
        node.signal(signal.SIGSTOP)
        frozen.append(node)

    expected, text, report, longest = asyncio.run(asked(address, [first, second], freeze))
    assert text.data == expected.data
    assert len(report.mended) == 1
    assert not report.digests_changed
    assert longest < 15, "a holder that is frozen is asked after within seconds"
    frozen[0].signal(signal.SIGCONT)
    host.wait(lambda status: status["coverage"] == [1, 2])

    killed: list[Program] = []

    def kill(node: Program) -> None:
        node.signal(signal.SIGKILL)
        killed.append(node)

    expected, text, report, _ = asyncio.run(asked(address, [first, second], kill))
    assert text.data == expected.data
    assert report.mended
    assert not report.digests_changed

    last = [node for node in (first, second) if node not in killed]
    with pytest.raises(NoPeers, match="block 1"):  # no replica is left, and the request does not allow for that
        asyncio.run(asked(address, last, kill))
    host.wait(lambda status: status["coverage"] == [1, 0])  # their records have ended
    names = [short(str(node.status()["peer"])) for node in killed]
    began = time.monotonic()
    refused = generate(programs, address)
    assert refused.returncode == 4, refused.stderr
    assert any(f"block 1 has no holder; the last one seen was {name}" in refused.stderr for name in names), refused.stderr
    assert time.monotonic() - began < 15, "five seconds, on a machine that does nothing else"
    allowed = generate(programs, address, "--allow-missing", "--json")
    assert allowed.returncode == 0, allowed.stderr
    assert '"missing": [1]' in allowed.stdout, "it goes on without that block, and says so"


def generate(programs: Programs, address: str, *more: str) -> subprocess.CompletedProcess[str]:
    """`blocktrain generate`, from a process that knows nothing but an address."""
    start = "import sys; from blocktrain.node.commands.app import main; sys.exit(main())"  # as the installed program does
    command = [sys.executable, "-c", start, "generate", "--initial-peers", address, "--prompt", "the", "--max-tokens", "5", *more]
    return subprocess.run(command, env=programs.env(), cwd=programs.folder, capture_output=True, text=True, check=False)
