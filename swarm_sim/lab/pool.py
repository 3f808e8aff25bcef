"""Many trainings of the lab at once, each in a process with one thread, with progress and the time left.

What is kept is not trained again, so a bench that was interrupted, and two benches that need the same training, go on from what is there.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Final

from blocktrain.swarm_sim.lab.spec import Spec
from blocktrain.swarm_sim.lab.train import Result, load, train

SAY_EVERY_S: Final = 15.0
_NOTE_EVERY_S: Final = 1.0


def train_all(specs: Sequence[Spec], place: Path, say: Callable[[str], None], *, processes: int) -> list[Result]:
    """The results, in the order of `specs`. Raises: what a training raises, once those under way have ended."""
    todo = {spec.digest: spec for spec in specs if load(spec, place) is None}
    if todo:
        place.mkdir(parents=True, exist_ok=True)
        _train_missing(list(todo.values()), place, say, processes)
    found = [load(spec, place) for spec in specs]
    assert all(found)
    return [result for result in found if result is not None]


def _train_missing(todo: list[Spec], place: Path, say: Callable[[str], None], processes: int) -> None:
    todo.sort(key=lambda spec: -spec.cost)  # the longest first, so that the processes end together
    total = sum(spec.cost for spec in todo)
    began, begun_with = time.monotonic(), sum(spec.cost * _done(spec, place) for spec in todo)
    said = began
    say(f"{len(todo)} trainings, {processes} at a time")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(os.getpid(),)) as pool:
        waiting: dict[Future[None], Spec] = {pool.submit(_work, spec, place): spec for spec in todo}
        finished = 0.0
        try:
            while waiting:
                ended, _ = wait(waiting, timeout=_NOTE_EVERY_S, return_when=FIRST_COMPLETED)
                for future in ended:
                    finished += waiting.pop(future).cost
                    future.result()
                if waiting and time.monotonic() - said >= SAY_EVERY_S:
                    said = time.monotonic()
                    done = finished + sum(spec.cost * _done(spec, place) for spec in waiting.values())
                    say(_progress(done / total, (done - begun_with) / total, said - began))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _progress(share: float, gained: float, seconds: float) -> str:
    left = f", about {_minutes(seconds * (1 - share) / gained)} left" if gained > 0.01 else ""
    return f"{100 * share:.0f} % trained{left}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _begin(parent: int) -> None:
    """In a process of the pool: one thread for PyTorch, and an end when the bench is killed."""
    import torch

    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(spec: Spec, place: Path) -> None:
    """In a process of the pool."""
    path, noted = _note(spec, place), 0.0

    def report(share: float) -> None:
        nonlocal noted
        if time.monotonic() - noted >= _NOTE_EVERY_S:
            noted = time.monotonic()
            path.write_text(f"{share:.4f}")

    try:
        train(spec, place, report)
    finally:
        path.unlink(missing_ok=True)


def _note(spec: Spec, place: Path) -> Path:
    return place / f"{spec.digest}.progress"


def _done(spec: Spec, place: Path) -> float:
    """The share that a training says it has done."""
    try:
        return float(_note(spec, place).read_text())
    except (OSError, ValueError):
        return 0.0
