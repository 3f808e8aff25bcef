"""The rules of a sweep: positions, chance, what a step may ask, and what the client plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol import limits, sweep
from blocktrain.protocol.errors import Malformed
from blocktrain.protocol.messages import Scored, Step
from blocktrain.protocol.sweep import AUTOREGRESSIVE, ONE_SWEEP, SPECULATIVE, Continuation, Pace, Recall, Sampling, Shape

SHAPE = Shape(vocabulary=256, context=32, width=16, blocks=3)
ROW = SHAPE.row_bytes
PLAIN = Sampling(seed=7)


def test_the_context_is_everything_until_it_is_full_and_then_its_last_half_stays() -> None:
    assert [sweep.window_start(known, 32) for known in (1, 31, 32, 33, 48, 49, 64, 65)] == [0, 0, 0, 16, 16, 32, 32, 48]
    assert [sweep.room(known, 32) for known in (1, 32, 33, 48, 49)] == [31, 0, 15, 0, 15]


@given(known=st.integers(1, 5000), context=st.integers(2, 300))
def test_the_window_depends_on_the_position_alone_and_stands_still_for_its_room(known: int, context: int) -> None:
    start, room = sweep.window_start(known, context), sweep.room(known, context)
    assert context // 2 < known - start <= context or start == 0
    assert room >= 0
    assert sweep.window_start(known + room, context) == start
    assert sweep.window_start(known + room + 1, context) > start


def test_chance_is_the_same_on_every_machine_and_another_for_every_purpose() -> None:
    assert sweep.seed_at(1, 0) == 2247157375541907000
    assert sweep.uniform(1, 2, sweep.DRAW) == pytest.approx(0.05196254567817926, abs=0)
    values = {sweep.uniform(seed, position, purpose) for seed in range(5) for position in range(50) for purpose in range(4)}
    assert len(values) == 1000
    assert sum(values) / 1000 == pytest.approx(0.5, abs=0.03)
    assert sum(value < 0.1 for value in values) == pytest.approx(100, abs=30)


@given(st.lists(st.integers(0, 69_999), max_size=40))
def test_tokens_travel_in_one_byte_or_four(tokens: list[int]) -> None:
    large = replace(SHAPE, vocabulary=70_000)
    assert sweep.unpack_tokens(sweep.pack_tokens(tokens, large), large) == tokens
    small = [token % 256 for token in tokens]
    assert sweep.unpack_tokens(sweep.pack_tokens(small, SHAPE), SHAPE) == small
    assert len(sweep.pack_tokens(small, SHAPE)) == len(small)


def test_tokens_outside_the_vocabulary_or_cut_short_are_refused() -> None:
    with pytest.raises(Malformed, match="outside the vocabulary of 100"):
        sweep.unpack_tokens(bytes([99, 100]), replace(SHAPE, vocabulary=100))
    with pytest.raises(Malformed, match="whole tokens"):
        sweep.unpack_tokens(bytes(6), replace(SHAPE, vocabulary=1000))


# ---- what a holder refuses ------------------------------------------------------------------------------------------------------

FIRST = Step(sequence=0, position=4, rows=1, want=3, tokens=b"abc")
LATER = replace(FIRST, blocks=(0,))
WINDOW = Step(sequence=0, position=0, rows=1, want=3, tokens=b"abc\0\0", noisy=True)


def test_good_steps_become_work() -> None:
    work = sweep.check_step(FIRST, 0, SHAPE, block=1, cached=6)
    assert (work.tokens, work.length, work.cached, work.score_bytes, work.draft_rows) == ([97, 98, 99], 3, 7, 3 * ROW, 0)
    work = sweep.check_step(replace(FIRST, draft=2), 0, SHAPE, block=0, cached=4)
    assert (work.cached, work.draft_rows) == (9, 3)
    work = sweep.check_step(replace(LATER, drafted=2), 3 * ROW + 3 * ROW, SHAPE, block=1, cached=4)
    assert (work.cached, work.draft_rows) == (7, 3)
    work = sweep.check_step(WINDOW, 0, SHAPE, block=0, cached=0)
    assert (work.tokens, work.length, work.unknown, work.cached) == ([97, 98, 99], 3, 2, 3)
    work = sweep.check_step(replace(WINDOW, blocks=(0,)), 3 * ROW + 2 * 16 * 2, SHAPE, block=1, cached=0)
    assert work.unknown == 2
    work = sweep.check_step(Step(0, 0, 4, 2, b"abcdefgh"), 0, SHAPE, block=0, cached=9)
    assert (work.length, work.cached, work.score_bytes) == (2, 9, 8 * ROW)


@pytest.mark.parametrize(
    ("step", "body_bytes", "why"),
    [
        (replace(FIRST, tokens=b""), 0, "rows"),
        (replace(FIRST, position=0, rows=2), 0, "rows"),
        (replace(FIRST, position=1, rows=3, want=1), 0, "position 0"),
        (replace(FIRST, position=0, rows=3, want=1, draft=1), 0, "without drafts"),
        (replace(FIRST, position=6), 0, "only 5 are cached"),
        (replace(FIRST, position=5, tokens=bytes(28)), 0, "context has 32"),
        (replace(FIRST, position=5, tokens=bytes(20), draft=8, want=9), 0, "context has 32"),
        (replace(FIRST, want=4), 0, "4 positions wanted of 3"),
        (replace(FIRST, draft=1, want=5), 0, "5 positions wanted of 4"),
        (replace(FIRST, draft=3), 0, "what it drafts is wanted"),
        (replace(LATER, draft=2), 3 * ROW, "only the first holder"),
        (replace(FIRST, drafted=1), 0, "1 drafted tokens"),
        (replace(LATER, drafted=3), 7 * ROW, "3 drafted tokens"),
        (replace(LATER, blocks=(3,)), 3 * ROW, "of 3"),
        (replace(LATER, blocks=(0, 0)), 3 * ROW, "of 3"),
        (replace(LATER, blocks=(1,)), 3 * ROW, "block 1 is in the body already"),
        (FIRST, 1, "a body of 1 bytes where 0 are due"),
        (LATER, 0, f"where {3 * ROW} are due"),
        (LATER, 3 * ROW - 1, f"where {3 * ROW} are due"),
        (replace(LATER, drafted=2), 3 * ROW + 2 * ROW, f"where {6 * ROW} are due"),
        (replace(WINDOW, want=0), 0, "noisy window of 0"),
        (replace(WINDOW, want=5, tokens=b"\0\0\0\0"), 0, "5 positions wanted of 4"),
        (replace(WINDOW, blocks=(0,)), 3 * ROW, f"where {3 * ROW + 64} are due"),
        (replace(WINDOW, draft=1), 0, "only the first holder"),
        (replace(FIRST, position=0, rows=256, want=32, tokens=bytes(256 * 32)), 0, ""),
        (replace(FIRST, position=0, rows=256, want=248, tokens=bytes(256 * 248)), 0, "too many for one step"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_with_its_reason(step: Step, body_bytes: int, why: str) -> None:
    if not why:  # the largest that fits one frame exactly
        assert sweep.check_step(step, body_bytes, SHAPE, block=1, cached=5).score_bytes == limits.MAX_BODY_BYTES
        return
    with pytest.raises(Malformed, match=why):
        sweep.check_step(step, body_bytes, SHAPE, block=1, cached=5)


def test_a_body_that_no_frame_can_hold_is_refused() -> None:
    large = replace(SHAPE, vocabulary=1_000_000)
    step = Step(0, 0, 1, 2, sweep.pack_tokens([1, 2, 3], large))
    assert sweep.check_step(step, 0, large, block=0, cached=0).score_bytes == 4_000_000
    with pytest.raises(Malformed, match="do not fit one frame"):
        sweep.check_step(replace(step, want=3), 0, large, block=0, cached=0)
    with pytest.raises(Malformed, match="do not fit one frame"):
        sweep.check_step(replace(step, draft=1), 0, large, block=0, cached=0)


@given(
    step=st.builds(
        Step,
        sequence=st.just(0),
        position=st.integers(0, 40),
        rows=st.integers(1, 5),
        want=st.integers(0, 40),
        tokens=st.binary(max_size=40),
        draft=st.integers(0, 5),
        drafted=st.integers(0, 5),
        blocks=st.lists(st.integers(0, 4), max_size=3).map(tuple),
        noisy=st.booleans(),
    ),
    cached=st.integers(0, 32),
    off=st.sampled_from([0, 0, 0, 1]),
)
def test_whatever_passes_the_checks_fits_the_model(step: Step, cached: int, off: int) -> None:
    """The sizes of `body_bytes` are the right ones mostly, so that many steps pass."""
    body = step.rows * step.want * ROW + sweep.rows_of_draft(step.drafted) * ROW + (max(0, step.want - 1) * 32 if step.noisy else 0)
    try:
        work = sweep.check_step(step, (body if step.blocks else 0) + off, SHAPE, block=1, cached=cached)
    except Malformed:
        return
    assert off == 0
    assert len(work.tokens) == step.rows * work.length
    assert work.length >= 1
    assert step.position + work.length + work.unknown + step.draft <= SHAPE.context
    assert 0 <= work.cached <= SHAPE.context
    assert step.want <= work.length + work.unknown + step.draft


# ---- what a client plans --------------------------------------------------------------------------------------------------------


def test_a_prompt_rides_in_the_first_traversal_and_a_rejected_draft_is_cut_back() -> None:
    book = Continuation(SHAPE, b"hello")
    step = book.plan(SPECULATIVE, 4, PLAIN)
    assert (step.position, step.tokens, step.draft, step.want, step.sequence) == (0, b"hello", 4, 5, 0)
    book.settle(step, b"abX", 2)  # two drafts stayed, the third became X
    step = book.plan(SPECULATIVE, 4, PLAIN)
    assert (step.position, step.tokens, step.draft, step.want, step.sequence) == (7, b"X", 4, 5, 1)
    book.settle(step, b"cdefg", 4)  # all four stayed, and the token after them
    step = book.plan(AUTOREGRESSIVE, 9, PLAIN)
    assert (step.position, step.tokens, step.draft, step.want) == (12, b"g", 0, 1)


def test_an_empty_prompt_begins_after_a_newline_that_is_not_the_callers() -> None:
    book = Continuation(SHAPE, b"")
    assert book.plan(AUTOREGRESSIVE, 0, PLAIN).tokens == b"\n"
    assert book.shown == 0
    assert Continuation(SHAPE, b"\n").shown == 1
    assert Shape(5, 32, 16, 3).start_token == 4


def test_a_window_of_unknown_tokens_is_recomputed_once_they_are_known() -> None:
    book = Continuation(SHAPE, b"hello")
    step = book.plan(ONE_SWEEP, 3, PLAIN, substeps=2)
    assert (step.tokens, step.want, step.draft, step.noisy, step.substeps) == (b"hello\0\0\0", 4, 0, True, 2)
    book.settle(step, b"wxyz", 0)
    step = book.plan(ONE_SWEEP, 2, PLAIN)
    assert (step.position, step.tokens, step.want) == (5, b"wxyz\0\0", 3)
    assert not book.plan(ONE_SWEEP, 0, PLAIN).noisy


def test_no_step_looks_past_its_window_and_a_new_window_begins_with_empty_caches() -> None:
    book = Continuation(SHAPE, bytes(range(30)))
    step = book.plan(SPECULATIVE, 8, PLAIN)
    assert (step.draft, step.want) == (2, 3)
    book.settle(step, (100, 101, 102), 2)  # 33 tokens now
    step = book.plan(SPECULATIVE, 8, PLAIN)
    assert (step.position, step.tokens, step.draft) == (0, bytes([*range(16, 30), 100, 101, 102]), 8)
    other = Continuation(SHAPE, bytes([*range(30), 100, 101, 102])).plan(AUTOREGRESSIVE, 0, PLAIN)
    assert (other.tokens, other.seed) == (step.tokens, step.seed)
    assert step.seed != sweep.seed_at(7, 0)


def test_a_full_context_has_no_room_for_drafts() -> None:
    step = Continuation(SHAPE, bytes(32)).plan(SPECULATIVE, 8, PLAIN)
    assert (step.draft, step.want, len(step.tokens)) == (0, 1, 32)


def test_a_speculative_step_always_drafts_where_it_can_so_that_no_token_depends_on_the_width() -> None:
    assert Continuation(SHAPE, b"a").plan(SPECULATIVE, 0, PLAIN).draft == 1


def test_widths_are_cut_to_what_a_frame_holds() -> None:
    large = replace(SHAPE, vocabulary=300_000, context=512)
    step = Continuation(large, [1, 2]).plan(SPECULATIVE, 100, PLAIN)
    assert (step.want, step.draft) == (3, 2)
    assert sweep.check_step(step, 0, large, block=0, cached=0).draft_rows == 3
    assert Continuation(large, [1, 2]).plan(ONE_SWEEP, 31, PLAIN).want == 6


def test_a_context_that_no_step_can_carry_is_filled_in_parts() -> None:
    long = Shape(vocabulary=100_000, context=20_000, width=16, blocks=2)
    book = Continuation(long, list(range(18_000)))
    steps = [book.plan(SPECULATIVE, 4, PLAIN)]
    book.settle(steps[0], (), 0)
    steps.append(book.plan(SPECULATIVE, 4, PLAIN))
    assert [(step.want, step.draft, step.position) for step in steps] == [(0, 0, 0), (5, 4, 16_384)]
    sent = [token for step in steps for token in sweep.unpack_tokens(step.tokens, long)]
    assert sent == list(range(18_000))


def test_the_last_holder_hands_the_drafted_tokens_to_the_client() -> None:
    step = Step(3, 5, 1, 3, b"xab", drafted=2, blocks=(0, 1), compute_s=0.5)
    assert sweep.scored(step, SHAPE) == Scored(3, 3, 2, b"ab", (0, 1), 0.5)
    assert sweep.scored(replace(step, drafted=0), SHAPE).tokens == b""


def test_a_lost_cache_is_filled_from_what_was_sent_and_drafted() -> None:
    recall = Recall(SHAPE)
    first = Step(0, 0, 1, 3, b"hello", draft=2)
    recall.note(first, b"ab")
    after = Step(1, 6, 1, 2, b"X", draft=1)  # "b" was rejected
    assert recall.again(after) == [replace(after, position=0, tokens=b"helloaX")]
    recall.note(after, b"c")
    window = Step(2, 8, 1, 3, b"Y\0\0", noisy=True)
    assert recall.again(window)[0].tokens == b"helloaXcY\0\0"
    recall.note(window)
    assert recall.again(Step(3, 9, 1, 1, b"Z"))[0].tokens == b"helloaXcYZ"
    assert recall.again(first) == [first]


def test_drafts_need_room_in_the_step_that_carries_them_on() -> None:
    long = Shape(vocabulary=100_000, context=20_000, width=16, blocks=2)
    step = Continuation(long, [1] * 16_380).plan(SPECULATIVE, 5, PLAIN)
    assert (step.want, len(step.tokens)) == (0, 4 * 16_379)
    step = Continuation(long, [1] * 16_379).plan(SPECULATIVE, 5, PLAIN)
    assert step.draft == 5
    with pytest.raises(Malformed, match="no room for 6 drafted"):
        sweep.check_step(replace(step, draft=6, want=7), 0, long, block=0, cached=0)


def test_a_lost_cache_longer_than_a_step_is_filled_in_parts() -> None:
    long = Shape(vocabulary=100_000, context=40_000, width=16, blocks=2)
    recall, tokens = Recall(long), list(range(35_000))
    for begin in range(0, 35_000, 5_000):
        recall.note(Step(0, begin, 1, 0, sweep.pack_tokens(tokens[begin : begin + 5_000], long)))
    last = Step(1, 35_000, 1, 2, sweep.pack_tokens([7, 8], long), draft=1)
    steps = recall.again(last)
    assert [(step.position, step.want, step.draft) for step in steps] == [(0, 0, 0), (16_384, 0, 0), (32_768, 2, 1)]
    assert [token for step in steps for token in sweep.unpack_tokens(step.tokens, long)] == [*tokens, 7, 8]


# ---- how many to draft ----------------------------------------------------------------------------------------------------------


def paced(kept: int, *, network_s: float, traversals: int = 30) -> int:
    """The width after traversals that drafted 8, each kept `kept`, over a chain of 3 blocks with 2 ms a pass."""
    pace, compute_s = Pace(), 0.002 * 11
    for _ in range(traversals):
        pace = pace.after(Step(0, 1, 1, 9, b"a", draft=8), kept, blocks=3, seconds=network_s + compute_s, compute_s=compute_s)
    return pace.width(3, 8)


def test_the_draft_grows_with_acceptance_and_with_the_distance() -> None:
    assert Pace().width(3, 8) == 8
    near, far = paced(7, network_s=0.002), paced(7, network_s=0.2)
    assert 3 <= near <= 8 < far
    assert paced(0, network_s=0.2) == 1
    assert paced(8, network_s=0.2) == Pace().widest
    assert paced(1, network_s=0.1) < paced(5, network_s=0.1) < paced(7, network_s=0.1)


def test_a_first_traversal_teaches_acceptance_but_no_times() -> None:
    pace = Pace().after(Step(0, 0, 1, 9, b"long prompt", draft=8), 8, blocks=3, seconds=5.0, compute_s=1.0)
    assert pace.network_s is None
    assert pace.hits > Pace().hits * Pace.FADE
    assert pace.after(Step(1, 9, 1, 1, b"a"), 0, blocks=3, seconds=1.0, compute_s=0.1) == pace
