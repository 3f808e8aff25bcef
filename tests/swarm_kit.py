"""Real nodes for tests: in this process (`Nodes`), or as processes of their own where one is killed, frozen or signalled (`Programs`).

Both train a block so small that a round takes a fraction of a second. Waiting is always for a condition, with a deadline that a loaded
machine keeps; a failure says what the node said last.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from blocktrain.node import leftovers
from blocktrain.node.compute.replica import Options, TorchReplica
from blocktrain.node.compute.serving import TorchServer
from blocktrain.node.config import Files, Gossip, Network, NodeConfig, Training
from blocktrain.node.network import Net
from blocktrain.node.ports import Published
from blocktrain.node.recipe_file import parse_recipe, ready_text
from blocktrain.node.service import Node, Parts
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import PeerId
from blocktrain.protocol.manifest import Manifest

WAIT_S = 60.0  # patience with what must happen; a loaded machine is no bug
STEPS = 4  # H
SMALLER = {
    "width = 128": "width = 32",
    "layers = 2": "layers = 1",
    "context = 128": "context = 32",
    "rows = 16384": "rows = 64",
    "row_width = 24": "row_width = 4",
    "batch = 8": "batch = 2",
    "steps_per_round = 20": f"steps_per_round = {STEPS}",
}
TEXT = np.frombuffer(b"the river runs down to the sea; " * 60, np.uint8).astype(np.int64)


def recipe(**changes: str) -> str:
    """The text of a run.toml like `tiny`, but much smaller. `changes`: a key → its line's new value."""
    text = ready_text("tiny")
    for old, new in SMALLER.items():
        assert old in text
        text = text.replace(old, new)
    for key, value in changes.items():
        lines = [f"{key} = {value}" if line.split("=")[0].strip() == key else line for line in text.splitlines()]
        assert lines != text.splitlines(), f"{key} = {value} changes nothing"
        text = "\n".join(lines)
    return text


def manifest(**changes: str) -> Manifest:
    return parse_recipe(recipe(**changes), "the test's recipe")


async def until(condition: Callable[[], object], what: str | Callable[[], object], deadline_s: float = WAIT_S) -> None:
    """Wait until a condition holds. `what` is said (or asked for) where it does not in time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    while not condition():
        assert loop.time() < end, f"not within {deadline_s:g} s: {what() if callable(what) else what}"
        await asyncio.sleep(0.02)


class Text:
    """Batches from one text; `pace_s` is what a step waits, so that rounds do not rush by."""

    def __init__(self, run: Manifest, start: int = 0, pace_s: float = 0.0) -> None:
        self.run = run
        self.at = start
        self.pace_s = pace_s

    def next_batch(self) -> np.ndarray[Any, Any]:
        self.at += 1
        if self.pace_s:
            time.sleep(self.pace_s)
        length, batch = self.run.model.context + 1, self.run.optimizer.batch
        rows = [(self.at * 7 + row * 131) % (len(TEXT) - length) for row in range(batch)]
        return np.stack([TEXT[row : row + length] for row in rows])

    def heldout(self, count: int) -> np.ndarray[Any, Any]:
        length = self.run.model.context + 1
        return np.stack([TEXT[3 * row : 3 * row + length] for row in range(count)])

    def position(self) -> dict[str, object]:
        return {"at": self.at}

    def seek(self, position: Mapping[str, object]) -> bool:
        self.at = int(str(position["at"]))
        return True


def replica(run: Manifest, block: int = 0, seed: int = 0, pace_s: float = 0.0) -> TorchReplica:
    """A small replica that does not train until told to."""
    return TorchReplica(run, block, Text(run, seed, pace_s), None, Options(device="cpu", seed=seed))


# ---- nodes in this process ------------------------------------------------------------------------------------------------------------


@dataclass
class Live:
    """One real node in this process: everything but the command line, the store and the status file."""

    node: Node
    net: Net
    replica: TorchReplica
    server: TorchServer
    stopping: asyncio.Event
    task: asyncio.Task[None]
    history: list[Published]  # every state that it published, in order

    @property
    def peer(self) -> PeerId:
        return self.net.directory.peer

    @property
    def phase(self) -> str:
        return self.node.core.phase

    def knows(self, other: Live) -> bool:
        """Whether the other is alive in our view."""
        return any(member.peer == other.peer for member in self.node.core.everybody(time.time()))

    @property
    def address(self) -> str:
        return self.net.directory.addresses()[0]

    @property
    def round(self) -> int:
        return self.replica.published().round

    @property
    def accepted(self) -> int:
        return self.node.core.counters.accepted

    def said(self) -> object:
        return self.round, self.node.core.waiting(time.time()), self.node.core.counters, self.node.core.last_refusal

    async def stop(self) -> None:
        """As a SIGINT would."""
        self.stopping.set()
        await self.task
        await self.replica.stop()
        await self.server.stop()


class Nodes:
    """Starts nodes in this process, and stops those that still run at the end. `make_net` is the fixture `net_factory`.

    Their records live `ttl_s` and are renewed every `refresh_s`: for many nodes in one process, that should be less often.
    """

    ttl_s = 6.0
    refresh_s = 0.7

    def __init__(self, make_net: Callable[..., Awaitable[Net]], run: Manifest | None = None) -> None:
        self.run = run or manifest()
        self._make_net = make_net
        self._all: list[Live] = []

    async def start(
        self,
        block: int = 0,
        *initial: Live | str,
        fresh: bool = True,
        pace_s: float = 0.01,
        gossip: Gossip | None = None,
        training: Training | None = None,
        run: Manifest | None = None,
    ) -> Live:
        run = run or self.run
        gossip = gossip or Gossip(codec="fp32", tau_s=4.0, heldout_margin=10.0)
        peers = tuple(each if isinstance(each, str) else each.address for each in initial)
        network = Network(initial_peers=peers, ttl_s=self.ttl_s, refresh_s=self.refresh_s)
        net = await self._make_net(*peers, greeting=Greeting(run, "test", gossip.topology))
        mine = replica(run, block, len(self._all), pace_s)
        server = TorchServer(run, block, device="cpu")
        history = _recorded(server)
        config = NodeConfig(network=network, gossip=gossip, training=training or Training(block=block), files=Files())
        node = Node(
            config, run, block, Parts(net.transport, net.directory, mine, server),
            clock=time.time, rng=random.Random(len(self._all)), status_json=lambda: "{}",
        )  # fmt: skip
        stopping = asyncio.Event()
        task = asyncio.create_task(node.run(stopping, fresh=fresh), name=f"node {len(self._all)}")
        live = Live(node, net, mine, server, stopping, task, history)
        self._all.append(live)
        return live

    async def close(self) -> None:
        for live in reversed(self._all):
            if not live.task.done():
                await live.stop()
            assert not live.node.fatal.done(), live.node.fatal.result()


def _recorded(server: TorchServer) -> list[Published]:
    """A list to which every state is added that the server is given."""
    history: list[Published] = []
    refresh = server.refresh

    def record(published: Published, state: memoryview) -> None:
        history.append(published)
        refresh(published, state)

    server.refresh = record  # type: ignore[method-assign]
    return history


# ---- nodes in processes of their own --------------------------------------------------------------------------------------------------


@dataclass
class Program:
    """A `blocktrain-node` process, its statuses and its talk."""

    process: subprocess.Popen[bytes]
    out: Path
    log: Path
    children: dict[int, psutil.Process] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.process.pid

    def statuses(self) -> list[dict[str, Any]]:
        """All that it printed so far, oldest first."""
        lines = self.out.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def status(self) -> dict[str, Any]:
        said = self.statuses()
        return said[-1] if said else {}

    def talk(self) -> str:
        return self.log.read_text()

    def wait(self, condition: Callable[[dict[str, Any]], object], deadline_s: float = 2 * WAIT_S) -> dict[str, Any]:
        """The first status that fulfils a condition, among the latest."""
        end = time.monotonic() + deadline_s
        while True:
            status = self.status()
            self.daemons()
            if status and condition(status):
                return status
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.talk()}"
            assert time.monotonic() < end, f"not within {deadline_s:g} s; it says {status} and {self.talk()}"
            time.sleep(0.05)

    def wait_talk(self, words: str, deadline_s: float = WAIT_S) -> None:
        """Wait until it has said these words, or has ended."""
        end = time.monotonic() + deadline_s
        while words not in self.talk() and self.process.poll() is None:
            assert time.monotonic() < end, f"it does not say {words!r}: {self.talk()}"
            time.sleep(0.01)

    def up(self) -> str:
        """Wait until it trains; its address."""
        status = self.wait(lambda status: status["phase"] == "training" and status["addresses"])
        return str(status["addresses"][0])

    def daemons(self) -> list[psutil.Process]:
        """Its children, also those that it had."""
        with contextlib.suppress(psutil.Error):
            self.children |= {child.pid: child for child in psutil.Process(self.pid).children(recursive=True)}
        return list(self.children.values())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, deadline_s: float = 30.0) -> int:
        """Wait for its end; the exit code."""
        return self.process.wait(deadline_s)

    def running(self, deadline_s: float = 10.0) -> list[psutil.Process]:
        """Its children that still run, after a moment's grace."""
        end = time.monotonic() + deadline_s
        while True:
            children = [child for child in self.daemons() if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
            if not children or time.monotonic() > end:
                return children
            time.sleep(0.05)

    def left(self) -> list[object]:
        """What it left behind: children that still run, sockets, its status file."""
        sockets = leftovers.SOCKETS.glob(f"hivemind-blocktrain-{self.pid}-*.sock")
        return [*self.running(), *sockets, *self.out.parent.glob(f"runtime/node-{self.pid}*")]


class Programs:
    """Starts node processes in a folder of its own, and ends those that still run at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe = folder / "run.toml"
        self.recipe.write_text(recipe(steps_per_round="50"))
        self.data = folder / "text.txt"
        self.data.write_bytes(bytes(TEXT.astype(np.uint8)) * 4)
        self.runtime = folder / "runtime"
        self._all: list[Program] = []

    def env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BLOCKTRAIN_")}
        return {**kept, "BLOCKTRAIN_RUNTIME_DIR": str(self.runtime), "XDG_DATA_HOME": str(self.folder / "data"), "NO_COLOR": "1"}

    def start(self, *more: str, host: bool = False, block: int | None = 0, peers: tuple[str, ...] = ()) -> Program:
        number = len(self._all)
        out, log = self.folder / f"node-{number}.jsonl", self.folder / f"node-{number}.log"
        arguments = ["--json", "--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--ttl-s", "8", "--refresh-s", "1", "--data", str(self.data)]
        if host:
            arguments += ["--new-run", str(self.recipe)]
        if block is not None:
            arguments += ["--block", str(block)]
        if peers:
            arguments += ["--initial-peers", *peers]
        start = "import sys; from blocktrain.node.commands.app import node_main; sys.exit(node_main())"  # as the installed program does
        with out.open("wb") as stdout, log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", start, *arguments, *more],
                cwd=self.folder, env=self.env(), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            )  # fmt: skip
        program = Program(process, out, log)
        self._all.append(program)
        return program

    def close(self) -> None:
        for program in self._all:
            daemons = program.daemons()
            if program.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    program.signal(signal.SIGCONT)
                program.process.kill()
                program.process.wait(10)
            for daemon in daemons:
                with contextlib.suppress(psutil.Error):
                    daemon.kill()
            psutil.wait_procs(daemons, 10)
        leftovers.sweep_sockets()


@contextlib.contextmanager
def stock_bootstrap(*more: str) -> Iterator[str]:
    """A `hivemind-dht` process as hivemind ships it, which knows nothing of us; its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hivemind.hivemind_cli.run_dht", "--host_maddrs", "/ip4/127.0.0.1/tcp/0", *more],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"(/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+)", line):
                yield found[1]
                return
        raise AssertionError("hivemind-dht ended before it said its address")
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()  # not by force: it removes its sockets and folders itself
        try:
            process.communicate(timeout=30)
            psutil.wait_procs(family, 10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own session: whatever is left of it
