"""One exchange between two replicas, from the offer to its end, as each side sees it.

    offerer                                   responder
    snapshot; Offer  ------------------------->  snapshot *now*
             <------------------------- Accept (or Decline, with a reason)
    Chunk… Seal ==============================>
             <============================== Chunk… Seal      both ways at once; encoded, hashed and merged while they pass
    verify, judge                              verify, judge
    Outcome  <------------------------------->  Outcome       as soon as each has judged; the offerer hangs up

Both sides compute the merge from the two *encoded* snapshots and the two weights, so it is the same bits on both. Each side decides for
itself whether to use it: there is no second phase, hence the *one-sided* case, where we used the merge and the other side did not (or
never said). It costs nothing but a step of consensus, and it is counted. An exchange that is not decided at its deadline is *late*;
nothing of it is used. Two offers that cross: the one of the lower peer id stands, and both sides know that without a message.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from blocktrain.protocol.acceptance import FAR_BEHIND_ROUNDS
from blocktrain.protocol.ids import Digest, PeerId
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import Accept, Offer, Outcome

RESULTS: Final = ("merged", "one_sided", "refused", "late", "lost", "declined")
MAX_WEIGHT_ROUNDS: Final = 4.0  # rounds of work that one side may claim in a merge; so no side weighs more than 5 : 1
TEMPO_SHARE: Final = 0.1  # of the last round in the moving average
PACE_KEPT: Final = 16  # exchanges that τ looks back on
PACE_FIRST: Final = 4  # before so many it does not adapt
PACE_FACTOR: Final = 4.0
PACE_LATES: Final = 2  # in a row that get a peer a longer τ: one that lets everything hang shall not hold us for ever longer
PACE_PEERS: Final = 256  # whose own τ is remembered
MIN_TAU_S: Final = 5.0  # a machine that swaps or sleeps for a moment is not late
MAX_STREAMS: Final = 8  # an exchange's snapshots are striped over; 8 carry 31 MB/s at 40 ms
WINDOW_BYTES: Final = 128 * 1024  # what one libp2p stream carries per round trip at least: half of its window may wait for an update
SHORT_RTT_S: Final = 0.01  # below it one stream carries more than the daemon does
FIRST_STREAMS: Final = 4  # over a long link of unknown rate


def streams_for(rate_bytes_per_s: float | None, rtt_s: float | None) -> int:
    """Over how many streams to stripe an exchange: what the link holds at once, over what one stream holds, and one more.

    That one more lets the number grow from exchange to exchange until the link, and no longer the windows, is the limit.
    `rate_bytes_per_s`: of one direction, as measured in the last exchange with that peer.
    """
    if rtt_s is None or rtt_s < SHORT_RTT_S:
        return 1
    if rate_bytes_per_s is None:
        return FIRST_STREAMS
    return min(MAX_STREAMS, math.ceil(rate_bytes_per_s * rtt_s / WINDOW_BYTES) + 1)


def offer_stands(offerer: PeerId, responder: PeerId) -> bool:
    """Of two crossing offers, whether the one from `offerer` to `responder` stands."""
    return offerer < responder


def merged_round(ours: int, theirs: int) -> int:
    """`theirs`: as far as it counts (standing.py)."""
    return max(ours, theirs) + 1


def tokens_per_round(manifest: Manifest) -> int:
    return manifest.schedule.steps_per_round * manifest.optimizer.batch * manifest.model.context


def shares(first: float, second: float, per_round: float) -> tuple[float, float]:
    """How two snapshots weigh in their merge, by the tokens trained since each side's last merge.

    One round's tokens are added to both: a replica that merged a moment ago holds the work of others, which counts too. A claim above
    `MAX_WEIGHT_ROUNDS` rounds counts as that much, so that a liar gains little. The pair is ordered (lower peer id first), and the
    arithmetic is plain double precision, so both sides get the same two numbers. They sum to 1.
    """
    most = MAX_WEIGHT_ROUNDS * per_round
    a = per_round + min(max(first, 0.0), most)
    b = per_round + min(max(second, 0.0), most)
    return a / (a + b), b / (a + b)


class Tempo:
    """How many rounds we make in a second, by the last few of them."""

    def __init__(self) -> None:
        self._round_s = 0.0
        self._at: float | None = None

    def trained(self, now: float) -> None:
        """Another H steps are done."""
        if self._at is not None:
            took_s = max(1e-6, now - self._at)
            self._round_s = self._round_s + TEMPO_SHARE * (took_s - self._round_s) if self._round_s else took_s
        self._at = now

    @property
    def rounds_per_s(self) -> float:
        return 1.0 / self._round_s if self._round_s else 0.0


class Pace:
    """τ, from what exchanges of our block really take: four times the longest of the last sixteen that were used, within bounds.

    Until four were used, and whatever they took, τ is at most what the node's settings say. A late one doubles it until the next that is
    used, so that a link that became slow is not cut off for ever by what it was. And each peer gets four times what the last used one with
    it took, or twice the τ that it missed: else quick exchanges with others would have us forget what a slow link needs, and a slow replica
    would average only with the one whose τ happens to be long. Who is late too often in a row gets what all get. Both sides keep their own:
    the shorter τ decides.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._took: deque[float] = deque(maxlen=PACE_KEPT)
        self._patience = 1.0
        self._granted: dict[PeerId, tuple[float, int]] = {}  # peer → seconds that it gets at least; how often in a row it was late

    def ended(self, peer: PeerId, kind: str, took_s: float) -> None:
        """An exchange of ours or theirs is over."""
        if kind in ("merged", "one_sided"):
            self._took.append(took_s)
            self._patience = 1.0
            self._granted.pop(peer, None)
            self._grant(peer, PACE_FACTOR * took_s, 0)
        elif kind == "late":
            missed_s = self.tau_s(peer)
            _, lates = self._granted.pop(peer, (0.0, 0))
            if lates < PACE_LATES:
                self._grant(peer, 2 * missed_s, lates + 1)
            self._patience *= 2

    def tau_s(self, peer: PeerId) -> float:
        """For an exchange with `peer` that begins now."""
        if len(self._took) < PACE_FIRST:
            return self._most_s
        everybodys_s = max(MIN_TAU_S, PACE_FACTOR * max(self._took)) * self._patience
        return min(self._most_s, max(everybodys_s, self._granted.get(peer, (0.0, 0))[0]))

    def _grant(self, peer: PeerId, seconds: float, lates: int) -> None:
        self._granted[peer] = seconds, lates
        if len(self._granted) > PACE_PEERS:
            del self._granted[next(iter(self._granted))]  # the longest not met


@dataclass(frozen=True)
class Result:
    """How an exchange ended, for the counters, the status and the membership."""

    kind: str  # one of RESULTS
    why: str = ""
    offence: bool = False  # the peer broke the agreement
    retry_s: float = 0.0  # how long it wants to be left alone, where it declined


class Exchange:
    """One side's view. States: offered → running → decided → over; `late`, `lost` and `refused` lead to over from any of them."""

    def __init__(self, me: PeerId, peer: PeerId, exchange: bytes, *, ours: bool, now: float, tau_s: float) -> None:
        self.me = me
        self.peer = peer
        self.id = exchange
        self.ours = ours
        self.began_at = now
        self.deadline = now + tau_s
        self.state = "offered" if ours else "running"
        self._merged: Digest | None = None
        self.result: Result | None = None

    @property
    def mine_first(self) -> bool:
        """Whether our snapshot is the first operand of the merge: the lower peer id is."""
        return self.me < self.peer

    def accepted(self, accept: Accept, offer: Offer, reach: int = FAR_BEHIND_ROUNDS) -> str:
        """The other side took our offer. `reach`: the rounds that we may be apart. Returns what is wrong with its terms, or ""."""
        if accept.exchange != self.id or self.state != "offered":
            return "an accept for another exchange"
        if accept.codec != offer.codec:
            return f"codec: ours {offer.codec}, theirs {accept.codec}"
        if abs(accept.round - offer.round) > reach:  # the merge would take the larger of the two for its own
            return f"round: ours {offer.round}, theirs {accept.round}; further apart than averaging allows"
        self.state = "running"
        return ""

    def declined(self, reason: str, retry_s: float = 0.0) -> Result:
        return self._end(Result("declined", reason, retry_s=retry_s))

    def judged(self, merged: Digest) -> None:
        """Our checks passed and the merge is in use: from here on it can at worst be one-sided."""
        self._merged = merged
        self.state = "decided"

    def refused(self, why: str, *, offence: bool) -> Result:
        """Our checks failed. Nothing of the exchange is used here."""
        return self._end(Result("refused", why, offence))

    def heard(self, outcome: Outcome) -> Result:
        """The other side's outcome, after our own decision."""
        if not outcome.accepted:
            return self._end(Result("one_sided", f"they refused: {outcome.reason}"))
        if outcome.merged != self._merged:
            return self._end(Result("one_sided", "their merge has another digest", offence=True))
        return self._end(Result("merged"))

    def silent(self, why: str) -> Result:
        """The stream ended, or the deadline passed, before we heard the other side's outcome."""
        if self.state == "decided":
            return self._end(Result("one_sided", why))
        return self._end(Result("lost", why))

    def late(self) -> Result:
        if self.state == "decided":
            return self._end(Result("one_sided", "no outcome before the deadline"))
        return self._end(Result("late", f"not complete after {self.deadline - self.began_at:.0f} s"))

    def _end(self, result: Result) -> Result:
        if self.result is None:
            self.result = result
            self.state = "over"
        return self.result
