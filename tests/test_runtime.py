"""The edge to the operating system: signals, exit codes, and one line for every end. Each story is a process of its own."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from blocktrain.node import logs, runtime
from blocktrain.node.logs import OncePer, OneLine, one_line, say_once_a_minute
from blocktrain.protocol.errors import NoPeers, PeerFault, RefusedBySwarm, UsageError

PROGRAM = """
import asyncio, logging, os, signal, subprocess, sys, threading, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests under nohup
from pathlib import Path
from blocktrain.node import logs, runtime
from blocktrain.protocol import errors
logs.setup("info")

{main}

sys.exit(runtime.run(main))
"""


def start(main: str, *, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(main=textwrap.dedent(main))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# ---- how it ends ----------------------------------------------------------------------------------------------------------------------


def test_a_program_is_given_time_chance_and_uvloop() -> None:
    code, out, err = finish(
        start("""
            async def main(given):
                print(type(asyncio.get_running_loop()).__module__, abs(given.clock() - time.time()) < 5, 0 <= given.rng.random() < 1)
                return 4
        """)
    )
    assert (code, out.split(), err) == (4, ["uvloop", "True", "True"], "")


def test_without_uvloop_asyncio_does() -> None:
    code, out, _ = finish(
        start("""
            sys.modules["uvloop"] = None
            async def main(given):
                print(type(asyncio.get_running_loop()).__module__)
                return 0
        """)
    )
    assert (code, out.strip()) == (0, "asyncio.unix_events")


def test_a_seed_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    async def main(given: runtime.Runtime) -> int:
        drawn.append(given.rng.random())
        return 0

    monkeypatch.setenv("BLOCKTRAIN_SEED", "7")
    assert (runtime.run(main), runtime.run(main)) == (0, 0)
    monkeypatch.delenv("BLOCKTRAIN_SEED")
    runtime.run(main)
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("no such file"), 2, "blocktrain: error: no such file\n"),
        (NoPeers("nobody holds block 2\nat all"), 4, "blocktrain: error: nobody holds block 2 at all\n"),
        (PeerFault("sent NaN", "12D3"), 1, "blocktrain: error: 12D3: sent NaN\n"),
        (ExceptionGroup("tasks", [ExceptionGroup("more", [RefusedBySwarm("too old")])]), 6, "blocktrain: error: too old\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)  # fmt: skip
def test_an_expected_error_is_one_line_and_its_code(error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def main(given: runtime.Runtime) -> int:
        raise error

    assert runtime.run(main) == code
    assert capsys.readouterr() == ("", line)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # left as it was found


def test_a_bug_is_one_line_and_its_traceback_is_in_the_debug_file(tmp_path: Path) -> None:
    code, _, err = finish(
        start(f"""
            async def main(given):
                logs.keep_debug_file(Path({str(tmp_path)!r}))
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(fail())
            async def fail():
                return {{}}["key"]
        """)
    )
    assert code == 1
    assert err.strip() == f"blocktrain: error: this is a bug in blocktrain: KeyError: 'key' (its traceback is in {tmp_path / 'debug.log'})"
    assert 'return {}["key"]' in (tmp_path / "debug.log").read_text() or "in fail" in (tmp_path / "debug.log").read_text()
    assert "Traceback" in (tmp_path / "debug.log").read_text()


def test_a_bug_before_there_is_a_debug_file_has_its_traceback_in_a_file_of_its_own(tmp_path: Path) -> None:
    code, _, err = finish(start("async def main(given): 1 / 0", env={"XDG_STATE_HOME": str(tmp_path)}))
    assert code == 1
    (trace,) = tmp_path.rglob("crash-*.log")
    assert err.strip().endswith(f"ZeroDivisionError: division by zero (its traceback is in {trace})")
    assert "1 / 0" in trace.read_text() or "ZeroDivisionError" in trace.read_text()


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = start("""
        async def main(given):
            while True:
                print("line", flush=True)
    """)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=30), err) == (runtime.BROKEN_PIPE, "")


def test_a_broken_socket_is_not_mistaken_for_a_broken_stdout(tmp_path: Path) -> None:
    story = "async def main(given): raise BrokenPipeError(32, 'Broken pipe')"
    code, _, err = finish(start(story, env={"XDG_STATE_HOME": str(tmp_path)}))
    assert code == 1
    assert "bug" in err


# ---- signals --------------------------------------------------------------------------------------------------------------------------

ORDERLY = """
    async def main(given):
        asyncio.get_running_loop().add_signal_handler(10, lambda: None)
        print("ready", flush=True)
        await given.stop.wait()
        print("saved", flush=True)
        return 0
"""


@pytest.mark.parametrize(
    ("number", "loop"),
    [(signal.SIGINT, "uvloop"), (signal.SIGTERM, "uvloop"), (signal.SIGHUP, "uvloop"), (signal.SIGINT, "asyncio")],
)
def test_one_signal_asks_to_stop(number: signal.Signals, loop: str) -> None:
    process = start(("sys.modules['uvloop'] = None\n" if loop == "asyncio" else "") + textwrap.dedent(ORDERLY))
    assert ready(process) == "ready"
    process.send_signal(number)
    code, out, err = finish(process)
    assert (code, out) == (0, "saved\n")
    assert err.split(None, 1)[1].strip() == f"info  {number.name}: stopping; once more to end at once"


def test_the_second_signal_ends_it_at_once_with_its_children() -> None:
    process = start("""
        async def main(given):
            child = subprocess.Popen(["sleep", "600"])
            given.children.add(child.pid)
            print(child.pid, flush=True)
            await given.stop.wait()
            print("stopping", flush=True)
            while True:  # busy, deaf, and never back in the event loop
                pass
    """)
    child = psutil.Process(int(ready(process)))
    process.send_signal(signal.SIGINT)
    assert ready(process) == "stopping"
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert psutil.wait_procs([child], timeout=10)[1] == []


def test_a_program_that_does_not_stop_is_cancelled_and_can_close_things() -> None:
    process = start("""
        async def main(given):
            given.grace_s = 1.2
            print("ready", flush=True)
            try:
                await asyncio.Event().wait()
            finally:
                print("closed", flush=True)
    """)
    assert ready(process) == "ready"
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process)
    assert (code, out) == (0, "closed\n")


@pytest.mark.parametrize("hang", ["time.sleep(600)", "await asyncio.to_thread(time.sleep, 600)"])
def test_a_program_that_cannot_be_cancelled_is_ended_in_time(hang: str) -> None:
    process = start(f"""
        async def main(given):
            given.grace_s = 1.0
            print("ready", flush=True)
            {hang}
    """)
    assert ready(process) == "ready"
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert "did not stop within 1 s: ended by force" in err
    assert time.monotonic() - began < 15


def test_nohup_is_respected() -> None:
    process = start("import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + textwrap.dedent(ORDERLY))
    assert ready(process) == "ready"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 0
    assert "SIGHUP" not in err


def test_children_left_behind_by_a_bug_are_killed(tmp_path: Path) -> None:
    story = """
        async def main(given):
            child = subprocess.Popen(["sleep", "600"])
            given.children.add(child.pid)
            print(child.pid, flush=True)
            raise RuntimeError("bug")
    """
    process = start(story, env={"XDG_STATE_HOME": str(tmp_path)})
    child = int(ready(process))
    assert finish(process)[0] == 1
    assert psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], timeout=10)[1] == []


def test_only_our_own_children_are_killed() -> None:
    children = runtime.Children()
    children.add(os.getpid())
    children._started[os.getpid()] -= 100.0  # as if the number had been another process's
    children.kill()  # we are still here
    assert children.pids() == []
    children.add(2**30)  # ended already
    assert children.pids() == []


def test_leaving_waits_for_no_thread_and_loses_nothing() -> None:
    process = start("""
        import atexit
        async def main(given):
            threading.Thread(target=time.sleep, args=(600,)).start()
            atexit.register(print, "cleaned up")
            print("said", end=" ")
            return 3
        runtime.leave(runtime.run(main))
    """)
    assert finish(process) == (3, "said cleaned up\n", "")


def test_commands_without_a_loop_end_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise NoPeers("nobody there")

    assert runtime.guarded(lambda: 3) == 3
    assert runtime.guarded(fail) == 4
    assert capsys.readouterr().err == "blocktrain: error: nobody there\n"


# ---- talk -----------------------------------------------------------------------------------------------------------------------------


def record(level: int, text: str, name: str = "blocktrain.node", **more: object) -> logging.LogRecord:
    made = logging.LogRecord(name, level, __file__, 1, text, (), None)
    made.__dict__.update(more)
    return made


def test_a_line_has_time_level_and_text_and_nothing_else() -> None:
    line = OneLine().format(record(logging.WARNING, "peer says \x1b[2J\nboo", created=0.0, exc_info=(ValueError, ValueError("x"), None)))
    assert line[2] == line[5] == ":"
    assert line[8:] == " warn  peer says  [2J boo"
    assert OneLine(colours=True).format(record(logging.ERROR, "x")).startswith("\033[31m")
    assert OneLine(colours=True).format(record(logging.INFO, "x"))[0].isdigit()
    assert len(one_line("y" * 10_000)) == logs.MAX_LINE_CHARS


def test_the_terminal_hears_us_and_the_file_hears_everything(tmp_path: Path) -> None:
    process = start(f"""
        async def main(given):
            logs.keep_debug_file(Path({str(tmp_path)!r}))
            logging.getLogger("blocktrain.node").debug("a detail")
            logging.getLogger("blocktrain.node").info("an event")
            logging.getLogger("hivemind.dht").error("a library's scare")
            try:
                raise errors.NetworkFault("gone")
            except errors.NetworkFault:
                logging.getLogger("blocktrain.node").warning("peer is gone", exc_info=True)
            import warnings
            warnings.warn("old")
            return 0
    """)
    code, out, err = finish(process)
    assert (code, out) == (0, "")
    assert [line.split(None, 1)[1] for line in err.splitlines()] == ["info  an event", "warn  peer is gone"]
    text = (tmp_path / "debug.log").read_text()
    assert all(word in text for word in ("a detail", "an event", "library's scare", "NetworkFault: gone", "Traceback", "UserWarning: old"))


def test_the_debug_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "DEBUG_FILE_BYTES", 2000)
    assert logs.keep_debug_file(tmp_path) == logs.debug_file() == tmp_path / "debug.log"
    try:
        for n in range(500):
            logging.getLogger("blocktrain.node").error("line %d", n)
    finally:
        logs.forget_debug_file()
    assert logs.debug_file() is None
    assert len(list(tmp_path.iterdir())) == 1 + logs.DEBUG_FILES_KEPT
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4 * 2000


def test_a_debug_file_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "debug.log").mkdir()
    assert logs.keep_debug_file(tmp_path) is None
    assert "no debug file: cannot write" in caplog.text


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def __init__(self, tty: bool) -> None:
            self.isatty = lambda: tty

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert logs._colourful(Terminal(True))  # type: ignore[arg-type]
    assert not logs._colourful(Terminal(False))  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "1")
    assert not logs._colourful(Terminal(True))  # type: ignore[arg-type]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(UsageError, match="log level 'loud' does not exist; use one of debug, info, warning, error"):
        logs.setup("loud")


def test_the_same_line_comes_at_most_once_a_minute() -> None:
    now = 0.0
    once = OncePer(60.0, clock=lambda: now, most_keys=3)
    assert once.ready("dial a") == 0
    assert once.ready("dial a") is None
    assert once.ready("dial b") == 0
    now = 59.0
    assert once.ready("dial a") is None
    now = 60.0
    assert once.ready("dial a") == 2  # held back in between
    for key in ("c", "d", "e"):
        assert once.ready(key) == 0
    assert once.ready("dial a") == 0  # forgotten: only so many are remembered


def test_what_is_not_said_again_is_counted_and_kept_for_the_file(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(logs, "_minute", OncePer(60.0, clock=lambda: now))
    caplog.set_level(logging.DEBUG)
    log = logging.getLogger("blocktrain.test")
    for _ in range(3):
        say_once_a_minute(log, logging.WARNING, "dial x", "cannot dial x")
    now = 61.0
    say_once_a_minute(log, logging.WARNING, "dial x", "cannot dial x")
    assert [(entry.levelname, entry.getMessage()) for entry in caplog.records] == [
        ("WARNING", "cannot dial x"),
        ("DEBUG", "cannot dial x (not said again)"),
        ("DEBUG", "cannot dial x (not said again)"),
        ("WARNING", "cannot dial x (2 more times in between)"),
    ]
