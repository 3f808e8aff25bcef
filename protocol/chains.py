"""Which peer serves each block of a sweep, which one takes over when it fails, and over which route the sweep should travel.

Planned from what membership knows, by expected seconds: the measured round trip (an optimistic guess where there is none, so that
newcomers are tried), the load that a holder announces, failures of late, and how far its state is behind. Nearly equal holders are drawn
by chance, so that clients who know the same do not all crowd on the same peer, and now and then a little-known holder is tried in order
to learn about it. A holder that is put off after failed calls is the last resort before a block counts as missing; one that broke the
agreement is none.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from dataclasses import replace as _replaced
from itertools import pairwise
from typing import Final, Literal

from blocktrain.protocol.acceptance import FAR_BEHIND_ROUNDS
from blocktrain.protocol.errors import NoPeers
from blocktrain.protocol.ids import NO_DIGEST, PeerId, short
from blocktrain.protocol.membership import Member, Members, Rng, believable_round

PRIOR_RTT_S: Final = 0.05  # of a peer never called: better than most of the internet, worse than a neighbour
LOAD_S: Final = 0.01  # expected wait for every session that a holder already serves
DOUBT_SHARE: Final = 0.05  # seconds of cost for every second of faded back-off
LAG_S: Final = 0.004  # for every round behind the newest, up to FAR_BEHIND_ROUNDS
FAR_BEHIND_S: Final = 1.0  # on top of it, beyond that
SPREAD: Final = 0.1  # holders within this share of each other are equals: chance decides
PROBE_SHARE: Final = 0.05  # of choices go to a holder that was never called, if there is one


@dataclass(frozen=True, slots=True)
class Hop:
    """One block of a chain and who serves it."""

    block: int
    peer: PeerId
    round: int
    digest: bytes  # the state to ask for; zeros: the newest that the holder has
    rtt_s: float | None
    addresses: tuple[str, ...] = ()
    own: bool = False  # served by our own node


@dataclass(frozen=True, slots=True)
class Chain:
    """One peer per block, in order. `missing` blocks have none: the answer is then that of the others, and must say so."""

    hops: tuple[Hop, ...]
    missing: tuple[int, ...] = ()

    def hop(self, block: int) -> Hop:
        """Raises: KeyError: the block is missing."""
        for hop in self.hops:
            if hop.block == block:
                return hop
        raise KeyError(block)

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(hop.peer for hop in self.hops)


def plan(
    members: Members,
    blocks: int,
    now: float,
    rng: Rng,
    *,
    own: tuple[int, PeerId] | None = None,
    exclude: Collection[PeerId] = frozenset(),
    require_all: bool = True,
) -> Chain:
    """Choose one holder for every block.

    Args:
        own: our block and peer id, if our own node can serve: nothing is nearer.
        exclude: peers not to use.
        require_all: a block without a holder is an error; otherwise it is left out and listed in `missing`.
    Raises: NoPeers: naming the block, who held it last and how long ago; or that no block has a holder.
    """
    hops: list[Hop] = []
    missing: list[int] = []
    for block in range(blocks):
        if own is not None and own[0] == block and own[1] not in exclude:
            hops.append(Hop(block, own[1], 0, NO_DIGEST, 0.0, own=True))
            continue
        chosen = _choose(members, block, now, rng, exclude)
        if chosen is not None:
            hops.append(_hop(chosen))
        elif require_all:
            raise NoPeers(_nobody(members, block, now, exclude))
        else:
            missing.append(block)
    if not hops:
        raise NoPeers(_nobody(members, 0, now, exclude))
    return Chain(tuple(hops), tuple(missing))


def replace(chain: Chain, block: int, members: Members, now: float, rng: Rng, *, exclude: Collection[PeerId] = frozenset()) -> Chain:
    """The chain with another holder for one block: with the same state if there is one, because its cache then stays exact.

    The peer that serves the block now is excluded by itself; `exclude` names further ones.
    Raises: NoPeers: as `plan`.
    """
    failed = chain.hop(block)
    excluded = frozenset((*exclude, failed.peer))
    chosen = _choose(members, block, now, rng, excluded, digest=failed.digest) or _choose(members, block, now, rng, excluded)
    if chosen is None:
        raise NoPeers(_nobody(members, block, now, excluded))
    hops = tuple(_hop(chosen) if hop.block == block else hop for hop in chain.hops)
    return _replaced(chain, hops=hops)


def cheaper_route(chain: Chain, *, drafts: bool = True) -> Literal["chain", "star"]:
    """Whether a traversal is expected back sooner from holder to holder, or by asking all holders at once.

    Two holders are assumed to be as far apart as the farther one is from us. With drafts the star takes two turns, because the others
    score what the first holder wrote. On a tie the chain, which costs us less traffic. Only additive objectives may use a star.
    """
    rtts = [PRIOR_RTT_S if hop.rtt_s is None else hop.rtt_s for hop in chain.hops]
    along = (rtts[0] + sum(max(a, b) for a, b in pairwise(rtts)) + rtts[-1]) / 2
    star = rtts[0] + max(rtts[1:], default=0.0) if drafts else max(rtts)
    return "star" if star < along * (1 - 1e-9) else "chain"


def _choose(members: Members, block: int, now: float, rng: Rng, exclude: Collection[PeerId], digest: bytes | None = None) -> Member | None:
    usable = [member for member in members.holders(block, now) if member.peer not in exclude and not member.offender]
    usable = [member for member in usable if member.phase != "joining"]
    usable = [member for member in usable if member.trained] or usable  # a run that has just begun has nothing better
    if digest is not None:  # a holder with the very same state, if it can be used right now
        usable = [member for member in usable if member.digest == digest and not member.avoided_s]
    if not usable:
        return None
    ready = [member for member in usable if not member.avoided_s]
    if not ready:
        return min(usable, key=lambda member: (member.avoided_s, rng.random()))
    unknown = [member for member in ready if member.rtt_s is None]
    if unknown and rng.random() < PROBE_SHARE:
        return unknown[rng.randrange(len(unknown))]
    newest = believable_round([member.round for member in ready])
    return min(ready, key=lambda member: _cost_s(member, newest) * (1 + SPREAD * rng.random()))


def _cost_s(member: Member, newest: int) -> float:
    rtt_s = PRIOR_RTT_S if member.rtt_s is None else member.rtt_s
    lag = max(0, newest - member.round)
    cost = rtt_s + LOAD_S * member.load + DOUBT_SHARE * member.doubt_s + LAG_S * min(lag, FAR_BEHIND_ROUNDS)
    return cost + (FAR_BEHIND_S if lag > FAR_BEHIND_ROUNDS else 0.0)


def _hop(member: Member) -> Hop:
    return Hop(member.block, member.peer, member.round, member.digest, member.rtt_s, member.addresses)


def _nobody(members: Members, block: int, now: float, exclude: Collection[PeerId]) -> str:
    """Why a block has no holder that can be used, in one line."""
    holders = members.holders(block, now)
    left = [member for member in holders if member.peer not in exclude]
    if left and all(member.phase == "joining" for member in left):
        return f"block {block}: its only holders are still joining ({_names(left)})"
    banned = [member for member in left if member.offender]
    if banned:
        first = min(banned, key=lambda member: member.avoided_s)
        return f"block {block}: {short(first.peer)} is put off for {first.avoided_s:.0f} s ({members.why(first.peer)})"
    if holders and not left:
        return f"block {block}: no holder is left besides {_names(holders)}, which failed or was excluded"
    last = members.last_seen(block)
    if last is None:
        return f"block {block} has no holder, and none has been seen yet"
    return f"block {block} has no holder; the last one seen was {short(last[0])}, {max(0.0, now - last[1]):.0f} s ago"


def _names(members: list[Member]) -> str:
    shown = ", ".join(short(member.peer) for member in members[:4])
    return shown + (f" and {len(members) - 4} more" if len(members) > 4 else "")
