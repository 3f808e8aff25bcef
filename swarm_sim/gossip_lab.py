"""Learning with gossip, in one process: real blocks, real codecs, the node's own merge, shares, pairing and acceptance; no network.

What a codec, an attack or an outer step does to the loss is a property of the numbers, not of the streams, so it is measured here, where
the same seeds give the same runs and nothing is late. All losses are nats per byte of published states on held-out text.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

import torch
from torch import Tensor

from blocktrain.node import recipe_file
from blocktrain.node.compute import codecs, flat, outer
from blocktrain.node.compute.codecs import Codec
from blocktrain.node.compute.device import Mover
from blocktrain.node.compute.flat import Flat
from blocktrain.node.compute.merging import combine, difference
from blocktrain.node.compute.model import Block
from blocktrain.node.compute.outer import Momentum
from blocktrain.node.compute.trainer import Trainer
from blocktrain.node.data import TokenStream, load_tokens
from blocktrain.node.tokenizer import load_tokenizer
from blocktrain.protocol import acceptance, pairing
from blocktrain.protocol.acceptance import Measures
from blocktrain.protocol.errors import PeerFault
from blocktrain.protocol.exchange import shares, tokens_per_round
from blocktrain.protocol.ids import PeerId
from blocktrain.protocol.manifest import Averaging, Grams, Manifest, Model

CHECK_WINDOWS: Final = 8  # of the check on a merge: as in a node, 512 tokens
HELDOUT_WINDOWS: Final = 64
MARGIN: Final = 0.1  # the node's default
MAX_REFERENCES: Final = 4
LO_FI: Final = "lo-fi"
PUT_OFF_ROUNDS: Final = 1  # after a first offence, twice as many after each further one; in a node these are 30 s, doubling
Attack = Callable[[Tensor, Tensor, torch.Generator], Tensor]  # its live state, its published one → what it sends


@dataclass(frozen=True)
class Setting:
    """One experiment. `steps` are those of each replica."""

    replicas: int
    codec: str = "fp32"
    topology: str = "full"
    steps: int = 300
    every: int = 10
    seed: int = 0
    attack: str = ""  # of the last replica
    outer: str = "mean"  # an outer step of the manifest, or "lo-fi": one merge, at the end
    moments: str = "local"  # or "reset" at every merge, or "carried": averaged as the parameters are
    width: int = 64
    slow: int = 1  # the last replica makes so many times fewer steps in a round


@dataclass(frozen=True)
class Outcome:
    """What an experiment ended with. Losses are means over the honest replicas."""

    published: float  # loss of the published states
    live: float  # loss of the live parameters
    consensus: float  # root mean square distance of the live states from their mean, over the mean's norm
    bytes_per_round: float  # of one direction
    refused: int
    used_bad: int  # merges with an attacker that an honest replica used


@dataclass
class Learner:
    """One replica: the node's trainer, its published state, and what exchanges need."""

    peer: PeerId
    trainer: Trainer
    published: Tensor
    merged_tokens: int = 0
    references: dict[PeerId, Tensor] = field(default_factory=dict)  # partner → our last merge with it, newest last
    put_off: dict[PeerId, tuple[int, int]] = field(default_factory=dict)  # offender → (round until, offences)
    credits: dict[PeerId, float] = field(default_factory=dict)  # partner → what merges with it gained
    momentum: Momentum | None = None
    loss: float | None = None  # of the published state, in the check

    @property
    def live(self) -> Tensor:
        return self.trainer.flat.data

    @property
    def weight(self) -> float:
        return float(self.trainer.counters.tokens - self.merged_tokens)


class Lab:
    """All replicas of one experiment and the data to judge them by."""

    def __init__(self, setting: Setting) -> None:
        torch.set_num_threads(1)
        self.setting = setting
        self.manifest = manifest_of(setting)
        corpus = load_tokens(("builtin",), load_tokenizer("bytes", 256), self.manifest.model.context)
        self.learners: list[Learner] = []
        for index in range(setting.replicas):
            stream = TokenStream(corpus, batch=self.manifest.optimizer.batch, peer=f"{setting.seed}/{index}", block=0, seed=setting.seed)
            trainer = Trainer(self.manifest, 0, stream, Mover(torch.device("cpu")), seed=100 * setting.seed + index)
            published = trainer.flat.data.clone()
            momentum = outer.begin(self.manifest.averaging.outer, published)
            self.learners.append(Learner(PeerId(f"peer{index:02}"), trainer, published, momentum=momentum))
        windows = torch.from_numpy(stream.heldout(HELDOUT_WINDOWS))
        self.check, self.heldout = windows[:CHECK_WINDOWS], windows[CHECK_WINDOWS:]
        self.spare = Block(self.manifest, 0)
        self.spare_flat = Flat(self.spare)
        self.rng = Random(setting.seed)
        self.noise = torch.Generator().manual_seed(setting.seed)
        self.codec: Codec = codecs.codec_of(setting.codec)
        self.sent: list[int] = []
        self.refused = self.used_bad = 0
        self.whys: list[str] = []

    def loss(self, state: Tensor, windows: Tensor) -> float:
        self.spare_flat.data.copy_(state)
        return float(self.learners[0].trainer.objective.score(self.spare, windows).mean())

    @property
    def honest(self) -> list[Learner]:
        return self.learners[:-1] if self.setting.attack else self.learners

    def run(self, on_round: Callable[[int, Lab], None] = lambda number, lab: None) -> Outcome:
        setting = self.setting
        for number in range(setting.steps // setting.every):
            for learner in self.learners:
                steps = setting.every // setting.slow if learner is self.learners[-1] else setting.every
                for _ in range(steps):
                    learner.trainer.step()
            if setting.outer != LO_FI or number == setting.steps // setting.every - 1:
                self._round(number)
            on_round(number, self)
        mean = torch.stack([learner.live for learner in self.honest]).mean(dim=0)
        apart = [flat.distance(learner.live, mean) ** 2 for learner in self.honest]
        return Outcome(
            statistics.fmean(self.loss(learner.published, self.heldout) for learner in self.honest),
            statistics.fmean(self.loss(learner.live, self.heldout) for learner in self.honest),
            math.sqrt(statistics.fmean(apart)) / flat.norm(mean),
            statistics.fmean(self.sent) if self.sent else 0.0,
            self.refused,
            self.used_bad,
        )

    def _round(self, number: int) -> None:
        """Everybody in random order asks its candidates; who is taken is busy, who finds nobody has an own round."""
        free = {learner.peer: learner for learner in self.learners}
        for learner in self.rng.sample(self.learners, len(self.learners)):
            if learner.peer not in free:
                continue
            others = [each.peer for each in self.learners if each is not learner and self._friends(learner, each, number)]
            for peer in pairing.candidates(self.setting.topology, learner.peer, others, number, self.rng):
                if peer in free and peer != learner.peer:
                    del free[peer], free[learner.peer]
                    pair = sorted((learner, next(each for each in self.learners if each.peer == peer)), key=lambda each: each.peer)
                    self._exchange(pair[0], pair[1], number)
                    break
            else:
                del free[learner.peer]
                _own_round(learner)

    def _friends(self, learner: Learner, other: Learner, number: int) -> bool:
        """Whether neither has put the other off."""
        return all(number >= one.put_off.get(two.peer, (0, 0))[0] for one, two in ((learner, other), (other, learner)))

    def _exchange(self, first: Learner, second: Learner, number: int) -> None:
        if self.setting.moments == "carried":
            _average_moments(first.trainer, second.trainer)
        reference = first.references.get(second.peer) if self.setting.codec == "sparse" else None
        coder = self.codec if reference is not None or self.setting.codec != "sparse" else codecs.codec_of("bf16")
        payloads = [coder.encode(self._sent_by(learner), reference) for learner in (first, second)]
        self.sent.append(len(payloads[0]))
        size = self.learners[0].trainer.flat.size
        parts = shares(first.weight, second.weight, tokens_per_round(self.manifest))
        for mine, other in ((first, second), (second, first)):
            if self.setting.attack and mine is self.learners[-1]:
                _own_round(mine)
                continue
            own, theirs = (payloads[0], payloads[1]) if mine is first else (payloads[1], payloads[0])
            reads = coder.reader(own, size, reference), coder.reader(theirs, size, reference)
            merge = combine(*reads, mine.published, parts, mine_first=mine is first)
            assert merge.state is not None
            finite = math.isfinite(merge.distance)
            before = self.loss(coder.decode(own, size, reference), self.check) if finite else None
            after = self.loss(merge.state, self.check) if finite else None
            try:
                norms = (merge.own_norm, merge.distance, merge.drift)
                measures, credit = Measures(finite, *norms, before, after, merge.along, mine.loss), mine.credits.get(other.peer, 0.0)
                acceptance.judge(measures, MARGIN, credit)
            except PeerFault as fault:
                self.refused += 1
                self.whys.append(f"round {number}: {fault.why}")
                offences = mine.put_off.get(other.peer, (0, 0))[1] + 1
                mine.put_off[other.peer] = (number + 1 + PUT_OFF_ROUNDS * 2 ** (offences - 1), offences)
                _own_round(mine)
                continue
            mine.credits[other.peer] = acceptance.credited(credit, measures)
            self.used_bad += bool(self.setting.attack) and other is self.learners[-1]
            self._adopt(mine, other, merge.state, difference(merge.state, coder.decode(own, size, reference)))
            mine.loss = after

    def _adopt(self, mine: Learner, other: Learner, state: Tensor, difference: Tensor) -> None:
        mine.momentum = outer.step(self.manifest.averaging.outer, mine.momentum, state, difference)
        mine.live.add_(difference)
        if self.setting.moments == "reset":
            for moment in _moments(mine.trainer):
                moment.zero_()
            mine.trainer._set_moment_steps(0)
        mine.published = state
        mine.merged_tokens = mine.trainer.counters.tokens
        mine.trainer.counters.since_round = 0
        mine.trainer.round += 1
        mine.references.pop(other.peer, None)
        mine.references[other.peer] = state
        while len(mine.references) > MAX_REFERENCES:
            del mine.references[next(iter(mine.references))]

    def _sent_by(self, learner: Learner) -> Tensor:
        if self.setting.attack and learner is self.learners[-1]:
            return ATTACKS[self.setting.attack](learner.live, learner.published, self.noise)
        return learner.live


def _average_moments(one: Trainer, other: Trainer) -> None:
    for ours, theirs in zip(_moments(one), _moments(other), strict=True):
        ours.add_(theirs).mul_(0.5)
        theirs.copy_(ours)


def _moments(trainer: Trainer) -> list[Tensor]:
    """Adam's two, which are nobody's but the trainer's in a node."""
    return [buffer for name, buffer in trainer._buffers().items() if name != "live."]


def _own_round(learner: Learner) -> None:
    learner.loss = None
    learner.published = learner.live.clone()
    learner.momentum = outer.follow(learner.momentum, learner.published)
    learner.trainer.counters.since_round = 0
    learner.trainer.round += 1


def manifest_of(setting: Setting) -> Manifest:
    """A small block and a schedule that ends when the experiment does."""
    base = recipe_file.load_recipe("tiny")
    return replace(
        base,
        name="lab",
        seed=setting.seed,
        model=Model(width=setting.width, layers=2, heads=4, context=64, vocabulary=256),
        schedule=replace(base.schedule, steps_per_round=setting.every, planned_rounds=setting.steps // setting.every),
        optimizer=replace(base.optimizer, batch=8),
        averaging=Averaging("mean" if setting.outer == LO_FI else setting.outer),
        grams=Grams(),  # averaging is what is measured
    )


# ---- what one of the replicas may send ----------------------------------------------------------------------------------------------


def _random_direction(live: Tensor, published: Tensor, noise: torch.Generator) -> Tensor:
    """As far from its published state as training went, but anywhere."""
    direction = torch.randn(live.shape, generator=noise)
    return published + direction * (flat.distance(live, published) / flat.norm(direction))


ATTACKS: Final[Mapping[str, Attack]] = {
    "nan": lambda live, published, noise: torch.full_like(live, math.nan),
    "million": lambda live, published, noise: live * 1e6,
    "sign": lambda live, published, noise: -live,
    "sign of the change": lambda live, published, noise: 2 * published - live,
    "random": _random_direction,
}
