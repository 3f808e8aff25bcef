"""A replica: training on its own thread, and snapshots, merges, downloads and checkpoints that never take the block a step back."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blocktrain.node.compute import codecs, flat
from blocktrain.node.compute.adamw import FusedAdamW
from blocktrain.node.compute.device import Mover, Parcel
from blocktrain.node.compute.replica import Options, TorchReplica
from blocktrain.node.compute.trainer import Tensors, Trainer, TrainingFailed
from blocktrain.node.ports import Published, Trial
from blocktrain.node.store import Store
from blocktrain.protocol.acceptance import judge
from blocktrain.protocol.errors import BlocktrainError, DoesNotFit, NetworkFault, PeerFault, UsageError
from blocktrain.protocol.exchange import shares, tokens_per_round
from blocktrain.protocol.ids import Digest
from blocktrain.protocol.manifest import Grams, Manifest, Model, Noise, Optimizer, Schedule
from tests.merges import Said, Snapshot, exchange, merge_of, snapshot_of, terms_of

H, BATCH, T = 5, 4, 16
PER_STEP = BATCH * T
MANIFEST = Manifest(
    format=1,
    name="tiny",
    blocks=3,
    objective="evidence",
    tokenizer="bytes",
    seed=5,
    model=Model(width=32, layers=1, heads=4, context=T, vocabulary=256),
    noise=Noise(sigma_low=0.2, sigma_high=4.0, overlap=0.1, window_share=0.25),
    schedule=Schedule(steps_per_round=H, learning_rate=4e-3, warmup_rounds=2, planned_rounds=50, floor=0.1),
    optimizer=Optimizer(batch=BATCH, accumulate=1, beta1=0.9, beta2=0.95, weight_decay=0.05, clip=1.0, warmup_steps=4),
)
TEXT = np.frombuffer(b"the river runs down to the sea; " * 40, np.uint8).astype(np.int64)
DEADLINE_S = 20.0


class Text:
    """A walk over one text. `trouble` is called before every batch."""

    def __init__(self, start: int = 0, trouble: Callable[[], None] = lambda: None) -> None:
        self.at = start
        self.trouble = trouble

    def next_batch(self) -> np.ndarray:
        self.trouble()
        self.at += 1
        rows = [(self.at * 7 + row * 131) % (len(TEXT) - T - 1) for row in range(BATCH)]
        return np.stack([TEXT[row : row + T + 1] for row in rows])

    def heldout(self, count: int) -> np.ndarray:
        return np.stack([TEXT[3 * row : 3 * row + T + 1] for row in range(count)])

    def position(self) -> dict[str, object]:
        return {"at": self.at}

    def seek(self, position: Mapping[str, object]) -> bool:
        assert isinstance(position["at"], int)
        self.at = position["at"]
        return True


class Shelf:
    """A store in memory."""

    def __init__(self) -> None:
        self.kept: tuple[Tensors, dict[str, Any]] | None = None

    def write(self, tensors: Tensors, header: Mapping[str, object]) -> bool:
        self.kept = {name: array.copy() for name, array in tensors.items()}, dict(header)
        return True

    def read(self, shapes: Mapping[str, tuple[int, ...]] | None = None) -> tuple[Tensors, dict[str, Any]] | None:
        for name, shape in (shapes or {}).items():
            assert self.kept is None or self.kept[0][name].shape == shape
        return self.kept


Make = Callable[..., TorchReplica]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Makes replicas that do not train until told to, and stops them in the end."""
    made: list[TorchReplica] = []

    def build(start: int = 0, text: Text | None = None, manifest: Manifest = MANIFEST, store: Shelf | Store | None = None) -> TorchReplica:
        replica = TorchReplica(manifest, 1, text or Text(start), store, Options(device="cpu", seed=start))
        made.append(replica)
        return replica

    yield build
    for replica in made:
        await replica.stop()


async def train_rounds(replica: TorchReplica, rounds: int = 1) -> asyncio.Semaphore:
    """Let it train until it has told of so many rounds. It goes on after, and releases the semaphore at every further one."""
    told = asyncio.Semaphore(0)
    replica.start(told.release)
    await hear(told, rounds)
    return told


async def hear(told: asyncio.Semaphore, rounds: int = 1) -> None:
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(rounds):
            await told.acquire()


async def apart(make: Make) -> tuple[TorchReplica, TorchReplica]:
    """Two idle replicas of one block, still in round 0, of which the one trained 4 steps and the other 5, on other text."""
    pair = []
    initial = flat.to_bytes(a_trainer().flat.data)
    for number in (1, 2):
        shelf, trainer = Shelf(), a_trainer(start=100 * number)
        for _ in range(3 + number):
            trainer.step()
        keep(trainer, shelf, Published(0, flat.digest(initial)), initial)
        pair.append(make(store=shelf))
        assert pair[-1].restore()
    return pair[0], pair[1]


def a_trainer(start: int = 0, manifest: Manifest = MANIFEST) -> Trainer:
    return Trainer(manifest, 1, Text(start), Mover(torch.device("cpu")), seed=start)


def keep(trainer: Trainer, shelf: Shelf, published: Published, state: memoryview) -> None:
    """A checkpoint of a trainer that is in no replica."""
    frozen = trainer.freeze()
    shapes = trainer.flat.shapes
    served = {"published." + name: view.numpy() for name, view in flat.views(shapes, flat.from_bytes(state, trainer.flat.size)).items()}
    header = {**frozen.header, "round": published.round, "digest": published.digest.hex()}
    shelf.write(frozen.tensors(shapes, trainer.mover) | served, header)


async def live(replica: TorchReplica) -> torch.Tensor:
    """The live parameters, by the lossless codec."""
    return codecs.codec_of("fp32").decode((await snapshot_of(replica, "fp32")).payload, replica.state_bytes // 4)


def decoded(snapshot: Snapshot, replica: TorchReplica) -> torch.Tensor:
    return codecs.codec_of(snapshot.codec).decode(snapshot.payload, replica.state_bytes // 4)


# ---- exchanges -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
async def test_an_exchange_gives_both_sides_the_same_state_and_keeps_what_the_codec_lost(make: Make, codec: str) -> None:
    low, high = await apart(make)
    mine, theirs = await snapshot_of(low, codec), await snapshot_of(high, codec)
    before = [await live(low), await live(high)]
    at_low = await merge_of(low, mine, theirs.payload, terms_of(theirs), mine_first=True)
    at_high = await merge_of(high, theirs, mine.payload, terms_of(mine), mine_first=False)
    judge(at_low.measures, 0.5)
    assert at_low.digest == at_high.digest

    adopted = await low.adopt(at_low), await high.adopt(at_high)
    assert adopted[0] == adopted[1] == Published(1, at_low.digest)
    assert low.state()[0] == adopted[0]
    assert bytes(low.state()[1]) == bytes(high.state()[1])
    assert flat.digest(low.state()[1]) == at_low.digest

    parts = shares(mine.weight, theirs.weight, tokens_per_round(MANIFEST))
    assert parts[0] < parts[1], "who trained more weighs more"
    merged = flat.merge(decoded(mine, low), decoded(theirs, high), parts)
    assert bytes(flat.to_bytes(merged)) == bytes(low.state()[1])
    assert (await snapshot_of(low, codec)).weight == (await snapshot_of(high, codec)).weight == 0, "all that was trained is in the merge"
    for replica, was, own in ((low, before[0], mine), (high, before[1], theirs)):
        assert torch.equal(await live(replica), was + (merged - decoded(own, replica))), "live += merged - own encoded snapshot"


async def test_what_was_measured_is_what_happened(make: Make) -> None:
    low, high = await apart(make)
    mine, theirs = await snapshot_of(low, "fp32"), await snapshot_of(high, "fp32")
    measures = (await merge_of(low, mine, theirs.payload, terms_of(theirs), mine_first=True)).measures
    ours, other = decoded(mine, low), decoded(theirs, high)
    assert measures.finite
    assert measures.distance == pytest.approx(float((ours - other).norm()), rel=1e-4)
    assert measures.own_norm == pytest.approx(float(ours.norm()), rel=1e-4)
    assert measures.drift == pytest.approx(float((ours - flat.from_bytes(low.state()[1], ours.numel())).norm()), rel=1e-4)
    assert measures.loss_before is not None
    assert measures.loss_after is not None
    assert measures.loss_before != measures.loss_after
    assert 0 < measures.loss_after < 6.5


@pytest.mark.parametrize("codec", ["bf16", "sparse"])
async def test_an_ngram_table_does_not_say_who_goes_our_way(make: Make, codec: str) -> None:
    """Each replica moves the rows that its own text names, so that the whole of two honest ways looks as if they had nothing in common."""
    manifest = replace(MANIFEST, grams=Grams(longest=3, rows=64, row_width=4))
    pair = make(manifest=manifest), make(manifest=manifest)
    if codec == "sparse":
        await exchange(*pair, "bf16")
    reference = pair[0].state()[0].digest if codec == "sparse" else b""
    table = flat.place(flat.shapes_of(manifest), "grams.table")
    assert table.stop - table.start == 64 * 4
    for number, each in enumerate(pair):
        way = torch.full((each.state_bytes // 4,), 1e-2)
        way[table] = 1.0 - 2.0 * number
        await each._between_steps(lambda trainer, way=way: trainer.add(way))
    mine, theirs = await snapshot_of(pair[0], codec, reference), await snapshot_of(pair[1], codec, reference)
    measures = (await merge_of(pair[0], mine, theirs.payload, terms_of(theirs), mine_first=True)).measures
    assert measures.along > 0.9
    assert measures.distance > 16, "the table counts in all else"


async def test_a_trial_that_is_not_adopted_leaves_the_block_bit_for_bit(make: Make) -> None:
    low, high = await apart(make)
    before, state = (await snapshot_of(low, "fp32")).digest, low.state()
    mine, theirs = await snapshot_of(low, "bf16"), await snapshot_of(high, "bf16")
    await merge_of(low, mine, theirs.payload, terms_of(theirs), mine_first=True)
    assert (await snapshot_of(low, "fp32")).digest == before
    assert low.state() == state
    assert low.progress().heldout is None


def poisoned(snapshot: Snapshot, change: Callable[[torch.Tensor], None], size: int) -> tuple[bytes, Said]:
    """Another payload with honest terms: only its content is wrong."""
    state = codecs.codec_of("fp32").decode(snapshot.payload, size)
    change(state)
    payload = bytes(flat.to_bytes(state))
    return payload, replace(terms_of(snapshot), digest=flat.digest(payload))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda state: state[7].fill_(float("nan")), "not finite"),
        (lambda state: state[-1].fill_(float("-inf")), "not finite"),
        (lambda state: state.mul_(1e6), "norm"),
        (lambda state: state[:8192].zero_(), "held-out loss|norm"),
        (lambda state: state.mul_(-1), "norm"),
    ],
)
async def test_a_poisoned_snapshot_is_measured_and_refused(make: Make, change: Callable[[torch.Tensor], None], why: str) -> None:
    low, high = await apart(make)
    before = (await snapshot_of(low, "fp32")).digest
    mine, theirs = await snapshot_of(low, "fp32"), await snapshot_of(high, "fp32")
    payload, said = poisoned(theirs, change, high.state_bytes // 4)
    trial = await merge_of(low, mine, payload, said, mine_first=True)
    with pytest.raises(PeerFault, match=why):
        judge(trial.measures, 0.1)
    assert (await snapshot_of(low, "fp32")).digest == before
    assert low.published().round == 0


async def test_a_snapshot_that_breaks_the_agreement_is_the_peers_fault(make: Make) -> None:
    low, high = await apart(make)
    mine, theirs = await snapshot_of(low, "bf16"), await snapshot_of(high, "bf16")
    bad = bytearray(theirs.payload)
    bad[5] ^= 1
    short = theirs.payload[:-2]
    for payload, said, why in (
        (bad, terms_of(theirs), "digest"),
        (short, replace(terms_of(theirs), digest=flat.digest(short)), "bytes"),
    ):
        with pytest.raises(PeerFault, match=why):
            await merge_of(low, mine, payload, said, mine_first=True)
    with pytest.raises(PeerFault, match="codec"):
        await snapshot_of(low, "zip")


async def test_only_what_was_trained_since_the_snapshot_of_the_last_merge_counts_as_weight(make: Make) -> None:
    a = make()
    await train_rounds(a)
    mine = await snapshot_of(a, "bf16")
    trial = await merge_of(a, mine, mine.payload, terms_of(mine), mine_first=True)
    await a.adopt(trial)
    after = await snapshot_of(a, "bf16")
    total = a.progress().tokens
    assert mine.weight >= H * PER_STEP
    assert mine.weight % PER_STEP == after.weight % PER_STEP == 0
    assert after.weight <= total - mine.weight
    assert after.round == 1


# ---- own rounds and downloads ----------------------------------------------------------------------------------------------------------


async def test_training_goes_on_while_a_snapshot_and_a_published_state_stand_still(make: Make) -> None:
    a = make()
    await train_rounds(a)
    published = await a.publish_own()
    snapshot, state = await snapshot_of(a, "bf16"), a.state()[1]
    was = bytes(state)
    steps = a.progress().steps
    async with asyncio.timeout(DEADLINE_S):
        while a.progress().steps < steps + 2 * H:
            later = await snapshot_of(a, "bf16")
    assert later.digest != snapshot.digest
    assert flat.digest(snapshot.payload) == snapshot.digest
    assert bytes(state) == was == bytes(a.state()[1])
    assert flat.digest(state) == published.digest
    assert state.readonly
    assert snapshot.payload.readonly


async def test_the_terms_of_an_exchange_are_known_before_our_copy_is_made(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """So both sides copy at the same time. What the block does after that moment is not part of it."""
    one = make()
    go_on, take = threading.Event(), one._mover.take

    def slowly(source: torch.Tensor) -> Parcel:
        parcel = take(source)
        assert go_on.wait(10)
        return parcel

    before = (await snapshot_of(one, "fp32")).payload
    monkeypatch.setattr(one._mover, "take", slowly)
    async with asyncio.timeout(5):
        swap = await one.begin("fp32")
    assert (swap.codec, swap.round, swap.weight, swap.size) == ("fp32", 0, 0.0, one.state_bytes)
    giving = asyncio.ensure_future(swap.give(one.state_bytes))
    await asyncio.sleep(0)
    assert not giving.done()
    go_on.set()
    given = bytes(await giving)
    assert given
    assert given == bytes(before)[: len(given)]


async def test_a_copy_that_could_not_be_made_is_told_at_its_first_use_and_a_begin_at_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = make()

    def fails(source: torch.Tensor) -> Parcel:
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(one._mover, "take", fails)
    swap, unused = await one.begin("bf16"), await one.begin("bf16")  # an exchange that is declined never uses its snapshot
    with pytest.raises(MemoryError, match="no room"):
        await swap.give(1)
    del swap, unused
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"], "a failure that nobody asked for is no news"
    await one.stop()
    with pytest.raises(BlocktrainError, match="stopped"):
        await one.begin("bf16")


async def test_an_own_round_is_the_next_round_and_starts_the_count_again(make: Make) -> None:
    a = make()
    assert a.published().round == 0
    fresh = a.published().digest
    await train_rounds(a, 2)
    first = await a.publish_own()
    second = await a.publish_own()
    assert (first.round, second.round) == (1, 2)
    assert first.digest != fresh
    assert a.published() == second
    progress = a.progress()
    assert progress.steps >= 2 * H
    assert progress.tokens % PER_STEP == 0
    assert progress.tokens >= 2 * H * PER_STEP
    assert progress.heldout is not None
    assert progress.loss is not None
    assert progress.tokens_per_s > 0


async def test_a_round_is_told_every_h_steps_and_a_merge_starts_the_count_again(make: Make) -> None:
    a = make()
    await train_rounds(a, 3)
    assert a.progress().steps >= 3 * H
    mine = await snapshot_of(a, "fp32")
    counted = a.progress().steps_since_merge
    await a.adopt(await merge_of(a, mine, mine.payload, terms_of(mine), mine_first=True))
    assert a.progress().steps_since_merge < counted


async def test_a_downloaded_state_replaces_the_block_and_forgets_its_moments(make: Make) -> None:
    donor, joiner = make(), make(7)
    await train_rounds(donor)
    published = await donor.publish_own()
    await train_rounds(joiner)
    state = donor.state()[1]
    async with asyncio.timeout(DEADLINE_S):
        assert await joiner.load(bytes(state), 30, published.digest) == Published(30, published.digest)
    assert bytes(joiner.state()[1]) == bytes(state)
    assert joiner.progress().heldout == donor.progress().heldout
    idle = make(9)
    await idle.load(bytes(state), 30, published.digest)
    snapshot = await snapshot_of(idle, "fp32")
    assert bytes(snapshot.payload) == bytes(state)
    assert (snapshot.round, snapshot.weight) == (30, 0)


async def test_an_older_download_is_not_taken_and_a_broken_one_is_the_peers_fault(make: Make) -> None:
    donor, a = make(), make(7)
    state, digest = bytes(donor.state()[1]), donor.published().digest
    await a.load(state, 5, digest)
    own = await a.publish_own()
    assert await a.load(state, 5, digest) == own, "round 5 is older than our 6"
    nan = bytes(flat.to_bytes(torch.full((a.state_bytes // 4,), float("nan"))))
    for payload, said, why in (
        (state, Digest(bytes(32)), "digest"),
        (state[4:], flat.digest(state[4:]), "bytes"),
        (nan, flat.digest(nan), "not finite"),
    ):
        with pytest.raises(PeerFault, match=why):
            await a.load(payload, 99, said)
    assert a.published() == own


async def test_a_merge_from_before_a_download_is_void(make: Make) -> None:
    low, high = await apart(make)
    mine, theirs = await snapshot_of(low, "bf16"), await snapshot_of(high, "bf16")
    trial = await merge_of(low, mine, theirs.payload, terms_of(theirs), mine_first=True)
    loaded = await low.load(bytes(high.state()[1]), 40, high.published().digest)
    with pytest.raises(NetworkFault, match="downloaded state"):
        await low.adopt(trial)
    assert low.published() == loaded
    assert bytes((await snapshot_of(low, "fp32")).payload) == bytes(high.state()[1])


async def test_an_own_round_during_an_exchange_does_not_hide_the_merge(make: Make) -> None:
    """Whichever is first: the merge is what is published in the end, in a round of its own."""
    low, high = await apart(make)
    mine, theirs = await snapshot_of(low, "bf16"), await snapshot_of(high, "bf16")
    trial = await merge_of(low, mine, theirs.payload, terms_of(theirs), mine_first=True)
    own, merge = await asyncio.gather(low.publish_own(), low.adopt(trial))
    assert low.published() == merge
    assert merge.digest == trial.digest
    assert own == merge or own.round < merge.round

    after = await low.publish_own()
    again: Trial = await merge_of(low, mine, theirs.payload, terms_of(theirs), mine_first=True)
    assert again.round == after.round + 1


async def test_a_merge_never_takes_a_round_that_has_passed(make: Make) -> None:
    low, high = await apart(make)
    mine, theirs = await snapshot_of(low, "bf16"), await snapshot_of(high, "bf16")
    trial = await merge_of(low, mine, theirs.payload, terms_of(theirs), mine_first=True)
    for _ in range(3):
        await low.publish_own()
    assert await low.adopt(trial) == low.published() == Published(4, trial.digest)


# ---- learning --------------------------------------------------------------------------------------------------------------------------


async def test_two_replicas_that_merge_learn_and_stay_together(make: Make) -> None:
    low, high = make(1), make(1000)
    rounds: list[Published] = []
    first = (
        await merge_of(low, mine := await snapshot_of(low, "bf16"), mine.payload, terms_of(mine), mine_first=True)
    ).measures.loss_before
    told = await asyncio.gather(train_rounds(low), train_rounds(high))
    for _ in range(6):
        await asyncio.gather(*(hear(semaphore) for semaphore in told))
        mine, theirs = await asyncio.gather(snapshot_of(low, "bf16"), snapshot_of(high, "bf16"))
        at_low, at_high = await asyncio.gather(
            merge_of(low, mine, theirs.payload, terms_of(theirs), mine_first=True),
            merge_of(high, theirs, mine.payload, terms_of(mine), mine_first=False),
        )
        rounds += await asyncio.gather(low.adopt(at_low), high.adopt(at_high))
    assert [published.round for published in rounds[::2]] == [1, 2, 3, 4, 5, 6]
    assert rounds[::2] == rounds[1::2]
    last = low.progress().heldout
    assert last is not None
    assert first is not None
    assert last < first - 0.5


def test_a_restored_trainer_takes_the_very_steps_that_would_have_followed() -> None:
    first, shelf = a_trainer(3), Shelf()
    for _ in range(10):
        first.step()
    keep(first, shelf, Published(4, Digest(bytes(32))), flat.to_bytes(torch.zeros(first.flat.size)))
    for _ in range(5):
        first.step()

    second = a_trainer(77)
    assert shelf.kept is not None
    second.restore(*shelf.kept, round=0)
    for _ in range(5):
        second.step()
    assert torch.equal(first.flat.data, second.flat.data)
    assert first.counters == second.counters
    assert first.learning_rate == second.learning_rate
    assert first.loss == pytest.approx(second.loss)


async def test_a_replica_goes_on_from_its_checkpoint(make: Make) -> None:
    shelf = Shelf()
    a = make(store=shelf)
    assert not a.restore()
    await train_rounds(a)
    published = await a.publish_own()
    state = bytes(a.state()[1])
    await a.save()
    assert shelf.kept is not None
    assert {"round", "steps", "digest", "position"} <= set(shelf.kept[1])

    b = make(50, store=shelf)
    assert b.restore()
    assert b.published() == published
    assert bytes(b.state()[1]) == state
    assert b.progress().steps == 0, "progress counts what this process did"
    tensors, header = shelf.kept
    await b.save()
    assert shelf.kept[1] == header
    assert shelf.kept[0] is not tensors
    assert shelf.kept[0].keys() == tensors.keys()
    assert all(np.array_equal(array, tensors[name]) for name, array in shelf.kept[0].items())


async def test_a_round_that_nobody_believes_is_given_up_and_nothing_else(make: Make, tmp_path: Path) -> None:
    """As a liar's state with a made-up round leaves it: parameters stay, the learning rate and the store follow the lower round."""
    with Store.open(tmp_path, MANIFEST.run, 1, min_free_bytes=0) as kept:
        a = make(store=kept)
        await a.load(bytes(make(9).state()[1]), 10**6, make(9).published().digest)
        told = await train_rounds(a)
        await a.save()
        assert kept.checkpoint_round == 10**6
        slow = a.progress().learning_rate
        published = await a.publish_own(12)
        assert published.round == 12
        assert a.published() == published
        assert flat.digest(a.state()[1]) == published.digest
        while not told.locked():
            await told.acquire()
        await hear(told)
        assert a.progress().learning_rate > 2 * slow, "the schedule is that of round 12"
        assert await a.publish_own(12) == published, "it is lowered once"
        assert (await a.publish_own()).round == 13
        await a.save()
        assert (kept.trouble, kept.checkpoint_round) == ("", 13)
        state, published = bytes(a.state()[1]), a.published()
    with Store.open(tmp_path, MANIFEST.run, 1, min_free_bytes=0) as kept:
        b = make(50, store=kept)
        assert b.restore()
        assert b.published() == published
        assert bytes(b.state()[1]) == state
        assert (await b.publish_own(3)).round == 3
        await b.save()
        assert kept.checkpoint_round == 3


async def test_how_far_own_rounds_have_led_outlives_a_restart(make: Make) -> None:
    """Else the first merge after it would be judged by the way since the last own round alone, and be refused."""
    shelf = Shelf()
    before, theirs = make(store=shelf), await snapshot_of(make(300), "bf16")
    await train_rounds(before, 3)
    for _ in range(3):
        await before.publish_own()
    await before.save()
    after = make(store=shelf)
    assert after.restore()

    async def drift(replica: TorchReplica) -> float:
        trial: Trial = await merge_of(replica, await snapshot_of(replica, "bf16"), theirs.payload, terms_of(theirs), mine_first=True)
        return trial.measures.drift

    alone = make(store=shelf)
    assert shelf.kept is not None
    del shelf.kept[1]["wandered"]  # as a checkpoint of an older version
    assert alone.restore()
    assert await drift(after) > 2 * await drift(alone)
    last = flat.from_bytes(after.state()[1], after.state_bytes // 4)
    assert await drift(after) >= flat.distance(last, flat.from_bytes(make().state()[1], len(last)))


def test_the_learning_rate_follows_the_rounds_and_our_own_warm_up() -> None:
    trainer = a_trainer()
    schedule, rates = MANIFEST.schedule, []
    for _ in range(6):
        trainer.step()
        rates.append(trainer.learning_rate)
    expected = [schedule.rate(min(1.0, step / H)) * min(1.0, (step + 1) / 4) for step in range(6)]
    assert rates == pytest.approx(expected)
    trainer.round = 40
    trainer.step()
    assert trainer.learning_rate == pytest.approx(schedule.rate(41))
    trainer.replace(torch.zeros(trainer.flat.size))
    trainer.step()
    assert trainer.learning_rate == pytest.approx(schedule.rate(40) / 4)


async def test_rounds_of_every_kind_move_the_learning_rate(make: Make) -> None:
    a = make()
    told = await train_rounds(a)
    schedule = MANIFEST.schedule

    async def merge() -> None:
        mine = await snapshot_of(a, "fp32")
        await a.adopt(await merge_of(a, mine, mine.payload, terms_of(mine), mine_first=True))

    async def download() -> None:
        await a.load(bytes(a.state()[1]), 40, a.published().digest)

    for act, round in ((merge, 1), (a.publish_own, 2), *((merge, number) for number in range(3, 12)), (a.publish_own, 12), (download, 40)):
        await act()
        assert a.published().round == round
        if round > 10:
            while not told.locked():  # those of before
                await told.acquire()
            await hear(told)
            assert schedule.rate(round + 1) <= a.progress().learning_rate <= schedule.rate(round)


def test_other_parameters_are_trained_as_if_nothing_had_been_before() -> None:
    plain = replace(MANIFEST, objective="autoregressive")
    worn, fresh = a_trainer(manifest=plain), a_trainer(start=5, manifest=plain)
    state = a_trainer(start=9).flat.data.clone()
    for _ in range(5):
        worn.step()
    for trainer in (worn, fresh):
        trainer.replace(state)
        for _ in range(3):
            trainer.step()
    assert torch.equal(worn.flat.data, fresh.flat.data)


def test_a_large_gradient_is_clipped() -> None:
    trainer = a_trainer(manifest=replace(MANIFEST, optimizer=replace(MANIFEST.optimizer, clip=0.01)))
    trainer.step()
    assert trainer.flat.grad is not None
    assert flat.norm(trainer.flat.grad) == pytest.approx(0.01, rel=1e-3)


def test_a_batch_in_parts_gives_the_same_steps() -> None:
    plain = replace(MANIFEST, objective="autoregressive")
    parts = replace(plain, optimizer=replace(plain.optimizer, accumulate=4))
    one, four = a_trainer(manifest=plain), a_trainer(manifest=parts)
    for _ in range(3):
        one.step()
        four.step()
    assert one.loss == pytest.approx(four.loss, rel=1e-5)
    assert flat.distance(one.flat.data, four.flat.data) < 1e-3 * flat.distance(one.flat.data, a_trainer().flat.data)


def test_the_optimizer_takes_the_steps_of_pytorchs_own() -> None:
    draw = torch.Generator().manual_seed(1)
    ours = [torch.randn(shape, generator=draw).requires_grad_() for shape in ((33, 7), (50,), (128, 64))]
    theirs = [parameter.detach().clone().requires_grad_() for parameter in ours]

    def groups(of: list[torch.Tensor]) -> list[dict[str, Any]]:
        return [{"params": of[::2], "lr": 1e-2, "weight_decay": 0.1}, {"params": of[1::2], "lr": 1e-2, "weight_decay": 0.0}]

    adamw, reference = FusedAdamW(groups(ours), (0.9, 0.95), 1e-8), torch.optim.AdamW(groups(theirs), betas=(0.9, 0.95), fused=True)
    for parameter in ours:
        zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        adamw.state[parameter] = {"step": torch.zeros(()), **zeros}
    for _ in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=draw)
            other.grad = mine.grad.clone()
        adamw.step()
        reference.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_weights_decay_in_matrices_only() -> None:
    """What the plain objective gives no gradient moves by decay alone."""
    trainer = a_trainer(manifest=replace(MANIFEST, objective="autoregressive"))
    named = dict(trainer.block.named_parameters())
    with torch.no_grad():
        named["time_in_bias"].fill_(1.0)
    matrix = named["time_in"].detach().clone()
    trainer.step()
    assert torch.equal(named["time_in_bias"], torch.ones_like(named["time_in_bias"]))
    assert torch.allclose(named["time_in"], matrix * (1 - trainer.learning_rate * MANIFEST.optimizer.weight_decay), rtol=1e-6)


# ---- failures and limits ---------------------------------------------------------------------------------------------------------------


def explode() -> None:
    raise ValueError("no such page")


def gone() -> None:
    raise UsageError("data.txt is gone: put it back")


@pytest.mark.parametrize(
    ("trouble", "kind", "line"),
    [(gone, UsageError, "data.txt is gone: put it back"), (explode, TrainingFailed, "training failed: ValueError: no such page")],
)
async def test_a_failure_of_training_is_told_in_a_line_and_to_everybody_after(
    make: Make, trouble: Callable[[], None], kind: type[BlocktrainError], line: str
) -> None:
    a = make(text=Text(trouble=trouble))
    waiting = asyncio.create_task(a.failed())
    a.start(lambda: None)
    async with asyncio.timeout(DEADLINE_S):
        reason = await waiting
    assert type(reason) is kind
    assert str(reason) == line
    for call in (snapshot_of(a, "bf16"), a.publish_own(), a.load(bytes(a.state()[1]), 1, a.published().digest)):
        with pytest.raises(kind, match=line):
            await call


async def test_a_loss_that_is_not_a_number_stops_training_and_is_not_published(make: Make) -> None:
    wild = replace(
        MANIFEST, schedule=replace(MANIFEST.schedule, learning_rate=10.0), optimizer=replace(MANIFEST.optimizer, weight_decay=10.0)
    )
    shelf = Shelf()
    a = make(manifest=wild, store=shelf)
    a.start(lambda: None)
    async with asyncio.timeout(DEADLINE_S):
        reason = await a.failed()
    assert isinstance(reason, TrainingFailed)
    assert "the loss is" in str(reason)
    assert "learning_rate" in str(reason)
    assert "\n" not in str(reason)
    for call in (snapshot_of(a, "bf16"), a.publish_own(), a.save()):
        with pytest.raises(TrainingFailed):
            await call
    assert shelf.kept is None
    assert a.published().round == 0


async def test_stopping_ends_training_after_the_step_in_hand(make: Make) -> None:
    a = make()
    await train_rounds(a)
    async with asyncio.timeout(DEADLINE_S):
        await a.stop()
    steps = a.progress().steps
    with pytest.raises(BlocktrainError, match="stopped"):
        await snapshot_of(a, "bf16")
    assert a.progress().steps == steps
    await a.stop()


@pytest.mark.parametrize(("device", "kind", "line"), [("tpu", UsageError, "not known: use auto, cpu"), ("cpu:1", UsageError, "not known")])
def test_a_device_that_is_none_is_refused_in_a_line(device: str, kind: type[BlocktrainError], line: str) -> None:
    with pytest.raises(kind, match=line):
        TorchReplica(MANIFEST, 1, Text(), None, Options(device=device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_where_there_is_none_does_not_fit() -> None:
    with pytest.raises(DoesNotFit, match="--device cpu"):
        TorchReplica(MANIFEST, 1, Text(), None, Options(device="cuda"))


def test_a_blocks_optimizer_is_its_share_of_the_stack_and_no_more() -> None:
    stack = [Trainer(MANIFEST, block, Text(), Mover(torch.device("cpu")), seed=0) for block in range(MANIFEST.blocks)]
    trainer = stack[0]
    size, tensors = trainer.flat.size, len(trainer.flat.shapes)
    assert trainer.optimizer_bytes() * MANIFEST.blocks == sum(each.optimizer_bytes() for each in stack)
    trainer.step()
    assert trainer.optimizer_bytes() == 8 * size + 4 * tensors
    assert trainer.train_bytes() == 16 * size + 4 * tensors
