"""A holder's part of a sweep: what a block adds, what its cache remembers, whom it refuses, and what it keeps for whom."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from blocktrain.node.compute import serving
from blocktrain.node.compute.model import MAX_WINDOW, Block
from blocktrain.node.compute.serving import KEPT_STATES, PINNED_STATES, TorchServer
from blocktrain.node.compute.thread import TrainingThread
from blocktrain.node.compute.worker import Worker, load_block
from blocktrain.node.ports import Busy, Published, UnknownState
from blocktrain.protocol import sweep
from blocktrain.protocol.errors import Malformed, PeerFault
from blocktrain.protocol.ids import NO_DIGEST, Digest
from blocktrain.protocol.manifest import Manifest, Model, Noise, Optimizer, Schedule
from blocktrain.protocol.messages import Step

V, D, T = 256, 32, 32
ROW = V * 2
MANIFEST = Manifest(
    format=1,
    name="tiny",
    blocks=3,
    objective="evidence",
    tokenizer="bytes",
    seed=5,
    model=Model(width=D, layers=1, heads=4, context=T, vocabulary=V),
    noise=Noise(sigma_low=0.2, sigma_high=4.0, overlap=0.1, window_share=0.25),
    schedule=Schedule(steps_per_round=10, learning_rate=4e-3, warmup_rounds=1, planned_rounds=10, floor=0.1),
    optimizer=Optimizer(batch=8, accumulate=1, beta1=0.9, beta2=0.95, weight_decay=0.05, clip=1.0, warmup_steps=20),
)
TEXT = b"The river runs to the sea and"


def some_block(number: int, seed: int = 0) -> Block:
    """A block whose every weight is random, those that read noise too."""
    block = Block(MANIFEST, number).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in block.parameters():
        if not parameter.any():
            parameter.normal_(0, 0.1, generator=generator)
    return block


def state_of(block: Block) -> memoryview:
    """A published state: fp32, parameters in name order."""
    return memoryview(b"".join(parameter.numpy().tobytes() for _, parameter in sorted(block.named_parameters())))  # spelt out on purpose


@pytest.fixture(scope="module")
def workers() -> list[Worker]:
    return [Worker(MANIFEST, some_block(number)) for number in range(3)]


def scores(body: bytes, rows: int) -> np.ndarray:
    return np.frombuffer(body, dtype="<f2")[: rows * V].reshape(rows, V).astype(np.float64)


def text_step(text: bytes, position: int = 0, want: int = 1, draft: int = 0) -> Step:
    return Step(sequence=0, position=position, rows=1, want=want, tokens=text, draft=draft, seed=11)


# ---- one block's part -----------------------------------------------------------------------------------------------------------


def test_a_block_adds_its_log_probabilities_and_its_name(workers: list[Worker]) -> None:
    first, second = workers[0], workers[1]
    own, body = first.step(first.cache(), text_step(TEXT, want=4), b"")
    onward, total = second.step(second.cache(), own, body)
    alone, other = second.step(second.cache(), text_step(TEXT, want=4), b"")
    assert (own.blocks, onward.blocks, alone.blocks) == ((0,), (0, 1), (1,))
    assert scores(total, 4) == pytest.approx(scores(body, 4) + scores(other, 4), abs=0.02)
    with torch.no_grad():
        expected = second.block(torch.tensor([list(TEXT)])).log_softmax(-1)[0, -4:].numpy()
    assert scores(other, 4) == pytest.approx(expected, abs=0.01)


def test_a_cached_text_scores_as_a_recomputed_one(workers: list[Worker]) -> None:
    worker = workers[0]
    cache = worker.cache()
    worker.step(cache, text_step(TEXT[:10], want=0), b"")
    for at in range(10, 20):
        _, cached = worker.step(cache, text_step(TEXT[at : at + 1], position=at), b"")
        _, anew = worker.step(worker.cache(), text_step(TEXT[: at + 1]), b"")
        assert scores(cached, 1) == pytest.approx(scores(anew, 1), abs=0.01)
    _, several = worker.step(cache, text_step(TEXT[20:25], position=20, want=5), b"")
    _, anew = worker.step(worker.cache(), text_step(TEXT[:25], want=5), b"")
    assert scores(several, 5) == pytest.approx(scores(anew, 5), abs=0.01)
    assert cache.length == 25


def test_a_rejected_draft_leaves_nothing_behind(workers: list[Worker]) -> None:
    worker = workers[0]
    cache = worker.cache()
    worker.step(cache, text_step(TEXT[:10], draft=6, want=7), b"")
    assert cache.length == 16
    _, after = worker.step(cache, text_step(b"XY", position=12), b"")  # two drafts stayed
    drafted = worker.step(worker.cache(), text_step(TEXT[:10], draft=6, want=7), b"")[0].tokens
    _, anew = worker.step(worker.cache(), text_step(drafted[:12] + b"XY"), b"")
    assert cache.length == 14
    assert scores(after, 1) == pytest.approx(scores(anew, 1), abs=0.01)


def test_a_draft_is_the_same_from_every_holder_of_a_state_however_the_cache_was_filled(workers: list[Worker]) -> None:
    twin = Worker(MANIFEST, some_block(0))
    whole, body = workers[0].step(workers[0].cache(), text_step(TEXT[:12], draft=8, want=9), b"")
    cache = twin.cache()
    twin.step(cache, text_step(TEXT[:9], want=0), b"")
    pieces, again = twin.step(cache, text_step(TEXT[9:12], position=9, draft=8, want=9), b"")
    assert whole.tokens[12:] == pieces.tokens[3:]
    assert (whole.drafted, whole.draft, whole.want) == (8, 0, 9)
    assert scores(body, 18) == pytest.approx(scores(again, 18), abs=0.01)
    other, _ = twin.step(twin.cache(), replace(text_step(TEXT[:12], draft=8, want=9), seed=12), b"")
    assert other.tokens != whole.tokens


def test_the_drafters_own_rows_pass_through_unchanged(workers: list[Worker]) -> None:
    step, body = workers[1].step(workers[1].cache(), text_step(TEXT[:8], draft=3, want=5), b"")
    own = body[5 * ROW :]
    assert own == body[ROW : 5 * ROW]  # of the drafter itself, before others add
    for worker in (workers[0], workers[2]):
        step, body = worker.step(worker.cache(), step, body)
    assert body[5 * ROW :] == own
    assert body[ROW : 5 * ROW] != own
    assert (step.blocks, step.drafted, len(step.tokens)) == ((1, 0, 2), 3, 11)


def test_many_texts_are_scored_at_once_without_touching_the_session(workers: list[Worker]) -> None:
    worker = workers[0]
    cache = worker.cache()
    worker.step(cache, text_step(TEXT[:10]), b"")
    batch = Step(0, 0, 3, 8, TEXT[:24])
    _, body = worker.step(cache, batch, b"")
    assert cache.length == 10
    for row in range(3):
        _, single = worker.step(worker.cache(), text_step(TEXT[row * 8 : row * 8 + 8], want=8), b"")
        assert scores(body, 24)[row * 8 : row * 8 + 8] == pytest.approx(scores(single, 8), abs=0.01)


# ---- windows of noise -----------------------------------------------------------------------------------------------------------


def window_step(known: bytes, unknown: int, **changes: int) -> Step:
    return replace(Step(0, 0, 1, unknown + 1, known + bytes(unknown), seed=3, noisy=True), **changes)


def test_protocol_and_model_agree_on_the_longest_window() -> None:
    assert sweep.MAX_WINDOW == MAX_WINDOW


@pytest.mark.parametrize("substeps", [1, 3])
def test_z_travels_from_block_to_block_and_nothing_noisy_stays_cached(workers: list[Worker], substeps: int) -> None:
    step, body = window_step(TEXT[:8], 7, substeps=substeps), b""
    seen: list[np.ndarray] = []
    for worker in workers:
        cache = worker.cache()
        step, body = worker.step(cache, step, body)
        assert cache.length == 8
        assert len(body) == 8 * ROW + 7 * D * 2
        seen.append(np.frombuffer(body[8 * ROW :], dtype="<f2").astype(np.float64).reshape(7, D))
        _, after = worker.step(cache, text_step(b"x", position=8), b"")
        _, anew = worker.step(worker.cache(), text_step(TEXT[:8] + b"x"), b"")
        assert scores(after, 1) == pytest.approx(scores(anew, 1), abs=0.01)
    norms = [np.linalg.norm(z, axis=1).mean() for z in seen]
    assert norms[0] > norms[1] > norms[2]  # from noise of σ 4 towards targets of norm 1
    assert norms[2] == pytest.approx(1, abs=0.7)


def test_the_known_position_of_a_window_is_scored_as_any_other(workers: list[Worker]) -> None:
    _, noisy = workers[0].step(workers[0].cache(), window_step(TEXT[:8], 7), b"")
    _, clean = workers[0].step(workers[0].cache(), text_step(TEXT[:8]), b"")
    assert scores(noisy, 1) == pytest.approx(scores(clean, 1), abs=0.01)


def test_a_window_depends_on_the_seed_and_not_on_what_was_cached(workers: list[Worker]) -> None:
    worker = workers[0]
    _, whole = worker.step(worker.cache(), window_step(TEXT[:8], 4), b"")
    cache = worker.cache()
    worker.step(cache, text_step(TEXT[:6]), b"")
    _, rest = worker.step(cache, replace(window_step(TEXT[6:8], 4), position=6), b"")
    assert scores(rest, 5) == pytest.approx(scores(whole, 5), abs=0.01)
    _, other = worker.step(worker.cache(), window_step(TEXT[:8], 4, seed=4), b"")
    assert np.abs(scores(other, 5) - scores(whole, 5))[1:].max() > 0.1


def test_a_window_without_one_block_still_ends_near_its_targets(workers: list[Worker]) -> None:
    step, body = workers[0].step(workers[0].cache(), window_step(TEXT[:8], 7), b"")
    step, body = workers[2].step(workers[2].cache(), step, body)
    z = np.frombuffer(body[8 * ROW :], dtype="<f2").astype(np.float64).reshape(7, D)
    assert step.blocks == (0, 2)
    assert np.linalg.norm(z, axis=1).mean() == pytest.approx(1, abs=0.7)


# ---- hostile steps --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "body", "why"),
    [
        (text_step(b"a", position=11), b"", "only 10 are cached"),
        (text_step(b"a" * 23, position=10), b"", "context"),
        (replace(text_step(b"a", position=10), blocks=(1,)), b"", "body of 0 bytes"),
        (replace(text_step(b"a", position=10), blocks=(1,)), b"\x00\x7e" * V, "log-probabilities"),  # NaN
        (replace(text_step(b"a", position=10), blocks=(1,)), b"\x00\xfc" * V, "log-probabilities"),  # -inf
        (replace(text_step(b"a", position=10), blocks=(1,)), b"\x00\x3c" * V, "log-probabilities"),  # 1.0
        (replace(text_step(b"a", position=10), blocks=(0,)), bytes(ROW), "block 0 is in the body"),
        (replace(window_step(b"a", 1), position=10, blocks=(1,)), bytes(2 * ROW) + b"\x00\x7c" * D, "not finite"),
        (replace(window_step(b"a", 1), position=10, want=40), b"", "wanted"),
    ],
)
def test_hostile_steps_are_refused_and_change_nothing(workers: list[Worker], step: Step, body: bytes, why: str) -> None:
    worker = workers[0]
    cache = worker.cache()
    worker.step(cache, text_step(TEXT[:10]), b"")
    with pytest.raises(PeerFault, match=why):
        worker.step(cache, step, memoryview(body))
    assert cache.length == 10


# ---- the port -------------------------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def published(number: int) -> Published:
    return Published(number, Digest(bytes([number]) * 32))


@pytest.fixture
async def clock() -> Clock:
    return Clock()


@pytest.fixture
async def server(clock: Clock) -> AsyncIterator[TorchServer]:
    server = TorchServer(MANIFEST, 0, clock=clock, max_sessions=3, idle_s=60)
    server.refresh(published(1), state_of(some_block(0)))
    yield server
    await server.stop()


async def first_row(server: TorchServer, session: bytes) -> bytes:
    _, body = await server.step(session, text_step(TEXT[:8]), memoryview(b""))
    return body


async def test_a_server_answers_as_the_block_whose_bytes_it_was_given(server: TorchServer, workers: list[Worker]) -> None:
    assert await server.open(b"one", NO_DIGEST) == published(1)
    assert await first_row(server, b"one") == workers[0].step(workers[0].cache(), text_step(TEXT[:8]), b"")[1]
    with pytest.raises(Malformed, match="only 8 are cached"):
        await server.step(b"one", text_step(b"a", position=9), memoryview(b""))


async def test_the_thread_works_and_the_loop_does_not(server: TorchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    inner = Worker.steps

    def watched(self: Worker, *args: object) -> object:
        threads.add(threading.current_thread().name)
        return inner(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "steps", watched)
    await server.open(b"one", NO_DIGEST)
    await asyncio.gather(*(server.step(b"one", text_step(TEXT[:8], draft=4, want=5), memoryview(b"")) for _ in range(3)))
    assert threads == {"serve_0"}


async def test_a_session_stays_with_its_state_while_that_is_kept(server: TorchServer) -> None:
    await server.open(b"old", NO_DIGEST)
    before = await first_row(server, b"old")
    server.refresh(published(2), state_of(some_block(0, seed=2)))
    server.refresh(published(3), state_of(some_block(1)))
    assert await first_row(server, b"old") == before
    assert await server.open(b"new", NO_DIGEST) == published(3)
    assert await first_row(server, b"new") != before
    assert await server.open(b"twin", published(1).digest) == published(1)
    assert await first_row(server, b"twin") == before
    for number in range(4, 4 + PINNED_STATES):
        server.refresh(published(number), state_of(some_block(0)))
    assert await first_row(server, b"old") == before, "many rounds later"
    server.close(b"twin")
    server.close(b"old")
    with pytest.raises(UnknownState, match="not kept"):
        await server.open(b"late", published(1).digest)
    assert server.sessions() == 1


async def test_where_memory_is_short_the_oldest_state_goes_and_its_sessions_with_it(
    server: TorchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "STATES_BYTES", 3 * state_of(some_block(0)).nbytes)
    await server.open(b"old", NO_DIGEST)
    for number in (2, 3):
        server.refresh(published(number), state_of(some_block(0)))
    with pytest.raises(UnknownState, match="not open"):
        await first_row(server, b"old")
    assert server.sessions() == 0


async def test_a_state_that_nobody_uses_is_kept_for_a_few_rounds_only(server: TorchServer) -> None:
    for number in range(2, 1 + KEPT_STATES):
        server.refresh(published(number), state_of(some_block(0)))
    assert await server.open(b"one", published(1).digest) == published(1)
    server.close(b"one")
    server.refresh(published(1 + KEPT_STATES), state_of(some_block(0)))
    with pytest.raises(UnknownState):
        await server.open(b"two", published(1).digest)
    assert await server.open(b"two", published(2).digest) == published(2)


async def test_before_anything_is_published_nothing_is_served() -> None:
    server = TorchServer(MANIFEST, 0)
    with pytest.raises(UnknownState):
        await server.open(b"one", NO_DIGEST)
    await server.stop()


async def test_a_state_of_another_size_is_refused_and_leaves_no_session(server: TorchServer) -> None:
    server.refresh(published(2), memoryview(bytes(100)))
    with pytest.raises(PeerFault, match="a state of 100 bytes"):
        await server.open(b"one", NO_DIGEST)
    assert server.sessions() == 0
    with pytest.raises(PeerFault, match="this block's has"):
        load_block(some_block(0), state_of(some_block(0))[4:])


async def test_no_room_is_said_and_idle_sessions_make_room(server: TorchServer, clock: Clock) -> None:
    for name in (b"one", b"two", b"three"):
        await server.open(name, NO_DIGEST)
    with pytest.raises(Busy) as busy:
        await server.open(b"four", NO_DIGEST)
    assert busy.value.retry_after_s > 0
    clock.now = 59.0
    await first_row(server, b"two")
    clock.now = 61.0
    await server.open(b"four", NO_DIGEST)
    assert server.sessions() == 2
    await first_row(server, b"two")
    with pytest.raises(UnknownState):
        await first_row(server, b"one")
    server.close(b"two")
    server.close(b"two")
    assert server.sessions() == 1


async def test_a_session_is_opened_once(server: TorchServer) -> None:
    await server.open(b"one", NO_DIGEST)
    with pytest.raises(PeerFault, match="open already"):
        await server.open(b"one", NO_DIGEST)
    assert server.sessions() == 1


async def test_memory_for_caches_bounds_the_sessions() -> None:
    one = 2 * T * D * 4
    assert TorchServer(MANIFEST, 0, cache_bytes=5 * one).most_sessions == 5
    assert TorchServer(MANIFEST, 0, cache_bytes=1).most_sessions == 1
    assert TorchServer(MANIFEST, 0, max_sessions=4).most_sessions == 4
    assert Worker(MANIFEST, some_block(0)).cache().nbytes == one


async def test_stopping_answers_those_who_wait_and_those_who_come_later(server: TorchServer) -> None:
    await server.open(b"one", NO_DIGEST)
    steps = [asyncio.create_task(first_row(server, b"one")) for _ in range(20)]
    await asyncio.sleep(0)
    await server.stop()
    results = await asyncio.gather(*steps, return_exceptions=True)
    assert all(isinstance(result, bytes | UnknownState) for result in results)
    with pytest.raises(UnknownState):
        await first_row(server, b"one")
    with pytest.raises((UnknownState, Busy)):
        await server.open(b"two", NO_DIGEST)


async def test_a_client_that_gives_up_waiting_takes_nothing_with_it(server: TorchServer) -> None:
    await server.open(b"one", NO_DIGEST)
    given_up = asyncio.create_task(first_row(server, b"one"))
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert len(await first_row(server, b"one")) == ROW


# ---- several sessions at once ----------------------------------------------------------------------------------------------------------


def rows_of(result: tuple[Step, bytes]) -> np.ndarray:  # type: ignore[type-arg]
    return np.frombuffer(result[1], np.float16).astype(np.float32)


@pytest.mark.parametrize("kind", [{"want": 1}, {"want": 5}, {"want": 4, "draft": 3}])
async def test_sessions_that_step_together_get_what_they_would_get_alone(server: TorchServer, kind: dict[str, int]) -> None:
    passes: list[int] = []
    inner = Worker.steps

    def watched(self: Worker, jobs: Sequence[object]) -> object:
        passes.append(len(jobs))
        return inner(self, jobs)  # type: ignore[arg-type]

    names = (b"one", b"two", b"three")
    for name in names:
        await server.open(name, NO_DIGEST)
    starts = {name: text_step(TEXT[: 4 + 3 * number]) for number, name in enumerate(names)}  # at different places
    expected = {}
    alone = Worker(MANIFEST, some_block(0))
    for name in names:
        cache = alone.cache()
        alone.step(cache, starts[name], b"")
        expected[name] = alone.step(cache, text_step(b"water", position=cache.length, **kind), b"")
        await server.step(name, starts[name], memoryview(b""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "steps", watched)
        steps = (text_step(b"water", position=len(starts[name].tokens), **kind) for name in names)
        held = asyncio.get_running_loop().run_in_executor(server._thread, time.sleep, 0.05)  # so that all of them wait
        got = await asyncio.gather(*(server.step(name, step, memoryview(b"")) for name, step in zip(names, steps, strict=True)))
        await held
    assert passes == [3], "one pass for all"
    for name, result in zip(names, got, strict=True):
        assert result[0].tokens == expected[name][0].tokens
        assert np.allclose(rows_of(result), rows_of(expected[name]), atol=0.02), "up to a last bit of fp16"


async def test_in_a_pass_for_several_a_malformed_step_fails_alone(server: TorchServer) -> None:
    for name in (b"one", b"two"):
        await server.open(name, NO_DIGEST)
    good, bad = text_step(TEXT[:5]), text_step(TEXT[:5], position=3)
    results = await asyncio.gather(
        server.step(b"one", good, memoryview(b"")), server.step(b"two", bad, memoryview(b"")), return_exceptions=True
    )
    assert isinstance(results[0], tuple)
    assert isinstance(results[1], Malformed)
    assert await server.step(b"two", good, memoryview(b""))


async def test_a_server_with_a_small_share_rests_between_passes_and_answers_before_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(serving.time, "sleep", slept.append)
    server = TorchServer(MANIFEST, 0, share=0.1)
    server.refresh(published(1), state_of(some_block(0)))
    await server.open(b"one", NO_DIGEST)
    first = await first_row(server, b"one")
    assert slept == [0.0], "nothing to make up for yet"
    assert await first_row(server, b"one") == first
    assert slept[1] > 0
    await server.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
def test_on_a_busy_machine_answers_come_before_training() -> None:
    thread = TrainingThread(SimpleNamespace())  # type: ignore[arg-type]
    training = thread.post(lambda trainer: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result(10)
    thread.stop()
    thread.ended.result(10)
    assert training > min(18, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
