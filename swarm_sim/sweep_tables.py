"""The numbers of `bench sweep` as tables for docs/, and the picture of what a byte costs: the page says what a file of numbers says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

Numbers = Mapping[str, Any]
NAMES: Final = {
    "autoregressive": "`autoregressive`, chain",
    "star": "`autoregressive`, star",
    "speculative": "`speculative`, 8 drafted, chain",
    "adaptive": "`speculative`, width adapts, chain",
    "star_speculative": "`speculative`, 8 drafted, star",
    "client_drafts": "`speculative`, the client drafts 8, star",
    "one_sweep": "`one-sweep` of 64, chain",
}
_SPEED: Final = re.compile(r"autoregressive_tokens_per_s_(?:b(\d+)_)?(\d+)ms")
_GOALS: Final = (
    ("speculative over chain, times as fast as autoregressive (B = 3, 50 ms)", "speculative_speedup_50ms", "≥ 4"),
    ("one-sweep of 64 bytes, times as fast", "one_sweep_speedup_50ms", "≥ 50"),
    ("autoregressive over star, times as fast", "star_speedup_50ms", ""),
    ("bytes a traversal, speculative", "tokens_per_traversal", ""),
    ("hop beyond computing and link, ms, through a holder that trains: p50", "hop_overhead_ms_p50", "≤ 2"),
    ("the same, p99", "hop_overhead_ms_p99", ""),
    ("a hop where all three holders train on these cores: p50", "hop_overhead_all_ms_p50", ""),
    ("the same, p99", "hop_overhead_all_ms_p99", ""),
    ("a hop where all holders rest: p50", "hop_overhead_rest_ms_p50", ""),
    ("holders at rest, p99", "hop_overhead_rest_ms_p99", ""),
    ("first byte, in traversals", "first_byte_traversals", "≤ 2"),
    ("a byte's computing late in the context ÷ early", "context_cost_ratio", "flat"),
)


def tables(numbers: Numbers) -> str:
    """Tables of one file of `bench sweep`, of the parts that it has."""
    out = f"{numbers['cpus']} cores; blocks and judge trained for {numbers['steps_trained']} steps.\n\n"
    goals = [(name, numbers[key], goal) for name, key, goal in _GOALS if numbers.get(key) is not None]
    out += _table(("What", "Measured", "Goal"), goals)
    for blocks, rtts in sorted(_speeds(numbers).items()):
        heading = [f"B = {blocks}: bytes/s (times autoregressive)", *(f"{rtt} ms" for rtt in rtts)]
        out += "\n" + _table(heading, ([name, *(_speed(numbers, way, blocks, rtt) for rtt in rtts)] for way, name in NAMES.items()))
        firsts = [("first byte, s: autoregressive", "autoregressive_first_byte_s"), ("speculative", "speculative_first_byte_s")]
        firsts += [("bytes a traversal: speculative", "tokens_per_traversal"), ("adaptive", "adaptive_tokens_per_traversal")]
        firsts += [
            ("drafts kept", "acceptance"),
            ("hop beyond computing and link, the proxy included, ms", "autoregressive_hop_overhead_ms"),
        ]
        rows = [[name, *(numbers.get(f"{key}_{_end(blocks, rtt)}", "") for rtt in rtts)] for name, key in firsts]
        out += "\n" + _table([f"B = {blocks}", *(f"{rtt} ms" for rtt in rtts)], rows)
    if numbers.get("clients_tokens_per_s") is not None:
        rows = [
            [name, numbers.get(f"one_{way}_tokens_per_s", ""), numbers.get(f"eight_{way}_tokens_per_s", "")] for way, name in NAMES.items()
        ]
        out += "\n" + _table(("B = 3, 50 ms: bytes/s", "one client", "eight at once, together"), rows)
    if numbers.get("judge_true_text") is not None:
        ways = ("autoregressive", "speculative", "one_sweep")
        judged = [
            ("true text", numbers["judge_true_text"], ""),
            *((NAMES[way], numbers[f"judge_{way}"], _fast(numbers, way)) for way in ways),
        ]
        out += "\n" + _table(("Judge, nats a byte (less is better)", "nats", "bytes/s at 50 ms"), judged)
    if numbers.get("share_tokens_fifth") is not None:
        out += "\n" + _table(
            ("A client that never pauses, three nodes that train", "steps/s of all", "bytes/s of the client"),
            [
                ("training alone", numbers["share_steps_alone"], ""),
                ("serving alone", "", numbers["share_tokens_alone"]),
                ("both", numbers["share_steps_serving"], numbers["share_tokens_training"]),
                ("both, `--serve-share 0.2`", numbers["share_steps_fifth"], numbers["share_tokens_fifth"]),
            ],
        )
    return out


def draw(path: Path, cost_ms: Sequence[float], width: int, context: int) -> None:
    """What a byte costs by its place in the context, in bins of `width` bytes, as a picture. Raises: OSError: it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.bar([width * (place + 0.5) for place in range(len(cost_ms))], cost_ms, width=0.9 * width)
    axes.set(xlabel="bytes in the context", ylabel="computing for one byte, all blocks, ms", xlim=(0, context))
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)


def _speeds(numbers: Numbers) -> dict[int, list[int]]:
    """Number of blocks → the round trips that were measured, ms."""
    found: dict[int, list[int]] = {}
    for key, value in numbers.items():
        match = _SPEED.fullmatch(key)
        if match and value is not None:
            found.setdefault(int(match[1] or 3), []).append(int(match[2]))
    return {blocks: sorted(rtts) for blocks, rtts in found.items()}


def _end(blocks: int, rtt_ms: int) -> str:
    return f"{rtt_ms}ms" if blocks == 3 else f"b{blocks}_{rtt_ms}ms"


def _speed(numbers: Numbers, way: str, blocks: int, rtt_ms: int) -> str:
    end = _end(blocks, rtt_ms)
    rate, times = numbers.get(f"{way}_tokens_per_s_{end}"), numbers.get(f"{way}_speedup_{end}")
    return "" if rate is None else f"{rate:.4g}" if times is None else f"{rate:.4g} ({times:.3g})"


def _fast(numbers: Numbers, way: str) -> object:
    return numbers.get(f"{way}_tokens_per_s_50ms") or ""


def _table(heading: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    return "".join("| " + " | ".join(map(_shown, line)) + " |\n" for line in (heading, ["---"] * len(heading), *rows))


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
