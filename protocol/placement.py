"""Which block a node should hold: when it starts with `--block auto`, and when a block that nobody holds should get one that is held often.

Need is measured in throughput, not in heads: the block whose holders train the fewest tokens a second needs the next one. Many nodes
start at once, so a newcomer first says that it is *choosing* (a phase in its record, which counts for nothing else). `divide` then gives
every chooser a block, and depends only on who chooses and who holds what: all who see the same find the same, in whatever order they
look. It does not matter either who of them has already committed: a chooser who becomes a holder of the block that was its own changes
nothing for the others. So nobody need agree on a moment; it is enough to have seen everybody who is about to choose.
"""

from __future__ import annotations

import hashlib
import heapq
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from blocktrain.protocol.buckets import place_of
from blocktrain.protocol.ids import PeerId, peer_bytes
from blocktrain.protocol.membership import Member

TALL_TALE: Final = 10.0  # a claimed throughput counts for at most this many times the median
ENOUGH_TO_SPARE: Final = 4  # replicas of which one may go to help a block that has a single one
DANGER_TTLS: Final = 2.0  # for so many lives of a record a block must have been in danger: a restart is none
STAGGER_REFRESHES: Final = 3.0  # between one candidate's turn to move and the next one's: time to be seen
MOST_CHOOSERS: Final = 256  # that one division looks at: who floods a run with claims makes newcomers reckon, but not for long
MOST_TURNS: Final = 32  # after so many turns all candidates that are left go at once, rather than never


@dataclass
class Load:
    """What a block has: tokens per second of its holders, and how many they are."""

    tokens_per_s: float = 0.0
    replicas: int = 0

    def add(self, tokens_per_s: float) -> None:
        self.tokens_per_s += tokens_per_s
        self.replicas += 1

    def key(self, usual: float, more: int = 0) -> tuple[bool, float, int]:
        """Lowest: most in need, once `more` replicas of the usual speed have come. A block that nobody holds comes before all.

        Rounded: in whatever order speeds were added up, equal loads are equal.
        """
        return self.replicas + more > 0, round(self.tokens_per_s / usual + more, 6), self.replicas + more


def usual_speed(holders: Iterable[Member]) -> float:
    """The median speed of those who train and say how fast; what a node counts with while its own speed is not known."""
    known = [member.tokens_per_s for member in holders if member.phase == "training" and member.tokens_per_s > 0]
    return statistics.median(known) if known else 1.0


def loads(blocks: int, holders: Sequence[Member]) -> list[Load]:
    """What each block has. Nobody counts for more than ten medians; who serves without training counts as a replica only.

    Where nobody trains there is no throughput to go by, and all count alike: else those still joining would seem to do the training.
    """
    usual = usual_speed(holders)
    idle = 0.0 if any(member.phase == "training" for member in holders) else usual
    found = [Load() for _ in range(blocks)]
    for member in holders:
        unknown = member.phase == "joining" or (member.phase == "training" and member.tokens_per_s <= 0)
        speed = usual if unknown else idle if member.phase == "serving" else min(member.tokens_per_s, TALL_TALE * usual)
        found[member.block].add(speed)
    return found


def divide(blocks: int, holders: Sequence[Member], others: Iterable[PeerId], me: PeerId) -> int:
    """Our block, where `others` choose as well: the outcome that everybody finds who sees the same.

    Alone it is the block with the least throughput; then the fewest replicas; then one that depends on who asks, so that a crowd that does
    not see each other spreads, too.

    Places are dealt out one by one to the neediest block, one for each chooser, each counted with the usual speed. Several blocks may be
    in equal need of the last ones: then who gets which is left open until here. Of all (chooser, block) pairs, in the order of a hash, each
    is taken whose chooser has no block yet and whose block has a place left. Taking a pair out beforehand, since that chooser holds
    its block by now, leaves every later step as it was: that is why commits change nothing.
    """
    choosers = sorted({me, *sorted({*others} - {me}, key=lambda peer: (place_of(peer), peer))[: MOST_CHOOSERS - 1]})
    sure, open_, spare = _places(blocks, holders, len(choosers))
    wanted = [block for block in range(blocks) if sure[block] or block in open_]
    pairs = sorted((_liking(peer, block), peer, block) for peer in choosers for block in wanted)
    given: dict[PeerId, int] = {}
    for _, peer, block in pairs:
        if peer in given:
            continue
        if sure[block]:
            sure[block] -= 1
        elif block in open_ and spare:
            open_.discard(block)
            spare -= 1
        else:
            continue
        given[peer] = block
        if peer == me:
            break
    return given[me]


def _places(blocks: int, holders: Sequence[Member], count: int) -> tuple[list[int], set[int], int]:
    """`count` places, dealt to the neediest: each block's sure ones, the blocks that need the last ones equally, and how many those are."""
    usual = usual_speed(holders)
    found = loads(blocks, holders)
    queue = [(found[block].key(usual), block) for block in range(blocks)]
    heapq.heapify(queue)
    dealt = [0] * blocks
    last: list[int] = []  # of equal need
    need = queue[0][0]
    for _ in range(count):
        key, block = queue[0]
        if key != need:
            need, last = key, []
        last.append(block)
        dealt[block] += 1
        heapq.heapreplace(queue, (found[block].key(usual, dealt[block]), block))
    for block in last:
        dealt[block] -= 1
    return dealt, {*last, *(block for key, block in queue if key == need)}, len(last)


def _liking(peer: PeerId, block: int) -> bytes:
    return hashlib.sha256(peer_bytes(peer) + block.to_bytes(4, "big")).digest()[:8]


def surplus(blocks: int, holders: Sequence[Member], choosers: int, me: PeerId, block: int, until: float) -> int | None:
    """Where we should go instead, we who have just committed to `block` and hold nothing yet: a claim was seen too late. None: stay.

    Where moving one of those who have only just committed makes the swarm more even, the one who committed last goes to the neediest
    block: the others may already be loading theirs.

    Args:
        holders: the others. Those that have only committed are known by their records, which have no address yet.
        choosers: how many still choose; they are expected where they are needed most.
        until: when our own record ends, which tells the others when we committed.
    """
    usual = usual_speed(holders)
    found = loads(blocks, holders)
    sure, open_, _ = _places(blocks, holders, choosers)
    taken = [sure[each] + (each in open_) for each in range(blocks)] if choosers else sure
    here, there = found[block].key(usual), min((found[each].key(usual, taken[each]), _liking(me, each), each) for each in range(blocks))
    uneven = there[0][1] + 1 <= here[1] or (here[0] and not there[0][0])  # `here` is without us
    committed = [(member.expires_at, member.peer) for member in holders if member.block == block and is_promise(member)]
    return there[2] if uneven and max([(until, me), *committed])[1] == me else None


def is_promise(member: Member) -> bool:
    """Whether a holder has only committed so far: its node is not up yet."""
    return member.phase == "joining" and not member.addresses


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
