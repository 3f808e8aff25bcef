"""What a node is built of is not looked through again and again, and goes all the same when the node does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from blocktrain.node import heap


class Knot:
    """Only the collector can free it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    heap.unsettle()


def test_what_was_there_is_left_alone_until_it_may_go_and_what_came_later_is_not() -> None:
    old = Knot()
    heap.settle()
    assert gc.get_freeze_count() > 10_000
    new = Knot()
    gone = [weakref.ref(old), weakref.ref(new)]
    del old, new
    gc.collect()
    assert [ref() is None for ref in gone] == [False, True]
    heap.unsettle()
    gc.collect()
    assert gone[0]() is None
    assert gc.get_freeze_count() == 0


def test_settling_again_takes_in_what_came_and_lets_go_of_what_went() -> None:
    first = Knot()
    heap.settle()
    gone = weakref.ref(first)
    del first
    second = Knot()
    heap.settle()
    assert gone() is None
    kept = weakref.ref(second)
    del second
    gc.collect()
    assert kept() is not None
