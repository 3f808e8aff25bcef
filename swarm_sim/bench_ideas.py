"""`blocktrain-sim bench ideas`: what might beat the recipe, each idea beside its own control and its own reference.

An idea wins only if its chain is better than its end-to-end reference and better than its control ensemble by more than the spread of the
seeds, at equal compute; what helps chain, control and reference alike is a better layer, not a better way to train blocks apart. So an idea
that can be given to plain blocks and to the deep stack is given to them as well (`*_control_ce`, `*_reference_ce`); one that only a chain
has (a teacher, an upstream belief) is compared with the recipe's. Costs stand beside: `*_cpu_ms_step` and `*_adamw_bytes_block`. All values
are means over the seeds; `*_gap_spread` is the largest minus the smallest gap.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Final

import torch

from blocktrain.protocol.manifest import Grams
from blocktrain.swarm_sim.bench_quality import Settings
from blocktrain.swarm_sim.benches import Bench, Session
from blocktrain.swarm_sim.lab import cells, pool, presets, scoring
from blocktrain.swarm_sim.lab.spec import Spec, Switches
from blocktrain.swarm_sim.lab.train import Result, folder

STEPS: Final = 500
BRIEF_STEPS: Final = 40


@dataclass(frozen=True)
class Idea:
    """Switches, and what of it plain blocks and the deep stack can have: all of it, or nothing."""

    switches: Switches = Switches()
    coupled: bool = False  # blocks learn beside each other, so only a chain can have it
    grams: Grams | None = None  # other tables of n-grams than the size's own


IDEAS: Final = {
    "recipe": Idea(),
    "no_grams": Idea(grams=Grams()),
    "large_grams": Idea(grams=Grams(longest=6, rows=5 * 8192, row_width=128)),
    "same_order": Idea(Switches(same_order=True)),
    "muon": Idea(Switches(muon=True)),
    "distill": Idea(Switches(distill=0.5), coupled=True),
    "upstream": Idea(Switches(upstream=0.15), coupled=True),
}
_KEYS: Final = (
    "chain_ce", "block_ce", "control_ce", "reference_ce", "gap", "gap_spread", "chain_minus_control", "cpu_ms_step", "adamw_bytes_block",
    "averaged_chain_ce", "averaged_control_ce", "averaged_reference_ce", "weights", "weighted_gain",
)  # fmt: skip
_UPSTREAM: Final = ("upstream_last_ce", "upstream_without_block_1_ce")
PARTS: Final = {name: (*(f"{name}_{key}" for key in _KEYS), *(_UPSTREAM if name == "upstream" else ())) for name in IDEAS}


def bench(settings: Settings) -> Bench:
    """The bench with these settings; its parts are the ideas."""
    return Bench("ideas", PARTS, lambda session: _Ideas(session, settings).measure())


class _Ideas:
    def __init__(self, session: Session, settings: Settings) -> None:
        self.session, self.settings = session, settings
        self.size = presets.preset(settings.preset or ("smoke" if session.brief else "laptop"))
        self.steps = settings.steps or (BRIEF_STEPS if session.brief else STEPS)
        self.seeds = range(session.seeds or 1)
        self.tokens = scoring.windows(settings.data, self.size.context)

    def measure(self) -> None:
        torch.set_num_threads(1)
        self.session.numbers.update(preset=f"{self.size.width}x{self.size.layers}x{self.size.blocks}", steps=self.steps)
        wanted = [idea for name, idea in IDEAS.items() if self.session.wants(name)]
        with self.session.guard(*IDEAS):
            self.train([spec for idea in wanted for seed in self.seeds for kind in self.specs(idea, seed) for spec in kind])
        for name, idea in IDEAS.items():
            self.session.measure(name, lambda name=name, idea=idea: self.idea(name, idea))  # type: ignore[misc]

    def train(self, specs: Sequence[Spec]) -> list[Result]:
        settings = self.settings
        asked = [replace(spec, data=settings.data, compile=settings.compile, device=settings.device) for spec in specs]
        return pool.train_all(asked, folder(), self.session.say, processes=settings.processes or min(2, os.cpu_count() or 1))

    def idea(self, name: str, idea: Idea) -> Mapping[str, object]:
        """One idea over all seeds."""
        per_seed = [self.one(idea, seed) for seed in self.seeds]
        gaps = [one["chain_ce"] - one["reference_ce"] for one in per_seed]
        numbers: dict[str, object] = {f"{name}_{key}": mean(one[key] for one in per_seed) for key in per_seed[0]}
        numbers[f"{name}_gap"], numbers[f"{name}_gap_spread"] = mean(gaps), max(gaps) - min(gaps)
        numbers[f"{name}_chain_minus_control"] = mean(one["chain_ce"] - one["control_ce"] for one in per_seed)
        chain = self.train(self.specs(idea, 0)[0])
        weights = scoring.learned_weights(self.reading(idea, chain), self.tokens)
        numbers[f"{name}_weights"], numbers[f"{name}_weighted_gain"] = weights["weights"], weights["plain"] - weights["weighted"]
        if name == "upstream":
            score = scoring.score(self.reading(idea, chain), self.tokens)
            missing = scoring.score(scoring.upstream(scoring.blocks_of(chain), missing=1), self.tokens)
            numbers |= {"upstream_last_ce": score["last"], "upstream_without_block_1_ce": missing["mean"]}
        return numbers

    def specs(self, idea: Idea, seed: int) -> tuple[list[Spec], list[Spec], list[Spec]]:
        """Chain, control and reference."""
        shared = Switches() if idea.coupled else idea.switches
        size = replace(self.size, tables=idea.grams)
        ours = cells.chain(size, self.steps, seed, switches=idea.switches)
        if idea.coupled:
            ours = [cells.coupled(size, self.steps, seed, idea.switches)]
        plain = cells.chain(size, self.steps, seed, objective="autoregressive", switches=shared)
        return ours, plain, [cells.reference(size, self.steps, seed, replace(shared, same_order=False))]

    def reading(self, idea: Idea, chain: Sequence[Result], *, tail: bool = False) -> scoring.Reading:
        blocks = scoring.blocks_of(chain, tail=tail)
        return scoring.alone(chain[0].spec.manifest, blocks) if idea.switches.upstream is None else scoring.upstream(blocks)

    def one(self, idea: Idea, seed: int) -> dict[str, float]:
        """The chain, its control and its reference with one seed; with weights as they ended, and averaged along the last quarter."""
        chain, control, deep = map(self.train, self.specs(idea, seed))
        out: dict[str, float] = {}
        for prefix, tail in (("", False), ("averaged_", True)):
            score = scoring.score(self.reading(idea, chain, tail=tail), self.tokens)
            out[f"{prefix}chain_ce"] = score["mean"]
            if not tail:
                out["block_ce"] = mean(score["blocks"])
            for key, results in (("control", control), ("reference", deep)):
                reading = scoring.alone(results[0].spec.manifest, scoring.blocks_of(results, tail=tail))
                out[f"{prefix}{key}_ce"] = scoring.score(reading, self.tokens)["mean"]
        steps = self.steps * sum(len(result.spec.members) for result in chain)
        out["cpu_ms_step"] = 1000 * sum(result.info["cpu_s"] for result in chain) / steps
        out["adamw_bytes_block"] = chain[0].info["optimizer_bytes"]
        return out
