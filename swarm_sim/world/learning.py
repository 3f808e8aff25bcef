"""Learning under asynchrony: the paper's experiment (arXiv 2606.24722, tables 4 and 5) with small real blocks, and ours beside it.

The paper: each round all K replicas of a block start from the coordinator's state, train H steps, and send their differences; a
difference counts if it arrives by the deadline, and the mean of those that count is added. If none does, the old block is kept and the
round's work is lost. Ours: the same replicas, data, steps and links in virtual time, averaged by the protocol core's gossip; what is late
is not used, but nobody throws work away. Both do the same number of local steps a replica. Participation is the share of differences
that count (paper), and the share of rounds that ended in a merge (ours).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

import torch

from blocktrain.protocol.manifest import Manifest, Model, Noise, Optimizer, Schedule
from blocktrain.swarm_sim.world.compute import Compute
from blocktrain.swarm_sim.world.plan import Event, Person, Plan
from blocktrain.swarm_sim.world.real_block import RealBlock
from blocktrain.swarm_sim.world.scenarios import REGIMES, Regime
from blocktrain.swarm_sim.world.world import World

ROUND_S: Final = 15.0  # of compute
STATE_BYTES: Final = 4_000_000  # as it would travel: the regimes' rates are made for it, not for the small block


@dataclass(frozen=True)
class Size:
    """How large the experiment is."""

    blocks: int = 2
    replicas: int = 4
    rounds: int = 16
    steps: int = 16  # H


@dataclass(frozen=True)
class Row:
    """One regime. Losses are nats per byte on held-out text, the mean over blocks (and over replicas, for gossip)."""

    regime: str
    paper_participation: float
    paper_loss: float
    gossip_participation: float
    gossip_loss: float
    virtual_s: float  # that the paper's rounds took


def manifest_of(size: Size) -> Manifest:
    return Manifest(
        format=1, name="learning", blocks=size.blocks, objective="evidence", tokenizer="bytes", seed=0,
        model=Model(32, 1, 2, 32, 256), noise=Noise(0.2, 4.0, 0.1, 0.25), schedule=Schedule(size.steps, 6e-3, 1, size.rounds, 0.3),
        optimizer=Optimizer(8, 1, 0.9, 0.95, 0.05, 1.0, 10),
    )  # fmt: skip


def compare(name: str, size: Size, seed: int) -> Row:
    """One regime, both ways."""
    torch.set_num_threads(1)
    regime = REGIMES[name]
    paper = [_coordinator(regime, size, block, seed) for block in range(size.blocks)]
    share, loss = _gossip(regime, size, seed)
    return Row(
        name,
        statistics.mean(p[0] for p in paper),
        statistics.mean(p[1] for p in paper),
        share,
        loss,
        max(p[2] for p in paper),
    )


def _coordinator(regime: Regime, size: Size, block: int, seed: int) -> tuple[float, float, float]:
    """The paper's rounds of one block: (participation, loss, virtual seconds)."""
    rng = Random(f"{seed} coordinator {block}")
    manifest = manifest_of(size)
    workers = [RealBlock(manifest, block, k, size.replicas, seed * 1000 + k) for k in range(size.replicas)]
    speeds = _speeds(regime, size, seed)
    state, accepted, elapsed_s = workers[0].live(), 0, 0.0
    for round in range(size.rounds):
        changes, arrivals = [], [0.0]
        for k, worker in enumerate(workers):
            _continue_from(worker, state, round)
            worker.train(size.steps)
            comm_s = 2 * regime.latency_s * rng.uniform(1.0, 1.5) + 2 * STATE_BYTES / (regime.rate * rng.lognormvariate(0.0, 0.4))
            late_s = ROUND_S * (speeds[k] - 1.0) + comm_s
            if late_s <= regime.tau_s and rng.random() >= regime.dropped:
                changes.append(worker.live() - state)
                arrivals.append(late_s)
        accepted += len(changes)
        if changes:
            state = state + torch.stack(changes).mean(0)
        elapsed_s += ROUND_S + (max(arrivals) if len(changes) == len(workers) else regime.tau_s)
    return accepted / (size.rounds * size.replicas), workers[0].score(state), elapsed_s


def _continue_from(worker: RealBlock, state: torch.Tensor, round: int) -> None:
    """The coordinator's state, with the worker's own moments kept: the paper does not say, and this is kinder to it."""
    worker.trainer.flat.data.copy_(state)
    worker.trainer.round = round
    worker.trainer.counters.since_round = 0


def _speeds(regime: Regime, size: Size, seed: int) -> list[float]:
    rng = Random(f"{seed} speeds")
    return [rng.uniform(1.0, regime.slow) for _ in range(size.replicas)]


def _gossip(regime: Regime, size: Size, seed: int) -> tuple[float, float]:
    """Our protocol with the same replicas: (participation, loss)."""
    rng = Random(f"{seed} gossip")
    speeds = _speeds(regime, size, seed)
    count = size.blocks * size.replicas
    people = [
        Person(number % size.blocks, speeds[number // size.blocks], regime.rate * rng.lognormvariate(0.0, 0.4), regime.rate * 2)
        for number in range(count)
    ]
    events = tuple(Event(0.0 if number == 0 else rng.uniform(0.5, 3.0), "start", (number,)) for number in range(count))
    slowest_s = ROUND_S * max(speeds)
    end_s = size.rounds * slowest_s + 10.0
    plan = Plan(
        tuple(people), events, size.blocks, end_s, end_s, round_s=ROUND_S, tau_s=regime.tau_s, state_bytes=STATE_BYTES,
        spread_s=2 * regime.latency_s, loss=regime.dropped / 5,
    )  # fmt: skip
    build = partial(_build, size, seed)
    world = World(plan, seed, build=build, manifest=manifest_of(size))
    limit = size.rounds * size.steps
    for node in world.nodes:
        assert isinstance(node.compute, RealBlock)
        node.compute.train = partial(_up_to, node.compute, limit)  # type: ignore[method-assign]
    world.run()
    blocks = [node.compute for node in world.nodes if isinstance(node.compute, RealBlock)]
    for node in world.nodes:
        node.catch_up_steps()
    merges = sum(node.core.counters.accepted for node in world.nodes)
    own = sum(node.core.counters.own_rounds for node in world.nodes)
    return merges / max(1, merges + own), statistics.mean(block.loss() for block in blocks)


def _up_to(block: RealBlock, limit: int, steps: int) -> None:
    """Train, but no more than the other side of the comparison does."""
    for _ in range(min(steps, limit - block.trainer.counters.steps)):
        block.trainer.step()


def _build(size: Size, seed: int, manifest: Manifest, block: int, number: int) -> Compute:
    part = number // size.blocks
    return RealBlock(manifest, block, part, size.replicas, seed * 1000 + part)


def table(rows: list[Row]) -> list[str]:
    """For people."""
    head = f"{'regime':<10} {'paper: participation':>21} {'loss':>7} {'gossip: participation':>22} {'loss':>7}"
    return [
        head,
        *(
            f"{r.regime:<10} {r.paper_participation:>21.2f} {r.paper_loss:>7.3f} {r.gossip_participation:>22.2f} {r.gossip_loss:>7.3f}"
            for r in rows
        ),
    ]
