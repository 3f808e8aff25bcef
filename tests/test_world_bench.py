"""`bench world`: its parts give the keys that they promise, and its file becomes the tables and pictures of docs/scale.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocktrain.swarm_sim import bench_world, benches
from blocktrain.swarm_sim.app import BenchOptions
from blocktrain.swarm_sim.world import scale, tables
from blocktrain.swarm_sim.world.scenarios import REGIMES

SHORT = scale.Timing(join_s=20.0, settled_s=60.0)


def test_growth_and_seeds_give_every_key_of_the_sizes_that_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_world, "SIZES", (10, 40))
    numbers = benches.run(bench_world.bench(), BenchOptions(parts=("scale", "seeds"), seeds=3))
    keys = [key for key in bench_world.KEYS["scale"] if key.endswith("_10")]
    assert len(keys) == 10
    assert all(isinstance(numbers[key], int | float) for key in keys)
    assert numbers["messages_per_node_round_40"] is not None
    assert (numbers["seeds_run"], numbers["seeds_failed"], numbers["failed"]) == (3, 0, [])


def test_look_ups_are_messages_and_their_hops_are_counted_apart() -> None:
    grown = scale.grow(10, 0, probes=False, timing=SHORT)
    assert 0 < grown.lookups < grown.messages
    assert grown.hops >= grown.lookups
    assert grown.seen_s is None


def test_two_runs_of_a_quiet_swarm_cost_the_same_messages() -> None:
    assert scale.grow(16, 3, timing=SHORT) == scale.grow(16, 3, timing=SHORT)


def full() -> dict[str, object]:
    numbers: dict[str, object] = dict.fromkeys((key for keys in bench_world.KEYS.values() for key in keys), 1.0)
    return {**numbers, "world_peak_mb": 1234, "seeds_run": 200, "seeds_failed": 0, "paper_loss_wan_mid": 2.345}


def test_the_tables_say_what_the_file_says_and_leave_out_what_was_not_run() -> None:
    text = tables.tables(full())
    assert "| Nodes | 10 | 100 | 1,000 | 10,000 |" in text
    assert all(f"| {regime} |" in text for regime in REGIMES)
    assert "2.345" in text
    assert "1,234 MB" in text
    assert "| 20 | 1 | 1 | 1 |" in text
    assert tables.tables({"seeds_run": 5, "seeds_failed": 1, "seeds_s": 2.0}) == "5 seeds under all checkers: 1 failed; 2 s.\n"
    assert tables.tables({}) == ""


def test_every_regime_stands_beside_the_papers_own_figures() -> None:
    assert set(tables.PAPER) == set(REGIMES)


def test_the_pictures_are_drawn_from_the_same_file(tmp_path: Path) -> None:
    drawn = tables.draw(full(), tmp_path / "new")
    assert [path.name for path in drawn] == ["growth.svg", "asynchrony.svg"]
    assert all(path.read_text().lstrip().startswith("<?xml") for path in drawn)
    assert tables.draw({}, tmp_path) == []
