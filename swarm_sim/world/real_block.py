"""The real block behind the world's compute port: the node's own trainer, without its threads, on small shapes.

Steps are done when virtual time asks for them, so a slow computer is simulated exactly. Snapshots travel in float32 here: codecs are
measured elsewhere, and what matters in these experiments is who averages with whom and when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from blocktrain.node.compute import flat
from blocktrain.node.compute.device import Mover
from blocktrain.node.compute.trainer import Trainer
from blocktrain.node.fetched import builtin_text
from blocktrain.protocol.acceptance import Measures, judge_state
from blocktrain.protocol.errors import PeerFault
from blocktrain.protocol.exchange import merged_round, shares, tokens_per_round
from blocktrain.protocol.ids import NO_DIGEST, Digest
from blocktrain.protocol.manifest import Manifest
from blocktrain.swarm_sim.world.compute import Compute, Mixed, Taken, Terms, adopted_round, replaces

HELD_OUT: Final = 0.05  # of the text
CHECKED: Final = 8  # windows of the check on every merge
SCORED: Final = 64  # windows of the final score


class Shard:
    """One replica's own part of the text; windows are drawn by its seed."""

    def __init__(self, manifest: Manifest, part: int, parts: int, seed: int) -> None:
        text = np.frombuffer(builtin_text(), np.uint8).astype(np.int64)
        cut = int(len(text) * (1 - HELD_OUT))
        self._train = np.array_split(text[:cut], parts)[part]
        self._held_out = text[cut:]
        self._context, self._batch = manifest.model.context, manifest.optimizer.batch
        self._rng = np.random.default_rng(seed)

    def next_batch(self) -> np.ndarray[Any, Any]:
        starts = self._rng.integers(0, len(self._train) - self._context - 1, self._batch)
        return np.stack([self._train[start : start + self._context + 1] for start in starts])

    def heldout(self, count: int) -> np.ndarray[Any, Any]:
        starts = np.linspace(0, len(self._held_out) - self._context - 2, count).astype(int)
        return np.stack([self._held_out[start : start + self._context + 1] for start in starts])

    def position(self) -> dict[str, object]:
        return {}

    def seek(self, position: Mapping[str, object]) -> bool:
        return False


class RealBlock:
    """Implements `Compute` with a block in training."""

    def __init__(self, manifest: Manifest, block: int, part: int, parts: int, seed: int) -> None:
        self._manifest = manifest
        self.trainer = Trainer(manifest, block, Shard(manifest, part, parts, seed), Mover(torch.device("cpu")), seed=seed)
        batches = Shard(manifest, part, parts, seed)
        self._check = torch.from_numpy(batches.heldout(CHECKED))
        self._score = torch.from_numpy(batches.heldout(SCORED))
        self._generation = 0
        self._publish(0, self.live())
        self._base = self._state

    def live(self) -> torch.Tensor:
        """A copy of the live parameters, [P] float32."""
        return self.trainer.flat.data.clone()

    def _publish(self, round: int, state: torch.Tensor) -> None:
        self.round = self.trainer.round = round
        self._state = state
        self.payload = bytes(flat.to_bytes(state))
        self.digest = _digest(self.payload)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.trainer.step()

    def snapshot(self) -> Taken:
        counters = self.trainer.counters
        payload = bytes(flat.to_bytes(self.live()))
        return Taken(self.round, float(counters.tokens - counters.merged_tokens), _digest(payload), payload, float(counters.tokens))

    def consider(self, mine: Taken, payload: bytes, terms: Terms, *, mine_first: bool) -> Mixed:
        size = self.trainer.flat.size
        ours, theirs = flat.from_bytes(mine.payload, size), flat.from_bytes(payload, size)
        round = merged_round(self.round, terms.round)
        norm, distance, drift = flat.norm(ours), flat.distance(theirs, ours), flat.distance(ours, self._base)
        if not np.isfinite(flat.norm(theirs)):
            return Mixed(round, NO_DIGEST, Measures(False, norm, distance, drift, None, None), payload, self._generation)
        first, second = (mine.weight, terms.weight) if mine_first else (terms.weight, mine.weight)
        parts = shares(first, second, tokens_per_round(self._manifest))
        merged = flat.merge(ours, theirs, parts) if mine_first else flat.merge(theirs, ours, parts)
        measures = Measures(True, norm, distance, drift, self.score(ours, self._check), self.score(merged, self._check))
        data = bytes(flat.to_bytes(merged))
        return Mixed(round, _digest(data), measures, data, self._generation)

    def adopt(self, mixed: Mixed, mine: Taken) -> bool:
        if mixed.generation != self._generation:
            return False
        size = self.trainer.flat.size
        merged = flat.from_bytes(mixed.payload, size)
        self.trainer.add(merged - flat.from_bytes(mine.payload, size))
        self.trainer.counters.merged_tokens = int(mine.tokens)
        self.trainer.counters.since_round = 0
        self._base = merged
        self._publish(adopted_round(mixed.round, self.round), merged)
        return True

    def publish_own(self, round: int | None = None) -> None:
        self.trainer.counters.since_round = 0
        self._publish(self.round + 1 if round is None else round, self.live())

    def load(self, payload: bytes, round: int, digest: Digest) -> bool:
        if _digest(payload) != digest:
            return False
        state = flat.from_bytes(payload, self.trainer.flat.size)
        try:
            judge_state(bool(np.isfinite(flat.norm(state))), self.score(self._state, self._check), self.score(state, self._check))
        except PeerFault:
            return False
        if replaces(round, self.round):
            self.replace(state, round)
        return True

    def replace(self, state: torch.Tensor, round: int) -> None:
        """Other parameters, as after a download."""
        self._generation += 1
        self.trainer.replace(state)
        self._base = state
        self._publish(round, state)

    def restart(self) -> None:
        self.replace(self._state, self.round)

    def loss(self) -> float:
        """Nats per byte of the live block on held-out text."""
        return self.score(self.live())

    def score(self, state: torch.Tensor, windows: torch.Tensor | None = None) -> float:
        """The same of any state and windows. The live block is put aside meanwhile."""
        data = self.trainer.flat.data
        aside = data.clone()
        data.copy_(state)
        with torch.no_grad():
            value = float(self.trainer.objective.score(self.trainer.block, self._score if windows is None else windows).mean())
        data.copy_(aside)
        return value

    def distance(self, other: Compute) -> float:
        return flat.distance(self.live(), other.live()) if isinstance(other, RealBlock) else float("inf")


def _digest(payload: bytes) -> Digest:
    return Digest(hashlib.sha256(payload).digest())
