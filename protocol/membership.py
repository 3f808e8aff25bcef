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
from typing import Final, NamedTuple, Protocol, TypeAlias

from blocktrain.protocol import limits
from blocktrain.protocol.acceptance import FAR_BEHIND_ROUNDS
from blocktrain.protocol.buckets import PER_BUCKET, announced, next_level, place_of, read
from blocktrain.protocol.encounters import Met
from blocktrain.protocol.ids import NO_DIGEST, PeerId, RunId
from blocktrain.protocol.records import PHASES, Announcement, Seen

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


Shelf: TypeAlias = dict[PeerId, Seen]  # by peer, the longest silent first: whose latest record that is
_SILENT: Final = Announcement(RunId(NO_DIGEST), 0, "left", 0, NO_DIGEST, 0.0, 0.0, 1, 1)  # stands for the record of one we only met


class Members:
    """One node's view of the others. `now` is the network's clock in Unix seconds, as in records' expiry."""

    def __init__(self, run: RunId, blocks: int, me: PeerId) -> None:
        self.run = run
        self.blocks = blocks
        self.me = me
        self._shelf: dict[PeerId, Shelf] = {}  # where each peer that we remember stands: on exactly one shelf
        self._faded: Shelf = {}  # no living record of a holder: expired, left, choosing, or only met in a call
        self._friends: tuple[Shelf, ...] = tuple({} for _ in range(blocks))  # by block; whom we talked with
        self._strangers: tuple[Shelf, ...] = tuple({} for _ in range(blocks))
        self._met: dict[PeerId, Met] = {}  # of those who stand on a shelf
        self._last: dict[int, tuple[PeerId, float]] = {}
        self._levels: dict[int, tuple[int, int, float, bool]] = {}  # block → its level; how many were known, when, whether it moved
        self._unread: dict[int, list[tuple[Sequence[Seen], float]]] = {}  # block → reads nobody has looked at, and when they were heard
        self._swept_at = 0.0

    def __len__(self) -> int:
        self._look_everywhere()
        return len(self._shelf)

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
        name, shelf = seen.peer, self._shelf.get(seen.peer)
        old = shelf[name] if shelf is not None else None
        left = word.phase == "left"
        if old is not None and old.expires_at > now:
            moved = old.announcement.block != word.block
            if moved and left:
                return False
            gone_elsewhere = moved and old.announcement.phase == "left"
            if not gone_elsewhere and seen.expires_at <= old.expires_at:
                return False
        if shelf is None and not self._has_room():
            return False
        self._shelve(seen)
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

        They are: a holder that stands where it stood, with the same record or a later one; and a stranger for whom there is room.
        """
        for records, now in self._unread.pop(block, ()):
            self._sweep(now)
            shelves, run, most = self._shelf, self.run, now + limits.MAX_RECORD_LIFE_S
            friends, strangers = self._friends[block], self._strangers[block]
            last = None
            for seen in records:
                name, expires_at = seen.peer, seen.expires_at
                shelf, old = strangers, strangers.get(name)
                if old is None and (old := friends.get(name)) is not None:
                    shelf = friends
                if old is not None and expires_at <= old.expires_at:
                    continue
                word = seen.announcement
                usual = word.block == block and word.phase in _HOLDER and word.run == run and now < expires_at <= most
                if usual and old is not None:
                    del shelf[name]  # the most recently heard stands last
                elif usual and name not in shelves and name != self.me and len(shelves) < limits.MAX_MEMBERS:
                    shelves[name] = shelf
                else:
                    self.observe(seen, now)
                    continue
                shelf[name] = seen
                last = name
            if last is not None:
                self._last[block] = (last, now)

    def clash(self, seen: Seen, own_last_expiry: float) -> bool:
        """Whether a record of our own peer id is one that we did not write: two processes share one identity."""
        return seen.peer == self.me and seen.expires_at > own_last_expiry

    def succeeded(self, peer: PeerId, now: float, rtt_s: float | None = None) -> None:
        """A call worked: back-off is over. `rtt_s`, where the call measured one, joins the moving average."""
        met = self._meet(peer)
        if met is None:
            return
        was = met.friend
        met.succeeded(now, rtt_s)
        seen = self._shelf[peer][peer]
        if met.friend and not was:
            self._shelve(seen)
        if seen.announcement.phase not in _NO_HOLDER:
            self._last[seen.announcement.block] = (peer, now)

    def failed(self, peer: PeerId, now: float, why: str) -> None:
        """A call failed or was late. The peer is put off at once, for longer with every failure in a row."""
        met = self._meet(peer)
        if met is not None:
            met.failed(now, why)

    def offended(self, peer: PeerId, now: float, why: str) -> None:
        """The peer broke the agreement (`PeerFault`): put off for much longer, and no success makes it forgotten."""
        met = self._meet(peer)
        if met is not None:
            met.offended(now, why)
            self._shelve(self._shelf[peer][peer])

    # -- views out

    def avoided(self, peer: PeerId, now: float) -> float:
        """Seconds for which a peer should be left alone; 0: usable."""
        met = self._met.get(peer)
        return met.avoided_s(now) if met else 0.0

    def offence_s(self, peer: PeerId, now: float) -> float:
        """Seconds for which a peer is banned for breaking the agreement; failed calls do not count here."""
        met = self._met.get(peer)
        return met.offence_s(now) if met else 0.0

    def tokens_per_s(self, block: int, peer: PeerId) -> float:
        """What a holder of a block says of its speed; 0 where it is not known."""
        self._look(block)
        return self._shelf[peer][peer].announcement.tokens_per_s if peer in self._shelf else 0.0

    def why(self, peer: PeerId) -> str:
        """The last thing that went wrong with a peer, or ""."""
        met = self._met.get(peer)
        return met.why if met else ""

    def holders(self, block: int, now: float, *, trained_only: bool = False) -> list[Member]:
        """The living holders of a block, in no meaningful order. `trained_only`: whose published state is worth taking."""
        found = (self._view(seen, now) for seen in self._living(block, now))
        return [member for member in found if member.trained or not trained_only]

    def partners(self, block: int, now: float) -> list[PeerId]:
        """The living holders of a block that train it and need not be left alone: whom to offer an exchange. In the order of `holders`."""
        met = self._met
        return [
            seen.peer
            for seen in self._living(block, now)
            if seen.announcement.phase == "training" and (seen.peer not in met or met[seen.peer].avoided_s(now) <= 0)
        ]

    def highest(self, block: int, now: float, *, but: PeerId) -> tuple[int, int]:
        """The two highest rounds that living holders of a block announced, of states that are worth anything; 0 where there is none.

        Offenders and `but` have no say.
        """
        self._look(block)
        first = second = 0
        for shelf in (self._friends[block], self._strangers[block]):
            for seen in shelf.values():
                word = seen.announcement  # the cheapest question first: blocks may be crowded
                counts = word.round > second and seen.expires_at > now and word.phase != "joining" and seen.peer != but
                if counts and not self.offence_s(seen.peer, now):
                    first, second = (word.round, first) if word.round > first else (first, word.round)
        return first, second

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
        return [
            (seen.peer, seen.announcement.block)
            for seen in self._faded.values()
            if seen.announcement.phase == "choosing" and seen.expires_at > now
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
            others = [place_of(seen.peer) for seen in self._living(block, now)]
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
        if own:
            near = read(place_of(self.me), level)
            shared, other = near[turn % len(near)], level - 1 + rng.randrange(level)
            return [shared] if shared == other else [shared, other]
        if (turn + block) % 2:
            return []
        return [read(place_of(self.me), level)[-1] if turn // 2 % 2 else level - 1 + rng.randrange(level)]

    # -- shelves

    def _living(self, block: int, now: float) -> list[Seen]:
        """The records that have not ended of those on a block's shelves, friends first."""
        self._look(block)
        return [seen for shelf in (self._friends[block], self._strangers[block]) for seen in shelf.values() if seen.expires_at > now]

    def _view(self, seen: Seen, now: float) -> Member:
        word, met = seen.announcement, self._met.get(seen.peer)
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
            rtt_s=met.rtt_s if met else None,
            avoided_s=met.avoided_s(now) if met else 0.0,
            doubt_s=met.doubt_s(now) if met else 0.0,
            offender=met is not None and met.offence_s(now) > 0,
        )

    def _meet(self, peer: PeerId) -> Met | None:
        """What we know from meeting a peer that we called or that called us; None for ourselves and where there is no room."""
        if peer not in self._met:
            if peer == self.me or (peer not in self._shelf and not self._has_room()):
                return None
            if peer not in self._shelf:
                self._shelve(Seen(peer, _SILENT, 0.0))
            self._met[peer] = Met()
        return self._met[peer]

    def _has_room(self) -> bool:
        """Whether there is room for one more, at the cost of the oldest who is no living friend where it must be."""
        if len(self._shelf) < limits.MAX_MEMBERS:
            return True
        shelf = self._faded or max(self._strangers, key=len)
        if not shelf:
            return False
        self._forget(next(iter(shelf)))
        return True

    def _forget(self, peer: PeerId) -> None:
        del self._shelf.pop(peer)[peer]
        self._met.pop(peer, None)

    def _shelve(self, seen: Seen) -> None:
        """Put a peer with its latest record where it now belongs, as the most recently heard of its shelf."""
        peer, word = seen.peer, seen.announcement
        if peer in self._shelf:
            del self._shelf[peer][peer]
        if word.phase in _NO_HOLDER:
            shelf = self._faded
        elif peer in self._met and self._met[peer].friend:
            shelf = self._friends[word.block]
        else:
            shelf = self._strangers[word.block]
        self._shelf[peer] = shelf
        shelf[peer] = seen

    def _sweep(self, now: float) -> None:
        """Now and then, move what expired to the faded and forget what is past remembering."""
        full = len(self._shelf) >= limits.MAX_MEMBERS
        if 0 <= now - self._swept_at < (1.0 if full else limits.TTL_S):
            return
        self._swept_at = now
        shelves, met, faded = self._shelf, self._met, self._faded
        for shelf in (*self._friends, *self._strangers):
            for peer in _expired(shelf, now) if shelf else ():
                if peer in met:
                    faded[peer] = shelf.pop(peer)
                    shelves[peer] = faded
                else:
                    del shelf[peer], shelves[peer]
        for peer in [peer for peer, seen in faded.items() if seen.expires_at <= now and not self._worth_keeping(peer, now)]:
            self._forget(peer)

    def _worth_keeping(self, peer: PeerId, now: float) -> bool:
        return peer in self._met and self._met[peer].kept_until() > now


def _expired(shelf: Shelf, now: float) -> list[PeerId]:
    """Whose records ended. They stand first, among few others, since a shelf is in the order in which its peers were last heard."""
    found: list[PeerId] = []
    living = 0
    for peer, seen in shelf.items():
        if seen.expires_at <= now:
            found.append(peer)
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
