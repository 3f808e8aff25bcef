"""What a person sees while a swarm of processes runs: a live table with a bar, or plain lines where stderr is no terminal.

All of it is talk and goes to stderr. Colours and the live region are rich's, which obeys NO_COLOR; nothing is drawn by a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from blocktrain.swarm_sim.cluster import Member, number

REDRAW_S: Final = 0.25
PLAIN_S: Final = 30.0  # between two reports in plain lines
BAR_CHARS: Final = 30
COLUMNS: Final = ("block", "peer", "phase", "round", "loss", "held-out", "accepted", "late", "refused", "tokens/s", "in", "out")
_STYLES: Final = {"training": "green", "paused": "cyan", "killed": "red", "starting": "yellow", "frozen": "blue"}


class Display:
    """The phases of a run of about `total_s` seconds, and a row for each node. Use it in a `with` block."""

    def __init__(
        self, members: Callable[[], Sequence[Member]], phases: Sequence[str], total_s: float, console: Console | None = None
    ) -> None:
        self._members = members
        self._phases = list(phases)
        self._total_s = total_s
        self._console = console or Console(stderr=True, highlight=False)
        self._begun = time.monotonic()
        self._drawn = self._begun
        self._phase = ""
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._picture)

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun

    def phase(self, name: str) -> None:
        """A new phase begins: one of those announced."""
        self._phase = name
        if self._live is None:
            self.say(f"[{self._phases.index(name) + 1}/{len(self._phases)}] {name} ({self._left()} left)")
        self._draw()

    def say(self, text: str) -> None:
        """One line that stays, with the time since the start."""
        self._console.print(f"{clock(self.elapsed_s)}  {text}", markup=False, soft_wrap=True)

    def poll(self) -> None:
        """Redraw, where it is time for that."""
        since = time.monotonic() - self._drawn
        if since >= (PLAIN_S if self._live is None else REDRAW_S):
            self._draw()
            if self._live is None:
                for row in map(cells, self._members()):
                    self.say("  ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, row, strict=True) if cell))

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._live is not None:
            self._live.refresh()

    def _left(self) -> str:
        return clock(max(0.0, self._total_s - self.elapsed_s))

    def _picture(self) -> RenderableType:
        return Group(table(self._members()), self._bar())

    def _bar(self) -> RenderableType:
        place = self._phases.index(self._phase) + 1 if self._phase in self._phases else 0
        line = Table.grid(padding=(0, 1))
        line.add_row(
            Text(f"[{place}/{len(self._phases)}] {self._phase}", style="bold"),
            ProgressBar(total=self._total_s, completed=min(self._total_s, self.elapsed_s), width=BAR_CHARS),
            f"{clock(self.elapsed_s)} of {clock(self._total_s)}, {self._left()} left",
        )
        return line


def table(members: Sequence[Member]) -> Table:
    """One row a node, in the order of blocks."""
    picture = Table(*COLUMNS, box=None, pad_edge=False)
    for column in picture.columns[3:]:
        column.justify = "right"
    for member in sorted(members, key=lambda member: (member.block, member.label)):
        picture.add_row(*cells(member), style=_STYLES.get(member.phase, "dim" if member.killed else ""))
    return picture


def cells(member: Member) -> tuple[str, ...]:
    """A node's row, "" where it has not said a thing yet."""
    status = member.status
    name = str(status.get("name") or member.label)
    counts = [_whole(number(status, key)) for key in ("round", "accepted", "late", "refused", "tokens_per_s")]
    losses = [_loss(number(status, key)) for key in ("loss", "heldout")]
    traffic = [_size(number(status, key)) for key in ("bytes_in", "bytes_out")]
    return (str(member.block), name, member.phase, counts[0], *losses, *counts[1:], *traffic)


def clock(seconds: float) -> str:
    """m:ss"""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02}"


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _size(count: float | None) -> str:
    if count is None:
        return ""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
