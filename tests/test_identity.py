"""Who a node is: the key file, its lock, and signatures that need nobody else."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.node import identity
from blocktrain.node.identity import Identity
from blocktrain.protocol import ids
from blocktrain.protocol.errors import UsageError
from tests.conftest import MakeNet


def test_a_new_identity_is_kept_privately_in_the_daemons_format(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "node.key"
    with identity.load_or_create(path) as made:
        peer = made.peer_id
    data = path.read_bytes()
    assert (len(data), data[:4]) == (68, bytes.fromhex("08011240"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert ids.key_of_peer_id(peer) == data[-32:]
    assert sorted(each.name for each in path.parent.iterdir()) == ["node.key", "node.key.lock"]
    with identity.load_or_create(path) as again:
        assert again.peer_id == peer
    assert path.read_bytes() == data


@pytest.mark.real
async def test_the_daemon_takes_the_file_and_has_the_same_peer_id(net_factory: MakeNet, tmp_path: Path) -> None:
    with identity.load_or_create(tmp_path / "node.key") as mine:
        net = await net_factory(who=mine)
        other = await net_factory(net)  # TLS would refuse an address whose id is not the daemon's
        assert net.directory.addresses()[0].endswith(mine.peer_id)
        assert mine.peer_id in other.libp2p.neighbours()


def test_09_a_second_holder_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    with identity.load_or_create(path):
        with pytest.raises(UsageError, match=rf"in use by process {os.getpid()}: .*--identity"):
            identity.load_or_create(path)
        script = f"from pathlib import Path; from blocktrain.node import identity; identity.load_or_create(Path({str(path)!r}))"
        other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
        assert f"in use by process {os.getpid()}" in other.stderr
    identity.load_or_create(path).release()


def test_the_lock_ends_with_the_process_that_held_it(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    script = (
        "import os, signal; from pathlib import Path; from blocktrain.node import identity\n"
        f"held = identity.load_or_create(Path({str(path)!r})); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script], timeout=30, check=False)
    assert path.exists()
    identity.load_or_create(path).release()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (bytes.fromhex("0801"), "truncated"),
        (bytes.fromhex("08011240") + bytes(63), r"truncated \(67 of 68"),
        (bytes.fromhex("08011240") + bytes(70), "longer than 68"),
        (bytes.fromhex("08011240") + bytes(64), "damaged"),
        (bytes.fromhex("080012a709") + bytes(500), "RSA"),
        (b"-----BEGIN PRIVATE KEY-----", "no Ed25519 identity"),
    ],
)
def test_10_a_file_that_is_no_whole_key_is_refused_with_a_remedy_and_left_alone(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "node.key"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=says) as caught:
        identity.load_or_create(path)
    assert str(path) in str(caught.value)
    assert "move the file away" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == data
    path.unlink()
    identity.load_or_create(path).release()  # the refusal did not keep the lock


def test_places_that_cannot_hold_a_file_are_usage_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "node.key", tmp_path / "folder", Path("/proc/nowhere/node.key")):
        with pytest.raises(UsageError, match="--identity"):
            identity.load_or_create(path)


def test_a_temporary_identity_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with identity.temporary() as mine:
        assert list(tmp_path.iterdir()) == []
        assert mine.peer_id != identity.temporary().peer_id


@given(st.binary(max_size=200))
def test_a_signature_proves_the_peer_and_the_bytes(data: bytes) -> None:
    with identity.temporary() as mine, identity.temporary() as other:
        signature = mine.sign(data)
        assert len(signature) == 64
        assert Identity.verify(mine.peer_bytes, signature, data)
        assert not Identity.verify(other.peer_bytes, signature, data)
        assert not Identity.verify(mine.peer_bytes, signature, data + b"x")
        assert not Identity.verify(mine.peer_bytes, signature[:-1] + bytes([signature[-1] ^ 1]), data)


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_hostile_ids_and_signatures_are_a_plain_no(peer: bytes, signature: bytes) -> None:
    assert not Identity.verify(peer, signature, b"data")
    assert not Identity.verify(bytes.fromhex("002408011220") + bytes(32), signature, b"data")
