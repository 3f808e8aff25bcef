"""One block with fixed weights at work: its part of a traversal, for one session or for several at once (design §6).

In whichever thread calls it, and for no two threads at once. `serving.TorchServer` has one for each state that it serves, an offline
chain one for each block; both give the same bytes.

Shapes: R rows, W wanted positions, V vocabulary, U unknown positions, D width.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch.nn import functional as F

from blocktrain.node.compute import rows as wire
from blocktrain.node.compute.batching import forward_each
from blocktrain.node.compute.flat import Flat, from_bytes
from blocktrain.node.compute.model import Block, Cache, Noisy
from blocktrain.node.compute.objective import objective_of
from blocktrain.node.compute.sampling import Floats, Half, distribution, draw, noise, to_half
from blocktrain.node.ports import Buffer
from blocktrain.protocol.errors import PeerFault
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import Step
from blocktrain.protocol.sweep import DRAW, Sampling, Shape, Work, check_step, pack_tokens, rows_of_draft, uniform

_HALF_MAX: Final = 65504.0


@dataclass(frozen=True, eq=False)
class Job:
    """One step to be done."""

    cache: Cache
    step: Step
    body: Buffer

    def kind(self) -> tuple[object, ...]:
        """Jobs of one kind can be done in one pass; None of another's is equal where a job has to be alone."""
        step = self.step
        if step.rows > 1 or step.noisy:
            return (self.cache, step.sequence)
        return (len(step.tokens), step.want, step.draft)


@dataclass(frozen=True)
class _Task:
    """A job that passed every check; `before` is what came in, `place` where its result goes."""

    job: Job
    work: Work
    before: Half | None
    place: int


class Worker:
    """One block of a run with fixed weights, and its part in traversals. Not for two threads at once."""

    def __init__(self, manifest: Manifest, block: Block) -> None:
        self.block = block
        self.shape = Shape.of(manifest)
        self._manifest = manifest
        self._objective = objective_of(manifest, block.block)
        self._device = block.embedding.device
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # a sweep does not queue behind training

    def cache(self) -> Cache:
        with torch.inference_mode():
            return Cache(self.block)

    def step(self, cache: Cache, step: Step, body: Buffer) -> tuple[Step, bytes]:
        """The step and the body for the next holder; the cache then holds the step's known and drafted tokens.

        Raises: Malformed, PeerFault: what does not fit; the cache is as it was.
        """
        (result,) = self.steps([Job(cache, step, body)])
        if isinstance(result, PeerFault):
            raise result
        return result

    def steps(self, jobs: Sequence[Job]) -> list[tuple[Step, bytes] | PeerFault]:
        """Several steps at once, each of a cache of its own and all of one `kind`: one pass of the block serves them all."""
        began = time.perf_counter()
        results: list[tuple[Step, bytes] | PeerFault] = []
        tasks: list[_Task] = []
        for job in jobs:
            try:
                work = check_step(job.step, len(job.body), self.shape, block=self.block.block, cached=job.cache.length)
                tasks.append(_Task(job, work, _incoming(job.step, work, job.body, self.shape), len(results)))
                results.append(PeerFault("not done"))
            except PeerFault as fault:
                results.append(fault)
        if not tasks:
            return results
        stream = torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
        with torch.inference_mode(), stream:
            for task in tasks:
                if task.job.step.rows == 1:
                    task.job.cache.truncate(task.job.step.position)
            outcomes = self._outcomes(tasks)
        spent = (time.perf_counter() - began) / len(tasks)
        for task, (own, tail, drafted) in zip(tasks, outcomes, strict=True):
            results[task.place] = self._onward(task, own, tail, drafted, spent)
        return results

    def _outcomes(self, tasks: Sequence[_Task]) -> list[tuple[Half, bytes, list[int]]]:
        """Of each: this block's log-probabilities [W, V], what rides behind them, and the drafted tokens."""
        step = tasks[0].job.step
        if self.shape.sequential:
            return [self._sequential(task) for task in tasks]
        if tasks[0].work.unknown:
            return [(*self._window(task.job.cache, task.job.step, task.work, task.before), []) for task in tasks]
        if step.draft:
            return self._draft(tasks)
        tails = [bytes(task.job.body[task.work.score_bytes :]) for task in tasks]
        if len(tasks) == 1:
            own = self._scores(tasks[0].work.tokens, step.want, tasks[0].job.cache if step.rows == 1 else None, rows=step.rows)
            return [(own, tails[0], [])]
        rows = self._scores_each([task.work.tokens for task in tasks], step.want, [task.job.cache for task in tasks])
        return [(own, tail, []) for own, tail in zip(rows, tails, strict=True)]

    def _onward(self, task: _Task, own: Half, tail: bytes, drafted: list[int], compute_s: float) -> tuple[Step, bytes]:
        step, before = task.job.step, task.before
        total = (
            own
            if before is None or self.shape.sequential
            else (before[: own.size].reshape(own.shape).astype(np.float32) + own).astype(np.float16)
        )
        onward = replace(
            step,
            tokens=step.tokens + pack_tokens(drafted, self.shape),
            draft=0,
            drafted=step.drafted + len(drafted),
            blocks=(*step.blocks, self.block.block),
            compute_s=step.compute_s + compute_s,
        )
        return onward, wire.pack(total, self.shape, self.shape.terms(len(onward.blocks))) + tail

    def _scores(self, tokens: list[int], want: int, cache: Cache | None, *, rows: int = 1, noisy: Noisy | None = None) -> Half:
        """This block's log-probabilities at the last `want` positions, [R x W, V]."""
        tokens_RN = torch.tensor(tokens, dtype=torch.int64, device=self._device).view(rows, -1)
        scores = self._objective.contribute(self.block, tokens_RN, cache, noisy, want)
        values: Floats = scores.view(rows * want, self.shape.vocabulary).cpu().numpy()
        return self._said(values)

    def _scores_each(self, tokens: Sequence[list[int]], want: int, caches: Sequence[Cache]) -> list[Half]:
        """The same for several texts, each with its own cache: [W, V] of each."""
        if len(tokens) == 1:
            return [self._scores(tokens[0], want, caches[0])]
        tokens_RN = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        values: Floats = forward_each(self.block, tokens_RN, caches, want).log_softmax(-1).cpu().numpy()
        return [self._said(row) for row in values]

    def _said(self, log_probs: Floats) -> Half:
        """This block's log-probabilities [N, V] as others will read them."""
        return wire.settled(to_half(log_probs), self.shape, 1)

    def _draft(self, tasks: Sequence[_Task]) -> list[tuple[Half, bytes, list[int]]]:
        """Extend each text by `step.draft` tokens of this block alone; its log-probabilities [W, V] at all of them, and the tokens."""
        first, caches = tasks[0].job.step, [task.job.cache for task in tasks]
        newest = self._scores_each([task.work.tokens for task in tasks], first.want - first.draft, caches)
        rows = [[own] for own in newest]
        drafted: list[list[int]] = [[] for _ in tasks]
        for _ in range(first.draft):
            for number, task in enumerate(tasks):
                step = task.job.step
                sampling = Sampling(step.temperature, step.top_k, step.top_p)
                chance = uniform(step.seed, task.job.cache.length, DRAW)  # the token's own position: the next one
                drafted[number].append(draw(distribution(newest[number][-1], sampling), chance))
            newest = self._scores_each([tokens[-1:] for tokens in drafted], 1, caches)
            for number, own in enumerate(newest):
                rows[number].append(own)
        out = []
        for task, parts, tokens in zip(tasks, rows, drafted, strict=True):
            own = np.concatenate(parts)
            out.append((own, wire.pack(own[-task.work.draft_rows :], self.shape, 1), tokens))
        return out

    def _window(self, cache: Cache, step: Step, work: Work, before: Half | None) -> tuple[Half, bytes]:
        """Score a window with unknown positions and move their z on: the log-probabilities [W, V], and z as it travels.

        z arrives at the σ where the holder before left it and goes to the low end of our interval, in `substeps` Euler steps of equal
        ratio: D = Σ p(token) · Y[token], z ← z + (σ' - σ)(z - D)/σ (recipe §2). After a missing block σ is higher than our
        interval; the evidence of z is exact there too. The scores are those of the last sub-step.
        """
        low = self._manifest.sigma_interval(self.block.block)[0]
        sigma = min((self._manifest.sigma_interval(block)[0] for block in step.blocks), default=self._manifest.noise.sigma_high)
        if before is None:
            first = step.position + work.length
            z_UD = np.stack([noise(step.seed, first + index, self.shape.width) for index in range(work.unknown)]) * np.float32(sigma)
        else:
            z_UD = before[step.want * self.shape.vocabulary :].reshape(work.unknown, -1).astype(np.float32)
        z = torch.from_numpy(z_UD).to(self._device)[None]
        tokens = work.tokens
        known = step.position + work.length
        ratio = min(1.0, low / sigma) ** (1 / step.substeps)
        for left in reversed(range(step.substeps)):
            noisy = Noisy.tail(z, sigma, len(tokens) + work.unknown)
            rows = self._scores([*tokens, *[0] * work.unknown], step.want, cache, noisy=noisy)
            expected = torch.from_numpy(rows[1:].astype(np.float32)).to(self._device).softmax(-1) @ self.block.targets
            z = z + (ratio - 1) * (z - expected)  # (σ' - σ)/σ
            sigma *= ratio
            cache.truncate(known - 1 if left else known)  # no noisy position stays; the next pass needs the last known token in it
            tokens = tokens[-1:]
        return rows, z[0].clamp(-_HALF_MAX, _HALF_MAX).half().cpu().numpy().tobytes()

    def _sequential(self, task: _Task) -> tuple[Half, bytes, list[int]]:
        """Where blocks hand z on (recipe §2): this block's log-probabilities [W, V], what rides behind them, and the drafted tokens.

        Every position of the step has a z, by its place in the window and the step's seed, so that a cache that was lost is filled
        again with the same. Whoever drafts does so from this block alone, as it reads the noise that the draft's position begins with.
        """
        step, work = task.job.step, task.work
        cache = task.job.cache if step.rows == 1 else None
        if task.before is None:
            z_MD = np.tile(self._noise(step, step.position, work.length + work.unknown), (step.rows, 1))
        else:
            z_MD = task.before[task.before.size - work.z_rows * self.shape.width :].reshape(work.z_rows, -1).astype(np.float32)
        tokens = torch.tensor(work.tokens, dtype=torch.int64, device=self._device).view(step.rows, -1)
        scores, z = self._handed_on(step, F.pad(tokens, (0, work.unknown)), z_MD, cache, work.unknown)
        scores = scores.reshape(step.rows, -1, self.shape.vocabulary)[:, scores.shape[0] // step.rows - (step.want - step.draft) :]
        rows, moved, drafted = [scores.reshape(-1, self.shape.vocabulary)], [z], list[int]()
        for _ in range(step.draft):
            assert cache is not None
            place = cache.length  # the token's own position: the next one
            chance = uniform(step.seed, place, DRAW)
            drafted.append(draw(distribution(rows[-1][-1], Sampling(step.temperature, step.top_k, step.top_p)), chance))
            one = torch.tensor([drafted[-1:]], dtype=torch.int64, device=self._device)
            scores, z = self._handed_on(step, one, self._noise(step, place, 1), cache)
            rows.append(scores)
            moved.append(z)
        if work.unknown:
            task.job.cache.truncate(step.position + work.length)  # no unknown position stays
        own = np.concatenate(rows)
        drafts = own[-work.draft_rows :] if step.draft else own[:0]
        if task.before is not None:
            drafts = task.before[own.size : task.before.size - work.z_rows * self.shape.width].reshape(-1, self.shape.vocabulary)
        return own, wire.pack(drafts, self.shape, 1) + b"".join(moved), drafted

    def _noise(self, step: Step, first: int, count: int) -> Floats:
        """z where a sweep begins, [count, D]: at the σ where this block's interval does."""
        high = np.float32(self._manifest.sigma_interval(self.block.block)[1])
        return np.stack([noise(step.seed, first + index, self.shape.width) for index in range(count)]) * high

    def _handed_on(self, step: Step, tokens_RN: torch.Tensor, z_MD: Floats, cache: Cache | None, unknown: int = 0) -> tuple[Half, bytes]:
        """Log-probabilities [R x N, V] at all positions, and z where the next block takes it: one Euler step (as in `_window`)."""
        low, sigma = self._manifest.sigma_interval(self.block.block)
        sigma = min((self._manifest.sigma_interval(block)[0] for block in step.blocks), default=sigma)  # higher after a missing block
        rows, positions = tokens_RN.shape
        z = torch.from_numpy(z_MD).to(self._device)
        offset = (torch.arange(positions, device=self._device) - (positions - unknown - 1)).clamp(min=0)
        everywhere = torch.arange(rows * positions, device=self._device)
        noisy = Noisy(everywhere, z, torch.full((rows * positions,), sigma, device=self._device), offset.repeat(rows))
        log_probs = self._objective.contribute(self.block, tokens_RN, cache, noisy).flatten(0, 1)
        z = z + min(0.0, low / sigma - 1) * (z - log_probs.exp() @ self.block.targets)  # (σ' - σ)/σ
        values: Floats = log_probs.cpu().numpy()
        return self._said(values), z.clamp(-_HALF_MAX, _HALF_MAX).half().cpu().numpy().tobytes()


def _incoming(step: Step, work: Work, body: Buffer, shape: Shape) -> Half | None:
    """The body as numbers, None at the first holder.

    Raises: PeerFault: sums that cannot be log-probabilities, or a z that is not finite.
    """
    if not step.blocks:
        return None
    rows = step.rows * step.want + rows_of_draft(step.drafted)
    cut = rows * shape.row_bytes
    scores = wire.unpack(memoryview(body)[:cut], shape)
    z: Half = np.frombuffer(body, "<f2", offset=cut)
    values: Half = np.concatenate((scores.ravel(), z)) if shape.kept else np.frombuffer(body, "<f2")
    if scores.size and not (scores.max() <= 0 and scores.min() >= -_HALF_MAX):  # NaN fails both
        raise PeerFault("the accumulator does not hold log-probabilities")
    if work.z_rows and not np.isfinite(values[len(values) - work.z_rows * shape.width :]).all():
        raise PeerFault("z is not finite")
    return values


def load_block(block: Block, payload: Buffer) -> Block:
    """Put a published state's bytes into a block, and return it. Raises: PeerFault: another size than the block's."""
    flat = Flat(block)
    flat.data.copy_(from_bytes(payload, flat.size))
    return block
