"""`blocktrain-sim local` for real: four nodes in processes of their own, a kill, a replacement, a text, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from blocktrain.node.recipe_file import ready_text

SMALLER = {
    "width = 128": "width = 32",
    "layers = 2": "layers = 1",
    "context = 128": "context = 64",
    "rows = 16384": "rows = 256",
    "steps_per_round = 20": "steps_per_round = 40",
}


def smaller_recipe(path: Path) -> Path:
    """`tiny`, with a block that trains hundreds of steps a second."""
    text = ready_text("tiny")
    for old, new in SMALLER.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


@pytest.mark.real
def test_a_real_swarm_lives_through_a_kill_writes_a_text_and_leaves_nothing(tmp_path: Path) -> None:
    recipe = smaller_recipe(tmp_path / "smaller.toml")
    command = [sys.executable, "-m", "blocktrain.swarm_sim.app", "local", "--recipe", str(recipe), "--blocks", "2", "--minutes", "0.9"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "blocktrain.toml").write_text('block = 7\ndata = ["nowhere"]\n')  # settings of another node, which are none of ours
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "result.json")],
        cwd=elsewhere,
        env={**os.environ, "BLOCKTRAIN_BLOCK": "5", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ok"] is True
    assert result["loss_before"] > 5 > result["loss_after"]
    assert result["accepted"] > 0
    assert (result["killed"], result["rejoined"], result["tracebacks"], result["processes_left"]) == (True, True, 0, 0)
    assert result["text_bytes"] == 200
    assert result["tokens_per_traversal"] >= 1
    (out,) = elsewhere.glob("swarm-*")
    assert (out / "loss.png").stat().st_size > 10_000
    assert "\x1b" not in done.stderr + done.stdout
    assert [
        process for process in psutil.process_iter(["environ"]) if str(elsewhere) in (process.info["environ"] or {}).get("PWD", "")
    ] == []
