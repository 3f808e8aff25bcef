"""One block in training, as the service sees it: snapshots, merges, states and checkpoints around a training thread.

Three places of work. The training thread steps, and between two steps copies or adds one buffer. The worker, one thread, does all that
takes longer, on copies: encode, decode, merge, digest, measure, write. The event loop only waits. The published state is a buffer
that nobody writes to after it is made, so it can be served, streamed and saved without a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from blocktrain.node.compute import codecs, flat, merging, outer
from blocktrain.node.compute.background import Background
from blocktrain.node.compute.device import Mover, Parcel, choose
from blocktrain.node.compute.gauge import Gauge
from blocktrain.node.compute.grams import TABLE
from blocktrain.node.compute.outer import Momentum
from blocktrain.node.compute.pair import Pair
from blocktrain.node.compute.swap import NOT_FINITE, Halves
from blocktrain.node.compute.thread import TrainingThread
from blocktrain.node.compute.trainer import Batches, Frozen, Tensors, Trainer, TrainingFailed, one_line
from blocktrain.node.ports import Buffer, Progress, Published, Terms, Trial
from blocktrain.protocol.acceptance import Measures, judge_state
from blocktrain.protocol.errors import BlocktrainError, NetworkFault, PeerFault
from blocktrain.protocol.exchange import merged_round, shares, tokens_per_round
from blocktrain.protocol.ids import NO_DIGEST, Digest
from blocktrain.protocol.manifest import Manifest

T = TypeVar("T")
HELDOUT_TOKENS: Final = 512  # of the check on every merge: both sides of it are measured on the same tokens, so that few suffice
STOP_TIMEOUT_S: Final = 20.0  # for the step in hand
MAX_REFERENCES: Final = 4  # merges kept for sparse snapshots, a state each; the newest is the published one, as a rule

log = logging.getLogger(__name__)


class Store(Protocol):
    """Where checkpoints go. `node.store.Store` is one. Both block: they are called from threads."""

    def write(self, tensors: Tensors, header: Mapping[str, object]) -> bool: ...

    def read(self, shapes: Mapping[str, tuple[int, ...]] | None = None) -> tuple[Tensors, dict[str, Any]] | None: ...


@dataclass(frozen=True)
class Options:
    """The node's own choices about compute."""

    device: str = "auto"
    threads: int = 1  # of PyTorch's math, in the whole process
    compile: bool = False
    seed: int = 0  # of noise and windows; every replica has another
    heldout: bool = True  # measure every merge on held-out data before it is used


@dataclass(frozen=True)
class _Merge:
    """A trial's token: what it does to the live block, and what was so when the snapshot was taken.

    Attributes:
        apply: adds the merge to the live block and returns it as a state; once, on the training thread.
    """

    apply: Callable[[Trainer], Tensor]
    momentum: Momentum | None
    tokens: int
    generation: int
    heldout: float | None


class TorchReplica:
    """Implements `node.ports.Replica`. Building it takes memory and, for large blocks, seconds: do it in a thread.

    Raises: UsageError, DoesNotFit: the device, or the memory for it.
    """

    def __init__(self, manifest: Manifest, block: int, batches: Batches, store: Store | None, options: Options) -> None:
        device = choose(options.device)
        torch.set_num_threads(options.threads)
        self.manifest = manifest
        self._store = store
        try:
            self._mover = Mover(device)
            self._trainer = Trainer(manifest, block, batches, self._mover, seed=options.seed, compile=options.compile)
            windows = torch.from_numpy(batches.heldout(max(2, HELDOUT_TOKENS // manifest.model.context)))
            self._gauge = Gauge(manifest, block, windows, device)  # measures merges, while the live block trains
            initial = self._mover.to_host(self._mover.take(self._trainer.flat.data))
        except (RuntimeError, MemoryError) as error:
            raise one_line(error, f"building the block on {device}") from error
        self._size = self._trainer.flat.size
        self._table = flat.place(self._trainer.flat.shapes, TABLE)
        self._state = (Published(0, flat.digest(flat.to_bytes(initial))), initial)  # replaced as a whole, on the training thread
        self._heldout: float | None = None
        self._checks = options.heldout
        self._references: OrderedDict[Digest, Tensor] = OrderedDict()  # digest of a merge → the merge, the newest last
        self._wandered = 0.0  # how far own rounds have led since the last merge or download: the sum of their distances
        self._momentum = outer.begin(manifest.averaging.outer, initial)  # replaced as `_state` is
        self._renumbered = 0  # how often the round was lowered: of two checkpoints, the higher round is not the newer one then
        self._generation = 0  # counts loads: what was computed before one must not be added after it
        self._steps_at_start = self._tokens_at_start = 0
        self._worker = Background()
        self._thread = TrainingThread(self._trainer)

    # ---- before it starts -------------------------------------------------------------------------------------------------------

    def restore(self) -> bool:
        """Go on from the store's checkpoint, before `start`. False: there is none.

        Raises: UsageError: a checkpoint of another run, block or shape, or a damaged one.
        """
        found = self._store.read(self._expected_shapes()) if self._store is not None else None
        if found is None:
            return False
        tensors, header = found
        state = self._joined(tensors, "published.")
        published = Published(int(header["round"]), Digest(bytes.fromhex(header["digest"])))
        momentum = Momentum(self._joined(tensors, "anchor."), self._joined(tensors, "velocity.")) if self._momentum is not None else None

        def job(trainer: Trainer) -> None:
            trainer.restore(tensors, header, published.round)
            self._state = (published, state)
            self._wandered = float(header.get("wandered", 0.0))  # older checkpoints have none
            self._renumbered = int(header.get("renumbered", 0))
            self._momentum = momentum

        self._thread.post(job).result()
        self._steps_at_start, self._tokens_at_start = self._trainer.counters.steps, self._trainer.counters.tokens
        return True

    def start(self, on_round: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def tell() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(on_round)

        self._thread.train(tell)

    # ---- what it looks like -----------------------------------------------------------------------------------------------------

    def published(self) -> Published:
        return self._state[0]

    def state(self) -> tuple[Published, memoryview]:
        published, state = self._state
        return published, flat.to_bytes(state)

    @property
    def state_bytes(self) -> int:
        return 4 * self._size

    def progress(self) -> Progress:
        trainer, counters = self._trainer, self._trainer.counters
        return Progress(
            steps=counters.steps - self._steps_at_start,
            tokens=counters.tokens - self._tokens_at_start,
            loss=trainer.loss,
            heldout=self._heldout,
            tokens_per_s=self._thread.tokens_per_s(),
            steps_since_merge=counters.since_round,
            learning_rate=trainer.learning_rate,
        )

    async def failed(self) -> BlocktrainError:
        """Wait until training cannot go on; the reason, for one line."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[BlocktrainError] = loop.create_future()

        def arrived() -> None:
            if not waiter.done():
                waiter.set_result(self._thread.failed.result())

        def tell(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived)

        self._thread.failed.add_done_callback(tell)
        return await waiter

    # ---- exchanges --------------------------------------------------------------------------------------------------------------

    async def begin(self, codec: str, reference: bytes = b"") -> Swap:
        coder, base = codecs.codec_of(codec), self._reference(codec, reference)
        loop = asyncio.get_running_loop()
        begun: asyncio.Future[tuple[Published, Tensor, int, int, int]] = loop.create_future()

        def tell(*moment: Any) -> None:
            if not begun.done():
                begun.set_result(moment)

        def job(trainer: Trainer) -> Parcel:
            counters = trainer.counters
            weight = counters.tokens - counters.merged_tokens
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
                loop.call_soon_threadsafe(tell, *self._state, weight, counters.tokens, self._generation)
            return self._mover.take(trainer.flat.data)

        taken = asyncio.ensure_future(self._between_steps(job))
        try:
            await asyncio.wait(list[asyncio.Future[Any]]((begun, taken)), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            taken.cancel()
            raise
        if not begun.done():
            taken.result()  # it could not begin, and says why
        published, state, weight, tokens, generation = begun.result()

        async def copy() -> Halves:
            parcel = await taken
            ours = parcel.tensor if self._mover.on_host else await self.work(lambda: self._mover.to_host(parcel))
            whole = self._momentum is not None or not self._mover.on_host  # an outer step, and a GPU, need the difference as a whole
            return Halves(coder, ours, state, base, whole=whole, aside=self._table)

        moment = Moment(codec, coder.encoded_bytes(self._size), published.round, float(weight), tokens, generation)
        return Swap(self, moment, asyncio.create_task(copy(), name="exchange copy"))

    def has_reference(self, reference: bytes) -> bool:
        return Digest(reference) in self._references

    def _reference(self, codec: str, reference: bytes) -> Tensor | None:
        """The state that a sparse snapshot is relative to. Raises: PeerFault: it is not kept here (any more)."""
        if codec != "sparse":
            return None
        kept = self._references.get(Digest(reference))
        if kept is None:
            raise PeerFault("the reference of a sparse snapshot is not kept here")
        return kept

    def judgeable(self, moment: Moment, halves: Halves, terms: Terms, digest: Digest) -> Trial:
        """What an exchange came to, measured. On the worker. Raises: PeerFault: theirs is not what they said."""
        merge = halves.finish(digest)
        verified_at = time.monotonic()
        round = merged_round(self._state[0].round, terms.round)
        norms = (merge.own_norm, merge.distance, merge.drift + self._wandered)
        if not math.isfinite(merge.distance):
            return Trial(round, NO_DIGEST, Measures(False, *norms, None, None), None, verified_at)
        pair, state = halves.pair, merge.state
        before = after = momentum = None
        if pair is not None:
            if self._checks:
                before, after = self._gauge.loss(pair.reading_ours()), self._gauge.loss(pair.reading_merge(halves.shares))
            apply = functools.partial(_settle, pair, halves.shares)
        else:
            assert state is not None, "where there is no pair the merge is kept"
            if self._checks:
                before, after = self._gauge.loss(halves.ours), self._gauge.loss(state)
            difference = merging.difference(state, halves.ours)
            momentum = outer.step(self.manifest.averaging.outer, self._momentum, state, difference)
            apply = functools.partial(_add, self._mover, self._mover.to_device(difference), state)
        token = _Merge(apply, momentum, moment.tokens, moment.generation, after)
        return Trial(round, merge.digest, Measures(True, *norms, before, after, merge.along, self._heldout), token, verified_at)

    async def adopt(self, trial: Trial, *, keep: bool = False) -> Published:
        """Raises: NetworkFault: our block was replaced by a downloaded state since the snapshot, so that the merge is void."""
        token = trial.token
        assert isinstance(token, _Merge), "a trial of this replica that was finite"

        def job(trainer: Trainer) -> tuple[Published, Tensor]:
            if token.generation != self._generation:
                raise NetworkFault("the replica took a downloaded state during the exchange; the merge is not used")
            published = Published(max(trial.round, self._state[0].round + 1), trial.digest)
            state = token.apply(trainer)
            trainer.round = published.round
            trainer.counters.merged_tokens = token.tokens
            trainer.counters.since_round = 0
            self._state = (published, state)
            self._momentum = token.momentum
            self._wandered = 0.0
            self._heldout = token.heldout
            return published, state

        published, state = await self._between_steps(job)
        if keep:
            self._keep(trial.digest, state)
        return published

    def _keep(self, digest: Digest, state: Tensor) -> None:
        """Both sides of a merge keep the same bits of it."""
        self._references[digest] = state
        while len(self._references) > MAX_REFERENCES:
            self._references.popitem(last=False)

    async def publish_own(self, round: int | None = None) -> Published:
        def take(trainer: Trainer) -> tuple[Parcel, Published, Tensor]:
            trainer.counters.since_round = 0
            return self._mover.take(trainer.flat.data), *self._state

        parcel, before, last = await self._between_steps(take)

        def measure() -> tuple[Tensor, Digest, float | None, float]:
            state = self._mover.to_host(parcel)
            _check_finite(state)
            return state, flat.digest(flat.to_bytes(state)), self._gauge.loss(state), flat.distance(state, last)

        state, digest, heldout, moved = await self.work(measure)

        def publish(trainer: Trainer) -> Published:
            if self._state[0] != before:  # a merge or a download came first, and is newer than what we took
                return self._state[0]
            if round is not None and round >= before.round:  # it is lowered already
                return before
            published = Published(before.round + 1 if round is None else round, digest)
            trainer.round = published.round
            self._renumbered += published.round < before.round
            self._state = (published, state)
            self._momentum = outer.follow(self._momentum, state)
            self._wandered += moved
            self._heldout = heldout
            return published

        return await self._between_steps(publish)

    async def load(self, payload: Buffer, round: int, digest: Digest) -> Published:
        """A state older than our published one is not taken; then that one is returned."""

        def check() -> tuple[Tensor, Parcel, float | None]:
            if flat.digest(payload) != digest:
                raise PeerFault("the state does not have the digest that was announced")
            state = flat.from_bytes(payload, self._size)
            finite = bool(np.isfinite(flat.norm(state)))
            heldout = self._gauge.loss(state) if finite else None
            judge_state(finite, self._gauge.loss(self._state[1]), heldout)
            return state, self._mover.to_device(state), heldout

        state, parcel, heldout = await self.work(check)

        def job(trainer: Trainer) -> Published:
            if round < self._state[0].round:
                return self._state[0]
            published = Published(round, digest)
            trainer.replace(self._mover.receive(parcel))
            trainer.round = round
            self._generation += 1
            self._state = (published, state)
            self._momentum = outer.begin(self.manifest.averaging.outer, state)
            self._wandered = 0.0
            self._heldout = heldout
            return published

        return await self._between_steps(job)

    # ---- checkpoints and the end ------------------------------------------------------------------------------------------------

    async def save(self) -> None:
        store = self._store
        if store is None:
            return

        def take(trainer: Trainer) -> tuple[Frozen, Published, Tensor, Momentum | None, float, int]:
            return trainer.freeze(), *self._state, self._momentum, self._wandered, self._renumbered

        frozen, published, state, momentum, wandered, renumbered = await self._between_steps(take)

        def write() -> None:
            shapes = self._trainer.flat.shapes
            tensors = frozen.tensors(shapes, self._mover)
            for name in shapes:
                _check_finite(torch.from_numpy(tensors["live." + name]).flatten())
            kept = {"published.": state} | (
                {"anchor.": momentum.anchor_P, "velocity.": momentum.velocity_P} if momentum is not None else {}
            )
            for prefix, buffer in kept.items():
                tensors.update({prefix + name: view.numpy() for name, view in flat.views(shapes, buffer).items()})
            own = {"round": published.round, "digest": published.digest.hex(), "wandered": wandered, "renumbered": renumbered}
            store.write(tensors, {**frozen.header, **own})

        await asyncio.to_thread(write)  # not on the worker: on a slow disk an exchange would wait for it, and the other side for us

    async def stop(self) -> None:
        self._thread.stop()
        ended = asyncio.wrap_future(self._thread.ended)
        try:
            await asyncio.wait_for(asyncio.shield(ended), STOP_TIMEOUT_S)
        except TimeoutError:
            log.warning("the training step in hand takes longer than %.0f s; not waiting for it", STOP_TIMEOUT_S)
        self._worker.stop()

    # ---- places of work ---------------------------------------------------------------------------------------------------------

    async def _between_steps(self, job: Callable[[Trainer], T]) -> T:
        return await asyncio.wrap_future(self._thread.post(job))

    async def work(self, work: Callable[[], T]) -> T:
        """On the worker, in order."""
        return await self._worker.run(work)

    def _joined(self, tensors: Tensors, prefix: str) -> Tensor:
        """The tensors of a checkpoint whose names begin so, as one state."""
        return torch.cat([torch.from_numpy(tensors[prefix + name]).reshape(-1) for name in self._trainer.flat.shapes])

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = self._trainer.flat.shapes
        prefixes = ("live.", "first.", "second.", "published.", *(("anchor.", "velocity.") if self._momentum is not None else ()))
        return {prefix + name: shape for prefix in prefixes for name, shape in shapes.items()}


@dataclass(frozen=True)
class Moment:
    """What was so when a snapshot was taken, which is known before its copy is made."""

    codec: str
    size: int  # bytes, encoded
    round: int
    weight: float
    tokens: int
    generation: int


class Swap:
    """Implements `node.ports.Swap` for a replica. Our copy may still be under way: the other side hears of it meanwhile."""

    def __init__(self, replica: TorchReplica, moment: Moment, copying: asyncio.Future[Halves]) -> None:
        self.moment = moment
        self.codec, self.size, self.round, self.weight = moment.codec, moment.size, moment.round, moment.weight
        self._replica = replica
        self._copying = copying
        self._terms: Terms | None = None
        self._shares = (0.5, 0.5)
        self._mine_first = True
        self._met = False  # the halves know the terms
        copying.add_done_callback(lambda copied: copied.cancelled() or copied.exception())  # an exchange that was declined does not ask

    @property
    def digest(self) -> Digest:
        return self._copying.result().digest

    async def copied(self) -> Halves:
        """Both snapshots, from the moment on when our copy is there. Raises: BlocktrainError: training failed or ended before."""
        halves = await asyncio.shield(self._copying)
        if self._terms is not None and not self._met:
            self._met = True
            halves.meet(self._shares, mine_first=self._mine_first)
        return halves

    async def give(self, most_bytes: int) -> memoryview:
        halves = await self.copied()
        return await self._replica.work(lambda: halves.give(most_bytes))

    def meet(self, terms: Terms, *, mine_first: bool) -> None:
        self._terms, self._mine_first = terms, mine_first
        weights = (self.weight, terms.weight) if mine_first else (terms.weight, self.weight)
        self._shares = shares(*weights, tokens_per_round(self._replica.manifest))

    async def take(self, data: Buffer) -> None:
        halves = await self.copied()
        await self._replica.work(lambda: halves.take(data))

    async def finish(self, digest: Digest) -> Trial:
        halves, terms = await self.copied(), self._terms
        assert terms is not None, "nobody said under which terms"
        return await self._replica.work(lambda: self._replica.judgeable(self.moment, halves, terms, digest))


def _settle(pair: Pair, shares: tuple[float, float], trainer: Trainer) -> Tensor:
    """What a merge does where both snapshots are kept as a pair."""
    return pair.settle(trainer.flat.data, shares)


def _add(mover: Mover, difference: Parcel, state: Tensor, trainer: Trainer) -> Tensor:
    """What a merge does where its difference is there as a whole."""
    trainer.add(mover.receive(difference))
    return state


def _check_finite(state: Tensor) -> None:
    """Raises: TrainingFailed: our own parameters are not numbers any more, so that nobody may get them."""
    if not np.isfinite(flat.norm(state)):
        raise TrainingFailed(NOT_FINITE)
