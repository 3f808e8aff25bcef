"""One exchange as each side sees it, told as transcripts of protocol/exchange.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol.acceptance import FAR_BEHIND_ROUNDS
from blocktrain.protocol.exchange import MAX_WEIGHT_ROUNDS, Exchange, merged_round, offer_stands, shares
from blocktrain.protocol.ids import Digest, PeerId
from blocktrain.protocol.messages import Accept, Offer, Outcome

ANN, BOB = PeerId("12D3KooWAnn"), PeerId("12D3KooWBob")
ID = b"x" * 16
MERGED = Digest(b"m" * 32)
OFFER = Offer(ID, b"r" * 32, 0, "block", 3, "bf16", 100.0, 8)  # type: ignore[arg-type]
ACCEPT = Accept(ID, 4, 90.0, 8, "bf16")


def mine() -> Exchange:
    return Exchange(ANN, BOB, ID, ours=True, now=0.0, tau_s=20.0)


def running() -> Exchange:
    exchange = mine()
    assert exchange.accepted(ACCEPT, OFFER) == ""
    return exchange


def test_both_sides_accept_the_same_merge() -> None:
    exchange = running()
    exchange.judged(MERGED)
    assert exchange.heard(Outcome(True, MERGED)).kind == "merged"


def test_the_other_side_refuses_after_we_used_the_merge() -> None:
    exchange = running()
    exchange.judged(MERGED)
    result = exchange.heard(Outcome(False, bytes(32), "held-out loss"))
    assert result.kind == "one_sided"
    assert "held-out loss" in result.why
    assert not result.offence


def test_the_other_side_claims_another_merge() -> None:
    exchange = running()
    exchange.judged(MERGED)
    result = exchange.heard(Outcome(True, b"z" * 32))
    assert (result.kind, result.offence) == ("one_sided", True)


def test_silence_after_our_decision_is_one_sided_and_before_it_is_lost() -> None:
    before, after = running(), running()
    after.judged(MERGED)
    assert before.silent("the stream ended").kind == "lost"
    assert after.silent("the stream ended").kind == "one_sided"


def test_a_deadline_before_our_decision_is_late_and_says_how_long_it_was() -> None:
    result = running().late()
    assert result.kind == "late"
    assert "20 s" in result.why


def test_a_decline_carries_its_reason() -> None:
    assert mine().declined("busy").why == "busy"


def test_an_accept_for_another_exchange_or_codec_is_wrong() -> None:
    assert mine().accepted(Accept(b"y" * 16, 4, 1.0, 8, "bf16"), OFFER)
    assert "codec" in mine().accepted(Accept(ID, 4, 1.0, 8, "int8"), OFFER)


def test_an_accept_that_tells_a_tall_tale_about_its_round_is_wrong() -> None:
    far = OFFER.round + FAR_BEHIND_ROUNDS
    assert mine().accepted(Accept(ID, far, 1.0, 8, "bf16"), OFFER) == ""
    assert "round" in mine().accepted(Accept(ID, far + 1, 1.0, 8, "bf16"), OFFER)


def test_the_first_end_stands() -> None:
    exchange = running()
    assert exchange.refused("norm", offence=True).kind == "refused"
    assert exchange.late().kind == "refused"


def test_of_two_crossing_offers_exactly_one_stands() -> None:
    assert offer_stands(ANN, BOB) != offer_stands(BOB, ANN)


@pytest.mark.parametrize(("ours", "theirs"), [(3, 3), (0, 7), (7, 0)])
def test_a_merge_is_newer_than_both(ours: int, theirs: int) -> None:
    assert merged_round(ours, theirs) == max(ours, theirs) + 1


@given(st.floats(0, 1e15), st.floats(0, 1e15), st.floats(1, 1e9))
def test_shares_are_a_bounded_partition_of_one(a: float, b: float, per_round: float) -> None:
    first, second = shares(a, b, per_round)
    assert first + second == pytest.approx(1.0)
    assert max(first, second) <= (MAX_WEIGHT_ROUNDS + 1) / (MAX_WEIGHT_ROUNDS + 2) + 1e-12


def test_equal_work_is_the_plain_mean_and_more_work_weighs_more() -> None:
    assert shares(100.0, 100.0, 50.0) == (0.5, 0.5)
    assert shares(100.0, 0.0, 50.0)[0] > 0.5
