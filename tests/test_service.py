"""Nodes as people run them, in processes of their own: join, average, be killed, frozen and stopped, and start again from the store."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blocktrain.node.store import peek
from tests.swarm_kit import Program, Programs, recipe, stock_bootstrap

pytestmark = pytest.mark.real

TTL_S = 8.0  # of the programs' records
SLACK_S = 12.0  # on promised deadlines: the machine may be busy with other things
PROMISED = [
    "run", "block", "round", "digest", "loss", "peers", "accepted", "late", "refused", "one_sided", "phase", "waiting_for",
    "phase_s", "next_action", "steps", "tokens_per_s", "addresses", "skew_s", "device", "data", "store", "checkpoint_round",
    "coverage", "pid", "version", "uptime_s",
]  # fmt: skip


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    started = Programs(tmp_path)
    yield started
    started.close()


def sees(status: dict[str, Any], peer: str) -> bool:
    return any(each["peer"] == peer for each in status["peers"])


def status_command(programs: Programs) -> list[dict[str, Any]]:
    """`blocktrain status --json` of this machine, by the nodes' files."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from blocktrain.node.commands.app import main; sys.exit(main())", "status", "--json"],
        cwd=programs.folder, env=programs.env(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def in_time(program: Program, number: int, code: int, deadline_s: float) -> None:
    """A signal, and the end within the promised time (with slack), with nothing left."""
    program.daemons()
    began = time.monotonic()
    program.signal(number)
    assert program.end(deadline_s + SLACK_S) == code, program.talk()
    assert time.monotonic() - began < deadline_s + SLACK_S
    assert program.left() == []
    assert "Traceback" not in program.talk()


def test_a_joiner_knows_only_an_address_averages_is_killed_and_replaced(programs: Programs) -> None:
    host = programs.start(host=True)
    address = host.up()
    round_at_start = host.wait(lambda status: status["round"] >= 5)["round"]
    joiner = programs.start(peers=(address,))
    joiner.up()
    begun = next(status for status in joiner.statuses() if status["phase"] == "training")
    assert begun["round"] >= round_at_start  # its first own word on training: it did not begin at 0
    assert begun["run_name"] == "tiny"
    for program, other in ((host, joiner), (joiner, host)):
        status = program.wait(lambda status, other=other: status["accepted"] >= 2 and sees(status, other.status()["peer"]))
        assert set(PROMISED) <= set(status)
        assert status["coverage"][0] == 2
        assert (status["run"], status["block"]) == (host.status()["run"], 0)
        assert status["skew_s"] is None or abs(status["skew_s"]) < 5
    shown = {status["pid"]: status for status in status_command(programs)}
    assert {host.pid, joiner.pid} <= set(shown)
    assert shown[joiner.pid]["peer"] == joiner.status()["peer"]

    victim = joiner.status()["peer"]
    joiner.daemons()
    joiner.signal(signal.SIGKILL)
    killed_at = time.monotonic()
    assert joiner.end() == -signal.SIGKILL
    carried_on = host.status()["round"]
    host.wait(lambda status: not sees(status, victim), TTL_S + SLACK_S)
    assert time.monotonic() - killed_at < TTL_S + SLACK_S
    host.wait(lambda status: status["round"] >= carried_on + 3)
    assert joiner.running() == []  # its daemon goes with it
    assert joiner.left()
    assert [status["pid"] for status in status_command(programs)] == [host.pid]
    assert joiner.left() == []  # `status` removed its file and its sockets

    before = host.status()["accepted"]
    replacement = programs.start(peers=(address,))
    replacement.up()
    begun = next(status for status in replacement.statuses() if status["phase"] == "training")
    assert begun["round"] >= carried_on
    assert begun["peer"] == victim  # the same store, so the same identity: and it is seen again at once
    host.wait(lambda status: sees(status, victim) and status["accepted"] > before)

    replacement.signal(signal.SIGSTOP)
    try:
        stuck = host.status()
        host.wait(lambda status: status["round"] >= stuck["round"] + 3)
        host.wait(lambda status: not sees(status, victim), TTL_S + 2 * SLACK_S)
    finally:
        replacement.signal(signal.SIGCONT)
    before = host.status()["accepted"]
    host.wait(lambda status: sees(status, victim) and status["accepted"] > before)
    assert "Traceback" not in host.talk() + replacement.talk()
    in_time(host, signal.SIGINT, 0, 5.0)
    going_on = replacement.status()["round"]
    replacement.wait(lambda status: status["round"] >= going_on + 2)


def test_one_interrupt_ends_a_node_in_time_and_the_next_start_goes_on_where_it_stopped(programs: Programs, tmp_path: Path) -> None:
    store = tmp_path / "my store"
    host = programs.start("--store", str(store), host=True)
    address = host.up()
    other = programs.start(peers=(address,))
    other.up()
    host.wait(lambda status: status["accepted"] >= 1)
    in_time(host, signal.SIGINT, 0, 5.0)
    last = host.status()
    assert (store / "checkpoint.safetensors").exists()
    assert not list(programs.runtime.glob(f"node-{host.pid}*"))
    assert peek(store) == (bytes.fromhex(last["run"]), 0)
    assert other.process.poll() is None  # untouched
    assert any(daemon.is_running() and daemon.name() == "p2pd" for daemon in other.daemons())

    again = programs.start("--store", str(store), block=None)  # neither a recipe nor an address: all is in the store
    again.up()
    begun = next(status for status in again.statuses() if status["phase"] not in ("starting",) and status["digest"])
    assert begun["round"] >= last["round"]
    assert begun["digest"] == last["digest"] or begun["round"] > last["round"]
    assert (begun["peer"], begun["run"], begun["block"]) == (last["peer"], last["run"], 0)
    again.wait(lambda status: status["accepted"] >= 1)  # found by the addresses it kept, or by those who look for it

    again.daemons()
    again.signal(signal.SIGINT)
    time_of_second = time.monotonic()
    again.wait_talk("stopping")
    again.signal(signal.SIGINT)
    code = again.end(SLACK_S)
    assert code in (0, 130)  # 0 only if it was faster than the second signal
    assert time.monotonic() - time_of_second < SLACK_S
    assert again.running() == []  # sockets may lie about after an end by force; the next node sweeps them
    in_time(other, signal.SIGTERM, 0, 5.0)


def test_a_node_whose_daemon_is_killed_ends_with_a_reason_and_its_state_saved(programs: Programs, tmp_path: Path) -> None:
    store = tmp_path / "store"
    host = programs.start("--store", str(store), host=True)
    host.up()
    host.wait(lambda status: status["round"] >= 2)
    (daemon,) = [child for child in host.daemons() if child.name() == "p2pd"]
    daemon.kill()
    assert host.end(5 + SLACK_S) == 3
    last = host.talk().strip().splitlines()[-1]
    assert "the libp2p daemon ended" in last
    assert "SIGKILL" in last
    assert "Traceback" not in host.talk()
    assert host.left() == []
    assert (store / "checkpoint.safetensors").exists()
    again = programs.start("--store", str(store), block=None)  # what it had learnt is not lost
    again.up()
    begun = next(status for status in again.statuses() if status["phase"] not in ("starting",) and status["digest"])
    assert begun["round"] >= 2
    again.wait(lambda status: status["round"] > begun["round"])


def test_a_stock_hivemind_dht_is_all_that_two_nodes_need_to_find_each_other(programs: Programs) -> None:
    with stock_bootstrap() as address:
        host = programs.start("--initial-peers", address, host=True)
        host.up()
        joiner = programs.start(peers=(address,))
        joiner.up()
        for program in (host, joiner):
            program.wait(lambda status: status["accepted"] >= 2)
        in_time(joiner, signal.SIGINT, 0, 5.0)


def test_rounds_end_a_node_by_themselves(programs: Programs) -> None:
    host = programs.start("--rounds", "3", host=True)
    assert host.end(120) == 0, host.talk()
    assert host.statuses()[-1]["round"] >= 3
    assert host.left() == []


def test_no_run_of_a_name_is_a_clear_end_and_several_runs_are_listed(programs: Programs) -> None:
    host = programs.start(host=True)
    address = host.up()
    lost = programs.start("--run", "huge", peers=(address,))
    other = programs.folder / "other.toml"
    other.write_text(recipe(name='"other"'))
    second = programs.start("--new-run", str(other), "--initial-peers", address)
    second.up()  # at once: after a while alone in its run its phase is `isolated`
    assert lost.end(120) == 4
    line = lost.talk().strip().splitlines()[-1]
    assert "no run 'huge' in this swarm; known are: " in line
    assert "tiny" in line
    second.wait(lambda status: status["round"] >= 1)
    unsure = programs.start(peers=(address,))
    range_ = programs.start("--run", "tiny", block=9, peers=(address,))
    assert unsure.end(120) == 2
    assert "choose one with --run" in unsure.talk().strip().splitlines()[-1]
    assert range_.end(120) == 2
    assert "--block 9" in range_.talk().strip().splitlines()[-1]
    for program in (lost, unsure, range_):
        assert "Traceback" not in program.talk()
        assert program.left() == []
    assert host.process.poll() is None


def test_a_node_that_is_asked_to_stop_while_it_starts_stops(programs: Programs) -> None:
    host = programs.start(host=True)
    host.wait(lambda status: status["phase"] == "starting")
    in_time(host, signal.SIGINT, 0, 5.0)


def test_09_a_copied_identity_is_told_to_both_who_use_it(programs: Programs) -> None:
    """Locks keep two processes of one file apart; a copy of the file, perhaps on another machine, only the DHT can show."""
    host = programs.start(host=True)
    address = host.up()
    key = programs.folder / "one.key"
    first = programs.start("--identity", str(key), peers=(address,))
    first.up()
    copy = programs.folder / "two.key"
    copy.write_bytes(key.read_bytes())
    second = programs.start("--identity", str(copy), peers=(address,))
    for node in (first, second):
        node.wait_talk("another node uses our identity")
        assert "another node uses our identity" in node.talk()
    assert "another node uses our identity" not in host.talk()
    assert "Traceback" not in first.talk() + second.talk()
