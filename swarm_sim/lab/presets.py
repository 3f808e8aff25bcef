"""Named sizes, from a laptop's CPU to blocks that fill a GPU of 24 GB. One dial, width x layers per block x blocks, sets the rest.

Heads, context, batch, learning rate and micro-batches follow from the three numbers, so a size is named by them alone (256x4x3 works
too). The rules are fitted to few points (docs/recipe.md); what a size needs in memory is computed from its parameters, not guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from blocktrain.node.compute.flat import count, shapes_of
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.manifest import FORMAT, Grams, Manifest, Model, Noise, Optimizer, Schedule

WARMUP_STEPS: Final = 100
TRAIN_BYTES_PER_PARAMETER: Final = 16  # float32: parameter, gradient, two moments
_DIAL: Final = re.compile(r"(\d+)x(\d+)x(\d+)")


@dataclass(frozen=True)
class Preset:
    """The dial: d, L and B. `tables`: n-grams other than the dial's own (`Grams()`: none)."""

    width: int
    layers: int
    blocks: int
    tables: Grams | None = None

    @property
    def heads(self) -> int:
        """Heads of 32 where blocks are narrow, of 128 where they are wide."""
        return max(1, self.width // (32 if self.width <= 256 else 64 if self.width <= 1024 else 128))

    @property
    def context(self) -> int:
        return 128 if self.width <= 128 else 256 if self.width <= 512 else 1024

    @property
    def batch(self) -> int:
        """Sequences a step: some 1,000 bytes where blocks are small, 64,000 where they are large."""
        return 8 if self.width <= 128 else 16 if self.width <= 512 else 64

    @property
    def accumulate(self) -> int:
        """Parts of a batch, so that activations stay small beside the parameters."""
        return 1 if self.width <= 512 else 16 if self.width <= 1536 else 64

    @property
    def grams(self) -> Grams:
        """N-grams of 2 to 6 bytes: a table nearly as large as a narrow block, and a small part of a wide one."""
        if self.tables is not None:
            return self.tables
        rows, width = (
            (1024, 8) if self.width < 128 else (2**14, 24) if self.width == 128 else (2**16, 24) if self.width <= 512 else (2**18, 64)
        )
        return Grams(longest=6, rows=rows, row_width=width)

    @property
    def learning_rate(self) -> float:
        """4e-3 at d=128, L=2; as 1/√width, and 3e-3 at L=6 (docs/recipe.md)."""
        return learning_rate(self.width, self.layers)


PRESETS: Final = {
    "smoke": Preset(32, 1, 3),  # seconds; for tests
    "laptop": Preset(128, 2, 3),  # the measured one; the recipe `tiny`
    "desk": Preset(256, 4, 4),  # the recipe `small`
    "paper": Preset(512, 4, 3),  # the paper's largest run of quality
    "gpu8": Preset(1536, 8, 8),  # the recipe `gpu`
    "gpu12": Preset(2048, 10, 8),
    "gpu24": Preset(2560, 14, 8),
}


def preset(name: str) -> Preset:
    """A preset by name, or by its dial "WIDTHxLAYERSxBLOCKS". Raises: UsageError."""
    if name in PRESETS:
        return PRESETS[name]
    found = _DIAL.fullmatch(name)
    if not found:
        raise UsageError(f"--preset {name}: give one of {', '.join(PRESETS)}, or WIDTHxLAYERSxBLOCKS such as 128x2x3")
    width, layers, blocks = map(int, found.groups())
    if width % 32 or not 32 <= width <= 16384 or not 1 <= layers <= 64 or not 1 <= blocks <= 64:
        raise UsageError(f"--preset {name}: width is a multiple of 32 up to 16384, layers and blocks are 1 … 64")
    return Preset(width, layers, blocks)


def learning_rate(width: int, layers: int) -> float:
    """The learning rate of a stack trained together, whether a block or the end-to-end reference."""
    return float(f"{4e-3 * (128 / width) ** 0.5 * (2 / layers) ** 0.25:.2g}")


def manifest(size: Preset, objective: str, steps: int, seed: int, *, sigma: tuple[float, float] = (0.2, 4.0)) -> Manifest:
    """The run of one bench: a round is a step, so that the schedule follows steps; warm-up, then cosine to a tenth."""
    return Manifest(
        format=FORMAT,
        name="lab",
        blocks=size.blocks,
        objective=objective,
        tokenizer="bytes",
        seed=seed,
        model=Model(width=size.width, layers=size.layers, heads=size.heads, context=size.context, vocabulary=256),
        noise=Noise(sigma_low=sigma[0], sigma_high=sigma[1], overlap=0.1, window_share=0.125),
        schedule=Schedule(
            steps_per_round=1,
            learning_rate=size.learning_rate,
            warmup_rounds=min(WARMUP_STEPS, steps // 4),
            planned_rounds=steps,
            floor=0.1,
        ),
        optimizer=Optimizer(
            batch=size.batch, accumulate=size.accumulate, beta1=0.9, beta2=0.95, weight_decay=0.05, clip=1.0, warmup_steps=0
        ),
        grams=size.grams,
    )


def parameters(size: Preset) -> int:
    """Of one block."""
    return count(shapes_of(manifest(size, "evidence", 1, 0)))


def train_bytes(size: Preset) -> int:
    """Parameters, gradients and moments of one block, in bytes: the paper's column."""
    return TRAIN_BYTES_PER_PARAMETER * parameters(size)
