"""Real blocks in training that exchange in one process: an attacker does not get in, and every codec learns. And how topologies mix."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from blocktrain.swarm_sim import gossip_mixing
from blocktrain.swarm_sim.gossip_lab import Lab, Setting

SMALL = {"steps": 50, "width": 32}


def lab(replicas: int, **settings: object) -> Lab:
    return Lab(Setting(replicas, topology="pairs", **{**SMALL, **settings}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone() -> float:
    return lab(2).run().published


@pytest.mark.parametrize("attack", ["nan", "million", "sign", "sign of the change", "random"])
def test_two_honest_replicas_learn_beside_an_attacker(attack: str, alone: float) -> None:
    end = lab(3, attack=attack).run()
    assert end.refused > 0
    assert end.used_bad == 0 or attack == "random"
    assert end.published <= 1.1 * alone  # after five rounds; the bench measures twenty


def test_a_sparse_codec_learns_as_plain_numbers_do(alone: float) -> None:
    here = lab(2, codec="sparse")
    end = here.run()
    assert end.live <= 1.05 * alone
    assert end.bytes_per_round < here.learners[0].live.nbytes / 4


@pytest.mark.parametrize("outer", ["noloco", "nesterov"])
def test_momentum_carries_further_than_the_merge(outer: str) -> None:
    """What is published after the same merges is another state than with the plain mean, and still the same on both sides."""
    plain, momentum = lab(2, steps=20), lab(2, steps=20, outer=outer)
    plain.run()
    momentum.run()
    assert torch.equal(momentum.learners[0].published, momentum.learners[1].published)
    assert not torch.equal(momentum.learners[0].published, plain.learners[0].published)
    assert not torch.equal(momentum.learners[0].live, momentum.learners[0].published)


def test_the_slow_one_gains() -> None:
    both = lab(2, slow=5)
    both.run()
    assert both.loss(both.learners[1].published, both.heldout) < lab(1, slow=5).run().published


def test_random_pairs_mix_as_expected() -> None:
    """Of the squared distance (n-2)/(2(n-1)) is left where all are paired, a little more where somebody finds nobody."""
    measured, expected, _ = gossip_mixing.contraction("pairs", 8, trials=10)
    ideal = math.sqrt(6 / 14)
    assert ideal - 0.05 < measured < ideal + 0.1
    assert expected >= measured - 0.05


@pytest.mark.parametrize("topology", ["pairs", "ring", "expander", "small-world", "full"])
def test_every_topology_comes_to_consensus(topology: str) -> None:
    _, _, curve = gossip_mixing.contraction(topology, 8, trials=5)
    assert curve[-1] < 0.2
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(curve))
