"""Two snapshots that pass each other piece by piece: however their bytes are cut, and whoever is ahead, the merge is that of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blocktrain.node.compute import flat
from blocktrain.node.compute.codecs import codec_of
from blocktrain.node.compute.merging import combine, difference
from blocktrain.node.compute.swap import Halves
from blocktrain.node.compute.trainer import TrainingFailed
from blocktrain.protocol.errors import PeerFault

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


def side(codec: str, size: int, seed: int, *, first: bool) -> Halves:
    reference = gaussian(size, 99) if codec == "sparse" else None
    halves = Halves(codec_of(codec), gaussian(size, seed), gaussian(size, 98), reference)
    halves.meet(SHARES, mine_first=first)
    return halves


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
)
def test_however_the_bytes_are_cut_both_sides_get_the_merge_of_the_whole(
    codec: str, size: int, most_bytes: int, cuts: list[int], given_before: int
) -> None:
    left, right = side(codec, size, 1, first=True), side(codec, size, 2, first=False)
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
    assert at_left.digest == at_right.digest == flat.digest(flat.to_bytes(at_left.state))
    whole = combine(lambda piece: left.ours[piece], lambda piece: right.ours[piece], gaussian(size, 98), SHARES, mine_first=True)
    assert torch.equal(at_left.state, whole.state)
    assert (at_left.distance, at_left.drift, at_left.along) == (whole.distance, whole.drift, whole.along)
    assert at_right.distance == pytest.approx(whole.distance, rel=1e-4)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_what_others_decode_of_ours_is_what_we_merge(codec: str) -> None:
    halves = side(codec, 3 * PIECE + 7, 1, first=True)
    payload, coder = sent(halves), codec_of(codec)
    begin = 0
    for piece in flat.pieces(3 * PIECE + 7):
        count = piece.stop - piece.start
        end = begin + coder.encoded_bytes(count)
        assert torch.equal(coder.decode(payload[begin:end], count), halves.ours[piece])
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


def test_the_difference_is_what_the_merge_has_beyond_ours() -> None:
    merge, ours = gaussian(1000, 1), gaussian(1000, 2)
    wanted = merge - ours
    assert torch.equal(difference(merge, ours), wanted)
    assert torch.equal(ours, wanted), "written over ours: it is not needed any more"
