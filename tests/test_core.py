"""One node's decisions, told as transcripts: facts in, decisions out, time as an argument."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from blocktrain.protocol import buckets
from blocktrain.protocol import facts as f
from blocktrain.protocol.acceptance import FAR_BEHIND_ROUNDS, MAX_REACH, reach
from blocktrain.protocol.core import FETCH_WHEN_BEHIND, SOON_S, Core, Settings
from blocktrain.protocol.exchange import Result, tokens_per_round
from blocktrain.protocol.ids import Digest, PeerId, peer_id_of_key
from blocktrain.protocol.manifest import Manifest, Model, Noise, Optimizer, Schedule
from blocktrain.protocol.messages import Offer
from blocktrain.protocol.patience import MOST_S
from blocktrain.protocol.records import MAX_ROUND, Announcement, Seen
from blocktrain.protocol.standing import LEAD

MANIFEST = Manifest(
    format=1,
    name="test",
    blocks=2,
    objective="evidence",
    tokenizer="bytes",
    seed=1,
    model=Model(32, 1, 2, 32, 256),
    noise=Noise(0.2, 4.0, 0.1, 0.25),
    schedule=Schedule(10, 1e-3, 2, 100, 0.1),
    optimizer=Optimizer(2, 1, 0.9, 0.95, 0.05, 1.0, 5),
)
PEERS = sorted(peer_id_of_key(hashlib.sha256(bytes([n])).digest()) for n in range(6))
ME, LOW, HIGH, OTHER = PEERS[2], PEERS[0], PEERS[4], PEERS[5]
T0 = 1_000_000.0


def seen(
    peer: PeerId, *, block: int = 0, round: int = 5, phase: str = "training", until: float = T0 + 60, rounds_per_s: float = 0.1
) -> Seen:
    speed = rounds_per_s * tokens_per_round(MANIFEST)
    announcement = Announcement(MANIFEST.run, block, phase, round, hashlib.sha256(str(round).encode()).digest(), speed, 0.0, 1, 1)
    return Seen(peer, announcement, until)


def node(*, expects_peers: bool = True, train: bool = True, topology: str = "pairs") -> Core:
    return Core(ME, MANIFEST, 0, Settings(expects_peers=expects_peers, train=train, topology=topology), Random(7))


def training(*peers: PeerId, round: int = 5) -> Core:
    """A node that has its state, trains, and knows these replicas of its block."""
    core = node()
    core.handle(f.Began(round, Digest(b"d" * 32), fresh=False), T0)
    for when in (T0, T0 + 1):
        core.handle(f.Saw(0, tuple(seen(peer, round=round) for peer in peers)), when)
    assert core.phase == "training"
    return core


def kinds(decisions: list[f.Decision]) -> list[str]:
    return [type(decision).__name__ for decision in decisions]


def only(decisions: list[f.Decision], kind: type) -> f.Decision:
    found = [decision for decision in decisions if isinstance(decision, kind)]
    assert len(found) == 1, decisions
    return found[0]


def offer(round: int = 5, block: int = 0) -> Offer:
    return Offer(b"o" * 16, MANIFEST.run, block, "block", round, "bf16", 100.0, 8)


# ---- joining --------------------------------------------------------------------------------------------------------------------


def test_a_host_trains_at_once() -> None:
    core = node(expects_peers=False)
    assert "Train" in kinds(core.handle(f.Began(0, Digest(b"d" * 32), fresh=True), T0))
    assert core.phase == "training"


def test_a_joiner_looks_twice_before_it_believes_that_nobody_is_ahead() -> None:
    core = node()
    assert kinds(core.handle(f.Began(0, Digest(b"d" * 32), fresh=True), T0))[0] == "Announce"
    assert core.handle(f.Saw(0, ()), T0 + 0.1) == []
    assert "Train" in kinds(core.handle(f.Saw(0, ()), T0 + 0.6))


def test_a_fresh_joiner_downloads_from_any_trained_replica_and_trains_after() -> None:
    core = node()
    core.handle(f.Began(0, Digest(b"d" * 32), fresh=True), T0)
    fetch = only(core.handle(f.Saw(0, (seen(LOW), seen(HIGH, round=4))), T0 + 0.1), f.Fetch)
    assert isinstance(fetch, f.Fetch)
    assert (fetch.round, set(fetch.donors)) == (5, {LOW, HIGH})
    assert fetch.donors[0] == LOW
    core.handle(f.Published(5, Digest(b"e" * 32)), T0 + 2)
    assert "Train" in kinds(core.handle(f.FetchEnded(""), T0 + 2))
    assert (core.round, core.counters.fetched) == (5, 1)


def test_a_download_names_the_highest_round_that_is_believed() -> None:
    core = node()
    core.handle(f.Began(0, Digest(b"d" * 32), fresh=True), T0)
    fetch = only(core.handle(f.Saw(0, (seen(LOW), seen(HIGH), seen(OTHER, round=10**6))), T0 + 0.1), f.Fetch)
    assert isinstance(fetch, f.Fetch)
    assert (fetch.round, fetch.most) == (5, 5 + FAR_BEHIND_ROUNDS)


def test_where_rounds_are_quick_more_of_them_may_pass_during_a_look_up() -> None:
    core = node()
    core.handle(f.Began(0, Digest(b"d" * 32), fresh=True), T0)
    quick = tuple(seen(peer, rounds_per_s=100.0) for peer in (LOW, HIGH))
    fetch = only(core.handle(f.Saw(0, (*quick, seen(OTHER, round=10**6, rounds_per_s=1e6))), T0 + 0.1), f.Fetch)
    assert isinstance(fetch, f.Fetch)
    assert (fetch.round, fetch.most) == (5, 5 + reach(100.0))


def test_an_untrained_replica_is_no_donor() -> None:
    core = node()
    core.handle(f.Began(0, Digest(b"d" * 32), fresh=True), T0)
    core.handle(f.Saw(0, (seen(LOW, round=0),)), T0 + 0.1)
    assert "Train" in kinds(core.handle(f.Saw(0, (seen(LOW, round=0),)), T0 + 0.6))


def test_a_failed_download_is_tried_again_and_says_why_it_waits() -> None:
    core = node()
    core.handle(f.Began(0, Digest(b"d" * 32), fresh=True), T0)
    core.handle(f.Saw(0, (seen(LOW),)), T0 + 0.1)
    assert core.handle(f.FetchEnded("the donor went away"), T0 + 1) == []
    assert "the donor went away" in core.waiting(T0 + 1)[1]
    later = T0 + 10
    core.handle(f.Tick(), later)
    assert "Fetch" in kinds(core.handle(f.Saw(0, (seen(LOW),)), later) + core.handle(f.Saw(0, (seen(LOW),)), later + 0.5))


def test_a_joiner_that_had_to_start_alone_takes_state_as_soon_as_it_can_and_one_that_has_merged_goes_on_averaging() -> None:
    for merged, expected in ((False, ["Fetch"]), (True, [])):
        core = node(expects_peers=False)
        core.handle(f.Began(0, Digest(b"d" * 32), fresh=True), T0)
        if merged:
            take = only(core.handle(f.Offered(LOW, offer(round=0)), T0 + 1), f.Take)
            assert isinstance(take, f.Take)
            core.handle(f.Ended(take.exchange, LOW, Result("merged"), 1.0), T0 + 2)
        assert kinds(core.handle(f.Saw(0, (seen(LOW, round=FETCH_WHEN_BEHIND + 1),)), T0 + 3)) == expected


def test_a_round_that_nobody_near_us_has_is_not_followed() -> None:
    core = training(LOW, round=20)
    liar = seen(OTHER, round=10**9, until=T0 + 90)
    assert kinds(core.handle(f.Saw(0, (liar,)), T0 + 2)) == []
    assert core.phase == "training"


def test_a_lone_replica_follows_a_tall_tale_once_and_trains_on() -> None:
    core = training(round=20)
    liar = seen(OTHER, round=10**9, until=T0 + 90)
    assert kinds(core.handle(f.Saw(0, (liar,)), T0 + 2)) == ["Fetch"]
    assert "Train" in kinds(core.handle(f.FetchEnded("nobody there"), T0 + 3))
    assert kinds(core.handle(f.Saw(0, (liar,)), T0 + 12)) == []
    assert kinds(core.handle(f.Trained(), T0 + 13))[0] in ("SendOffer", "PublishOwn")


def test_a_joiner_whom_the_newest_donor_fails_takes_what_others_have() -> None:
    core = node()
    core.handle(f.Began(0, Digest(b"d" * 32), fresh=True), T0)
    there = (seen(LOW, round=20, until=T0 + 90), seen(OTHER, round=10**9, until=T0 + 90))
    first = only(core.handle(f.Saw(0, there), T0 + 0.1), f.Fetch)
    core.handle(f.FetchEnded("nobody there"), T0 + 1)
    core.handle(f.Tick(), T0 + 10)
    second = only(core.handle(f.Saw(0, there), T0 + 10.5), f.Fetch)
    assert isinstance(first, f.Fetch)
    assert isinstance(second, f.Fetch)
    assert (first.round, second.round) == (10**9, 1)
    assert LOW in second.donors


def test_a_checkpoint_a_few_rounds_old_is_averaged_and_an_old_one_is_replaced() -> None:
    for behind, expected in ((FETCH_WHEN_BEHIND, "Train"), (FETCH_WHEN_BEHIND + 1, "Fetch")):
        core = node()
        core.handle(f.Began(20, Digest(b"d" * 32), fresh=False), T0)
        first = core.handle(f.Saw(0, (seen(LOW, round=20 + behind),)), T0 + 0.1)
        second = core.handle(f.Saw(0, (seen(LOW, round=20 + behind),)), T0 + 0.6)
        assert expected in kinds(first + second)


# ---- exchanges ------------------------------------------------------------------------------------------------------------------


def test_h_steps_without_any_replica_are_an_own_round() -> None:
    assert kinds(training().handle(f.Trained(), T0 + 5)) == ["PublishOwn"]


def test_h_steps_with_a_replica_are_an_offer_with_a_deadline() -> None:
    core = training(LOW)
    order = only(core.handle(f.Trained(), T0 + 5), f.SendOffer)
    assert isinstance(order, f.SendOffer)
    assert (order.peer, order.deadline) == (LOW, T0 + 5 + core.settings.tau_s)


def test_the_next_is_asked_when_one_declines_and_the_round_is_own_when_all_did() -> None:
    core = training(LOW, HIGH)
    first = only(core.handle(f.Trained(), T0 + 5), f.SendOffer)
    assert isinstance(first, f.SendOffer)
    second = only(core.handle(f.Ended(first.exchange, first.peer, Result("declined", "busy"), 0.1), T0 + 6), f.SendOffer)
    assert isinstance(second, f.SendOffer)
    assert {first.peer, second.peer} == {LOW, HIGH}
    last = core.handle(f.Ended(second.exchange, second.peer, Result("declined", "busy"), 0.1), T0 + 7)
    assert kinds(last) == ["PublishOwn"]
    assert core.counters.declined == 2


def test_who_wants_to_be_left_alone_is_until_it_comes_itself() -> None:
    core = training(LOW)
    first = only(core.handle(f.Trained(), T0 + 5), f.SendOffer)
    assert isinstance(first, f.SendOffer)
    declined = Result("declined", "ahead", retry_s=10.0)
    assert kinds(core.handle(f.Ended(first.exchange, LOW, declined, 0.1), T0 + 6)) == ["PublishOwn"]
    assert kinds(core.handle(f.Trained(), T0 + 15)) == ["PublishOwn"]
    again = only(core.handle(f.Trained(), T0 + 16.1), f.SendOffer)
    assert isinstance(again, f.SendOffer)
    core.handle(f.Ended(again.exchange, LOW, declined, 0.1), T0 + 17)
    take = only(core.handle(f.Offered(LOW, offer()), T0 + 18), f.Take)
    assert isinstance(take, f.Take)
    core.handle(f.Ended(take.exchange, LOW, Result("merged"), 0.1), T0 + 19)
    assert kinds(core.handle(f.Trained(), T0 + 20)) == ["SendOffer"]


def test_nobody_is_left_alone_for_as_long_as_he_likes() -> None:
    core = training(LOW)
    first = only(core.handle(f.Trained(), T0 + 5), f.SendOffer)
    assert isinstance(first, f.SendOffer)
    core.handle(f.Ended(first.exchange, LOW, Result("declined", "stopping", retry_s=3600.0), 0.1), T0 + 6)
    assert kinds(core.handle(f.Trained(), T0 + 6 + MOST_S)) == ["SendOffer"]


def test_one_who_is_told_that_it_is_behind_looks_for_a_newer_state_at_once() -> None:
    core = training(LOW)
    first = only(core.handle(f.Trained(), T0 + 5), f.SendOffer)
    assert isinstance(first, f.SendOffer)
    core.handle(f.Ended(first.exchange, LOW, Result("declined", "behind", retry_s=10.0), 0.1), T0 + 6)
    assert core.wake_at() <= T0 + 6 + SOON_S


@pytest.mark.parametrize("apart", [-400, 400])
def test_quick_replicas_average_though_they_are_many_rounds_apart(apart: int) -> None:
    slow, quick = training(round=1000), training(round=1000)
    for n in range(20):
        for decision in quick.handle(f.Trained(), T0 + 5 + 0.02 * n):
            assert isinstance(decision, f.PublishOwn)
    assert kinds(quick.handle(f.Offered(HIGH, offer(round=1000 + apart)), T0 + 6)) == ["Take"]
    assert kinds(slow.handle(f.Offered(HIGH, offer(round=1000 + apart)), T0 + 6)) == ["Refuse"]
    slow.handle(f.Saw(0, (seen(HIGH, round=1000, rounds_per_s=50.0),)), T0 + 7)
    assert kinds(slow.handle(f.Offered(HIGH, offer(round=1000 + apart)), T0 + 8)) == ["Take"], "the quicker of the two has the say"
    order = only(slow.handle(f.Ended(b"o" * 16, HIGH, Result("declined"), 0.0), T0 + 9) + slow.handle(f.Trained(), T0 + 9), f.SendOffer)
    assert isinstance(order, f.SendOffer)
    assert order.reach == reach(50.0) == 500


@pytest.mark.parametrize(
    ("others", "counts"),
    [
        ((), MAX_ROUND),  # of two nobody can say who is right
        ((9,), 9 + LEAD),  # two stand by our 10, or by what is below it
        ((10,), 10 + LEAD),
        ((14,), 10 + LEAD),
        ((14, 13), 13 + LEAD),
        ((45, 14, 13), 14 + LEAD),  # one more liar alone changes nothing
        ((3, 4), 4 + LEAD),
    ],
)
def test_in_a_merge_a_round_counts_as_far_as_two_stand_by_it_and_a_little_beyond(others: tuple[int, ...], counts: int) -> None:
    core = training(LOW, round=10)
    core.handle(f.Saw(0, tuple(seen(peer, round=round) for peer, round in zip(PEERS[3:], others, strict=False))), T0 + 2)
    taken = only(core.handle(f.Offered(LOW, offer(round=40)), T0 + 3), f.Take)
    assert isinstance(taken, f.Take)
    assert taken.most == counts
    core.handle(f.Ended(b"o" * 16, LOW, Result("merged"), 0.1), T0 + 4)
    core.handle(f.Saw(0, tuple(seen(peer, round=10, phase="left", until=T0 + 70) for peer in PEERS[3:])), T0 + 5)
    order = only(core.handle(f.Trained(), T0 + 6), f.SendOffer)
    assert isinstance(order, f.SendOffer)
    assert (order.peer, order.most) == (LOW, MAX_ROUND), "who has left stands by nothing"


def test_an_offender_stands_by_no_round() -> None:
    core = training(LOW, HIGH, OTHER, round=10)
    core.handle(f.Saw(0, (seen(HIGH, round=40, until=T0 + 70),)), T0 + 2)
    core.handle(f.Saw(0, (seen(OTHER, round=45, until=T0 + 70),)), T0 + 2)
    core.handle(f.Blamed(OTHER, "nonsense", True), T0 + 2)
    taken = only(core.handle(f.Offered(LOW, offer(round=40)), T0 + 3), f.Take)
    assert isinstance(taken, f.Take)
    assert taken.most == 10 + LEAD


def test_where_rounds_are_quick_those_of_half_a_refresh_count_as_well() -> None:
    core = training(LOW, HIGH, round=1000)
    for n in range(20):
        core.handle(f.Trained(), T0 + 5 + 0.1 * n)
        if core.current is not None:
            core.handle(f.Ended(core.current.id, core.current.peer, Result("late"), 0.1), T0 + 5 + 0.1 * n)
        if core.current is not None:
            core.handle(f.Ended(core.current.id, core.current.peer, Result("late"), 0.1), T0 + 5 + 0.1 * n)
    taken = only(core.handle(f.Offered(LOW, offer(round=1040)), T0 + 7), f.Take)
    assert isinstance(taken, f.Take)
    assert taken.most == pytest.approx(1000 + LEAD + 10.0 * core.settings.refresh_s / 2, abs=1)


def test_a_boast_about_speed_does_not_make_every_round_believable() -> None:
    assert reach(1e12) == MAX_REACH
    assert reach(0.0) == reach(0.1) == FAR_BEHIND_ROUNDS


def test_a_late_partner_is_counted_put_off_and_never_waited_for_twice() -> None:
    core = training(LOW)
    order = only(core.handle(f.Trained(), T0 + 5), f.SendOffer)
    assert isinstance(order, f.SendOffer)
    assert kinds(core.handle(f.Ended(order.exchange, LOW, Result("late", "not complete after 20 s"), 20.0), T0 + 25)) == ["PublishOwn"]
    assert core.counters.late == 1
    assert kinds(core.handle(f.Trained(), T0 + 26)) == ["PublishOwn"]


def test_a_merge_ends_the_round_whoever_began_it() -> None:
    core = training(LOW)
    take = only(core.handle(f.Offered(LOW, offer()), T0 + 5), f.Take)
    assert isinstance(take, f.Take)
    assert core.handle(f.Trained(), T0 + 6) == []
    assert core.handle(f.Ended(take.exchange, LOW, Result("merged"), 1.0), T0 + 7) == []
    assert core.counters.accepted == 1


def test_work_that_became_due_during_a_failed_exchange_is_not_forgotten() -> None:
    core = training(LOW)
    take = only(core.handle(f.Offered(LOW, offer()), T0 + 5), f.Take)
    assert isinstance(take, f.Take)
    core.handle(f.Trained(), T0 + 6)
    assert kinds(core.handle(f.Ended(take.exchange, LOW, Result("lost", "gone"), 1.0), T0 + 7)) == ["PublishOwn"]


def test_a_second_offer_is_declined_as_busy() -> None:
    core = training(LOW, HIGH)
    core.handle(f.Offered(LOW, offer()), T0 + 5)
    refusal = only(core.handle(f.Offered(HIGH, offer()), T0 + 5), f.Refuse)
    assert isinstance(refusal, f.Refuse)
    assert (refusal.reason, refusal.retry_after_s > 0) == ("busy", True)


def test_of_crossing_offers_the_lower_peers_stands_on_both_sides() -> None:
    below = training(LOW)
    below.handle(f.Trained(), T0 + 5)
    assert kinds(below.handle(f.Offered(LOW, offer()), T0 + 5.1)) == ["Withdraw", "Take"]
    above = training(HIGH)
    above.handle(f.Trained(), T0 + 5)
    refusal = only(above.handle(f.Offered(HIGH, offer()), T0 + 5.1), f.Refuse)
    assert isinstance(refusal, f.Refuse)
    assert refusal.reason == "crossed"


def test_an_offer_that_was_declined_as_crossed_makes_no_own_round_since_theirs_is_on_its_way() -> None:
    core = training(LOW)
    order = only(core.handle(f.Trained(), T0 + 5), f.SendOffer)
    assert isinstance(order, f.SendOffer)
    assert core.handle(f.Ended(order.exchange, LOW, Result("declined", "crossed"), 0.1), T0 + 5.1) == []
    assert kinds(core.handle(f.Offered(LOW, offer()), T0 + 5.2)) == ["Take"]


def test_offers_are_declined_by_state_block_and_distance() -> None:
    joining = node()
    joining.handle(f.Began(0, Digest(b"d" * 32), fresh=True), T0)
    far = training(LOW, round=100)
    cases = [
        (joining, offer(), "joining"),
        (training(LOW), offer(block=1), "block"),
        (far, offer(round=1), "behind"),
        (training(LOW), offer(round=500), "ahead"),
    ]
    for core, sent, reason in cases:
        refusal = only(core.handle(f.Offered(LOW, sent), T0 + 2), f.Refuse)
        assert isinstance(refusal, f.Refuse)
        assert refusal.reason == reason


def test_a_replica_that_never_got_state_declines_one_that_is_ahead_and_looks_for_its_state_at_once() -> None:
    core = node(expects_peers=False)
    core.handle(f.Began(0, Digest(b"d" * 32), fresh=True), T0)
    refusal = only(core.handle(f.Offered(LOW, offer(round=FETCH_WHEN_BEHIND + 1)), T0 + 2), f.Refuse)
    assert isinstance(refusal, f.Refuse)
    assert refusal.reason == "ahead"
    assert T0 + 2 < core.wake_at() <= T0 + 3


# ---- a round that nobody believes -----------------------------------------------------------------------------------------------------

TALL = 10**6


def test_one_that_has_to_decline_another_as_too_far_behind_asks_itself_whether_anybody_believes_its_round() -> None:
    core = training(LOW, round=TALL)
    assert kinds(core.handle(f.Offered(HIGH, offer(round=20)), T0 + 3)) == ["Refuse"]
    others = (seen(HIGH, round=20, until=T0 + 90), seen(OTHER, round=22, until=T0 + 90))
    assert core.handle(f.Saw(0, others), T0 + 6) == [f.PublishOwn(22)]


def all_decline(core: Core, when: float) -> list[f.Decision]:
    """H steps are done, and whoever is asked for an exchange declines: our round is too high for it. What comes of the round."""
    orders = core.handle(f.Trained(), when)
    while any(isinstance(order, f.SendOffer) for order in orders):
        order = only(orders, f.SendOffer)
        assert isinstance(order, f.SendOffer)
        orders = core.handle(f.Ended(order.exchange, order.peer, Result("declined", "ahead"), 0.1), when)
    return orders


def test_a_state_whose_round_nobody_believes_goes_on_under_one_that_is_believed() -> None:
    core = training(LOW, round=TALL)  # got from a liar, say, who was the only one in sight
    others = (seen(HIGH, round=20, until=T0 + 90), seen(OTHER, round=22, until=T0 + 90))
    assert core.handle(f.Saw(0, others), T0 + 2) == [], "it is not asked before somebody objects"
    assert all_decline(core, T0 + 5) == [f.PublishOwn()]
    assert core.handle(f.Saw(0, others), T0 + 6) == [f.PublishOwn(22)]
    core.handle(f.Published(22, Digest(b"e" * 32)), T0 + 7)
    assert kinds(core.handle(f.Offered(HIGH, offer(round=20)), T0 + 8)) == ["Take"]
    assert core.counters.fetched == 0, "what it has learnt is kept"


@pytest.mark.parametrize(
    ("ours", "others"),
    [
        (TALL, (20,)),  # of two nobody can say who is right
        (TALL, (20, TALL)),  # most are with us
        (20, (20, TALL)),
        (60, (20, 20, 20)),  # within reach
        (60, (20, 20, TALL)),
    ],
)
def test_a_round_that_may_be_right_is_kept_whatever_somebody_says(ours: int, others: tuple[int, ...]) -> None:
    peers = (LOW, HIGH, OTHER)[: len(others)]
    core = training(*peers, round=ours)
    there = tuple(seen(peer, round=round, until=T0 + 90) for peer, round in zip(peers, others, strict=True))
    core.handle(f.Saw(0, there), T0 + 2)
    assert all_decline(core, T0 + 5) == [f.PublishOwn()]
    assert core.handle(f.Saw(0, there), T0 + 6) == []


def test_a_lowered_round_is_announced_at_once() -> None:
    core = training(LOW, round=TALL)
    announced = core.handle(f.Published(22, Digest(b"e" * 32)), T0 + 7)
    assert kinds(announced) == ["Announce"]


def test_who_is_sent_from_round_to_round_follows_ever_more_seldom_until_somebody_averages_with_it() -> None:
    core = training(LOW)

    def follows(round: int, when: float) -> bool:
        orders = core.handle(f.Saw(0, (seen(LOW, round=round, until=when + 20),)), when)
        if "Fetch" not in kinds(orders):
            return False
        core.handle(f.Published(round, Digest(b"e" * 32)), when)
        core.handle(f.FetchEnded(""), when)
        return True

    times = [second for second in range(0, 300, 10) if follows((second + 10) * 1000, T0 + 10 + second)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert len(gaps) >= 3
    assert all(later >= 2 * earlier for earlier, later in pairwise(gaps))
    core.handle(f.Offered(LOW, offer(round=core.round)), T0 + 900)
    core.handle(f.Ended(b"o" * 16, LOW, Result("merged"), 1.0), T0 + 901)
    assert follows(10**7, T0 + 910)
    assert follows(2 * 10**7, T0 + 950)


def test_an_offender_is_put_off_named_and_not_asked() -> None:
    core = training(LOW)
    take = only(core.handle(f.Offered(LOW, offer()), T0 + 5), f.Take)
    assert isinstance(take, f.Take)
    core.handle(f.Ended(take.exchange, LOW, Result("refused", "not finite", offence=True), 1.0), T0 + 6)
    assert "not finite" in core.last_refusal
    assert LOW[-6:] in core.last_refusal
    refusal = only(core.handle(f.Offered(LOW, offer()), T0 + 7), f.Refuse)
    assert isinstance(refusal, f.Refuse)
    assert (refusal.reason, refusal.retry_after_s > 10) == ("put-off", True)
    assert kinds(core.handle(f.Trained(), T0 + 8)) == ["PublishOwn"]


def test_a_peer_that_lets_its_exchanges_hang_is_declined_while_it_is_put_off() -> None:
    core, now = training(LOW, OTHER), T0 + 2
    for _ in range(2):  # forgiven
        take = only(core.handle(f.Offered(LOW, offer()), now), f.Take)
        assert isinstance(take, f.Take)
        core.handle(f.Ended(take.exchange, LOW, Result("late", "not complete"), 20.0), now + 20)
        now += 21
    refused = only(core.handle(f.Offered(LOW, offer()), now), f.Refuse)
    assert isinstance(refused, f.Refuse)
    assert refused.reason == "put-off"
    later = now + refused.retry_after_s + 0.1
    assert kinds(core.handle(f.Offered(OTHER, offer()), now)) == ["Take"]
    core.handle(f.Ended(offer().exchange, OTHER, Result("merged"), 1.0), now + 0.1)
    assert kinds(core.handle(f.Offered(LOW, offer()), later)) == ["Take"]


def test_a_one_sided_merge_counts_as_accepted_and_one_sided() -> None:
    core = training(LOW)
    take = only(core.handle(f.Offered(LOW, offer()), T0 + 5), f.Take)
    assert isinstance(take, f.Take)
    core.handle(f.Ended(take.exchange, LOW, Result("one_sided", "silence"), 1.0), T0 + 6)
    assert (core.counters.accepted, core.counters.one_sided) == (1, 1)


# ---- time and words -------------------------------------------------------------------------------------------------------------


def test_a_replica_that_is_far_beyond_what_it_said_says_so_before_the_next_refresh() -> None:
    """Else a joiner would take its state for that of a liar."""
    core = training(LOW)
    core.handle(f.Published(10, Digest(b"a" * 32)), T0 + 1.5)
    assert kinds(core.handle(f.Published(40, Digest(b"b" * 32)), T0 + 3)) == ["Announce"]
    assert kinds(core.handle(f.Published(80, Digest(b"c" * 32)), T0 + 3.5)) == []  # not more often than once a second
    assert kinds(core.handle(f.Published(81, Digest(b"d" * 32)), T0 + 4.1)) == ["Announce"]
    assert kinds(core.handle(f.Published(82, Digest(b"e" * 32)), T0 + 6)) == []


def test_every_refresh_announces_and_reads_again() -> None:
    core = training(LOW)
    refresh_s = core.settings.refresh_s
    decisions = core.handle(f.Tick(), T0 + 1 + refresh_s)
    assert {"Announce", "Read"} <= set(kinds(decisions))
    assert kinds(decisions)[-1] == "Announce", "what another process wrote under our identity is read before we write over it"
    assert core.handle(f.Tick(), T0 + 1.5 + refresh_s) == []
    assert T0 + 1 + refresh_s < core.wake_at() <= T0 + 1 + 2 * refresh_s


def test_our_block_is_read_before_our_record_is_renewed_though_it_was_read_out_of_turn() -> None:
    core = training(LOW)
    refresh_s = core.settings.refresh_s
    core.handle(f.Tick(), T0 + 1 + refresh_s)
    core.handle(f.Saw(0, (seen(LOW),)), T0 + 2 + refresh_s)
    core.handle(f.Offered(LOW, offer(round=5 + 2 * FAR_BEHIND_ROUNDS)), T0 + 1 + 1.5 * refresh_s)
    between = core.handle(f.Tick(), T0 + 2 + 1.5 * refresh_s)
    assert set(kinds(between)) == {"Read"}
    core.handle(f.Saw(0, (seen(LOW),)), T0 + 3 + 1.5 * refresh_s)
    renewing = core.handle(f.Tick(), T0 + 1 + 2 * refresh_s)
    assert kinds(renewing)[-1] == "Announce"
    assert 0 in {decision.block for decision in renewing if isinstance(decision, f.Read)}


def test_a_read_that_has_not_ended_is_not_begun_again() -> None:
    core = training(LOW)
    first = core.handle(f.Tick(), T0 + 100)
    assert 0 in {decision.block for decision in first if isinstance(decision, f.Read)}
    assert not any(isinstance(decision, f.Read) and decision.block == 0 for decision in core.handle(f.Tick(), T0 + 200))
    core.handle(f.Saw(0, ()), T0 + 201)
    assert any(isinstance(decision, f.Read) and decision.block == 0 for decision in core.handle(f.Tick(), T0 + 300))


def test_a_joiner_asks_for_no_tick_before_it_has_something_to_do() -> None:
    core = node()
    core.handle(f.Began(0, Digest(b"d" * 32), fresh=True), T0)
    core.handle(f.Saw(0, ()), T0 + 0.1)
    assert core.wake_at() >= T0 + 0.5, "nothing is left to decide until the second read"


def test_in_a_crowded_block_each_refresh_looks_up_few_keys_and_each_of_our_own_every_second_time() -> None:
    crowd = [seen(peer_id_of_key(hashlib.sha256(f"{n}".encode()).digest()), until=T0 + 100) for n in range(400)]
    core = training()
    core.handle(f.Saw(0, tuple(crowd)), T0 + 2)
    level = core.members.buckets(0, T0 + 2)
    assert level > 1
    own, reads = set(buckets.read(buckets.place_of(ME), level)), []
    for turn in range(1, 5):
        read = [d for d in core.handle(f.Tick(), T0 + 2 + 10 * turn) if isinstance(d, f.Read) and d.block == 0]
        core.handle(f.Saw(0, ()), T0 + 3 + 10 * turn)
        reads.append(set(read[0].buckets))
        assert 1 <= len(read[0].buckets) <= 2
    assert own <= reads[0] | reads[1]
    assert own <= reads[2] | reads[3]


def test_another_block_that_is_crowded_is_read_at_every_second_refresh_in_one_bucket() -> None:
    crowd = [seen(peer_id_of_key(hashlib.sha256(f"{n}".encode()).digest()), until=T0 + 100, block=1) for n in range(400)]
    core = training()
    core.handle(f.Saw(1, tuple(crowd)), T0 + 2)
    assert core.members.buckets(1, T0 + 2) > 1
    counts = []
    for turn in range(1, 5):
        read = [d for d in core.handle(f.Tick(), T0 + 2 + 10 * turn) if isinstance(d, f.Read) and d.block == 1]
        core.handle(f.Saw(1, ()), T0 + 3 + 10 * turn)
        counts.append([len(d.buckets) for d in read])
    assert counts in ([[1], [], [1], []], [[], [1], [], [1]])


def test_a_node_that_sees_nobody_says_isolated() -> None:
    core = training()
    assert core.waiting(T0 + 5)[0] == "training"
    phase, why, _, then = core.waiting(T0 + 60)
    assert phase == "isolated"
    assert "no other node" in why
    assert then


def test_a_host_that_nobody_has_joined_yet_is_not_isolated() -> None:
    core = training()
    core.settings = replace(core.settings, hosts=True)
    phase, why, _, _ = core.waiting(T0 + 60)
    assert phase == "training"
    assert "rounds are our own" in why


def test_every_phase_has_a_reason() -> None:
    core = node()
    assert core.waiting(T0) == ("starting", "the network and the block", 0.0, "look who holds what")
    core.handle(f.Began(0, Digest(b"d" * 32), fresh=True), T0)
    for fact in (f.Saw(0, (seen(LOW),)), f.FetchEnded(""), f.Trained(), f.Stopping()):
        core.handle(fact, T0 + 1)
        phase, why, seconds, then = core.waiting(T0 + 2)
        assert phase
        assert why
        assert then
        assert seconds >= 0


def test_leaving_announces_a_tombstone_and_declines_everything() -> None:
    core = training(LOW)
    farewell = only(core.handle(f.Stopping(), T0 + 5), f.Announce)
    assert isinstance(farewell, f.Announce)
    assert farewell.phase == "left"
    refusal = only(core.handle(f.Offered(LOW, offer()), T0 + 6), f.Refuse)
    assert isinstance(refusal, f.Refuse)
    assert refusal.reason == "stopping"


def test_the_same_facts_give_the_same_decisions() -> None:
    def story() -> list[f.Decision]:
        core = training(LOW, HIGH, OTHER)
        out = core.handle(f.Trained(), T0 + 5)
        out += core.handle(f.Offered(HIGH, offer()), T0 + 5.5)
        return out + core.handle(f.Tick(), T0 + 50)

    assert story() == story()
