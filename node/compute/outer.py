"""Outer steps: what a merge does to the live replica beyond the mean. The mean itself is what both sides publish, bit for bit the same.

With momentum every replica keeps two more states of its own: the *anchor*, where its last outer step led, and the *velocity*. The way from
the anchor to a merge is to the outer step what a gradient is to SGD. What the replica trains while an exchange is under way is added to
where the outer step leads, as it is with the plain mean. P is the number of parameters; all buffers are float32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from blocktrain.node.compute import flat


@dataclass(frozen=True)
class Rule:
    """SGD over merges. `step` is the way from the anchor to the merge."""

    rate: float
    momentum: float
    nesterov: bool


RULES: Final[Mapping[str, Rule]] = {
    # DiLoCo (arXiv 2311.08105), algorithm 1 and its section 3: Nesterov momentum over the mean of all replicas; here over a pair's.
    "nesterov": Rule(rate=0.7, momentum=0.9, nesterov=True),
    # NoLoCo (arXiv 2506.10911), eq. 2: momentum over a random pair's mean step; its pull towards the pair's mean is the merge itself.
    "noloco": Rule(rate=0.7, momentum=0.5, nesterov=False),
}


@dataclass(frozen=True)
class Momentum:
    """What a replica carries from one outer step to the next."""

    anchor_P: Tensor
    velocity_P: Tensor


def begin(outer: str, state_P: Tensor) -> Momentum | None:
    """At rest in a state that is not changed any more; None for the plain mean, which carries nothing."""
    return Momentum(state_P, torch.zeros_like(state_P)) if outer in RULES else None


def follow(momentum: Momentum | None, state_P: Tensor) -> Momentum | None:
    """An own round is no outer step: there is nobody's work in it but ours. The anchor goes along, the velocity waits."""
    return None if momentum is None else Momentum(state_P, momentum.velocity_P)


def step(outer: str, momentum: Momentum | None, merge_P: Tensor, difference_P: Tensor) -> Momentum | None:
    """Take an outer step to a merge. `difference_P`, what the live replica is about to get, is changed in place."""
    if momentum is None:
        return None
    rule = RULES[outer]
    anchor, velocity = flat.empty(merge_P.numel()), flat.empty(merge_P.numel())
    for piece in flat.pieces(merge_P.numel()):
        way = merge_P[piece] - momentum.anchor_P[piece]
        if rule.nesterov:
            torch.add(way, momentum.velocity_P[piece], alpha=rule.momentum, out=velocity[piece])
            move = rule.rate * torch.add(way, velocity[piece], alpha=rule.momentum)
        else:
            torch.add(rule.rate * way, momentum.velocity_P[piece], alpha=rule.momentum, out=velocity[piece])
            move = velocity[piece]
        torch.add(momentum.anchor_P[piece], move, out=anchor[piece])
        difference_P[piece] += move - way
    return Momentum(anchor, velocity)
