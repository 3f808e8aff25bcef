"""Memory for chunks: nobody gets what somebody holds, and what nobody holds serves again, up to a bound."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.node import room as rooms
from blocktrain.node.room import KEPT, MAPPED_BYTES, give_back, room

SIZES = (0, 1, MAPPED_BYTES - 1, MAPPED_BYTES, MAPPED_BYTES + 1, 512 * 1024, 512 * 1024 + 1, 4 * 1024 * 1024)


@pytest.mark.parametrize("size", SIZES)
def test_a_room_has_its_size_and_can_be_written(size: int) -> None:
    memory = room(size)
    assert (len(memory), memory.format, memory.readonly) == (size, "B", False)
    memory[:] = bytes([7]) * size
    assert bytes(memory) == bytes([7]) * size


@given(st.lists(st.tuples(st.booleans(), st.integers(MAPPED_BYTES, 600 * 1024)), max_size=40))
def test_what_somebody_holds_even_as_a_view_is_nobody_elses(steps: list[tuple[bool, int]]) -> None:
    held: list[tuple[int, memoryview]] = []
    for number, (release, size) in enumerate(steps):
        if release and held:
            held.pop(0)
        memory = room(size)
        memory[:] = bytes([number]) * size
        held.append((number, memory[size // 2 :].toreadonly()))
        del memory
    for number, view in held:
        assert view == bytes([number]) * len(view)


def test_what_nobody_holds_serves_the_next_and_few_are_kept() -> None:
    give_back()
    first = room(MAPPED_BYTES)
    place = np.frombuffer(first, np.uint8).ctypes.data
    view = np.frombuffer(first, np.uint8)[5:]
    del first
    assert not rooms._free, "a view of it lives"
    del view
    assert np.frombuffer(room(2 * MAPPED_BYTES), np.uint8).ctypes.data == place
    many = [room(MAPPED_BYTES) for _ in range(3 * KEPT)]
    del many
    assert len(rooms._free) == KEPT
    assert all(isinstance(each, mmap.mmap) for each in rooms._free)
    give_back()
    assert not rooms._free
