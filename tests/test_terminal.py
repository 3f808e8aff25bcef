"""A person at a terminal: `blocktrain-node --initial-peers ADDRESS` shows who holds what, asks for a block, and takes the answer; and what
comes of a shell that stops reading, or has nowhere to put what it reads.
"""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.swarm_kit import WAIT_S, Programs

pytestmark = pytest.mark.real
START = "import sys; from blocktrain.node.commands.app import node_main; sys.exit(node_main())"


class Terminal:
    """A node on a terminal of its own, as a shell gives it one."""

    def __init__(self, programs: Programs, *arguments: str) -> None:
        self.ours, theirs = pty.openpty()
        self.said = ""
        common = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--ttl-s", "8", "--refresh-s", "1", "--data", str(programs.data))
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *common, *arguments],
            cwd=programs.folder, env=programs.env(), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)

    def type(self, words: str) -> None:
        os.write(self.ours, words.encode())

    def read_until(self, words: str) -> None:
        """Wait until it has said these words. What it says is kept in `said`."""
        end = time.monotonic() + 2 * WAIT_S
        while words not in self.said:
            assert time.monotonic() < end, f"it does not say {words!r}: {self.said}"
            assert self._read(1.0) or self.process.poll() is None, f"ended with {self.process.returncode}: {self.said}"

    def end(self) -> int:
        """Its exit code, once it has ended; all that it said until then is in `said`."""
        end = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it does not end: {self.said}"
            self._read(0.1)
        while self._read(0.0):
            pass
        return self.process.returncode

    def _read(self, wait_s: float) -> bool:
        """Whether anything came. A terminal whose other end is closed is an error on Linux."""
        if not select.select([self.ours], [], [], wait_s)[0]:
            return False
        try:
            data = os.read(self.ours, 65536)
        except OSError:
            return False
        self.said += data.decode("utf-8", "replace")
        return bool(data)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self.ours)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    started = Programs(tmp_path)
    yield started
    started.close()


def test_a_joiner_at_a_terminal_is_asked_for_a_block_and_holds_the_one_that_is_typed(programs: Programs) -> None:
    host = programs.start(host=True)
    address = host.up()
    with contextlib.closing(Terminal(programs, "--initial-peers", address)) as terminal:
        terminal.read_until("which block?")
        for words in ("block 0: held by 1", "block 1: held by nobody", "0 … 2", "Enter for the one most in need"):
            assert words in terminal.said
        terminal.type("2\n")
        terminal.read_until("block 2 of run tiny")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 0, terminal.said
        assert "Traceback" not in terminal.said

    with contextlib.closing(Terminal(programs, "--initial-peers", address)) as terminal:
        terminal.read_until("which block?")
        terminal.type("the second\n")
        assert terminal.end() == 2
        assert "'the second' is neither a block number (0 … 2) nor auto" in terminal.said

    with contextlib.closing(Terminal(programs, "--initial-peers", address)) as terminal:
        terminal.read_until("which block?")
        terminal.process.send_signal(signal.SIGINT)  # Ctrl-C while it waits for an answer
        assert terminal.end() in (0, 130)
        assert "Traceback" not in terminal.said

    with contextlib.closing(Terminal(programs, "--initial-peers", address)) as terminal:
        terminal.read_until("which block?")
        terminal.type("\n")
        terminal.read_until("needs us most")
        assert "block 0 needs us most" not in terminal.said  # it is held already


def test_a_node_whose_json_nobody_reads_any_more_ends_in_order_and_says_so_by_its_exit_code(programs: Programs) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", START, "--new-run", str(programs.recipe), "--json", "--host-maddrs", "/ip4/127.0.0.1/tcp/0"],
        cwd=programs.folder, env=programs.env(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("{")
        process.stdout.close()  # as `| head -1` does
        assert process.wait(2 * WAIT_S) == 141
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_node_whose_output_does_not_fit_on_the_disk_goes_on(programs: Programs) -> None:
    common = ("--json", "--rounds", "1", "--host-maddrs", "/ip4/127.0.0.1/tcp/0")
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(
            [sys.executable, "-c", START, "--new-run", str(programs.recipe), *common],
            cwd=programs.folder, env=programs.env(), stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            _, said = process.communicate(timeout=2 * WAIT_S)
        finally:
            process.kill()
            process.wait(10)
    assert process.returncode == 0, said
    assert said.count("cannot be written to stdout: No space left on device") == 1
    assert "Traceback" not in said
