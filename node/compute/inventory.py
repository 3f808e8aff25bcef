"""What a GPU is called and how much of its memory is free: for `doctor`, which may not import torch itself."""

from __future__ import annotations

import time
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


def matrix_speed(device: torch.device, seconds: float = 0.3) -> float:
    """Floating-point operations per second of matrix products like those of training, one thread on a CPU. Runs for about `seconds`."""
    threads = torch.get_num_threads()
    size, kind = (4096, torch.bfloat16) if device.type == "cuda" else (384, torch.float32)
    torch.set_num_threads(1)
    try:
        a = torch.ones(size, size, device=device, dtype=kind)
        (a @ a).sum().item()  # warm; .item() waits for the device
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for _ in range(4):
                a @ a
            done += 4
            a[0, 0].item()
        return done * 2 * size**3 / (time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
