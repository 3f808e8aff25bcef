"""From log-probabilities to tokens, the same on the drafter's and on the client's side: numpy, float64, random numbers as arguments.

Drafter and client must treat the same fp16 row alike, since speculative sampling needs the very distribution that a draft was drawn
from. So both read rows as they travel, and only here are temperature, top-k and top-p applied. V is the vocabulary.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from blocktrain.protocol.sweep import Sampling, seed_at

Row: TypeAlias = npt.NDArray[np.float64]  # [V]
Half: TypeAlias = npt.NDArray[np.float16]
Floats: TypeAlias = npt.NDArray[np.float32]

LOWEST: Final = -60.0  # nats: the least that one block says of a token, so that the sum over 1024 blocks stays finite in fp16


def to_half(log_probs: Floats) -> Half:
    """Log-probabilities of one block as they travel."""
    return np.maximum(log_probs, LOWEST).astype(np.float16)


def chain_row(total: Half, blocks: int) -> Row:
    """The chain's log-probabilities [V] from one row of the accumulator: the blocks' mean, normalised."""
    mean = total.astype(np.float64) / blocks
    mean -= mean.max()
    normalised: Row = mean - np.log(np.exp(mean).sum())
    return normalised


def distribution(log_probs: npt.NDArray[np.floating], sampling: Sampling) -> Row:
    """Probabilities [V], sum 1, from log-probabilities [V] up to a constant: temperature, then top-k, then top-p.

    Temperature 0 is all on the likeliest token. Equal tokens are kept by index, the lower first, so that the cut is the same everywhere.
    """
    values = log_probs.astype(np.float64)
    if sampling.temperature == 0:
        certain = np.zeros(len(values))
        certain[int(values.argmax())] = 1.0
        return certain
    values -= values.max()
    with np.errstate(over="ignore"):  # a tiny temperature leaves only the likeliest
        values /= sampling.temperature
    weights: Row = np.exp(values)
    if 0 < sampling.top_k < len(weights):
        least = np.partition(weights, -sampling.top_k)[-sampling.top_k]
        kept = weights > least
        ties = np.flatnonzero(weights == least)[: sampling.top_k - int(kept.sum())]
        kept[ties] = True
        weights = np.where(kept, weights, 0.0)
    if sampling.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        beyond = before >= sampling.top_p * weights.sum()
        beyond[0] = False  # top_p 0 keeps the likeliest
        weights[order[beyond]] = 0.0
    probabilities: Row = weights / weights.sum()
    return probabilities


def draw(probabilities: Row, chance: float) -> int:
    """The token at `chance` in [0, 1) of the cumulative distribution; never one of probability 0."""
    cumulative = np.cumsum(probabilities)
    token = int(np.searchsorted(cumulative, chance * cumulative[-1], side="right"))
    return token if token < len(cumulative) else int(np.flatnonzero(probabilities)[-1])  # the product rounded up to the end


def couple(p: Row, q: Row, draws: tuple[float, float, float]) -> int:
    """One token with distribution p that equals the drafter's as often as can be (arXiv 2211.17192, algorithm 1).

    The draft x comes from q; it stays with probability min(1, p(x) / q(x)), otherwise the token comes from the residual, p - q where
    positive. Each position's token depends on its own p, q and random numbers alone, and on no draft's width: the client draws every
    token so, the one after the last draft included, and goes on while it equals the drafted one. So a seed's text does not
    depend on how many tokens were drafted at a time, and a drafter that sends other tokens than it should changes only the speed.

    Args:
        draws: random numbers in [0, 1) for the draft, for accepting it, and for the residual.
    """
    token = draw(q, draws[0])
    if draws[1] * q[token] < p[token]:
        return token
    residual = np.maximum(p - q, 0.0)
    return draw(residual, draws[2]) if residual.any() else token


def likeliest(log_probs: Row, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens with their log-probabilities, the likeliest first; equal ones by index."""
    order = np.argsort(-log_probs, kind="stable")[:count]
    return tuple((int(token), float(log_probs[token])) for token in order)


def noise(seed: int, position: int, width: int) -> Floats:
    """Standard normal values [width] for the unknown position at `position`: the same wherever the sweep begins."""
    raw = np.random.Philox(key=seed_at(seed, position)).random_raw(2 * ((width + 1) // 2))
    chance = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1)
    radius, angle = np.sqrt(-2 * np.log(chance[::2])), 2 * np.pi * chance[1::2]
    return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))[:width].astype(np.float32)
