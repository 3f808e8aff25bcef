"""What a GPU is called and how much of its memory is free: for `doctor`, which may not import torch itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Gpu:
    """Memory in bytes."""

    name: str
    free: int
    total: int


def look(device: torch.device) -> Gpu:
    """`device` is a CUDA device that exists (`device.choose`)."""
    free, total = torch.cuda.mem_get_info(device)
    return Gpu(torch.cuda.get_device_name(device), free, total)
