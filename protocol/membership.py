"""What one node knows about the others: who holds what, how they answer, whom to avoid.

Fed by verified announcements (`observe`) and by our own calls (`succeeded`, `failed`, `offended`); asked by pairing, chain planning,
catching up and placement. A peer counts with its latest word only, because one identity is one process and one block. Everything is
bounded: at most `limits.MAX_MEMBERS` peers, of which those that expired go first, then the longest silent stranger of the most crowded
block; a flood of fresh identities never pushes out a living peer that we have successfully talked with.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from blocktrain.protocol import limits
from blocktrain.protocol.acceptance import FAR_BEHIND_ROUNDS
from blocktrain.protocol.buckets import PER_BUCKET, announced, next_level, place_of, read
from blocktrain.protocol.ids import PeerId, RunId
from blocktrain.protocol.records import PHASES, Seen

FAILED_FIRST_S: Final = 2.0  # put off after the first failed call: long enough to try somebody else
FAILED_MOST_S: Final = 60.0
FAILED_HALF_LIFE_S: Final = 60.0  # after the back-off ended, the next one is halved for every minute that passes
OFFENDED_FIRST_S: Final = 30.0
OFFENDED_MOST_S: Final = 3600.0
OFFENDED_HALF_LIFE_S: Final = 3600.0
FRIEND_KEPT_S: Final = 600.0  # how long the RTT of a peer whose record ended is remembered: it may come back
RTT_SHARE: Final = 0.25  # weight of the newest RTT in the moving average
UNREAD_MOST: Final = 4  # reads of a block that wait until somebody asks: both of our own buckets and two random ones
RECOUNT_S: Final = 20 * limits.TTL_S  # a level that every read confirms is counted again after this
RECOUNT_OWN_S: Final = 4 * limits.TTL_S  # the same where reads are looked at; what changes by an eighth is counted at once
SWEEP_PAST: Final = 16  # living peers that a sweep looks past to find those whose records ended
_NO_HOLDER: Final = frozenset({"left", "choosing"})  # phases of a record that does not make its writer a holder
_HOLDER: Final = frozenset(PHASES) - _NO_HOLDER


class Rng(Protocol):
    """The part of `random.Random` that decisions need; this room may not import chance itself."""

    def random(self) -> float: ...

    def randrange(self, start: int, /) -> int: ...


class Member(NamedTuple):  # much cheaper to make than a frozen dataclass, and views are made all the time
    """A living holder as it stands now."""

    peer: PeerId
    block: int
    phase: str
    round: int
    digest: bytes
    tokens_per_s: float
    load: float
    addresses: tuple[str, ...]
    expires_at: float
    rtt_s: float | None  # None: never called
    avoided_s: float  # seconds for which it should be left alone; 0: usable
    doubt_s: float  # its last back-off, faded: above 0 means that calls failed lately
    offender: bool  # under a ban for breaking the agreement: not even a last resort

    @property
    def trained(self) -> bool:
        """Whether its published state is worth anything."""
        return self.round > 0 and self.phase != "joining"


class _Ban:
    """A back-off that doubles with every strike and fades once it is over."""

    __slots__ = ("length_s", "until")

    def __init__(self) -> None:
        self.until = 0.0
        self.length_s = 0.0

    def faded_s(self, now: float, half_life_s: float) -> float:
        return self.length_s * math.exp2(-max(0.0, now - self.until) / half_life_s)

    def strike(self, now: float, first_s: float, most_s: float, half_life_s: float) -> None:
        if now >= self.until:  # calls that were already under way when it began do not double it
            self.length_s = min(most_s, max(first_s, 2 * self.faded_s(now, half_life_s)))
        self.until = now + self.length_s


class _Peer:
    """All that is kept of one peer. Lives on exactly one shelf: friends or strangers of a block, or the faded."""

    __slots__ = ("__dict__", "expires_at", "seen", "shelf")

    # What is known of those alone whom we met. Until then it is the class's, so that the many strangers cost little.
    friend: bool = False
    rtt_s: float | None = None
    used_at: float = 0.0
    failing: _Ban | None = None
    offending: _Ban | None = None
    why: str = ""

    def __init__(self, shelf: dict[PeerId, _Peer], seen: Seen | None, expires_at: float) -> None:
        self.shelf = shelf
        self.seen = seen
        self.expires_at = expires_at  # of its record

    def avoided_s(self, now: float) -> float:
        until = max(self.failing.until if self.failing else 0.0, self.offending.until if self.offending else 0.0)
        return max(0.0, until - now)

    @property
    def stranger(self) -> bool:
        """Nothing but its record is known: without that, there is nothing to remember."""
        return not self.friend and self.failing is None and self.offending is None

    def kept_until(self) -> float:
        """Until when it is worth remembering, as long as there is room."""
        times = [self.expires_at]
        if self.friend:
            times.append(self.used_at + FRIEND_KEPT_S)
        if self.failing:
            times.append(self.failing.until + FAILED_HALF_LIFE_S)
        if self.offending:
            times.append(self.offending.until + OFFENDED_HALF_LIFE_S)
        return max(times)


class Members:
    """One node's view of the others. `now` is the network's clock in Unix seconds, as in records' expiry."""

    def __init__(self, run: RunId, blocks: int, me: PeerId) -> None:
        self.run = run
        self.blocks = blocks
        self.me = me
        self._peers: dict[PeerId, _Peer] = {}
        self._faded: dict[PeerId, _Peer] = {}  # no living record: expired, left, or only met in a call
        self._friends: tuple[dict[PeerId, _Peer], ...] = tuple({} for _ in range(blocks))  # by block; longest silent first
        self._strangers: tuple[dict[PeerId, _Peer], ...] = tuple({} for _ in range(blocks))
        self._last: dict[int, tuple[PeerId, float]] = {}
        self._levels: dict[int, tuple[int, int, float, bool]] = {}  # block → its level; how many were known, when, whether it moved
        self._unread: dict[int, list[tuple[Sequence[Seen], float]]] = {}  # block → reads nobody has looked at, and when they were heard
        self._swept_at = 0.0

    def __len__(self) -> int:
        self._look_everywhere()
        return len(self._peers)

    # -- facts in

    def observe(self, seen: Seen, now: float) -> bool:
        """Take a verified announcement. Returns whether it told us anything new.

        The later expiry wins. A tombstone silences the block that it names and is remembered until its own expiry, so that an older
        record cannot bring the peer back; it does not silence a peer that has moved to another block.
        """
        word = seen.announcement
        if seen.peer == self.me or word.run != self.run or word.block >= self.blocks:
            return False
        if not now < seen.expires_at <= now + limits.MAX_RECORD_LIFE_S:
            return False
        self._sweep(now)
        peer = self._peers.get(seen.peer)
        old = peer.seen if peer and peer.expires_at > now else None
        left = word.phase == "left"
        if old is not None:
            moved = old.announcement.block != word.block
            if moved and left:
                return False
            gone_elsewhere = moved and old.announcement.phase == "left"
            if not gone_elsewhere and seen.expires_at <= old.expires_at:
                return False
        if peer is None:
            peer = self._admit(seen.peer, word.block)
            if peer is None:
                return False
        peer.seen, peer.expires_at = seen, seen.expires_at
        self._shelve(seen.peer, peer)
        if word.phase not in _NO_HOLDER:
            self._last[word.block] = (seen.peer, now)
        elif left and word.block not in self._last:
            self._last[word.block] = (seen.peer, now)  # all that a newcomer can know: who was here until a moment ago
        return True

    def hear(self, block: int, records: Sequence[Seen], now: float) -> None:
        """Take all that one read of a block brought, as `observe` would, when somebody asks about that block.

        Most reads renew what is renewed again before anybody looks: a trainer hardly ever asks who holds the other blocks. So reads wait,
        a few a block, and the oldest is dropped unlooked at.
        """
        if 0 <= block < self.blocks and records:
            waiting = self._unread.setdefault(block, [])
            waiting.append((records, now))
            if len(waiting) > UNREAD_MOST:
                del waiting[0]

    def _look_everywhere(self) -> None:
        for block in list(self._unread):
            self._look(block)

    def _look(self, block: int) -> None:
        """Take in what was heard of a block. The usual cases are kept short: there are thousands of them.

        They are: a holder that stands where it stood, with a later record; and a stranger for whom there is room.
        """
        for records, now in self._unread.pop(block, ()):
            self._sweep(now)
            peers, run, most = self._peers, self.run, now + limits.MAX_RECORD_LIFE_S
            friends, strangers = self._friends[block], self._strangers[block]
            last = None
            for seen in records:
                name, word, expires_at = seen.peer, seen.announcement, seen.expires_at
                if word.phase in _HOLDER and word.block == block and word.run == run and now < expires_at <= most:
                    shelf = strangers if name in strangers else friends
                    peer = shelf.get(name)
                    if peer is not None:
                        if expires_at <= peer.expires_at:
                            continue
                        if peer.expires_at > now:
                            peer.seen, peer.expires_at = seen, expires_at
                            del shelf[name]  # the most recently heard stands last
                            shelf[name] = peer
                            last = name
                            continue
                    elif name not in peers and name != self.me and len(peers) < limits.MAX_MEMBERS:
                        peers[name] = strangers[name] = _Peer(strangers, seen, expires_at)
                        last = name
                        continue
                self.observe(seen, now)
            if last is not None:
                self._last[block] = (last, now)

    def clash(self, seen: Seen, own_last_expiry: float) -> bool:
        """Whether a record of our own peer id is one that we did not write: two processes share one identity."""
        return seen.peer == self.me and seen.expires_at > own_last_expiry

    def succeeded(self, peer: PeerId, now: float, rtt_s: float | None = None) -> None:
        """A call worked: back-off is over. `rtt_s`, where the call measured one, joins the moving average."""
        known = self._met(peer)
        if known is None:
            return
        known.failing = None
        known.used_at = now
        if rtt_s is not None:
            known.rtt_s = rtt_s if known.rtt_s is None else known.rtt_s + RTT_SHARE * (rtt_s - known.rtt_s)
        if not known.friend and not self.offence_s(peer, now):
            known.friend = True
            self._shelve(peer, known)
        if known.seen is not None and known.seen.announcement.phase not in _NO_HOLDER:
            self._last[known.seen.announcement.block] = (peer, now)

    def failed(self, peer: PeerId, now: float, why: str) -> None:
        """A call failed or was late. The peer is put off at once, for longer with every failure in a row."""
        known = self._met(peer)
        if known is not None:
            known.failing = known.failing or _Ban()
            known.failing.strike(now, FAILED_FIRST_S, FAILED_MOST_S, FAILED_HALF_LIFE_S)
            known.why = why

    def offended(self, peer: PeerId, now: float, why: str) -> None:
        """The peer broke the agreement (`PeerFault`): put off for much longer, and no success makes it forgotten."""
        known = self._met(peer)
        if known is not None:
            known.offending = known.offending or _Ban()
            known.offending.strike(now, OFFENDED_FIRST_S, OFFENDED_MOST_S, OFFENDED_HALF_LIFE_S)
            known.why = why
            known.friend = False
            self._shelve(peer, known)

    # -- views out

    def avoided(self, peer: PeerId, now: float) -> float:
        """Seconds for which a peer should be left alone; 0: usable."""
        known = self._peers.get(peer)
        return known.avoided_s(now) if known else 0.0

    def offence_s(self, peer: PeerId, now: float) -> float:
        """Seconds for which a peer is banned for breaking the agreement; failed calls do not count here."""
        known = self._peers.get(peer)
        return max(0.0, known.offending.until - now) if known and known.offending else 0.0

    def tokens_per_s(self, block: int, peer: PeerId) -> float:
        """What a holder of a block says of its speed; 0 where it is not known."""
        self._look(block)
        known = self._peers.get(peer)
        return known.seen.announcement.tokens_per_s if known and known.seen else 0.0

    def why(self, peer: PeerId) -> str:
        """The last thing that went wrong with a peer, or ""."""
        known = self._peers.get(peer)
        return known.why if known else ""

    def holders(self, block: int, now: float, *, trained_only: bool = False) -> list[Member]:
        """The living holders of a block, in no meaningful order. `trained_only`: whose published state is worth taking."""
        found = (self._view(seen, peer, now) for peer in self._living(block, now) if (seen := peer.seen) is not None)
        return [member for member in found if member.trained or not trained_only]

    def partners(self, block: int, now: float) -> list[PeerId]:
        """The living holders of a block that train it and need not be left alone: whom to offer an exchange. In the order of `holders`."""
        return [
            seen.peer
            for peer in self._living(block, now)
            if (seen := peer.seen) is not None
            and seen.announcement.phase == "training"
            and ((peer.failing is None and peer.offending is None) or peer.avoided_s(now) <= 0)
        ]

    def everybody(self, now: float) -> list[Member]:
        """The living holders of all blocks, block by block."""
        return [member for block in range(self.blocks) for member in self.holders(block, now)]

    def coverage(self, now: float, own_block: int | None) -> tuple[int, ...]:
        """Replicas of each block, ours included."""
        counts = [len(self._living(block, now)) for block in range(self.blocks)]
        if own_block is not None:
            counts[own_block] += 1
        return tuple(counts)

    def missing(self, now: float, own_block: int | None) -> tuple[int, ...]:
        """The blocks that nobody holds."""
        return tuple(block for block, count in enumerate(self.coverage(now, own_block)) if not count)

    def last_seen(self, block: int) -> tuple[PeerId, float] | None:
        """Who was last known to hold a block, and when that was; kept after its record ended."""
        self._look(block)
        return self._last.get(block)

    def hearsay(self, block: int, peer: PeerId, at: float) -> None:
        """Somebody says who held a block, and when. It is only ever told on: nobody is called because of it."""
        known = self.last_seen(block)
        if 0 <= block < self.blocks and (known is None or known[1] < at):
            self._last[block] = (peer, at)

    def choosers(self, now: float) -> list[tuple[PeerId, int]]:
        """Who says that it would hold which block, unless others are better placed (placement.py). They count for nothing else."""
        self._look_everywhere()
        faded = ((peer.seen, name) for name, peer in self._faded.items())
        return [
            (name, seen.announcement.block)
            for seen, name in faded
            if seen is not None and seen.announcement.phase == "choosing" and seen.expires_at > now
        ]

    def newest(self, block: int, now: float, reach: int = FAR_BEHIND_ROUNDS) -> tuple[int, list[PeerId]]:
        """The newest published round of a block and the peers who agree on its digest: donors for catching up; (0, []) if none.

        Untrained and joining peers are no donors. Among three or more, a round more than `reach`
        above the median is a tall tale and not followed.
        """
        donors = [member for member in self.holders(block, now, trained_only=True) if not member.offender]
        donors = [member for member in donors if not member.avoided_s] or donors
        ceiling = believable_round([member.round for member in donors], reach)
        groups: dict[tuple[int, bytes], list[PeerId]] = {}
        for member in donors:
            if member.round <= ceiling:
                groups.setdefault((member.round, member.digest), []).append(member.peer)
        if not groups:
            return 0, []
        best = max(groups, key=lambda key: (key[0], len(groups[key]), key[1]))
        return best[0], sorted(groups[best])

    # -- buckets

    def buckets(self, block: int, now: float) -> int:
        """Over how many DHT keys a block's holders are spread now: the level of buckets.py, a power of two.

        Counted again while it moves, when our knowledge of the block has changed by an eighth, and after a while. As long as nobody looks
        at what was read, knowledge is judged by the size of the last read.
        """
        level, then, at, moving = self._levels.get(block, (1, 0, -math.inf, True))
        unread = self._unread.get(block)
        known = len(unread[-1][0]) if unread else len(self._friends[block]) + len(self._strangers[block])
        if unread:  # of one or two of the level's keys, each of which holds a bucketful or two
            changed = 8 * (known - then) > then or (level > 1 and 8 * known < PER_BUCKET)
        else:
            changed = 8 * abs(known - then) > then
        if moving or changed or not 0 <= now - at < (RECOUNT_S if unread else RECOUNT_OWN_S):
            others = [place_of(peer.seen.peer) for peer in self._living(block, now) if peer.seen is not None]
            new = next_level(level, place_of(self.me), others)
            self._levels[block] = new, len(self._friends[block]) + len(self._strangers[block]), now, new != level
            return new
        return level

    def to_announce(self, block: int, now: float) -> list[int]:
        """The numbers of the DHT buckets in which we announce ourselves: about three; in a small swarm just [0]."""
        return announced(place_of(self.me), self.buckets(block, now))

    def to_read(self, block: int, now: float, me: PeerId, rng: Rng) -> list[int]:
        """The numbers of the DHT buckets to read for a block: those that `me` shares, and a random one; in a small swarm just [0]."""
        level = self.buckets(block, now)
        return list(dict.fromkeys((*read(place_of(me), level), level - 1 + rng.randrange(level))))

    def to_reread(self, block: int, now: float, rng: Rng, turn: int, *, own: bool) -> list[int]:
        """The same in instalments, for who reads at every refresh: what was read before lives long enough to take turns.

        A small swarm has one key. In a crowded block our own buckets take turns, with a random one beside them at every turn if the block
        is `own`: we need partners there. Of others we need a few holders: one bucket at every second refresh, the other blocks at the
        refreshes between. So each of our own is read every second refresh, well within a record's life, and so is somebody of each other
        block; look-ups per refresh do not grow with the swarm.
        """
        level = self.buckets(block, now)
        if level == 1:
            return [0]
        near = read(place_of(self.me), level)
        if own:
            return list(dict.fromkeys((near[turn % len(near)], level - 1 + rng.randrange(level))))
        if (turn + block) % 2:
            return []
        return [near[-1] if turn // 2 % 2 else level - 1 + rng.randrange(level)]

    # -- shelves

    def _living(self, block: int, now: float) -> list[_Peer]:
        """Who stands on a block's shelves with a record that has not ended; each has one."""
        self._look(block)
        return [peer for shelf in (self._friends[block], self._strangers[block]) for peer in shelf.values() if peer.expires_at > now]

    def _view(self, seen: Seen, peer: _Peer, now: float) -> Member:
        word = seen.announcement
        return Member(
            peer=seen.peer,
            block=word.block,
            phase=word.phase,
            round=word.round,
            digest=word.digest,
            tokens_per_s=word.tokens_per_s,
            load=word.load,
            addresses=word.addresses,
            expires_at=seen.expires_at,
            rtt_s=peer.rtt_s,
            avoided_s=peer.avoided_s(now),
            doubt_s=peer.failing.faded_s(now, FAILED_HALF_LIFE_S) if peer.failing else 0.0,
            offender=peer.offending is not None and peer.offending.until > now,
        )

    def _met(self, peer: PeerId) -> _Peer | None:
        """The entry of a peer that we called or that called us; None for ourselves and where there is no room."""
        if peer == self.me:
            return None
        return self._peers.get(peer) or self._admit(peer, None)

    def _admit(self, peer: PeerId, block: int | None) -> _Peer | None:
        """A new entry, at the end of the faded until it is shelved. None if only living friends could make room for it."""
        if len(self._peers) >= limits.MAX_MEMBERS and not self._evict():
            return None
        known = _Peer(self._faded, None, 0.0)
        self._peers[peer] = self._faded[peer] = known
        return known

    def _evict(self) -> bool:
        shelf = self._faded or max(self._strangers, key=len)
        if not shelf:
            return False
        oldest = next(iter(shelf))
        del shelf[oldest], self._peers[oldest]
        return True

    def _shelve(self, name: PeerId, peer: _Peer) -> None:
        """Put an entry where it now belongs, as the most recently heard of its shelf."""
        del peer.shelf[name]
        word = peer.seen.announcement if peer.seen else None
        if word is None or word.phase in _NO_HOLDER:
            peer.shelf = self._faded
        else:
            peer.shelf = (self._friends if peer.friend else self._strangers)[word.block]
        peer.shelf[name] = peer

    def _sweep(self, now: float) -> None:
        """Now and then, move what expired to the faded and forget what is past remembering."""
        full = len(self._peers) >= limits.MAX_MEMBERS
        if 0 <= now - self._swept_at < (1.0 if full else limits.TTL_S):
            return
        self._swept_at = now
        for shelf in (*self._friends, *self._strangers):
            for name in _expired(shelf, now):
                peer = shelf.pop(name)
                if peer.stranger:
                    del self._peers[name]
                else:
                    self._faded[name] = peer
                    peer.shelf = self._faded
        for name in [name for name, peer in self._faded.items() if peer.kept_until() <= now]:
            del self._faded[name], self._peers[name]


def _expired(shelf: dict[PeerId, _Peer], now: float) -> list[PeerId]:
    """Whose records ended. They stand first, among few others, since a shelf is in the order in which its peers were last heard."""
    found: list[PeerId] = []
    living = 0
    for name, peer in shelf.items():
        if peer.expires_at <= now:
            found.append(name)
        else:
            living += 1
            if living > SWEEP_PAST:
                break
    return found


def believable_round(rounds: list[int], reach: int = FAR_BEHIND_ROUNDS) -> int:
    """The highest round that is followed: the highest within reach of the median where three or more can be compared."""
    if len(rounds) < 3:
        return max(rounds, default=0)
    ceiling = int(statistics.median_low(rounds)) + reach
    return max(number for number in rounds if number <= ceiling)
