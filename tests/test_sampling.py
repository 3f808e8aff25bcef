"""From log-probabilities to tokens: the arithmetic that makes drafted text equal to text token by token."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.node.compute.sampling import LOWEST, chain_row, couple, distribution, draw, noise, to_half
from blocktrain.protocol.sweep import Sampling

QUARTERS = [np.array(weights) / 4 for weights in product(range(5), repeat=3) if sum(weights) == 4]


def middles(cells: int) -> list[float]:
    """Random numbers that stand for `cells` equally likely cases, where all thresholds lie between them."""
    return [(cell + 0.5) / cells for cell in range(cells)]


@pytest.mark.parametrize("q", QUARTERS, ids=str)
def test_a_coupled_token_has_the_chains_distribution_exactly(q: np.ndarray) -> None:
    """All distributions over three tokens in quarters: thresholds of acceptance and residual are multiples of 1/12."""
    for p in QUARTERS:
        count = np.zeros(3, dtype=int)
        kept = 0
        for chance, accept, rest in product(middles(4), middles(12), middles(12)):
            token = couple(p, q, (chance, accept, rest))
            count[token] += 1
            kept += token == draw(q, chance)
        assert list(count) == list(p * 576)
        assert kept == np.minimum(p, q).sum() * 576  # as often as can be


def test_without_chance_a_draft_stays_only_where_it_is_the_likeliest() -> None:
    greedy = Sampling(temperature=0)
    p, q = distribution(np.log([0.2, 0.5, 0.3]), greedy), distribution(np.log([0.4, 0.3, 0.3]), greedy)
    assert list(p) == [0, 1, 0]
    assert couple(p, q, (0.9, 0.0, 0.9)) == 1
    assert couple(p, p, (0.1, 0.999, 0.1)) == 1
    assert list(distribution(np.log([0.4, 0.4, 0.2]), greedy)) == [1, 0, 0]  # the lower index of two


@given(
    p=st.lists(st.floats(1e-6, 1), min_size=2, max_size=20),
    seed=st.integers(0, 1000),
)
def test_a_draft_from_the_chains_own_distribution_always_stays(p: list[float], seed: int) -> None:
    row = np.array(p) / sum(p)
    chances = np.random.default_rng(seed).random(3)
    assert couple(row, row.copy(), (chances[0], chances[1], chances[2])) == draw(row, chances[0])


def test_drawing_never_gives_an_impossible_token() -> None:
    row = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
    assert draw(row, 0.0) == 1
    assert draw(row, 0.3) == 3
    assert draw(row, 1 - 2**-53) == 3
    thirds = np.full(3, 1 / 3) * (1 - 1e-16)
    assert draw(thirds, 1 - 2**-53) == 2


def test_temperature_sharpens_and_flattens() -> None:
    logs = np.log([0.1, 0.2, 0.7])
    assert distribution(logs, Sampling()) == pytest.approx([0.1, 0.2, 0.7])
    assert distribution(logs - 5, Sampling(temperature=0.5)) == pytest.approx(np.array([1, 4, 49]) / 54)
    assert distribution(logs, Sampling(temperature=100)) == pytest.approx([1 / 3] * 3, abs=0.01)


def test_top_k_keeps_exactly_k_and_of_equals_the_first() -> None:
    logs = np.log([0.1, 0.3, 0.3, 0.3])
    assert distribution(logs, Sampling(top_k=2)) == pytest.approx([0, 0.5, 0.5, 0])
    assert distribution(logs, Sampling(top_k=1)) == pytest.approx([0, 1, 0, 0])
    assert distribution(logs, Sampling(top_k=4)) == pytest.approx([0.1, 0.3, 0.3, 0.3])
    assert distribution(logs, Sampling(top_k=9)) == pytest.approx([0.1, 0.3, 0.3, 0.3])


def test_top_p_keeps_the_fewest_that_make_it_up() -> None:
    logs = np.log([0.1, 0.4, 0.3, 0.2])
    assert distribution(logs, Sampling(top_p=0.65)) == pytest.approx([0, 4 / 7, 3 / 7, 0])
    assert distribution(logs, Sampling(top_p=0.75)) == pytest.approx([0, 4 / 9, 3 / 9, 2 / 9])
    assert distribution(logs, Sampling(top_p=0.0)) == pytest.approx([0, 1, 0, 0])
    assert distribution(logs, Sampling(top_k=3, top_p=0.5)) == pytest.approx([0, 4 / 7, 3 / 7, 0])  # top-k first: 4/9 is below one half


def test_the_chain_is_the_mean_of_its_blocks_log_probabilities() -> None:
    one, two = np.log([0.2, 0.8], dtype=np.float32), np.log([0.5, 0.5], dtype=np.float32)
    total = (to_half(one).astype(np.float32) + to_half(two).astype(np.float32)).astype(np.float16)
    expected = np.sqrt([0.1, 0.4])
    assert np.exp(chain_row(total, 2)) == pytest.approx(expected / expected.sum(), abs=1e-3)


def test_what_a_block_thinks_impossible_stays_finite_over_a_thousand_blocks() -> None:
    half = to_half(np.array([-np.inf, -1e9, -1.0], dtype=np.float32))
    assert list(half) == [LOWEST, LOWEST, -1]
    assert np.isfinite((half.astype(np.float32) * 1024).astype(np.float16)).all()


def test_noise_is_standard_normal_and_belongs_to_a_seed_and_a_position() -> None:
    values = np.concatenate([noise(3, position, 33) for position in range(300)])
    assert len(values) == 9900
    assert values.mean() == pytest.approx(0, abs=0.04)
    assert values.std() == pytest.approx(1, abs=0.03)
    assert (values**4).mean() == pytest.approx(3, abs=0.3)
    assert (noise(3, 5, 16) == noise(3, 5, 16)).all()
    assert not (noise(3, 5, 16) == noise(3, 6, 16)).any()
    assert not (noise(4, 5, 16) == noise(3, 5, 16)).any()
