"""The paper's tables in shape, on a small scale, and that of averaging over shards that differ: each row is a training and a number.

What they are for is the order of the rows, not the numbers: so few steps rank recipes and are far from any model's best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from blocktrain.swarm_sim.lab import cells, scoring
from blocktrain.swarm_sim.lab.presets import Preset, manifest
from blocktrain.swarm_sim.lab.spec import Member, Sharing, Spec
from blocktrain.swarm_sim.lab.train import Result

SIGMA_RANGES: Final = ((0.1, 2.0), (0.2, 2.0), (0.5, 2.0), (0.5, 5.0), (1.0, 5.0), (1.0, 10.0))  # the paper's table 1
DEPTHS: Final = ((12, 1), (6, 2), (4, 3), (3, 4))  # (B, L): its table 3
SIGMAS: Final = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
BUILTIN: Final = ("builtin",)

Train = Callable[[Sequence[Spec]], list[Result]]


@dataclass(frozen=True)
class Lab:
    """What a table needs: how to train, and the windows to score."""

    size: Preset
    steps: int
    train: Train
    tokens: Tensor


def sigma_ranges(lab: Lab) -> dict[str, object]:
    """The paper's table 1: its objective on six ranges of σ, read from noise at the last block, and as the blocks' mean."""
    specs = [cells.literal(lab.size, lab.steps, 0, sigma) for sigma in SIGMA_RANGES]
    read = [scoring.score(scoring.in_sequence(r.spec.manifest, r.blocks()), lab.tokens) for r in lab.train(specs)]
    return {
        "sigma_range": [f"{low:g}-{high:g}" for low, high in SIGMA_RANGES],
        "sigma_range_last_ce": [one["last"] for one in read],
        "sigma_range_mean_ce": [one["mean"] for one in read],
    }


def fixed_depth(lab: Lab) -> dict[str, object]:
    """The paper's table 3: twelve layers in all, cut into more or fewer blocks; its objective and ours, and one block's memory."""
    sizes = [Preset(lab.size.width, layers, blocks) for blocks, layers in DEPTHS]
    literal = [cells.literal(size, lab.steps, 0) for size in sizes]
    ours = [cells.chain(size, lab.steps, 0) for size in sizes]
    lab.train([*literal, *(spec for chain in ours for spec in chain)])
    last, mean, memory = [], [], []
    for spec, chain in zip(literal, ours, strict=True):
        (result,) = lab.train([spec])
        last.append(scoring.score(scoring.in_sequence(spec.manifest, result.blocks()), lab.tokens)["last"])
        blocks = lab.train(chain)
        mean.append(scoring.score(scoring.alone(chain[0].manifest, scoring.blocks_of(blocks)), lab.tokens)["mean"])
        memory.append(blocks[0].info["train_bytes"])
    return {
        "depth": [f"B{blocks}.L{layers}" for blocks, layers in DEPTHS],
        "depth_literal_ce": last,
        "depth_evidence_ce": mean,
        "depth_train_bytes_block": memory,
    }


def participation(lab: Lab) -> dict[str, object]:
    """Replicas of one block on halves of the text: how often they average, and what is lost where they do not arrive (tables 4 and 5)."""
    every = max(1, lab.steps // 25)
    rows = {
        "alone": cells.replicas(lab.size, lab.steps, 0, Sharing(), count=1),
        "double batch": cells.replicas(lab.size, lab.steps, 0, Sharing(), batch=2 * lab.size.batch, count=1),
        "mean, 5 rounds": cells.replicas(lab.size, lab.steps, 0, Sharing(lab.steps // 5, "all")),
        "mean, 25 rounds": cells.replicas(lab.size, lab.steps, 0, Sharing(every, "all")),
        "mean, 25 rounds, 90 % arrive": cells.replicas(lab.size, lab.steps, 0, Sharing(every, "all", 0.9)),
        "mean, 25 rounds, 42 % arrive": cells.replicas(lab.size, lab.steps, 0, Sharing(every, "all", 0.42)),
        "mean, 25 rounds, 42 % arrive, the rest thrown away": cells.replicas(lab.size, lab.steps, 0, Sharing(every, "all", 0.42, True)),
        "nothing arrives, all thrown away": cells.replicas(lab.size, lab.steps, 0, Sharing(every, "all", 0.0, True)),
        "Nesterov outer, 25 rounds": cells.replicas(lab.size, lab.steps, 0, Sharing(every, "all", outer="nesterov")),
    }
    return _first_block(lab, rows, "replicas")


def federated(lab: Lab) -> dict[str, object]:
    """Shards that differ: another kind of text in each replica, or shards of very different size. Scored on the first kind."""
    run = manifest(lab.size, "evidence", lab.steps, 0)
    sharing = Sharing(max(1, lab.steps // 25), "all")

    def pair(name: str, second: Member) -> Spec:
        return Spec(name, run, (Member(0, "replica 0", (0, 2)), second), lab.steps, sharing=sharing)

    rows = {
        "two halves of one text": pair("halves", Member(0, "replica 1", (1, 2))),
        "the second has a 64th of the text": pair("unequal", Member(0, "replica 1", (63, 64))),
        "the second has manuals instead": pair("other text", Member(0, "replica 1", data=BUILTIN)),
    }
    return _first_block(lab, rows, "federated")


def _first_block(lab: Lab, rows: dict[str, Spec], key: str) -> dict[str, object]:
    """CE of the mean of all replicas at the end, for each row."""
    results = lab.train(list(rows.values()))
    values = []
    for result in results:
        blocks = result.blocks()
        for name, parameter in blocks[0].named_parameters():
            parameter.copy_(torch.stack([block.get_parameter(name) for block in blocks]).mean(0))
        values.append(scoring.score(scoring.alone(result.spec.manifest, blocks[:1]), lab.tokens)["mean"])
    return {key: list(rows), f"{key}_ce": values}
