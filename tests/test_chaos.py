"""A real swarm in trouble: holders are killed and frozen, links are slow and one node lies; the checkers find nothing, and text goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocktrain.node.recipe_file import ready_text
from blocktrain.swarm_sim import local, timeline
from blocktrain.swarm_sim.chaos import Trouble
from blocktrain.swarm_sim.links import Links, Quality

SMALLER = {
    "width = 128": "width = 32",
    "layers = 2": "layers = 1",
    "context = 128": "context = 64",
    "batch = 8": "batch = 4",
    "rows = 16384": "rows = 256",
}
LINK = Quality(delay_ms=10, jitter_ms=5, rate_mbit=50, loss=0.001)


@pytest.mark.real
def test_a_swarm_in_trouble_loses_no_block_and_no_state_and_goes_on(tmp_path: Path) -> None:
    recipe = ready_text("tiny")
    for old, new in SMALLER.items():
        assert old in recipe
        recipe = recipe.replace(old, new)
    (tmp_path / "smaller.toml").write_text(recipe)
    settings = local.Settings(
        out=tmp_path / "out",
        recipe=tmp_path / "smaller.toml",
        blocks=2,
        minutes=1.3,
        windows=16,
        trouble=Trouble(kill_every_s=8.0, freeze=True, links=Links(LINK), byzantine=1),
        page=tmp_path / "report.html",
        ttl_s=12.0,
        refresh_s=3.0,
        calm_s=8.0,
    )
    report = local.run(settings)
    assert report.failed == []
    assert report.exit_code == 0
    assert report.tally is not None
    assert report.tally.kills >= 1
    assert report.tally.same + report.tally.new == report.tally.kills
    assert report.tally.texts >= 1
    assert (report.found["blocks_lost"], report.found["states_lost"], report.found["violations"]) == (0, 0, 0)
    assert report.found["lies_used"] == 0
    assert report.loss_after < report.loss_before
    assert report.page is not None
    assert '<b class="ok">held</b>' in report.page.as_html()
    happened = {line["what"] for line in timeline.read(tmp_path / "out" / "logs" / "timeline.jsonl")}
    assert happened >= {"start", "kill", "heal", "text", "said", "began", "phase", "exchange", "judged", "published", "ended", "fetch"}
