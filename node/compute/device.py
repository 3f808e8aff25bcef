"""The device that trains, and the copies between it and the CPU where everything else about a state happens.

On the CPU these are plain copies. On CUDA the training thread only clones inside the device; the way to the host and back runs on a
stream of its own, so that no step waits for it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from blocktrain.node.compute import flat
from blocktrain.protocol.errors import DoesNotFit, UsageError


def choose(name: str) -> torch.device:
    """The device of a setting: "auto", "cpu", "cuda" or "cuda:N".

    Raises: UsageError: not a device. DoesNotFit: CUDA where there is none, or fewer GPUs.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not (kind == "cuda" and number.isdecimal())):
        raise UsageError(f"device {name!r} is not known: use auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = "this PyTorch is built without CUDA" if torch.version.cuda is None else "no usable GPU was found"
        raise DoesNotFit(f"device {name}: {built}; use --device cpu, or install PyTorch with CUDA")
    if int(number or 0) >= torch.cuda.device_count():
        raise DoesNotFit(f"device {name}: this machine has {torch.cuda.device_count()} GPUs, counted from 0")
    return torch.device("cuda", int(number or 0))


@dataclass(frozen=True)
class Parcel:
    """A tensor on its way between devices; whoever takes it waits until it is `ready`."""

    tensor: Tensor
    ready: torch.cuda.Event | None


class Mover:
    """Carries buffers between the training device and the CPU. One per replica."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def on_host(self) -> bool:
        """Whether the block is in CPU memory."""
        return self._side is None

    def autocast(self) -> AbstractContextManager[object]:
        """bfloat16 for the layers on CUDA; on these CPUs it would be slower than float32."""
        return torch.autocast("cuda", dtype=torch.bfloat16) if self._side is not None else nullcontext()

    def take(self, source: Tensor) -> Parcel:
        """Copy a buffer as it is now. On the training thread."""
        if self._side is None:
            return Parcel(flat.empty(source.numel()).view_as(source).copy_(source), None)
        copy = source.clone()
        return Parcel(copy, torch.cuda.current_stream(self.device).record_event())

    def to_host(self, parcel: Parcel) -> Tensor:
        """The copy in CPU memory. Off the training thread."""
        if self._side is None or parcel.ready is None:
            return parcel.tensor
        host = torch.empty(parcel.tensor.shape, dtype=parcel.tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self._side):
            self._side.wait_event(parcel.ready)
            host.copy_(parcel.tensor, non_blocking=True)
            parcel.tensor.record_stream(self._side)
        self._side.synchronize()
        return host

    def to_device(self, host: Tensor) -> Parcel:
        """A CPU buffer on its way to the device. Off the training thread."""
        if self._side is None:
            return Parcel(host, None)
        with torch.cuda.stream(self._side):
            return Parcel(host.to(self.device), self._side.record_event())

    def receive(self, parcel: Parcel) -> Tensor:
        """The parcel's tensor, to be used by what is issued next. On the training thread."""
        if parcel.ready is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(parcel.ready)
            parcel.tensor.record_stream(current)
        return parcel.tensor
