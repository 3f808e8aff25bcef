"""Status: what a node says about itself reads back the same, from a file, from a peer, and after the process is gone."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rich.console import Console

from blocktrain.node import local
from blocktrain.node.local import StatusFile, read_local
from blocktrain.node.status import MAX_PEERS_SHOWN, PeerStatus, Status, doing, duration, one_line, quantity, render
from blocktrain.protocol.errors import Malformed, UsageError

FULL = Status(
    run="ab" * 32,
    run_name="tiny",
    name="anna",
    peer="12D3KooWAbCdEf",
    pid=os.getpid(),
    version="0.1.0",
    block=2,
    blocks=3,
    round=17,
    digest="0123456789abcdef",
    loss=2.4312,
    heldout=2.5068,
    steps=340,
    tokens=348160,
    tokens_per_s=9512.4,
    learning_rate=4e-3,
    peers=(
        PeerStatus("12D3KooWXyZ", 2, "training", 16, 9000.0, 1.5, "", 0.8),
        PeerStatus("12D3KooWGone", 1, avoided="no answer, 20 s more"),
    ),
    coverage=(2, 2, 1),
    accepted=15,
    late=1,
    refused=2,
    one_sided=1,
    declined=3,
    own_rounds=4,
    bytes_in=12_345_678,
    bytes_out=9_876,
    served_tokens=200,
    sessions=1,
    phase="training",
    waiting_for="a partner that is not busy",
    phase_s=75.0,
    next_action="an offer in 3 s",
    addresses=("/ip4/127.0.0.1/tcp/31337/p2p/12D3KooWAbCdEf",),
    reachable="direct",
    reachable_why="12D3abc dialled /ip4/203.0.113.7/tcp/31337",
    skew_s=-0.2,
    device="cpu",
    data="builtin: 0.44 MB train, 27 kB held out",
    store="/home/anna/.local/share/blocktrain/ab/block-2",
    checkpoint_round=16,
    last_refusal="12D3KooWXyZ: not finite",
    uptime_s=300.0,
    written_at=1000.0,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(local.FOLDER_VARIABLE, str(tmp_path / "runtime"))
    return local.runtime_folder()


# ---- as JSON --------------------------------------------------------------------------------------------------------------------------


def test_a_status_reads_back_as_it_was() -> None:
    assert Status.from_json(FULL.to_json()) == FULL
    assert Status.from_json(FULL.to_json().encode()) == FULL
    assert Status.from_json(Status().to_json()) == Status()


def test_every_promised_key_is_there_and_null_where_there_is_no_value() -> None:
    table = json.loads(Status(loss=float("nan")).to_json())
    promised = [
        "run",
        "run_name",
        "name",
        "peer",
        "pid",
        "version",
        "block",
        "blocks",
        "round",
        "digest",
        "loss",
        "heldout",
        "steps",
        "tokens",
        "tokens_per_s",
        "learning_rate",
        "peers",
        "coverage",
        "accepted",
        "late",
        "refused",
        "one_sided",
        "declined",
        "own_rounds",
        "bytes_in",
        "bytes_out",
        "served_tokens",
        "sessions",
        "phase",
        "waiting_for",
        "phase_s",
        "next_action",
        "addresses",
        "reachable",
        "reachable_why",
        "skew_s",
        "device",
        "data",
        "store",
        "checkpoint_round",
        "last_refusal",
        "uptime_s",
        "written_at",
    ]
    assert set(promised) <= set(table)
    assert table["loss"] is None
    assert table["block"] is None
    peer = json.loads(FULL.to_json())["peers"][0]
    assert set(peer) == {"peer", "block", "phase", "round", "tokens_per_s", "seen_s_ago", "avoided", "rtt_ms"}


def test_our_own_words_are_made_to_fit() -> None:
    peers = (replace(FULL.peers[0], avoided="\0ß" * 2000),) * (MAX_PEERS_SHOWN + 5)
    said = replace(FULL, waiting_for="a\nb\x1b[31m" + "x" * 5000, peers=peers)
    back = Status.from_json(said.to_json())
    assert back.waiting_for.startswith("a b [31mxxx")
    assert len(back.peers) == MAX_PEERS_SHOWN


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is JSON"),
        ("[]", "is a map"),
        ("[" * 100_000, "is JSON"),
        ('{"round": -1}', "status.round is -1"),
        ('{"round": "7"}', "status.round must be a whole number"),
        ('{"loss": NaN}', "status.loss"),
        ('{"peers": [{"peer": "x"}]}', r"missing key status.peers\[0\].block"),
        ('{"peers": [7]}', "must be a table"),
        ('{"phase": "a\\u001b[2J"}', "control characters"),
        (json.dumps({"peers": [{"peer": "x", "block": 0}] * (MAX_PEERS_SHOWN + 1)}), "at most 1000 are allowed"),
        (" " * 2_000_000, "a status of 2000000 bytes"),
    ],
)
def test_a_peers_status_is_checked_like_every_message(text: str, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        Status.from_json(text)


def test_a_later_version_may_say_more() -> None:
    table = json.loads(FULL.to_json())
    table["mood"] = "good"
    table["peers"][0]["mood"] = "fine"
    assert Status.from_json(json.dumps(table)) == FULL


# ---- files of this machine's nodes ----------------------------------------------------------------------------------------------------


def test_a_nodes_file_is_there_while_it_lives_and_gone_after(folder: Path) -> None:
    with StatusFile() as own:
        assert read_local(lambda: 1000.0) == []
        own.write(FULL)
        assert read_local(lambda: 1000.4) == [FULL]
        own.write(replace(FULL, round=18))
        assert [status.round for status in read_local(lambda: 1001.0)] == [18]
        assert [path.name for path in folder.iterdir()] == [f"node-{os.getpid()}.json"]
    assert list(folder.iterdir()) == []


def test_a_node_that_says_nothing_any_more_looks_frozen(folder: Path) -> None:
    with StatusFile() as own:
        own.write(FULL)
        (silent,) = read_local(lambda: 1007.0)
        assert silent.silent_s == 7.0
        assert doing(silent) == "no word for 7 s: frozen?"
        assert "no word for 7 s: frozen?" in one_line(silent)


def test_files_of_processes_that_are_gone_are_swept_away(folder: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)
    for name in (f"node-{int(ended.stdout)}.json", "node-x.json"):
        (folder / name).write_text(FULL.to_json())
    assert read_local(lambda: 1000.0) == []
    assert list(folder.iterdir()) == []


def test_a_number_that_another_process_has_by_now_is_not_mistaken_for_the_node(folder: Path) -> None:
    path = folder / f"node-{os.getpid()}.json"
    path.write_text(FULL.to_json())
    os.utime(path, (1_000_000, 1_000_000))  # written long before this process began
    assert read_local(lambda: 1000.0) == []
    assert not path.exists()


def test_a_damaged_file_of_a_living_node_is_passed_over(folder: Path) -> None:
    (folder / f"node-{os.getpid()}.json").write_text('{"round": "x"}')
    assert read_local(lambda: 1000.0) == []
    assert (folder / f"node-{os.getpid()}.json").exists()


def test_readers_never_see_half_a_file(folder: Path) -> None:
    program = textwrap.dedent("""
        import sys
        from blocktrain.node.local import StatusFile
        from blocktrain.node.status import Status
        own = StatusFile()
        own.write(Status(pid=1))
        print("ready", flush=True)
        while True:
            own.write(Status(waiting_for="x" * 1000, data="y" * 1000, written_at=1000.0))
            own.write(Status(written_at=1000.0))
    """)
    writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(300):
            assert len(read_local(lambda: 1000.0)) == 1
    finally:
        writer.kill()
        writer.communicate(timeout=30)
    assert read_local(lambda: 1000.0) == []


def test_a_status_that_cannot_be_written_is_said_once_and_ends_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = StatusFile(folder / "gone")
    own.write(FULL)
    own.write(FULL)
    assert [record.getMessage().split(": ")[0] for record in caplog.records] == [f"cannot write the status file {own.path}"]
    own.remove()


def test_the_folder_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(local.FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert local.runtime_folder() == tmp_path / "blocktrain"
    assert (tmp_path / "blocktrain").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert local.runtime_folder() == tmp_path / f"blocktrain-{os.getuid()}"
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    (tmp_path / "blocktrain-4321").mkdir()  # another user was faster
    os.chown(tmp_path / "blocktrain-4321", os.geteuid(), -1)
    with pytest.raises(UsageError, match=r"blocktrain-4321 belongs to another user; name another with BLOCKTRAIN_RUNTIME_DIR"):
        local.runtime_folder()
    monkeypatch.setenv(local.FOLDER_VARIABLE, str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot use the runtime folder"):
        local.runtime_folder()


# ---- for people -----------------------------------------------------------------------------------------------------------------------


def test_the_line_says_who_how_well_with_whom_and_what_it_waits_for() -> None:
    assert one_line(FULL) == (
        "anna block 2/3 · round 17 · loss 2.431 · held-out 2.507 · 9.5k tok/s · 2 peers · merged 15, late 1, refused 2 · "
        "reachable: direct · training for 1 min 15 s, waiting for a partner that is not busy, next: an offer in 3 s"
    )
    assert one_line(Status(name="new")) == (
        "new block ? · round 0 · loss – · held-out – · 0 tok/s · 0 peers · merged 0, late 0, refused 0 · "
        "reachable: unknown · starting for 0 s"
    )


def test_the_table_has_a_row_a_node_by_block() -> None:
    out = io.StringIO()
    others = [replace(FULL, name="bert", block=1), replace(FULL, name="[red]x", block=0, silent_s=7.0)]
    Console(file=out, width=200).print(render([FULL, *others]))
    rows = out.getvalue().splitlines()
    assert [next(name for name in ("[red]x", "bert", "anna") if name in row) for row in rows[1:]] == ["[red]x", "bert", "anna"]
    assert "12.3MB/9.9kB" in rows[3]
    assert "15/1/2" in rows[3]
    assert "no word for 7 s: frozen?" in rows[1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (7.25, "7.2"),
        (99.96, "100"),
        (999.4, "999"),
        (999.6, "1.0k"),
        (1234, "1.2k"),
        (123_456, "123k"),
        (5e15, "5000T"),
    ],
)
def test_quantities_have_three_digits(value: float, text: str) -> None:
    assert quantity(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (75, "1 min 15 s"), (3725, "1 h 2 min"), (90_000, "1 d 1 h")]
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_reading_needs_nothing_heavy(folder: Path) -> None:
    program = textwrap.dedent("""
        import sys, time
        from blocktrain.node import local, status
        local.read_local(time.time)
        heavy = {"torch", "hivemind", "numpy", "rich", "blocktrain.node.compute", "asyncio"} & set(sys.modules)
        print(sorted(heavy))
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_clock_of_real_use_is_unix_seconds(folder: Path) -> None:
    from blocktrain.node import runtime

    with StatusFile() as own:
        own.write(replace(FULL, written_at=runtime.wall_clock()))
        assert read_local(time.time)[0].silent_s == 0.0


def test_every_field_has_a_rule() -> None:
    assert all("rule" in item.metadata for cls in (Status, PeerStatus) for item in fields(cls))
