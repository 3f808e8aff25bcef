"""What a local swarm came to: its verdict, its summary for people, its JSON and its picture."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blocktrain import __version__
from blocktrain.swarm_sim.chaos import Tally
from blocktrain.swarm_sim.cluster import Member, number
from blocktrain.swarm_sim.display import clock
from blocktrain.swarm_sim.page import Page
from blocktrain.swarm_sim.plots import Point, draw_losses
from blocktrain.swarm_sim.processes import Ending, Failure

COUNTS = ("accepted", "late", "refused", "one_sided")
MOST_SAID = 5  # violations that stand in the verdict's own words


@dataclass
class Report:
    """Filled while the story is told. What did not come to pass stays None, and is null in the JSON."""

    out: Path
    settings: Mapping[str, object]
    failed: list[str] = field(default_factory=list)  # what did not happen, the first reason first
    interrupted: bool = False
    met_s: float | None = None
    loss_before: float = float("nan")
    loss_after: float = float("nan")
    killed: str = ""
    killed_at_s: float = 0.0
    rejoined: str = ""
    rejoined_at_s: float = 0.0
    rejoin_s: float | None = None
    text: str = ""
    text_bytes: int = 0
    tokens_per_traversal: float | None = None
    counts: dict[str, int] = field(default_factory=dict)
    rounds: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    tracebacks: int = 0
    processes_left: tuple[str, ...] = ()
    points: list[Point] = field(default_factory=list)
    chain: list[tuple[float, float]] = field(default_factory=list)  # (seconds, loss) of each evaluation
    nodes: list[dict[str, object]] = field(default_factory=list)
    tally: Tally | None = None  # of the trouble, where there was some
    found: dict[str, object] = field(default_factory=dict)  # what the checkers came to, where they looked
    page: Page | None = None

    @property
    def ok(self) -> bool:
        return not self.failed and not self.interrupted

    @property
    def exit_code(self) -> int:
        return 130 if self.interrupted else int(bool(self.failed))

    def fail(self, what: str) -> None:
        self.failed.append(what)

    def before(self, at_s: float, loss: float) -> None:
        self.loss_before = loss
        self.chain.append((at_s, loss))

    def after(self, at_s: float, loss: float) -> None:
        self.loss_after = loss
        self.chain.append((at_s, loss))

    def wrote(self, prompt: str, answer: Mapping[str, Any]) -> None:
        """Take in what `blocktrain generate --json` printed. Raises: Failure: it is not what it should be."""
        text, length, traversals = answer.get("text"), number(dict(answer), "bytes"), number(dict(answer), "traversals")
        if not isinstance(text, str) or length is None or not traversals:
            raise Failure(f"generate gave no text: {str(dict(answer))[:200]}")
        self.text, self.text_bytes = text, int(length)
        self.tokens_per_traversal = length / traversals

    def count(self, members: Sequence[Member], seconds: float) -> None:
        """Add up what the nodes last said."""
        self.seconds = seconds
        self.counts = {key: int(sum(member.number(key) for member in members)) for key in COUNTS}
        self.rounds = int(max((member.number("round") for member in members), default=0))
        self.steps = int(sum(member.number("steps") for member in members))
        self.tokens = int(sum(member.number("tokens") for member in members))
        self.nodes = [{"node": member.label, "block": member.block, "killed": member.killed, **member.status} for member in members]

    def ended(self, ending: Ending, tracebacks: int) -> None:
        """How the processes ended is part of the verdict."""
        self.processes_left, self.tracebacks = ending.left, tracebacks
        if ending.forced:
            self.fail(f"{', '.join(ending.forced)} did not stop in time after a SIGINT")
        if ending.badly and not self.interrupted:
            self.fail("; ".join(f"{label} stopped with exit code {code}" for label, code in ending.badly.items()))
        if ending.left:
            self.fail(f"{len(ending.left)} processes were left behind: {', '.join(ending.left)}")
        if tracebacks:
            self.fail(f"{tracebacks} tracebacks stand in the logs")

    def judged(self, violations: Sequence[str], found: Mapping[str, object]) -> None:
        """What the checkers object to is part of the verdict, and so is that text could be had."""
        self.found = dict(found)
        for violation in violations[:MOST_SAID]:
            self.fail(violation)
        if len(violations) > MOST_SAID:
            self.fail(f"and {len(violations) - MOST_SAID} violations more, which the report lists")
        if found["blocks_lost"]:
            self.fail(f"{found['blocks_lost']} blocks were held by nobody for a while")
        if self.tally is not None and self.tally.texts_failed and not self.tally.texts:
            self.fail(f"the swarm wrote no text while it was in trouble: {self.tally.texts_failed[0]}")

    def as_json(self) -> dict[str, object]:
        """Flat keys for machines; the nodes' last statuses at the end."""
        return {
            "ok": self.ok,
            "failed": self.failed,
            "interrupted": self.interrupted,
            **self.settings,
            "version": __version__,
            "cpus": os.cpu_count(),
            "seconds": round(self.seconds, 1),
            "met_s": _rounded(self.met_s, 1),
            "loss_before": _rounded(self.loss_before, 4),
            "loss_after": _rounded(self.loss_after, 4),
            **{key: self.counts.get(key) for key in COUNTS},
            "rounds": self.rounds,
            "steps": self.steps,
            "tokens": self.tokens,
            "killed": bool(self.killed),
            "killed_node": self.killed or None,
            "rejoined": bool(self.rejoined),
            "rejoined_node": self.rejoined or None,
            "rejoin_s": _rounded(self.rejoin_s, 1),
            "text": self.text or None,
            "text_bytes": self.text_bytes,
            "tokens_per_traversal": _rounded(self.tokens_per_traversal, 2),
            "tracebacks": self.tracebacks,
            "processes_left": len(self.processes_left),
            **(self.tally.as_json() if self.tally is not None else {}),
            **self.found,
            "nodes": self.nodes,
        }

    def draw(self, path: Path) -> None:
        """The loss plot. Nothing, where no node came to train."""
        if not any(point.loss is not None for point in self.points):
            return
        marks = {}
        if self.killed:
            marks[f"{self.killed} killed"] = self.killed_at_s
        if self.rejoined:
            marks[f"{self.rejoined} joined"] = self.rejoined_at_s
        title = f"{self.settings['blocks']} blocks x {self.settings['replicas']} replicas on {os.cpu_count()} cores"
        draw_losses(path, self.points, self.chain, marks, title)

    def summary(self) -> list[str]:
        """A line each for a person."""
        rows = [("time", f"{clock(self.seconds)} min, {self.rounds} rounds, {self.steps} steps")]
        if self.met_s is not None:
            rows.append(("met", f"all nodes saw each other after {self.met_s:.0f} s"))
        if self.chain:
            after = f", {self.loss_after:.3f} after" if len(self.chain) > 1 else ""
            rows.append(("loss", f"{self.loss_before:.3f} before{after} (the chain on held-out text, nats per token)"))
        rows.append(("averaging", ", ".join(f"{self.counts.get(key, 0)} {key.replace('_', '-')}" for key in COUNTS)))
        if self.tally is not None:
            rows += _of_trouble(self.tally)
        if self.found:
            lost = f"{self.found['blocks_lost']} blocks lost, {self.found['states_lost']} states lost"
            rows.append(("checked", f"{lost}, {self.found['violations']} violations in all"))
        if self.killed:
            rows.append(("killed", f"{self.killed} at {clock(self.killed_at_s)}"))
        if self.rejoined:
            rows.append(("rejoined", f"{self.rejoined} had the swarm's state after {self.rejoin_s or 0:.0f} s"))
        if self.text:
            rows.append(("text", f"{self.text_bytes} bytes, {self.tokens_per_traversal or 0:.1f} a traversal: {self.text!r}"))
        rows.append(("left", f"{len(self.processes_left)} processes, {self.tracebacks} tracebacks"))
        rows.append(("files", str(self.out)))
        return [f"{name:<10} {text}" for name, text in rows]


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write JSON beside and rename, so that nobody reads half of it. Raises: OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    beside.replace(path)


def _of_trouble(tally: Tally) -> list[tuple[str, str]]:
    rows = [("trouble", f"{tally.kills} kills ({tally.same} came back, {tally.new} anew), {tally.freezes} freezes, {tally.liars} liars")]
    if tally.recovered_s is not None:
        rows.append(("recovered", f"all trained and averaged again after {tally.recovered_s:.0f} s"))
    rows.append(("texts", f"{tally.texts} written meanwhile, {len(tally.texts_failed)} failed"))
    return rows


def _rounded(value: float | None, digits: int) -> float | None:
    """None for what was not measured."""
    return None if value is None or math.isnan(value) else round(value, digits)
