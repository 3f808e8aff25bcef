"""The live block and its optimiser: one training step after the other, and what may be done to the block between two steps.

Everything here belongs to one thread (thread.py) and knows neither the event loop nor other nodes. Parameters, gradients and both
Adam moments are one buffer each (flat.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from blocktrain.node.compute.adamw import FusedAdamW, Optimizer
from blocktrain.node.compute.device import Mover, Parcel
from blocktrain.node.compute.flat import Flat, norm_on_device, views
from blocktrain.node.compute.model import Block
from blocktrain.node.compute.objective import objective_of
from blocktrain.protocol.errors import BlocktrainError, DoesNotFit
from blocktrain.protocol.manifest import Manifest

LOSS_STEPS: Final = 50  # the running mean of the training loss is over about so many steps
CUDA_STEPS_PER_LOSS: Final = 16  # a loss read from the GPU makes Python wait for it; on the CPU every one is read
_EPS: Final = 1e-8

log = logging.getLogger(__name__)

Tensors = dict[str, np.ndarray[Any, Any]]


class TrainingFailed(BlocktrainError):
    """Training cannot go on; the text says why and what to change."""


class Batches(Protocol):
    """Where training data comes from. `node.data.TokenStream` is one. Called by the training thread only, `heldout` before it starts."""

    def next_batch(self) -> np.ndarray[Any, Any]:
        """int64 [batch, T + 1]."""
        ...

    def heldout(self, count: int) -> np.ndarray[Any, Any]:
        """Windows that are never trained on, the same at every call: int64 [count, T + 1]."""
        ...

    def position(self) -> dict[str, object]:
        """Where the stream is, as JSON values."""
        ...

    def seek(self, position: Mapping[str, object]) -> bool:
        """Go on from there. False: that was in other data; the stream stays where it is."""
        ...


@dataclass
class Counters:
    """How far this replica has come. Saved in checkpoints; only ever grow, but for those that say since when."""

    steps: int = 0
    tokens: int = 0
    merged_tokens: int = 0  # tokens trained when the last merge's snapshot was taken
    since_round: int = 0  # steps since the last merge or own round
    since_reset: int = 0  # steps since the moments were zero


@dataclass(frozen=True)
class Frozen:
    """All that a checkpoint needs of the trainer, as it was between two steps.

    Attributes:
        buffers: prefix of the tensors' names → buffer: "live.", "first." and "second." (Adam's moments).
    """

    header: dict[str, Any]
    generator: np.ndarray[Any, Any]
    buffers: dict[str, Parcel]

    def tensors(self, shapes: Mapping[str, tuple[int, ...]], mover: Mover) -> Tensors:
        """As named arrays. Off the training thread."""
        out: Tensors = {"generator": self.generator}
        for prefix, parcel in self.buffers.items():
            out |= {prefix + name: view.numpy() for name, view in views(shapes, mover.to_host(parcel)).items()}
        return out


class Trainer:
    """Trains block `block` of a run from its initial weights (or what is loaded later).

    Attributes:
        model: what a block is; research brings its own.
        round: of the published state, as far as the learning rate is concerned.
        loss: running mean of the training loss, nats per token; None before the first step.
    """

    model: type[Block] = Block

    def __init__(self, manifest: Manifest, block: int, batches: Batches, mover: Mover, *, seed: int, compile: bool = False) -> None:
        self.manifest = manifest
        self.mover = mover
        self.block = self.model(manifest, block).to(mover.device)
        self.flat = Flat(self.block, gradients=True)
        self.objective = objective_of(manifest, block)
        self.counters = Counters()
        self.round = 0
        self.loss: float | None = None
        self.learning_rate = 0.0
        self._batches = batches
        self._generator = torch.Generator().manual_seed(seed)
        self._first = torch.zeros_like(self.flat.data)
        self._second = torch.zeros_like(self.flat.data)
        self._optimizer = self._make_optimizer()
        self._losses = torch.zeros((), device=mover.device)  # sum of the losses not yet read
        self._unread = 0
        self._steps_per_loss = 1 if mover.device.type == "cpu" else CUDA_STEPS_PER_LOSS
        if compile:
            self.block.use_compile()

    # ---- training ---------------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One batch, one update. Raises: TrainingFailed: the loss is not a number any more."""
        settings, counters = self.manifest.optimizer, self.counters
        batch = torch.from_numpy(self._batches.next_batch()).to(self.mover.device, non_blocking=True)
        gradient = self.flat.grad
        assert gradient is not None
        gradient.zero_()
        for part in batch.chunk(settings.accumulate):
            with self.mover.autocast():
                loss = self.objective.loss(self.block, part, self._generator) / settings.accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            self._losses += loss.detach()
        if settings.clip > 0:
            gradient *= (settings.clip / (norm_on_device(gradient) + 1e-6)).clamp(max=1.0)
        self.learning_rate = self._rate()
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        self._optimizer.step()
        counters.steps += 1
        counters.tokens += batch.shape[0] * (batch.shape[1] - 1)
        counters.since_round += 1
        counters.since_reset += 1
        self._unread += 1
        if self._unread >= self._steps_per_loss:
            self.read_loss()

    def read_loss(self) -> None:
        """Bring the running mean up to date. Raises: TrainingFailed: a loss since the last reading was not a number."""
        if not self._unread:
            return
        steps, self._unread = self._unread, 0
        mean = float(self._losses) / steps
        self._losses.zero_()
        if not math.isfinite(mean):
            raise TrainingFailed(
                f"training stopped: the loss is {mean} at step {self.counters.steps}; "
                f"the run's schedule.learning_rate {self.manifest.schedule.learning_rate:g} may be too high"
            )
        weight = max(1 / LOSS_STEPS, 1 / self.counters.steps)  # a plain mean at first
        kept = (1 - weight) ** steps if self.loss is not None else 0.0
        self.loss = kept * (self.loss or 0.0) + (1 - kept) * mean

    def _rate(self) -> float:
        """The schedule's learning rate, by rounds and parts of rounds, times our own warm-up while the moments are young."""
        schedule, counters = self.manifest.schedule, self.counters
        rate = schedule.rate(self.round + min(1.0, counters.since_round / schedule.steps_per_round))
        return rate * min(1.0, (counters.since_reset + 1) / max(1, self.manifest.optimizer.warmup_steps))

    def _make_optimizer(self) -> Optimizer:
        settings = self.manifest.optimizer
        named = dict(self.block.named_parameters())
        matrices = [p for p in named.values() if p.ndim > 1]
        vectors = [p for p in named.values() if p.ndim <= 1]
        groups = [
            {"params": matrices, "lr": 0.0, "weight_decay": settings.weight_decay},
            {"params": vectors, "lr": 0.0, "weight_decay": 0.0},
        ]
        optimizer = FusedAdamW(groups, (settings.beta1, settings.beta2), _EPS)
        first, second = self.flat.views(self._first), self.flat.views(self._second)
        for name, parameter in named.items():
            step = torch.zeros((), dtype=torch.float32, device=self.mover.device)
            optimizer.state[parameter] = {"step": step, "exp_avg": first[name], "exp_avg_sq": second[name]}
        return optimizer

    # ---- between two steps ------------------------------------------------------------------------------------------------------

    def add(self, difference: Tensor) -> None:
        """live += difference. Moments stay."""
        self.flat.data.add_(difference)

    def replace(self, state: Tensor) -> None:
        """Other parameters; moments and their warm-up start again. What was trained so far is in no merge to come."""
        self.flat.data.copy_(state)
        self._first.zero_()
        self._second.zero_()
        self._set_moment_steps(0)
        self.counters.since_reset = 0
        self.counters.since_round = 0
        self.counters.merged_tokens = self.counters.tokens

    def _set_moment_steps(self, steps: int) -> None:
        for state in self._optimizer.state.values():
            state["step"].fill_(steps)

    # ---- checkpoints ------------------------------------------------------------------------------------------------------------

    def freeze(self) -> Frozen:
        """Copy what a checkpoint needs. Raises: TrainingFailed: the loss is not a number any more."""
        self.read_loss()
        take = self.mover.take
        header = {**asdict(self.counters), "position": self._batches.position(), "loss": self.loss}
        generator = self._generator.get_state().numpy().copy()
        return Frozen(header, generator, {prefix: take(buffer) for prefix, buffer in self._buffers().items()})

    def restore(self, tensors: Mapping[str, np.ndarray[Any, Any]], header: Mapping[str, Any], round: int) -> None:
        """Go on from a checkpoint: the next steps are those that would have followed when it was taken."""
        for prefix, buffer in self._buffers().items():
            for name, view in self.flat.views(buffer).items():
                view.copy_(torch.from_numpy(tensors[prefix + name]))
        self.counters = Counters(**{item.name: int(header[item.name]) for item in fields(Counters)})
        self._set_moment_steps(self.counters.since_reset)
        self._generator.set_state(torch.from_numpy(tensors["generator"]))
        if not self._batches.seek(header["position"]):
            log.info("the data is not that of the checkpoint: training goes on with it from its beginning")
        self.loss = header["loss"]
        self.round = round

    def _buffers(self) -> dict[str, Tensor]:
        return {"live.": self.flat.data, "first.": self._first, "second.": self._second}

    # ---- memory -----------------------------------------------------------------------------------------------------------------

    def optimizer_bytes(self) -> int:
        """Bytes in the optimiser's state, as measured: 8 a parameter and 4 a tensor."""
        return sum(tensor.nbytes for state in self._optimizer.state.values() for tensor in state.values())

    def train_bytes(self) -> int:
        """Bytes of parameters, gradients and the optimiser's state."""
        assert self.flat.grad is not None
        return self.flat.data.nbytes + self.flat.grad.nbytes + self.optimizer_bytes()


def one_line(error: BaseException, doing: str) -> BlocktrainError:
    """The expected error that an exception of the training thread stands for."""
    if isinstance(error, BlocktrainError):
        return error
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):
        return DoesNotFit(f"{doing}: the GPU's memory is full; free it, or run this block on another device ({text[:120]})")
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return DoesNotFit(f"{doing}: this machine's memory is full; stop other programs, or take a run with smaller blocks")
    return TrainingFailed(f"{doing} failed: {type(error).__name__}: {text[:200]}")
