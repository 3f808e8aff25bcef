"""What stands in for a block in training: exact arithmetic on a convex toy whose optimum is known.

A state is a few float32 numbers. Each replica's data pulls it towards its own place, `optimum + pull`; the pulls of a block's replicas
sum to zero over the swarm, so what the replicas should agree on is known. A step goes a fixed share of the way there, so that any number of
steps is one expression: a thousand nodes train for an hour in no time. Snapshot, merge, own round and download mean exactly what they mean
in node/compute/replica.py, bytes and digests included; `Compute` is the port, and learning.py puts the real block behind it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from blocktrain.protocol.acceptance import Measures, judge_state
from blocktrain.protocol.errors import PeerFault
from blocktrain.protocol.exchange import merged_round, shares
from blocktrain.protocol.ids import NO_DIGEST, Digest

DIM: Final = 3
LR: Final = 0.005  # share of the way to its own optimum that a replica goes in a step
FAR: Final = 40.0  # of the start from the optimum
_FLOATS: Final = struct.Struct(f"<{DIM}f")


@dataclass(frozen=True, slots=True)
class Taken:
    """A snapshot, as it would travel."""

    round: int
    weight: float  # tokens since the last merge
    digest: Digest
    payload: bytes
    tokens: float


@dataclass(frozen=True, slots=True)
class Mixed:
    """A merge that was measured and not applied yet. `generation`: of the replica when the snapshot was taken."""

    round: int
    digest: Digest
    measures: Measures
    payload: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class Terms:
    """The other side's."""

    round: int
    weight: float
    digest: Digest


class Compute(Protocol):
    """A replica, without threads or waiting. `round`, `digest` and `payload` are the published state."""

    round: int
    digest: Digest
    payload: bytes

    def train(self, steps: int) -> None: ...

    def snapshot(self) -> Taken: ...

    def consider(self, mine: Taken, payload: bytes, terms: Terms, *, mine_first: bool) -> Mixed: ...

    def adopt(self, mixed: Mixed, mine: Taken) -> bool: ...

    def publish_own(self, round: int | None = None) -> None: ...

    def load(self, payload: bytes, round: int, digest: Digest) -> bool: ...

    def restart(self) -> None: ...

    def loss(self) -> float: ...

    def distance(self, other: Compute) -> float: ...


def digest_of(payload: bytes) -> Digest:
    return Digest(hashlib.sha256(payload).digest())


def pack(state: Sequence[float]) -> bytes:
    """As float32; what does not fit becomes the largest number."""
    if not math.hypot(*state) <= 3e38:
        state = [max(-3e38, min(3e38, number)) for number in state]
    return _FLOATS.pack(*state)


def unpack(payload: bytes) -> tuple[float, ...]:
    return _FLOATS.unpack(payload)


def adopted_round(trial: int, published: int) -> int:
    """The round of a merge when it becomes the published state: an own round may have come between."""
    return max(trial, published + 1)


def replaces(offered: int, published: int) -> bool:
    """Whether a downloaded state may replace the published one."""
    return offered >= published


class Toy:
    """One replica of a block. `tokens_a_step` only sets the weights of merges."""

    __slots__ = ("_base", "_generation", "_live", "_merged_tokens", "_optimum", "_per_round", "_saved", "_target", "_tokens",
                 "_tokens_a_step", "digest", "payload", "round")  # fmt: skip

    def __init__(self, optimum: Sequence[float], pull: Sequence[float], steps_per_round: int, tokens_a_step: int) -> None:
        self._optimum = tuple(optimum)
        self._target = tuple(o + p for o, p in zip(optimum, pull, strict=True))
        self._per_round = float(steps_per_round * tokens_a_step)
        self._tokens_a_step = tokens_a_step
        self._live = tuple(number + FAR for number in self._optimum)
        self._generation = 0
        self._tokens = self._merged_tokens = 0.0
        self._publish(0, self._live)
        self._base = unpack(self.payload)  # the last merge, or what was loaded: drift is measured from there
        self._saved = (self.round, self.payload)

    def _publish(self, round: int, state: Sequence[float]) -> None:
        self.round = round
        self.payload = pack(state)
        self.digest = digest_of(self.payload)

    def train(self, steps: int) -> None:
        if steps > 0:
            self._live = self.alone(self._live, steps)
            self._tokens += steps * self._tokens_a_step

    def alone(self, state: Sequence[float], steps: float) -> tuple[float, ...]:
        """Where so many steps on its own data lead from a state; a negative number of them leads back."""
        kept = (1 - LR) ** steps
        return tuple([t + (a - t) * kept for a, t in zip(state, self._target, strict=True)])

    @property
    def live(self) -> tuple[float, ...]:
        """The parameters as they are now, in training."""
        return self._live

    def snapshot(self) -> Taken:
        payload = pack(self._live)
        return Taken(self.round, self._tokens - self._merged_tokens, digest_of(payload), payload, self._tokens)

    def consider(self, mine: Taken, payload: bytes, terms: Terms, *, mine_first: bool) -> Mixed:
        """Theirs and ours as one state, with what acceptance asks. The same bits on both sides."""
        ours, theirs = unpack(mine.payload), unpack(payload)
        round = merged_round(self.round, terms.round)
        distance, drift, norm = math.dist(ours, theirs), math.dist(ours, self._base), math.hypot(*ours)
        if not math.isfinite(math.hypot(*theirs)):
            return Mixed(round, NO_DIGEST, Measures(False, norm, distance, drift, None, None), payload, self._generation)
        first, second = (mine.weight, terms.weight) if mine_first else (terms.weight, mine.weight)
        a, b = shares(first, second, self._per_round)
        low, high = (ours, theirs) if mine_first else (theirs, ours)
        merged = pack([x * a + y * b for x, y in zip(low, high, strict=True)])
        measures = Measures(True, norm, distance, drift, self._held_out(ours), self._held_out(unpack(merged)))
        return Mixed(round, digest_of(merged), measures, merged, self._generation)

    def adopt(self, mixed: Mixed, mine: Taken) -> bool:
        """False: the replica took a downloaded state since the snapshot, and the merge is void."""
        if mixed.generation != self._generation:
            return False
        merged, ours = unpack(mixed.payload), unpack(mine.payload)
        self._live = tuple(live + m - o for live, m, o in zip(self._live, merged, ours, strict=True))
        self._merged_tokens = mine.tokens
        self._base = merged
        self._publish(adopted_round(mixed.round, self.round), merged)
        return True

    def publish_own(self, round: int | None = None) -> None:
        self._publish(self.round + 1 if round is None else round, self._live)

    def load(self, payload: bytes, round: int, digest: Digest) -> bool:
        """Take a downloaded state, if it is whole, a number, and not older. Raises nothing: False is "the donor's fault"."""
        if len(payload) != len(self.payload) or digest_of(payload) != digest:
            return False
        state = unpack(payload)
        try:
            judge_state(math.isfinite(math.hypot(*state)), self._held_out(unpack(self.payload)), self._held_out(state))
        except PeerFault:
            return False
        if replaces(round, self.round):
            self._generation += 1
            self._live = self._base = unpack(payload)
            self._merged_tokens = self._tokens
            self._publish(round, self._live)
        return True

    def save(self) -> None:
        """A checkpoint: what a restart finds."""
        self._saved = (self.round, self.payload)

    def restart(self) -> None:
        """Go back to the checkpoint, as a process does that was killed."""
        round, payload = self._saved
        self._generation += 1
        self._live = self._base = unpack(payload)
        self._merged_tokens = self._tokens
        self._publish(round, self._live)

    def kick(self, by: Sequence[float]) -> None:
        """Push the live state away: an experiment's hand, nothing that happens by itself."""
        self._live = tuple(live + number for live, number in zip(self._live, by, strict=True))

    def loss(self) -> float:
        """Half the squared distance of the live state from what the whole block should agree on."""
        return 0.5 * math.dist(self._live, self._optimum) ** 2

    def distance(self, other: Compute) -> float:
        return math.dist(self._live, other._live) if isinstance(other, Toy) else math.inf

    def _held_out(self, state: Sequence[float]) -> float:
        return 0.01 * math.dist(state, self._target)  # nats per token, in the proportion that real blocks have to their drift
