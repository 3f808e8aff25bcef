"""`blocktrain-sim bench step`: what one training step costs beside the same layers in a plain torch loop, and what it needs in memory.

Both sides run in this process on one thread and take turns, a few steps each, so that a machine that slows down slows both; the order
within a pair alternates. A ratio is that of processor times (of wall times in `*_wall`), the median of all pairs; above 1, ours is faster.
The plain loop (lab/plain.py) trains next-byte prediction, and `ratio` is that of our trainer on the same objective, `autoregressive`; in
`ratio_evidence` it trains the default one, which draws and reads noise as well. None of these has n-grams; `ratio_grams` is what they
cost: the default objective's time without them by that with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from blocktrain.node.compute.device import Mover
from blocktrain.node.compute.trainer import Trainer
from blocktrain.node.data import TokenStream
from blocktrain.protocol.manifest import Grams, Manifest
from blocktrain.swarm_sim.benches import Bench, Session
from blocktrain.swarm_sim.lab import presets, scoring
from blocktrain.swarm_sim.lab.plain import PlainLoop

PAIRS: Final = 15
BRIEF_PAIRS: Final = 9
STEPS: Final = 6  # of one side at a time
WARM_UP_STEPS: Final = 5
DATA: Final = ("builtin",)
PARTS: Final = {
    "speed": (
        "ratio", "ratio_low", "ratio_high", "ratio_wall", "ratio_evidence", "ratio_evidence_wall", "pairs", "tokens_per_s",
        "tokens_per_s_evidence", "tokens_per_s_torch", "cpu_ms_step", "cpu_ms_step_evidence", "cpu_ms_step_torch", "ratio_grams",
        "cpu_ms_step_grams",
    ),
    "memory": (
        "parameters", "adamw_bytes", "train_bytes", "activation_bytes", "activation_bytes_recompute", "activation_bytes_accumulate",
        "presets", "presets_parameters_block", "presets_train_gib_block", "presets_batch",
    ),
}  # fmt: skip


@dataclass
class Side:
    """One of the loops, with the times of its turns."""

    step: Callable[[], object]
    cpu_s: list[float]
    wall_s: list[float]

    def turn(self) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(STEPS):
            self.step()
        self.cpu_s.append((time.process_time() - cpu) / STEPS)
        self.wall_s.append((time.perf_counter() - wall) / STEPS)


def bench(preset: str | None) -> Bench:
    """The bench at one size."""

    def run(session: Session) -> None:
        size = presets.preset(preset or "laptop")
        session.numbers["preset"] = f"{size.width}x{size.layers}x{size.blocks}"
        session.measure("speed", lambda: speed(size, BRIEF_PAIRS if session.brief else PAIRS))
        session.measure("memory", lambda: memory(size))

    return Bench("step", PARTS, run)


def a_trainer(manifest: Manifest) -> Trainer:
    """Block 1 of a run in training, as a node has it."""
    corpus = scoring.corpus_of(DATA, manifest.model.context)
    batches = TokenStream(corpus, batch=manifest.optimizer.batch, peer="bench", block=1, seed=0)
    return Trainer(manifest, min(1, manifest.blocks - 1), batches, Mover(torch.device("cpu")), seed=0)


def speed(size: presets.Preset, pairs: int) -> Mapping[str, object]:
    """All four loops, in turn."""
    torch.set_num_threads(1)
    whole = presets.manifest(size, "evidence", 1000, 0)
    run = replace(whole, grams=Grams())
    corpus = scoring.corpus_of(DATA, run.model.context)
    text = torch.from_numpy(corpus.train.read(0, len(corpus.train)).astype("u1"))
    plainly = replace(run, objective="autoregressive")
    steps = (a_trainer(whole).step, a_trainer(run).step, a_trainer(plainly).step, PlainLoop(run, text).step)
    grams, evidence, plain, bare = sides = [Side(step, [], []) for step in steps]
    for side in sides:
        for _ in range(WARM_UP_STEPS):
            side.step()
    for pair in range(pairs):
        for side in sides if pair % 2 == 0 else reversed(sides):
            side.turn()
    ratios = [theirs / ours for theirs, ours in zip(bare.cpu_s, plain.cpu_s, strict=True)]
    tokens = run.optimizer.batch * run.model.context

    def against(side: Side, kind: str) -> float:
        ours_s: list[float] = getattr(side, kind)
        theirs_s: list[float] = getattr(bare, kind)
        return median(theirs / ours for theirs, ours in zip(theirs_s, ours_s, strict=True))

    return {
        "ratio": median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "ratio_wall": against(plain, "wall_s"),
        "ratio_evidence": against(evidence, "cpu_s"),
        "ratio_evidence_wall": against(evidence, "wall_s"),
        "pairs": pairs,
        "tokens_per_s": tokens / median(plain.wall_s),
        "tokens_per_s_evidence": tokens / median(evidence.wall_s),
        "tokens_per_s_torch": tokens / median(bare.wall_s),
        "cpu_ms_step": 1000 * median(plain.cpu_s),
        "cpu_ms_step_evidence": 1000 * median(evidence.cpu_s),
        "cpu_ms_step_torch": 1000 * median(bare.cpu_s),
        "ratio_grams": median(without / with_them for without, with_them in zip(evidence.cpu_s, grams.cpu_s, strict=True)),
        "cpu_ms_step_grams": 1000 * median(grams.cpu_s),
    }


def memory(size: presets.Preset) -> Mapping[str, object]:
    """A block's memory as it is held, what its backward pass keeps in three ways, and the table of presets."""
    run = presets.manifest(size, "evidence", 1000, 0)
    trainer = a_trainer(run)
    named = {name: size for name, size in presets.PRESETS.items() if name != "smoke"}
    return {
        "parameters": trainer.flat.size,
        "adamw_bytes": trainer.optimizer_bytes(),
        "train_bytes": trainer.train_bytes(),
        "activation_bytes": activation_bytes(run),
        "activation_bytes_recompute": activation_bytes(replace(run, optimizer=replace(run.optimizer, recompute=True))),
        "activation_bytes_accumulate": activation_bytes(replace(run, optimizer=replace(run.optimizer, accumulate=run.optimizer.batch))),
        "presets": [f"{name} {size.width}x{size.layers}x{size.blocks}" for name, size in named.items()],
        "presets_parameters_block": [presets.parameters(size) for size in named.values()],
        "presets_train_gib_block": [round(presets.train_bytes(size) / 2**30, 3) for size in named.values()],
        "presets_batch": [f"{size.batch} x {size.context}, in {size.accumulate} parts" for size in named.values()],
    }


def activation_bytes(manifest: Manifest) -> int:
    """The most that autograd keeps at once for the backward pass of one step, parameters not counted."""
    trainer = a_trainer(manifest)
    own = {trainer.flat.data.untyped_storage().data_ptr()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def same(tensor: Any) -> Any:
        return tensor

    rows = torch.randint(0, 256, (manifest.optimizer.batch // manifest.optimizer.accumulate, manifest.model.context + 1))
    with torch.autograd.graph.saved_tensors_hooks(note, same):
        trainer.objective.loss(trainer.block, rows, torch.Generator().manual_seed(0))
    return sum(kept.values())
