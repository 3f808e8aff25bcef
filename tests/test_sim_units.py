"""`blocktrain-sim local` against stand-ins for its processes: the story, what can go wrong in it, and that nothing is ever left behind."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from blocktrain.node.recipe_file import load_recipe
from blocktrain.protocol.errors import BlocktrainError, UsageError
from blocktrain.swarm_sim import benches, local, local_cmd, recipe
from blocktrain.swarm_sim.app import BenchOptions, LocalOptions, main
from blocktrain.swarm_sim.cluster import Member
from blocktrain.swarm_sim.display import Display
from blocktrain.swarm_sim.processes import Children, Failure, Interrupted, Patience, Programs

pytestmark = pytest.mark.real  # processes of their own

FAKE = Path(__file__).with_name("fake_node.py")
QUICK = Patience(silent_s=2, stop_s=1.5, left_s=1, start_s=10, meet_s=2, client_s=10, exchange_s=2, carry_on_s=10, rejoin_s=3)
PNG = b"\x89PNG"


def programs(faults: dict[str, str]) -> Programs:
    fake = (sys.executable, str(FAKE), json.dumps(faults))
    return Programs((*fake, "node"), (*fake, "client"))


def tell(folder: Path, faults: dict[str, str] | None = None, **options: Any) -> tuple[int, dict[str, Any]]:
    """Run `blocktrain-sim local` on stand-ins; its exit code and its JSON."""
    target = folder / "result.json"
    chosen = LocalOptions(**{"blocks": 2, "minutes": 0.02, "out": folder / "out", "json": target, **options})
    code = local_cmd.local(chosen, programs(faults or {}), QUICK)
    return code, json.loads(target.read_text())


def nodes_of_this_test(folder: Path) -> list[psutil.Process]:
    """Nodes, and what they started, that still run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if str(folder / "out" / "nodes") in " ".join(process.info["cmdline"] or []) and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def wait_until(met: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def test_a_whole_story_ends_well_and_leaves_only_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = tell(tmp_path)
    assert (code, result["ok"], result["failed"]) == (0, True, [])
    assert (result["killed"], result["rejoined"], result["killed_node"], result["rejoined_node"]) == (True, True, "node-1b", "node-1c")
    assert (result["loss_before"], result["loss_after"]) == (5.5, 4.5)
    assert len(result["text"]) == 200
    assert result["tokens_per_traversal"] == 5
    assert (result["tracebacks"], result["processes_left"]) == (0, 0)
    assert result["accepted"] == sum(node["accepted"] for node in result["nodes"]) > 0
    assert {node["node"] for node in result["nodes"]} == {"node-0a", "node-0b", "node-1a", "node-1b", "node-1c"}
    assert nodes_of_this_test(tmp_path) == []
    out = tmp_path / "out"
    assert json.loads((out / "summary.json").read_text()) == result
    assert (out / "loss.png").read_bytes().startswith(PNG)
    assert {path.name for path in out.iterdir()} == {"logs", "nodes", "run.toml", "summary.json", "loss.png", "evaluations"}
    said = capsys.readouterr()
    assert "5.500 before, 4.500 after" in said.out
    assert "killed node-1b (SIGKILL)" in said.err


def test_without_the_kill_nobody_is_killed_and_that_is_fine(tmp_path: Path) -> None:
    code, result = tell(tmp_path, kill=False, replicas=1)
    assert (code, result["killed"], result["rejoined"]) == (0, False, False)
    assert len(result["nodes"]) == 2


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"0a": "ends at once"}, "node-0a ended by itself with exit code 2: error: no such block"),
        ({"1a": "ends in the middle"}, "node-1a ended by itself with exit code 1: error: the disk is full"),
        ({"1a": "falls silent"}, "node-1a has said nothing for 2 s"),
        ({"0b": "sees nobody"}, "the 4 nodes did not all see each other (node-0a sees 3, node-1a sees 3, node-0b sees 0, node-1b sees 3)"),
        ({"0a": "never averages", "0b": "never averages"}, "no exchange was accepted in block 0"),
        ({"eval": "fails"}, "eval-before ended with exit code 4: error: nobody holds block 1"),
        ({"eval": "no progress"}, "training did not help: the chain's loss was 5.500 and is 5.500"),
        ({"generate": "fails"}, "generate-after-kill ended with exit code 4"),
        ({"1c": "never catches up"}, "node-1c did not take the state of round"),
        ({"1c": "never averages"}, "node-1c was not accepted in an exchange"),
    ],
    ids=lambda value: " ".join(f"{who} {what}" for who, what in value.items()) if isinstance(value, dict) else "",
)
def test_what_did_not_happen_is_said_in_one_line_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], faults: dict[str, str], said: str
) -> None:
    code, result = tell(tmp_path, faults)
    assert code == 1
    assert any(said in what for what in result["failed"]), result["failed"]
    assert f"(logs in {tmp_path / 'out' / 'logs'})" in capsys.readouterr().err
    assert nodes_of_this_test(tmp_path) == []


def test_everything_that_is_wrong_at_the_end_is_said(tmp_path: Path) -> None:
    code, result = tell(tmp_path, {"0a": "logs a traceback", "0b": "stops badly", "1a": "leaves a daemon", "1c": "does not stop"})
    assert (code, result["tracebacks"], result["processes_left"]) == (1, 1, 1)
    for said in (
        "1 tracebacks stand in the logs",
        "node-0b stopped with exit code 3",
        "1 processes were left behind: python",
        "node-1c did not stop",
    ):
        assert any(said in what for what in result["failed"]), result["failed"]
    assert nodes_of_this_test(tmp_path) == []


def test_rubbish_on_a_nodes_stdout_does_no_harm(tmp_path: Path) -> None:
    code, result = tell(tmp_path, {"0b": "talks rubbish", "1a": "talks rubbish"})
    assert (code, result["failed"]) == (0, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_story_and_every_process(tmp_path: Path, number: signal.Signals) -> None:
    story = start_in_own_process(tmp_path)
    wait_until(lambda: len(nodes_of_this_test(tmp_path)) >= 4)
    story.send_signal(number)
    assert story.wait(timeout=10) == 130
    assert nodes_of_this_test(tmp_path) == []
    assert json.loads((tmp_path / "result.json").read_text())["interrupted"] is True


def test_a_second_signal_does_not_wait_for_a_node_that_will_not_stop(tmp_path: Path) -> None:
    story = start_in_own_process(tmp_path, {"0a": "does not stop"}, stop_s=30)
    wait_until(lambda: len(nodes_of_this_test(tmp_path)) >= 4)
    story.send_signal(signal.SIGINT)
    wait_until(lambda: len(nodes_of_this_test(tmp_path)) == 1)
    story.send_signal(signal.SIGINT)
    assert story.wait(timeout=10) == 130
    assert nodes_of_this_test(tmp_path) == []


def test_children_of_a_simulator_that_is_killed_end_by_themselves() -> None:
    child = "from blocktrain.swarm_sim.leash import end_with_parent as tie; tie(); print(1, flush=True); import time; time.sleep(60)"
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.read(1)\n"
        "print(child.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        orphan = psutil.Process(int(process.stdout.readline()))
        process.kill()
    wait_until(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE)


def start_in_own_process(folder: Path, faults: dict[str, str] | None = None, stop_s: float = 1.5) -> subprocess.Popen[bytes]:
    script = (
        "import sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(FAKE.parent)!r})\n"
        "from test_sim_units import QUICK, programs\n"
        "from dataclasses import replace\n"
        "from blocktrain.swarm_sim import local_cmd; from blocktrain.swarm_sim.app import LocalOptions\n"
        f"options = LocalOptions(blocks=2, minutes=5, out=Path({str(folder / 'out')!r}), json=Path({str(folder / 'result.json')!r}))\n"
        f"sys.exit(local_cmd.local(options, programs({faults or {}!r}), replace(QUICK, stop_s={stop_s})))\n"
    )
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


# ---- children -----------------------------------------------------------------------------------------------------------------------


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_frozen_child_says_nothing_and_is_not_missed_until_it_is_thawed(tmp_path: Path) -> None:
    with Children(tmp_path, patience=replace(QUICK, silent_s=0.5)) as children:
        child = children.start("ticker", python("import time\nwhile True: print('{\"n\": 1}', flush=True); time.sleep(0.02)"))
        children.wait(lambda: child.status == {"n": 1}, 5, "no word")
        children.freeze([child])
        assert all(process.status() == psutil.STATUS_STOPPED for process in children.family(child))
        children.run(0.8)
        children.thaw([child])
        heard = child.said_at
        children.wait(lambda: child.said_at > heard, 5, "no word after the thaw")
    assert children.ending is not None
    assert children.ending.left == ()


def test_a_grandchild_in_a_session_of_its_own_is_found(tmp_path: Path) -> None:
    with Children(tmp_path, patience=QUICK) as children:
        code = (
            "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)"
        )
        child = children.start("parent", python(f"{code}; print('{{}}', flush=True); time.sleep(60)"))
        children.wait(lambda: len(children.family(child)) == 2, 5, "no grandchild")
    assert children.ending is not None
    assert len(children.ending.left) == 1
    wait_until(lambda: children.family(child) == [])


def test_nothing_is_left_when_the_simulator_itself_fails(tmp_path: Path) -> None:
    children = Children(tmp_path, patience=QUICK)

    def fail() -> None:
        with children:
            children.start("sleeper", python("import time; time.sleep(60)"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [child.code for child in children.all] == [-signal.SIGINT]


def test_a_signal_is_acted_on_at_the_next_poll_only(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with Children(tmp_path, patience=QUICK) as children:
        os.kill(os.getpid(), signal.SIGINT)
        child = children.start("late", python("import time; time.sleep(60)"))
        with pytest.raises(Interrupted):
            children.poll()
    assert child.code is not None
    assert signal.getsignal(signal.SIGINT) is before


def test_an_endless_line_is_dropped_and_the_next_one_is_heard(tmp_path: Path) -> None:
    code = "import time; print('x' * 3_000_000 + '\\n{\"n\": 2}', flush=True); time.sleep(60)"
    with Children(tmp_path, patience=QUICK) as children:
        child = children.start("talker", python(code))
        children.wait(lambda: child.status == {"n": 2}, 5, "not heard")
        assert child.garbage > 0


def test_waiting_ends_at_its_deadline_with_what_did_not_happen(tmp_path: Path) -> None:
    with Children(tmp_path, patience=QUICK) as children, pytest.raises(Failure, match=r"^nothing came within 0.2 s$"):
        children.wait(lambda: False, 0.2, "nothing came")


# ---- options and recipes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--replicas", "1"], "give --replicas 2 or more, or --no-kill"),
        (["--prompt", ""], "--prompt is empty"),
        (["--data", "/does/not/exist"], "there is no such file"),
        (["--recipe", "nonsense"], "nonsense"),
        (["--json", "/does/not/exist/x.json"], "give a file in a folder that exists"),
        (["--out", "/proc/version"], "is not an empty folder"),
        (["--minutes", "0"], "minutes"),
        (["--blocks", "0"], "blocks"),
        (["--bogus"], "--bogus"),
    ],
)
def test_bad_options_end_in_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["local", *options]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UsageError, match="not an empty folder"):
        local.check(local.Settings(out=tmp_path))
    assert os.listdir(tmp_path) == ["mine"]


def test_the_recipe_tiny_is_written_with_our_blocks_and_a_schedule_of_our_length(tmp_path: Path) -> None:
    tiny = load_recipe("tiny")
    written = recipe.write(Path("tiny"), tmp_path / "run.toml", blocks=5, minutes=8)
    again = load_recipe(written.path)
    assert (again.blocks, written.blocks) == (5, 5)
    assert again == replace(tiny, blocks=5, schedule=replace(tiny.schedule, planned_rounds=2 * tiny.schedule.planned_rounds))


def test_a_recipe_of_the_users_own_keeps_its_schedule(tmp_path: Path) -> None:
    table = tomllib.loads(recipe.to_toml(tomllib.loads(Path(recipe.__file__).parents[1].joinpath("node/recipes/tiny.toml").read_text())))
    mine = tmp_path / "mine.toml"
    mine.write_text(recipe.to_toml(table))
    written = recipe.write(mine, tmp_path / "run.toml", blocks=None, minutes=99)
    assert load_recipe(written.path) == load_recipe("tiny")


def test_the_program_shows_help_without_importing_what_is_slow() -> None:
    code = (
        "import sys; from blocktrain.swarm_sim.app import main\n"
        "for line in ([], ['local'], ['bench'], ['bench', 'node']): assert main([*line, '--help']) == 0\n"
        "print([name for name in ('torch', 'hivemind', 'numpy', 'matplotlib') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"
    assert "--replicas" in done.stdout


def test_plain_lines_are_said_where_stderr_is_no_terminal(tmp_path: Path) -> None:
    with (tmp_path / "said").open("w") as file, Display(lambda: [], ["one", "two"], 60, Console(file=file, width=80)) as display:
        display.phase("two")
        display.say("something [bold]happened[/bold]")
    assert (tmp_path / "said").read_text().splitlines() == ["0:00  [2/2] two (1:00 left)", "0:00  something [bold]happened[/bold]"]


def test_a_terminal_gets_a_live_table_with_a_bar_and_colours_only_where_they_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Children(tmp_path, patience=QUICK) as children:
        child = children.start(
            "node-1a", python('print(\'{"phase": "training", "round": 7, "loss": 2.5}\', flush=True); import time; time.sleep(60)')
        )
        children.wait(lambda: bool(child.status), 10, "no word")
        colours = {}
        for wish in ("", "1"):
            monkeypatch.setenv("NO_COLOR", wish)
            console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system="standard")
            with Display(lambda: [Member(child, 1)], ["one", "two"], 60, console) as display:
                display.phase("two")
            assert isinstance(console.file, io.StringIO)
            colours[wish] = "\x1b[32m" in console.file.getvalue()
            drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
            assert "[2/2] two" in drawn
            assert "0:00 of 1:00, 1:00 left" in drawn
            assert re.search(r"1\s+node-1a\s+training\s+7\s+2\.500", drawn)
    assert colours == {"": True, "1": False}


# ---- benches ------------------------------------------------------------------------------------------------------------------------


def divide(session: benches.Session) -> None:
    session.measure("good", lambda: {"half": 0.5})
    session.measure("bad", lambda: {"whole": 1 // 0})
    session.measure("refused", refuse)


def refuse() -> dict[str, object]:
    raise BlocktrainError("no room")


DIVISION = benches.Bench("division", {"good": ("half",), "bad": ("whole",), "refused": ("share", "rest")}, divide)


def test_a_part_that_fails_gives_null_and_exit_code_1_and_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    target = tmp_path / "numbers.json"
    assert benches.command(DIVISION, BenchOptions(json=target)) == 1
    numbers = json.loads(target.read_text())
    assert [numbers[key] for key in ("half", "whole", "share", "rest")] == [0.5, None, None, None]
    assert numbers["failed"] == ["bad", "refused"]
    assert numbers["why_failed"]["refused"] == "no room"
    assert "0.5" in capsys.readouterr().out
    assert list((tmp_path / "temporary").iterdir()) == [], "a bench's folder without a log in it is of no use"


def test_only_the_parts_asked_for_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert benches.command(DIVISION, BenchOptions(parts=("good",), json=Path("-"), seeds=3)) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["half"] == 0.5
    assert "whole" not in numbers
    assert numbers["seeds"] == [0, 1, 2]


def test_a_part_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(UsageError, match="bench division has no part 'ugly'; it has good, bad, refused"):
        benches.command(DIVISION, BenchOptions(parts=("ugly",)))
