"""`blocktrain-sim world` and its commands, as a person meets them: what a failing seed prints, and that it can be replayed from there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.membership import Members
from blocktrain.swarm_sim import world_cmd
from blocktrain.swarm_sim.app import simulator


def run(line: str) -> int:
    return int(simulator()(shlex.split(line), result_action="return_value"))


def test_a_failing_seed_prints_what_broke_the_events_that_matter_and_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Members, "missing", lambda self, now, own: ())
    assert run("world search --scenario last-replica --nodes 5 --seeds 20") == 1
    said = capsys.readouterr().err
    assert "coverage: block" in said
    few, all_of_them = map(int, re.findall(r"(\d+) of its (\d+) events are enough", said)[0])
    assert few < all_of_them
    command = re.findall(r"replay it with: blocktrain-sim (.+)", said)[0]
    assert run(f"{command} --no-shrink") == 1
    again = capsys.readouterr().err
    assert next(line for line in said.splitlines() if "coverage" in line) in again
    monkeypatch.undo()
    assert run(command) == 0


def test_search_says_that_everything_held(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("world search --seeds 4 --first 7") == 0
    assert "4 seeds from 7 on: everything held" in capsys.readouterr().out


def test_one_story_can_be_told_with_its_report_and_its_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"world --scenario calm --nodes 5 --seed 2 --out {tmp_path}") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.json"}
    trace = tmp_path / "trace"
    assert run(f"world replay --scenario calm --nodes 5 --seed 2 --trace {trace}") == 0
    first = trace.read_text()
    assert run(f"world replay --scenario calm --nodes 5 --seed 2 --trace {trace}") == 0
    assert trace.read_text() == first
    capsys.readouterr()


def test_crowds_choose_by_command_and_a_seed_can_be_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("world choose --seeds 1 --first 3 --nodes 4 --blocks 2 --tell") == 0
    out = capsys.readouterr().out
    assert {int(number) for number in re.findall(r"node (\d+) ", out)} == {0, 1, 2, 3}


def test_a_story_that_does_not_exist_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match='"nonsense" is not one of calm'):
        world_cmd.search(world_cmd.SearchOptions(scenario="nonsense"))
