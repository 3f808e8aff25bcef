"""The recipe in a minute's miniature: what a broken objective, reference or sweep would fail. The full numbers are `bench quality`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blocktrain.protocol.manifest import Grams
from blocktrain.swarm_sim.lab import cells, scoring, train
from blocktrain.swarm_sim.lab.presets import Preset
from blocktrain.swarm_sim.lab.spec import Spec
from blocktrain.swarm_sim.lab.tables import BUILTIN
from blocktrain.swarm_sim.lab.train import Result

SIZE = Preset(32, 1, 3)
STEPS = 120


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return scoring.windows(BUILTIN, 128)[::6]


def trained(specs: Sequence[Spec], place: Path) -> list[Result]:
    return [train.train(replace(spec, data=BUILTIN), place) for spec in specs]


def ce(results: Sequence[Result], tokens: torch.Tensor) -> dict[str, float]:
    score: dict[str, float] = scoring.score(scoring.alone(results[0].spec.manifest, scoring.blocks_of(results)), tokens)
    return score


def test_the_recipe_in_small(place: Path, tokens: torch.Tensor) -> None:
    ours = trained(cells.chain(SIZE, STEPS, 0), place)
    control = trained(cells.chain(SIZE, STEPS, 0, objective="autoregressive"), place)
    reference = trained([cells.reference(SIZE, STEPS, 0)], place)
    (literal,) = trained([cells.literal(SIZE, STEPS, 0)], place)
    chain, plain, whole = ce(ours, tokens), ce(control, tokens), ce(reference, tokens)
    frequencies = torch.bincount(tokens.flatten(), minlength=256).float()
    letters = float(torch.distributions.Categorical(frequencies).entropy())

    assert chain["mean"] < letters - 0.3, "something was learnt"
    assert chain["mean"] < chain["best"], "an ensemble is better than its best block"
    assert chain["mean"] - whole["mean"] < 0.15, "the gap to the end-to-end reference"
    assert abs(chain["mean"] - plain["mean"]) < 0.08, "windows cost little"
    bare = ce(trained(cells.chain(replace(SIZE, tables=Grams()), STEPS, 0), place), tokens)
    assert chain["mean"] < bare["mean"] - 0.2, "n-grams help"
    paper = scoring.score(scoring.in_sequence(literal.spec.manifest, literal.blocks()), tokens)
    assert paper["last"] - chain["mean"] > 0.1, "the paper's objective is worse from noise"
    assert paper["last"] < letters, "but it learns"


def test_a_blocks_memory_is_exactly_its_share(place: Path) -> None:
    results = trained(cells.chain(SIZE, STEPS, 0), place)
    assert len({result.info["optimizer_bytes"] for result in results}) == 1
    info = results[0].info
    tensors = len(dict(results[0].blocks()[0].named_parameters()))
    assert info["optimizer_bytes"] == 8 * info["parameters"] + 4 * tensors
    assert info["train_bytes"] == 16 * info["parameters"] + 4 * tensors
