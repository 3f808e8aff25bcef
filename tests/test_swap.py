"""Two snapshots that pass each other piece by piece: however their bytes are cut, and whoever is ahead, the merge is that of the whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blocktrain.node.compute import flat
from blocktrain.node.compute.codecs import codec_of, read_all
from blocktrain.node.compute.merging import Merging, combine, difference
from blocktrain.node.compute.pair import fits
from blocktrain.node.compute.swap import Halves
from blocktrain.node.compute.trainer import TrainingFailed
from blocktrain.protocol.errors import PeerFault
from blocktrain.protocol.ids import Digest

PIECE = 512
SHARES = (0.25, 0.75)


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> object:
    """So that a small state has several."""
    patch = pytest.MonkeyPatch()
    patch.setattr(flat, "PIECE", PIECE)
    yield
    patch.undo()


def gaussian(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def side(codec: str, size: int, seed: int, *, first: bool, whole: bool = False) -> Halves:
    reference = gaussian(size, 99) if codec == "sparse" else None
    halves = Halves(codec_of(codec), gaussian(size, seed), gaussian(size, 98), reference, whole=whole)
    halves.meet(SHARES, mine_first=first)
    return halves


def decoded(halves: Halves) -> Tensor:
    """What others see of ours, all of it given."""
    return halves.ours if halves.pair is None else read_all(halves.pair.ours, torch.empty_like(halves.ours))


def merge_in(halves: Halves) -> Tensor:
    """The merge of all that came, wherever it is."""
    if halves.pair is None:
        state = halves.finish(Digest(halves._came.digest())).state
        assert state is not None
        return state
    return read_all(lambda piece: halves.pair.merge(piece, halves.shares), torch.empty_like(halves.ours))


def sent(halves: Halves, most_bytes: int = 1500) -> bytes:
    parts = []
    while part := halves.give(most_bytes):
        parts.append(bytes(part))
    return b"".join(parts)


@given(
    codec=st.sampled_from(("fp32", "bf16", "int8", "sparse")),
    size=st.integers(1, 5 * PIECE),
    most_bytes=st.integers(1, 5000),
    cuts=st.lists(st.integers(1, 3000), max_size=10),
    given_before=st.integers(0, 6),
    whole=st.booleans(),
)
def test_however_the_bytes_are_cut_both_sides_get_the_merge_of_the_whole(
    codec: str, size: int, most_bytes: int, cuts: list[int], given_before: int, whole: bool
) -> None:
    left, right = side(codec, size, 1, first=True, whole=whole), side(codec, size, 2, first=False)
    payload = sent(right, most_bytes)
    begun = [bytes(left.give(most_bytes)) for _ in range(given_before)]  # the rest is encoded as theirs comes
    rest = payload
    for cut in cuts:
        left.take(rest[:cut])
        rest = rest[cut:]
    left.take(rest)
    right.take(b"".join(begun) + sent(left, most_bytes))
    at_left, at_right = left.finish(right.digest), right.finish(left.digest)
    assert len(payload) == left.size
    assert at_left.digest == at_right.digest == flat.digest(flat.to_bytes(merge_in(left)))
    mine, theirs = decoded(left), decoded(right)
    both = combine(lambda piece: mine[piece], lambda piece: theirs[piece], gaussian(size, 98), SHARES, mine_first=True)
    assert both.state is not None
    assert torch.equal(merge_in(left), both.state)
    assert torch.equal(merge_in(right), both.state)
    assert (at_left.distance, at_left.drift, at_left.along) == (both.distance, both.drift, both.along)
    assert at_right.distance == pytest.approx(both.distance, rel=1e-4)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_what_others_decode_of_ours_is_what_we_merge(codec: str, whole: bool) -> None:
    halves = side(codec, 3 * PIECE + 7, 1, first=True, whole=whole)
    payload, coder = sent(halves), codec_of(codec)
    begin = 0
    for piece in flat.pieces(3 * PIECE + 7):
        count = piece.stop - piece.start
        end = begin + coder.encoded_bytes(count)
        assert torch.equal(coder.decode(payload[begin:end], count), decoded(halves)[piece])
        begin = end
    assert flat.digest(payload) == halves.digest


def test_bytes_too_many_too_few_or_others_are_the_peers_fault() -> None:
    payload = sent(side("bf16", 2 * PIECE, 2, first=False))
    digest = flat.digest(payload)
    halves = side("bf16", 2 * PIECE, 1, first=True)
    halves.take(payload[:-1])
    with pytest.raises(PeerFault, match="bytes"):
        halves.finish(digest)
    halves.take(payload[-1:])
    with pytest.raises(PeerFault, match="digest"):
        halves.finish(flat.digest(b"other"))
    with pytest.raises(PeerFault, match="or more"):
        halves.take(b"!")


def test_what_is_not_finite_is_never_given_away() -> None:
    halves = side("bf16", 3 * PIECE, 1, first=True)
    halves.ours[2 * PIECE + 3] = float("nan")
    with pytest.raises(TrainingFailed, match="not finite"):
        sent(halves, 1)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_a_pair_settles_in_its_own_memory_and_adds_what_the_merge_has_beyond_ours(codec: str) -> None:
    size = 5 * PIECE + 100
    left, right = side(codec, size, 1, first=True), side(codec, size, 2, first=False)
    payload = sent(right)
    sent(left)
    left.take(payload)
    assert left.pair is not None
    merge, ours, live = merge_in(left), decoded(left), gaussian(size, 3)
    wanted = live + (merge - ours)
    state = left.pair.settle(live, left.shares)
    assert torch.equal(live, wanted)
    assert torch.equal(state, merge)
    assert state.data_ptr() == left.ours.data_ptr()
    assert flat.digest(flat.to_bytes(state)) == left.finish(right.digest).digest


@pytest.mark.parametrize(("codec", "fit"), [("fp32", False), ("bf16", True), ("int8", True), ("sparse", False)])
def test_only_light_codecs_of_less_than_half_a_state_make_a_pair(codec: str, fit: bool) -> None:
    assert fits(codec_of(codec), 3 * PIECE + 50) == fit
    assert not fits(codec_of("int8"), 1), "a value and a scale are five bytes"


def test_the_difference_is_what_the_merge_has_beyond_ours() -> None:
    merge, ours = gaussian(1000, 1), gaussian(1000, 2)
    wanted = merge - ours
    assert torch.equal(difference(merge, ours), wanted)
    assert torch.equal(ours, wanted), "written over ours: it is not needed any more"


@given(
    size=st.integers(1, 3 * PIECE + 7),
    ends=st.tuples(st.integers(0, 3 * PIECE + 7), st.integers(0, 3 * PIECE + 7)),
)
def test_whose_way_it_is_shows_in_what_is_not_set_aside(size: int, ends: tuple[int, int]) -> None:
    mine, theirs, published = (gaussian(size, seed) for seed in (1, 2, 3))
    aside = slice(min(ends), min(size, max(ends)))
    merging, plain = Merging(published, SHARES, aside=aside), Merging(published, SHARES)
    for piece in flat.pieces(size):
        merging.add(piece, mine[piece], theirs[piece])
        plain.add(piece, mine[piece], theirs[piece])
    kept = torch.ones(size, dtype=torch.bool)
    kept[aside] = False
    ways = [(each - published)[kept].double() for each in (mine, theirs)]
    expected = float(ways[0] @ ways[1] / (ways[0].norm() * ways[1].norm())) if kept.any() else 0.0
    measured, whole = merging.result(), plain.result()
    assert measured.along == pytest.approx(expected, abs=1e-4)
    assert measured.digest == whole.digest, "nothing else changes"
    far = float((mine - published).norm() + (theirs - published).norm())
    for each in (measured, whole):
        assert each.distance == pytest.approx(float((theirs - mine).norm()), abs=1e-3 * far)
        assert each.drift == pytest.approx(float((mine - published).norm()), rel=1e-5)


def test_a_snapshot_like_ours_is_no_way_off_and_one_that_is_no_number_is_nowhere() -> None:
    mine, published = gaussian(PIECE, 1), gaussian(PIECE, 2)
    for value, finite in ((float(mine[3]), True), (float("nan"), False), (float("inf"), False), (3e38, False)):
        theirs = mine.clone()
        theirs[3] = value
        merging = Merging(published, SHARES)
        merging.add(slice(0, PIECE), mine, theirs)
        distance = merging.result().distance
        assert math.isfinite(distance) == finite
        assert not finite or distance < 1e-3 * float((mine - published).norm())
