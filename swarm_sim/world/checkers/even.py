"""Checker: a crowd that chooses its blocks converges to an even division, and stays there, without oscillation.

It reads the diary of a choice (choosing.py) instead of watching a world: who said what when, from the first claim to the last minute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from blocktrain.swarm_sim.world.checkers.base import Violation

MOST_CHANGES: Final = 4  # of one node's word before it trains: it reacts, it does not swing to and fro
SLACK_S: Final = 12.0  # beyond a choice's own limit: a read that hangs, and the last word


class Said(NamedTuple):
    """A word of one node in the directory. `phase` is an announcement's."""

    at_s: float
    node: int
    phase: str
    block: int


def check(diary: Sequence[Said], nodes: int, blocks: int, starts_s: Sequence[float], at_most_s: float) -> list[Violation]:
    """What is wrong with a crowd's choice. `starts_s`: when each of them began to choose; `at_most_s`: how long a choice may take."""
    wrong: list[Violation] = []

    def objects(at_s: float, what: str) -> None:
        wrong.append(Violation(at_s, "even", what))

    claims: dict[int, list[Said]] = {number: [] for number in range(nodes)}
    final: dict[int, int] = {}
    trained: set[int] = set()
    for said in diary:
        if said.phase == "choosing":
            claims[said.node].append(said)
        elif said.node not in final:
            final[said.node] = said.block
            if said.at_s > starts_s[said.node] + at_most_s + SLACK_S:
                objects(said.at_s, f"node {said.node} took {said.at_s - starts_s[said.node]:.0f} s to choose")
        elif said.block != final[said.node] and said.phase == "joining" and said.node not in trained:
            claims[said.node].append(said)  # a commitment that was mended before anything was trained
            final[said.node] = said.block
        elif said.block != final[said.node]:
            objects(said.at_s, f"node {said.node} moved from block {final[said.node]} to block {said.block}, though no block was in danger")
            final[said.node] = said.block
        if said.phase == "training":
            trained.add(said.node)
    for number in range(nodes):
        if len(claims[number]) > MOST_CHANGES:
            path = " → ".join(str(said.block) for said in claims[number])
            objects(claims[number][-1].at_s, f"node {number} swung to and fro: {path}")
        if number not in final:
            objects(diary[-1].at_s, f"node {number} never committed")
    held = Counter(final.values())
    counts = [held[block] for block in range(blocks)]
    if max(counts) - min(counts) > 1:
        objects(diary[-1].at_s, f"the division is uneven: {counts}")
    return wrong
