"""Crowds that choose their blocks in virtual time: the checker finds what it is there for, and a seed is one story."""

from __future__ import annotations

import asyncio

import pytest

from blocktrain.node import placing
from blocktrain.protocol import placement
from blocktrain.swarm_sim.world import choosing, virtual_loop
from blocktrain.swarm_sim.world.checkers.even import Said, check

CALM = choosing.Weather(late=0.0, late_s=0.1, left_out=0.0, failed=0.0, lost=0.0, slow_s=0.2, skew_s=0.0)


def test_a_crowd_that_sees_each_other_at_once_ends_two_on_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing.Weather, "drawn", lambda rng: CALM)
    for choice in choosing.search(0, 12):
        assert choice.violations == (), choice.command()


def test_a_seed_is_one_story_and_another_seed_another() -> None:
    first, second, other = choosing.tell(7), choosing.tell(7), choosing.tell(8)
    assert first == second
    assert first.diary != other.diary
    assert len({said.node for said in first.diary}) == 8


@pytest.mark.parametrize("seed", [41, 102, 108, 144, 170])  # uneven once: who was up already counted as if it held nothing
def test_a_crowd_that_only_serves_ends_two_on_each_block_though_some_are_up_before_others_have_chosen(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "LOADING_S", (0.1, 0.6))
    assert choosing.tell(seed, trains=False).violations == ()


def test_a_crowd_that_does_not_look_at_the_others_claims_is_found_to_be_uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    divide = placement.divide
    monkeypatch.setattr(placement, "divide", lambda blocks, holders, others, me: divide(blocks, [], [], me))
    monkeypatch.setattr(placing, "CORRECTIONS", 0)
    found = next(choice for choice in choosing.search(0, 200) if choice.violations)
    assert any("uneven" in violation.what for violation in found.violations)
    assert choosing.tell(found.seed) == found
    assert f"--first {found.seed} " in found.command()


def test_a_crowd_that_swings_to_and_fro_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "surplus", lambda blocks, holders, choosers, me, block, until: (block + 1) % blocks)
    monkeypatch.setattr(placing, "CORRECTIONS", 5)
    found = next(choice for choice in choosing.search(0, 200) if choice.violations)
    assert any("to and fro" in violation.what for violation in found.violations)


def test_the_checker_objects_to_who_is_late_never_commits_or_moves_for_nothing() -> None:
    def wrong(*said: tuple[float, int, str, int]) -> list[str]:
        return [v.what for v in check([Said(*each) for each in said], 2, 2, (0.0, 0.0), 20.0)]

    assert wrong((1, 0, "joining", 0), (1, 1, "joining", 1), (9, 0, "training", 0)) == []
    assert wrong((1, 0, "joining", 0), (50, 1, "joining", 1)) == ["node 1 took 50 s to choose"]
    assert wrong((1, 0, "joining", 0), (1, 1, "choosing", 1))[0] == "node 1 never committed"
    assert wrong((1, 0, "joining", 0), (1, 1, "joining", 0), (6, 1, "joining", 1), (9, 1, "training", 1)) == []
    assert "moved from block 1 to block 0" in wrong((1, 0, "joining", 0), (1, 1, "joining", 1), (60, 1, "training", 0))[0]


def test_waiting_takes_virtual_time_only_and_a_deadlock_is_said() -> None:
    async def sleeper() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    async def stuck() -> None:
        await asyncio.get_running_loop().create_future()

    assert virtual_loop.run(sleeper()) == pytest.approx(3600)
    with pytest.raises(RuntimeError, match="deadlock"):
        virtual_loop.run(stuck())
