"""The store: what survives a kill, a full disk, a damaged file, and a second node that wants the same folder."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from blocktrain.node import checkpoint, recipe_file, store
from blocktrain.node.store import Store
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.ids import RunId

RUN = RunId(bytes(range(32)))
OTHER = RunId(bytes(32))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "block-2"


def open_store(folder: Path, run: RunId = RUN, block: int = 2, **options: Any) -> Store:
    return Store.open(folder, run, block, **{"min_free_bytes": 0, **options})


def tensors(value: float = 1.0) -> dict[str, np.ndarray[Any, Any]]:
    return {
        "live.weight": np.full((3, 4), value, np.float32),
        "published.weight": np.full((3, 4), value + 0.5, np.float32),
        "published.bias": np.full(3, value, np.float32),
        "moments.step": np.array(7, np.int64),
        "flags": np.array([True, False]),
        "half": np.ones((2, 0, 2), np.float16),
    }


def header(values: dict[str, np.ndarray[Any, Any]], round: int = 1, steps: int = 20, **more: object) -> dict[str, object]:
    return {"round": round, "steps": steps, "digest": checkpoint.state_digest(values).hex(), **more}


def save(kept: Store, value: float = 1.0, round: int = 1, steps: int = 20) -> bool:
    return kept.write(tensors(value), header(tensors(value), round, steps))


def live(kept: Store) -> float:
    found = kept.read()
    assert found is not None
    return float(found[0]["live.weight"][0, 0])


# ---- a checkpoint ---------------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_comes_back_as_it_was_with_its_header(folder: Path) -> None:
    position = {"format": 1, "data": "abc", "windows": 9, "next": 3}
    with open_store(folder) as kept:
        assert kept.read() is None
        assert kept.checkpoint_round is None
        assert kept.write(tensors(), header(tensors(), 5, 100, position=position))
        assert kept.checkpoint_round == 5
    with open_store(folder) as kept:
        assert kept.checkpoint_round == 5
        found = kept.read()
        assert found is not None
    values, head = found
    assert set(values) == set(tensors())
    for name, array in tensors().items():
        assert values[name].dtype == array.dtype
        assert np.array_equal(values[name], array)
        assert values[name].flags.writeable
    assert (head["run"], head["block"], head["round"], head["steps"], head["position"]) == (RUN.hex(), 2, 5, 100, position)


def test_any_safetensors_library_reads_it(folder: Path) -> None:
    with open_store(folder) as kept:
        save(kept)
    values = load_file(folder / store.CHECKPOINT)
    assert {name: array.tolist() for name, array in values.items()} == {name: array.tolist() for name, array in tensors().items()}


def test_the_one_before_is_kept(folder: Path) -> None:
    with open_store(folder) as kept:
        for round in (1, 2, 3):
            save(kept, float(round), round)
            assert (folder / store.CHECKPOINT).exists()
    assert checkpoint.read_header(folder / store.CHECKPOINT)["round"] == 3
    assert checkpoint.read_header(folder / store.BACKUP)["round"] == 2


def test_a_file_system_without_hard_links_keeps_both_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with open_store(folder) as kept:
        assert save(kept, 1.0, 1)
        assert save(kept, 2.0, 2)
        assert live(kept) == 2.0
    assert checkpoint.read_header(folder / store.BACKUP)["round"] == 1


@pytest.mark.parametrize(("round", "steps", "taken"), [(4, 200, False), (5, 99, False), (5, 100, True), (5, 101, True), (6, 0, True)])
def test_older_never_replaces_newer(folder: Path, caplog: pytest.LogCaptureFixture, round: int, steps: int, taken: bool) -> None:
    with open_store(folder) as kept:
        save(kept, 1.0, 5, 100)
    with open_store(folder) as kept:
        assert save(kept, 2.0, round, steps) is taken
        assert live(kept) == (2.0 if taken else 1.0)
    assert ("is newer (round 5)" in caplog.text) is not taken


def test_a_process_that_went_on_from_a_checkpoint_may_replace_it(folder: Path) -> None:
    with open_store(folder) as kept:
        save(kept, 1.0, 5, 100)
    with open_store(folder) as kept:
        kept.read()
        assert save(kept, 2.0, 5, 10)  # its own count of steps began at zero
        assert live(kept) == 2.0


def test_a_state_whose_round_was_lowered_replaces_the_one_before(folder: Path) -> None:
    """A round that a liar made up is given up again (core.py): what is learnt from there is newer, though its number is not."""

    def lowered(kept: Store, value: float, round: int, times: int) -> bool:
        return kept.write(tensors(value), header(tensors(value), round, 200, renumbered=times))

    with open_store(folder) as kept:
        assert save(kept, 1.0, 10**6, 100)
        assert lowered(kept, 2.0, 7, 1)
        assert kept.checkpoint_round == 7
    with open_store(folder) as kept:
        assert live(kept) == 2.0
        assert not save(kept, 1.0, 10**6, 300)
        assert not lowered(kept, 3.0, 6, 1)
        assert lowered(kept, 4.0, 5, 2)
        assert live(kept) == 4.0


# ---- damage ---------------------------------------------------------------------------------------------------------------------------


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "cut":
        data = data[: len(data) - 5]
    elif kind == "longer":
        data += b"x"
    elif kind == "empty":
        data = bytearray()
    elif kind == "bit":
        data[-3] ^= 1
    elif kind == "index":
        data[20] ^= 0x80
    elif kind == "length":
        data[7] = 0xFF
    elif kind == "foreign":
        data = bytearray((20).to_bytes(8, "little") + b'{"__metadata__":{}} ')
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["cut", "longer", "empty", "bit", "index", "length", "foreign"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_with_one_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with open_store(folder) as kept:
        save(kept, 1.0, 1)
        save(kept, 2.0, 2)
    damage(folder / store.CHECKPOINT, kind)
    with open_store(folder) as kept:
        assert live(kept) == 1.0
        assert kept.checkpoint_round == 1
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "going on from the one before, round 1" in caplog.text
        assert live(kept) == 1.0
        assert save(kept, 3.0, 2)  # the damaged one had round 2 as well
        assert live(kept) == 3.0
    assert len(caplog.records) == 1
    assert checkpoint.read_header(folder / store.BACKUP)["round"] == 1  # the damaged one did not push out the good one


def test_two_damaged_checkpoints_are_a_clear_end(folder: Path) -> None:
    with open_store(folder) as kept:
        save(kept, 1.0, 1)
        save(kept, 2.0, 2)
        damage(folder / store.CHECKPOINT, "cut")
        damage(folder / store.BACKUP, "bit")
        with pytest.raises(UsageError, match=r"no checkpoint in .*block-2 can be read .*move the folder away"):
            kept.read()


def test_a_published_state_that_is_not_what_the_header_says_is_damage(folder: Path) -> None:
    with open_store(folder) as kept:
        save(kept)
        with pytest.raises(AssertionError, match="another digest"):
            kept.write(tensors(2.0), header(tensors(3.0), 2))
        wrong = {**header(tensors(3.0), 2), "run": RUN.hex(), "block": 2}
        checkpoint.write_file(folder / store.CHECKPOINT, tensors(2.0), wrong)
        with pytest.raises(UsageError, match="its published state does not have the digest in its header"):
            kept.read()


def test_the_digest_of_a_state_is_that_of_its_bytes_in_name_order() -> None:
    import blake3

    values = tensors()
    expected = blake3.blake3(values["published.bias"].tobytes() + values["published.weight"].tobytes()).digest()
    assert checkpoint.state_digest(values) == expected


# ---- a kill at any moment -------------------------------------------------------------------------------------------------------------

WRITER = textwrap.dedent("""
    import sys
    from pathlib import Path
    import numpy as np
    from blocktrain.node import checkpoint
    from blocktrain.node.store import Store

    with Store.open(Path(sys.argv[1]), bytes(range(32)), 2, min_free_bytes=0) as kept:
        round = (kept.checkpoint_round or 0) + 1
        while True:
            state = {f"published.{n}": np.full(30_000, round, np.float32) for n in range(5)}
            kept.write(state, {"round": round, "steps": 0, "digest": checkpoint.state_digest(state).hex()})
            print(round, flush=True)
            round += 1
""")


@pytest.mark.parametrize("seed", range(6))
def test_a_kill_while_writing_leaves_a_complete_checkpoint(folder: Path, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(seed)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        written = [int(writer.stdout.readline()) for _ in range(rng.randint(1, 10))]
        # Kill it in the midst of one of the next writes: after a part of the time that a write takes, drawn from the seed.
        spun = sum(1 for _ in range(rng.randint(0, 200_000)))
    finally:
        writer.send_signal(signal.SIGKILL)
        rest, _ = writer.communicate(timeout=30)
    last = int(rest.split()[-1]) if rest.split() else written[-1]
    with open_store(folder) as kept:
        found = kept.read()
    assert found is not None, f"seed {seed}, spun {spun}"
    assert not caplog.records
    values, head = found
    assert head["round"] in (last, last + 1)  # the last one that was reported, or one whose report the kill cut off
    assert {float(value) for array in values.values() for value in array[:: len(array) - 1]} == {float(head["round"])}
    assert [path.name for path in folder.iterdir() if path.name.endswith(".new")] == []


# ---- a full disk ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where this user may make one."""
    place = tmp_path / "disk"
    place.mkdir()
    tool = shutil.which("mount")
    if (
        tool is None
        or subprocess.run([tool, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def big(value: float, round: int, size: int = 90_000) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, object]]:
    values = {"published.weight": np.full(size, value, np.float32)}
    return values, header(values, round)


def test_a_really_full_disk_costs_checkpoints_and_nothing_else(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(small_disk / "store", min_free_bytes=-(10**9)) as kept:  # so that only the disk itself says no
        assert kept.write(*big(1.0, 1))
        assert kept.write(*big(2.0, 2))
        assert not kept.write(*big(3.0, 3))
        assert not kept.write(*big(4.0, 4))
        assert [record.getMessage() for record in caplog.records] == [kept.trouble]
        assert "the disk is full; the one before is intact" in kept.trouble
        found = kept.read()
        assert found is not None
        assert found[1]["round"] == 2
        (kept.folder / store.BACKUP).unlink()
        assert kept.write(*big(5.0, 5))  # somebody made room
        assert kept.trouble == ""


def test_a_disk_that_says_full_in_mid_write_leaves_the_one_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    calls = []

    def full(handle: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data)

    with open_store(folder) as kept:
        save(kept, 1.0, 1)
        monkeypatch.setattr(os, "write", full)
        assert not save(kept, 2.0, 2)
        monkeypatch.undo()
        assert live(kept) == 1.0
        assert not list(folder.glob("*.new"))
        assert save(kept, 3.0, 3)


def test_too_little_room_is_said_once_before_anything_is_written(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(folder, min_free_bytes=10**18) as kept:
        assert not save(kept, 1.0, 1)
        assert not save(kept, 2.0, 2)
        assert kept.trouble.startswith("checkpoints stopped: ")
        assert "--min-free-mib" in kept.trouble
        assert len(caplog.records) == 1
        assert kept.read() is None


# ---- whose folder it is ---------------------------------------------------------------------------------------------------------------


def test_a_store_of_another_run_or_block_is_refused_with_both_names(folder: Path) -> None:
    open_store(folder).close()
    with pytest.raises(UsageError, match=r"holds block 2 of run 000102030405, not block 2 of run 000000000000: give another --store"):
        open_store(folder, OTHER)
    with pytest.raises(UsageError, match=r"holds block 2 of run 000102030405, not block 1 of run 000102030405"):
        open_store(folder, block=1)
    assert store.peek(folder) == (RUN, 2)
    open_store(folder).close()  # a refusal leaves no lock


def test_a_checkpoint_copied_from_another_block_is_refused(folder: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "other", block=1) as other:
        save(other)
    with open_store(folder) as kept:
        shutil.copy(tmp_path / "other" / store.CHECKPOINT, folder)
        with pytest.raises(UsageError, match="is a checkpoint of block 1 of run 000102030405, not of block 2"):
            kept.read()


def test_a_checkpoint_of_another_shape_is_refused(folder: Path) -> None:
    with open_store(folder) as kept:
        save(kept)
        assert kept.read({"live.weight": (3, 4)}) is not None
        with pytest.raises(UsageError, match=r"another shape: live\.weight is 3×4, this run needs 4×4"):
            kept.read({"live.weight": (4, 4)})
        with pytest.raises(UsageError, match=r"another shape: it has no tensor live\.bias"):
            kept.read({"live.bias": (4,)})


def test_an_explicit_store_in_use_is_refused_and_says_by_whom(folder: Path) -> None:
    with open_store(folder), pytest.raises(UsageError, match=rf"is in use by another node \(process {os.getpid()}\)"):
        open_store(folder)
    open_store(folder).close()


def test_the_default_store_takes_the_next_free_suffix_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Store.open(None, RUN, 2, root=folder) as first, Store.open(None, RUN, 2, root=folder) as second:
        assert (first.folder.name, second.folder.name) == ("block-2", "block-2-2")
        assert [record.getMessage() for record in caplog.records] == [
            f"the store {folder} is used by another node; this one uses {folder}-2"
        ]
    with Store.open(None, RUN, 2, root=folder) as again:
        assert again.folder == folder


def test_of_processes_that_race_for_one_store_each_gets_one_of_its_own(folder: Path) -> None:
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from blocktrain.node.store import Store
        sys.stdin.readline()
        with Store.open(None, bytes(range(32)), 2, root=Path(sys.argv[1])) as kept:
            print(kept.folder.name, flush=True)
            sys.stdin.readline()
    """)
    racers = [
        subprocess.Popen([sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        names = sorted(racer.stdout.readline().strip() for racer in racers if racer.stdout is not None)
        assert names == ["block-2", "block-2-2", "block-2-3"]
    finally:
        for racer in racers:
            racer.communicate("end\n", timeout=30)


def test_a_killed_process_leaves_no_lock(folder: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(UsageError, match=rf"process {holder.pid}"):
        open_store(folder)
    holder.kill()
    holder.communicate(timeout=30)
    open_store(folder).close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot use the store .*file: File exists; give a folder you may write to with --store"):
        open_store(tmp_path / "file")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "store.json").write_text("{")
    with pytest.raises(UsageError, match=r"store\.json is damaged or of another version: move the folder"):
        open_store(tmp_path / "broken")


def test_the_default_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with Store.open(None, RUN, 2) as kept:
        assert kept.folder == tmp_path / "blocktrain" / "000102030405" / "block-2"


# ---- what lies beside -----------------------------------------------------------------------------------------------------------------


def test_peers_and_manifest_are_kept_for_the_next_start(folder: Path) -> None:
    manifest = recipe_file.load_recipe("tiny")
    with open_store(folder, manifest.run) as kept:
        assert kept.load_peers() == []
        assert kept.load_manifest() is None
        kept.save_peers([f"/ip4/203.0.113.{n}/tcp/1/p2p/x" for n in range(200)])
        kept.save_manifest(manifest.to_bytes())
    with open_store(folder, manifest.run) as kept:
        assert kept.load_peers()[:2] == ["/ip4/203.0.113.0/tcp/1/p2p/x", "/ip4/203.0.113.1/tcp/1/p2p/x"]
        assert len(kept.load_peers()) == store.MAX_PEERS_KEPT
        assert kept.load_manifest() == manifest


@pytest.mark.parametrize("text", ["{", '{"a": 1}', '["/ip4/1.2.3.4/tcp/1", 7, null]', "[" * 100_000])
def test_damaged_peers_and_manifest_are_not_used(folder: Path, text: str) -> None:
    with open_store(folder) as kept:
        (folder / "peers.json").write_text(text)
        (folder / "manifest.msgpack").write_bytes(b"\x81\xa1a\x01")
        assert kept.load_peers() in ([], ["/ip4/1.2.3.4/tcp/1"])
        assert kept.load_manifest() is None


def test_small_files_are_never_half_written(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(folder) as kept:
        kept.save_peers(["/ip4/1.2.3.4/tcp/1"])

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        kept.save_peers(["/ip4/5.6.7.8/tcp/1"])
        assert kept.load_peers() == ["/ip4/1.2.3.4/tcp/1"]
        assert "cannot write" in caplog.text
        assert json.loads((folder / "peers.json").read_text()) == ["/ip4/1.2.3.4/tcp/1"]
        assert not list(folder.glob("*.new"))
