"""`blocktrain-sim bench quality`: what the learning recipe is worth, beside everything that it must be compared with.

**core.** For each seed: B blocks of `evidence`, as many plain blocks (the control: the gain of an ensemble needs no noise), and one stack
as deep as all blocks together, trained end to end; each block and the stack see equally many bytes, by the same trainer. `chain_ce` is the
plain mean of the blocks' log-probabilities. `gap` = chain - reference, `control_gap` = control - reference; spreads are largest minus
smallest over the seeds. An order-5 byte n-gram counted on all the text stands beside them. With seed 0 also, at no more than 500 steps
however many the rest has: the paper's objective, its leak at small σ, and `evidence` with noise at every position. `leak_local_ce` is the
loss with the true target in z, over σ as the whole run draws it, each σ read by the block that owns it (blocks own equal shares, so it is
their mean); `leak_from_noise_ce` is the same chain from pure noise, read at its last block as the paper does.
**tables.** The paper's tables 1, 3, 4 and 5 in shape, and averaging over unlike shards, at a quarter of the steps (tables.py).
**text.** What each of the three ways of making text gives, by a judge (judge.py).
**vocabulary.** What a chain over a large vocabulary loses where only the likeliest tokens travel (vocabulary.py); a quarter of the steps.

Everything trained is kept in the user's cache, so a bench that was interrupted goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Final

import torch

from blocktrain.node.compute.flat import count, shapes_of
from blocktrain.protocol.manifest import Grams
from blocktrain.swarm_sim.benches import Bench, Session
from blocktrain.swarm_sim.lab import cells, judge, pool, presets, scoring, tables, vocabulary
from blocktrain.swarm_sim.lab.ngram import ByteNgram
from blocktrain.swarm_sim.lab.spec import GENSIM, Spec
from blocktrain.swarm_sim.lab.tables import BUILTIN
from blocktrain.swarm_sim.lab.train import Result, folder

if TYPE_CHECKING:
    from torch import Tensor

    from blocktrain.swarm_sim.app import LabOptions

STEPS: Final = 500
BRIEF_STEPS: Final = 60
NOISE_STEPS: Final = 500  # at most, of what stands beside the recipe and is not compared with it at every length
BRIEF_WINDOWS: Final = 96
SHORT_SHARE: Final = 4  # tables and the large vocabulary train a quarter of the steps
PROMPTS: Final = 32
GIB: Final = 2**30
PAPER: Final = replace(presets.PRESETS["paper"], tables=Grams())  # which has no n-grams

CORE: Final = (
    "gap_mean", "gap_spread", "gap_seeds", "control_gap", "control_gap_spread", "chain_minus_control", "chain_ce", "chain_mixture_ce",
    "chain_averaged_ce", "chain_weighted_gain", "block_ce", "best_block_ce", "control_ce", "control_block_ce", "reference_ce",
    "reference_averaged_ce", "ngram_ce", "noise_steps", "literal_last_ce", "literal_mean_ce", "literal_block_ce", "literal_minus_evidence",
    "true_noise_last_ce", "true_noise_mean_ce", "leak_local_ce", "leak_local_block_ce", "leak_from_noise_ce", "sigma",
    "sigma_given", "sigma_lost",
    "parameters_block", "adamw_bytes_block", "adamw_bytes_full", "train_bytes_block", "train_bytes_reference", "paper_train_gib_block",
    "tokens_per_s_block", "tokens_per_s_reference",
)  # fmt: skip
TABLES: Final = (
    "table_steps", "sigma_range", "sigma_range_last_ce", "sigma_range_mean_ce", "depth", "depth_literal_ce", "depth_evidence_ce",
    "depth_train_bytes_block", "replicas", "replicas_ce", "federated", "federated_ce",
)  # fmt: skip
TEXT: Final = (
    "judge_true_text", *(f"judge_{way.name}" for way in judge.WAYS), *(f"tokens_per_traversal_{way.name}" for way in judge.WAYS),
    *(f"sample_{way.name}" for way in judge.WAYS), "acceptance",
)  # fmt: skip
VOCABULARY: Final = (
    "vocabulary", "vocabulary_steps", "vocabulary_dense_ce", "vocabulary_dense_bytes", "kept", "kept_bytes", "kept_ce_error",
    "kept_distance",
)  # fmt: skip
PARTS: Final = {"core": CORE, "tables": TABLES, "text": TEXT, "vocabulary": VOCABULARY}


@dataclass(frozen=True)
class Settings:
    """What can be asked of this bench, beyond what all benches share. None: the bench's own choice."""

    preset: str | None = None
    steps: int | None = None
    data: tuple[str, ...] = GENSIM
    processes: int | None = None
    compile: bool = False
    device: str = "cpu"
    plot: Path | None = None


def settings_of(lab: LabOptions) -> Settings:
    """From the command line. Without gensim, the text that Python carries."""
    data = lab.data or (GENSIM if find_spec("gensim") else BUILTIN)
    return Settings(lab.preset, lab.steps, data, lab.processes, lab.compile, lab.device, lab.plot)


def bench(settings: Settings) -> Bench:
    """The bench with these settings."""
    return Bench("quality", PARTS, lambda session: _Quality(session, settings).measure())


class _Quality:
    def __init__(self, session: Session, settings: Settings) -> None:
        brief = session.brief
        self.session, self.settings = session, settings
        self.size = presets.preset(settings.preset or ("smoke" if brief else "laptop"))
        self.steps = settings.steps or (BRIEF_STEPS if brief else STEPS)
        self.short_steps = max(20, self.steps // SHORT_SHARE)
        self.seeds = range(session.seeds or (1 if brief else 3))
        self.place = folder()
        self.processes = settings.processes or min(2, os.cpu_count() or 1)
        self.data = settings.data
        self.tokens: Tensor = scoring.windows(self.data, self.size.context)
        if brief:
            self.tokens = self.tokens[:: len(self.tokens) // BRIEF_WINDOWS]
        self.curves: dict[str, list[tuple[int, float]]] = {}

    def measure(self) -> None:
        torch.set_num_threads(1)
        session = self.session
        session.numbers.update(
            preset=f"{self.size.width}x{self.size.layers}x{self.size.blocks}",
            steps=self.steps,
            data=list(self.data),
            windows=len(self.tokens),
        )
        session.measure("core", self.core)
        session.measure("tables", self.tables)
        session.measure("text", self.text)
        session.measure("vocabulary", lambda: vocabulary.sparse(self.size, self.short_steps, self.data, self.place))

    def train(self, specs: Sequence[Spec]) -> list[Result]:
        asked = [replace(spec, data=self.data, compile=self.settings.compile, device=self.settings.device) for spec in specs]
        return pool.train_all(asked, self.place, self.session.say, processes=self.processes)

    # ---- core -------------------------------------------------------------------------------------------------------------------

    def core(self) -> Mapping[str, object]:
        self.train([*(spec for seed in self.seeds for spec in self._specs(seed)), *self._noise_specs()])  # together: no process waits
        per_seed = [self._seed(seed) for seed in self.seeds]
        numbers = {key: _mean([one[key] for one in per_seed]) for key in per_seed[0]}
        gaps = [one["chain_ce"] - one["reference_ce"] for one in per_seed]
        control = [one["control_ce"] - one["reference_ce"] for one in per_seed]
        numbers |= {
            "gap_mean": mean(gaps),
            "gap_spread": max(gaps) - min(gaps),
            "gap_seeds": gaps,
            "control_gap": mean(control),
            "control_gap_spread": max(control) - min(control),
            "chain_minus_control": mean(gaps) - mean(control),
            "ngram_ce": self._ngram(),
        }
        numbers |= self._noise() | self._costs()
        plot = self.settings.plot or self.place / f"quality-{self.size.width}x{self.size.layers}x{self.size.blocks}-{self.steps}.png"
        draw(plot, self.curves, numbers, f"{self.steps} steps, seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}")
        self.session.say(f"the plot is {plot}")
        return numbers

    def _seed(self, seed: int) -> dict[str, float]:
        """Everything of one seed. Values are numbers, or lists with one number a block."""
        results = self.train(self._specs(seed))
        count = self.size.blocks
        chain, control, whole = results[:count], results[count : 2 * count], results[-1]
        run = chain[0].spec.manifest
        reading = scoring.alone(run, scoring.blocks_of(chain))
        score = scoring.score(reading, self.tokens)
        averaged = scoring.score(scoring.alone(run, scoring.blocks_of(chain, tail=True)), self.tokens)
        plain_score = scoring.score(scoring.alone(control[0].spec.manifest, scoring.blocks_of(control)), self.tokens)
        deep = [scoring.score(scoring.alone(whole.spec.manifest, whole.blocks(tail=tail)), self.tokens)["mean"] for tail in (False, True)]
        weights = scoring.learned_weights(reading, self.tokens)
        if seed == 0:
            self.curves = {f"block {b}": chain[b].info["curve"][0] for b in range(count)} | {"end to end": whole.info["curve"][0]}
            self.curves |= {f"plain block {b}": control[b].info["curve"][0] for b in range(count)}
        return {
            "chain_ce": score["mean"],
            "chain_mixture_ce": score["mixture"],
            "chain_averaged_ce": averaged["mean"],
            "chain_weighted_gain": weights["plain"] - weights["weighted"],
            "block_ce": score["blocks"],
            "best_block_ce": score["best"],
            "control_ce": plain_score["mean"],
            "control_block_ce": plain_score["blocks"],
            "reference_ce": deep[0],
            "reference_averaged_ce": deep[1],
            "tokens_per_s_block": mean(result.info["tokens_per_s"] for result in chain),
            "tokens_per_s_reference": whole.info["tokens_per_s"],
        }

    def _specs(self, seed: int) -> list[Spec]:
        """Blocks, plain blocks, reference."""
        ours, plain = cells.chain(self.size, self.steps, seed), cells.chain(self.size, self.steps, seed, objective="autoregressive")
        return [*ours, *plain, cells.reference(self.size, self.steps, seed)]

    def _noise_specs(self) -> list[Spec]:
        """The leak, the paper's objective, noise everywhere, the recipe."""
        steps = min(self.steps, NOISE_STEPS)
        leaking = cells.literal(self.size, steps, 0, cells.LEAK_SIGMA)
        recipe = cells.chain(self.size, steps, 0)
        return [leaking, cells.literal(self.size, steps, 0), *cells.true_noise(self.size, steps, 0), *recipe]

    def _ngram(self) -> float:
        corpus = scoring.corpus_of(self.data, self.size.context)
        return float(ByteNgram(corpus.train.read(0, len(corpus.train))).nats(self.tokens.numpy()).mean())

    def _noise(self) -> dict[str, object]:
        """The paper's objective and its relatives, seed 0, and the recipe with as many steps."""
        leak, paper, *others = self.train(self._noise_specs())
        true, ours = others[: self.size.blocks], others[self.size.blocks :]
        ours_score = scoring.score(scoring.alone(ours[0].spec.manifest, scoring.blocks_of(ours)), self.tokens)
        leak_score = scoring.score(scoring.in_sequence(leak.spec.manifest, leak.blocks()), self.tokens)
        paper_score = scoring.score(scoring.in_sequence(paper.spec.manifest, paper.blocks()), self.tokens)
        true_score = scoring.score(scoring.from_noise(true[0].spec.manifest, scoring.blocks_of(true)), self.tokens)
        local = scoring.denoised(leak.spec.manifest, leak.blocks(), self.tokens)
        given, lost = scoring.sigma_table(presets.manifest(self.size, "evidence", 1, 0), tables.SIGMAS, self.data)
        return {
            "noise_steps": paper.spec.steps,
            "literal_last_ce": paper_score["last"],
            "literal_mean_ce": paper_score["mean"],
            "literal_block_ce": paper_score["blocks"],
            "literal_minus_evidence": paper_score["last"] - ours_score["mean"],
            "true_noise_last_ce": true_score["last"],
            "true_noise_mean_ce": true_score["mean"],
            "leak_local_ce": mean(local),
            "leak_local_block_ce": local,
            "leak_from_noise_ce": leak_score["last"],
            "sigma": list(tables.SIGMAS),
            "sigma_given": given,
            "sigma_lost": lost,
        }

    def _costs(self) -> dict[str, object]:
        """Memory as the trainers held it, and the paper's column at the paper's shape (parameters + gradients + moments)."""
        results = self.train([*cells.chain(self.size, self.steps, 0), cells.reference(self.size, self.steps, 0)])
        blocks, whole = results[:-1], results[-1]
        paper = count(shapes_of(presets.manifest(PAPER, "evidence", 1, 0)))
        return {
            "parameters_block": blocks[0].info["parameters"],
            "adamw_bytes_block": blocks[0].info["optimizer_bytes"],
            "adamw_bytes_full": sum(result.info["optimizer_bytes"] for result in blocks),
            "train_bytes_block": blocks[0].info["train_bytes"],
            "train_bytes_reference": whole.info["train_bytes"],
            "paper_train_gib_block": presets.TRAIN_BYTES_PER_PARAMETER * paper / GIB,
        }

    # ---- tables and text --------------------------------------------------------------------------------------------------------

    def tables(self) -> Mapping[str, object]:
        lab = tables.Lab(self.size, self.short_steps, self.train, self.tokens)
        numbers: dict[str, object] = {"table_steps": lab.steps}
        parts: tuple[Callable[[tables.Lab], dict[str, object]], ...] = (
            tables.sigma_ranges, tables.fixed_depth, tables.participation, tables.federated,
        )  # fmt: skip
        for part in parts:
            self.session.say(f"table {part.__name__}")
            numbers |= part(lab)
        return numbers

    def text(self) -> Mapping[str, object]:
        *chain, whole = self.train([*cells.chain(self.size, self.steps, 0), cells.reference(self.size, self.steps, 0)])
        blocks, reference = scoring.blocks_of(chain), whole.blocks()[0]
        chosen = self.tokens[:: max(1, len(self.tokens) // (8 if self.session.brief else PROMPTS))]
        prompts, true = chosen[:, : judge.PROMPT], chosen[:, judge.PROMPT : judge.PROMPT + judge.LENGTH]
        numbers: dict[str, object] = {"judge_true_text": judge.judge(reference, prompts, true)}
        for way in judge.WAYS:
            began = time.monotonic()
            judged = asdict(judge.make_texts(chain[0].spec.manifest, blocks, reference, prompts, way))
            self.session.say(f"text {way.name}: judge {judged['nats']:.2f}, {time.monotonic() - began:.0f} s")
            numbers[f"judge_{way.name}"] = judged["nats"]
            numbers[f"tokens_per_traversal_{way.name}"] = judged["tokens_per_traversal"]
            numbers[f"sample_{way.name}"] = judged["sample"]
            if judged["acceptance"] is not None:
                numbers["acceptance"] = judged["acceptance"]
        return numbers


def _mean(values: Sequence[float | list[float]]) -> object:
    """Over seeds; of lists, element by element."""
    if isinstance(values[0], list):
        return [mean(column) for column in zip(*(value for value in values if isinstance(value, list)), strict=True)]
    return mean(value for value in values if not isinstance(value, list))


def draw(path: Path, curves: Mapping[str, Sequence[tuple[int, float]]], numbers: Mapping[str, object], title: str) -> None:
    """Training losses of seed 0 on the left, what they come to on held-out text on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name, line in curves.items():
        style = {"color": "k"} if name == "end to end" else {"color": "0.6", "linestyle": ":"} if name.startswith("plain") else {}
        left.plot(*zip(*line, strict=True), label=name, linewidth=1.2, **style)
    left.set(xlabel="steps", ylabel="training loss, nats per byte (windows included)", title=title)
    left.legend(fontsize=8)
    left.grid(alpha=0.25)
    bars = {
        "best block": "best_block_ce", "chain": "chain_ce", "control (plain blocks)": "control_ce", "end to end": "reference_ce",
        "paper's objective": "literal_last_ce", "order-5 n-gram": "ngram_ce",
    }  # fmt: skip
    values = [float(str(numbers[key])) for key in bars.values()]
    drawn = right.barh(list(bars), values, color=["C0", "C0", "0.6", "k", "C3", "0.8"])
    right.bar_label(drawn, fmt="%.3f", padding=3)
    right.set(xlim=(min(values) * 0.8, max(values) * 1.08), xlabel="held-out nats per byte")
    right.invert_yaxis()
    figure.savefig(path, dpi=120)
