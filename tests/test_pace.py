"""τ follows what exchanges really take, within what the node's settings allow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol.exchange import MIN_TAU_S, PACE_FACTOR, PACE_FIRST, PACE_KEPT, Pace


def used(pace: Pace, *took_s: float) -> Pace:
    for each in took_s:
        pace.ended("merged", each)
    return pace


def test_it_begins_with_what_the_settings_say_and_adapts_after_a_few() -> None:
    pace = used(Pace(60.0), *[2.0] * (PACE_FIRST - 1))
    assert pace.tau_s == 60.0
    assert used(pace, 2.0).tau_s == PACE_FACTOR * 2.0


def test_the_slowest_of_the_last_few_counts() -> None:
    pace = used(Pace(60.0), 9.0, *[2.0] * (PACE_KEPT - 1))
    assert pace.tau_s == PACE_FACTOR * 9.0
    assert used(pace, 2.0).tau_s == PACE_FACTOR * 2.0


def test_a_link_that_became_slow_gets_its_time_again() -> None:
    pace = used(Pace(60.0), *[2.0] * PACE_KEPT)
    waits = []
    for _ in range(4):
        pace.ended("late", pace.tau_s)
        waits.append(pace.tau_s)
    assert waits == [16.0, 32.0, 60.0, 60.0]
    assert used(pace, 12.0).tau_s == PACE_FACTOR * 12.0


def test_what_was_refused_lost_or_declined_tells_nothing() -> None:
    pace = used(Pace(60.0), *[2.0] * PACE_KEPT)
    for kind in ("refused", "lost", "declined"):
        pace.ended(kind, 1000.0)
    assert pace.tau_s == PACE_FACTOR * 2.0


@given(st.floats(0.1, 1e4), st.lists(st.tuples(st.sampled_from(("merged", "one_sided", "late", "lost")), st.floats(0, 1e6)), max_size=60))
def test_it_stays_within_bounds(most_s: float, ends: list[tuple[str, float]]) -> None:
    pace = Pace(most_s)
    for kind, took_s in ends:
        pace.ended(kind, took_s)
        assert min(MIN_TAU_S, most_s) <= pace.tau_s <= most_s
