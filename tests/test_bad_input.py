"""Every mistake gets one line that says what, where and how to mend it, the right exit code, and loses nothing.

The whole command runs in this process, with the real checks in the order of a real start. What needs a swarm stands in test_service.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from blocktrain.node import bootstrap, identity, logs
from blocktrain.node.commands import app
from blocktrain.node.compute.replica import Options, TorchReplica
from blocktrain.node.recipe_file import load_recipe
from blocktrain.node.store import Store
from blocktrain.protocol.ids import peer_id_of_key
from blocktrain.protocol.manifest import Manifest
from tests.swarm_kit import Text, manifest, recipe

PEER = peer_id_of_key(bytes(32))
OTHER = peer_id_of_key(bytes(range(32)))


@dataclass
class Place:
    """A folder with a good recipe and good data, and what a good host's command line is."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run.toml"

    @property
    def data(self) -> Path:
        return self.folder / "text.txt"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def host(self, *more: str) -> list[str]:
        given = {"--new-run": str(self.run), "--data": str(self.data), "--store": str(self.store), "--host-maddrs": "/ip4/127.0.0.1/tcp/0"}
        kept = [word for flag, value in given.items() if flag not in more for word in (flag, value)]
        return [*kept, *more]

    def contents(self) -> dict[str, bytes]:
        """Everything under the folder but what every start may write: locks and talk."""
        names = {"lock", "debug.log", "store.json", "manifest.msgpack"}
        files = [path for path in self.folder.rglob("*") if path.is_file() and path.name not in names and path.suffix not in (".lock",)]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files if os.access(path, os.R_OK)}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name in [name for name in os.environ if name.startswith("BLOCKTRAIN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BLOCKTRAIN_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    here = Place(tmp_path / "here")
    here.folder.mkdir()
    here.run.write_text(recipe())
    here.data.write_bytes(b"the river runs down to the sea; " * 200)
    yield here
    logs.forget_debug_file()
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, logs._ForPeople)]:
        root.removeHandler(handler)


Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], place: Place) -> Refused:
    """Run `blocktrain-node`; it must end with this code and one error line, and change no file that was there. Returns the line."""

    def run(argv: list[str], code: int = 2) -> str:
        before = place.contents()
        capsys.readouterr()
        assert app.node_main(argv) == code
        out, err = capsys.readouterr()
        errors = [line for line in err.splitlines() if line.startswith("blocktrain: error: ")]
        assert len(errors) == 1, err
        assert err.splitlines()[-1] == errors[0], err
        assert out == ""
        assert "Traceback" not in err
        assert len(errors[0]) < 1100
        after = place.contents()
        assert {name: after.get(name) for name in before} == before
        return errors[0]

    return run


# ---- addresses --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("nonsense", "nonsense"),
        ("/ip4/127.0.0.1/tcp/1", "/p2p/"),
        (f"/ip4/999.0.0.1/tcp/1/p2p/{PEER}", "999.0.0.1"),
        (f"/ip4/127.0.0.1/tcp/99999/p2p/{PEER}", "99999"),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{PEER[:-1]}", "cut off or damaged"),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{PEER[:-3]}", "cut off or damaged"),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{PEER[1:]}", "cut off or damaged"),
        ("http://example.org", "http"),
        ("", "--initial-peers"),
    ],
)
def test_a_malformed_address_is_named(refused: Refused, address: str, says: str) -> None:
    line = refused(["--block", "0", "--initial-peers", address])
    assert says in line


def test_dead_initial_peers_are_each_named_with_their_reason(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "TRY_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            gone = f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}/p2p/{PEER}"
        silent = f"/ip4/127.0.0.1/tcp/{mute.getsockname()[1]}/p2p/{OTHER}"
        line = refused(["--block", "0", "--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--initial-peers", gone, silent], code=3)
    assert f"{gone}: nobody listens there (connection refused)" in line
    assert f"{silent}: " in line


def test_a_port_in_use_is_named(refused: Refused, place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in refused(place.host("--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}"))


@pytest.mark.parametrize("address", ["/ip4/0.0.0.0/tcp/31337", "/ip4/203.0.113.7/tcp/0", "what"])
def test_an_address_that_nobody_could_dial_is_not_announced(refused: Refused, place: Place, address: str) -> None:
    line = refused(place.host("--host-maddrs", "/ip4/0.0.0.0/tcp/0", "--announce-maddrs", address))
    assert "--announce-maddrs" in line
    assert address in line


# ---- run, block, recipe -----------------------------------------------------------------------------------------------------------------


def test_neither_a_run_nor_a_way_to_one(refused: Refused) -> None:
    line = refused([])
    assert "--new-run" in line
    assert "--initial-peers" in line


@pytest.mark.parametrize("block", ["3", "-1", "x", "1.5", "999999999999999999999"])
def test_a_block_out_of_range(refused: Refused, place: Place, block: str) -> None:
    line = refused(place.host("--block", block))
    assert block in line
    assert "block" in line


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("blocks = 3", "blocks = 3\nblokcs = 4"), "blokcs"),
        (lambda text: text.replace("seed = 0", "# no seed", 1), "seed"),
        (lambda text: text.replace("[noise]", "[nois]"), "noise"),
        (lambda text: text.replace("blocks = 3", "blocks = 0"), "blocks"),
        (lambda text: text.replace("blocks = 3", 'blocks = "three"'), "blocks"),
        (lambda text: text.replace("width = 32", "width = 33"), "width"),
        (lambda text: text.replace("heads = 4", "heads = 0"), "heads"),
        (lambda text: text.replace("sigma_low = 0.2", "sigma_low = 9.0"), "sigma"),
        (lambda text: text.replace("learning_rate = 4e-3", "learning_rate = nan"), "learning_rate"),
        (lambda text: text + "\n[[", "TOML"),
        (lambda text: "", "format"),
        (lambda text: "x" * 100_000, "too large"),
    ],
)
def test_a_recipe_with_a_mistake(refused: Refused, place: Place, change: Callable[[str], str], says: str) -> None:
    text = change(recipe())
    assert text != recipe()
    place.run.write_text(text)
    line = refused(place.host())
    assert says in line
    assert "run.toml" in line


def test_a_recipe_that_is_not_there_or_cannot_be_read(refused: Refused, place: Place) -> None:
    assert "nowhere.toml" in refused(place.host("--new-run", "nowhere.toml"))
    assert "directory" in refused(place.host("--new-run", str(place.folder))).lower()
    place.run.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in refused(place.host())


# ---- data -------------------------------------------------------------------------------------------------------------------------------


def test_data_that_is_not_there_empty_or_too_short(refused: Refused, place: Place) -> None:
    assert "nowhere.txt" in refused(place.host("--data", "nowhere.txt"))
    place.data.write_bytes(b"")
    assert "text.txt" in refused(place.host())
    place.data.write_bytes(b"short")
    line = refused(place.host())
    assert "too short" in line
    assert "66" in line  # what would be enough: two sequences of 33
    folder = place.folder / "empty"
    folder.mkdir()
    assert "empty" in refused(place.host("--data", str(folder)))


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_data_that_this_user_may_not_read(refused: Refused, place: Place) -> None:
    place.data.chmod(0)
    assert "text.txt" in refused(place.host())


def test_a_device_that_is_not_here(refused: Refused, place: Place) -> None:
    assert "gpu" in refused(place.host("--device", "gpu"))
    if not torch.cuda.is_available():
        assert "cuda" in refused(place.host("--device", "cuda"), code=5)
    else:
        assert "cuda:99" in refused(place.host("--device", "cuda:99"), code=5)


# ---- identity and store -----------------------------------------------------------------------------------------------------------------


def test_an_identity_in_use(refused: Refused, place: Place) -> None:
    path = place.folder / "me.key"
    with identity.load_or_create(path):
        line = refused(place.host("--identity", str(path)))
    assert "me.key is in use" in line
    assert str(os.getpid()) in line


@pytest.mark.parametrize("length", [0, 1, 20, 67, 100])
def test_a_damaged_identity_is_left_alone(refused: Refused, place: Place, length: int) -> None:
    path = place.folder / "me.key"
    identity.load_or_create(path).release()
    whole = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes((whole + bytes(100))[:length])
    line = refused(place.host("--identity", str(path)))
    assert "me.key" in line
    assert "backup" in line


def test_an_identity_that_is_a_folder_and_a_store_that_is_a_file(refused: Refused, place: Place) -> None:
    assert "folder" in refused(place.host("--identity", str(place.folder)))
    assert "file" in refused(place.host("--store", str(place.data)))


def test_a_store_in_use_or_of_another_run_or_block(refused: Refused, place: Place) -> None:
    run = load_recipe(place.run)
    with Store.open(place.store, run.run, 0):
        assert "in use" in refused(place.host())
    line = refused(place.host("--block", "1"))
    assert "block 0" in line
    assert "block 1" in line
    place.run.write_text(recipe(seed="7"))
    assert "--store" in refused(place.host())


def test_a_store_without_anything_to_go_on_with(refused: Refused, place: Place) -> None:
    assert "no store" in refused(["--store", str(place.store)])
    Store.open(place.store, load_recipe(place.run).run, 0).close()
    assert "manifest" in refused(["--store", str(place.store)])
    (place.store / "store.json").write_text("{")
    assert "damaged" in refused(["--store", str(place.store)])


async def write_checkpoint(place: Place, run: Manifest) -> None:
    """A checkpoint of a block of another shape in the store of the right run, as if somebody had copied it."""
    with Store.open(place.store, load_recipe(place.run).run, 0, min_free_bytes=0) as store:
        writer = TorchReplica(run, 0, Text(run), store, Options(device="cpu"))
        await writer.publish_own()
        await writer.save()
        await writer.stop()


def test_a_checkpoint_of_another_shape(refused: Refused, place: Place) -> None:
    asyncio.run(write_checkpoint(place, manifest(width="64")))
    assert (place.store / "checkpoint.safetensors").exists()
    line = refused(place.host())
    assert "shape" in line
    assert str(place.store) in line


def test_a_damaged_checkpoint_is_a_clear_end_and_stays_for_whoever_can_mend_it(refused: Refused, place: Place) -> None:
    Store.open(place.store, load_recipe(place.run).run, 0).close()
    (place.store / "checkpoint.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{broken json      ")
    line = refused(place.host())
    assert "checkpoint" in line
    assert str(place.store) in line


# ---- contradictions ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--ttl-s", "5", "--refresh-s", "5"], "--refresh-s"),
        (["--ttl-s", "1000"], "--ttl-s"),
        (["--tau-s", "0"], "tau"),
        (["--tau-s", "nan"], "tau"),
        (["--rounds", "0"], "rounds"),
        (["--threads", "0"], "threads"),
        (["--codec", "gzip"], "gzip"),
        (["--topology", "star"], "star"),
        (["--heldout-margin", "-1"], "heldout"),
        (["--checkpoint-every-s", "0"], "checkpoint"),
        (["--log-level", "loud"], "loud"),
        (["--no-such-flag"], "no-such-flag"),
        (["--run", "tiny"], "--run"),
        (["--public", "--relay", f"/ip4/203.0.113.7/tcp/1/p2p/{PEER}"], "--relay"),
    ],
)
def test_settings_that_cannot_be_meant(refused: Refused, place: Place, more: list[str], says: str) -> None:
    assert says in refused(place.host(*more))


def test_signals_are_as_before_after_a_refusal(refused: Refused, place: Place) -> None:
    before = signal.getsignal(signal.SIGINT)
    refused(place.host("--data", "nowhere.txt"))
    assert signal.getsignal(signal.SIGINT) is before
