"""What a node's core hears (facts) and what it answers (decisions). Both are plain data, so a swarm's past replays in a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from blocktrain.protocol.acceptance import FAR_BEHIND_ROUNDS
from blocktrain.protocol.exchange import Result
from blocktrain.protocol.ids import Digest, PeerId
from blocktrain.protocol.messages import Offer
from blocktrain.protocol.records import MAX_ROUND, Seen

# ---- facts ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Began:
    """The node is up with this published state. `fresh`: it is the untrained start, not a checkpoint."""

    round: int
    digest: Digest
    fresh: bool


@dataclass(frozen=True)
class Saw:
    """A read of one block's records ended. `block` is -1 where it failed."""

    block: int
    records: tuple[Seen, ...]


@dataclass(frozen=True)
class Trained:
    """H more steps since the last merge or own round."""


@dataclass(frozen=True)
class Offered:
    """A peer offers an exchange. Run and part were checked by the codec and the handshake."""

    peer: PeerId
    offer: Offer


@dataclass(frozen=True)
class Answered:
    """Our offer was accepted; the transfer begins."""

    exchange: bytes


@dataclass(frozen=True)
class Ended:
    """An exchange is over, ours or theirs."""

    exchange: bytes
    peer: PeerId
    result: Result
    took_s: float


@dataclass(frozen=True)
class Published:
    """The published state changed: a merge, an own round or a download."""

    round: int
    digest: Digest


@dataclass(frozen=True)
class FetchEnded:
    """A download of state ended. `why` is empty where it worked."""

    why: str


@dataclass(frozen=True)
class Blamed:
    """Something a peer did or failed to do outside an exchange: a download, a sweep."""

    peer: PeerId
    why: str
    offence: bool


@dataclass(frozen=True)
class Tick:
    """Time passed. The core asks for its next tick by `Core.wake_at`."""


@dataclass(frozen=True)
class Stopping:
    """The user wants the node to end."""


Fact: TypeAlias = Began | Saw | Trained | Offered | Answered | Ended | Published | FetchEnded | Blamed | Tick | Stopping

# ---- decisions ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SendOffer:
    """Take a snapshot and offer it. Everything must be over at `deadline`."""

    exchange: bytes
    peer: PeerId
    deadline: float
    reach: int = FAR_BEHIND_ROUNDS  # the rounds that the two may be apart
    most: int = MAX_ROUND  # a higher round of theirs counts as this one in our merge


@dataclass(frozen=True)
class Take:
    """Accept an offer: take a snapshot now."""

    exchange: bytes
    peer: PeerId
    deadline: float
    most: int = MAX_ROUND  # a higher round of theirs counts as this one in our merge


@dataclass(frozen=True)
class Refuse:
    """Decline an offer."""

    exchange: bytes
    peer: PeerId
    reason: str
    retry_after_s: float


@dataclass(frozen=True)
class Withdraw:
    """Give up our own offer: it crossed one that stands."""

    exchange: bytes


@dataclass(frozen=True)
class PublishOwn:
    """The live parameters become the published state of round + 1; of `round`, where that of our own is one that nobody believes."""

    round: int | None = None


@dataclass(frozen=True)
class Fetch:
    """Download a published state of at least `round` from one of these donors. Those who announced that very round come first.

    `most`: a state of a round above it is a tall tale, not to be taken: our own round would become it.
    """

    round: int
    donors: tuple[PeerId, ...]
    most: int = MAX_ROUND


@dataclass(frozen=True)
class Train:
    """Start (or go on) training."""


@dataclass(frozen=True)
class Announce:
    """Write our record now."""

    phase: str


@dataclass(frozen=True)
class Read:
    """Read the records of these buckets of a block."""

    block: int
    buckets: tuple[int, ...]


Decision: TypeAlias = SendOffer | Take | Refuse | Withdraw | PublishOwn | Fetch | Train | Announce | Read
