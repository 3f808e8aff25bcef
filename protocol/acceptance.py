"""Whether a merge may be used: the last question of an exchange, asked by each side for itself.

Before this, the transfer was complete and its digest right, the codec decoded it, and shape and dtype are the run's. Now: is it finite, is
their replica no further from ours than replicas of one block drift apart, and does the merge not hurt our own held-out loss? The checks
cost a norm and one forward pass. The word that names the failed check goes to the peer and into our status.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from blocktrain.protocol.errors import PeerFault

MAX_DRIFT_RATIO: Final = 20.0  # their distance from us, over our own drift since the last merge; honest pairs measure 1 … 3
MIN_DRIFT_SHARE: Final = 0.05  # of the parameter norm: a replica that hardly moved still accepts this much distance
STATE_MARGIN: Final = 0.5  # nats per token by which a newer state may be worse on our held-out batch: ours may know that text by heart
FAR_BEHIND_ROUNDS: Final = 50  # a replica further behind than this takes state instead of averaging


@dataclass(frozen=True)
class Measures:
    """What compute measured of a trial. Norms are Euclidean over all parameters."""

    finite: bool
    own_norm: float  # of our snapshot
    distance: float  # |theirs - ours|
    drift: float  # how far we have come since the last merge or download: |our snapshot - our published state|, and own rounds before it
    loss_before: float | None  # our snapshot on our held-out batch, nats per token
    loss_after: float | None  # the merge on the same batch


def judge(measures: Measures, margin: float) -> None:
    """Accept a trial or say why not.

    Args:
        margin: how much worse, in nats per token, a merge may be on our held-out batch.
    Raises: PeerFault: the failed check, with its numbers.
    """
    if not measures.finite:
        raise PeerFault("not finite: the snapshot holds NaN or infinity")
    allowed = max(MAX_DRIFT_RATIO * measures.drift, MIN_DRIFT_SHARE * measures.own_norm)
    if not measures.distance <= allowed:
        raise PeerFault(f"norm: the snapshot is {measures.distance:.3g} away from ours, {allowed:.3g} is allowed")
    before, after = measures.loss_before, measures.loss_after
    if before is not None and after is not None and not after <= before + margin:
        raise PeerFault(f"held-out loss: the merge has {after:.3f}, ours {before:.3f}, margin {margin:g}")


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
