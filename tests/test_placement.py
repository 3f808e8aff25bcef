"""Which block needs a node most: by throughput, evenly for crowds, and never a block's last holder gone to help another."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol import ids
from blocktrain.protocol.ids import PeerId
from blocktrain.protocol.membership import Member
from blocktrain.protocol.placement import Mover, divide, surplus

NOW = 1_000_000.0


def peer(number: int) -> PeerId:
    return ids.peer_id_of_key(hashlib.sha256(f"peer {number}".encode()).digest())


ME = peer(-1)


def holder(number: int, block: int, speed: float = 100.0, phase: str = "training") -> Member:
    return Member(peer(number), block, phase, 5, b"d" * 32, speed, 0.0, (), NOW + 30, None, 0.0, 0.0, False)


def held(*counts: int, speed: float = 100.0) -> list[Member]:
    """So many holders of each block."""
    return [holder(1000 * block + number, block, speed) for block, count in enumerate(counts) for number in range(count)]


def most_needed(blocks: int, holders: list[Member], me: PeerId) -> int:
    return divide(blocks, holders, [], me)


# ---- a block to start with --------------------------------------------------------------------------------------------------------------


def test_the_block_most_in_need_has_the_least_throughput_not_the_fewest_replicas() -> None:
    holders = [holder(1, 0, 1000), holder(2, 1, 300), holder(3, 1, 300), holder(4, 2, 900)]
    assert most_needed(3, holders, ME) == 1


def test_who_has_not_told_its_speed_yet_counts_with_the_median() -> None:
    for phase in ("joining", "training"):
        holders = [holder(1, 0, 1000), holder(2, 1, 900), holder(3, 2, 0, phase)]
        assert most_needed(3, holders, ME) == 1  # 1000, 900, and 950 for the one that does not say


def test_who_only_serves_trains_nothing_but_is_a_holder() -> None:
    assert most_needed(2, [holder(1, 0), holder(2, 1, 500, "serving")], ME) == 1
    assert most_needed(3, [holder(1, 0), holder(2, 1, 500, "serving")], ME) == 2  # held by nobody


def test_where_nobody_trains_all_count_alike_whether_they_serve_already_or_only_join() -> None:
    holders = [holder(1, 0, 0, "serving"), holder(2, 0, 0, "serving"), holder(3, 1, 0, "joining"), holder(4, 1, 500, "serving")]
    assert most_needed(3, [*holders, holder(5, 2, 0, "joining")], ME) == 2
    assert most_needed(3, [*holders, holder(5, 2, 0, "serving")], ME) == 2
    assert surplus(2, holders[:3], 0, ME, 1, NOW + 9) is None  # 2, 2


def test_equal_throughput_is_decided_by_fewer_replicas_and_then_spreads_a_crowd() -> None:
    holders = [holder(1, 0, 400), holder(2, 1, 200), holder(3, 1, 200), holder(4, 2, 400)]
    assert {most_needed(3, holders, peer(number)) for number in range(20)} == {0, 2}
    assert {most_needed(3, [], peer(number)) for number in range(40)} == {0, 1, 2}


def test_a_tall_tale_about_speed_does_not_keep_helpers_away() -> None:
    holders = [holder(1, 0, 1e12), *(holder(number, 1 + number % 2, 200) for number in range(10, 32))]
    assert most_needed(3, holders, ME) == 0


# ---- many who choose at once ------------------------------------------------------------------------------------------------------------


def everybodys(blocks: int, holders: list[Member], choosers: list[PeerId]) -> dict[PeerId, int]:
    return {me: divide(blocks, holders, [peer for peer in choosers if peer != me], me) for me in choosers}


def counts(blocks: int, holders: list[Member], given: dict[PeerId, int]) -> list[int]:
    return [sum(m.block == block for m in holders) + sum(b == block for b in given.values()) for block in range(blocks)]


@given(st.integers(1, 6), st.integers(1, 20))
def test_a_crowd_is_divided_evenly_and_everybody_finds_the_same(blocks: int, count: int) -> None:
    choosers = [peer(number) for number in range(count)]
    given = everybodys(blocks, [], choosers)
    assert max(counts(blocks, [], given)) - min(counts(blocks, [], given)) <= 1
    assert everybodys(blocks, [], random.Random(1).sample(choosers, count)) == given


@given(st.data())
def test_who_of_a_crowd_has_committed_already_changes_nothing_for_the_others(data: st.DataObject) -> None:
    blocks = data.draw(st.integers(1, 6), label="blocks")
    choosers = [peer(number) for number in range(data.draw(st.integers(1, 14), label="choosers"))]
    before = data.draw(st.lists(st.tuples(st.integers(0, blocks - 1), st.sampled_from([100.0, 250.0, 1000.0]))), label="holders")
    holders = [holder(100 + number, block, speed) for number, (block, speed) in enumerate(before)]
    final = everybodys(blocks, holders, choosers)
    done = data.draw(st.sets(st.sampled_from(choosers)), label="committed")
    promises = [holder(0, final[each], 0, "joining")._replace(peer=each) for each in done]
    rest = [each for each in choosers if each not in done]
    assert everybodys(blocks, [*holders, *promises], rest) == {each: final[each] for each in rest}


def test_a_hole_is_filled_before_anything_is_evened_out() -> None:
    holders = [holder(1, 0, 0, "serving"), holder(2, 1, 10_000)]
    assert divide(3, holders, [], ME) == 2
    assert sorted(everybodys(3, holders, [peer(20), peer(21)]).values()) == [0, 2]


def test_choosers_even_out_throughput_around_holders_of_any_speed() -> None:
    holders = [*held(1, speed=300), holder(7, 1, 100), holder(8, 2, 100)]
    final = everybodys(3, holders, [peer(20 + number) for number in range(4)])
    assert sorted(final.values()) == [1, 1, 2, 2]


def test_a_flood_of_claims_is_reckoned_with_up_to_a_bound() -> None:
    flood = [peer(number) for number in range(600)]
    assert divide(3, [], flood, ME) in range(3)


def promise(number: int, block: int, until: float) -> Member:
    return holder(number, block, 0, "joining")._replace(expires_at=until)


def test_of_a_block_that_got_too_many_the_last_to_commit_goes_to_the_neediest() -> None:
    crowd = [promise(1, 0, NOW + 1), promise(2, 0, NOW + 2), promise(3, 1, NOW + 3), promise(4, 1, NOW + 3), promise(5, 2, NOW + 3)]
    assert surplus(3, crowd, 0, ME, 0, NOW + 9) == 2  # 3, 2, 1
    assert surplus(3, crowd, 0, ME, 0, NOW + 1.5) is None  # somebody committed later: that one goes
    assert surplus(3, crowd, 0, ME, 1, NOW + 9) == 2  # 2, 3, 1
    assert surplus(3, crowd, 0, ME, 2, NOW + 9) is None  # 2, 2, 2
    assert surplus(3, crowd, 1, ME, 0, NOW + 9) is None  # somebody still chooses, and will fill the gap
    assert surplus(3, crowd[:4], 1, ME, 0, NOW + 9) == 2  # nobody holds it, and one alone will choose it
    assert surplus(3, crowd[:2], 0, ME, 0, NOW + 9) in (1, 2)


def test_who_holds_a_block_already_does_not_go_for_a_newcomer() -> None:
    crowd = [holder(1, 0), holder(2, 0), holder(3, 1)._replace(expires_at=NOW + 99), holder(4, 1)]
    assert surplus(3, crowd, 0, ME, 0, NOW + 9) == 2


# ---- moving -----------------------------------------------------------------------------------------------------------------------------


def mover(me: PeerId = ME, block: int = 0) -> Mover:
    return Mover(me, block, 3, ttl_s=30, refresh_s=10)


def first_move(moves: Mover, holders: list[Member], until: float = 2000.0) -> tuple[float, int] | None:
    """When it would move, and where."""
    for second in range(0, int(until), 10):
        if (target := moves.consider(holders, NOW + second)) is not None:
            return float(second), target
    return None


def test_a_block_that_nobody_holds_for_two_lives_of_a_record_is_helped() -> None:
    assert first_move(mover(), held(1, 1, 0)) in ((60.0, 2), (90.0, 2))  # ours has two: us and another


def test_a_blocks_last_holder_stays_and_so_does_a_pair_that_would_leave_a_single_one_for_another_single_one() -> None:
    assert first_move(mover(), held(0, 1, 0)) is None
    assert first_move(mover(), held(1, 1, 1)) is None
    assert first_move(mover(), held(2, 1, 3)) is None
    assert first_move(mover(), held(3, 1, 2)) is not None  # four of ours, one of theirs


def test_a_node_that_sees_nobody_does_not_wander() -> None:
    assert first_move(mover(), []) is None


def test_a_restart_is_no_danger() -> None:
    moves = mover()
    for second in range(0, 1000, 10):
        gone = second % 50 != 0  # back every 50 s
        assert moves.consider(held(2, 1, 0 if gone else 1), NOW + second) is None


def test_of_many_that_could_move_one_goes_first_and_the_others_then_stay() -> None:
    everybody = [holder(number, 0) for number in range(5)] + [holder(9, 1)]
    times = {}
    for number in range(5):
        others = [member for member in everybody if member.peer != peer(number)]
        found = first_move(mover(peer(number)), others)
        assert found is not None
        times[number] = found[0]
    assert sorted(times.values()) == [60, 90, 120, 150, 180]
    first = min(times, key=times.__getitem__)
    after = [holder(first, 2, 0, "joining") if member.peer == peer(first) else member for member in everybody]
    for number in set(range(5)) - {first}:
        moves = mover(peer(number))
        others = [member for member in everybody if member.peer != peer(number)]
        for second in range(0, 70, 10):
            assert moves.consider(others, NOW + second) is None
        for second in range(70, 1000, 10):
            seen = [member for member in after if member.peer != peer(number)]
            target = moves.consider(seen, NOW + second)
            assert target in (None, 1)  # block 2 is no emergency any more; the singles among four are another matter


def test_the_fullest_block_gives_first() -> None:
    holders = held(3, 5, 0)
    slow, quick = first_move(mover(block=0), holders), first_move(mover(block=1), holders)
    assert slow is not None
    assert quick is not None
    assert quick[0] < slow[0]


@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 2, 2), (9, 10, 10), (2, 1, 9)])
def test_where_no_block_is_in_danger_nobody_moves(counts: tuple[int, ...]) -> None:
    assert first_move(mover(), held(*counts)) is None
