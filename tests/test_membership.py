"""What a node knows of the others: whose word counts, who is avoided for how long, who is forgotten first, how all find each other."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol import buckets, ids, limits, membership
from blocktrain.protocol.ids import PeerId, RunId
from blocktrain.protocol.membership import Members
from blocktrain.protocol.records import Announcement, Seen

RUN = RunId(b"r" * 32)
NOW = 1_000_000.0
TTL = 30.0


def peer(number: int) -> PeerId:
    return ids.peer_id_of_key(hashlib.sha256(f"peer {number}".encode()).digest())


ME = peer(-1)
A, B, C, D = (peer(number) for number in range(4))


def seen(
    who: PeerId,
    block: int = 0,
    *,
    at: float = NOW,
    ttl: float = TTL,
    phase: str = "training",
    round: int = 5,
    digest: bytes = b"d",
    speed: float = 100.0,
) -> Seen:
    return Seen(who, Announcement(RUN, block, phase, round, digest * 32, speed, 0.0, 1, 1, ("/ip4/203.0.113.7/tcp/1",)), at + ttl)


@pytest.fixture
def members() -> Members:
    return Members(RUN, 3, ME)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Members:
    """Room for 20 peers only."""
    monkeypatch.setattr(limits, "MAX_MEMBERS", 20)
    return Members(RUN, 3, ME)


def names(members: Members, block: int = 0, now: float = NOW) -> set[PeerId]:
    return {member.peer for member in members.holders(block, now)}


# -- whose word counts


def test_an_announcement_makes_a_peer_a_holder_until_it_expires(members: Members) -> None:
    assert members.observe(seen(A), NOW)
    assert names(members) == {A}
    assert names(members, now=NOW + TTL - 0.1) == {A}
    assert names(members, now=NOW + TTL) == set()


def test_the_later_expiry_wins_whatever_the_order(members: Members) -> None:
    assert members.observe(seen(A, at=NOW + 5, round=6), NOW + 5)
    assert not members.observe(seen(A, round=5), NOW + 6)
    assert not members.observe(seen(A, at=NOW + 5, round=6), NOW + 6)
    assert [member.round for member in members.holders(0, NOW + 6)] == [6]
    assert members.observe(seen(A, at=NOW + 15, round=7), NOW + 15)
    assert [member.round for member in members.holders(0, NOW + 15)] == [7]


@pytest.mark.parametrize(
    "record",
    [
        seen(ME),
        Seen(A, dataclasses.replace(seen(A).announcement, run=RunId(b"x" * 32)), NOW + TTL),
        seen(A, block=3),
        seen(A, ttl=0.0),
        seen(A, ttl=-5.0),
        seen(A, ttl=limits.MAX_RECORD_LIFE_S + 0.1),
    ],
    ids=["our own", "another run", "no such block", "expired now", "expired before", "lives too long"],
)
def test_what_does_not_concern_us_is_ignored(members: Members, record: Seen) -> None:
    assert not members.observe(record, NOW)
    assert len(members) == 0


def test_a_member_says_what_it_announced_and_how_it_answered(members: Members) -> None:
    members.observe(seen(A, 2, round=9), NOW)
    (before,) = members.holders(2, NOW)
    assert (before.peer, before.block, before.round, before.digest, before.tokens_per_s) == (A, 2, 9, b"d" * 32, 100.0)
    assert (before.rtt_s, before.avoided_s, before.doubt_s, before.offender, before.trained) == (None, 0.0, 0.0, False, True)
    members.succeeded(A, NOW, 0.1)
    members.failed(A, NOW, "late")
    (after,) = members.holders(2, NOW)
    assert (after.rtt_s, after.avoided_s, after.doubt_s) == (0.1, 2.0, 2.0)


def test_who_left_is_gone_and_no_older_record_brings_it_back(members: Members) -> None:
    old = seen(A, ttl=TTL)
    members.observe(old, NOW)
    assert members.observe(seen(A, at=NOW + 1, phase="left"), NOW + 1)
    assert names(members, now=NOW + 1) == set()
    assert not members.observe(old, NOW + 2)
    assert not members.observe(seen(A, at=NOW + 0.5), NOW + 2)
    assert names(members, now=NOW + 2) == set()


def test_a_tombstone_seen_first_holds_against_the_older_record(members: Members) -> None:
    assert members.observe(seen(A, at=NOW + 1, phase="left"), NOW + 1)
    assert not members.observe(seen(A), NOW + 2)
    assert names(members, now=NOW + 2) == set()


def test_who_left_can_come_back_with_a_later_record(members: Members) -> None:
    members.observe(seen(A, phase="left"), NOW)
    assert members.observe(seen(A, at=NOW + 3), NOW + 3)
    assert names(members, now=NOW + 3) == {A}


def test_a_tombstone_is_forgotten_when_it_ends(members: Members) -> None:
    members.observe(seen(A, phase="left"), NOW)
    members.observe(seen(B, at=NOW + TTL + 1), NOW + TTL + 1)
    assert len(members) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 2, 0), (2, 1, 0), (1, 0, 2), (2, 0, 1)])
@pytest.mark.parametrize("left_at", [NOW + 1, NOW + 2], ids=["left before it announced", "left after"])
def test_a_peer_that_moved_counts_for_its_new_block_only_whatever_is_read_first(
    members: Members, order: tuple[int, ...], left_at: float
) -> None:
    words = [seen(A, 0), seen(A, 0, at=left_at, phase="left"), seen(A, 1, at=NOW + 1.5)]
    for index in order:
        members.observe(words[index], NOW + 2)
    assert members.coverage(NOW + 2, None) == (0, 1, 0)


def test_a_peer_restarted_with_another_block_counts_once(members: Members) -> None:
    members.observe(seen(A, 0), NOW)
    members.observe(seen(A, 1, at=NOW + 2), NOW + 2)
    members.observe(seen(A, 0), NOW + 3)
    assert members.coverage(NOW + 3, None) == (0, 1, 0)


def test_a_record_of_our_own_id_that_we_did_not_write_is_a_clash(members: Members) -> None:
    assert not members.clash(seen(ME), NOW + TTL)
    assert not members.clash(seen(ME, at=NOW - 10), NOW + TTL)  # an earlier one of ours, still in somebody's cache
    assert members.clash(seen(ME, at=NOW + 0.001), NOW + TTL)
    assert not members.clash(seen(A, at=NOW + 10), NOW + TTL)


# -- who is avoided


def test_a_peer_is_avoided_at_once_after_its_first_failed_call(members: Members) -> None:
    assert members.avoided(A, NOW) == 0
    members.failed(A, NOW, "no answer")
    assert members.avoided(A, NOW) == 2.0
    assert members.avoided(A, NOW + 1.5) == pytest.approx(0.5)
    assert members.avoided(A, NOW + 2.0) == 0
    assert members.why(A) == "no answer"
    assert members.why(B) == ""


def backoffs(members: Members, strike: Callable[[PeerId, float, str], None], times: int) -> list[float]:
    now, found = NOW, []
    for _ in range(times):
        strike(A, now, "again")
        found.append(members.avoided(A, now))
        now += found[-1]
    return found


def test_failures_in_a_row_double_the_back_off_up_to_a_minute(members: Members) -> None:
    assert backoffs(members, members.failed, 7) == pytest.approx([2, 4, 8, 16, 32, 60, 60])


def test_one_success_ends_the_back_off(members: Members) -> None:
    backoffs(members, members.failed, 4)
    members.succeeded(A, NOW + 100)
    assert members.avoided(A, NOW + 100) == 0
    members.failed(A, NOW + 100, "again")
    assert members.avoided(A, NOW + 100) == 2.0


def test_the_next_back_off_fades_while_nothing_happens(members: Members) -> None:
    now = NOW + sum(backoffs(members, members.failed, 5))  # the last one was 32 s
    members.failed(A, now + 60, "again")
    assert members.avoided(A, now + 60) == pytest.approx(32)
    members.failed(A, now + 3600, "again")
    assert members.avoided(A, now + 3600) == pytest.approx(2)


def test_calls_that_fail_together_count_as_one_failure(members: Members) -> None:
    for _ in range(5):
        members.failed(A, NOW, "stream ended")
    assert members.avoided(A, NOW) == 2.0


def test_breaking_the_agreement_bans_from_half_a_minute_up_to_an_hour(members: Members) -> None:
    assert backoffs(members, members.offended, 9) == pytest.approx([30, 60, 120, 240, 480, 960, 1920, 3600, 3600])


def test_no_success_lifts_a_ban(members: Members) -> None:
    members.offended(A, NOW, "held-out loss")
    members.succeeded(A, NOW + 1, 0.01)
    assert members.avoided(A, NOW + 1) == pytest.approx(29)
    assert members.offence_s(A, NOW + 1) == pytest.approx(29)
    assert members.why(A) == "held-out loss"


def test_an_offence_is_half_forgotten_every_hour(members: Members) -> None:
    now = NOW + sum(backoffs(members, members.offended, 4))  # the last one was 240 s
    members.offended(A, now + 2 * 3600, "again")
    assert members.avoided(A, now + 2 * 3600) == pytest.approx(120)


def test_a_failed_call_is_no_offence(members: Members) -> None:
    members.failed(A, NOW, "late")
    assert members.offence_s(A, NOW) == 0


def test_the_round_trip_time_is_a_moving_average(members: Members) -> None:
    members.observe(seen(A), NOW)
    for rtt_s in (0.1, 0.2, None, 0.2):
        members.succeeded(A, NOW, rtt_s)
    assert members.holders(0, NOW)[0].rtt_s == pytest.approx(0.14375)


def test_experience_outlives_a_record_that_ended(members: Members) -> None:
    members.observe(seen(A), NOW)
    members.succeeded(A, NOW, 0.1)
    members.offended(A, NOW, "lied")
    later = NOW + TTL + 60
    members.observe(seen(B, at=later), later)
    members.observe(seen(A, at=later), later)
    (member,) = (each for each in members.holders(0, later) if each.peer == A)
    assert member.rtt_s == 0.1
    members.offended(A, later, "lied")
    assert members.avoided(A, later) > 59


def test_we_never_avoid_ourselves(members: Members) -> None:
    members.failed(ME, NOW, "loop")
    members.offended(ME, NOW, "loop")
    members.succeeded(ME, NOW, 0.1)
    assert members.avoided(ME, NOW) == 0
    assert len(members) == 0


# -- views


def test_only_trained_holders_are_worth_taking_from(members: Members) -> None:
    members.observe(seen(A, round=0), NOW)
    members.observe(seen(B, phase="joining", round=7), NOW)
    members.observe(seen(C, phase="serving", round=7), NOW)
    assert names(members) == {A, B, C}
    assert [member.peer for member in members.holders(0, NOW, trained_only=True)] == [C]


def test_coverage_counts_replicas_with_ours_and_missing_names_the_blocks_without(members: Members) -> None:
    members.observe(seen(A, 0), NOW)
    members.observe(seen(B, 0), NOW)
    assert members.coverage(NOW, None) == (2, 0, 0)
    assert members.coverage(NOW, 1) == (2, 1, 0)
    assert members.missing(NOW, 1) == (2,)
    assert members.missing(NOW + TTL, 1) == (0, 2)
    assert [member.peer for member in members.everybody(NOW)] == [A, B]


def test_who_was_last_seen_is_known_after_the_record_ended(members: Members) -> None:
    assert members.last_seen(1) is None
    members.observe(seen(A, 1), NOW)
    members.observe(seen(B, 1, at=NOW + 4), NOW + 4)
    members.observe(seen(C, 1, at=NOW + 5, phase="left"), NOW + 5)
    members.observe(seen(D, 0, at=NOW + 100), NOW + 100)
    assert members.last_seen(1) == (B, NOW + 4)
    members.observe(seen(A, 1, at=NOW + 101), NOW + 101)
    members.succeeded(A, NOW + 110)
    assert members.last_seen(1) == (A, NOW + 110)


def test_a_claim_is_no_holder_until_it_is_one_and_moves_with_its_latest_word(members: Members) -> None:
    members.observe(seen(A, 0, phase="choosing", round=0), NOW)
    members.observe(seen(B, 0, at=NOW + 1, phase="choosing", round=0), NOW + 1)
    assert names(members) == set()
    assert members.last_seen(0) is None
    assert dict(members.choosers(NOW + 1)) == {A: 0, B: 0}
    members.observe(seen(A, 2, at=NOW + 2, phase="choosing", round=0), NOW + 2)
    members.observe(seen(A, 0, phase="choosing", round=0), NOW + 2)  # its older claim is still found under the other key
    assert dict(members.choosers(NOW + 2)) == {A: 2, B: 0}
    members.observe(seen(A, 2, at=NOW + 3, phase="joining", round=0), NOW + 3)
    members.observe(seen(B, 0, at=NOW + 3, phase="training"), NOW + 3)
    assert members.choosers(NOW + 3) == []
    assert (names(members, 0, NOW + 3), names(members, 2, NOW + 3)) == ({B}, {A})
    members.observe(seen(C, 1, phase="choosing"), NOW + 3)
    assert members.choosers(NOW + TTL) == []


def test_donors_are_the_peers_with_the_newest_round_that_agree_on_its_digest(members: Members) -> None:
    members.observe(seen(A, round=8, digest=b"x"), NOW)
    members.observe(seen(B, round=9, digest=b"y"), NOW)
    members.observe(seen(C, round=9, digest=b"z"), NOW)
    members.observe(seen(D, round=9, digest=b"y"), NOW)
    assert members.newest(0, NOW) == (9, sorted([B, D]))
    assert members.newest(1, NOW) == (0, [])


def test_untrained_joining_leaving_and_banned_peers_are_no_donors(members: Members) -> None:
    members.observe(seen(A, round=0), NOW)
    members.observe(seen(B, round=9, phase="joining"), NOW)
    members.observe(seen(C, round=9, phase="left"), NOW)
    members.observe(seen(D, round=9), NOW)
    assert members.newest(0, NOW) == (9, [D])
    members.offended(D, NOW, "wrong digest")
    assert members.newest(0, NOW) == (0, [])


def test_a_donor_that_failed_lately_is_asked_only_if_there_is_no_other(members: Members) -> None:
    members.observe(seen(A, round=9), NOW)
    members.observe(seen(B, round=8), NOW)
    members.failed(A, NOW, "late")
    assert members.newest(0, NOW) == (8, [B])
    members.failed(B, NOW, "late")
    assert members.newest(0, NOW) == (9, [A])


def test_a_tall_tale_about_rounds_is_not_followed_where_others_can_be_compared(members: Members) -> None:
    for who, number in ((A, 100), (B, 103), (C, 2**40)):
        members.observe(seen(who, round=number), NOW)
    assert members.newest(0, NOW) == (103, [B])


# -- bounds


def flood(members: Members, count: int, block: int = 0, *, start: int = 1000, now: float = NOW, phase: str = "training") -> None:
    for number in range(start, start + count):
        members.observe(seen(peer(number), block, at=now, phase=phase), now)


@pytest.mark.parametrize("phase", ["training", "left"])
def test_a_flood_of_fresh_identities_does_not_push_out_peers_we_talked_with(small: Members, phase: str) -> None:
    for who in (A, B, C):
        small.observe(seen(who), NOW)
        small.succeeded(who, NOW, 0.1)
    flood(small, 100, phase=phase)
    assert len(small) <= 20
    assert {A, B, C} <= names(small)


@pytest.mark.parametrize("flooded", [0, 1, 2])
def test_a_flood_on_one_block_leaves_the_strangers_of_the_others(small: Members, flooded: int) -> None:
    for who, block in ((A, 0), (B, 1), (C, 2)):
        small.observe(seen(who, block), NOW)
    flood(small, 100, flooded)
    assert sorted(small.coverage(NOW, None)) == [1, 1, 18]
    assert small.coverage(NOW, None)[flooded] == 18


def test_what_expired_is_forgotten_before_anything_that_lives(small: Members) -> None:
    flood(small, 10)
    flood(small, 10, 1, start=2000, now=NOW + 25)
    flood(small, 10, 2, start=3000, now=NOW + 35)
    assert small.coverage(NOW + 35, None) == (0, 10, 10)


def test_who_holds_nothing_is_forgotten_before_who_holds_something(small: Members) -> None:
    flood(small, 10)
    for number in range(10):
        small.failed(peer(number), NOW, "late")
    flood(small, 5, 1, start=2000)
    assert small.coverage(NOW, None) == (10, 5, 0)


def test_of_the_living_strangers_the_longest_silent_goes_first(small: Members) -> None:
    flood(small, 20)
    for number in range(1000, 1010):  # these announce themselves again
        small.observe(seen(peer(number), at=NOW + 5), NOW + 5)
    flood(small, 10, start=2000, now=NOW + 6)
    assert names(small, now=NOW + 6) == {peer(number) for number in (*range(1000, 1010), *range(2000, 2010))}


def test_where_all_are_friends_a_newcomer_is_not_remembered(small: Members) -> None:
    flood(small, 20)
    for number in range(1000, 1020):
        small.succeeded(peer(number), NOW)
    assert not small.observe(seen(A), NOW)
    small.failed(A, NOW, "late")
    assert small.avoided(A, NOW) == 0
    assert len(small) == 20


def test_friends_whose_records_ended_make_room_at_once(small: Members) -> None:
    flood(small, 20)
    for number in range(1000, 1020):
        small.succeeded(peer(number), NOW)
    assert not small.observe(seen(A, at=NOW + TTL - 1), NOW + TTL - 1)
    assert small.observe(seen(A, at=NOW + TTL + 1), NOW + TTL + 1)


def test_peers_met_only_in_calls_are_bounded_too(small: Members) -> None:
    for number in range(100):
        small.failed(peer(number), NOW, "late")
    assert len(small) == 20


def test_who_broke_the_agreement_is_a_friend_no_more(small: Members) -> None:
    small.observe(seen(A), NOW)
    small.succeeded(A, NOW)
    small.offended(A, NOW, "lied")
    flood(small, 20)
    assert A not in names(small)


def test_a_silent_friend_is_forgotten_in_the_end(members: Members) -> None:
    members.observe(seen(A), NOW)
    members.succeeded(A, NOW, 0.1)
    flood(members, 1, start=1, now=NOW + 300)
    assert len(members) == 2
    flood(members, 1, start=1, now=NOW + 700)
    assert len(members) == 1


def test_ten_thousand_identities_leave_a_bounded_memory() -> None:
    members = Members(RUN, 3, ME)
    flood(members, limits.MAX_MEMBERS + 1000)
    assert len(members) == limits.MAX_MEMBERS == sum(members.coverage(NOW, None))


numbers = st.integers(0, 40)
steps = st.lists(
    st.tuples(
        st.sampled_from(["observe", "observe", "observe", "succeeded", "failed", "offended"]),
        numbers,
        st.integers(0, 2),
        st.sampled_from(["choosing", "joining", "training", "left"]),
        st.floats(0.1, 40.0),
        st.floats(0.0, 8.0),
    ),
    max_size=120,
)


@given(steps)
def test_whatever_happens_the_views_agree_with_each_other_and_with_what_was_said(
    story: list[tuple[str, int, int, str, float, float]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "MAX_MEMBERS", 12)
        members, now, said = Members(RUN, 3, ME), NOW, set()
        for what, number, block, phase, ttl, wait in story:
            now += wait
            if what == "observe":
                word = seen(peer(number), block, at=now, ttl=ttl, phase=phase)
                members.observe(word, now)
                said.add(word)
            elif what == "succeeded":
                members.succeeded(peer(number), now, 0.1)
            else:
                getattr(members, what)(peer(number), now, "why")
            everybody = members.everybody(now)
            assert len(everybody) <= len(members) <= 12
            assert len({member.peer for member in everybody}) == len(everybody)
            assert sum(members.coverage(now, None)) == len(everybody)
            for member in everybody:
                assert member.expires_at > now
                assert member.phase not in ("left", "choosing")
                assert any((w.peer, w.announcement.block, w.expires_at) == (member.peer, member.block, member.expires_at) for w in said)


# -- buckets


places = st.integers(0, 2**32 - 1)
levels = st.sampled_from([1, 2, 4, 8, 16, 32, 64])


@given(places, places, levels, st.sampled_from([-1, 0, 1]))
def test_nodes_whose_levels_differ_by_one_step_find_each_other(writer: int, reader: int, level: int, step: int) -> None:
    """Every writer of the part of the tree for which a reader is responsible stands in a bucket that it reads for certain."""
    reads = min(64, max(1, level * 2 if step > 0 else level // 2 if step < 0 else level))
    coarser = min(level, reads)
    if buckets.number(writer, coarser) == buckets.number(reader, coarser):
        assert set(buckets.announced(writer, level)) & set(buckets.read(reader, reads))


@given(places, levels)
def test_buckets_of_different_levels_never_share_a_number_and_the_root_is_zero(place: int, level: int) -> None:
    assert buckets.number(place, level) in range(level - 1, 2 * level - 1)
    assert buckets.number(place, 1) == 0


def test_what_a_read_brought_is_known_as_soon_as_anybody_asks(members: Members) -> None:
    members.hear(1, [seen(peer(1), block=1), seen(peer(2), block=1, phase="left"), seen(peer(3), block=1)], NOW)
    assert names(members, 1) == {peer(1), peer(3)}
    members.hear(1, [seen(peer(1), block=1, phase="left", at=NOW + 1)], NOW + 1)
    assert members.coverage(NOW + 1, None)[1] == 1
    assert members.last_seen(1) == (peer(3), NOW)


def test_reads_that_nobody_asks_about_do_not_pile_up(members: Members) -> None:
    for second in range(50):
        members.hear(1, [seen(peer(second), block=1, at=NOW + second)], NOW + second)
    assert len(members) == membership.UNREAD_MOST
    assert peer(49) in names(members, 1, NOW + 49)


def test_a_small_swarm_uses_the_root_alone(members: Members) -> None:
    flood(members, 40)
    assert members.buckets(0, NOW) == 1
    assert members.to_announce(0, NOW) == [0]
    assert members.to_read(0, NOW, ME, random.Random(0)) == [0]


def test_the_number_of_buckets_grows_with_the_replicas_and_shrinks_late(members: Members) -> None:
    flood(members, 400)
    grown = members.buckets(0, NOW)
    assert grown in (8, 16)
    flood(members, 200, now=NOW + TTL)
    assert members.buckets(0, NOW + TTL) in (4, 8)
    assert members.buckets(0, NOW + 2 * TTL) == 1


def test_a_count_near_the_threshold_does_not_make_the_level_flap(members: Members) -> None:
    flood(members, buckets.GROW_ABOVE + 1)
    assert members.buckets(0, NOW) == 2
    flood(members, buckets.GROW_ABOVE - 5, now=NOW + TTL)
    assert members.buckets(0, NOW + TTL) == 2
    flood(members, buckets.PER_BUCKET - 1, now=NOW + 2 * TTL)
    assert members.buckets(0, NOW + 2 * TTL) == 1


def test_buckets_never_outnumber_their_bound() -> None:
    members = Members(RUN, 1, ME)
    crowd = [buckets.place_of(ME)] * 1000
    assert buckets.next_level(1, buckets.place_of(ME), crowd) == limits.MAX_BUCKETS
    assert members.buckets(0, NOW) == 1


def test_every_bucket_of_a_large_swarm_stays_small_and_nobody_writes_many() -> None:
    kept: dict[int, int] = {}
    writes = 0
    crowd = [buckets.place_of(peer(number)) for number in range(2000)]
    for place in crowd:
        for number in buckets.announced(place, 64):
            kept[number] = kept.get(number, 0) + 1
            writes += 1
    assert max(kept.values()) <= 4 * buckets.PER_BUCKET
    assert min(kept.get(number, 0) for number in range(63)) >= buckets.PER_BUCKET  # the root and all above the lowest level
    assert writes <= 3.2 * len(crowd)


def test_a_newcomer_comes_down_from_the_root_and_is_then_found() -> None:
    dht: dict[int, list[Seen]] = {}
    for number in range(2000):
        for bucket in buckets.announced(buckets.place_of(peer(number)), 64):
            dht.setdefault(bucket, []).append(seen(peer(number)))
    newcomer, rng = Members(RUN, 1, ME), random.Random(0)
    for _ in range(8):
        for bucket in newcomer.to_read(0, NOW, ME, rng):
            for word in dht[bucket]:
                newcomer.observe(word, NOW)
    assert newcomer.buckets(0, NOW) in (32, 64)
    mine = buckets.place_of(ME)
    neighbours = {peer(n) for n in range(2000) if buckets.number(buckets.place_of(peer(n)), 64) == buckets.number(mine, 64)}
    assert len(neighbours) > 10, "the case is worth nothing"
    assert neighbours <= names(newcomer)
    assert all(set(newcomer.to_announce(0, NOW)) & set(buckets.read(buckets.place_of(n), 64)) for n in neighbours)


def test_a_swarm_that_starts_together_settles_with_everybody_seeing_its_neighbours() -> None:
    dht: dict[int, dict[PeerId, Seen]] = {}
    swarm = [(peer(number), Members(RUN, 1, peer(number))) for number in range(150)]
    rng = random.Random(1)
    now = NOW
    for _ in range(6):
        now += limits.REFRESH_S
        for who, members in swarm:
            word = seen(who, at=now)
            for bucket in members.to_announce(0, now):
                dht.setdefault(bucket, {})[who] = word
        for who, members in swarm:
            for bucket in members.to_read(0, now, who, rng):
                for word in dht.get(bucket, {}).values():
                    members.observe(word, now)
    for who, members in swarm:
        assert members.buckets(0, now) in (2, 4, 8)
        mine = buckets.place_of(who)
        near = {other for other, _ in swarm if other != who and buckets.number(buckets.place_of(other), 8) == buckets.number(mine, 8)}
        assert near <= names(members, now=now)
