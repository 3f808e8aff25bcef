"""A state that is nowhere as a whole is measured like one that is."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blocktrain.node.compute import flat, gauge, piecemeal
from blocktrain.node.compute.flat import Flat
from blocktrain.node.compute.gauge import Gauge
from blocktrain.node.compute.model import Block
from blocktrain.node.compute.piecemeal import Reading, stand_in
from blocktrain.protocol.manifest import OBJECTIVES, Manifest
from tests.swarm_kit import manifest

PIECE = 96
TILE = 160


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> object:
    """So that a small block has many of both, which end at different places."""
    patch = pytest.MonkeyPatch()
    patch.setattr(flat, "PIECE", PIECE)
    patch.setattr(piecemeal, "TILE", TILE)
    yield
    patch.undo()


@given(size=st.integers(1, 5 * PIECE), parts=st.lists(st.tuples(st.integers(0, 5 * PIECE), st.integers(0, 5 * PIECE)), max_size=8))
def test_any_part_of_a_reading_is_that_of_the_state_and_a_piece_is_made_once_in_a_row(size: int, parts: list[tuple[int, int]]) -> None:
    state, made = torch.arange(float(size)), []

    def read(piece: slice) -> Tensor:
        made.append(piece.start)
        return state[piece].clone()

    reading = Reading(read, size)
    for begin, count in parts:
        end = min(size, begin + count)
        if begin < end:
            assert torch.equal(reading.fill(begin, torch.empty(end - begin)), state[begin:end])
    assert all(one != other for one, other in itertools.pairwise(made))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("together", [True, False])
def test_a_reading_has_the_loss_of_the_state_that_it_reads(objective: str, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run: Manifest = dataclasses.replace(manifest(), objective=objective)
    monkeypatch.setattr(gauge, "PASS_BYTES", 1 << 30 if together else 1)
    block = Block(run, 0)
    state = Flat(block).data + 0.1 * torch.randn(sum(p.numel() for p in block.parameters()), generator=torch.Generator().manual_seed(3))
    windows = torch.randint(run.model.vocabulary, (5, run.model.context + 1), generator=torch.Generator().manual_seed(4))
    measured = Gauge(run, 0, windows, torch.device("cpu"))
    wanted = measured.loss(state)
    assert measured.loss(Reading(lambda piece: state[piece].clone(), len(state))) == pytest.approx(wanted, rel=1e-5)
    assert measured.loss(state) == wanted
    assert measured.loss(Reading(lambda piece: 2 * state[piece], len(state))) != pytest.approx(wanted, rel=1e-3), "it is this state's"


def test_a_stand_in_takes_no_memory_and_spoils_what_uses_it_unseen() -> None:
    weight = stand_in((1000, 1000))
    assert weight.untyped_storage().nbytes() == 4
    assert bool((torch.ones(1000) @ weight).isnan().all())


def test_the_memory_of_a_result_that_nobody_has_any_more_serves_the_next() -> None:
    rooms = piecemeal._Rooms()
    first = rooms.take(1 << 16).fill_(1.0)
    view, place = first.view(2, -1)[1], first.data_ptr()
    second = rooms.take(1 << 15)
    assert second.data_ptr() != place
    del first
    assert rooms.take(1 << 15).data_ptr() != place, "a view of it lives"
    assert view.sum() == 1 << 15
    del view
    assert rooms.take(1 << 16).data_ptr() == place
