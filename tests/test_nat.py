"""Two nodes behind two NATs, and four relays: real routers, made of network namespaces and iptables.

The addresses only look public: nothing leaves the namespaces. Skipped where they cannot be made (not root, no `ip`, no `iptables`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.swarm_kit import Program, Programs, recipe

pytestmark = pytest.mark.real  # processes of their own

RELAYS = ("11.0.0.1", "11.0.0.2", "11.0.0.3", "11.0.0.4")
START = "import sys; from blocktrain.node.commands.app import main; sys.exit(main())"
WAIT_S = 150.0


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


class Internet:
    """A public street with relays on it, and two homes behind routers that masquerade."""

    def __init__(self, mark: str) -> None:
        self.public, *self.routers = (f"{mark}{name}" for name in ("p", "r1", "r2"))
        self.homes = [f"{mark}h1", f"{mark}h2"]
        self._mark = mark
        self._spaces: list[str] = []

    def build(self) -> None:
        """Raises: OSError: what cannot be made here."""
        for name in (self.public, *self.routers, *self.homes):
            run("ip", "netns", "add", name)
            self._spaces.append(name)
            self._ip(name, "link", "set", "lo", "up")
        self._ip(self.public, "link", "add", "street", "type", "bridge")
        self._ip(self.public, "link", "set", "street", "up")
        for host in RELAYS:
            self._ip(self.public, "addr", "add", f"{host}/24", "dev", "street")
        for number, (router, home) in enumerate(zip(self.routers, self.homes, strict=True), 1):
            self._cable(router, "wan", self.public, f"to{number}")
            self._ip(self.public, "link", "set", f"to{number}", "master", "street")
            self._ip(router, "addr", "add", f"11.0.0.{10 + number}/24", "dev", "wan")
            self._cable(router, "lan", home, "eth0")
            self._ip(router, "addr", "add", f"10.{number}.0.1/24", "dev", "lan")
            self._ip(home, "addr", "add", f"10.{number}.0.2/24", "dev", "eth0")
            self._ip(home, "route", "add", "default", "via", f"10.{number}.0.1")
            run("ip", "netns", "exec", router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            for rule in (
                ("-t", "nat", "-A", "POSTROUTING", "-o", "wan", "-j", "MASQUERADE"),
                ("-P", "FORWARD", "DROP"),
                ("-A", "FORWARD", "-i", "lan", "-j", "ACCEPT"),
                ("-A", "FORWARD", "-m", "state", "--state", "ESTABLISHED,RELATED", "-j", "ACCEPT"),
            ):
                run("ip", "netns", "exec", router, "iptables", *rule)

    def _cable(self, space: str, name: str, other: str, other_name: str) -> None:
        run("ip", "link", "add", f"{self._mark}a", "type", "veth", "peer", "name", f"{self._mark}b")
        run("ip", "link", "set", f"{self._mark}a", "netns", space, "name", name)
        run("ip", "link", "set", f"{self._mark}b", "netns", other, "name", other_name)
        self._ip(space, "link", "set", name, "up")
        self._ip(other, "link", "set", other_name, "up")

    def _ip(self, space: str, *words: str) -> None:
        run("ip", "-n", space, *words)

    def close(self) -> None:
        for name in self._spaces:
            with contextlib.suppress(OSError):
                run("ip", "netns", "del", name)


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    missing = [tool for tool in ("ip", "iptables") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"network namespaces need root, ip and iptables{f' ({missing[0]} is missing)' if missing else ''}")
    made = Internet(f"bt{os.getpid() % 10000}")
    try:
        try:
            made.build()
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        yield made
    finally:
        made.close()


@pytest.fixture
def relays(internet: Internet) -> Iterator[tuple[str, ...]]:
    command = ["ip", "netns", "exec", internet.public, sys.executable, "-m", "tests.relays", *RELAYS]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    try:
        assert process.stdout is not None
        yield tuple(process.stdout.readline().split())
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        process.kill()
        process.wait(10)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    made = Programs(tmp_path)
    made.recipe.write_text(recipe(blocks="1"))
    yield made
    made.close()


def start(programs: Programs, space: str, relays: tuple[str, ...], *more: str) -> Program:
    """A node in a home, as its user would start it."""
    number = len(programs._all)
    out, log = programs.folder / f"node-{number}.jsonl", programs.folder / f"node-{number}.log"
    command = [
        "ip", "netns", "exec", space, sys.executable, "-c", START, "node", "--json", "--data", str(programs.data), "--block", "0",
        "--ttl-s", "20", "--refresh-s", "2", "--initial-peers", *relays, "--relay", *relays, *more,
    ]  # fmt: skip
    with out.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(command, cwd=programs.folder, env=programs.env(), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
    program = Program(process, out, log)
    programs._all.append(program)
    return program


@pytest.mark.timeout(600)
def test_05_two_nodes_behind_two_nats_average_and_serve_through_relays_and_know_it(
    internet: Internet, relays: tuple[str, ...], programs: Programs
) -> None:
    assert len(relays) == 4
    first = start(programs, internet.homes[0], relays, "--new-run", str(programs.recipe))
    status = first.wait(lambda status: any("/p2p-circuit" in address for address in status["addresses"]), WAIT_S)
    second = start(programs, internet.homes[1], relays)
    for node in (first, second):
        node.wait(lambda status: status["accepted"] >= 2, WAIT_S)
    for node in (first, second):
        status = node.wait(lambda status: status["reachable"] == "relay", WAIT_S)  # "no" until a relay has taken it in
        assert "/p2p-circuit" in status["reachable_why"]
    asked = [
        "ip", "netns", "exec", internet.public, sys.executable, "-c", START,
        "generate", "--initial-peers", *relays, "--prompt", "the river", "--max-tokens", "8", "--json",
    ]  # fmt: skip
    done = subprocess.run(asked, env=programs.env(), cwd=programs.folder, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["text"]
    for node in (first, second):
        node.signal(signal.SIGINT)
    for node in (first, second):
        assert node.end() == 0, node.talk()


def test_the_routers_really_keep_strangers_out(internet: Internet, programs: Programs) -> None:
    server = subprocess.Popen(
        ["ip", "netns", "exec", internet.homes[0], sys.executable, "-c", "import socket; s = socket.create_server(('', 4444)); s.accept()"]
    )
    try:
        dial = "import socket, sys; socket.create_connection((sys.argv[1], 4444), 1)"
        end = time.monotonic() + 30
        while True:  # until it listens, as its own router sees it
            inside = subprocess.run(
                ["ip", "netns", "exec", internet.routers[0], sys.executable, "-c", dial, "10.1.0.2"], capture_output=True, check=False
            )
            if inside.returncode == 0 or time.monotonic() > end:
                break
        assert inside.returncode == 0
        outside = ["ip", "netns", "exec", internet.public, sys.executable, "-c", dial, "11.0.0.11"]
        assert subprocess.run(outside, capture_output=True, check=False, timeout=30).returncode != 0
    finally:
        server.kill()
        server.wait()
