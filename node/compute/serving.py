"""The published state at work: one thread that does a block's part of sweeps, with weights of its own (design §4, §6).

`Worker` is one block with fixed weights and does a step in whichever thread calls it. `TorchServer` is the port that a node has: it keeps
the last few published states, sessions pinned to them, and one thread, so that neither a training step nor the event loop delays a
sweep, and no weight is read in mid-update. States are kept as bytes and become a block when the first session needs them.

Shapes: R rows, W wanted positions, V vocabulary, U unknown positions, D width.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
import torch

from blocktrain.node.compute.flat import Flat, from_bytes
from blocktrain.node.compute.model import Block, Cache, Noisy
from blocktrain.node.compute.objective import objective_of
from blocktrain.node.compute.sampling import Floats, Half, distribution, draw, noise, to_half
from blocktrain.node.ports import Buffer, Busy, Published, UnknownState
from blocktrain.protocol import limits
from blocktrain.protocol.errors import PeerFault
from blocktrain.protocol.ids import NO_DIGEST, Digest
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import Step
from blocktrain.protocol.sweep import DRAW, Sampling, Shape, Work, check_step, pack_tokens, uniform

T = TypeVar("T")

KEPT_STATES: Final = 4  # published states at hand: who moves here from a failed holder may want the one before the last
PINNED_STATES: Final = 16  # further ones, older, while sessions are pinned to them
STATES_BYTES: Final = 1024**3  # of all of them together, the newest two excepted
CACHE_BYTES: Final = 512 * 1024**2  # of all sessions together
BUSY_RETRY_S: Final = 2.0  # sessions are short: a place is likely free by then
_HALF_MAX: Final = 65504.0


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
        began = time.perf_counter()
        work = check_step(step, len(body), self.shape, block=self.block.block, cached=cache.length)
        before = _incoming(step, work, body, self.shape)
        stream = torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
        with torch.inference_mode(), stream:
            if step.rows == 1:
                cache.truncate(step.position)
            if work.unknown:
                own, tail = self._window(cache, step, work, before)
                drafted: list[int] = []
            elif step.draft:
                own, drafted = self._draft(cache, step, work)
                tail = own[-work.draft_rows :].tobytes()
            else:
                own = self._scores(work.tokens, step.want, cache if step.rows == 1 else None, rows=step.rows)
                tail, drafted = bytes(body[work.score_bytes :]), []
        total = own if before is None else (before[: own.size].reshape(own.shape).astype(np.float32) + own).astype(np.float16)
        onward = replace(
            step,
            tokens=step.tokens + pack_tokens(drafted, self.shape),
            draft=0,
            drafted=step.drafted + len(drafted),
            blocks=(*step.blocks, self.block.block),
            compute_s=step.compute_s + time.perf_counter() - began,
        )
        return onward, total.tobytes() + tail

    def _scores(self, tokens: list[int], want: int, cache: Cache | None, *, rows: int = 1, noisy: Noisy | None = None) -> Half:
        """This block's log-probabilities at the last `want` positions, [R x W, V]."""
        tokens_RN = torch.tensor(tokens, dtype=torch.int64, device=self._device).view(rows, -1)
        scores = self._objective.contribute(self.block, tokens_RN, cache, noisy, want)
        values: Floats = scores.view(rows * want, self.shape.vocabulary).cpu().numpy()
        return to_half(values)

    def _draft(self, cache: Cache, step: Step, work: Work) -> tuple[Half, list[int]]:
        """Extend the text by `step.draft` tokens of this block alone; its log-probabilities [W, V], and the tokens."""
        sampling = Sampling(step.temperature, step.top_k, step.top_p)
        rows = [self._scores(work.tokens, step.want - step.draft, cache)]
        drafted: list[int] = []
        for _ in range(step.draft):
            chance = uniform(step.seed, cache.length, DRAW)  # the token's own position: the next one
            drafted.append(draw(distribution(rows[-1][-1], sampling), chance))
            rows.append(self._scores(drafted[-1:], 1, cache))
        return np.concatenate(rows), drafted

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


def _incoming(step: Step, work: Work, body: Buffer, shape: Shape) -> Half | None:
    """The body as numbers, None at the first holder.

    Raises: PeerFault: sums that cannot be log-probabilities, or a z that is not finite.
    """
    if not step.blocks:
        return None
    values: Half = np.frombuffer(body, dtype="<f2")
    scores = values[: work.score_bytes // 2]
    if scores.size and not (scores.max() <= 0 and scores.min() >= -_HALF_MAX):  # NaN fails both
        raise PeerFault("the accumulator does not hold log-probabilities")
    if work.unknown and not np.isfinite(values[scores.size :]).all():
        raise PeerFault("z is not finite")
    return values


# ---- the port -------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _State:
    published: Published
    payload: memoryview
    worker: Worker | None = None  # made in the thread when first needed
    pins: int = 0

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes * (1 if self.worker is None else 2)


@dataclass(eq=False)
class _Session:
    state: _State
    used_at: float
    cache: Cache | None = None  # made in the thread; none before `open` is through
    steps: int = 0  # in the thread or waiting for it


class TorchServer:
    """Implements `Server` of node/ports.py. Called from the event loop only; `clock` is monotonic, in seconds."""

    def __init__(
        self,
        manifest: Manifest,
        block: int,
        *,
        device: str = "cpu",
        clock: Callable[[], float] = time.monotonic,
        max_sessions: int = limits.MAX_SESSIONS,
        idle_s: float = limits.SESSION_IDLE_S,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._manifest, self._number, self._device = manifest, block, device
        self._clock, self._idle_s = clock, idle_s
        model = manifest.model
        one_cache = 2 * model.layers * model.context * model.width * 4
        self.most_sessions = max(1, min(max_sessions, cache_bytes // one_cache))
        self._states: list[_State] = []  # the newest last
        self._sessions: dict[bytes, _Session] = {}
        self._template: Block | None = None  # thread only: states become copies of it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="serve")
        self._stopped = False

    def refresh(self, published: Published, state: memoryview) -> None:
        """Serve this state from now on. Costs nothing until a session needs it; `state` must not change."""
        self._states = [known for known in self._states if known.published.digest != published.digest or known.pins]
        self._states.append(_State(published, state))
        self._drop_states()

    async def open(self, session: bytes, digest: Digest) -> Published:
        """A session with its own cache, pinned to a state. All zeros for `digest`: the newest.

        Raises: UnknownState: that state is not here. Busy: no room. PeerFault: the session is open already.
        """
        self._evict_idle()
        if session in self._sessions:
            raise PeerFault("that session is open already")
        matching = [state for state in self._states if digest in (NO_DIGEST, state.published.digest)]
        if not matching:
            raise UnknownState("that state is not kept here (any more)")
        if len(self._sessions) >= self.most_sessions or self._stopped:
            raise Busy(BUSY_RETRY_S)
        state = matching[-1]
        opened = _Session(state, self._clock(), steps=1)
        self._sessions[session] = opened
        state.pins += 1
        try:
            opened.cache = await self._run(lambda: self._worker(state).cache())
        except BaseException:
            self.close(session)
            raise
        opened.steps -= 1
        return state.published

    async def step(self, session: bytes, step: Step, body: memoryview) -> tuple[Step, bytes]:
        """Our block's part of a traversal. Steps of one session are done in the order of the calls.

        Raises: PeerFault: sizes that do not fit the model or the session. UnknownState: the session is not open (any more).
        """
        found = self._sessions.get(session)
        if found is None or found.cache is None:
            raise UnknownState("that session is not open here (any more)")
        cache = found.cache
        found.steps += 1
        try:
            return await self._run(lambda: self._worker(found.state).step(cache, step, body))
        finally:
            found.steps -= 1
            found.used_at = self._clock()

    def close(self, session: bytes) -> None:
        found = self._sessions.pop(session, None)
        if found is not None:
            found.state.pins -= 1
            self._drop_states()

    def sessions(self) -> int:
        self._evict_idle()
        return len(self._sessions)

    async def stop(self) -> None:
        """Let the step in hand end, give up those that wait, and free everything."""
        self._stopped = True
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
        self._sessions.clear()
        self._states.clear()

    def _evict_idle(self) -> None:
        now = self._clock()
        for name in [name for name, one in self._sessions.items() if not one.steps and now - one.used_at > self._idle_s]:
            self.close(name)

    def _drop_states(self) -> None:
        """Keep the newest states and those in use, as long as they fit. Where they do not, the oldest go, and their sessions with them."""
        fresh = self._states[-KEPT_STATES:]
        pinned = [state for state in self._states[:-KEPT_STATES] if state.pins]
        kept = pinned[-PINNED_STATES:] + fresh
        while len(kept) > 2 and sum(state.nbytes for state in kept) > STATES_BYTES:
            del kept[0]
        for state in kept[:-1]:
            if not state.pins:
                state.worker = None  # its bytes are enough until somebody asks
        gone = set(self._states) - set(kept)
        self._states = kept
        if any(state.pins for state in gone):
            self._sessions = {name: one for name, one in self._sessions.items() if one.state not in gone}

    def _worker(self, state: _State) -> Worker:
        """In the thread: the state's worker, made on first use."""
        if state.worker is None:
            if self._template is None:
                self._template = Block(self._manifest, self._number).to(self._device).requires_grad_(False)
            state.worker = Worker(self._manifest, load_block(copy.deepcopy(self._template), state.payload))
        return state.worker

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._stopped and task is not None and not task.cancelling():
                raise UnknownState("the node is stopping") from None  # our own queue was cleared; nobody cancelled the caller
            raise
        except RuntimeError:
            if self._stopped:
                raise UnknownState("the node is stopping") from None
            raise


def load_block(block: Block, payload: Buffer) -> Block:
    """Put a published state's bytes into a block, and return it. Raises: PeerFault: another size than the block's."""
    flat = Flat(block)
    flat.data.copy_(from_bytes(payload, flat.size))
    return block
