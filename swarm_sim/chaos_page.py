"""The report of a swarm of processes, from its timeline: the same page as the virtual world's (page.py)."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from blocktrain.swarm_sim.chaos_scene import Person, Recorded
from blocktrain.swarm_sim.page import Bar, Mark, Page, Plot
from blocktrain.swarm_sim.timeline import Line
from blocktrain.swarm_sim.world.checkers.base import Violation
from blocktrain.swarm_sim.world.checkers.kept import Kept

if TYPE_CHECKING:
    from blocktrain.swarm_sim.report import Report

COLOURS: Final = {"starting": 7, "joining": 1, "fetching": 8, "training": 2, "serving": 2, "isolated": 5, "frozen": 0, "stopping": 7}
MOST_EVENTS: Final = 500  # of what befell the nodes, in the page
BEFELL: Final = ("start", "kill", "freeze", "thaw", "heal", "text")

Points = list[tuple[float, float]]


class Pictures:
    """Watches a scene while it is told, and keeps what is drawn: lists of (seconds, value)."""

    def __init__(self, scene: Recorded) -> None:
        self._scene = scene
        blocks = range(scene.plan.blocks)
        self.loss: dict[int, Points] = {block: [] for block in blocks}
        self.held: dict[int, Points] = {block: [] for block in blocks}
        self.distance: dict[int, Points] = {block: [] for block in blocks}
        self.bytes: Points = []
        self.sweep: Points = []
        self.bars: list[Bar] = []
        self.marks: list[Mark] = []
        self.ends: Counter[str] = Counter()
        self.lies_refused = self.lies_used = 0
        self._open: dict[str, tuple[float, str]] = {}  # node → since when it has been in which state
        self._apart: dict[int, list[float]] = {block: [] for block in blocks}
        self._sent: dict[str, float] = {}
        self._sent_before = 0.0
        scene.watchers.sampled.append(self._sampled)
        scene.watchers.lines.append(self._line)
        for line in scene.lines:
            if line["what"] == "text" and line["ok"] and line.get("seconds") and line.get("traversals"):
                self.sweep.append((line["at_s"], line["seconds"] / line["traversals"]))

    def found(self, violations: Sequence[Violation]) -> dict[str, object]:
        """Numbers for the verdict. A block is lost where it was held, and then nobody held it."""
        lost = 0
        for held in self.held.values():
            since = next((number for number, (_, count) in enumerate(held) if count), len(held))
            lost += any(not count for _, count in held[since:])
        return {
            "blocks_lost": lost,
            "states_lost": sum(violation.checker == Kept.name for violation in violations),
            "violations": len(violations),
            "lies_refused": self.lies_refused,
            "lies_used": self.lies_used,
            "ends_of_exchanges": dict(self.ends),
        }

    def _sampled(self, at_s: float) -> None:
        scene = self._scene
        for block in self.held:
            holders = scene.holders(block)
            self.held[block].append((at_s, len(holders)))
            losses = [node.status["loss"] for node in holders if not node.liar and node.status.get("loss") is not None]
            if losses:
                self.loss[block].append((at_s, statistics.fmean(losses)))
            if self._apart[block]:
                self.distance[block].append((at_s, statistics.fmean(self._apart[block])))
                self._apart[block] = []
        sent = sum(self._sent.values())
        self.bytes.append((at_s, (sent - self._sent_before) / max(1, len(scene.alive()))))
        self._sent_before = sent
        if at_s >= scene.plan.end_s:
            for node in scene.nodes:
                self._turn(node, "")

    def _line(self, node: Person, line: Line) -> None:
        what = line["what"]
        if what == "judged":
            liar = self._is_liar(line.get("peer"))
            if not node.liar and not liar and line["ok"] and line.get("distance") is not None:
                self._apart[node.block].append(line["distance"])
            if not node.liar and liar:
                self.lies_used += bool(line["ok"])
                self.lies_refused += not line["ok"]
        elif what == "ended" and not node.liar:
            self.ends[str(line["kind"])] += 1
        elif what == "said" and line.get("bytes_out") is not None:
            self._sent[f"{node.name}.{node.epoch}"] = line["bytes_out"]
        elif what in ("start", "phase", "freeze", "thaw", "kill", "exit"):
            state = "frozen" if node.frozen else node.phase
            self._turn(node, state if node.up else "")
            if what == "kill":
                self.marks.append(Mark(_row(node), line["at_s"], "killed"))

    def _turn(self, node: Person, state: str) -> None:
        """A node is in another state from now on; "": in none."""
        now = self._scene.elapsed_s
        since, before = self._open.pop(node.name, (now, ""))
        if before and now > since:
            self.bars.append(Bar(_row(node), since, now, COLOURS.get(before, 9), before))
        if state:
            self._open[node.name] = now, state

    def _is_liar(self, peer: object) -> bool:
        number = self._scene.by_peer.get(str(peer))
        return number is not None and self._scene.nodes[number].liar


def page_of(report: Report, scene: Recorded, pictures: Pictures, violations: Sequence[Violation]) -> Page:
    """What happened, and what was found. The report is complete by now, but for this page."""
    plan = scene.plan
    title = f"swarm of processes, {plan.blocks} blocks x {report.settings['replicas']} replicas"
    page = Page(title, report.ok)
    left_out = ("ok", "failed", "nodes", "text", *report.found)
    page.facts = {
        **report.found,
        "identities": len(scene.nodes),
        "processes": sum(node.epoch for node in scene.nodes),
        "heal_at_s": plan.heal_at_s,
        "end_s": plan.end_s,
        "round_s": scene.round_s,
        **{key: value for key, value in report.as_json().items() if key not in left_out},
    }
    marks = {"chain, held-out": report.chain}
    page.plots = [
        Plot("loss per block", "nats per token, training", {**_by_block(pictures.loss), **marks}),
        Plot("coverage", "holders", _by_block(pictures.held)),
        Plot("consensus distance", "between the two sides of an exchange", _by_block(pictures.distance)),
        Plot("bytes", "sent by a node between two samples", {"bytes": pictures.bytes}),
        Plot("latency of a traversal", "seconds", {"sweep": pictures.sweep}),
    ]
    page.bars = sorted(pictures.bars, key=lambda bar: (bar.row, bar.begin_s))
    page.marks = pictures.marks
    befell = [_told(line) for line in scene.lines if line["what"] in BEFELL]
    page.lists = {
        "what did not hold": [*report.failed],
        "violations": [str(each) for each in violations],
        "what befell the nodes": befell[:MOST_EVENTS],
    }
    return page


def _told(line: Line) -> str:
    rest = ", ".join(f"{key} {value}" for key, value in line.items() if key not in ("at_s", "what", "node", "life") and value is not None)
    who = f"{line.get('node', '')}{f'.{life}' if (life := line.get('life', 1)) != 1 else ''}"
    return f"{line['at_s']:8.1f} s  {line['what']:<7} {who}{f'  {rest}' if rest else ''}"


def _row(node: Person) -> str:
    return f"{node.name}{' (lies)' if node.liar else ''}"


def _by_block(series: dict[int, Points]) -> dict[str, Points]:
    return {f"block {block}": line for block, line in series.items()}
