"""Everything that happened in a swarm of processes, as one file of JSON lines in the order of time.

The simulator notes what it did (start, kill, freeze, thaw, heal, text) and, now and then, what each node's status said; when all is over
the nodes' own event logs (node/events.py) are merged in. Every line has `at_s` (seconds since the story began), `what`, and mostly
`node` (its name) and `life` (1 for its first process). Clocks are one machine's, so the order is true to about a poll of the simulator.

`read` gives the lines back; chaos_scene.py lets checkers look at them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from blocktrain.swarm_sim.processes import Child, Status

SAID_S: Final = 2.0  # between two statuses of a node that are kept
MAX_LINE_BYTES: Final = 64 * 1024
SAID: Final = (
    "phase", "waiting_for", "phase_s", "next_action", "round", "digest", "loss", "heldout", "steps", "tokens_per_s", "accepted", "late",
    "refused", "one_sided", "declined", "bytes_in", "bytes_out", "checkpoint_round", "coverage", "peer", "sessions",
)  # fmt: skip

Line = dict[str, Any]


@dataclass
class Timeline:
    """Collects. `began` is Unix seconds."""

    began: float = field(default_factory=time.time)
    lines: list[Line] = field(default_factory=list)
    _said_at: dict[str, float] = field(default_factory=dict)
    _logs: list[tuple[str, int, Path]] = field(default_factory=list)

    def now(self) -> float:
        """Unix seconds: the nodes' own clock."""
        return time.time()

    def note(self, what: str, node: str = "", life: int = 0, **details: object) -> None:
        """Something that the simulator did, or saw."""
        who = {"node": node, "life": life} if node else {}
        self.lines.append({"at_s": round(self.now() - self.began, 3), "what": what, **who, **details})

    def said(self, child: Child, node: str, life: int, status: Status) -> None:
        """A node's status, where the last one that was kept is old enough or its phase is another."""
        at = status.get("written_at")
        if not isinstance(at, int | float) or at - self._said_at.get(child.label, 0.0) < SAID_S:
            return
        self._said_at[child.label] = at
        known = [[peer.get("peer"), peer.get("block")] for peer in status.get("peers", ()) if isinstance(peer, dict)]
        kept = {key: status.get(key) for key in SAID}
        self.lines.append({"at_s": round(at - self.began, 3), "what": "said", "node": node, "life": life, **kept, "known": known})

    def expect(self, node: str, life: int, log: Path) -> None:
        """A node that was started writes its events here."""
        self._logs.append((node, life, log))

    def merged(self) -> list[Line]:
        """All lines, with those of the nodes, in the order of time."""
        lines = list(self.lines)
        for node, life, log in self._logs:
            for each in read(log) if log.exists() else ():
                at = each.pop("at", None)
                if isinstance(at, int | float) and "what" in each:
                    lines.append({"at_s": round(at - self.began, 3), "what": each.pop("what"), "node": node, "life": life, **each})
        lines.sort(key=lambda line: float(line["at_s"]))
        return lines


def write(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Raises: OSError."""
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read(path: Path) -> list[Line]:
    """The lines of a file; what is no line of JSON (a process was killed while it wrote) is left out. Raises: OSError."""
    found = []
    with path.open("rb") as file:
        for line in file:
            try:
                entry = json.loads(line) if len(line) <= MAX_LINE_BYTES else None
            except ValueError:
                continue
            if isinstance(entry, dict):
                found.append(entry)
    return found
