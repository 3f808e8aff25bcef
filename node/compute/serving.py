"""The published state at work: one thread that does a block's part of sweeps, with weights of its own (design §4, §6).

`TorchServer` is the port that a node has: it keeps the last few published states, sessions pinned to them, and one thread, so that
neither a training step nor the event loop delays a sweep, and no weight is read in mid-update. States are kept as bytes and become a block
(worker.py) when the first session needs them. Steps that wait at the same time are done together where they are alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from blocktrain.node.compute.model import Block, Cache
from blocktrain.node.compute.worker import Job, Worker, load_block
from blocktrain.node.ports import Busy, Published, UnknownState
from blocktrain.protocol import limits
from blocktrain.protocol.errors import PeerFault
from blocktrain.protocol.ids import NO_DIGEST, Digest
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import Step

T = TypeVar("T")

KEPT_STATES: Final = 4  # published states at hand: who moves here from a failed holder may want the one before the last
PINNED_STATES: Final = 16  # further ones, older, while sessions are pinned to them
STATES_BYTES: Final = 1024**3  # of all of them together, the newest two excepted
CACHE_BYTES: Final = 512 * 1024**2  # of all sessions together
BUSY_RETRY_S: Final = 2.0  # sessions are short: a place is likely free by then
MAX_BATCH: Final = 16  # steps in one pass
MOST_REST_S: Final = 1.0  # after one pass, however small the share: a client's deadline is some seconds


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


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A step on its way into the thread, and its result on the way back."""

    state: _State
    job: Job
    result: asyncio.Future[tuple[Step, bytes]]

    def settle(self, result: tuple[Step, bytes] | BaseException) -> None:
        """From any thread."""

        def settled() -> None:
            if self.result.done():
                return
            if isinstance(result, BaseException):
                self.result.set_exception(result)
            else:
                self.result.set_result(result)

        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
            self.result.get_loop().call_soon_threadsafe(settled)


class TorchServer:
    """Implements `Server` of node/ports.py. Called from the event loop only; `clock` is monotonic, in seconds.

    `share`: the most of its time that the thread computes. After every pass it rests in proportion, so that training, which wants the same
    processor, gets the remainder at least; an answer that is computed does not wait for that.
    """

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
        share: float = 1.0,
    ) -> None:
        self._share = share
        self._rest_until = 0.0  # thread only, by time.monotonic
        self._manifest, self._number, self._device = manifest, block, device
        self._clock, self._idle_s = clock, idle_s
        model = manifest.model
        one_cache = 2 * model.layers * model.context * model.width * 4
        self.most_sessions = max(1, min(max_sessions, cache_bytes // one_cache))
        self._states: list[_State] = []  # the newest last
        self._sessions: dict[bytes, _Session] = {}
        self._template: Block | None = None  # thread only: states become copies of it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="serve")
        self._waiting: deque[_Waiting] = deque()
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
        waiting = _Waiting(found.state, Job(found.cache, step, body), asyncio.get_running_loop().create_future())
        found.steps += 1
        self._waiting.append(waiting)
        try:
            self._thread.submit(self._drain)  # one call a step: whichever comes first does all that wait
            return await waiting.result
        except RuntimeError:
            if self._stopped:
                raise UnknownState("the node is stopping") from None
            raise
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
        while self._waiting:
            self._waiting.popleft().settle(UnknownState("the node is stopping"))
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

    def _drain(self) -> None:
        """In the thread: do all steps that wait, those of one kind together. Steps of one session keep their order."""
        todo: list[_Waiting] = []
        time.sleep(max(0.0, self._rest_until - time.monotonic()))
        began = time.monotonic()
        while self._waiting:
            todo.append(self._waiting.popleft())
        while todo:
            batch, todo = _alike(todo)
            batch = [one for one in batch if not one.result.cancelled()]
            if batch:
                try:
                    results: list[tuple[Step, bytes] | BaseException] = [*self._worker(batch[0].state).steps([one.job for one in batch])]
                except BaseException as error:  # a bug, or memory: it belongs to whoever asked
                    results = [error] * len(batch)
                for one, result in zip(batch, results, strict=True):
                    one.settle(result)
        now = time.monotonic()
        self._rest_until = now + min(MOST_REST_S, (now - began) * (1 / self._share - 1))

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


def _alike(todo: list[_Waiting]) -> tuple[list[_Waiting], list[_Waiting]]:
    """The first step and those that can share its pass, and the rest in order. No step overtakes another of its session."""
    head, *others = todo
    kind, caches = head.job.kind(), {id(head.job.cache)}
    batch, rest = [head], []
    for other in others:
        free = id(other.job.cache) not in caches
        caches.add(id(other.job.cache))
        if free and len(batch) < MAX_BATCH and other.state is head.state and other.job.kind() == kind:
            batch.append(other)
        else:
            rest.append(other)
    return batch, rest
