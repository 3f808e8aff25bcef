"""Which merges are used: each failed check is named with its numbers, and nothing that is not a number slips through."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol.acceptance import (
    ASTRAY_SHARE,
    CREDIT_SHARE,
    MAX_DRIFT_RATIO,
    MIN_ALONG,
    MIN_DRIFT_SHARE,
    STATE_MARGIN,
    Measures,
    credited,
    judge,
    judge_state,
)
from blocktrain.protocol.errors import PeerFault, Unfit

HONEST = Measures(finite=True, own_norm=100.0, distance=2.0, drift=1.0, loss_before=2.0, loss_after=1.95)
NAN, INF = float("nan"), float("inf")


def refused(why: str, **changes: object) -> None:
    with pytest.raises(PeerFault, match=why):
        judge(dataclasses.replace(HONEST, **changes), 0.02)  # type: ignore[arg-type]


def test_an_honest_merge_is_accepted() -> None:
    judge(HONEST, 0.02)


def test_a_snapshot_that_is_not_finite_is_refused_first() -> None:
    refused("^not finite", finite=False, distance=NAN, loss_after=NAN)


def test_a_snapshot_too_far_from_ours_is_refused_with_the_distance_and_what_is_allowed() -> None:
    judge(dataclasses.replace(HONEST, distance=MAX_DRIFT_RATIO), 0.02)
    refused("^norm: the snapshot is 20.1 away from ours, 20 is allowed$", distance=20.1)


def test_a_replica_that_hardly_moved_still_accepts_its_peers_progress() -> None:
    judge(dataclasses.replace(HONEST, drift=0.0, distance=100 * MIN_DRIFT_SHARE), 0.02)
    refused("^norm", drift=0.0, distance=100 * MIN_DRIFT_SHARE + 0.1)


def test_a_merge_that_hurts_our_held_out_loss_beyond_the_margin_is_refused() -> None:
    judge(dataclasses.replace(HONEST, loss_after=2.019), 0.02)
    refused(r"^held-out loss: the merge has 2.021, ours 2.000, margin 0.02$", loss_after=2.021)
    judge(dataclasses.replace(HONEST, loss_after=2.4), 0.5)


def test_while_losses_fall_fast_a_mean_that_lags_behind_is_accepted_from_one_who_goes_our_way() -> None:
    early = {"loss_published": 3.6, "loss_before": 1.9}
    judge(dataclasses.replace(HONEST, **early, loss_after=2.3, along=0.4), 0.02)
    refused("^held-out loss", **early, loss_after=2.4, along=0.4)
    refused("^held-out loss", **early, loss_after=2.0, along=0.0)


@pytest.mark.parametrize("along", [MIN_ALONG - 0.01, 0.0, -1.0, NAN])
def test_who_goes_elsewhere_may_hardly_hurt(along: float) -> None:
    judge(dataclasses.replace(HONEST, loss_after=1.999, along=along), 0.1)
    refused("^held-out loss", loss_after=2.05, along=along)
    judge(dataclasses.replace(HONEST, loss_after=2.05, along=MIN_ALONG), 0.1)


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_distance_or_a_loss_that_is_no_number_is_refused(value: float) -> None:
    refused("^norm", distance=value)
    refused("^held-out loss", loss_after=value)


@pytest.mark.parametrize("changes", [{"loss_before": None}, {"loss_after": None}, {"loss_before": None, "loss_after": None}])
def test_without_held_out_data_the_other_checks_still_stand(changes: dict[str, None]) -> None:
    judge(dataclasses.replace(HONEST, **changes), 0.02)  # type: ignore[arg-type]
    refused("^norm", distance=1000.0, **changes)


@given(st.floats(), st.floats(), st.floats(min_value=0, max_value=10))
def test_what_is_accepted_is_within_bounds_whatever_was_measured(distance: float, loss_after: float, drift: float) -> None:
    measures = dataclasses.replace(HONEST, distance=distance, loss_after=loss_after, drift=drift)
    try:
        judge(measures, 0.02)
    except PeerFault:
        return
    assert distance <= max(MAX_DRIFT_RATIO * drift, MIN_DRIFT_SHARE * HONEST.own_norm)
    assert loss_after <= 2.02


def test_a_downloaded_state_is_judged_by_what_it_does_on_our_text() -> None:
    judge_state(True, 5.0, 2.0)
    judge_state(True, 2.0, 2.0 + STATE_MARGIN)
    judge_state(True, None, 2.0)
    for finite, before, after in ((False, 5.0, 2.0), (True, 2.0, 2.1 + STATE_MARGIN), (True, 5.0, NAN), (True, 5.0, INF)):
        with pytest.raises(PeerFault):
            judge_state(finite, before, after)


def test_a_replica_that_only_went_astray_is_unfit_and_an_absurd_one_broke_the_agreement() -> None:
    near = Measures(True, 10.0, 60.0, 1.0, None, None)
    with pytest.raises(Unfit, match="norm"):
        judge(near, 0.1)
    with pytest.raises(PeerFault, match="norm") as caught:
        judge(Measures(True, 10.0, 1e6, 1.0, None, None), 0.1)
    assert not isinstance(caught.value, Unfit)
    with pytest.raises(Unfit, match="held-out"):
        judge(Measures(True, 10.0, 1.0, 1.0, 2.0, 9.0), 0.1)


def test_late_in_a_run_whose_merges_have_gained_something_may_lose_a_share_of_it() -> None:
    late = dataclasses.replace(HONEST, along=0.05, loss_after=2.01)
    with pytest.raises(Unfit, match=r"margin 0\.002"):
        judge(late, 0.1)
    credit = 0.0
    for _ in range(10):
        credit = credited(credit, dataclasses.replace(HONEST, loss_after=1.98))
    judge(late, 0.1, credit)
    with pytest.raises(Unfit, match=r"margin 0\.1$"):
        judge(dataclasses.replace(late, loss_after=2.11), 0.1, credit=100.0)
    judge(dataclasses.replace(late, along=1.0, loss_after=2.09), 0.1, credit=0.0)


@given(deltas=st.lists(st.floats(-0.2, 0.2), max_size=60), margin=st.floats(0.01, 0.2))
def test_nobody_who_goes_elsewhere_takes_more_than_it_gave(deltas: list[float], margin: float) -> None:
    """By how much all its merges that were used hurt, beyond what anybody may, against what they gained."""
    credit = gained = taken = 0.0
    for delta in deltas:
        measures = dataclasses.replace(HONEST, along=0.0, loss_after=2.0 + delta)
        try:
            judge(measures, margin, credit)
        except Unfit:
            continue
        credit = credited(credit, measures)
        gained += max(0.0, -delta)
        taken += max(0.0, delta - ASTRAY_SHARE * margin)
    assert taken <= gained + 1e-9
    assert 0.0 <= credit <= gained + 1e-9
    assert CREDIT_SHARE < 1.0


def test_without_a_held_out_check_there_is_no_credit() -> None:
    assert credited(0.3, dataclasses.replace(HONEST, loss_before=None, loss_after=None)) == 0.3
