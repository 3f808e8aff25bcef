"""Child processes of a simulation: their status lines, their logs, and the proof that none is left.

A child writes its status lines to a file, not to a pipe: a pipe fills up when we are busy, ends late when a grandchild holds it, and
leaves nothing to read afterwards. So everything here is plain polling, a few times a second, and needs no event loop. Each child carries
a mark in its environment, by which its daemon is found even when the child itself is gone. Processes are stopped by id, never by name.

Signals to us are only noted and acted on at the next poll, so that no child is ever lost between its start and its registration.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

import psutil

from blocktrain.node import local
from blocktrain.protocol.errors import BlocktrainError, UsageError

POLL_S: Final = 0.1
FREEZE_S: Final = 2.0  # for the kernel to stop a process
MAX_LINE_BYTES: Final = 64 * 1024  # a status is about 1 KB; what is longer is not a status
READ_BYTES: Final = 1 << 20
ALARMS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TRACEBACK: Final = b"Traceback (most recent call last)"
_RECORD: Final = re.compile(rb"\d{4}-\d\d-\d\d \S+ (\w+) ")  # how a line of a debug file begins, with its level
_MARK: Final = "SWARM_SIM_CHILD"  # environment variable of every child: our token, and its own pid's place in `Children.all`

Status = dict[str, Any]


class Failure(BlocktrainError):
    """Something that had to happen did not. One line that says what."""


class Interrupted(Exception):
    """The user, or the system, asked us to stop."""


@dataclass(frozen=True)
class Programs:
    """How to start a node and a client; tests put a stand-in here."""

    node: tuple[str, ...]
    client: tuple[str, ...]
    bare: tuple[str, ...] = ()
    liar: tuple[str, ...] = ()


def installed(niceness: int = 5) -> Programs:
    """The programs of this very installation. Nodes run at a lower priority than the clients that ask them."""

    def leashed(nice: int, program: str) -> tuple[str, ...]:
        # -P: a file named like one of our imports in the user's folder must not be taken for it.
        return (sys.executable, "-P", "-m", "blocktrain.swarm_sim.leash", str(nice), program)

    return Programs(
        leashed(niceness, "blocktrain-node"), leashed(0, "blocktrain"), leashed(niceness, "bare-loop"), leashed(niceness, "liar-node")
    )


@dataclass(frozen=True)
class Patience:
    """How long to wait for what, in seconds, before it counts as not happening. Generous: all nodes share one machine."""

    silent_s: float = 45.0  # a node says something every second, once it is up
    stop_s: float = 8.0  # after a SIGINT; a node promises 5, and ends itself by force then: it shall be the first to say so
    left_s: float = 2.0  # by which a node's daemon may outlive the node
    start_s: float = 120.0  # to a node's address
    meet_s: float = 120.0  # until everybody has seen everybody
    client_s: float = 180.0  # one client command, its start included
    exchange_s: float = 90.0  # to a block's first accepted exchange
    carry_on_s: float = 90.0  # until every survivor has made a round more
    rejoin_s: float = 150.0  # a start and a download, beside the others' training


PATIENT: Final = Patience()


@dataclass
class Child:
    """One child process and what it said. `status` is its last status line, {} before the first."""

    label: str
    process: subprocess.Popen[bytes]
    mark: str  # in its environment, and in that of whatever it starts
    out: Path  # its stdout
    log: Path  # its stderr
    started: float  # time.monotonic()
    said_at: float
    status: Status = field(default_factory=dict)
    garbage: int = 0  # lines of stdout that are no status
    frozen: bool = False
    expected_to_end: bool = False  # we killed it, or it is a client whose work ends
    _read: int = 0
    _rest: bytes = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal, None while it runs."""
        return self.process.poll()

    @property
    def alive(self) -> bool:
        return self.code is None

    def read(self) -> list[Status]:
        """The status lines since the last call, oldest first."""
        with self.out.open("rb") as file:
            file.seek(self._read)
            data = file.read(READ_BYTES)
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest = b""
            self.garbage += 1
        found = [status for status in map(_parse, lines) if status is not None]
        self.garbage += len(lines) - len(found)
        if found:
            self.status = found[-1]
        if data:
            self.said_at = time.monotonic()
        return found

    def last_words(self) -> str:
        """The last line of its log, for a message about its end."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else "it said nothing"


@dataclass(frozen=True)
class Cpu:
    """CPU seconds of children, and of what they started."""

    own: float
    daemons: float

    @property
    def total(self) -> float:
        return self.own + self.daemons


@dataclass(frozen=True)
class Ending:
    """How the children ended.

    Attributes:
        forced: labels of those that did not stop in time after a SIGINT.
        left: processes that were still there after their node had ended; they have been killed since.
        badly: label → exit code of nodes that stopped in time, but not with 0.
    """

    forced: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    badly: Mapping[str, int] = field(default_factory=dict)


class Children:
    """Starts, hears and ends child processes. Leaving the `with` block leaves none behind, whatever happened in it.

    Args:
        folder: gets `logs/LABEL.log` and `logs/LABEL.jsonl`; the children's working folder, so that no settings file applies to them.
        on_status: called with (child, status) for every status line.
        on_poll: called after every poll, to refresh what is shown.
        patience: how long children may be silent, and take to stop.
    """

    def __init__(
        self,
        folder: Path,
        on_status: Callable[[Child, Status], None] = lambda child, status: None,
        on_poll: Callable[[], None] = lambda: None,
        patience: Patience = PATIENT,
    ) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.all: list[Child] = []
        self.ending: Ending | None = None
        self.patience = patience
        self._on_status = on_status
        self._on_poll = on_poll
        self._alarms = 0
        self._token = secrets.token_hex(8)
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Children:
        self.logs.mkdir(parents=True, exist_ok=True)
        self._handlers = {number: signal.signal(number, self._alarm) for number in ALARMS}
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.stop()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def start(self, label: str, command: Sequence[str], *, ends: bool = False) -> Child:
        """Start a child. Its label names it and its logs; `ends` says that its end is no fault."""
        out, log = self.logs / f"{label}.jsonl", self.logs / f"{label}.log"
        mark = f"{self._token}:{len(self.all)}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("BLOCKTRAIN_")}
        with out.open("wb") as stdout, log.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=self.folder,
                env={**inherited, "PYTHONUNBUFFERED": "1", _MARK: mark},
                start_new_session=True,
            )
        now = time.monotonic()
        child = Child(label, process, mark, out, log, now, now, expected_to_end=ends)
        self.all.append(child)
        return child

    def poll(self) -> None:
        """Hear everybody once. Raises: Interrupted, where a signal came since. Failure: a child ended, or hangs."""
        self._listen()
        if self._alarms:
            raise Interrupted
        now = time.monotonic()
        for child in self.all:
            if child.expected_to_end:
                continue
            if child.code is not None:
                raise Failure(f"{child.label} ended by itself with exit code {child.code}: {child.last_words()}")
            if not child.frozen and now - child.said_at > self.patience.silent_s:
                raise Failure(f"{child.label} has said nothing for {self.patience.silent_s:g} s")

    def wait(self, met: Callable[[], bool], timeout_s: float, what: Callable[[], str] | str, every_s: float = POLL_S) -> float:
        """Poll until `met()`, and return how long that took in seconds.

        Raises: Failure: `timeout_s` passed; its text is `what`, which says what did not happen. Also what `poll` raises.
        """
        begun = time.monotonic()
        while True:
            self.poll()
            self._on_poll()
            waited = time.monotonic() - begun
            if met():
                return waited
            if waited > timeout_s:
                raise Failure(f"{what if isinstance(what, str) else what()} within {timeout_s:g} s")
            time.sleep(every_s)

    def run(self, seconds: float) -> None:
        """Let the children run, and hear them, for this long."""
        until = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= until, seconds + 60, "this machine did not keep time")

    def kill(self, child: Child) -> None:
        """SIGKILL, as a power cut would: nothing is said or saved."""
        child.expected_to_end = True
        child.process.kill()
        child.process.wait()

    def freeze(self, children: Iterable[Child]) -> None:
        """Stop children and their daemons in the middle of whatever they do. They are not expected to say anything meanwhile."""
        stopped = []
        for child in children:
            child.frozen = True
            for process in self.family(child):
                _signal(process.pid, signal.SIGSTOP)
                stopped.append(process)
        for _ in _until(FREEZE_S):
            if not any(_running(process) for process in stopped):
                return

    def thaw(self, children: Iterable[Child]) -> None:
        """Let frozen children go on; their daemons first, so that no node finds its own daemon deaf."""
        for child in children:
            for process in reversed(self.family(child)):
                _signal(process.pid, signal.SIGCONT)
            child.frozen = False
            child.said_at = time.monotonic()

    def family(self, child: Child) -> list[psutil.Process]:
        """The child and everything that it started and that still runs, itself first."""
        return sorted(_marked(child.mark), key=lambda process: (process.pid != child.pid, process.pid))

    def cpu_s(self, children: Iterable[Child]) -> Cpu:
        """CPU seconds, user and system, that children and their daemons have used."""
        own = daemons = 0.0
        for child in children:
            for process in self.family(child):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    if process.pid == child.pid:
                        own += times.user + times.system
                    else:
                        daemons += times.user + times.system
        return Cpu(own, daemons)

    def tracebacks(self) -> int:
        """Tracebacks in what all children said, and in the debug files under the folder; there, those of DEBUG lines do not count."""
        said = sum(_tracebacks(path) for path in self.logs.iterdir())
        return said + sum(_tracebacks(path) for path in self.folder.glob("nodes/*/debug.log*"))

    def stop(self) -> Ending:
        """End all children: SIGINT, SIGKILL for those that take too long and, after that, for whatever they left. Never raises."""
        if self.ending is not None:
            return self.ending
        running = [child for child in self.all if child.alive]
        nodes = [child for child in running if not child.expected_to_end]
        self.thaw([child for child in running if child.frozen])
        for child in running:
            child.expected_to_end = True
            _signal(child.pid, signal.SIGINT)
        already = self._alarms
        for _ in _until(self.patience.stop_s):
            self._listen()
            self._on_poll()
            # A second Ctrl-C ends the wait.
            if self._alarms > max(1, already) or not any(child.alive for child in running):
                break
        late = [child for child in running if child.alive]
        for child in late:
            child.process.kill()
            child.process.wait()
        for _ in _until(self.patience.left_s):
            left = _marked(self._token)
            if not left:
                break
        self._listen()
        names = tuple(_describe(process) for process in left)
        for process in left:
            _signal(process.pid, signal.SIGKILL)
        with contextlib.suppress(UsageError):
            local.sweep()  # what those could not remove that were killed
        badly = {child.label: child.code for child in nodes if child not in late and child.code}
        self.ending = Ending(tuple(child.label for child in late), names, badly)
        return self.ending

    def _listen(self) -> None:
        for child in self.all:
            for status in child.read():
                self._on_status(child, status)

    def _alarm(self, number: int, frame: FrameType | None) -> None:
        self._alarms += 1


def _parse(line: bytes) -> Status | None:
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        status = json.loads(line)
    except ValueError:
        return None
    return status if isinstance(status, dict) else None


def _tracebacks(path: Path) -> int:
    """Tracebacks in a log, but for those that are a DEBUG record's detail: a peer that is gone is no fault of ours."""
    count, level = 0, b""
    with path.open("rb") as file:
        for line in file:
            record = _RECORD.match(line)
            level = record[1] if record else level
            count += line.startswith(_TRACEBACK) and level != b"DEBUG"
    return count


def _marked(mark: str) -> list[psutil.Process]:
    """The running processes whose mark is `mark`, or begins with it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # of another user, or just ended
            theirs = process.environ().get(_MARK, "")
            if theirs == mark or theirs.startswith(f"{mark}:"):
                found.append(process)
    return found


def _running(process: psutil.Process) -> bool:
    """Whether it may use the processor."""
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.name()} ({process.pid})"
    except psutil.Error:
        return f"({process.pid})"


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _until(seconds: float) -> Iterator[None]:
    """Once now, then every POLL_S / 2 until the time is over, and once more at its end."""
    end = time.monotonic() + seconds
    while True:
        yield
        if time.monotonic() >= end:
            return
        time.sleep(POLL_S / 2)
