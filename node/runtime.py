"""The edge between the operating system and a program of ours: event loop, clock, chance, signals, exit codes.

The one place that starts uvloop, reads the real clock and draws a seed; everything else is given them, which is why the same code runs in
virtual time. One signal asks the program to stop, and it has a few seconds for that; the second ends it at once, children included. Every
expected error ends in one line and its exit code, every unexpected one in a line that says where its traceback is.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import random
import secrets
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from blocktrain.node import heap, logs
from blocktrain.protocol.errors import BlocktrainError

STOP_GRACE_S: Final = 5.0  # from the first signal to the end of the process; what is still running then is ended
CANCEL_BEFORE_S: Final = 1.0  # this long before the end of the grace, what still runs is cancelled, so that it can close things
FORCED: Final = 130  # exit code after a second signal, as shells report an interrupted program
BUG: Final = 1
BROKEN_PIPE: Final = 141  # the reader of our stdout went away (`| head`): what a shell reports for SIGPIPE

log = logging.getLogger(__name__)

Clock = Callable[[], float]


def wall_clock() -> float:
    """Unix seconds. Commands hand this to what needs a clock; nothing else in node/ reads one."""
    return time.time()


class Children:
    """Processes that must not outlive us. Whoever starts one adds it, and removes it when it has ended."""

    def __init__(self) -> None:
        self._started: dict[int, float] = {}  # pid → its start time, so that a reused pid is never killed

    def add(self, pid: int) -> None:
        import psutil

        with contextlib.suppress(psutil.Error):
            self._started[pid] = psutil.Process(pid).create_time()

    def remove(self, pid: int) -> None:
        self._started.pop(pid, None)

    def pids(self) -> list[int]:
        return list(self._started)

    def kill(self) -> None:
        """SIGKILL all of them. Safe to call at any moment, from any thread."""
        import psutil

        for pid, started in list(self._started.items()):
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                if process.create_time() == started:
                    process.kill()
            self._started.pop(pid, None)


@dataclass
class Runtime:
    """What a program is given: time, chance, the wish to stop, and a list for its children.

    `grace_s` may be raised by a program that needs longer to stop (a checkpoint of many gigabytes).
    """

    clock: Clock = wall_clock  # Unix seconds
    rng: random.Random = field(default_factory=lambda: random.Random(_seed()))
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    children: Children = field(default_factory=Children)
    grace_s: float = STOP_GRACE_S

    async def stopped_within(self, seconds: float) -> bool:
        """Wait for the wish to stop, at most so long. True if it came."""
        try:
            async with asyncio.timeout(seconds):
                await self.stop.wait()
        except TimeoutError:
            return False
        return True


def run(main: Callable[[Runtime], Awaitable[int]]) -> int:
    """Run a program in a fresh event loop and return its exit code.

    SIGINT, SIGTERM and SIGHUP set `Runtime.stop`; the program then returns by itself, is cancelled shortly before `grace_s` has passed, and
    ended when it has. A second signal kills the children and ends the process at once. Call it from the main thread, once.
    """
    heap.share()
    runtime = Runtime()
    signals = _Signals(runtime)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            code = guarded(lambda: runner.run(signals.watch(main)), cancelled=lambda: 0 if signals.asked else FORCED)
            runtime.children.kill()  # none is left after an orderly end; after a bug there may be
    finally:
        signals.restore()
    return code


def guarded(work: Callable[[], int], cancelled: Callable[[], int] = lambda: FORCED) -> int:
    """Do `work` and turn whatever it raises into one line on stderr and an exit code. For commands without an event loop, too."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except BlocktrainError as error:
        return fail(str(error), error.exit_code)
    except asyncio.CancelledError:
        return cancelled()
    except KeyboardInterrupt:
        return FORCED
    except BaseExceptionGroup as group:
        return _end_of_group(group)
    except BrokenPipeError as error:
        if _stdout_is_broken():
            _silence_stdout()
            return BROKEN_PIPE
        return _bug(error)
    except Exception as error:
        return _bug(error)


def leave(code: int) -> NoReturn:
    """End the process now, with everything flushed and every `atexit` function run, but without taking the interpreter apart.

    With torch and hivemind loaded that costs a second of CPU, several on a busy machine, and would be most of a node's stop.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def fail(text: str, code: int) -> int:
    """Say why the program ends, in one line on stderr. Returns `code`."""
    with contextlib.suppress(OSError, ValueError):
        print(f"blocktrain: error: {logs.one_line(text)}", file=sys.stderr, flush=True)
    return code


def _end_of_group(group: BaseExceptionGroup[BaseException]) -> int:
    """A TaskGroup's end. If all in it was expected, the first says it; one bug among them is a bug."""
    leaves = list(_leaves(group))
    for error in leaves:
        if not isinstance(error, BlocktrainError | KeyboardInterrupt | asyncio.CancelledError):
            return _bug(group, error)
    expected = [error for error in leaves if isinstance(error, BlocktrainError)]
    return fail(str(expected[0]), expected[0].exit_code) if expected else FORCED


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _bug(error: BaseException, cause: BaseException | None = None) -> int:
    """An error that nobody expected: its traceback goes to the debug file, or to a file of its own where there is none."""
    shown = error if cause is None else cause
    trace = "".join(traceback.format_exception(error))
    path = logs.debug_file()
    if path is not None:
        logging.getLogger("crash").error("the program ended by an unexpected error\n%s", trace)
    else:
        path = _crash_file(trace)
    where = f"its traceback is in {path}" if path is not None else f"at {_place(shown)}"
    return fail(f"this is a bug in blocktrain: {type(shown).__name__}: {shown} ({where})", BUG)


def _crash_file(trace: str) -> Path | None:
    import platformdirs

    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    for folder in (Path(platformdirs.user_log_dir("blocktrain")), Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(trace, encoding="utf-8")
            return folder / name
    return None


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"


def _seed() -> int:
    """The one seed that is drawn; BLOCKTRAIN_SEED fixes it, to repeat a run as far as a network lets one."""
    given = os.environ.get("BLOCKTRAIN_SEED", "")
    return int(given) if given.isdigit() else secrets.randbits(64)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class _Signals:
    """The way from a signal to the end of the process. Handlers run in the main thread, between two bytecodes, whatever the loop does."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._before: dict[signal.Signals, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Future[int] | None = None
        self._end: threading.Timer | None = None
        self.asked = False

    async def watch(self, main: Callable[[Runtime], Awaitable[int]]) -> int:
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.ensure_future(main(self._runtime))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: the terminal's end is not ours
            self._before[number] = signal.signal(number, self._on_signal)
        return await self._main

    def restore(self) -> None:
        """Leave the signals as they were. The deadline stays armed only if some thread could keep the process alive."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        others = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
        if self._end is not None and not others:
            self._end.cancel()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self._force()
        self.asked = True
        assert self._loop is not None
        self._end = threading.Timer(self._runtime.grace_s, self._too_late)
        self._end.daemon = True
        self._end.start()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the program has ended already
            self._loop.call_soon_threadsafe(self._ask, signal.Signals(number).name)

    def _ask(self, name: str) -> None:
        assert self._loop is not None
        assert self._main is not None
        log.info("%s: stopping; once more to end at once", name)
        self._runtime.stop.set()
        self._loop.call_later(max(0.0, self._runtime.grace_s - CANCEL_BEFORE_S), self._main.cancel)

    def _too_late(self) -> None:
        fail(f"did not stop within {self._runtime.grace_s:g} s: ended by force", FORCED)
        self._force()

    def _force(self) -> None:
        self._runtime.children.kill()
        os._exit(FORCED)


def _stdout_is_broken() -> bool:
    with contextlib.suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False


def _silence_stdout() -> None:
    """Python flushes stdout when it ends, and would complain once more."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
