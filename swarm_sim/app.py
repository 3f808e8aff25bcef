"""The program `blocktrain-sim`: a swarm of real processes on this machine, and the benches. A command imports what it needs when run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter
from cyclopts.validators import Number

from blocktrain.node.commands import frame
from blocktrain.protocol.errors import UsageError
from blocktrain.swarm_sim import world_cmd

HELP: Final = "Simulate swarms on this machine, and measure them."
BENCH_HELP: Final = """Measure. The numbers are printed as a table, and written with --json as flat keys, with settings and seeds.

A part that could not run gives null, and exit code 1."""
Many = Annotated[tuple[str, ...], Parameter(consume_multiple=True)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """`blocktrain-sim local`."""

    blocks: Annotated[
        int | None, Parameter(validator=Number(gte=1, lte=64), help="How many blocks the model has; without it, as many as the recipe.")
    ] = None
    replicas: Annotated[int, Parameter(validator=Number(gte=1, lte=64), help="How many nodes hold each block.")] = 2
    minutes: Annotated[
        float, Parameter(validator=Number(gt=0, lte=100_000), help="About how long everything takes, start and end included.")
    ] = 4.0
    recipe: Annotated[Path, Parameter(help="The run: a run.toml, or the name of a recipe that comes with blocktrain.")] = Path("tiny")
    data: Annotated[Many, Parameter(help="Text to train on: as for blocktrain-node.")] = ("builtin",)
    prompt: Annotated[str, Parameter(help="What the text at the end begins with.")] = "The "
    kill: Annotated[bool, Parameter(negative="--no-kill", help="Kill one replica in the middle and let another take its place.")] = True
    kill_every: Annotated[
        float | None,
        Parameter(
            validator=Number(gte=1, lte=86_400), help="Trouble: every so many seconds, kill a holder; it comes back, or somebody new does."
        ),
    ] = None
    freeze: Annotated[bool, Parameter(help="Trouble: stop nodes now and then, for 2 to 15 seconds.")] = False
    links: Annotated[
        Path | None, Parameter(help="Trouble: delay, rate and loss between nodes; a file, or one of home, wan, edge (docs/simulator.md).")
    ] = None
    byzantine: Annotated[int, Parameter(validator=Number(gte=0, lte=64), help="Trouble: so many nodes more, which send false states.")] = 0
    seed: Annotated[int, Parameter(validator=Number(gte=0), help="What is drawn of the trouble comes from it.")] = 0
    report: Annotated[
        Path | None, Parameter(help="Let checkers judge what the nodes logged; write the report here, as HTML, and JSON beside it.")
    ] = None
    out: Annotated[Path | None, Parameter(help="Folder for logs, checkpoints, plot and summary; without it, a new one in this folder.")] = (
        None
    )
    json: Annotated[Path | None, Parameter(help="Write the summary here as well; - is standard output.")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What all benches have in common."""

    brief: Annotated[bool, Parameter(help="At most two minutes, at less precision.")] = False
    parts: Annotated[Many, Parameter(help="Only these parts of the bench.")] = ()
    seeds: Annotated[
        int | None, Parameter(validator=Number(gte=1, lte=1000), help="How many seeds (0 … N-1), where a bench has seeds.")
    ] = None
    json: Annotated[Path | None, Parameter(help="Write the numbers here; - is standard output.")] = None
    add: Annotated[
        bool, Parameter(negative=(), help="Keep what the JSON file holds of other parts, so that a long bench can be run in pieces.")
    ] = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """What the bench of sweeps has beyond that."""

    rtt_ms: Annotated[str, Parameter(help="Round trip times between all processes, in milliseconds, with commas between them.")] = (
        "0,20,50,100"
    )
    blocks: Annotated[str, Parameter(help="How many blocks a chain has; several with commas between them.")] = "3,6"
    plot: Annotated[Path | None, Parameter(help="Where the picture of a byte's cost goes; by default none is drawn.")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LabOptions:
    """What the benches of the learning recipe have beyond that."""

    preset: Annotated[
        str | None,
        Parameter(help="How large: a name (laptop, desk, paper, gpu8, gpu12, gpu24) or WIDTHxLAYERSxBLOCKS. `laptop` by default."),
    ] = None
    steps: Annotated[int | None, Parameter(validator=Number(gte=10, lte=10_000_000), help="Training steps of each block.")] = None
    data: Annotated[
        Many, Parameter(help="Text to train on: as for blocktrain-node. By default gensim's excerpt, or builtin without it.")
    ] = ()
    processes: Annotated[
        int | None, Parameter(validator=Number(gte=1, lte=256), help="Trainings at a time, each with one thread. By default 2.")
    ] = None
    compile: Annotated[bool, Parameter(help="Use torch.compile: worth it for long runs.")] = False
    device: Annotated[str, Parameter(help="Where to train: cpu, cuda or cuda:N.")] = "cpu"
    plot: Annotated[Path | None, Parameter(help="Where the picture goes; by default into the user's cache.")] = None


def simulator() -> App:
    """The program."""
    app = frame.new_app("blocktrain-sim", HELP)
    app.command(local)
    app.command(world_cmd.app())
    bench = App(name="bench", help=BENCH_HELP)
    for name, command in BENCHES.items():
        bench.command(command, name=name)
    app.command(bench)
    return app


def local(options: LocalOptions = LocalOptions()) -> int:
    """Run a real swarm of processes on this machine, kill one of them, and let the chain write a text.

    With trouble (--kill-every, --freeze, --links, --byzantine) there is more than that one kill. After it the swarm must recover, checkers
    judge what all nodes logged, and the report is DIR/report.html.
    Exits with 0 only if everything happened: all met, all averaged, the loss fell, the others carried on after the kill and the block was
    served, a replacement took the swarm's state, the text was written, no traceback was logged and no process was left behind.
    """
    from blocktrain.swarm_sim import local_cmd

    return local_cmd.local(options)


def bench_node(options: BenchOptions = BenchOptions()) -> int:
    """What being a node costs: training speed beside a bare loop, the time to join, the optimiser's memory."""
    from blocktrain.swarm_sim import benches
    from blocktrain.swarm_sim.bench_node import BENCH

    return benches.command(BENCH, options)


def bench_gossip(options: BenchOptions = BenchOptions()) -> int:
    """What averaging costs: our exchange beside hivemind's averager, here and on an emulated link; codecs, attacks, outer steps, mixing."""
    from blocktrain.swarm_sim import benches
    from blocktrain.swarm_sim.bench_gossip import BENCH

    return benches.command(BENCH, _split(options))


def bench_quality(options: BenchOptions = BenchOptions(), lab: LabOptions = LabOptions()) -> int:
    """What the learning recipe is worth: the chain, its blocks, plain blocks, the end-to-end reference, the paper's tables, and text.

    Trainings are kept in the user's cache: an interrupted bench goes on where it was.
    """
    from blocktrain.swarm_sim import bench_quality as quality
    from blocktrain.swarm_sim import benches

    return benches.command(quality.bench(quality.settings_of(lab)), _split(options))


def bench_ideas(options: BenchOptions = BenchOptions(), lab: LabOptions = LabOptions()) -> int:
    """Ideas that might beat the recipe, each beside it and beside its own control. Long: not part of `all`."""
    from blocktrain.swarm_sim import bench_ideas as ideas
    from blocktrain.swarm_sim import bench_quality as quality
    from blocktrain.swarm_sim import benches

    return benches.command(ideas.bench(quality.settings_of(lab)), _split(options))


def bench_step(
    options: BenchOptions = BenchOptions(), preset: Annotated[str | None, Parameter(help="How large; `laptop` by default.")] = None
) -> int:
    """What a training step costs beside the same layers in a plain torch loop, and what a block needs in memory."""
    from blocktrain.swarm_sim import bench_step as step
    from blocktrain.swarm_sim import benches

    return benches.command(step.bench(preset), _split(options))


def _split(options: BenchOptions) -> BenchOptions:
    """Parts may be given with commas as well."""
    return replace(options, parts=tuple(part for parts in options.parts for part in parts.split(",") if part))


def bench_sweep(options: BenchOptions = BenchOptions(), sweep: SweepOptions = SweepOptions()) -> int:
    """How fast a chain of real processes writes: three ways, two routes, with a network between them; and how well.

    Trained weights are kept in the user's cache.
    """
    from blocktrain.swarm_sim import bench_sweep as sweeps
    from blocktrain.swarm_sim import benches

    return benches.command(sweeps.bench(sweeps.plan(sweep.rtt_ms, sweep.blocks, sweep.plot)), _split(options))


def bench_all(options: BenchOptions = BenchOptions()) -> int:
    """Every bench, one after the other. Keys of the JSON begin with the bench's name and a dot."""
    from blocktrain.swarm_sim import bench_quality as quality
    from blocktrain.swarm_sim import bench_step as step
    from blocktrain.swarm_sim import bench_sweep as sweeps
    from blocktrain.swarm_sim import bench_world as world
    from blocktrain.swarm_sim import benches
    from blocktrain.swarm_sim.bench_catchup import BENCH as CATCHUP
    from blocktrain.swarm_sim.bench_gossip import BENCH as GOSSIP
    from blocktrain.swarm_sim.bench_node import BENCH

    if options.parts:
        raise UsageError("--parts chooses among the parts of one bench: name it instead of `all`")
    return benches.commands(
        [
            BENCH,
            world.bench(),
            CATCHUP,
            GOSSIP,
            step.bench(None),
            quality.bench(quality.Settings()),
            sweeps.bench(sweeps.plan(SweepOptions().rtt_ms, SweepOptions().blocks)),
        ],
        options,
    )


def bench_catchup(options: BenchOptions = BenchOptions()) -> int:
    """How fast a joiner gets a state from one donor and from two, against a raw stream."""
    from blocktrain.swarm_sim import benches
    from blocktrain.swarm_sim.bench_catchup import BENCH

    return benches.command(BENCH, options)


def bench_world(
    options: BenchOptions = BenchOptions(),
    plots: Annotated[Path | None, Parameter(help="Folder for the pictures; by default none is drawn.")] = None,
) -> int:
    """Simulated swarms of up to ten thousand nodes: messages, bytes, discovery, mixing; the DHT's model against the real one."""
    from blocktrain.swarm_sim import bench_world as world
    from blocktrain.swarm_sim import benches

    return benches.command(world.bench(plots), _split(options))


BENCHES: Final = {
    "world": bench_world,
    "catchup": bench_catchup,
    "node": bench_node,
    "gossip": bench_gossip,
    "quality": bench_quality,
    "ideas": bench_ideas,
    "step": bench_step,
    "sweep": bench_sweep,
    "all": bench_all,
}


def main(argv: Sequence[str] | None = None) -> int:
    return frame.run(simulator(), argv)


if __name__ == "__main__":
    sys.exit(main())
