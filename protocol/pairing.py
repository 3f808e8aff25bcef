"""Whom to offer an exchange: an order of candidates, by topology, from what we know of our block's holders.

`pairs` (default) is a fresh random order each time. The graphs (`ring`, `expander`, `small-world`) are drawn over the sorted peer ids, so
that nodes with the same view draw the same graph without a word; `full` goes round all of them in turn. Peers that are put off are not
candidates; the core leaves them out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from blocktrain.protocol.chance import Rng
from blocktrain.protocol.ids import PeerId

MAX_TRIES: Final = 3  # candidates asked in one round before it ends as an own round
EXPANDER_DEGREE: Final = 4


def candidates(topology: str, me: PeerId, others: Sequence[PeerId], turn: int, rng: Rng) -> list[PeerId]:
    """The peers to ask in this round, best first, at most `MAX_TRIES`.

    Args:
        others: holders of our block that may be asked, without us.
        turn: how many rounds we have tried so far; the graphs rotate by it.
    """
    if not others:
        return []
    if topology == "pairs":
        return rng.sample(list(others), min(MAX_TRIES, len(others)))
    ring = sorted({*others, me})
    near = neighbours(topology, ring, ring.index(me))
    start = turn % len(near)
    return [ring[index] for index in near[start:] + near[:start]][:MAX_TRIES]


def neighbours(topology: str, ring: Sequence[PeerId], place: int) -> list[int]:
    """The places of a peer's neighbours in a graph over the sorted peers, in the order in which it asks them."""
    size = len(ring)
    if topology == "full":
        return [(place + step) % size for step in range(1, size)]
    steps = {1 % size, -1 % size}
    if topology == "expander":  # circulant with doubling strides: diameter about log2 of the size
        for power in range(1, EXPANDER_DEGREE):
            stride = max(1, size >> power)
            steps |= {stride % size, -stride % size}
    links = [(place + step) % size for step in sorted(steps) if step % size]
    if topology == "small-world":
        links += _long_links(ring, place)
    return list(dict.fromkeys(index for index in links if index != place))


def _long_links(ring: Sequence[PeerId], place: int) -> list[int]:
    """Each peer draws one long link from its own id; both ends know of it, since both can draw it."""
    size = len(ring)

    def drawn(index: int) -> int:
        return int.from_bytes(hashlib.sha256(ring[index].encode()).digest()[:8], "big") % size

    return [drawn(place), *(index for index in range(size) if drawn(index) == place)]
