"""A client that drafts with a block of its own: the text, the round trips, and what is lost meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from blocktrain.node.client import open_model
from blocktrain.node.compute import flat
from blocktrain.node.compute.drafting import Drafter
from blocktrain.node.compute.generation import Generation, Request, TextSweep
from blocktrain.node.compute.model import Block
from blocktrain.node.compute.takehome import save
from blocktrain.node.compute.worker import load_block
from blocktrain.node.config import ClientConfig
from blocktrain.node.ports import Published
from blocktrain.node.runtime import Runtime
from blocktrain.node.traversal import SwarmChain
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.sweep import Sampling
from tests.sweeping import MANIFEST, PROMPT, World, a_request, state_of, written

LONG = 3 * MANIFEST.model.context


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.add("a0", "a1", "a2", "b0", "b1", "b2")
    world.prefer("a0", "a1", "a2")
    yield world
    await world.close()


def drafter(seed: int = 0) -> Drafter:
    """With the state that block 0's holders have, or another one."""
    return Drafter(MANIFEST, load_block(Block(MANIFEST, 0).requires_grad_(False), state_of(0, seed)))


async def drafted(chain: SwarmChain, request: Request, mine: Drafter, after: object = None) -> Generation:
    text = TextSweep(mine.over(chain), MANIFEST, request)
    async for _ in text.pieces():
        if callable(after):
            after()
            after = None
    mine.close()
    return text.result()


@pytest.mark.parametrize("route", ["chain", "star"])
async def test_with_the_holders_state_the_text_is_the_holders_to_three_contexts(world: World, route: str) -> None:
    async with world.chain(route=route) as chain:
        expected = await written(chain, a_request(LONG))
    async with world.chain(route=route) as chain:
        text = await drafted(chain, a_request(LONG), drafter())
    assert text.data == expected.data
    assert (text.drafted > 0, text.kept > 0) == (True, True)
    assert chain.report.route == route


async def test_with_another_state_the_likeliest_text_is_the_same(world: World) -> None:
    greedy = Request(PROMPT, 60, sampling=Sampling(0.0), draft=6, adapt=False)
    async with world.chain() as chain:
        expected = await written(chain, greedy)
        text = await drafted(chain, greedy, drafter(seed=5))
    assert text.data == expected.data
    assert text.drafted >= 60, "it was another drafter's work"


async def test_a_star_that_is_only_asked_to_score_is_preferred(world: World) -> None:
    async with world.chain() as chain:
        await drafted(chain, a_request(), drafter())
    assert chain.report.route == "star", "one round trip instead of two"


async def test_a_holder_that_is_lost_changes_nothing(world: World) -> None:
    async with world.chain() as chain:
        expected = await written(chain, a_request())
    async with world.chain() as chain:
        text = await drafted(chain, a_request(), drafter(), lambda: world.swarm.kill(world.places["a1"].peer))
    assert text.data == expected.data
    assert chain.report.mended


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    other = replace(MANIFEST, name="other", seed=6)
    state = state_of(0, manifest=other)
    save(tmp_path / "other.safetensors", other, {0: (Published(1, flat.digest(state)), state)})
    with pytest.raises(UsageError, match=r"--drafter .*other\.safetensors holds run other, not a block of tiny"):
        Drafter.load(tmp_path / "other.safetensors", MANIFEST)
    with pytest.raises(UsageError, match=r"--drafter .*missing: No such file"):
        Drafter.load(tmp_path / "missing", MANIFEST)


async def test_a_drafter_without_a_swarm_makes_no_sense(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--drafter drafts for the swarm"):
        async with open_model(ClientConfig(), tmp_path / "a", Runtime(), drafter=tmp_path / "b"):
            pass
