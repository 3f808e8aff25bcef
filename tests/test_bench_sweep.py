"""The bench of sweeps: what it promises to give, and its arithmetic. What it measures is measured by running it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blocktrain.protocol.errors import UsageError
from blocktrain.swarm_sim import bench_sweep, benches, sweep_tables
from blocktrain.swarm_sim.app import BenchOptions
from blocktrain.swarm_sim.sweep_measures import Traversal, by_context

PROMISED = (
    "speculative_speedup_50ms",
    "one_sweep_speedup_50ms",
    "star_speedup_50ms",
    "tokens_per_traversal",
    "hop_overhead_ms_p50",
    "hop_overhead_ms_p99",
    "speculative_speedup_b6_100ms",
    "judge_one_sweep",
    "judge_autoregressive",
    "first_byte_traversals",
    "context_cost_ratio",
)


def test_every_key_that_was_promised_is_given() -> None:
    keys = [key for part in bench_sweep.bench(bench_sweep.plan("0,20,50,100", "3,6")).parts.values() for key in part]
    assert set(PROMISED) <= set(keys)
    assert len(keys) == len(set(keys))


def test_other_round_trips_and_lengths_give_other_keys() -> None:
    keys = {key for part in bench_sweep.bench(bench_sweep.plan("80, 80", "4")).parts.values() for key in part}
    assert "speculative_speedup_b4_80ms" in keys
    assert "speculative_speedup_50ms" not in keys


@pytest.mark.parametrize(
    ("rtts", "blocks", "flag"),
    [("fast", "3", "--rtt-ms"), ("", "3", "--rtt-ms"), ("0,5000", "3", "--rtt-ms"), ("0", "1", "--blocks"), ("0", "3;6", "--blocks")],
)
def test_a_malformed_list_is_refused_with_its_flag(rtts: str, blocks: str, flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        bench_sweep.plan(rtts, blocks)


def test_cost_by_place_in_the_context_is_a_median_for_each_eighth() -> None:
    seen = [Traversal(position, 1.0, 0.001 if position < 64 else 0.003) for position in range(1, 128)]
    assert by_context([*seen, Traversal(3, 1.0, 9.0)], 128) == pytest.approx([1.0] * 4 + [3.0] * 4)


def test_a_hop_is_what_a_traversal_took_beyond_computing_and_the_other_hops() -> None:
    seen = [Traversal(1, 0.010, 0.004), Traversal(2, 0.012, 0.004), Traversal(3, 0.020, 0.005)]
    assert bench_sweep._hops("_rest", seen, 2) == pytest.approx(
        {"hop_overhead_rest_ms_p50": 4, "hop_overhead_rest_ms_p99": 7.5, "hop_compute_rest_ms_p50": 2, "hop_compute_rest_ms_p99": 2.5}
    )
    assert bench_sweep._hops("", seen, 1, 6.0, 1.0)["hop_overhead_ms_p50"] == pytest.approx(2)


# ---- a long bench in pieces ---------------------------------------------------------------------------------------------------------


def test_a_bench_that_is_run_in_pieces_gives_one_file() -> None:
    one = {
        "bench": "sweep",
        "parts": ["hop", "speed"],
        "failed": ["hop"],
        "why_failed": {"hop": "x"},
        "a": 1.0,
        "b": None,
        "rtts_ms": [50],
        "seconds": 2.0,
    }
    two = {"bench": "sweep", "parts": ["hop"], "failed": [], "why_failed": {}, "a": None, "b": 5, "rtts_ms": [20], "seconds": 1.5}
    both = benches.added(one, two, ["rtts_ms"])
    assert (both["a"], both["b"], both["rtts_ms"], both["seconds"]) == (1.0, 5, [20, 50], 3.5)
    assert (both["parts"], both["failed"], both["why_failed"]) == (["hop", "speed"], [], {})
    assert benches.added({}, two) == two


def test_numbers_are_added_to_a_file_of_the_same_bench_only(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    bench = benches.Bench(
        "small",
        {"one": ("a",), "two": ("b",)},
        lambda session: session.numbers.update(a=1) if session.wants("one") else session.numbers.update(b=2),
    )
    for part in ("one", "two"):
        assert benches.command(bench, BenchOptions(parts=(part,), json=path, add=True)) == 0
    found = json.loads(path.read_text())
    assert (found["a"], found["b"], found["parts"]) == (1, 2, ["one", "two"])
    with pytest.raises(UsageError, match="holds no numbers of bench other"):
        benches.command(benches.Bench("other", {}, bench.run), BenchOptions(json=path, add=True))
    with pytest.raises(UsageError, match="--add goes with one bench and --json FILE"):
        benches.command(bench, BenchOptions(add=True))


def test_tables_show_what_a_file_holds_and_leave_out_what_it_does_not(tmp_path: Path) -> None:
    numbers: dict[str, object] = {"cpus": 2, "steps_trained": 500, "speculative_speedup_50ms": 5.04, "hop_overhead_ms_p50": None}
    for end, rate in (("50ms", 9.9), ("b6_100ms", 2.8)):
        numbers |= {
            f"autoregressive_tokens_per_s_{end}": rate,
            f"speculative_tokens_per_s_{end}": rate * 5,
            f"speculative_speedup_{end}": 5.04,
        }
    text = sweep_tables.tables(numbers)
    assert "| speculative over chain, times as fast as autoregressive (B = 3, 50 ms) | 5.04 | ≥ 4 |" in text
    assert "| `speculative`, 8 drafted, chain | 49.5 (5.04) |" in text
    assert "| B = 6: bytes/s (times autoregressive) | 100 ms |" in text
    assert "Judge" not in text
    assert "through a holder" not in text
    sweep_tables.draw(tmp_path / "plot.png", [1.0, 1.1, 1.2], 16, 128)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
