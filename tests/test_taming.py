"""What hivemind leaves behind is a debug line; what we leave behind is still said."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref

import pytest

from blocktrain.node import taming


async def _destroyed(name: str | None) -> None:
    """A task that waits for what can never come, and that nobody holds: as a cancelled look-up leaves it."""

    async def look_up() -> weakref.ref[asyncio.Task[bool]]:
        task = asyncio.create_task(asyncio.Event().wait(), name=name)
        await asyncio.sleep(0)
        return weakref.ref(task)

    left = await look_up()
    gc.collect()
    assert left() is None


@pytest.mark.parametrize(("name", "said"), [(None, False), ("ours", True)])
async def test_waits_of_a_cancelled_look_up_are_no_error(name: str | None, said: bool, caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    taming.quiet_tasks(loop)
    with caplog.at_level(logging.DEBUG):
        await _destroyed(name)
    loop.set_exception_handler(before)
    errors = [record for record in caplog.records if record.name == "asyncio" and record.levelno >= logging.ERROR]
    assert bool(errors) is said
    assert any("pending" in record.getMessage() for record in caplog.records)
