"""What hivemind must not do in our process: print by itself, leave tracebacks for a swarm's daily life, or lose its reader by a race.

Nothing here imports it: `libp2p` puts these in place. The root logger and the excepthook are left alone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

log = logging.getLogger("blocktrain.libp2p")


class Calls(dict[Any, Any]):
    """Pending calls. hivemind would set the result of a call that was cancelled a moment ago, and lose its only reader by that error."""

    def __contains__(self, key: object) -> bool:
        call = self.get(key)
        return call is not None and not call.done()


class Serving(dict[Any, "asyncio.Task[Any]"]):
    """Calls being answered. hivemind would keep those that their caller cancelled for ever."""

    def __setitem__(self, key: Any, task: asyncio.Task[Any]) -> None:
        super().__setitem__(key, task)
        task.add_done_callback(lambda done: self.pop(key, None))


class _ToOurs(logging.Handler):
    """hivemind's lines, at DEBUG: what it warns about is a swarm's daily life."""

    def emit(self, record: logging.LogRecord) -> None:
        log.debug("hivemind: %s", record.getMessage(), exc_info=record.exc_info)


def quiet_logging() -> None:
    """hivemind prints on stderr by itself, past the root logger; let it talk to our debug log."""
    theirs = logging.getLogger("hivemind")
    theirs.handlers[:] = [_ToOurs()]
    theirs.propagate = False
    theirs.setLevel(logging.DEBUG if log.isEnabledFor(logging.DEBUG) else logging.CRITICAL)


def _hiveminds(task: asyncio.Task[Any]) -> bool:
    """Whether hivemind started it. A look-up that is cancelled leaves its workers' waits for its end: bare `Event.wait`s without a name."""
    code = getattr(task.get_coro(), "cr_code", None)
    if code is None:
        return False
    return "/hivemind/" in code.co_filename or (code is asyncio.Event.wait.__code__ and task.get_name().startswith("Task-"))


def quiet_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """hivemind starts tasks that nobody awaits; a hostile message can end one by an error. That is a debug line, not a traceback."""
    before = loop.get_exception_handler()
    if getattr(before, "quiets_hivemind", False):
        return

    def handler(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        task = context.get("task") or context.get("future")
        if isinstance(task, asyncio.Task) and _hiveminds(task):
            log.debug("hivemind: %s: %r", context.get("message"), context.get("exception"))
        elif before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    handler.quiets_hivemind = True  # type: ignore[attr-defined]
    loop.set_exception_handler(handler)
