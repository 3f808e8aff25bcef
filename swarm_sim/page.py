"""One report for every kind of swarm: JSON for machines, and a self-contained HTML page with plots for people.

A report is built from plain series, so that the virtual world (world/page.py) and the swarm of processes (chaos_page.py) both fill it. The
plots are SVG inside the page: nothing is fetched, and the file can be mailed.
"""

from __future__ import annotations

import html
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Series = Sequence[tuple[float, float]]  # (seconds, value)


@dataclass(frozen=True)
class Plot:
    """Lines over time."""

    title: str
    unit: str
    lines: Mapping[str, Series]
    log: bool = False


@dataclass(frozen=True)
class Bar:
    """A stretch of one node's life, for the Gantt chart. `what` names its kind: each kind has a colour, and stands in the legend."""

    row: str
    begin_s: float
    end_s: float
    colour: int = 0
    what: str = ""


@dataclass(frozen=True)
class Mark:
    """Something that befell a node at one moment, on the Gantt chart."""

    row: str
    at_s: float
    what: str


@dataclass
class Page:
    """All that a report shows. `facts` are the lines at its top, `lists` the headed lists of text below the plots."""

    title: str
    ok: bool
    facts: dict[str, object] = field(default_factory=dict)
    plots: list[Plot] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    lists: dict[str, list[str]] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return {
            "title": self.title,
            "ok": self.ok,
            **self.facts,
            "series": {
                f"{plot.title} [{plot.unit}]": {name: [[round(t, 3), _finite(v)] for t, v in line] for name, line in plot.lines.items()}
                for plot in self.plots
            },
            "lives": [[bar.row, round(bar.begin_s, 3), round(bar.end_s, 3), *([bar.what] if bar.what else [])] for bar in self.bars],
            **({"marks": [[mark.row, round(mark.at_s, 3), mark.what] for mark in self.marks]} if self.marks else {}),
            **self.lists,
        }

    def write(self, folder: Path, name: str = "report") -> Path:
        """Write `name`.html and `name`.json into a folder. Returns the page's path. Raises: OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        return self.write_files(folder / f"{name}.html")

    def write_files(self, page: Path) -> Path:
        """Write the page, and its JSON beside it. Raises: OSError."""
        page.with_suffix(".json").write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        page.write_text(self.as_html(), encoding="utf-8")
        return page

    def as_html(self) -> str:
        rows = "".join(f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(_shown(v))}</td></tr>" for k, v in self.facts.items())
        plots = "".join(f"<figure>{_svg(plot)}</figure>" for plot in self.plots if any(plot.lines.values()))
        gantt = f"<figure>{_gantt(self.bars, self.marks)}</figure>" if self.bars else ""
        lists = "".join(
            f"<h2>{html.escape(head)}</h2><pre>{html.escape(chr(10).join(lines))}</pre>" for head, lines in self.lists.items() if lines
        )
        verdict = '<b class="ok">held</b>' if self.ok else '<b class="bad">did not hold</b>'
        return _PAGE.format(title=html.escape(self.title), verdict=verdict, rows=rows, plots=plots + gantt, lists=lists)


_MARKERS = "xov^s"
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse }} th {{ text-align: left; padding-right: 1.5rem; font-weight: 500; color: #555 }}
figure {{ margin: 1.5rem 0 }} svg {{ max-width: 100%; height: auto }} pre {{ background: #f5f5f5; padding: .8rem; overflow-x: auto }}
.ok {{ color: #187a2f }} .bad {{ color: #b3261e }}
</style></head><body><h1>{title}</h1><p>All that must hold {verdict}.</p><table>{rows}</table>{plots}{lists}</body></html>
"""


def _svg(plot: Plot) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="seconds", ylabel=plot.unit, title=plot.title)
    for number, (name, line) in enumerate(plot.lines.items()):
        axes.plot([t for t, _ in line], [v for _, v in line], color=f"C{number % 10}", linewidth=1.2, label=name)
    if plot.log and any(v > 0 for line in plot.lines.values() for _, v in line):
        axes.set_yscale("log")
    if len(plot.lines) > 1:
        axes.legend(fontsize="small", ncols=4)
    axes.grid(alpha=0.3)
    return _drawn(figure)


def _gantt(bars: Sequence[Bar], marks: Sequence[Mark]) -> str:
    from matplotlib.figure import Figure

    rows = {row: at for at, row in enumerate(dict.fromkeys(bar.row for bar in bars))}
    figure = Figure(figsize=(9, 1.2 + min(9.0, 0.16 * len(rows))), layout="constrained")
    axes = figure.add_subplot(xlabel="seconds", title="who was up")
    named: set[str] = set()
    for bar in bars:
        label = bar.what if bar.what not in named else ""
        named.add(bar.what)
        axes.barh(rows[bar.row], bar.end_s - bar.begin_s, left=bar.begin_s, height=0.7, color=f"C{bar.colour % 10}", label=label or None)
    for number, what in enumerate(dict.fromkeys(mark.what for mark in marks)):
        at = [(mark.at_s, rows[mark.row]) for mark in marks if mark.what == what and mark.row in rows]
        axes.plot([x for x, _ in at], [y for _, y in at], _MARKERS[number % len(_MARKERS)], color="black", markersize=4, label=what)
    if len(rows) <= 40:
        axes.set_yticks(range(len(rows)), list(rows), fontsize="x-small")
    if len(named) > 1 or marks:
        figure.legend(fontsize="x-small", ncols=8, loc="outside lower center")
    axes.invert_yaxis()
    return _drawn(figure)


def _drawn(figure: object) -> str:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = io.StringIO()
    with rc_context({"svg.hashsalt": "blocktrain", "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_shown(item) for item in value)
    return str(value)


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
