"""The bench of sweeps: what it promises to give, and its arithmetic. What it measures is measured by running it."""

from __future__ import annotations

import pytest

from blocktrain.protocol.errors import UsageError
from blocktrain.swarm_sim import bench_sweep
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
