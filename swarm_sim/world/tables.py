"""The numbers of `bench world` as tables and pictures for docs/: what the page says is what a file of measured numbers says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from blocktrain.swarm_sim.world.scenarios import REGIMES

Numbers = Mapping[str, Any]
SIZES: Final = (10, 100, 1000, 10_000)
REAL: Final = (4, 8, 20)
PAPER: Final = {  # arXiv 2606.24722, table 5 (three blocks), and bad edge from table 4 (four): participation, loss
    "lockstep": (1.00, 1.910), "mild": (0.75, 2.051), "wan-tight": (0.22, 2.290), "wan-mid": (0.61, 2.160), "wan-loose": (0.86, 1.913),
    "edge-mid": (0.50, 2.445), "bad-edge": (0.00, 5.638), "bad-edge-loose": (0.36, 2.455),
}  # fmt: skip
_COSTS: Final = (
    ("messages a node and round", "messages_per_node_round", 1.0),
    ("of them look-ups and stores", "lookups_per_node_round", 1.0),
    ("hops of these, as modelled", "dht_hops_per_node_round", 1.0),
    ("MB sent a node and round", "bytes_per_node_round", 1e-6),
    ("records read a node and round", "records_read_per_node_round", 1.0),
    ("newcomer listed by 8 replicas, s", "newcomer_seen_s", 1.0),
    ("newcomer has averaged, s", "newcomer_met_s", 1.0),
    ("dead one forgotten, s", "dead_forgotten_s", 1.0),
    ("mixing, rounds", "mixing_rounds", 1.0),
    ("processor seconds that this took", "world_cpu_s", 1.0),
)


def tables(numbers: Numbers) -> str:
    """Tables of one file of `bench world`, of the parts that it has."""
    out = []
    if _has(numbers, "messages_per_node_round_10"):
        rows = [(name, *(_number(numbers.get(f"{key}_{size}"), factor) for size in SIZES)) for name, key, factor in _COSTS]
        memory = f"\nAt most {numbers['world_peak_mb']:,} MB of memory.\n" if _has(numbers, "world_peak_mb") else ""
        out.append(_table(("Nodes", *(f"{size:,}" for size in SIZES)), rows) + memory)
    if _has(numbers, "real_dht_requests_4"):
        real = [
            (size, *(_number(numbers[f"{key}_{size}"]) for key in ("real_dht_requests", "real_dht_depth", "model_dht_hops")))
            for size in REAL
        ]
        out.append(_table(("Real DHT nodes", "requests a look-up", "in a row", "model's hops"), real))
    learned = learnt(numbers)
    if learned:
        heading = ("Regime", "paper's own: participation", "loss", "coordinator and mean here: participation", "loss",
                   "gossip: rounds that merged", "loss")  # fmt: skip
        rows = []
        for regime, paper, gossip in learned:
            theirs = PAPER[regime]
            rows.append((regime, f"{theirs[0]:.2f}", f"{theirs[1]:.3f}", *(f"{value:.{d}f}" for pair in (paper, gossip)
                         for value, d in zip(pair, (2, 3), strict=True))))  # fmt: skip
        out.append(_table(heading, rows))
    if _has(numbers, "virtual_hour_1000_nodes_s"):
        out.append(
            f"One virtual hour of 1,000 nodes: {numbers['virtual_hour_1000_nodes_s']:.0f} processor seconds on one core "
            f"({numbers['virtual_s_run']:.0f} virtual seconds were run).\n"
        )
    if _has(numbers, "seeds_run"):
        out.append(f"{numbers['seeds_run']} seeds under all checkers: {numbers['seeds_failed']} failed; {numbers['seeds_s']:.0f} s.\n")
    return "\n".join(out)


def learnt(numbers: Numbers) -> list[tuple[str, tuple[float, float], tuple[float, float]]]:
    """Of each regime that was run: (participation, loss) of coordinator and mean, and of gossip."""
    found = []
    for regime in REGIMES:
        name = regime.replace("-", "_")
        values = [numbers.get(f"{key}_{name}") for key in ("paper_participation", "paper_loss", "gossip_participation", "gossip_loss")]
        if None not in values:
            paper, paper_loss, gossip, gossip_loss = map(float, values)  # type: ignore[arg-type]
            found.append((regime, (paper, paper_loss), (gossip, gossip_loss)))
    return found


def draw(numbers: Numbers, folder: Path) -> list[Path]:
    """growth.svg and asynchrony.svg, each if its part was run, in a folder that need not exist. Raises: OSError: they cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    if _has(numbers, "messages_per_node_round_10"):
        drawn.append(_draw_growth(numbers, folder / "growth.svg"))
    if learnt(numbers):
        drawn.append(_draw_asynchrony(numbers, folder / "asynchrony.svg"))
    return drawn


def _draw_growth(numbers: Numbers, path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="nodes", ylabel="a node and round", title="what a swarm costs each node", xscale="log")
    for name, key, _ in _COSTS[:3]:
        points = [(size, numbers[f"{key}_{size}"]) for size in SIZES if numbers.get(f"{key}_{size}") is not None]
        axes.plot(*zip(*points, strict=True), "o-", label=name)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    return path


def _draw_asynchrony(numbers: Numbers, path: Path) -> Path:
    """Loss over participation, both ways."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="participation", ylabel="held-out loss, nats per byte", title="participation against loss")
    rows = learnt(numbers)
    for label, points in (
        ("coordinator and mean", [(paper, regime) for regime, paper, _ in rows]),
        ("gossip", [(gossip, regime) for regime, _, gossip in rows]),
    ):
        axes.scatter([point[0] for point, _ in points], [point[1] for point, _ in points], label=label)
        for point, regime in points:
            axes.annotate(regime, point, fontsize="x-small", xytext=(3, 3), textcoords="offset points")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    return path


def _has(numbers: Numbers, key: str) -> bool:
    return numbers.get(key) is not None


def _number(value: float | None, factor: float = 1.0) -> str:
    return "" if value is None else f"{value * factor:,.1f}".removesuffix(".0")


def _table(heading: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    def line(cells: Iterable[object]) -> str:
        return f"| {' | '.join(map(str, cells))} |\n"

    return line(heading) + line("---" for _ in heading) + "".join(line(row) for row in rows)
