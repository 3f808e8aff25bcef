"""`blocktrain-sim bench node`: what being a node costs, beside a plain training loop.

**efficiency.** Six bare loops (bare_loop.py) and a six-node swarm live at the same time, and take turns: while one side is measured, every
process of the other is stopped (SIGSTOP), daemons included. A swarm that was stopped has exchanges to give up and records to
renew, so a window begins only when it has settled: every node has been accepted in an exchange since, or SETTLE_S are over. Its
announcements live for two minutes, so that nobody is forgotten in between; all else is as nodes do by default. Both sides run at the
same priority. Steps are counted by the processes' own clocks between their first and their last word in a window. The order within a
pair alternates, so that a machine that slows down slows both. `efficiency` is the sum of steps/s over all windows of the swarm, over
that of the bare loops; `efficiency_cpu` is the same per second of processor time, daemons included. On a machine that does nothing else
the two agree; beside other load, which gives way to whoever has more threads, the second is the one to trust.

**join.** Five nodes are up, none of them trains, and a sixth is started: `announce_s` is from its start (of the process) to its own word
that the swarm holds its record; then all train, and `first_exchange_s` is from there to its first accepted exchange.

**memory.** Bytes in the optimiser's state of one block, and in that of all: exactly one B-th.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blocktrain.node.recipe_file import load_recipe
from blocktrain.swarm_sim import recipe
from blocktrain.swarm_sim.benches import Bench, Session
from blocktrain.swarm_sim.cluster import Cluster, Member, Run, number
from blocktrain.swarm_sim.processes import Child, Children, Failure, installed

BLOCKS: Final = 3
REPLICAS: Final = 2
PAIRS: Final = 9
WINDOW_S: Final = 30.0
BRIEF_PAIRS: Final = 2
BRIEF_WINDOW_S: Final = 8.0
SETTLE_S: Final = 20.0  # for a swarm that was stopped
BARE_SETTLE_S: Final = 1.0
TTL_S: Final = 120.0
JOIN_S: Final = 60.0
ANNOUNCED: Final = b"announced: the swarm knows"  # a node logs it once, when its first record is stored
FAST_POLL_S: Final = 0.02  # while a time is measured
KEYS: Final = {
    "memory": ("adamw_bytes_block", "adamw_bytes_stack", "adamw_share"),
    "join": ("announce_s", "first_exchange_s"),
    "efficiency": ("efficiency", "efficiency_median", "efficiency_low", "efficiency_high", "efficiency_cpu"),
}


@dataclass(frozen=True)
class Window:
    """What one side did while the other was stopped."""

    steps_per_s: float  # over all its processes
    cpu_s_per_step: float
    daemon_share: float  # of the processor time
    accepted: int


@dataclass
class Sides:
    """The two sides of the comparison."""

    children: Children
    cluster: Cluster
    bare: list[Child]

    @property
    def nodes(self) -> list[Child]:
        return [member.child for member in self.cluster.members]

    def window(self, swarm: bool, seconds: float) -> Window:
        """Measure one side for so long, the other stopped."""
        measured, stopped = (self.nodes, self.bare) if swarm else (self.bare, self.nodes)
        self.children.freeze(stopped)
        self.children.thaw(measured)
        self._settle(swarm)
        accepted = self.cluster.total("accepted")
        first = self._heard(measured)
        before_cpu = self.children.cpu_s(measured)
        self.children.run(seconds)
        last = self._heard(measured)
        after_cpu = self.children.cpu_s(measured)
        cpu_s = after_cpu.total - before_cpu.total
        rates = [_rate(before, after) for before, after in zip(first, last, strict=True)]
        steps = sum(after["steps"] - before["steps"] for before, after in zip(first, last, strict=True))
        daemon_share = (after_cpu.daemons - before_cpu.daemons) / max(cpu_s, 1e-9)
        return Window(sum(rates), cpu_s / max(1.0, steps), daemon_share, self.cluster.total("accepted") - accepted)

    def _settle(self, swarm: bool) -> None:
        if not swarm:
            self.children.run(BARE_SETTLE_S)
            return
        before = {member.label: member.number("accepted") for member in self.cluster.members}
        end = time.monotonic() + SETTLE_S

        def settled() -> bool:
            return time.monotonic() > end or all(member.number("accepted") > before[member.label] for member in self.cluster.members)

        self.children.wait(settled, 2 * SETTLE_S, "this machine did not keep time")

    def _heard(self, children: Sequence[Child]) -> list[dict[str, float]]:
        """The next word of each child: its steps, and its own clock's time of that."""
        before = {child.label: child.said_at for child in children}
        heard: dict[str, dict[str, float]] = {}

        def all_heard() -> bool:
            for child in children:
                if child.label not in heard and child.said_at > before[child.label]:
                    heard[child.label] = {key: number(child.status, key) or 0.0 for key in ("steps", "written_at")}
            return len(heard) == len(children)

        self.children.wait(all_heard, self.children.patience.silent_s, "not every process said how far it is")
        return [heard[child.label] for child in children]


def run(session: Session) -> None:
    """All parts that are wanted; one swarm serves both that need one."""
    run_file = recipe.write(Path(recipe.TINY), session.folder / "run.toml", blocks=BLOCKS, minutes=recipe.TINY_MINUTES)
    session.measure("memory", lambda: _memory(run_file.path))
    if not session.wants("join", "efficiency"):
        return
    with session.guard("join", "efficiency"), Children(session.folder) as children:
        session.say("starting five nodes")
        cluster = Cluster(children, installed(), Run(run_file.path, ("builtin",), flags=("--ttl-s", f"{TTL_S:g}")))
        cluster.start_host()
        for block in [*range(1, BLOCKS), *range(BLOCKS - 1)]:
            cluster.join(block)
        cluster.wait_met()
        session.say("starting the sixth, the others at rest")
        joiner = cluster.join(BLOCKS - 1)
        session.measure("join", lambda: _join(cluster, joiner))
        cluster.wait_met()
        cluster.resume()
        session.measure("efficiency", lambda: _efficiency(session, children, cluster, run_file.path))


def _memory(run_file: Path) -> Mapping[str, object]:
    """Measured on real optimisers, one a block."""
    from blocktrain.node.compute.device import Mover, choose
    from blocktrain.node.compute.trainer import Trainer
    from blocktrain.node.data import TokenStream, load_tokens
    from blocktrain.node.tokenizer import load_tokenizer

    manifest = load_recipe(run_file)
    corpus = load_tokens(("builtin",), load_tokenizer(manifest.tokenizer, manifest.model.vocabulary), manifest.model.context)
    sizes = []
    for block in range(manifest.blocks):
        batches = TokenStream(corpus, batch=manifest.optimizer.batch, peer="", block=block, seed=manifest.seed)
        trainer = Trainer(manifest, block, batches, Mover(choose("cpu")), seed=0)
        trainer.step()
        sizes.append(trainer.optimizer_bytes())
    return {"adamw_bytes_block": sizes[0], "adamw_bytes_stack": sum(sizes), "adamw_share": sizes[0] / sum(sizes)}


def _join(cluster: Cluster, joiner: Member) -> Mapping[str, object]:
    children = cluster.children
    children.wait(lambda: announced(joiner), JOIN_S, f"{joiner.label} was not announced", FAST_POLL_S)
    announced_at = time.monotonic()
    cluster.resume()
    children.wait(lambda: joiner.number("accepted") > 0, JOIN_S, f"{joiner.label} was not accepted in an exchange", FAST_POLL_S)
    return {"announce_s": announced_at - joiner.child.started, "first_exchange_s": time.monotonic() - announced_at}


def announced(member: Member) -> bool:
    """Whether the swarm holds the node's record, by its own word on stderr."""
    return ANNOUNCED in member.child.log.read_bytes()


def _efficiency(session: Session, children: Children, cluster: Cluster, run_file: Path) -> Mapping[str, object]:
    pairs, seconds = (BRIEF_PAIRS, BRIEF_WINDOW_S) if session.brief else (PAIRS, WINDOW_S)
    children.freeze([member.child for member in cluster.members])
    sides = Sides(children, cluster, _start_bare(children, run_file))
    swarm: list[Window] = []
    bare: list[Window] = []
    for pair in range(pairs):
        for is_swarm in (True, False) if pair % 2 else (False, True):
            window = sides.window(is_swarm, seconds)
            (swarm if is_swarm else bare).append(window)
            session.say(f"pair {pair + 1} of {pairs}: {'six nodes' if is_swarm else 'six bare loops'} {window.steps_per_s:.2f} steps/s")
    if not sum(window.accepted for window in swarm):
        raise Failure("no exchange was accepted in any window, so that nothing of a node's work was measured")
    children.thaw(sides.bare)
    ratios = [ours.steps_per_s / theirs.steps_per_s for ours, theirs in zip(swarm, bare, strict=True)]
    return {
        "efficiency": sum(window.steps_per_s for window in swarm) / sum(window.steps_per_s for window in bare),
        "efficiency_median": statistics.median(ratios),
        "efficiency_low": min(ratios),
        "efficiency_high": max(ratios),
        "efficiency_cpu": sum(window.cpu_s_per_step for window in bare) / sum(window.cpu_s_per_step for window in swarm),
        "daemons_cpu_share": statistics.mean(window.daemon_share for window in swarm),
        "bare_cpu_ms_per_step": 1000 * statistics.mean(window.cpu_s_per_step for window in bare),
        "swarm_cpu_ms_per_step": 1000 * statistics.mean(window.cpu_s_per_step for window in swarm),
        "efficiency_pairs": pairs,
        "efficiency_window_s": seconds,
        "swarm_steps_per_s": [round(window.steps_per_s, 3) for window in swarm],
        "bare_steps_per_s": [round(window.steps_per_s, 3) for window in bare],
        "swarm_exchanges": [window.accepted for window in swarm],
        "swarm_late": cluster.total("late"),
        "swarm_refused": cluster.total("refused"),
        "nodes": len(cluster.members),
    }


def _start_bare(children: Children, run_file: Path) -> list[Child]:
    command = installed().bare
    bare = [
        children.start(f"bare-{block}{shard}", [*command, str(run_file), str(block), shard])
        for shard in "abcdef"[:REPLICAS]
        for block in range(BLOCKS)
    ]
    children.wait(lambda: all(child.status for child in bare), children.patience.start_s, "the bare loops did not start")
    return bare


def _rate(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Steps per second between two words of a process."""
    return (after["steps"] - before["steps"]) / (after["written_at"] - before["written_at"])


BENCH: Final = Bench("node", KEYS, run)
