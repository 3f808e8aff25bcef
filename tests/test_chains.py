"""Chains: one peer per block, the nearest and freshest that can be trusted, and somebody else when it fails."""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol import chains, ids
from blocktrain.protocol.chains import Chain, Hop, cheaper_route, plan, replace
from blocktrain.protocol.errors import NoPeers
from blocktrain.protocol.ids import NO_DIGEST, PeerId, RunId, short
from blocktrain.protocol.membership import Members
from blocktrain.protocol.records import Announcement, Seen

RUN = RunId(b"r" * 32)
NOW = 1_000_000.0
ROUND = 100


def peer(number: int) -> PeerId:
    return ids.peer_id_of_key(hashlib.sha256(f"peer {number}".encode()).digest())


ME = peer(-1)
A, B, C, D, E = (peer(number) for number in range(5))


def add(
    members: Members,
    who: PeerId,
    block: int,
    *,
    rtt_s: float | None = None,
    phase: str = "training",
    round: int = ROUND,
    digest: bytes = b"d",
    load: float = 0.0,
) -> None:
    word = Announcement(RUN, block, phase, round, digest * 32, 100.0, load, 1, 1, (f"/ip4/203.0.113.7/tcp/{1 + block}",))
    assert members.observe(Seen(who, word, NOW + 30), NOW)
    if rtt_s is not None:
        members.succeeded(who, NOW, rtt_s)


@pytest.fixture
def members() -> Members:
    return Members(RUN, 3, ME)


@pytest.fixture
def pair(members: Members) -> Members:
    """Two holders of block 1, A and B, 100 ms away, and one each of the others, C and D."""
    for who, block in ((C, 0), (A, 1), (B, 1), (D, 2)):
        add(members, who, block, rtt_s=0.1)
    return members


def choices(members: Members, block: int = 1, times: int = 200, now: float = NOW) -> Counter[PeerId]:
    rng = random.Random(0)
    return Counter(plan(members, 3, now, rng).hop(block).peer for _ in range(times))


# -- plan


def test_a_chain_has_one_holder_for_every_block_in_order(pair: Members) -> None:
    chain = plan(pair, 3, NOW, random.Random(0))
    assert [hop.block for hop in chain.hops] == [0, 1, 2]
    assert chain.peers[0::2] == (C, D)
    assert chain.peers[1] in (A, B)
    assert chain.missing == ()
    assert chain.hop(2) == Hop(2, D, ROUND, b"d" * 32, 0.1, ("/ip4/203.0.113.7/tcp/3",))
    with pytest.raises(KeyError):
        chain.hop(3)


def test_the_same_seed_gives_the_same_chain(pair: Members) -> None:
    assert plan(pair, 3, NOW, random.Random(7)) == plan(pair, 3, NOW, random.Random(7))


def test_equal_holders_share_the_work_instead_of_the_first_seen_getting_all(pair: Members) -> None:
    counts = choices(pair)
    assert min(counts[A], counts[B]) > 60


def test_the_nearer_holder_is_preferred(pair: Members) -> None:
    for _ in range(20):
        pair.succeeded(A, NOW, 0.02)
    assert choices(pair) == {A: 200}


def test_a_loaded_holder_is_left_to_others(members: Members) -> None:
    for who, block, load in ((C, 0, 0.0), (A, 1, 20.0), (B, 1, 0.0), (D, 2, 0.0)):
        add(members, who, block, rtt_s=0.1, load=load)
    assert choices(members) == {B: 200}


def test_a_holder_that_failed_lately_is_avoided_then_doubted_then_trusted_again(pair: Members) -> None:
    for at in (NOW, NOW + 2, NOW + 6):
        pair.failed(A, at, "late")
    assert choices(pair, now=NOW + 6) == {B: 200}
    after = NOW + 14.1
    assert pair.avoided(A, after) == 0
    assert choices(pair, now=after) == {B: 200}
    pair.succeeded(A, after)
    assert choices(pair, now=after)[A] > 60


def test_a_holder_never_called_is_worth_trying_against_a_slow_one(members: Members) -> None:
    for who, block, rtt_s in ((C, 0, 0.1), (A, 1, 0.4), (B, 1, None), (D, 2, 0.1)):
        add(members, who, block, rtt_s=rtt_s)
    assert choices(members)[B] == 200


def test_a_little_known_holder_is_probed_now_and_then_even_beside_a_fast_one(members: Members) -> None:
    for who, block, rtt_s in ((C, 0, 0.1), (A, 1, 0.001), (B, 1, None), (D, 2, 0.1)):
        add(members, who, block, rtt_s=rtt_s)
    counts = choices(members, times=1000)
    assert 0.5 * chains.PROBE_SHARE < counts[B] / 1000 < 2 * chains.PROBE_SHARE


def test_a_few_rounds_behind_cost_less_than_a_long_way(members: Members) -> None:
    for who, block, rtt_s, number in ((C, 0, 0.1, ROUND), (A, 1, 0.02, ROUND - 3), (B, 1, 0.2, ROUND), (D, 2, 0.1, ROUND)):
        add(members, who, block, rtt_s=rtt_s, round=number)
    assert choices(members) == {A: 200}


def test_a_state_far_behind_is_worth_a_detour(members: Members) -> None:
    for who, block, rtt_s, number in ((C, 0, 0.1, ROUND), (A, 1, 0.02, ROUND - 60), (B, 1, 0.6, ROUND), (D, 2, 0.1, ROUND)):
        add(members, who, block, rtt_s=rtt_s, round=number)
    assert choices(members) == {B: 200}


def test_a_tall_tale_about_rounds_gains_nothing(members: Members) -> None:
    for who, block, rtt_s, number in ((C, 0, 0.1, ROUND), (A, 1, 0.05, ROUND), (B, 1, 0.05, ROUND), (E, 1, 0.2, 2**40), (D, 2, 0.1, ROUND)):
        add(members, who, block, rtt_s=rtt_s, round=number)
    assert E not in choices(members)


def test_untrained_holders_serve_only_where_there_is_no_trained_one(members: Members) -> None:
    for who, block, rtt_s, number in ((C, 0, 0.1, 0), (A, 1, 0.01, 0), (B, 1, 0.2, 1), (D, 2, 0.1, 0)):
        add(members, who, block, rtt_s=rtt_s, round=number)
    chain = plan(members, 3, NOW, random.Random(0))
    assert chain.peers == (C, B, D)


def test_our_own_node_serves_its_block_with_its_newest_state(pair: Members) -> None:
    chain = plan(pair, 3, NOW, random.Random(0), own=(1, ME))
    assert chain.hop(1) == Hop(1, ME, 0, NO_DIGEST, 0.0, own=True)
    assert chain.peers == (C, ME, D)
    assert plan(pair, 3, NOW, random.Random(0), own=(1, ME), exclude={ME}).hop(1).peer in (A, B)


def test_excluded_holders_are_not_used(pair: Members) -> None:
    assert {plan(pair, 3, NOW, random.Random(seed), exclude=frozenset({A})).hop(1).peer for seed in range(30)} == {B}


# -- nobody


def test_a_block_nobody_holds_is_named_with_who_held_it_last_and_how_long_ago(pair: Members) -> None:
    later = NOW + 45
    for who, block in ((C, 0), (A, 1)):
        word = Announcement(RUN, block, "training", ROUND, b"d" * 32, 100.0, 0.0, 1, 1)
        pair.observe(Seen(who, word, later + 30), later)
    with pytest.raises(NoPeers, match=f"^block 2 has no holder; the last one seen was {short(D)}, 45 s ago$"):
        plan(pair, 3, later, random.Random(0))


def test_a_block_never_seen_is_named(members: Members) -> None:
    add(members, A, 0)
    with pytest.raises(NoPeers, match=r"^block 1 has no holder, and none has been seen yet$"):
        plan(members, 3, NOW, random.Random(0))


def test_a_block_whose_holders_are_all_joining_says_so(members: Members) -> None:
    add(members, C, 0, phase="joining", round=0)
    with pytest.raises(NoPeers, match=rf"^block 0: its only holders are still joining \({short(C)}\)$"):
        plan(members, 3, NOW, random.Random(0))


def test_a_block_whose_holder_is_banned_says_for_how_long_and_why(members: Members) -> None:
    add(members, C, 0)
    members.offended(C, NOW, "wrong digest")
    with pytest.raises(NoPeers, match=rf"^block 0: {short(C)} is put off for 30 s \(wrong digest\)$"):
        plan(members, 3, NOW, random.Random(0))


def test_a_block_whose_holders_were_all_excluded_says_so(pair: Members) -> None:
    with pytest.raises(NoPeers, match=f"^block 0: no holder is left besides {short(C)}, which failed or was excluded$"):
        plan(pair, 3, NOW, random.Random(0), exclude={C})


def test_holders_put_off_after_failed_calls_are_the_last_resort_before_a_block_is_missing(pair: Members) -> None:
    pair.failed(C, NOW, "late")
    assert plan(pair, 3, NOW, random.Random(0)).hop(0).peer == C
    pair.failed(A, NOW, "late")
    pair.failed(B, NOW + 1, "late")
    assert {plan(pair, 3, NOW + 1, random.Random(seed)).hop(1).peer for seed in range(30)} == {A}


def test_without_require_all_the_missing_blocks_are_left_out_and_listed(members: Members) -> None:
    add(members, A, 0)
    add(members, B, 2)
    chain = plan(members, 3, NOW, random.Random(0), require_all=False)
    assert [hop.block for hop in chain.hops] == [0, 2]
    assert chain.missing == (1,)


def test_a_chain_of_no_blocks_at_all_is_an_error_even_then(members: Members) -> None:
    with pytest.raises(NoPeers, match=r"^block 0 has no holder"):
        plan(members, 3, NOW, random.Random(0), require_all=False)


# -- failover


def test_failover_takes_a_holder_with_the_same_state_even_if_it_is_farther(members: Members) -> None:
    for who, rtt_s, digest in ((A, 0.1, b"d"), (B, 0.01, b"x"), (C, 0.3, b"d")):
        add(members, who, 0, rtt_s=rtt_s, digest=digest)
    chain = Chain((Hop(0, A, ROUND, b"d" * 32, 0.1),))
    assert {replace(chain, 0, members, NOW, random.Random(seed)).hop(0).peer for seed in range(30)} == {C}
    members.failed(C, NOW, "late")
    assert {replace(chain, 0, members, NOW, random.Random(seed)).hop(0).peer for seed in range(30)} == {B}


def test_failover_changes_one_block_only(pair: Members) -> None:
    chain = plan(pair, 3, NOW, random.Random(0))
    other = B if chain.hop(1).peer == A else A
    mended = replace(chain, 1, pair, NOW, random.Random(0))
    assert mended.peers == (C, other, D)
    assert (mended.hops[0], mended.hops[2]) == (chain.hops[0], chain.hops[2])


def test_failover_without_another_holder_names_the_block(pair: Members) -> None:
    chain = plan(pair, 3, NOW, random.Random(0))
    with pytest.raises(NoPeers, match=r"^block 0: no holder is left besides"):
        replace(chain, 0, pair, NOW, random.Random(0))
    with pytest.raises(NoPeers, match=r"^block 1: no holder is left besides"):
        replace(chain, 1, pair, NOW, random.Random(0), exclude={A, B})


# -- route


def chain_of(*rtts: float | None) -> Chain:
    return Chain(tuple(Hop(block, peer(block), 1, b"d" * 32, rtt_s) for block, rtt_s in enumerate(rtts)))


def test_a_long_chain_of_equally_far_holders_is_asked_as_a_star_and_a_short_one_as_a_chain() -> None:
    assert cheaper_route(chain_of(0.06)) == "chain"
    assert cheaper_route(chain_of(0.06, 0.06)) == "chain"
    assert cheaper_route(chain_of(0.06, 0.06, 0.06)) == "chain"  # a tie: the chain costs us less traffic
    assert cheaper_route(chain_of(*[0.06] * 4)) == "star"


def test_without_drafts_asking_all_at_once_takes_one_turn() -> None:
    assert cheaper_route(chain_of(0.06, 0.06), drafts=False) == "star"
    assert cheaper_route(chain_of(0.06), drafts=False) == "chain"


def test_one_far_holder_in_the_middle_is_passed_twice_by_a_chain_and_once_by_a_star() -> None:
    assert cheaper_route(chain_of(0.01, 0.3, 0.01)) == "chain"  # 10 + 300 + 300 against 10 + 300, halves: 0.31 each, a tie
    assert cheaper_route(chain_of(0.01, 0.3, 0.01, 0.01)) == "star"
    assert cheaper_route(chain_of(0.3, 0.01)) == "chain"


def test_unknown_round_trips_count_as_the_prior() -> None:
    assert cheaper_route(chain_of(None, None, None, None)) == cheaper_route(chain_of(*[chains.PRIOR_RTT_S] * 4)) == "star"


rtts = st.one_of(st.none(), st.floats(0.0, 2.0))


@given(st.lists(rtts, min_size=1, max_size=8), st.booleans())
def test_every_chain_has_a_route(times: list[float | None], drafts: bool) -> None:
    assert cheaper_route(chain_of(*times), drafts=drafts) in ("chain", "star")


holders = st.lists(
    st.tuples(
        st.integers(0, 2),
        rtts,
        st.sampled_from(["joining", "training", "serving"]),
        st.integers(0, 200),
        st.sampled_from(["", "failed", "offended"]),
    ),
    max_size=12,
)


@given(holders, st.integers(0, 2**32), st.booleans())
def test_whatever_is_known_a_chain_holds_only_living_holders_of_its_blocks_and_no_offender(
    known: list[tuple[int, float | None, str, int, str]], seed: int, require_all: bool
) -> None:
    members = Members(RUN, 3, ME)
    usable: set[tuple[int, PeerId]] = set()
    for number, (block, rtt_s, phase, round_, trouble) in enumerate(known):
        add(members, peer(number), block, rtt_s=rtt_s, phase=phase, round=round_)
        if trouble:
            getattr(members, trouble)(peer(number), NOW, "why")
        if phase != "joining" and trouble != "offended":
            usable.add((block, peer(number)))
    covered = {block for block, _ in usable}
    try:
        chain = plan(members, 3, NOW, random.Random(seed), require_all=require_all)
    except NoPeers as fault:
        line = str(fault)
    else:
        assert {(hop.block, hop.peer) for hop in chain.hops} <= usable
        assert {hop.block for hop in chain.hops} == covered
        assert set(chain.missing) == {0, 1, 2} - covered
        return
    assert "\n" not in line
    assert covered != {0, 1, 2} if require_all else not covered
