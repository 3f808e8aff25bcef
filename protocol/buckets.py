"""Which DHT keys hold one block's announcements: so spread that no key grows with the swarm, and so that all still find each other.

The keys form a binary tree over the leading bits of sha256(peer id). Level k (a power of two, 1 … `limits.MAX_BUCKETS`) has k buckets,
numbered k-1 … 2k-2; so 0 is the root, and the only key of a small swarm. Each node picks the level at which its own bucket holds about
`PER_BUCKET` peers, and

* announces in its own bucket at that level and at the one above, and at each further one with half the chance of the one below: hence
  every key of the tree holds about two bucketfuls, whatever the size of the swarm, and each node writes about three records;
* reads its own bucket at that level and at the one above, and one random bucket of its level.

So nodes whose levels differ by one step meet, whichever of them is ahead, and a newcomer, who starts at the root, finds somebody
there, sees that the root is crowded, and comes down one level with every read.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Final

from blocktrain.protocol import limits
from blocktrain.protocol.ids import PeerId, bucket_of

PER_BUCKET: Final = 32  # records of about 400 bytes: a key that is cheap to read
GROW_ABOVE: Final = PER_BUCKET * 3 // 2  # peers in our own bucket. Below PER_BUCKET in it and its sibling together, one level up again
_PLACE_BITS: Final = 32


@lru_cache(maxsize=1 << 15)  # a simulated world asks for the same ids from thousands of nodes
def place_of(peer: PeerId) -> int:
    """Where a peer stands in the tree: the first 32 bits of its hash. Raises: Malformed: not base58."""
    return bucket_of(peer, 1 << _PLACE_BITS)


def number(place: int, level: int) -> int:
    """The number of the bucket that holds a place at a level."""
    return level - 1 + (place * level >> _PLACE_BITS)


def next_level(level: int, place: int, others: Collection[int]) -> int:
    """The level to use from now on, given the places of the block's known holders. It moves with hysteresis.

    Only what lies in our own bucket and its sibling is counted, because only that is fully known.
    """

    def near(at: int) -> int:
        shift = _PLACE_BITS + 1 - at.bit_length()  # `at` is a power of two: the leading bits that number a bucket of this level
        return [other >> shift for other in others].count(place >> shift)

    while level < limits.MAX_BUCKETS and near(level) > GROW_ABOVE:
        level *= 2
    while level > 1 and near(level // 2) < PER_BUCKET:
        level //= 2
    return level


def announced(place: int, level: int) -> list[int]:
    """The numbers of the buckets in which a peer at this level announces itself."""
    numbers = [number(place, level)]
    luck = place  # its low bits: as good as random, the same each time, and not those that choose the bucket
    above = level // 2
    while above:
        numbers.append(number(place, above))
        if luck & 1:
            break
        luck >>= 1
        above //= 2
    return numbers


@lru_cache(maxsize=1 << 15)
def read(place: int, level: int) -> tuple[int, ...]:
    """The numbers of a peer's own buckets that it reads, besides a random one."""
    return tuple(sorted({number(place, level), number(place, max(1, level // 2))}, reverse=True))
