"""The manifest: what makes two states comparable, and nothing else. Its digest is the run id.

Model shape, number of blocks, objective and σ partition, tokenizer, seed, n-grams, the optimiser and the outer step, and the
learning-rate schedule by round. What a node chooses for itself (codec, topology, deadline, device, data) is not here: nodes that differ in
it can still average.
A manifest travels as canonical msgpack; a joiner fetches it from any announcer and checks the digest.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

from blocktrain.protocol import limits, schema, wire
from blocktrain.protocol.errors import Malformed
from blocktrain.protocol.ids import RunId
from blocktrain.protocol.schema import Bool, Choice, Float, Int, Table, Text

FORMAT: Final = 1
OBJECTIVES: Final = ("evidence", "diffusionblocks", "autoregressive")
OUTER_STEPS: Final = ("mean", "noloco", "nesterov")
OPTIONAL: Final = ("averaging", "grams")  # tables that may be left out, and are where they say nothing new: older runs keep their digest
SIGMA_DEVIATIONS: Final = 2.0  # `diffusionblocks`: ln σ is normal, cut at so many deviations, which are sigma_low and sigma_high
_TOKENIZER_FILE: Final = re.compile("sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Model:
    """Shape of one block. Every block of a run has the same shape."""

    width: int = schema.field(Int(8, 65536))  # d
    layers: int = schema.field(Int(1, 256))  # L, per block
    heads: int = schema.field(Int(1, 1024))
    context: int = schema.field(Int(8, 65536))  # T, positions
    vocabulary: int = schema.field(Int(2, 1_000_000))


@dataclass(frozen=True)
class Noise:
    """The σ partition and the share of noisy windows in training (recipe §3)."""

    sigma_low: float = schema.field(Float(1e-4, 1e4))
    sigma_high: float = schema.field(Float(1e-4, 1e4))
    overlap: float = schema.field(Float(0.0, 1.0))  # each interval is widened by this share of its log-width
    window_share: float = schema.field(Float(0.0, 1.0))  # probability that a sequence ends in a noisy window


@dataclass(frozen=True)
class Schedule:
    """Learning rate as a function of the round alone, so that it needs no clock and no coordinator."""

    steps_per_round: int = schema.field(Int(1, 1_000_000))  # H
    learning_rate: float = schema.field(Float(0.0, 10.0))
    warmup_rounds: int = schema.field(Int(0, 1_000_000))
    planned_rounds: int = schema.field(Int(1, 100_000_000))
    floor: float = schema.field(Float(0.0, 1.0))  # share of the learning rate that stays after planned_rounds

    def rate(self, round: float) -> float:
        """Learning rate at a round (fractions allowed): linear warm-up, cosine to the floor, the floor after."""
        if round < self.warmup_rounds:
            return self.learning_rate * (round + 1) / (self.warmup_rounds + 1)
        span = max(1, self.planned_rounds - self.warmup_rounds)
        done = min(1.0, (round - self.warmup_rounds) / span)
        return self.learning_rate * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True)
class Optimizer:
    """AdamW and the batch. `accumulate` and `recompute` save memory and leave the result as it is."""

    batch: int = schema.field(Int(1, 1_000_000))  # sequences per step
    accumulate: int = schema.field(Int(1, 10_000))  # micro-batches per step
    beta1: float = schema.field(Float(0.0, 1.0))
    beta2: float = schema.field(Float(0.0, 1.0))
    weight_decay: float = schema.field(Float(0.0, 10.0))  # on matrices only
    clip: float = schema.field(Float(0.0, 1e9))  # global gradient norm
    warmup_steps: int = schema.field(Int(0, 1_000_000))  # a joiner's own warm-up: its moments start at zero
    recompute: bool = schema.field(Bool(), False)  # activation checkpointing: layers are computed again in the backward pass


@dataclass(frozen=True)
class Averaging:
    """What a merge does to the live replica beyond the mean that both sides publish (node/compute/outer.py).

    lo-fi (arXiv 2210.11948), averaging at the end alone, needs no setting: `schedule.steps_per_round` is all steps, `planned_rounds` 1.
    """

    outer: str = schema.field(Choice(OUTER_STEPS), "mean")


@dataclass(frozen=True)
class Grams:
    """Hashed n-grams of tokens that every block reads beside the tokens (node/compute/grams.py). Left out: none, and `rows` is 0."""

    longest: int = schema.field(Int(2, 8), 0)  # n-grams of 2 … longest tokens
    rows: int = schema.field(Int(16, 2**26), 0)  # of the table that all lengths share
    row_width: int = schema.field(Int(1, 4096), 0)  # numbers in a row


@dataclass(frozen=True)
class Manifest:
    """One run. Build it with `from_table`, read it from a peer with `from_bytes`."""

    format: int = schema.field(Int(FORMAT, FORMAT))
    name: str = schema.field(Text(64, 1))
    blocks: int = schema.field(Int(1, limits.MAX_BLOCKS))  # B
    objective: str = schema.field(Choice(OBJECTIVES))
    tokenizer: str = schema.field(Text(80, 1))  # "bytes", or "sha256:…" of a tokenizers file
    seed: int = schema.field(Int(0, 2**63 - 1))
    model: Model = schema.field(Table(Model))
    noise: Noise = schema.field(Table(Noise))
    schedule: Schedule = schema.field(Table(Schedule))
    optimizer: Optimizer = schema.field(Table(Optimizer))
    averaging: Averaging = schema.field(Table(Averaging), Averaging())
    grams: Grams = schema.field(Table(Grams), Grams())

    def to_bytes(self) -> bytes:
        table = schema.encode(self)
        for name, nothing in _left_out().items():
            if getattr(self, name) == nothing:
                del table[name]
        return wire.pack(table)

    @property
    def run(self) -> RunId:
        return RunId(hashlib.sha256(self.to_bytes()).digest())

    def sigma_edges(self) -> tuple[float, ...]:
        """The B+1 boundaries of the σ partition, rising. Block b owns edges[B-1-b] … edges[B-b]: the first is noisiest.

        Log-uniform; under `diffusionblocks`, of equal probability under its log-normal σ (arXiv 2506.14202).
        """
        ratio = self.noise.sigma_high / self.noise.sigma_low
        if self.objective == "diffusionblocks":
            tail = NormalDist().cdf(-SIGMA_DEVIATIONS)
            shares = (tail + (1 - 2 * tail) * i / self.blocks for i in range(1, self.blocks))
            inner = (0.5 + NormalDist().inv_cdf(share) / (2 * SIGMA_DEVIATIONS) for share in shares)
            return (self.noise.sigma_low, *(self.noise.sigma_low * ratio**place for place in inner), self.noise.sigma_high)
        return tuple(self.noise.sigma_low * ratio ** (i / self.blocks) for i in range(self.blocks + 1))

    def sigma_interval(self, block: int) -> tuple[float, float]:
        """(low, high) of the σ that block `block` owns, without the overlap."""
        edges = self.sigma_edges()
        return edges[self.blocks - 1 - block], edges[self.blocks - block]


def from_table(table: Mapping[str, object]) -> Manifest:
    """A manifest from a parsed run.toml: every key of the format present (but for the tables `OPTIONAL`), none unknown.

    Raises: Malformed: the field and what is allowed.
    """
    manifest = schema.decode(Manifest, {**_left_out(), **table}, strict=True)
    _check(manifest)
    return manifest


def from_bytes(data: bytes, run: RunId | None = None) -> Manifest:
    """A manifest from a peer, checked against the run id that was asked for.

    Raises: Malformed: not a manifest, not canonical, or not the one asked for.
    """
    if run is not None and hashlib.sha256(data).digest() != run:
        raise Malformed("the manifest does not have the run's digest")
    table: Any = wire.unpack(data, limits.MAX_MANIFEST_BYTES)
    if not isinstance(table, dict):
        raise Malformed("a manifest is a map")
    manifest = from_table(table)
    if manifest.to_bytes() != data:
        raise Malformed("the manifest is not in canonical form")
    return manifest


def _left_out() -> dict[str, object]:
    """The tables of `OPTIONAL` as they are where a manifest does not have them."""
    return dict(zip(OPTIONAL, (Averaging(), Grams()), strict=True))


def _check(manifest: Manifest) -> None:
    model, noise = manifest.model, manifest.noise
    if model.width % model.heads or (model.width // model.heads) % 2:
        raise Malformed(f"model.width {model.width} must split into model.heads {model.heads} of even size")
    if noise.sigma_high <= noise.sigma_low:
        raise Malformed("noise.sigma_high must be above noise.sigma_low")
    if manifest.optimizer.batch % manifest.optimizer.accumulate:
        raise Malformed("optimizer.batch must be a multiple of optimizer.accumulate")
    if max(manifest.optimizer.beta1, manifest.optimizer.beta2) >= 1:
        raise Malformed("optimizer.beta1 and optimizer.beta2 must be below 1")
    if manifest.tokenizer == "bytes":
        if model.vocabulary != 256:
            raise Malformed("the tokenizer 'bytes' has model.vocabulary 256")
    elif not _TOKENIZER_FILE.fullmatch(manifest.tokenizer):
        raise Malformed("tokenizer must be 'bytes' or 'sha256:' and 64 hex digits")
