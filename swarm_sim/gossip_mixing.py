"""How fast each topology mixes: the distance to consensus after a round over that before, from the node's own pairing code.

A round: everybody, in random order, asks its candidates (`pairing.candidates`); the first who is still free becomes its partner, and both
take their mean. *Measured* is what a round leaves of the distance (root mean square over many trials from random states, three rounds, per
round). *Expected* is the square root of the largest eigenvalue, off consensus, of the mean of WᵀW over the rounds' matrices W: a bound by
the direction that mixes worst if rounds were independent, as those of random pairs are. There it is √((n-2)/(2(n-1))) if all are paired;
somebody whose candidates are all taken stays alone, which costs the rest.
"""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from blocktrain.protocol import pairing
from blocktrain.protocol.ids import PeerId
from blocktrain.protocol.messages import TOPOLOGIES

SIZES: Final = (2, 4, 8, 16, 64)
ROUNDS: Final = 20
FIT_ROUNDS: Final = 3
TRIALS: Final = 30  # and more where they cost little
DIMENSIONS: Final = 16

Array = np.ndarray[Any, Any]


def one_round(topology: str, peers: list[PeerId], turn: int, rng: Random) -> Array:
    """The matrix of one round of pairings, [n, n]: rows are new states in terms of old ones."""
    matrix = np.eye(len(peers))
    free = set(range(len(peers)))
    place = {peer: index for index, peer in enumerate(peers)}
    for index in rng.sample(range(len(peers)), len(peers)):
        if index not in free:
            continue
        others = [peer for peer in peers if peer != peers[index]]
        for peer in pairing.candidates(topology, peers[index], others, turn, rng):
            other = place[peer]
            if other in free and other != index:
                free -= {index, other}
                matrix[np.ix_((index, other), (index, other))] = 0.5
                break
    return matrix


def contraction(topology: str, size: int, seed: int = 0, trials: int = TRIALS) -> tuple[float, float, list[float]]:
    """(measured, expected, the distance after each round as a share of that at the start)."""
    rng, normal = Random(seed), np.random.default_rng(seed)
    squares, matrices = np.zeros(ROUNDS + 1), np.zeros((size, size))
    trials += 600 // size
    for _ in range(trials):
        peers = sorted(PeerId(f"peer-{normal.integers(1 << 60):016x}") for _ in range(size))
        state = normal.standard_normal((size, DIMENSIONS))
        begin = rng.randrange(1000)
        squares[0] += _square(state)
        for turn in range(ROUNDS):
            matrix = one_round(topology, peers, begin + turn, rng)
            matrices += matrix.T @ matrix / (ROUNDS * trials)
            state = matrix @ state
            squares[turn + 1] += _square(state)
    away = np.eye(size) - 1 / size
    worst = float(np.linalg.eigvalsh(away @ matrices @ away)[-1])
    shares = np.sqrt(squares / squares[0])
    measured = float(shares[FIT_ROUNDS] ** (1 / FIT_ROUNDS))
    return (measured if measured > 1e-3 else 0.0), math.sqrt(worst) if worst > 1e-6 else 0.0, list(shares)


def table(sizes: tuple[int, ...] = SIZES) -> dict[str, tuple[float, float]]:
    """`TOPOLOGY_SIZE` → (measured, expected)."""
    return {f"{topology}_{size}": contraction(topology, size)[:2] for topology in TOPOLOGIES for size in sizes}


def numbers(sizes: tuple[int, ...] = SIZES) -> dict[str, object]:
    """Flat keys for the bench: `mixing_…` measured, `mixing_…_expected`."""
    out: dict[str, object] = {}
    for name, (measured, expected) in table(sizes).items():
        out[f"mixing_{name}"] = measured
        out[f"mixing_{name}_expected"] = expected
    return out


def draw(path: Path, size: int = 16) -> None:
    """The distance to consensus by rounds, a line for each topology."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for topology in TOPOLOGIES:
        axes.semilogy(np.maximum(contraction(topology, size)[2], 1e-9), label=topology)
    axes.set_xlabel("rounds")
    axes.set_ylabel(f"distance to consensus, {size} replicas")
    axes.set_ylim(1e-5, 1.5)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def _square(state: Array) -> float:
    return float(np.square(state - state.mean(axis=0)).sum())


if __name__ == "__main__":
    import sys

    for name, (measured, expected) in table().items():
        print(f"{name:16} {measured:.3f} {expected:.3f}")
    if len(sys.argv) > 1:
        draw(Path(sys.argv[1]))
