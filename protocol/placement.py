"""Which block a node should hold: when it starts with `--block auto`, and when a block that nobody holds should get one that is held often.

Need is measured in throughput, not in heads: the block whose holders train the fewest tokens a second needs the next one. Many nodes
start at once, so a newcomer first *claims* a block (phase "choosing" in its record, which counts for nothing else) and looks again. All who
choose see the same claims sooner or later, and `settle` is a function of what is seen: of a block with too many claims the same
surplus moves for every observer, to the same places. Whoever stays commits; a claim that has become a holder does not move any more. So a
crowd spreads evenly, and stops.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from blocktrain.protocol.buckets import place_of
from blocktrain.protocol.ids import PeerId
from blocktrain.protocol.membership import Member

TALL_TALE: Final = 10.0  # a claimed throughput counts for at most this many times the median
ENOUGH_TO_SPARE: Final = 4  # replicas of which one may go to help a block that has a single one
DANGER_TTLS: Final = 2.0  # for so many lives of a record a block must have been in danger: a restart is none
STAGGER_REFRESHES: Final = 3.0  # between one candidate's turn to move and the next one's: time to be seen
MOST_TURNS: Final = 32  # after so many turns all candidates that are left go at once, rather than never


@dataclass
class Load:
    """What a block has: tokens per second of its holders, and how many they are."""

    tokens_per_s: float = 0.0
    replicas: int = 0

    def add(self, tokens_per_s: float) -> None:
        self.tokens_per_s += tokens_per_s
        self.replicas += 1

    def key(self) -> tuple[bool, float, int]:
        """Lowest: most in need. A block that nobody holds comes before all."""
        return self.replicas > 0, self.tokens_per_s, self.replicas


def usual_speed(holders: Iterable[Member]) -> float:
    """The median speed of those who train and say how fast; what a node counts with while its own speed is not known."""
    known = [member.tokens_per_s for member in holders if member.phase == "training" and member.tokens_per_s > 0]
    return statistics.median(known) if known else 1.0


def loads(blocks: int, holders: Sequence[Member]) -> list[Load]:
    """What each block has. Nobody counts for more than ten medians; who serves without training counts as a replica only."""
    usual = usual_speed(holders)
    found = [Load() for _ in range(blocks)]
    for member in holders:
        unknown = member.phase == "joining" or (member.phase == "training" and member.tokens_per_s <= 0)
        speed = usual if unknown else 0.0 if member.phase == "serving" else min(member.tokens_per_s, TALL_TALE * usual)
        found[member.block].add(speed)
    return found


def most_needed(blocks: int, holders: Sequence[Member], me: PeerId) -> int:
    """The block with the least throughput; then the fewest replicas; then one that depends on who asks, so that a crowd spreads at once."""
    found = loads(blocks, holders)
    return min(range(blocks), key=lambda block: (*found[block].key(), (place_of(me) + block) % blocks))


@dataclass(frozen=True)
class Settled:
    """Where a chooser should claim now. `firm`: its block has no claim too many, so it may commit."""

    block: int
    firm: bool


def settle(blocks: int, holders: Sequence[Member], claims: Sequence[tuple[PeerId, int]], me: PeerId) -> Settled:
    """The outcome of all claims, ours among them, as everybody who sees the same will find it.

    Again and again the fullest block with a claim gives one to the neediest block, as long as that makes the swarm more even; of several
    claims the one with the largest hash goes. Each claim goes at most once, so this ends.
    """
    usual = usual_speed(holders)
    found = loads(blocks, holders)
    staying: dict[int, list[PeerId]] = {}
    for peer, block in sorted(set(claims), key=lambda claim: (place_of(claim[0]), claim[0])):
        found[block].add(usual)
        staying.setdefault(block, []).append(peer)
    claimed = next(block for peer, block in claims if peer == me)
    moved: dict[PeerId, int] = {}
    given: set[int] = set()
    while staying:
        fullest = max(staying, key=lambda block: (*found[block].key(), block))
        neediest = min(range(blocks), key=lambda block: (*found[block].key(), block))
        a, b = found[fullest], found[neediest]
        hole = b.replicas == 0 and a.replicas > 1
        if not hole and b.tokens_per_s + usual >= a.tokens_per_s * (1 - 1e-9):
            break
        peer = staying[fullest].pop()
        if not staying[fullest]:
            del staying[fullest]
        a.tokens_per_s, a.replicas = a.tokens_per_s - usual, a.replicas - 1
        b.add(usual)
        moved[peer] = neediest
        given.add(fullest)
    return Settled(moved.get(me, claimed), claimed not in given)


class Mover:
    """Whether a node that may move should: a block is in danger, ours has more than enough, and it is our turn.

    In danger is a block that nobody holds, or a single node where ours has four. It must have been so for two lives of a record, without a
    break. Then the nodes that could be spared take turns, those of the fullest blocks first, each waiting until the move of the one
    before would have been seen; so usually one goes, and nobody needs to know who else is allowed to.
    """

    def __init__(self, me: PeerId, block: int, blocks: int, *, ttl_s: float, refresh_s: float) -> None:
        self._me = me
        self._block = block
        self._blocks = blocks
        self._patience_s = DANGER_TTLS * ttl_s
        self._stagger_s = STAGGER_REFRESHES * refresh_s
        self._since: dict[int, float] = {}

    def consider(self, holders: Sequence[Member], now: float) -> int | None:
        """The block to move to, or None. `holders`: the others; ask at about every refresh."""
        counts = [1 if block == self._block else 0 for block in range(self._blocks)]
        for member in holders:
            counts[member.block] += 1
        in_danger = [block for block in range(self._blocks) if _spares(counts[self._block], counts[block])]
        self._since = {block: self._since.get(block, now) for block in in_danger}
        if not in_danger:
            return None
        worst = min(in_danger, key=lambda block: (counts[block], self._since[block], block))
        delay_s = self._patience_s + self._stagger_s * min(MOST_TURNS, self._turn(holders, counts, worst))
        return worst if now - self._since[worst] >= delay_s else None

    def _turn(self, holders: Sequence[Member], counts: Sequence[int], worst: int) -> int:
        """How many others could go before us."""
        mine = (-counts[self._block], place_of(self._me))
        return sum(
            (-counts[member.block], place_of(member.peer)) < mine
            for member in holders
            if member.phase != "joining" and _spares(counts[member.block], counts[worst])
        )


def _spares(own: int, other: int) -> bool:
    return (other == 0 and own >= 2) or (other == 1 and own >= ENOUGH_TO_SPARE)
