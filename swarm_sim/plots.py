"""Pictures of a run, as PNG files. matplotlib is imported when one is drawn, and draws into memory: no window, no global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Point:
    """What one node said at one moment."""

    at_s: float  # since the start of the run
    node: str
    block: int
    round: int
    steps: int
    loss: float | None  # running training loss, nats per token
    heldout: float | None  # of the block alone


def draw_losses(path: Path, points: Sequence[Point], chain: Sequence[tuple[float, float]], marks: Mapping[str, float], title: str) -> None:
    """Loss over time: a line for each node in its block's colour, the chain's held-out loss as points, events as upright lines.

    Args:
        chain: (seconds, nats per token) of each evaluation of the assembled chain.
        marks: what happened → when, in seconds.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="seconds since the start", ylabel="nats per token", title=title)
    labelled: set[int] = set()
    for node in dict.fromkeys(point.node for point in points):
        line = [(point.at_s, point.loss) for point in points if point.node == node and point.loss is not None]
        if not line:
            continue
        block = next(point.block for point in points if point.node == node)
        label = None if block in labelled else f"block {block}, training loss of each replica"
        labelled.add(block)
        axes.plot(*zip(*line, strict=True), color=f"C{block % 10}", linewidth=1.2, alpha=0.8, label=label)
    if chain:
        axes.plot(*zip(*chain, strict=True), "ko", markersize=7, label="chain, held-out text", zorder=3)
        for at_s, loss in chain:
            axes.annotate(f"{loss:.3f}", (at_s, loss), textcoords="offset points", xytext=(0, -16), ha="center")
    for name, at_s in marks.items():
        axes.axvline(at_s, color="0.4", linestyle="--", linewidth=1)
        axes.annotate(
            name, (at_s, 1), xycoords=("data", "axes fraction"), xytext=(3, -4), textcoords="offset points", rotation=90, va="top"
        )
    axes.grid(alpha=0.25)
    axes.margins(y=0.1)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right")
    figure.savefig(path, dpi=120)
