"""A node's log for machines: a line of JSON for each thing that happens."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from blocktrain.node.commands.app import node_main
from blocktrain.node.events import Events
from blocktrain.protocol import facts as f
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.exchange import Result
from blocktrain.protocol.ids import Digest, PeerId

PEER = PeerId("12D3KooWSomebody")


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_the_core_hears_becomes_lines_and_a_phase_is_said_once(tmp_path: Path) -> None:
    with Events(tmp_path / "events", lambda: 1000.1234) as events:
        events.fact(f.Began(3, Digest(b"\xab" * 32), False), "joining")
        events.fact(f.Tick(), "joining")
        events.fact(f.Ended(b"\x01" * 16, PEER, Result("refused", "norm: too far"), 1.5), "training")
    assert lines(tmp_path / "events") == [
        {"at": 1000.123, "what": "began", "round": 3, "digest": "ab" * 8, "fresh": False},
        {"at": 1000.123, "what": "phase", "phase": "joining"},
        {"at": 1000.123, "what": "ended", "exchange": "01" * 8, "peer": PEER, "kind": "refused", "reason": "norm: too far", "took_s": 1.5},
        {"at": 1000.123, "what": "phase", "phase": "training"},
    ]


def test_a_line_is_on_the_disk_when_it_is_said_and_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    with Events(tmp_path / "events", lambda: 1.0) as events:
        events.note("judged", distance=math.nan, drift=0.5)
        assert lines(tmp_path / "events") == [{"at": 1.0, "what": "judged", "distance": None, "drift": 0.5}]


def test_a_node_that_starts_again_goes_on_with_the_file(tmp_path: Path) -> None:
    for _ in range(2):
        with Events(tmp_path / "events", lambda: 1.0) as events:
            events.note("began")
    assert len(lines(tmp_path / "events")) == 2


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    with Events(None, lambda: 1.0) as events:
        events.note("began")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"--events .* cannot be written: Is a directory"):
        Events(tmp_path, lambda: 1.0)
    assert node_main(["--new-run", "tiny", "--events", str(tmp_path / "nowhere" / "events")]) == 2
    assert "give a file in a folder that exists" in capsys.readouterr().err
