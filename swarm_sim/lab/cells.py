"""The trainings that each question needs. Two questions that need the same training name the same spec, and it is trained once."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from blocktrain.swarm_sim.lab.presets import Preset, manifest
from blocktrain.swarm_sim.lab.spec import Member, Sharing, Spec, Switches

RECIPE: Final = Switches()
SHARE_EVERY: Final = 20  # steps between two means of the shared embedding
LEAK_SIGMA: Final = (0.002, 2.0)
LITERAL_SIGMA: Final = (1.0, 10.0)
TRUE_NOISE_SIGMA: Final = (3.0, 30.0)


def chain(size: Preset, steps: int, seed: int, *, objective: str = "evidence", switches: Switches = RECIPE) -> list[Spec]:
    """B blocks that need nothing of each other: a training each."""
    run = manifest(size, objective, steps, seed)
    return [Spec(f"{objective} block {b}, seed {seed}", run, (Member(b),), steps, switches) for b in range(size.blocks)]


def coupled(size: Preset, steps: int, seed: int, switches: Switches) -> Spec:
    """B blocks of `evidence` that learn beside each other."""
    run = manifest(size, "evidence", steps, seed)
    return Spec(f"coupled blocks, seed {seed}", run, tuple(map(Member, range(size.blocks))), steps, switches)


def reference(size: Preset, steps: int, seed: int, switches: Switches = RECIPE) -> Spec:
    """One stack as deep as all blocks together, with a table as large as all of theirs; end to end, on as many bytes as each block."""
    tables = replace(size.grams, rows=size.grams.rows * size.blocks)
    whole = Preset(size.width, size.layers * size.blocks, 1, tables)
    return Spec(f"reference, seed {seed}", manifest(whole, "autoregressive", steps, seed), (Member(0),), steps, switches)


def literal(size: Preset, steps: int, seed: int, sigma: tuple[float, float] = LITERAL_SIGMA) -> Spec:
    """The paper's objective; its embedding is the mean of all blocks' every `SHARE_EVERY` steps."""
    run = manifest(size, "diffusionblocks", steps, seed, sigma=sigma)
    members = tuple(map(Member, range(size.blocks)))
    return Spec(f"diffusionblocks σ {sigma[0]:g}-{sigma[1]:g}, seed {seed}", run, members, steps, sharing=Sharing(SHARE_EVERY))


def true_noise(size: Preset, steps: int, seed: int) -> list[Spec]:
    """`evidence` with z at every position."""
    specs = chain(size, steps, seed, switches=Switches(true_noise=True))
    noise = replace(specs[0].manifest.noise, sigma_low=TRUE_NOISE_SIGMA[0], sigma_high=TRUE_NOISE_SIGMA[1])
    return [replace(spec, label=f"true noise {i}", manifest=replace(spec.manifest, noise=noise)) for i, spec in enumerate(specs)]


def replicas(size: Preset, steps: int, seed: int, sharing: Sharing, *, batch: int | None = None, count: int = 2) -> Spec:
    """Replicas of block 0, each on its own part of the text."""
    run = manifest(size, "evidence", steps, seed)
    if batch is not None:
        run = replace(run, optimizer=replace(run.optimizer, batch=batch))
    members = tuple(Member(0, f"replica {i}", (i, count)) for i in range(count))
    return Spec(f"{count} replicas, seed {seed}", run, members, steps, sharing=sharing)
