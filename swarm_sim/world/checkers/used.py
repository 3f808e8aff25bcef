"""Checker: nothing is applied that was not verified. What it judges is evidence that each kind of swarm gathers in its own way."""

from __future__ import annotations

import math
from dataclasses import dataclass

from blocktrain.swarm_sim.world.checkers.base import Checker
from blocktrain.swarm_sim.world.checkers.scene import Actor


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of something that a node used."""

    right_digest: bool
    size: float  # a norm: of the state, or of what lies between it and the node's own
    most: float  # above this it was made up


class Used(Checker):
    """Every merge used and every state loaded has its digest, is made of numbers, and is of a plausible size."""

    name = "verified"

    def look(self, node: Actor, source: object, evidence: Evidence) -> None:
        """`source`: from whom it was, in words."""
        wrong = ""
        if not evidence.right_digest:
            wrong = "without its digest"
        elif not math.isfinite(evidence.size):
            wrong = "that is no number"
        elif evidence.size > evidence.most:
            wrong = f"of norm {evidence.size:.3g}"
        if wrong:
            self.object(f"node {node.number} used a state {wrong} from {source}")
