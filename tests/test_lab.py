"""The laboratory: what is kept and gone on from, what members share, how chains are read, and the yardsticks beside them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.node.compute.model import Block
from blocktrain.node.compute.trainer import Trainer, TrainingFailed
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.manifest import Grams
from blocktrain.swarm_sim.bench_ideas import IDEAS
from blocktrain.swarm_sim.lab import cells, presets, scoring, train, variants
from blocktrain.swarm_sim.lab.ngram import ByteNgram
from blocktrain.swarm_sim.lab.plain import PlainModel
from blocktrain.swarm_sim.lab.presets import Preset, manifest, preset
from blocktrain.swarm_sim.lab.spec import Member, Sharing, Spec, Switches
from blocktrain.swarm_sim.lab.tables import BUILTIN

SIZE = Preset(32, 1, 2)


RECIPE, APART = Switches(), Sharing()


def a_spec(steps: int = 6, switches: Switches = RECIPE, sharing: Sharing = APART, blocks: tuple[int, ...] = (0, 1)) -> Spec:
    run = manifest(SIZE, "evidence", steps, 0)
    return Spec("test", run, tuple(map(Member, blocks)), steps, switches, sharing, data=BUILTIN)


def some_tokens(rows: int = 3) -> torch.Tensor:
    return torch.randint(97, 123, (rows, 129), generator=torch.Generator().manual_seed(4))


# ---- what is kept ----------------------------------------------------------------------------------------------------------------------


def test_a_training_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = a_spec(sharing=Sharing(2, "all", 0.5, outer="nesterov"), blocks=(0, 0), switches=Switches(muon=True))
    whole = train.train(spec, tmp_path / "whole")
    monkeypatch.setattr(train, "CHECKPOINT_S", 0.0)  # after every step
    step, done = Trainer.step, 0

    def breaks(trainer: Trainer) -> None:
        nonlocal done
        done += 1
        if done == 9:  # in the middle of step 5 of two members
            raise KeyboardInterrupt
        step(trainer)

    monkeypatch.setattr(Trainer, "step", breaks)
    with pytest.raises(KeyboardInterrupt):
        train.train(spec, tmp_path / "broken")
    assert train.load(spec, tmp_path / "broken") is None
    resumed = train.train(spec, tmp_path / "broken")
    assert done == 9 + 2 * 2, "four steps were not done again"
    assert all(torch.equal(one, other) for one, other in zip(whole.final, resumed.final, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(whole.tail, resumed.tail, strict=True))
    assert len(list((tmp_path / "broken").iterdir())) == 1, "the checkpoint is gone"


def test_what_is_kept_is_not_trained_again_and_damage_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = a_spec(steps=2)
    first = train.train(spec, tmp_path)
    monkeypatch.setattr(Trainer, "step", lambda trainer: pytest.fail("trained again"))
    assert torch.equal(train.train(replace(spec, label="another name"), tmp_path).final[0], first.final[0])
    path = tmp_path / f"{spec.digest}.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert train.load(spec, tmp_path) is None


def test_everything_that_changes_a_result_changes_its_digest() -> None:
    spec = a_spec()
    others = [
        replace(spec, steps=7),
        replace(spec, manifest=replace(spec.manifest, seed=1)),
        replace(spec, members=(Member(0), Member(1, part=(0, 2)))),
        replace(spec, members=(Member(0), Member(1, data=BUILTIN))),
        replace(spec, switches=Switches(distill=0.5)),
        replace(spec, sharing=Sharing(5)),
        replace(spec, data=("gensim",)),
    ]
    assert len({one.digest for one in [spec, *others]}) == len(others) + 1
    assert replace(spec, manifest=replace(spec.manifest, grams=Grams())).digest != spec.digest
    cheap = replace(spec.manifest, optimizer=replace(spec.manifest.optimizer, recompute=True))
    assert replace(spec, label="", manifest=cheap).digest == spec.digest


def test_a_loss_that_explodes_is_one_line_with_a_remedy(tmp_path: Path) -> None:
    spec = a_spec(steps=12)
    wild = replace(spec.manifest, schedule=replace(spec.manifest.schedule, learning_rate=10.0, warmup_rounds=0))
    wild = replace(wild, optimizer=replace(wild.optimizer, clip=0.0, weight_decay=10.0))
    with pytest.raises(TrainingFailed, match=r"schedule\.learning_rate"):
        train.train(replace(spec, manifest=wild, steps=400), tmp_path)


# ---- what members share ----------------------------------------------------------------------------------------------------------------


class _Held:
    """Stands in for a trainer: a flat buffer with one shared part."""

    def __init__(self, value: float) -> None:
        self.data = torch.full((4,), value)
        self.flat = self

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"embedding": buffer[:2], "other": buffer[2:]}


def exchange(sharing: Sharing, *values: float) -> tuple[train.Exchange, list[_Held]]:
    held = [_Held(value) for value in values]
    return train.Exchange(sharing, held, seed=0), held  # type: ignore[arg-type]


def test_the_shared_part_becomes_the_mean_and_the_rest_stays() -> None:
    shared, held = exchange(Sharing(3), 1.0, 5.0)
    for step in (1, 2):
        shared.after(step)
    assert held[0].data.tolist() == [1, 1, 1, 1], "not yet"
    shared.after(3)
    assert [one.data.tolist() for one in held] == [[3, 3, 1, 1], [3, 3, 5, 5]]


def test_replicas_that_do_not_arrive_keep_their_work_or_lose_it() -> None:
    kept, held = exchange(Sharing(1, "all", participation=0.0), 1.0, 5.0)
    held[1].data.fill_(6.0)
    kept.after(1)
    assert held[1].data.tolist() == [6] * 4
    lost, held = exchange(Sharing(1, "all", participation=0.0, discard=True), 1.0, 5.0)
    lost.after(1)
    assert held[1].data.tolist() == [1] * 4, "the published state is the first member's, at the beginning"


# ---- variants --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IDEAS)
def test_every_idea_trains_and_is_read(name: str, tmp_path: Path) -> None:
    idea = IDEAS[name]
    switches = idea.switches
    size = SIZE if idea.grams is None else replace(SIZE, tables=replace(idea.grams, rows=min(idea.grams.rows, 64)))
    spec = replace(a_spec(steps=12, switches=switches), manifest=manifest(size, "evidence", 12, 0))
    result = train.train(spec, tmp_path)
    blocks, run = result.blocks(), result.spec.manifest
    reading = scoring.alone(run, blocks) if switches.upstream is None else scoring.upstream(blocks)
    score = scoring.score(reading, some_tokens())
    assert all(math.isfinite(value) for value in (*score["blocks"], score["mean"], score["mixture"]))
    assert result.info["optimizer_bytes"] > 0
    initial = variants.model_of(switches)(run, 0)
    assert not torch.equal(initial.head, blocks[0].head)


def test_a_block_without_upstream_is_a_plain_one_and_reads_the_belief_when_there_is_one() -> None:
    run = manifest(SIZE, "evidence", 10, 0)
    blocks = [variants.BeliefBlock(run, number).requires_grad_(False) for number in range(2)]
    tokens = some_tokens()[:, :-1]
    bare = Block(run, 1).requires_grad_(False)
    alone = scoring.upstream(blocks[1:])(tokens)[0]
    assert torch.allclose(alone, bare(tokens).log_softmax(-1), atol=1e-5)
    first, second = scoring.upstream(blocks)(tokens)
    assert not torch.allclose(second, alone, atol=1e-3)
    missing = scoring.upstream(blocks, missing=0)(tokens)
    assert torch.allclose(missing[0], alone, atol=1e-5)
    assert torch.equal(first, scoring.upstream(blocks[:1])(tokens)[0])


def test_muon_turns_updates_into_rotations_of_one_size() -> None:
    matrix = torch.randn(24, 96, generator=torch.Generator().manual_seed(0)) @ torch.diag(torch.logspace(-3, 1, 96))
    values = torch.linalg.svdvals(variants.orthogonal(matrix))
    assert float(values.min()) > 0.3
    assert float(values.max()) < 1.6
    assert torch.allclose(variants.orthogonal(matrix.T), variants.orthogonal(matrix).T, atol=1e-4)


# ---- reading ---------------------------------------------------------------------------------------------------------------------------


def test_the_chain_is_the_mean_of_log_probabilities_normalised() -> None:
    p = torch.tensor([[0.9, 0.1], [0.5, 0.5]]).log()
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    score = scoring.score(lambda inputs: [row.expand(1, 2, 2) for row in p], tokens)
    geometric = math.sqrt(0.9 * 0.5) / (math.sqrt(0.9 * 0.5) + math.sqrt(0.1 * 0.5))
    assert score["mean"] == pytest.approx(-math.log(geometric), abs=1e-6)
    assert score["mixture"] == pytest.approx(-math.log(0.7), abs=1e-6)
    assert (score["best"], score["last"]) == (pytest.approx(-math.log(0.9)), pytest.approx(-math.log(0.5)))


def test_learned_weights_leave_out_a_block_that_knows_nothing() -> None:
    tokens = torch.randint(0, 2, (40, 129), generator=torch.Generator().manual_seed(0))

    def reading(inputs: torch.Tensor) -> list[torch.Tensor]:
        good = torch.tensor([0.5, 0.5]).log().expand(*inputs.shape, 2)
        noise = torch.randn(*inputs.shape, 2, generator=torch.Generator().manual_seed(len(inputs))).log_softmax(-1)
        return [good, noise]

    found = scoring.learned_weights(reading, tokens)
    assert abs(found["weights"][1]) < 0.1
    assert found["weighted"] < found["plain"]


def test_the_ngram_is_witten_bell_by_hand() -> None:
    model = ByteNgram(np.frombuffer(b"abab", np.uint8), order=1)
    a, b = ord("a"), ord("b")
    unigram = dict.fromkeys((a, b), (2 + 2 / 256) / (4 + 2))  # n = 4, two kinds, base 1/256
    after_a = (2 + 1 * unigram[b]) / (2 + 1)
    nats = model.nats(np.array([[a, b]]))
    assert nats[0, 0] == pytest.approx(-math.log(after_a))
    unseen = model.nats(np.array([[ord("z"), b]]))
    assert unseen[0, 0] == pytest.approx(-math.log(unigram[b])), "an unknown context has no say"


def test_more_context_helps_the_ngram_on_text_it_was_not_counted_on() -> None:
    text = scoring.corpus_of(BUILTIN, 128)
    counted, held = text.train.read(0, len(text.train)), text.heldout_windows(40)
    low, high = (float(ByteNgram(counted, order).nats(held).mean()) for order in (1, 4))
    assert high < low - 0.5


# ---- sizes -----------------------------------------------------------------------------------------------------------------------------


def test_presets_are_named_by_their_dial_too() -> None:
    assert preset("laptop") == preset("128x2x3")
    for name in presets.PRESETS:
        run = manifest(preset(name), "evidence", 100, 0)
        assert run.optimizer.batch % run.optimizer.accumulate == 0
    for wrong in ("huge", "100x2x3", "128x0x3", "128x2"):
        with pytest.raises(UsageError, match="--preset"):
            preset(wrong)


def test_the_papers_shape_has_the_papers_memory_and_the_largest_fits_24_gb() -> None:
    paper = replace(preset("paper"), tables=Grams())
    assert presets.train_bytes(paper) / 2**30 == pytest.approx(0.198, rel=0.01)
    assert 14 < presets.train_bytes(preset("gpu24")) / 2**30 < 18


def test_the_plain_loops_layers_are_the_blocks_layers() -> None:
    """The same weights give the same logits, so that `bench step` compares like with like."""
    run = manifest(Preset(32, 2, 1, Grams()), "autoregressive", 10, 0)
    ours = Block(run, 0).requires_grad_(False)
    plain = PlainModel(256, 32, 2, run.model.heads, run.model.context)
    names = {"embedding": "embedding.weight", "norm_out": "norm.weight", "head": "head.weight"}
    state = plain.state_dict()
    for name, value in ours.named_parameters():
        other = names.get(name) or f"{name}.weight"
        if other in state:
            state[other].copy_(value)
    tokens = some_tokens()[:, :-1]
    assert torch.allclose(plain(tokens), ours(tokens), atol=1e-4)


def test_the_cells_are_what_they_say() -> None:
    reference = cells.reference(SIZE, 10, 3).manifest
    assert (reference.model.layers, reference.blocks, reference.objective) == (2, 1, "autoregressive")
    assert reference.grams.rows == SIZE.blocks * cells.chain(SIZE, 10, 3)[0].manifest.grams.rows, "as many as all blocks have together"
    chain, control = cells.chain(SIZE, 10, 3), cells.chain(SIZE, 10, 3, objective="autoregressive")
    assert [spec.members[0] for spec in chain] == [spec.members[0] for spec in control]
    assert cells.literal(SIZE, 10, 0).sharing.every == cells.SHARE_EVERY
