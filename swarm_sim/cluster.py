"""The nodes of one run as child processes: a host, its joiners, and what they say of themselves.

Only what any user of a node has: the command line, status lines, SIGUSR1, exit codes. `blocktrain-sim local` and `bench node` stand on it.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from blocktrain.swarm_sim.processes import Child, Children, Failure, Programs, Status

HOST: Final = "/ip4/127.0.0.1/tcp/0"
EVENTS: Final = ".events.jsonl"  # of a node's log for machines, beside its other logs
ENTRANCES: Final = 3  # addresses that a node or a client is given, once the host may have ended


@dataclass(frozen=True)
class Run:
    """What all nodes of the run are given."""

    recipe: Path
    data: tuple[str, ...]
    paused: bool = True  # start without training, until `resume`
    flags: tuple[str, ...] = ()  # more of `blocktrain-node`'s
    listen: Callable[[str], list[str]] = lambda name: ["--host-maddrs", HOST]  # a node's name → the options by which others reach it


@dataclass
class Member:
    """One life of a node: who it is here, and its last words. A node that is started again with its identity is one more member."""

    child: Child
    block: int
    host: bool = False
    killed: bool = False
    name: str = ""  # as it calls itself, in all its lives
    life: int = 1
    lie: str = ""  # of a node that lies: how

    @property
    def label(self) -> str:
        return self.child.label

    @property
    def status(self) -> Status:
        return self.child.status

    def number(self, key: str) -> float:
        """A number of its last status; 0 where it has not said one yet."""
        return number(self.status, key) or 0.0

    @property
    def phase(self) -> str:
        return "killed" if self.killed else "frozen" if self.child.frozen else str(self.status.get("phase", "starting"))

    @property
    def training(self) -> bool:
        return self.phase == "training"


@dataclass
class Cluster:
    """The nodes of one run, the host first."""

    children: Children
    programs: Programs
    run: Run
    members: list[Member] = field(default_factory=list)
    on_start: Callable[[Member, Path], None] = lambda member, events: None  # told of every process, and where its events go

    @property
    def host(self) -> Member:
        return self.members[0]

    @property
    def living(self) -> list[Member]:
        return [member for member in self.members if not member.killed]

    @property
    def blocks(self) -> int:
        return 1 + max(member.block for member in self.members)

    @property
    def lives(self) -> dict[str, Member]:
        """Each node's last life so far."""
        return {member.name: member for member in self.members}

    def address(self) -> str:
        """An address to ask first: the host's, as long as it lives. Raises: Failure: nobody has said one."""
        return self.addresses()[0]

    def addresses(self, besides: str = "") -> list[str]:
        """Addresses of living nodes, at most ENTRANCES of them, the oldest process first. `besides`: the name of one that is not asked."""
        found = []
        for member in self.living:
            theirs = member.status.get("addresses")
            if member.name != besides and not member.lie and isinstance(theirs, list) and theirs:
                found.append(str(theirs[0]))
        if not found:
            raise Failure(f"{self.host.label} did not say an address to join it by")
        return found[:ENTRANCES]

    def start_host(self) -> Member:
        """Start the node that hosts the run, and wait until it listens."""
        self._start("node-0a", 0, ["--new-run", str(self.run.recipe)], host=True)
        self.children.wait(
            lambda: bool(self.host.status.get("addresses")), self.children.patience.start_s, lambda: self._not_listening(self.host)
        )
        return self.host

    def join(self, block: int, paused: bool | None = None, lie: str = "") -> Member:
        """Start one more node of a block. It is given the host's address and the block's number; the swarm tells it the rest."""
        copies = len({member.name for member in self.members if member.block == block})
        label = f"node-{block}{_letters(copies)}"
        entrances = [self.address()] if self.run.paused and paused is None else self.addresses()
        return self._start(label, block, ["--block", str(block), "--initial-peers", *entrances], paused=paused, lie=lie)

    def restart(self, member: Member) -> Member:
        """Start a node that has ended again: its store, its identity, its name. It asks others than those that it began with."""
        label = f"node-{member.name}"
        arguments = ["--block", str(member.block), "--wait", "--initial-peers", *self.addresses(besides=member.name)]
        return self._start(label, member.block, arguments, paused=False, life=member.life + 1)

    def wait_met(self) -> float:
        """Wait until every living node sees every other, and all blocks held. Returns the seconds it took."""
        return self.children.wait(lambda: not self._strangers(), self.children.patience.meet_s, self._not_met)

    def resume(self, members: Sequence[Member] | None = None) -> None:
        """Let paused nodes train."""
        for member in self.living if members is None else members:
            member.child.process.send_signal(signal.SIGUSR1)

    def kill(self, member: Member) -> None:
        """SIGKILL."""
        member.killed = True
        self.children.kill(member.child)

    def total(self, key: str) -> int:
        """The sum of a count over all nodes, the killed ones too."""
        return int(sum(member.number(key) for member in self.members))

    def holders(self, block: int) -> list[Member]:
        return [member for member in self.living if member.block == block]

    def start_client(self, label: str, arguments: Sequence[str]) -> Child:
        """Start `blocktrain` with these arguments and the host's address."""
        entrances = self.addresses() if any(member.killed for member in self.members) else [self.address()]
        return self.children.start(label, [*self.programs.client, *arguments, "--initial-peers", *entrances, "--json"], ends=True)

    def ask(self, label: str, arguments: Sequence[str]) -> dict[str, Any]:
        """Run a client command to its end, and return the JSON object that it printed."""
        return self.answer(self.start_client(label, arguments))

    def answer(self, client: Child) -> dict[str, Any]:
        """Wait for a client's end and return the JSON object that it printed.

        Raises: Failure: it took too long, ended with another exit code than 0, or printed something else.
        """
        self.children.wait(lambda: not client.alive, self.children.patience.client_s, f"{client.label} did not end")
        if client.code:
            raise Failure(f"{client.label} ended with exit code {client.code}: {client.last_words()}")
        try:
            answer = json.loads(client.out.read_bytes())
        except ValueError:
            raise Failure(f"{client.label} did not print one JSON object") from None
        if not isinstance(answer, dict):
            raise Failure(f"{client.label} did not print one JSON object")
        return answer

    def _start(
        self,
        label: str,
        block: int,
        arguments: Sequence[str],
        host: bool = False,
        paused: bool | None = None,
        life: int = 1,
        lie: str = "",
    ) -> Member:
        """Start a process of the node `label`; its logs have its life in their names, from the second on."""
        store, name = self.children.folder / "nodes" / label, label.removeprefix("node-")
        label = label if life == 1 else f"{label}.{life}"
        events = self.children.logs / f"{label}{EVENTS}"
        command = [*self.programs.liar, lie] if lie else [*self.programs.node]
        command += [*arguments, *self.run.flags]
        if host:
            command += ["--block", str(block)]
        command += ["--data", *self.run.data, *self.run.listen(name), "--store", str(store), "--name", name, "--json"]
        command += ["--events", str(events)]
        if self.run.paused if paused is None else paused:
            command.append("--paused")
        member = Member(self.children.start(label, command), block, host, name=name, life=life, lie=lie)
        self.members.append(member)
        self.on_start(member, events)
        return member

    def _strangers(self) -> list[str]:
        """Nodes that do not see everybody yet."""
        others = len(self.living) - 1
        return [member.label for member in self.living if peers(member.status) < others]

    def _not_met(self) -> str:
        seen = ", ".join(f"{member.label} sees {peers(member.status)}" for member in self.living)
        return f"the {len(self.living)} nodes did not all see each other ({seen})"

    def _not_listening(self, member: Member) -> str:
        return f"{member.label} did not listen (its phase is {member.phase!r}; {member.child.last_words()})"


def number(status: Status, key: str) -> float | None:
    """A finite number of a status, or None."""
    value = status.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def peers(status: Status) -> int:
    """How many other nodes of the run a node sees."""
    value = status.get("peers")
    if isinstance(value, list | dict):
        return len(value)
    return int(number(status, "peers") or 0)


def _letters(index: int) -> str:
    """a, b, … z, aa, ab, …"""
    text = ""
    while index >= 0:
        text = chr(ord("a") + index % 26) + text
        index = index // 26 - 1
    return text
