"""The loss of a chain on text, over the same traversals that make text: many windows at once, nothing cached, every position scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from blocktrain.node.compute.generation import Traversals, read_answer
from blocktrain.protocol import sweep
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import Step


@dataclass(frozen=True)
class ChainLoss:
    """Mean nats per token over everything scored."""

    nats: float
    tokens: int
    blocks: tuple[int, ...]  # that took part in every traversal
    missing: tuple[int, ...]  # that were absent from at least one
    traversals: int


async def chain_loss(traversals: Traversals, manifest: Manifest, windows: Sequence[Sequence[int]]) -> ChainLoss:
    """Score windows of equal length, each of 2 … T + 1 tokens: every token after the first, given those before it in its window.

    Where only one block answers, this is that block's own loss. Raises: UsageError: windows of other sizes; and as `traverse` does.
    """
    shape = sweep.Shape.of(manifest)
    lengths = {len(window) for window in windows}
    if len(lengths) != 1 or not 2 <= min(lengths) <= shape.context + 1:
        raise UsageError(f"windows must all have the same length, 2 … {shape.context + 1} tokens")
    positions = lengths.pop() - 1
    rows = min(256, shape.step_tokens // positions, sweep.MAX_STEP_POSITIONS // positions, _frame_rows(shape, positions))
    if not rows:
        raise UsageError(f"{positions} positions of a vocabulary of {shape.vocabulary} do not fit one frame; use shorter windows")
    total, everyone, count = 0.0, set(range(shape.blocks)), 0
    for begin in range(0, len(windows), rows):
        batch = np.asarray(windows[begin : begin + rows], dtype=np.int64)
        inputs = sweep.pack_tokens(batch[:, :-1].ravel().tolist(), shape)
        step = Step(sequence=count, position=0, rows=len(batch), want=positions, tokens=inputs)
        scored, body = await traversals.traverse(step)
        sums, _ = read_answer(step, scored, body, shape)
        total += _nats(sums.astype(np.float32) / shape.terms(len(scored.blocks)), batch[:, 1:].ravel())
        everyone &= set(scored.blocks)
        count += 1
    tokens = len(windows) * positions
    missing = tuple(sorted(set(range(shape.blocks)) - everyone))
    return ChainLoss(total / tokens, tokens, tuple(sorted(everyone)), missing, count)


def _frame_rows(shape: sweep.Shape, positions: int) -> int:
    return shape.score_bytes // (positions * shape.row_bytes)


def _nats(means: npt.NDArray[np.floating[Any]], targets: npt.NDArray[np.int64]) -> float:
    """Sum of the cross-entropies under log_softmax(means) [N, V]."""
    highest = means.max(axis=1, keepdims=True)
    log_total = np.log(np.exp(means - highest).sum(axis=1)) + highest[:, 0]
    return float((log_total - means[np.arange(len(targets)), targets]).sum(dtype=np.float64))
