"""One node's decisions: facts in, decisions out. The same code in a real node and in a simulated one.

The core knows the membership of its run, at most one exchange at a time, and why it is waiting. It decides when to read and write the
DHT, whom to offer an exchange, whether to take one, when a round ends without a merge, and when to download state instead of training.
It never decides about the network or about tensors: node/ (or a simulator) carries a decision out and comes back with a fact.

    joining --first reads--> fetching --state--> training <--> (exchange) --> stopping
                  |________________________________^      nobody has a newer state: start from our own
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from blocktrain.protocol import facts as f
from blocktrain.protocol import limits, pairing
from blocktrain.protocol.acceptance import FAR_BEHIND_ROUNDS
from blocktrain.protocol.chance import Rng
from blocktrain.protocol.exchange import Pace, offer_stands
from blocktrain.protocol.ids import Digest, PeerId, short
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.membership import Member, Members
from blocktrain.protocol.patience import MOMENT_S, Patience
from blocktrain.protocol.records import MAX_ROUND
from blocktrain.protocol.standing import Standing

FETCH_WHEN_BEHIND: Final = 10  # rounds: a node that starts (or was away) further behind than this takes state instead of averaging
FETCH_RETRY_S: Final = 3.0
FETCH_TRIES: Final = 6  # then a fresh node starts from its own state, if it may
FETCH_AGAIN_S: Final = 30.0  # before downloading is thought of again after that: training goes on, whatever somebody announces
FETCH_SELDOM_S: Final = 600.0  # where one download follows the other and nobody averages with us, twice as long each time, up to this
LEAP_S: Final = 1.0  # at least between two announcements that a quick succession of rounds causes
SOON_S: Final = 0.5  # to a read that something waits for
FIRST_READS: Final = 2  # reads of our own block before "nobody has a newer state" is believed
MAX_OTHER_BLOCKS_READ: Final = 8  # per refresh; larger runs take turns
ISOLATED_AFTER_S: Final = 15.0


@dataclass(frozen=True)
class Settings:
    """The local choices that decisions depend on."""

    ttl_s: float = limits.TTL_S
    refresh_s: float = limits.REFRESH_S
    tau_s: float = limits.TAU_S
    topology: str = "pairs"
    train: bool = True  # False: hold and serve the block without training it
    expects_peers: bool = False  # initial peers were given: being alone is worth a word
    hosts: bool = False  # the run begins here: being alone in it is how it begins


@dataclass
class Counters:
    """Ends of exchanges since the process began. Each exchange is counted once, by both sides."""

    accepted: int = 0
    one_sided: int = 0
    refused: int = 0
    late: int = 0
    lost: int = 0
    declined: int = 0
    own_rounds: int = 0
    fetched: int = 0


@dataclass
class Current:
    """The exchange in hand."""

    id: bytes
    peer: PeerId
    ours: bool
    deadline: float
    running: bool  # the transfer began


class Core:
    """One node. Call `handle` with every fact, in order; carry out what it returns, in order."""

    # A simulated world holds thousands; beyond thirty attributes Python keeps them in a dictionary for each. `__dict__`: who watches a
    # node may still wrap a method of it; empty, it costs nothing.
    __slots__ = (
        "__dict__",
        "_announce_at", "_announced_at", "_announced_round", "_asked", "_began_at", "_due", "_fetch_at", "_fetch_pause_s", "_fetch_tries",
        "_fetch_why", "_fetching", "_fresh", "_own_reads", "_patience", "_phase_since", "_queue", "_read_at", "_reading", "_reads_done",
        "_rng", "_standing", "_told_ahead", "_turn", "block", "counters", "current", "digest", "last_refusal", "manifest", "me", "members",
        "pace", "phase", "round", "settings",
    )  # fmt: skip

    def __init__(self, me: PeerId, manifest: Manifest, block: int, settings: Settings, rng: Rng) -> None:
        self.me = me
        self.manifest = manifest
        self.block = block
        self.settings = settings
        self.members = Members(manifest.run, manifest.blocks, me)
        self.counters = Counters()
        self.round = 0
        self.digest = Digest(bytes(32))
        self.phase = "starting"
        self.current: Current | None = None
        self.pace = Pace(settings.tau_s)
        self._standing = Standing(self.members, manifest, block)
        self.last_refusal = ""
        self._rng = rng
        self._phase_since = 0.0
        self._began_at = 0.0
        self._fresh = True
        self._fetching = False
        self._fetch_tries = 0
        self._fetch_at = 0.0
        self._fetch_why = ""
        self._fetch_pause_s = FETCH_AGAIN_S
        self._own_reads = 0
        self._read_at = 0.0
        self._announce_at = 0.0
        self._announced_at = 0.0
        self._announced_round = 0
        self._reading: set[int] = set()
        self._turn = 0
        self._reads_done = 0  # rounds of reading
        self._queue: list[PeerId] = []  # candidates still to be asked in this round
        self._due = False  # H steps have passed without a merge
        self._told_ahead = False  # somebody is too far behind our round: it declined our offer, or we declined its
        self._asked: dict[PeerId, str] = {}  # who was asked in this round and what came of it
        self._patience = Patience()

    # ---- facts ------------------------------------------------------------------------------------------------------------------

    def handle(self, fact: f.Fact, now: float) -> list[f.Decision]:
        """What to do about a fact. `now` is Unix seconds by the node's (corrected) clock and never goes back."""
        match fact:
            case f.Began():
                return self._began(fact, now)
            case f.Saw():
                return self._saw(fact, now)
            case f.Trained():
                self._standing.tempo.trained(now)
                self._due = True
                return self._next_offer(now, fresh=True)
            case f.Offered():
                return self._offered(fact, now)
            case f.Answered():
                if self.current and self.current.id == fact.exchange:
                    self.current.running = True
                return []
            case f.Ended():
                return self._ended(fact, now)
            case f.Published():
                self.round, self.digest = fact.round, fact.digest
                return self._announce_leap(now)
            case f.FetchEnded():
                return self._fetch_ended(fact, now)
            case f.Blamed():
                self._blame(fact.peer, fact.why, fact.offence, now)
                return []
            case f.Stopping():
                self._enter("stopping", now)
                self._queue.clear()
                return [f.Announce("left")]
            case f.Tick():
                return self._tick(now)

    def wake_at(self) -> float:
        """When the next tick is due."""
        fetching_next = self.phase == "joining" and not self._fetching and self._own_reads >= FIRST_READS
        soonest = self._read_at if self._read_at < self._announce_at else self._announce_at
        return min(soonest, self._fetch_at) if fetching_next else soonest

    # ---- joining ----------------------------------------------------------------------------------------------------------------

    def _began(self, fact: f.Began, now: float) -> list[f.Decision]:
        self.round, self.digest, self._fresh = fact.round, fact.digest, fact.fresh
        self._began_at = now
        self._enter("joining", now)
        if not self.settings.expects_peers:
            return [*self._start_training(now), *self._reads(now)]
        self._announce_at = now + self.settings.refresh_s
        return [f.Announce("joining"), *self._reads(now)]

    def _saw(self, fact: f.Saw, now: float) -> list[f.Decision]:
        self._reading.discard(fact.block)
        self.members.hear(fact.block, fact.records, now)
        if fact.block != self.block:
            return []
        self._own_reads += 1
        if self.phase == "joining":
            if self._own_reads < FIRST_READS:
                self._read_at = min(self._read_at, now + SOON_S)
            return self._catch_up(now)
        if self._told_ahead and self.phase == "training" and self.current is None:
            believed = self._standing.believed(self.round, now)
            if self.round > believed:
                return self._own_round(believed)
            self._told_ahead = False
        # A replica that never got any state from the swarm is not one of the swarm yet, however far it came alone.
        enough = FETCH_WHEN_BEHIND + 1 if self._fresh else FAR_BEHIND_ROUNDS
        if self.phase != "training" or self.current is not None or now < self._fetch_at:
            return []
        claimed = max([seen.announcement.round for seen in fact.records], default=0)  # most reads end here, without a look at everybody
        standing = self._standing
        if claimed - self.round >= enough and standing.behind(self.round, now) >= (enough if self._fresh else standing.swarms_reach(now)):
            self._fetch_tries = FETCH_TRIES - 1  # one: we have a state of our own to go on with
            return self._catch_up(now)
        return []

    def _catch_up(self, now: float) -> list[f.Decision]:
        """Download state where somebody has a newer one worth having; else train from what we have."""
        if self._fetching or now < self._fetch_at:
            return []
        behind = self._standing.behind(self.round, now)
        wanted = behind > 0 if self._fresh else behind > FETCH_WHEN_BEHIND
        if wanted and self._fetch_tries < FETCH_TRIES:
            round, donors = self._standing.newest(self.round, now)
            others = [m.peer for m in self.members.holders(self.block, now, trained_only=True) if m.avoided_s <= 0]
            self._fetching = True
            self._enter("fetching", now)
            most = round + self._standing.swarms_reach(now)
            if self._fetch_tries:  # who announced that round does not give it: what others have is better than nothing
                round = self.round + 1
            return [f.Fetch(round, tuple(dict.fromkeys([*donors, *others])), most)]
        if self._own_reads < FIRST_READS:
            return []
        return self._start_training(now)

    def _fetch_ended(self, fact: f.FetchEnded, now: float) -> list[f.Decision]:
        self._fetching = False
        if not fact.why:
            self.counters.fetched += 1
            self._fresh = False
            self._fetch_tries = 0
            self._fetch_at = now + self._fetch_pause_s
            self._fetch_pause_s = min(FETCH_SELDOM_S, 2 * self._fetch_pause_s)
            return self._start_training(now)
        self._fetch_tries += 1
        self._fetch_why = fact.why
        if self._fetch_tries >= FETCH_TRIES:
            self._fetch_at = now + FETCH_AGAIN_S
            return self._start_training(now)
        self._fetch_at = now + FETCH_RETRY_S * self._rng.uniform(0.5, 1.5)
        self._own_reads = min(self._own_reads, FIRST_READS - 1)  # look again before the next try
        self._read_at = now
        self._enter("joining", now)
        return []

    def _start_training(self, now: float) -> list[f.Decision]:
        self._enter("training" if self.settings.train else "serving", now)
        self._announce_at = now + self.settings.refresh_s
        out: list[f.Decision] = [self._announce(self.phase, now)]
        if self.settings.train:
            out.append(f.Train())
        return out

    # ---- exchanges --------------------------------------------------------------------------------------------------------------

    def _next_offer(self, now: float, *, fresh: bool) -> list[f.Decision]:
        """Ask the next candidate of this round; when all were asked in vain, the round is our own."""
        if not self._due or self.current is not None or self.phase != "training":
            return []
        if fresh:
            self._turn += 1
            self._asked = {}
            free = self.members.partners(self.block, now)
            self._queue = pairing.candidates(self.settings.topology, self.me, free, self._turn, self._rng)
        while self._queue:
            peer = self._queue.pop(0)
            if self.members.avoided(peer, now) > 0 or not self._patience.may_ask(peer, now):
                continue
            self.current = Current(self._rng.randbytes(16), peer, True, now + self.pace.tau_s(peer), False)
            self._asked[peer] = "asked"
            apart, most = self._standing.reach(peer), self._standing.counted(peer, self.round, now, self.settings.refresh_s)
            return [f.SendOffer(self.current.id, peer, self.current.deadline, apart, most)]
        return self._own_round()

    def _own_round(self, number: int | None = None) -> list[f.Decision]:
        """What we have becomes the published state as it is."""
        self._due = False
        self._queue.clear()
        self.counters.own_rounds += 1
        return [f.PublishOwn(number)]

    def _offered(self, fact: f.Offered, now: float) -> list[f.Decision]:
        offer, peer = fact.offer, fact.peer
        out: list[f.Decision] = []
        why, retry_s = self._objection(fact, now)
        current = self.current
        if not why and current is not None:
            crossed = current.ours and not current.running and current.peer == peer
            if crossed and offer_stands(peer, self.me):
                out.append(f.Withdraw(current.id))
            else:
                why, retry_s = ("crossed" if crossed else "busy"), MOMENT_S
        if why:
            self._told_ahead |= why == "behind"
            return [f.Refuse(offer.exchange, peer, why, retry_s)]
        self._patience.came(peer)
        self.current = Current(offer.exchange, peer, False, now + self.pace.tau_s(peer), True)
        most = MAX_ROUND
        if offer.round > self.round:
            most = self._standing.counted(peer, self.round, now, self.settings.refresh_s)
        return [*out, f.Take(offer.exchange, peer, self.current.deadline, most)]

    def _objection(self, fact: f.Offered, now: float) -> tuple[str, float]:
        """Why an offer can't be taken whatever else we do, and when to ask again."""
        if self.phase == "stopping":
            return "stopping", 3600.0
        if self.phase in ("starting", "joining", "fetching"):
            return "joining", 5.0
        if self.phase == "serving":
            return "not-training", 3600.0
        if fact.offer.block != self.block:
            return "block", 3600.0
        put_off_s = self.members.offence_s(fact.peer, now)
        if self._patience.stalls(fact.peer):
            put_off_s = max(put_off_s, self.members.avoided(fact.peer, now))
        if put_off_s > 0:
            return "put-off", put_off_s
        apart = fact.offer.round - self.round
        most = self._standing.reach(fact.peer) if abs(apart) >= FAR_BEHIND_ROUNDS else FAR_BEHIND_ROUNDS
        if -apart >= most:
            return "behind", 10.0
        if apart >= (FETCH_WHEN_BEHIND + 1 if self._fresh else most):
            self._read_at = min(self._read_at, now + SOON_S)  # who has that round is worth knowing soon, and not at every such offer
            return "ahead", 10.0
        return "", 0.0

    def _ended(self, fact: f.Ended, now: float) -> list[f.Decision]:
        result = fact.result
        ours = self.current is not None and self.current.id == fact.exchange
        if ours and self.current is not None:
            self._patience.ended(self.current.peer, result, ours=self.current.ours)
            self.current = None
        self.pace.ended(fact.peer, result.kind, fact.took_s)
        self._count(fact, now)
        if result.kind in ("merged", "one_sided"):
            self._due = self._fresh = False
            self._fetch_pause_s = FETCH_AGAIN_S
            self._queue.clear()
            return []
        if not ours or (result.kind, result.why) == ("declined", "crossed"):
            return []  # crossed: their offer stands, and its exchange ends this round
        if result.kind in ("late", "lost"):
            self._queue = self._queue[:1]  # the round has waited enough: one more try, then it is our own
        return self._next_offer(now, fresh=False)

    def _count(self, fact: f.Ended, now: float) -> None:
        result, peer, counters = fact.result, fact.peer, self.counters
        name = short(peer)
        self._asked[peer] = f"{result.kind}: {result.why}" if result.why else result.kind
        match result.kind:
            case "merged":
                counters.accepted += 1
                self.members.succeeded(peer, now, None)
            case "one_sided":
                counters.accepted += 1
                counters.one_sided += 1
            case "refused":
                counters.refused += 1
                self.last_refusal = f"{name}: {result.why}"
            case "late":
                counters.late += 1
            case "lost":
                counters.lost += 1
            case "declined":
                counters.declined += 1
                self._patience.declined(peer, result, now)
                self._told_ahead |= result.why == "ahead"
                if result.why == "behind":  # then there is a state worth taking
                    self._read_at = min(self._read_at, now + SOON_S)
                return
        if result.kind != "merged" and (result.kind != "one_sided" or result.offence):
            self._blame(peer, result.why, result.offence, now)

    def _blame(self, peer: PeerId, why: str, offence: bool, now: float) -> None:
        if offence:
            self.members.offended(peer, now, why)
        else:
            self.members.failed(peer, now, why)

    # ---- time -------------------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> list[f.Decision]:
        out: list[f.Decision] = []
        if self.phase in ("starting", "stopping"):
            self._read_at = self._announce_at = now + self.settings.refresh_s
            return out
        if now >= min(self._read_at, self._announce_at):  # before our record is renewed: one that somebody else wrote in our name is seen
            out += self._reads(now)
        if now >= self._announce_at:
            self._announce_at = now + self.settings.refresh_s
            out.append(self._announce("joining" if self.phase == "fetching" else self.phase, now))
        if self.phase == "joining" and not self._fetching and now >= self._fetch_at and self._own_reads >= FIRST_READS:
            out += self._catch_up(now)
        return out

    def _announce_leap(self, now: float) -> list[f.Decision]:
        """A fast replica is soon further than it said: who believes its record must not take the truth for a tall tale."""
        leap = abs(self.round - self._announced_round) >= FAR_BEHIND_ROUNDS // 2
        if not leap or self.phase not in ("training", "serving") or now < self._announced_at + LEAP_S:
            return []
        self._announce_at = now + self.settings.refresh_s
        return [self._announce(self.phase, now)]

    def _announce(self, phase: str, now: float) -> f.Announce:
        self._announced_round, self._announced_at = self.round, now
        return f.Announce(phase)

    def _reads(self, now: float) -> list[f.Decision]:
        """Our own block at every refresh, other blocks too (in turns where there are many)."""
        early = self.phase == "joining" and self._own_reads < FIRST_READS
        self._read_at = now + (SOON_S if early else self.settings.refresh_s)
        others = [block for block in range(self.manifest.blocks) if block != self.block]
        if len(others) > MAX_OTHER_BLOCKS_READ:
            others = self._rng.sample(others, MAX_OTHER_BLOCKS_READ)
        out: list[f.Decision] = []
        for block in [self.block] if early and self._own_reads else [self.block, *others]:
            buckets = () if block in self._reading else self._buckets_to_read(block, now)
            if buckets:
                self._reading.add(block)
                out.append(f.Read(block, buckets))
        self._reads_done += 1
        return out

    def _buckets_to_read(self, block: int, now: float) -> tuple[int, ...]:
        """All that concern us while we are finding our way in; in turns once we are in."""
        if self.phase in ("training", "serving"):
            return tuple(self.members.to_reread(block, now, self._rng, self._reads_done, own=block == self.block))
        return tuple(self.members.to_read(block, now, self.me, self._rng))

    def _enter(self, phase: str, now: float) -> None:
        if phase != self.phase:
            self.phase = phase
            self._phase_since = now

    def everybody(self, now: float) -> list[Member]:
        """All living holders of all blocks that we know."""
        return [member for block in range(self.manifest.blocks) for member in self.members.holders(block, now)]

    # ---- what it would say ------------------------------------------------------------------------------------------------------

    def isolated(self, now: float) -> bool:
        """Initial peers were given, and yet nobody else is to be seen."""
        waited = self.phase not in ("starting", "stopping") and now - self._began_at >= ISOLATED_AFTER_S
        return self.settings.expects_peers and not self.settings.hosts and waited and not sum(self.members.coverage(now, None))

    def waiting(self, now: float) -> tuple[str, str, float, str]:
        """(phase, what it waits for, seconds in the phase, what comes next), in plain words; never an empty wait."""
        seconds = now - self._phase_since if self._phase_since else 0.0
        if self.isolated(now):
            return "isolated", "no other node of this run is to be seen", seconds, "looking again at every refresh; training goes on alone"
        if self.phase == "joining":
            if self._fetch_why:
                return self.phase, f"state could not be had yet: {self._fetch_why}", seconds, "another try in a moment"
            return self.phase, f"the DHT's word on who holds block {self.block}", seconds, "download state, or start training"
        if self.phase == "fetching":
            return self.phase, f"the state of block {self.block} from a replica", seconds, "training starts at the swarm's round"
        if self.phase == "training":
            return self.phase, self._training_waits(now), seconds, f"an exchange every {self.manifest.schedule.steps_per_round} steps"
        if self.phase == "starting":
            return self.phase, "the network and the block", seconds, "look who holds what"
        return self.phase, "nothing", seconds, {"stopping": "save and leave", "serving": "answer sweeps"}[self.phase]

    def _training_waits(self, now: float) -> str:
        if self.current is not None:
            what = "the exchange with" if self.current.running else "an answer from"
            return f"{what} {short(self.current.peer)}, at most {max(0.0, self.current.deadline - now):.0f} s more"
        if not self.members.holders(self.block, now):
            return f"nothing; no other replica of block {self.block} is known, so rounds are our own"
        said = "; ".join(f"{short(peer)} {what}" for peer, what in list(self._asked.items())[-3:])
        return f"nothing; next exchange is due in less than a round{f' (last: {said})' if said else ''}"
