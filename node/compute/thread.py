"""The training thread: steps, and between two steps whatever short job the rest of the node has for the block.

Jobs are in order, one at a time, and are copies or additions of one buffer: milliseconds. When training fails, it says so in one line
and stays failed: later jobs raise the same reason, and `failed` tells whoever waits for it. It never stops silently.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from blocktrain.node.compute.trainer import Trainer, one_line
from blocktrain.protocol.errors import BlocktrainError

T = TypeVar("T")
NICENESS: Final = 5  # of the training thread, on top of the process's own
RATE_STEPS: Final = 64  # the tokens per second are those of the last so many steps

log = logging.getLogger(__name__)


class TrainingThread:
    """Runs a trainer. Starts idle: jobs are done, steps only after `train`.

    Attributes:
        failed: gets the reason as its result when training fails.
        ended: done when the thread has ended, for whatever reason.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.failed: Future[BlocktrainError] = Future()
        self.ended: Future[None] = Future()
        self._trainer = trainer
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._on_round: Callable[[], None] | None = None
        self._stopping = False
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS)  # (monotonic seconds, tokens) after each step
        self._thread = threading.Thread(target=self._run, name="blocktrain-train", daemon=True)
        self._thread.start()

    def post(self, job: Callable[[Trainer], T]) -> Future[T]:
        """Do a short job between two steps. The future raises what the job raises, or why training failed or stopped."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self.failed.done():
                    raise self.failed.result()
                if self._stopping:
                    raise BlocktrainError("the training thread has stopped")
                future.set_result(job(self._trainer))
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(run)
        if self.ended.done():  # nobody is there to take it; whoever empties the queue runs it, to its refusal
            self._refuse_waiting()
        return future

    def train(self, on_round: Callable[[], None]) -> None:
        """Begin to step. `on_round` is called on this thread after every H steps without a merge or own round."""

        def begin() -> None:
            self._on_round = on_round

        self._jobs.put(begin)

    def stop(self) -> None:
        """End after the step or job in hand; jobs that wait are refused. `ended` says when."""
        self._stopping = True
        self._jobs.put(lambda: None)

    def tokens_per_s(self) -> float:
        """Over the last steps up to now, so that a thread that hangs shows it. 0 before there are two."""
        try:
            (begin, before), (_, after) = self._marks[0], self._marks[-1]
        except IndexError:
            return 0.0
        seconds = time.monotonic() - begin
        return (after - before) / seconds if after > before and seconds > 0 else 0.0

    def _run(self) -> None:
        yield_to_others(NICENESS)
        try:
            while not self._stopping:
                self._do_jobs()
                if self._on_round is not None and not self._stopping:
                    self._step(self._on_round)
        except BaseException as error:
            reason = one_line(error, "training")
            if not isinstance(error, BlocktrainError):
                log.debug("training failed", exc_info=error)
            self.failed.set_result(reason)
        finally:
            self.ended.set_result(None)
            self._refuse_waiting()

    def _do_jobs(self) -> None:
        """All jobs that wait; while not training, wait for one."""
        idle = self._on_round is None
        while True:
            try:
                self._jobs.get(block=idle)()
            except queue.Empty:
                return
            idle = False

    def _step(self, on_round: Callable[[], None]) -> None:
        trainer = self._trainer
        trainer.step()
        counters = trainer.counters
        self._marks.append((time.monotonic(), counters.tokens))
        if counters.since_round and counters.since_round % trainer.manifest.schedule.steps_per_round == 0:
            on_round()

    def _refuse_waiting(self) -> None:
        while True:
            try:
                self._jobs.get_nowait()()
            except queue.Empty:
                return


def yield_to_others(niceness: int) -> None:
    """Let the threads that answer peers come first on a busy machine: on Linux a thread, the calling one, has a priority of its own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
