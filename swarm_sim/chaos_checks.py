"""What must hold in a swarm of processes: the world's checkers, over what the nodes logged, and how the evidence for some is found there.

Left to the world are those that need what no node logs: distances between all replicas at one moment, and messages one by one.
"""

from __future__ import annotations

from typing import Final

from blocktrain.protocol.acceptance import MAX_DRIFT_RATIO, MIN_DRIFT_SHARE
from blocktrain.swarm_sim.chaos_scene import Bounds, Person, Recorded
from blocktrain.swarm_sim.timeline import Line
from blocktrain.swarm_sim.world.checkers.base import Checker, Violation
from blocktrain.swarm_sim.world.checkers.coverage import Coverage
from blocktrain.swarm_sim.world.checkers.kept import Kept
from blocktrain.swarm_sim.world.checkers.order import Order
from blocktrain.swarm_sim.world.checkers.progress import Progress
from blocktrain.swarm_sim.world.checkers.used import Evidence, Used
from blocktrain.swarm_sim.world.checkers.views import Views
from blocktrain.swarm_sim.world.checkers.waits import Waits


class Logged(Used):
    """What a merge was made of is what both sides measured of it; a downloaded state is one that an honest node had published."""

    def __init__(self, world: Recorded) -> None:
        super().__init__(world)
        self._recorded = world
        self._judged: dict[str, dict[str, Line]] = {}  # exchange → who judged it → what was measured
        self._honest: set[tuple[int, str]] = set()  # (round, digest) of all states that honest nodes had
        for line in world.lines:
            person = world.by_name.get(str(line.get("node")))
            if person is None:
                continue
            if line["what"] == "judged" and line["ok"] and not person.liar:
                self._judged.setdefault(line["exchange"], {})[person.name] = line
            if line["what"] in ("began", "published") and line.get("how") != "fetched" and not person.liar:
                self._honest.add((int(line["round"]), line["digest"]))
        world.watchers.lines.append(self._line)

    def _line(self, node: Person, line: Line) -> None:
        if line["what"] != "published" or node.liar:
            return
        source = self._recorded.by_peer.get(str(line.get("peer")))
        words = f"node {source}" if source is not None else f"peer {line.get('peer')}"
        if line["how"] == "merged":
            self.look(node, words, self._of_merge(node, line))
        elif line["how"] == "fetched":
            self.look(node, words, Evidence((int(line["round"]), line["digest"]) in self._honest, 0.0, 1.0))

    def _of_merge(self, node: Person, line: Line) -> Evidence:
        judged = self._judged.get(line["exchange"], {})
        mine = judged.get(node.name)
        if mine is None:
            return Evidence(False, 0.0, 1.0)
        right = {each["merge"] for each in judged.values()} == {line["digest"]}
        size = mine["distance"] if mine["finite"] and mine["distance"] is not None else float("nan")
        return Evidence(right, size, max(MAX_DRIFT_RATIO * mine["drift"], MIN_DRIFT_SHARE * mine["own_norm"]))


class Saved(Kept):
    """And a node that starts again has at least the round of the last checkpoint that it spoke of."""

    def __init__(self, world: Recorded) -> None:
        super().__init__(world)
        world.watchers.started.append(self._started)

    def _started(self, node: Person) -> None:
        if node.round < node.saved:
            self.object(f"node {node.number} had saved round {node.saved} and came back with round {node.round}")


CHECKERS: Final = (Order, Logged, Coverage, Saved, Views, Waits, Progress)


def judge(scene: Recorded) -> list[Violation]:
    """Tell the story to all checkers. Returns what must not be, in the order of time."""
    checkers: list[Checker] = [checker(scene) for checker in CHECKERS]
    scene.run()
    for checker in checkers:
        checker.finish()
    return sorted((violation for checker in checkers for violation in checker.violations), key=lambda violation: violation.at_s)


__all__ = ["CHECKERS", "Bounds", "Recorded", "judge"]
