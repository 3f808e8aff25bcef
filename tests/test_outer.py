"""Outer steps: the papers' formulas, on a real replica: what is published stays the same on both sides, momentum is each one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktrain.node.compute import flat, outer
from blocktrain.node.compute.replica import TorchReplica
from blocktrain.protocol.manifest import Averaging, Manifest
from tests.merges import exchange, live, move
from tests.swarm_kit import manifest, replica

SIZE = 700


def run_with(name: str) -> Manifest:
    return dataclasses.replace(manifest(), averaging=Averaging(name))


def some(seed: int, size: int = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_the_plain_mean_carries_nothing_and_changes_nothing() -> None:
    difference = some(1)
    assert outer.begin("mean", some(0)) is None
    assert outer.follow(None, some(0)) is None
    assert outer.step("mean", None, some(2), difference) is None
    assert torch.equal(difference, some(1))


@pytest.mark.parametrize("name", list(outer.RULES))
def test_steps_are_those_of_sgd_over_merges(name: str) -> None:
    """PyTorch's own SGD, given the way from the anchor to each merge as a gradient, goes the same way."""
    rule = outer.RULES[name]
    place = torch.nn.Parameter(some(0))
    sgd = torch.optim.SGD([place], lr=rule.rate, momentum=rule.momentum, nesterov=rule.nesterov)
    momentum = outer.begin(name, some(0))
    for turn in range(1, 5):
        merge, own = some(turn), some(10 + turn)
        difference = merge - own
        momentum = outer.step(name, momentum, merge, difference)
        assert momentum is not None
        place.grad = place.detach() - merge
        sgd.step()
        assert torch.allclose(momentum.anchor_P, place.detach(), atol=1e-5)
        assert torch.allclose(own + difference, momentum.anchor_P, atol=1e-5), "who has not trained meanwhile is at the anchor"


@pytest.mark.parametrize("name", list(outer.RULES))
def test_an_own_round_moves_the_anchor_and_leaves_the_velocity(name: str) -> None:
    momentum = outer.step(name, outer.begin(name, some(0)), some(1), some(2))
    assert momentum is not None
    after = outer.follow(momentum, some(3))
    assert after is not None
    assert torch.equal(after.anchor_P, some(3))
    assert torch.equal(after.velocity_P, momentum.velocity_P)


def test_lo_fi_is_a_schedule_of_one_long_round() -> None:
    """The learning rate goes the same way over the same steps, and the first round's end is the end of training."""
    many = dataclasses.replace(manifest().schedule, steps_per_round=4, warmup_rounds=0, planned_rounds=50)
    one = dataclasses.replace(many, steps_per_round=200, planned_rounds=1)
    for step in range(0, 260, 10):
        assert one.rate(step / one.steps_per_round) == pytest.approx(many.rate(step / many.steps_per_round))


# ---- in a replica -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=list(outer.RULES))
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[tuple[TorchReplica, TorchReplica]]:
    run = run_with(request.param)
    both = replica(run, 0, 0), replica(run, 0, 1)
    yield both
    for each in both:
        await each.stop()


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
async def test_both_publish_the_mean_and_each_goes_on_from_its_own_outer_step(pair: tuple[TorchReplica, TorchReplica], codec: str) -> None:
    low, high = pair
    name = low.manifest.averaging.outer
    begin, expected = await live(low), outer.begin(name, await live(low))
    for turn in range(3):
        await move(low, 2 * turn)
        await move(high, 2 * turn + 1)
        own = (await live(low)) if codec == "fp32" else None
        await exchange(low, high, codec)  # asserts that both published the same bytes
        merge = flat.from_bytes(low.state()[1], len(begin))
        if own is not None:
            difference = merge - own
            expected = outer.step(name, expected, merge, difference)
            assert torch.allclose(await live(low), own + difference, atol=1e-6)
    assert flat.distance(await live(low), merge) > 0.1 * flat.distance(merge, begin), "momentum carries further than the merge"


async def test_momentum_is_in_the_checkpoint_and_a_download_forgets_it() -> None:
    kept: dict[str, Any] = {}

    class Shelf:
        def write(self, tensors: Any, header: Any) -> bool:
            kept.update(tensors={name: array.copy() for name, array in tensors.items()}, header=dict(header))
            return True

        def read(self, shapes: Any = None) -> Any:
            return kept["tensors"], kept["header"]

    run = run_with("nesterov")
    low, high, again = (replica(run, 0, seed) for seed in range(3))
    low._store = again._store = Shelf()
    try:
        await move(low, 1)
        await move(high, 2)
        await exchange(low, high, "bf16")
        await low.save()
        assert again.restore()
        assert low._momentum is not None
        assert again._momentum is not None
        assert torch.equal(again._momentum.anchor_P, low._momentum.anchor_P)
        assert torch.equal(again._momentum.velocity_P, low._momentum.velocity_P)
        assert flat.norm(again._momentum.velocity_P) > 0

        published, state = high.state()
        await again.load(bytes(state), published.round + 5, published.digest)
        assert torch.equal(again._momentum.anchor_P, flat.from_bytes(state, len(again._momentum.anchor_P)))
        assert flat.norm(again._momentum.velocity_P) == 0
    finally:
        for each in (low, high, again):
            await each.stop()
