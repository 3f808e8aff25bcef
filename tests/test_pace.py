"""τ follows what exchanges really take, within what the node's settings allow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol.exchange import MIN_TAU_S, PACE_FACTOR, PACE_FIRST, PACE_KEPT, PACE_LATES, PACE_PEERS, Pace
from blocktrain.protocol.ids import PeerId

PEER, OTHER, SLOW = PeerId("peer"), PeerId("other"), PeerId("slow")


def used(pace: Pace, *took_s: float, peer: PeerId = PEER) -> Pace:
    for each in took_s:
        pace.ended(peer, "merged", each)
    return pace


def test_it_begins_with_what_the_settings_say_and_adapts_after_a_few() -> None:
    pace = used(Pace(60.0), *[2.0] * (PACE_FIRST - 1))
    assert pace.tau_s(PEER) == 60.0
    assert used(pace, 2.0).tau_s(PEER) == PACE_FACTOR * 2.0


def test_the_slowest_of_the_last_few_counts() -> None:
    pace = used(Pace(60.0), 9.0, *[2.0] * (PACE_KEPT - 1))
    assert pace.tau_s(PEER) == PACE_FACTOR * 9.0
    assert used(pace, 2.0).tau_s(PEER) == PACE_FACTOR * 2.0


def test_a_link_that_became_slow_gets_its_time_again() -> None:
    pace = used(Pace(60.0), *[2.0] * PACE_KEPT)
    waits = []
    for number in range(4):
        peer = PeerId(f"peer {number}")
        pace.ended(peer, "late", pace.tau_s(peer))
        waits.append(pace.tau_s(OTHER))
    assert waits == [16.0, 32.0, 60.0, 60.0]
    assert used(pace, 12.0).tau_s(OTHER) == PACE_FACTOR * 12.0


def test_a_slow_peer_keeps_its_time_though_others_are_quick() -> None:
    pace = used(Pace(60.0), *[2.0] * PACE_KEPT)
    used(pace, 12.0, peer=SLOW)
    used(pace, *[2.0] * PACE_KEPT)
    assert pace.tau_s(PEER) == PACE_FACTOR * 2.0
    assert pace.tau_s(SLOW) == PACE_FACTOR * 12.0
    used(pace, 3.0, peer=SLOW)
    assert used(pace, *[2.0] * PACE_KEPT).tau_s(SLOW) == PACE_FACTOR * 3.0


def test_a_slow_peer_gets_more_after_each_late_one_though_others_come_between_and_not_without_end() -> None:
    pace = used(Pace(600.0), *[2.0] * PACE_KEPT)
    waits = []
    for _ in range(2 * (PACE_LATES + 1)):
        waits.append(pace.tau_s(SLOW))
        pace.ended(SLOW, "late", waits[-1])
        used(pace, 2.0)
        assert pace.tau_s(PEER) == PACE_FACTOR * 2.0
    assert waits == [8.0, 16.0, 32.0] * 2


def test_it_remembers_a_bounded_number_of_peers() -> None:
    pace = used(Pace(60.0), 12.0, peer=SLOW)
    for number in range(PACE_PEERS):
        used(pace, 2.0, peer=PeerId(f"peer {number}"))
    assert pace.tau_s(SLOW) == pace.tau_s(OTHER) == PACE_FACTOR * 2.0


def test_what_was_refused_lost_or_declined_tells_nothing() -> None:
    pace = used(Pace(60.0), *[2.0] * PACE_KEPT)
    for kind in ("refused", "lost", "declined"):
        pace.ended(PEER, kind, 1000.0)
    assert pace.tau_s(PEER) == PACE_FACTOR * 2.0


@given(
    st.floats(0.1, 1e4),
    st.lists(
        st.tuples(st.sampled_from((PEER, OTHER)), st.sampled_from(("merged", "one_sided", "late", "lost")), st.floats(0, 1e6)), max_size=60
    ),
)
def test_it_stays_within_bounds(most_s: float, ends: list[tuple[PeerId, str, float]]) -> None:
    pace = Pace(most_s)
    for peer, kind, took_s in ends:
        pace.ended(peer, kind, took_s)
        assert min(MIN_TAU_S, most_s) <= pace.tau_s(OTHER) <= most_s
