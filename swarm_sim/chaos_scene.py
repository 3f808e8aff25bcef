"""A swarm of processes as checkers see it (world/checkers/scene.py), told again from its timeline (timeline.py), line by line.

Nodes are told apart by name: one that was killed and started with its identity is the same node in another life. What is true of a node
comes from the simulator (it was started, killed, frozen) and from the node's own events; what it says of itself is its last status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from blocktrain.swarm_sim.timeline import Line

SAMPLE_S: Final = 5.0  # between two looks at everybody
HOLDING: Final = ("training", "serving")


@dataclass(frozen=True)
class Bounds:
    """The story's bounds: `scene.Frame`."""

    blocks: int
    heal_at_s: float
    end_s: float
    ttl_s: float
    refresh_s: float
    grace_s: float
    hopeless: bool = False


@dataclass
class Person:
    """One node: `scene.Actor`."""

    stage: Recorded
    number: int
    name: str
    block: int
    lie: str = ""
    epoch: int = 0
    up: bool = False
    frozen: bool = False
    in_dht: bool = True
    phase: str = "starting"
    round: int = 0
    digest: bytes = b""
    accepted: int = 0
    saved: int = 0  # round of the newest checkpoint that it spoke of
    status: Line = field(default_factory=dict)
    rounds: int = 0
    _since_s: float = 0.0
    _thawed_s: float = 0.0
    _began: bool = False
    _ends_at_s: float | None = None
    _exchange: str = ""

    @property
    def liar(self) -> bool:
        return bool(self.lie)

    @property
    def up_s(self) -> float:
        """Since the node was up, or went on after it was frozen; 0 before."""
        return self.stage.elapsed_s - max(self._since_s, self._thawed_s) if self._began else 0.0

    @property
    def round_s(self) -> float:
        return self.stage.round_s

    @property
    def overdue_s(self) -> float:
        return 0.0 if self._ends_at_s is None else self.stage.elapsed_s - max(self._ends_at_s, self._thawed_s)

    @property
    def holds(self) -> bool:
        return self.up and self.phase in HOLDING

    def waiting(self) -> tuple[str, str, float, str]:
        said = self.status
        if not said:
            return "starting", "its first word", 0.0, "to say something"
        return str(said["phase"]), str(said["waiting_for"]), float(said["phase_s"] or 0.0), str(said["next_action"])

    def missing(self) -> set[int]:
        return {block for block, count in enumerate(self.status.get("coverage") or ()) if not count}

    def known(self, block: int) -> set[int]:
        numbers = (self.stage.by_peer.get(peer) for peer, theirs in self.status.get("known") or () if theirs == block)
        return {number for number in numbers if number is not None}

    # ---- lines ------------------------------------------------------------------------------------------------------------------

    def started(self, life: int) -> None:
        self.up, self.frozen, self.epoch, self._began = True, False, life, False
        self.phase, self.status, self._ends_at_s, self.accepted = "starting", {}, None, 0

    def began(self, round: int, digest: bytes) -> None:
        self._began, self._since_s, self.round, self.digest = True, self.stage.elapsed_s, round, digest

    def gone(self) -> None:
        self.up = self.frozen = self._began = False
        self._ends_at_s = None

    def thawed(self) -> None:
        self.frozen, self._thawed_s = False, self.stage.elapsed_s

    def exchange(self, id: str, ends_at_s: float) -> None:
        self._exchange, self._ends_at_s = id, ends_at_s

    def exchange_ended(self, id: str) -> None:
        if id == self._exchange:
            self._ends_at_s = None

    def says(self, line: Line) -> None:
        self.status = line
        self.saved = int(line.get("checkpoint_round") or self.saved)


@dataclass
class Hooks:
    """`scene.Hooks`, and one for all lines."""

    started: list[Callable[[Any], None]] = field(default_factory=list)
    ended: list[Callable[[Any], None]] = field(default_factory=list)
    published: list[Callable[[Any, str, str | None], None]] = field(default_factory=list)
    sampled: list[Callable[[float], None]] = field(default_factory=list)
    lines: list[Callable[[Person, Line], None]] = field(default_factory=list)


class Recorded:
    """A swarm told again: `scene.Scene`. Make the checkers, then call `run`."""

    skew_s = 0.0  # one machine, one clock

    def __init__(self, plan: Bounds, lines: Iterable[Line], began: float) -> None:
        self.plan = plan
        self.lines = list(lines)
        self.watchers = Hooks()
        self.elapsed_s = 0.0
        self.settled_at_s = plan.heal_at_s
        self.nodes: list[Person] = []
        self.by_name: dict[str, Person] = {}
        self.by_peer: dict[str, int] = {}
        self._began = began  # Unix seconds, for the deadlines in events
        for line in self.lines:
            self._meet(line)
        self.round_s = self._round_s()

    def _meet(self, line: Line) -> None:
        name = line.get("node")
        if line["what"] == "start" and name not in self.by_name:
            person = Person(self, len(self.nodes), str(name), int(line["block"]), str(line.get("lie", "")))
            self.nodes.append(person)
            self.by_name[person.name] = person
        if line["what"] == "said" and line.get("peer") and name in self.by_name:
            self.by_peer[str(line["peer"])] = self.by_name[str(name)].number

    def _round_s(self) -> float:
        """How long a round takes on this machine, over all nodes and the whole story."""
        rounds = sum(1 for line in self.lines if line["what"] == "published" and line.get("how") != "fetched")
        up_s = 0.0
        since: dict[str, float] = {}
        for line in self.lines:
            if line["what"] == "began":
                since[line["node"]] = float(line["at_s"])
            elif line["what"] in ("kill", "exit") and line["node"] in since:
                up_s += float(line["at_s"]) - since.pop(line["node"])
        up_s += sum(self.plan.end_s - at_s for at_s in since.values())
        return up_s / max(1, rounds)

    def alive(self) -> list[Person]:
        return [node for node in self.nodes if node.up and not node.frozen]

    def holders(self, block: int) -> list[Person]:
        return [node for node in self.nodes if node.block == block and node.holds]

    def lies(self, peer: str) -> bool:
        return any(node.liar for node in self.nodes if node.number == self.by_peer.get(peer))

    def can_meet(self, one: int, other: int) -> bool:
        return True

    def run(self) -> None:
        """Tell the whole story, up to its end; what the nodes say when they are ended is no part of it."""
        next_s = 0.0
        for line in self.lines:
            if line["at_s"] > self.plan.end_s:
                break
            while next_s <= line["at_s"]:
                self._sample(next_s)
                next_s += SAMPLE_S
            self.elapsed_s = max(self.elapsed_s, float(line["at_s"]))
            person = self.by_name.get(str(line.get("node")))
            if person is not None:
                self._tell(person, line)
        self._sample(self.plan.end_s)

    def _sample(self, at_s: float) -> None:
        self.elapsed_s = max(self.elapsed_s, at_s)
        for watcher in self.watchers.sampled:
            watcher(at_s)

    def _tell(self, person: Person, line: Line) -> None:
        watchers = self.watchers
        life = int(line.get("life", 0))
        if line["what"] != "start" and life != person.epoch:
            return  # of a process that is gone
        match line["what"]:
            case "start":
                person.started(life)
            case "kill" | "exit":
                person.gone()
                for ended in watchers.ended:
                    ended(person)
            case "freeze":
                person.frozen = True
            case "thaw":
                person.thawed()
            case "began":
                person.began(int(line["round"]), bytes.fromhex(line["digest"]))
                for started in watchers.started:
                    started(person)
            case "phase":
                person.phase = str(line["phase"])
            case "published":
                person.round, person.digest = int(line["round"]), bytes.fromhex(line["digest"])
                person.accepted += line["how"] == "merged"
                for published in watchers.published:
                    published(person, str(line["how"]), line.get("peer"))
            case "exchange":
                person.exchange(str(line["exchange"]), float(line["ends_at"]) - self._began)
            case "ended":
                person.exchange_ended(str(line["exchange"]))
            case "said":
                person.says(line)
            case _:
                pass
        for told in watchers.lines:
            told(person, line)
