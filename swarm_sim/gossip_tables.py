"""The numbers of `bench gossip` as tables for docs/gossip.md: a table for each part that a file has."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from blocktrain.swarm_sim import gossip_speed_tables

Numbers = Mapping[str, Any]
CODECS: Final = {"fp32": "fp32", "bf16": "bf16 (default)", "int8": "int8", "sparse": "sparse"}
OUTER: Final = {
    "mean": "plain mean (default)",
    "noloco": "`noloco`: NoLoCo's momentum (arXiv 2506.10911; 0.7, 0.5)",
    "nesterov": "`nesterov`: DiLoCo's (arXiv 2311.08105; 0.7, 0.9)",
    "lo-fi": "lo-fi: one merge, at the end (arXiv 2210.11948)",
}
MOMENTS: Final = {"local": "stay local (what a node does)", "reset": "reset at each merge", "carried": "averaged too"}
ATTACKS: Final = {
    "nan": "NaN",
    "million": "× 10⁶",
    "sign": "sign flipped",
    "sign_of_the_change": "its own change reversed",
    "random": "random direction, normal length",
}
TOPOLOGIES: Final = ("pairs", "ring", "expander", "small-world", "full")
SIZES: Final = (2, 4, 8, 16, 64)


def tables(numbers: Numbers) -> str:
    """Those of every part that was measured, one after the other."""
    parts: dict[str, Callable[[Numbers], str]] = {
        "sparse_2_loss": codecs, "attack_nan_loss_ratio": attacks, "outer_mean_10_loss": outer, "moments_local_loss": moments,
        "mixing_pairs_2": mixing, "exchange_memory_ratio": memory, "loopback_10m_speedup": gossip_speed_tables.tables,
    }  # fmt: skip
    return "\n".join(write(numbers) for key, write in parts.items() if numbers.get(key) is not None)


def codecs(numbers: Numbers) -> str:
    rows = []
    for codec, name in CODECS.items():
        if numbers.get(f"{codec}_2_loss") is None:
            continue
        ratio = 1.0 if codec == "fp32" else numbers[f"{codec}_bytes_ratio"]
        whole = statistics.fmean(numbers[f"{codec}_{group}_run_bytes"] / numbers[f"fp32_{group}_run_bytes"] for group in ("2", "4"))
        cells = [name, f"{ratio:.4f}", f"{whole:.3f}"]
        for group in ("2", "4"):
            apart = "" if codec == "fp32" else _signed(numbers, f"{codec}_{group}_loss_delta")
            cells += [f"{numbers[f'{codec}_{group}_loss']:.4f}", apart, f"{numbers[f'{codec}_{group}_consensus']:.4f}"]
        rows.append(cells)
    heading = ("codec", "bytes, of fp32", "over the run", "two: loss", "above fp32", "apart", "ring of four: loss", "above fp32", "apart")
    return _table(heading, rows)


def attacks(numbers: Numbers) -> str:
    rows = []
    for key, name in ATTACKS.items():
        what = f"attack_{key}"
        ratio = f"{numbers[f'{what}_loss_ratio']:.4f} ({numbers[f'{what}_loss_ratio_low']:.4f} … {numbers[f'{what}_loss_ratio_high']:.4f})"
        rows.append((name, ratio, numbers[f"{what}_refused"], numbers[f"{what}_used"]))
    return _table(("one of three sends", "loss of the others ÷ without it", "merges refused", "used"), rows)


def outer(numbers: Numbers) -> str:
    rows = []
    for key, name in OUTER.items():
        cells = [name]
        for every in (10, 50):
            apart = "" if key == "mean" else _signed(numbers, f"outer_{key}_{every}_loss_delta")
            cells += [f"{numbers[f'outer_{key}_{every}_loss']:.4f}", apart]
        rows.append(cells)
    return _table(("outer step", "merge every 10 steps", "above the plain mean", "every 50", "above the plain mean"), rows)


def moments(numbers: Numbers) -> str:
    rows = []
    for key, name in MOMENTS.items():
        apart = "" if key == "local" else _signed(numbers, f"moments_{key}_loss_delta")
        rows.append((name, f"{numbers[f'moments_{key}_loss']:.4f}", apart))
    return _table(("Adam's moments", "loss", "above local ones"), rows)


def mixing(numbers: Numbers) -> str:
    rows = []
    for topology in TOPOLOGIES:
        cells = [topology]
        for size in SIZES:
            key = f"mixing_{topology}_{size}"
            cells.append(f"{numbers[key]:.2f} / {numbers[f'{key}_expected']:.2f}")
        rows.append(cells)
    return _table(("replicas", *map(str, SIZES)), rows)


def memory(numbers: Numbers) -> str:
    rows = []
    for size in ("10m", "50m"):
        for codec in ("bf16", "int8"):
            if numbers.get(f"exchange_memory_{size}_{codec}_ratio") is None:
                continue
            cells = [f"{size.upper()} parameters, {codec}"]
            for when in ("between", "exchange"):
                key = f"{when}_memory_{size}_{codec}"
                cells += [f"{numbers[f'{key}_mib']:.0f} ({numbers[f'{key}_states']:.2f})", f"{numbers[f'{key}_ratio']:.2f}"]
            rows.append(cells)
    heading = ("beyond the training state", "between, MiB (states)", "of what is allowed", "during, at most", "of what is allowed")
    return _table(heading, rows)


def _signed(numbers: Numbers, key: str) -> str:
    return f"{numbers[key]:+.4f} ({numbers[f'{key}_low']:+.4f} … {numbers[f'{key}_high']:+.4f})"


def _table(heading: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (heading, ["---"] * len(heading), *rows)]
    return "\n".join(lines) + "\n"
