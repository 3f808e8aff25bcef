"""Chance as an argument: the part of `random.Random` that decisions need. This room may not import chance itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Rng(Protocol):
    """A seeded source of chance; `random.Random` is one."""

    def random(self) -> float: ...

    def randrange(self, start: int, /) -> int: ...

    def uniform(self, a: float, b: float) -> float: ...

    def randbytes(self, n: int) -> bytes: ...

    def sample(self, population: Sequence[T], k: int) -> list[T]: ...
