"""What the sparse accumulator of a large vocabulary costs: one chain read with whole rows, and with rows of ever fewer tokens.

The tokenizer is made from the very text that is trained on (byte-pair merges), so a bench needs nothing from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from blocktrain.node.compute import rows
from blocktrain.node.compute.device import Mover
from blocktrain.node.compute.model import Block
from blocktrain.node.compute.objective import objective_of
from blocktrain.node.compute.sampling import Half, to_half
from blocktrain.node.compute.trainer import Trainer
from blocktrain.node.corpus import Corpus
from blocktrain.node.data import TokenStream, load_tokens
from blocktrain.node.tokenizer import describe_file, load_tokenizer
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.sweep import Shape
from blocktrain.swarm_sim.lab import presets, scoring

VOCABULARY: Final = 8192
KEPT: Final = (32, 128, 512, 2048)
_WINDOWS: Final = 16

Reals = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Read:
    """Means over all scored positions of a chain, as read with some kind of rows.

    Attributes:
        distance: total variation between this chain's distribution and that of whole rows: the share of sampled tokens that may differ.
    """

    nats: float
    distance: float


def make_tokenizer(data: tuple[str, ...], context: int, folder: Path, vocabulary: int = VOCABULARY) -> Path:
    """A tokenizers file of byte-pair merges over the training part of a text, kept in `folder`. Raises: UsageError: no such package."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise UsageError("the part 'vocabulary' needs the package tokenizers: pip install tokenizers") from None
    corpus = scoring.corpus_of(data, context)
    path = folder / f"pairs-{vocabulary}-{corpus.fingerprint}.json"
    if not path.is_file():
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
        text = corpus.train.read(0, len(corpus.train)).astype(np.uint8).tobytes().decode("utf-8", errors="replace")
        made.train_from_iterator(text.split("\n"), trainer)
        folder.mkdir(parents=True, exist_ok=True)
        made.save(str(path))
    return path


def a_run(size: presets.Preset, steps: int, file: Path) -> Manifest:
    """The recipe of that size over that tokenizer's vocabulary."""
    run = presets.manifest(size, "evidence", steps, 0)
    name, vocabulary = describe_file(file)
    return replace(run, tokenizer=name, model=replace(run.model, vocabulary=vocabulary))


def train(run: Manifest, corpus: Corpus) -> list[Block]:
    """The blocks of a run, one after the other."""
    out = []
    for number in range(run.blocks):
        batches = TokenStream(corpus, batch=run.optimizer.batch, peer="lab", block=number, seed=run.seed)
        trainer = Trainer(run, number, batches, Mover(torch.device("cpu")), seed=number)
        for step in range(run.schedule.planned_rounds):
            trainer.round, trainer.counters.since_round = step, 0
            trainer.step()
        out.append(trainer.block.requires_grad_(False))
    return out


def chain_of(own: Sequence[Half], shape: Shape) -> Reals:
    """The chain's probabilities [N, V] from each block's log-probabilities [N, V], added up as holders do."""
    total = rows.settled(own[0], shape, 1)
    for terms, block in enumerate(own[1:], 2):
        added = (total.astype(np.float32) + rows.settled(block, shape, 1)).astype(np.float16)
        total = rows.settled(added, shape, terms)
    mean = total.astype(np.float64) / len(own)
    weights = np.exp(mean - mean.max(axis=1, keepdims=True))
    probabilities: Reals = weights / weights.sum(axis=1, keepdims=True)
    return probabilities


def read(own: Sequence[Half], targets: npt.NDArray[np.int64], shape: Shape) -> tuple[Read, list[Read]]:
    """The chain with whole rows, and with each of `KEPT`."""
    whole = chain_of(own, replace(shape, kept=0))

    def compared(probabilities: Reals) -> Read:
        chosen = probabilities[np.arange(len(targets)), targets]
        return Read(float(-np.log(chosen).mean()), float(np.abs(probabilities - whole).sum(axis=1).mean() / 2))

    return compared(whole), [compared(chain_of(own, replace(shape, kept=kept))) for kept in KEPT]


def sparse(size: presets.Preset, steps: int, data: tuple[str, ...], folder: Path) -> dict[str, object]:
    """Train a chain and read it in all ways; the keys of the bench's part `vocabulary`."""
    file = make_tokenizer(data, size.context, folder)
    run = a_run(size, steps, file)
    corpus = load_tokens(data, load_tokenizer(run.tokenizer, run.model.vocabulary, file), size.context)
    blocks = train(run, corpus)
    windows = torch.from_numpy(corpus.heldout_windows(_WINDOWS))
    own = [to_half(objective_of(run, block.block).contribute(block, windows[:, :-1]).flatten(0, 1).numpy()) for block in blocks]
    shape = Shape.of(run)
    whole, others = read(own, windows[:, 1:].flatten().numpy(), shape)
    return {
        "vocabulary": run.model.vocabulary,
        "vocabulary_steps": steps,
        "vocabulary_dense_ce": whole.nats,
        "vocabulary_dense_bytes": replace(shape, kept=0).row_bytes,
        "kept": list(KEPT),
        "kept_bytes": [replace(shape, kept=kept).row_bytes for kept in KEPT],
        "kept_ce_error": [other.nats - whole.nats for other in others],
        "kept_distance": [other.distance for other in others],
    }
