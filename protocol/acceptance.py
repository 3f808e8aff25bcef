"""Whether a merge may be used: the last question of an exchange, asked by each side for itself.

Before this, the transfer was complete and its digest right, the codec decoded it, and shape and dtype are the run's. Now: is it finite, is
their replica no further from ours than replicas of one block drift apart, and does the merge not hurt our own held-out loss? The checks
cost a norm and one forward pass. The word that names the failed check goes to the peer and into our status.

How much the merge may hurt depends on where the partner went. Replicas of one block are pulled by one loss: the ways that two honest ones
have come since our published state point the same way, with a cosine of 0.14 … 0.91 from the first round to a plateau, fresh noise and
turned-round work at -0.9 … 0.1 (bench gossip, part `attacks`). (Without n-gram tables: each moves the rows that its own text names, at a
cosine of 0.02, which would hide the rest.) Who goes our way has the margin, and in the first rounds, when losses fall
by more than the margin in one round and a mean of two lags behind both, a share of what we gained. Who does not may hardly hurt at all,
but for a share of what the merges with it gained so far: late in a run honest ways have less in common than the noise of each, and what a
merge changes is less than what a few hundred tokens can tell. So nobody can take more than it gave.
Direction alone refuses nobody: a mean of two that only differ by noise is better than either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from blocktrain.protocol.errors import PeerFault, Unfit

MAX_DRIFT_RATIO: Final = 20.0  # their distance from us, over our own drift since the last merge; honest pairs: 0.4 … 3
ABSURD: Final = 10.0  # times what is allowed: no honest replica ever comes to that
MIN_DRIFT_SHARE: Final = 0.05  # of the parameter norm: a replica that hardly moved still accepts this much distance
MIN_ALONG: Final = 0.12  # cosine between their way and ours, from which they go our way
GAIN_SHARE: Final = 0.25  # of what our loss fell since our published state: so much worse may the merge with one who goes our way be
ASTRAY_SHARE: Final = 0.02  # of the margin, for one who does not and has no credit: with a fifth, noise cost 2 % more in 20 rounds
CREDIT_SHARE: Final = 0.1  # of what merges with a peer gained, by which one with it may hurt, up to the margin; noise gains less
CREDIT_KEPT: Final = 0.98  # of it at the next merge: what counts are the last fifty or so
STATE_MARGIN: Final = 0.5  # nats per token by which a newer state may be worse on our held-out batch: ours may know that text by heart
FAR_BEHIND_ROUNDS: Final = 50  # a replica further behind than this takes state instead of averaging
FAR_BEHIND_S: Final = 10.0  # and where rounds are quick, than what the faster of two does in this time: a look-up and a download take it
MAX_REACH: Final = 2000  # rounds; whatever pace somebody announces


def reach(rounds_per_s: float) -> int:
    """How many rounds apart two replicas may be and still average, the faster of which makes so many a second."""
    return max(FAR_BEHIND_ROUNDS, int(min(MAX_REACH, rounds_per_s * FAR_BEHIND_S)))


@dataclass(frozen=True)
class Measures:
    """What compute measured of a trial. Norms are Euclidean over all parameters."""

    finite: bool
    own_norm: float  # of our snapshot
    distance: float  # |theirs - ours|
    drift: float  # how far we have come since the last merge or download: |our snapshot - our published state|, and own rounds before it
    loss_before: float | None  # our snapshot on our held-out batch, nats per token
    loss_after: float | None  # the merge on the same batch
    along: float = 1.0  # cosine between their way and ours since our published state, without n-gram tables
    loss_published: float | None = None  # our published state on the same batch, where it is known


def credited(credit: float, measures: Measures) -> float:
    """What the merges with a peer have gained us, in nats per token, when one more is used."""
    if measures.loss_before is None or measures.loss_after is None:
        return credit
    return max(0.0, CREDIT_KEPT * credit + measures.loss_before - measures.loss_after)


def judge(measures: Measures, margin: float, credit: float = 0.0) -> None:
    """Accept a trial or say why not.

    Args:
        margin: how much worse, in nats per token, a merge with one who goes our way may be on our held-out batch.
        credit: what earlier merges with this peer gained (`credited`).
    Raises: PeerFault: not finite. Unfit: another failed check, with its numbers.
    """
    if not measures.finite:
        raise PeerFault("not finite: the snapshot holds NaN or infinity")
    allowed = max(MAX_DRIFT_RATIO * measures.drift, MIN_DRIFT_SHARE * measures.own_norm)
    if not measures.distance <= allowed:
        fault = Unfit if measures.distance <= ABSURD * allowed else PeerFault
        raise fault(f"norm: the snapshot is {measures.distance:.3g} away from ours, {allowed:.3g} is allowed")
    before, after = measures.loss_before, measures.loss_after
    if before is None or after is None:
        return
    allowed = margin
    if not measures.along >= MIN_ALONG:
        allowed = max(ASTRAY_SHARE * margin, min(margin, CREDIT_SHARE * credit))
    elif measures.loss_published is not None:
        allowed = max(margin, GAIN_SHARE * (measures.loss_published - before))
    if not after <= before + allowed:
        raise Unfit(f"held-out loss: the merge has {after:.3f}, ours {before:.3f}, margin {allowed:.3g}")


def judge_state(finite: bool, loss_before: float | None, loss_after: float | None) -> None:
    """Accept a downloaded state or say why not. Anybody may announce the newest one, and nothing is known of it but its digest.

    Args:
        loss_before: of the state that it replaces, on our held-out batch, nats per token.
        loss_after: of the downloaded one.
    Raises: PeerFault: the failed check, with its numbers.
    """
    if not finite:
        raise PeerFault("not finite: the state holds NaN or infinity")
    if loss_before is not None and loss_after is not None and not loss_after <= loss_before + STATE_MARGIN:
        raise PeerFault(f"held-out loss: the state has {loss_after:.3f}, ours {loss_before:.3f}, margin {STATE_MARGIN:g}")
