"""The two sides of `bench gossip` as groups of child processes: ours (gossip_peer.py) and hivemind's (bench_gossip.py's `Rival`).

Both are told by lines of JSON, and both are measured alike: wall seconds of the slowest peer of a step, CPU seconds of every process of
the side, daemons and forks included.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import psutil

from blocktrain.swarm_sim.benches import Session
from blocktrain.swarm_sim.processes import Failure

ANSWER_S: Final = 180.0
STOP_S: Final = 10.0
TRIES: Final = 5


@dataclass(frozen=True)
class Place:
    """Where each peer of a side runs: the command in front of Python (a network namespace, say), and the address to listen on."""

    ours: Sequence[tuple[tuple[str, ...], str]]
    theirs: Sequence[tuple[tuple[str, ...], str]]


_LOOPBACK: Final = ((), "/ip4/127.0.0.1/tcp/0")
LOCAL: Final = Place((_LOOPBACK,) * 4, (_LOOPBACK,) * 4)


@dataclass(frozen=True)
class Sample:
    """One step of one side."""

    wall_s: float
    cpu_s: float
    waited_s: float = 0.0


class Puppet:
    """A child process that answers each line with a line."""

    def __init__(self, module: str, place: tuple[tuple[str, ...], str], arguments: Sequence[str], log: Path) -> None:
        prefix, address = place
        self.log = log
        self._errors: IO[bytes] = log.open("wb")
        command = [*prefix, sys.executable, "-P", "-m", f"blocktrain.swarm_sim.{module}", address, *arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._rest = b""

    def ask(self, do: str, **arguments: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """The answer to the oldest question. Raises: Failure: none in time, or the process ended."""
        assert self._process.stdout is not None
        end = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left_s = end - time.monotonic()
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, left_s))
            data = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not data:
                raise Failure(f"{self.log.stem} {'ended' if ready else 'did not answer'}; see {self.log}")
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        if not line.startswith(b"{"):
            return self.hear(end - time.monotonic())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def call(self, do: str, **arguments: object) -> dict[str, Any]:
        self.ask(do, **arguments)
        return self.hear()

    def family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        return []

    def cpu_s(self) -> float:
        """Of the process and all that it started and that lives still."""
        total = 0.0
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def peak_mib(self) -> float:
        """Resident memory now, of the whole family, without what they share."""
        total = 0
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().uss
        return total / 1024**2

    def stop(self) -> None:
        family = self.family()
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        _, family = psutil.wait_procs(family[1:], STOP_S)  # torch's manager of shared memory removes its folder at its end
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


@dataclass
class Ours:
    """Our peers. With four, a step is two rounds of two pairs, so that everybody ends with everybody's work."""

    peers: list[Puppet]
    shape: tuple[int, int]
    rate_bytes_per_s: float | None = None  # of the link, where it is emulated
    parameters: int = 0
    bytes_sent: int = 0
    lanes: int = 0
    names: list[str] = field(default_factory=list)
    link_shares: list[float] = field(default_factory=list)
    phases: list[tuple[float, float, float]] = field(
        default_factory=list
    )  # s of each exchange: to our first chunk, to "verified", to the end

    def build(self, *, heldout: bool) -> None:
        for index, peer in enumerate(self.peers):
            peer.ask("build", width=self.shape[0], layers=self.shape[1], seed=index, heldout=heldout)
        for peer in self.peers:
            self.parameters = peer.hear()["parameters"]
        self.names = [peer.call("who")["peer"] for peer in self.peers]

    def step(self, codec: str) -> Sample:
        rounds = [((0, 1),)] if len(self.peers) == 2 else [((0, 1), (2, 3)), ((0, 2), (1, 3))]
        cpu = sum(peer.cpu_s() for peer in self.peers)
        wall_s = 0.0
        self.bytes_sent = 0
        for pairs in rounds:
            begins, ends = [], []
            for one, other in pairs:
                self.peers[one].ask("exchange", peer=self.names[other], codec=codec)
                self.peers[other].ask("took")
            for one, other in pairs:
                mine, took = self.peers[one].hear(), self.peers[other].hear()
                if (mine["kind"], took["kind"]) != ("merged", "merged"):
                    raise Failure(f"our exchange ended as {mine['kind']}: {mine['why']}; {took['kind']}: {took['why']}")
                begins.append(mine["began"])
                ends += [mine["ended"], took["ended"]]
                self.bytes_sent += mine["bytes"]
                self.lanes = mine["lanes"]
                begin, first, verified = mine["began"], mine["first_chunk_at"], mine["verified_at"]
                self.phases.append((first - begin, verified - first, ends[-2] - verified))
                if self.rate_bytes_per_s:
                    self.link_shares.append(mine["bytes"] / ((verified - first) * self.rate_bytes_per_s))
            wall_s += max(ends) - min(begins)
        return Sample(wall_s, sum(peer.cpu_s() for peer in self.peers) - cpu)

    def peak_mib(self) -> float:
        return max(peer.peak_mib() for peer in self.peers)


@dataclass
class Theirs:
    """hivemind's peers, one group. `wrong` counts steps that reported success and had averaged only a part, or nothing."""

    peers: list[Puppet]
    wrong: int = 0

    def build(self, parameters: int) -> None:
        for index, peer in enumerate(self.peers):
            peer.ask("build", parameters=parameters, group=len(self.peers), index=index)
        for peer in self.peers:
            peer.hear()

    def step(self, codec: str) -> Sample:
        """One averaging, and one more where its result is not the mean. Raises: Failure: several times over."""
        for _ in range(TRIES):
            sample = self._average(codec)
            if sample is not None:
                return sample
            self.wrong += 1
        raise Failure("hivemind's steps report success, but its tensors are not the mean")

    def _average(self, codec: str) -> Sample | None:
        """None: the tensors are not the mean. A group that fell apart in matchmaking is sought again."""
        for _ in range(TRIES):
            for peer in self.peers:
                peer.ask("match", codec=codec)
            matched = [peer.hear() for peer in self.peers]
            if not any(answer["failed"] for answer in matched):
                break
        else:
            raise Failure("hivemind's averagers found no group")
        cpu = sum(peer.cpu_s() for peer in self.peers)
        mean = sum(range(len(self.peers))) / len(self.peers)
        for peer in self.peers:
            peer.ask("average", codec=codec, expected=mean)
        averaged = [peer.hear() for peer in self.peers]
        wall_s = max(answer["seconds"] for answer in averaged)
        if max(answer["worst"] for answer in averaged) > 0.01:
            return None
        cpu = sum(peer.cpu_s() for peer in self.peers) - cpu
        return Sample(wall_s, cpu, max(answer["waited_s"] for answer in matched))

    def peak_mib(self) -> float:
        return max(peer.peak_mib() for peer in self.peers)


@contextlib.contextmanager
def open_sides(session: Session, place: Place, count: int, shape: tuple[int, int]) -> Iterator[tuple[Ours, Theirs]]:
    """Start both sides, connected and built; stop them afterwards."""
    puppets: list[Puppet] = []

    def start(module: str, places: Sequence[tuple[tuple[str, ...], str]]) -> list[Puppet]:
        known: list[str] = []
        side: list[Puppet] = []
        for index in range(count):
            log = session.folder / f"{module}-{shape[0]}-{index}.log"
            puppet = Puppet(module, places[index], known, log)
            puppets.append(puppet)
            side.append(puppet)
            if not known:
                known = [str(address) for address in puppet.call("who")["addresses"]]
        for puppet in side[1:]:
            puppet.call("who")
        return side

    try:
        ours = Ours(start("gossip_peer", place.ours), shape)
        theirs = Theirs(start("bench_gossip", place.theirs))
        ours.build(heldout=False)
        theirs.build(ours.parameters)
        yield ours, theirs
    finally:
        for puppet in puppets:
            puppet.stop()
