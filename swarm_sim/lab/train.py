"""One training of the lab, by the node's own Trainer: the same step for blocks, controls and the end-to-end reference.

The result (final weights, the mean of the weights along the last quarter, the losses on the way, costs) is one safetensors file named by
the spec's digest, in the user's cache. A training that is interrupted leaves its last checkpoint there and goes on from it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from blocktrain.node import cache
from blocktrain.node.compute.device import Mover, choose
from blocktrain.node.compute.diffusionblocks import SHARED
from blocktrain.node.compute.flat import Flat
from blocktrain.node.compute.model import Block
from blocktrain.node.compute.trainer import Trainer
from blocktrain.node.data import TokenStream, load_tokens
from blocktrain.node.tokenizer import load_tokenizer
from blocktrain.swarm_sim.lab.spec import Member, Sharing, Spec
from blocktrain.swarm_sim.lab.variants import Together, model_of, trainer_of, training_objective

CHECKPOINT_S: Final = 45.0
CURVE_STEPS: Final = 25
TAIL_SHARE: Final = 0.25  # of the steps, over which weights are averaged
TAIL_EVERY: Final = 5
OUTER_RATE: Final = 0.7
OUTER_MOMENTUM: Final = 0.9

Tensors = dict[str, Tensor]
Report = Callable[[float], None]  # the share that is done


@dataclass(frozen=True)
class Result:
    """What a training left. `final` and `tail` have one state [P] per member, in their order."""

    spec: Spec
    final: tuple[Tensor, ...]
    tail: tuple[Tensor, ...]
    info: dict[str, Any]  # curve: per member [(step, loss)]; cpu_s, tokens, tokens_per_s, optimizer_bytes, train_bytes, parameters

    def blocks(self, *, tail: bool = False) -> list[Block]:
        """The members as blocks, for reading."""
        out = []
        for member, state in zip(self.spec.members, self.tail if tail else self.final, strict=True):
            block = model_of(self.spec.switches)(self.spec.manifest, member.block).requires_grad_(False)
            Flat(block).data.copy_(state)
            out.append(block)
        return out


def folder() -> Path:
    """Where results are kept; may be deleted at any time."""
    return cache.cache_folder() / "lab"


def load(spec: Spec, place: Path) -> Result | None:
    """A finished training, if it is kept."""
    tensors, info = _read(place / f"{spec.digest}.safetensors")
    if tensors is None:
        return None
    members = range(len(spec.members))
    return Result(spec, tuple(tensors[f"final.{i}"] for i in members), tuple(tensors[f"tail.{i}"] for i in members), info)


def train(spec: Spec, place: Path, report: Report = lambda share: None) -> Result:
    """Train, or take what is kept. Raises: UsageError: data. TrainingFailed: the loss is not a number."""
    kept = load(spec, place)
    if kept is not None:
        return kept
    place.mkdir(parents=True, exist_ok=True)
    training = _Training(spec, place)
    training.resume()
    training.run(report)
    tensors, info = training.outcome()
    _write(place / f"{spec.digest}.safetensors", tensors, info)
    training.checkpoint.unlink(missing_ok=True)
    result = load(spec, place)
    assert result is not None
    return result


class _Training:
    def __init__(self, spec: Spec, place: Path) -> None:
        self.spec = spec
        self.checkpoint = place / f"{spec.digest}.checkpoint.safetensors"
        self.mover = Mover(choose(spec.device))
        self.trainers = [self._trainer(member) for member in spec.members]
        for trainer in self.trainers:
            if isinstance(trainer.objective, Together):
                trainer.objective.chain = [other.block for other in self.trainers]
        self.tails = [torch.zeros_like(trainer.flat.data) for trainer in self.trainers]
        self.tailed = 0
        self.step = 0
        self.cpu_s = self.wall_s = 0.0
        self.curve: list[list[tuple[int, float]]] = [[] for _ in self.trainers]
        self.exchange = Exchange(spec.sharing, self.trainers, spec.manifest.seed)

    def _trainer(self, member: Member) -> Trainer:
        spec, manifest = self.spec, self.spec.manifest
        corpus = load_tokens(member.data or spec.data, load_tokenizer("bytes", 256), manifest.model.context)
        number, parts = member.part
        if parts > 1:
            size = len(corpus.train)
            rest = corpus.train.split(size * number // parts)[1]
            corpus = replace(corpus, train=rest.split(size // parts)[0])
        order = 0 if spec.switches.same_order else member.block
        batches = TokenStream(corpus, batch=manifest.optimizer.batch, peer=member.walk, block=order, seed=manifest.seed)
        seed = int.from_bytes(f"{manifest.seed}/{member.block}/{member.walk}".encode()[:7], "big")  # of what the objective draws
        kind = trainer_of(spec.switches)
        trainer = kind(manifest, member.block, batches, self.mover, seed=seed, compile=spec.compile)
        trainer.objective = training_objective(manifest, member.block, spec.switches)
        return trainer

    def run(self, report: Report) -> None:
        steps = self.spec.steps
        saved = time.monotonic()
        while self.step < steps:
            cpu, wall = time.process_time(), time.perf_counter()
            for trainer in self.trainers:
                trainer.round, trainer.counters.since_round = self.step, 0  # a round is a step
                trainer.step()
            self.step += 1
            self.exchange.after(self.step)
            self._note(steps)
            self.cpu_s += time.process_time() - cpu
            self.wall_s += time.perf_counter() - wall
            report(self.step / steps)
            if time.monotonic() - saved > CHECKPOINT_S and self.step < steps:
                self.save()
                saved = time.monotonic()

    def _note(self, steps: int) -> None:
        if self.step > steps * (1 - TAIL_SHARE) and self.step % TAIL_EVERY == 0:
            self.tailed += 1
            for tail, trainer in zip(self.tails, self.trainers, strict=True):
                tail.add_((trainer.flat.data - tail) / self.tailed)
        if self.step % CURVE_STEPS == 0 or self.step == steps:
            for line, trainer in zip(self.curve, self.trainers, strict=True):
                trainer.read_loss()
                line.append((self.step, round(trainer.loss or 0.0, 5)))

    def outcome(self) -> tuple[Tensors, dict[str, Any]]:
        tensors = {f"final.{i}": trainer.flat.data.cpu() for i, trainer in enumerate(self.trainers)}
        tails = self.tails if self.tailed else [trainer.flat.data for trainer in self.trainers]
        tensors |= {f"tail.{i}": tail.cpu().clone() for i, tail in enumerate(tails)}
        tokens = sum(trainer.counters.tokens for trainer in self.trainers)
        first = self.trainers[0]
        return tensors, {
            "label": self.spec.label,
            "curve": self.curve,
            "cpu_s": self.cpu_s,
            "wall_s": self.wall_s,
            "tokens": tokens,
            "tokens_per_s": tokens / max(self.wall_s, 1e-9),
            "tokens_per_cpu_s": tokens / max(self.cpu_s, 1e-9),
            "parameters": first.flat.size,
            "optimizer_bytes": first.optimizer_bytes(),
            "train_bytes": first.train_bytes(),
        }

    # ---- checkpoints ------------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        tensors: Tensors = {}
        headers = []
        for i, (trainer, tail) in enumerate(zip(self.trainers, self.tails, strict=True)):
            frozen = trainer.freeze()
            named = frozen.tensors(trainer.flat.shapes, self.mover)
            tensors |= {f"{i}/{name}": torch.from_numpy(np.array(value)) for name, value in named.items()}
            tensors[f"{i}/tail"] = tail.cpu()
            headers.append(frozen.header)
        tensors |= self.exchange.tensors()
        state = {key: getattr(self, key) for key in ("step", "tailed", "cpu_s", "wall_s", "curve")}
        _write(self.checkpoint, tensors, {**state, "headers": headers})

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one."""
        tensors, info = _read(self.checkpoint)
        if tensors is None:
            return
        for i, (trainer, header) in enumerate(zip(self.trainers, info["headers"], strict=True)):
            prefix = f"{i}/"
            own = {name.removeprefix(prefix): value.numpy() for name, value in tensors.items() if name.startswith(prefix)}
            self.tails[i].copy_(torch.from_numpy(own.pop("tail")))
            trainer.restore(own, header, info["step"])
        self.exchange.restore(tensors, info["step"])
        self.step, self.tailed, self.cpu_s, self.wall_s = info["step"], info["tailed"], info["cpu_s"], info["wall_s"]
        self.curve = [[(int(step), float(loss)) for step, loss in line] for line in info["curve"]]


class Exchange:
    """Averaging between members, every few steps: the part that all blocks share, or whole replicas of one block.

    Those who take part get the mean of their states, and the published state is that mean; the others keep their own work (our way), or
    throw it away for the published state (`discard`, the paper's way). Adam's moments stay where they are.
    """

    def __init__(self, sharing: Sharing, trainers: Sequence[Trainer], seed: int) -> None:
        self.sharing, self.seed = sharing, seed
        self.round = 0
        names = SHARED if sharing.parameters == "shared" else None
        self.states: list[list[Tensor]] = []
        for trainer in trainers if sharing.every else ():
            views = trainer.flat.views(trainer.flat.data)
            self.states.append([trainer.flat.data] if names is None else [views[name] for name in names])
        self.published = [tensor.clone() for tensor in self.states[0]] if self.states else []
        self.velocity = [torch.zeros_like(tensor) for tensor in self.published]

    def after(self, step: int) -> None:
        """Called after each step; does something every `sharing.every` of them."""
        if not self.states or step % self.sharing.every:
            return
        chance = np.random.default_rng((self.seed, self.round))
        self.round += 1
        arrived = [state for state in self.states if chance.random() < self.sharing.participation]
        for i, (published, velocity) in enumerate(zip(self.published, self.velocity, strict=True)):
            if arrived:
                change = torch.stack([state[i] for state in arrived]).mean(0) - published
                if self.sharing.outer == "nesterov":
                    velocity.mul_(OUTER_MOMENTUM).add_(change)
                    change = OUTER_RATE * (OUTER_MOMENTUM * velocity + change)
                published.add_(change)
            for state in self.states if self.sharing.discard else arrived:
                state[i].copy_(published)

    def tensors(self) -> Tensors:
        pairs = {f"published.{i}": t for i, t in enumerate(self.published)} | {f"velocity.{i}": t for i, t in enumerate(self.velocity)}
        return {name: tensor.cpu().clone() for name, tensor in pairs.items()}

    def restore(self, tensors: Tensors, step: int) -> None:
        for i, (published, velocity) in enumerate(zip(self.published, self.velocity, strict=True)):
            published.copy_(tensors[f"published.{i}"])
            velocity.copy_(tensors[f"velocity.{i}"])
        self.round = step // self.sharing.every if self.sharing.every else 0


def _write(path: Path, tensors: Tensors, info: dict[str, Any]) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, beside, metadata={"info": json.dumps(info)})
    beside.replace(path)


def _read(path: Path) -> tuple[Tensors | None, dict[str, Any]]:
    """None for what is not there or not whole."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["info"])  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, TypeError, KeyError):
        return None, {}
