"""The thread for work that can wait: one job at a time, and how far behind training it stands."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest

from blocktrain.node.compute.background import BACKGROUND_NICENESS, LOOK_EVERY_S, SPARE_CORES, Background, Spare

DEADLINE_S = 20.0


async def test_jobs_run_one_at_a_time_and_in_order_whatever_the_machine_has_to_spare():
    spare = iter([0.0, 2.0] * 100)
    background = Background(lambda: next(spare))
    at_work, done = threading.Lock(), []

    def job(number: int) -> int:
        assert at_work.acquire(blocking=False), "two jobs at once"
        done.append(number)
        at_work.release()
        return number

    try:
        async with asyncio.timeout(DEADLINE_S):
            for begin in range(0, 40, 4):  # each four go where the first one does
                assert await asyncio.gather(*(background.run(lambda n=n: job(n)) for n in range(begin, begin + 4))) == list(
                    range(begin, begin + 4)
                )
    finally:
        background.stop()
    assert done == list(range(40))


async def test_a_job_whose_caller_left_is_waited_for_by_the_next():
    spare = iter([0.0, 2.0, 0.0])
    background = Background(lambda: next(spare))
    begun, go_on, order = threading.Event(), threading.Event(), []

    def slow() -> None:
        begun.set()
        go_on.wait(DEADLINE_S)
        order.append("slow")

    try:
        async with asyncio.timeout(DEADLINE_S):
            caller = asyncio.create_task(background.run(slow))
            await asyncio.to_thread(begun.wait, DEADLINE_S)
            caller.cancel()
            await asyncio.gather(caller, return_exceptions=True)
            after = asyncio.create_task(background.run(lambda: order.append("after")))
            await asyncio.to_thread(go_on.set)
            await after
    finally:
        go_on.set()
        background.stop()
    assert order == ["slow", "after"]


async def test_what_a_job_raises_reaches_the_caller_and_the_next_one_runs():
    background = Background(lambda: 0.0)

    def fails() -> None:
        raise ValueError("no")

    try:
        with pytest.raises(ValueError, match="no"):
            await background.run(fails)
        assert await background.run(lambda: 7) == 7
    finally:
        background.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")
@pytest.mark.parametrize(("spare", "idle_class"), [(SPARE_CORES, True), (SPARE_CORES / 2, False)])
async def test_only_what_is_left_over_is_taken_where_a_core_has_time_to_spare(spare: float, idle_class: bool):
    background = Background(lambda: spare)
    usual = os.getpriority(os.PRIO_PROCESS, 0)

    def look() -> tuple[int, int]:
        return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    try:
        policy, niceness = await background.run(look)
    finally:
        background.stop()
    assert (policy == os.SCHED_IDLE) == idle_class
    assert idle_class or niceness == min(19, usual + BACKGROUND_NICENESS)
    assert os.sched_getscheduler(0) != os.SCHED_IDLE, "only the thread itself"


def test_cores_that_had_nothing_to_do_are_counted_over_the_time_since_the_last_look():
    now = idle_s = 0.0
    spare = Spare(lambda: now, lambda: idle_s)
    now, idle_s = LOOK_EVERY_S / 2, 100.0
    assert spare.cores() == 0.0, "too early to say"
    now, idle_s = 10.0, 15.0
    assert spare.cores() == 1.5
    now = 10.0 + LOOK_EVERY_S / 2
    assert spare.cores() == 1.5, "the same look still"
    now, idle_s = 20.0, 15.0
    assert spare.cores() == 0.0
