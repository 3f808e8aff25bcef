"""What programs that were killed have left is removed by the next of the same user; what belongs to the living, or to others, stays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from blocktrain.node import leftovers, local
from blocktrain.node.local import StatusFile
from blocktrain.node.status import Status


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sockets and status files lie; short, as a socket's path has to be."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(leftovers, "SOCKETS", Path(name))
        monkeypatch.setenv(local.FOLDER_VARIABLE, name)
        yield Path(name)


@pytest.fixture
def listening(folder: Path) -> Iterator[Callable[[int], tuple[Path, socket.socket]]]:
    """Listens at the socket of a process's daemon. The file stays when the socket is closed."""
    with ExitStack() as stack:

        def listen(pid: int) -> tuple[Path, socket.socket]:
            path = folder / f"hivemind-blocktrain-{pid}-0a1b2c-p2pd.sock"
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(path))
            server.listen()
            return path, server

        yield listen


def a_number_of_nobody() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def killed(folder: Path) -> list[Path]:
    """What a node's process left that was killed with its sockets open, in the middle of writing its status."""
    program = (
        "import os, signal, socket\n"
        "from pathlib import Path\n"
        "from blocktrain.node.local import StatusFile\n"
        "from blocktrain.node.status import Status\n"
        "own = StatusFile()\n"
        "own.write(Status())\n"
        "own.path.with_suffix('.new').write_text('{')\n"
        "for kind in ('p2pd', 'client'):\n"
        "    socket.socket(socket.AF_UNIX).bind(str(own.path.with_name(f'hivemind-blocktrain-{os.getpid()}-0a1b2c-{kind}.sock')))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        assert process.wait(60) == -signal.SIGKILL
    left = list(folder.glob(f"*-{process.pid}*"))
    assert len(left) == 4
    return left


def test_what_a_killed_node_left_goes_when_somebody_looks_for_nodes(folder: Path) -> None:
    assert killed(folder)
    assert local.read_local(time.time) == []
    assert list(folder.iterdir()) == []


def test_the_next_node_removes_a_killed_ones_status_and_not_a_living_ones(folder: Path) -> None:
    living = folder / f"node-{os.getppid()}.json"
    living.write_text(Status().to_json())
    assert killed(folder)
    with StatusFile() as own:
        own.write(Status())
        assert set(folder.glob("node-*")) == {living, own.path}


def test_a_socket_at_which_somebody_listens_stays_even_if_its_process_is_not_to_be_seen(
    listening: Callable[[int], tuple[Path, socket.socket]],
) -> None:
    path, server = listening(a_number_of_nobody())  # as another container's would look
    leftovers.sweep_sockets()
    assert path.exists()
    server.close()
    leftovers.sweep_sockets()
    assert not path.exists()


def test_a_living_processs_socket_stays_though_nobody_listens_yet(listening: Callable[[int], tuple[Path, socket.socket]]) -> None:
    path, server = listening(os.getpid())
    server.close()
    leftovers.sweep_sockets()
    assert path.exists()
    os.utime(path, (1_000_000, 1_000_000))  # from long before this process began: the number was another's
    leftovers.sweep_sockets()
    assert not path.exists()


def test_what_is_not_ours_is_let_alone(
    folder: Path, listening: Callable[[int], tuple[Path, socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    number = a_number_of_nobody()
    path, server = listening(number)
    server.close()
    others = [folder / "hivemind-p2pd-abc.sock", folder / f"hivemind-blocktrain-{number}-xyz-p2pd.sock", folder / "notes.json"]
    others.append(folder / f"hivemind-blocktrain-{number}-ffff-client.sock")  # a file, no socket
    for other in others:
        other.touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
        leftovers.sweep_sockets()
        assert path.exists(), "another user's"
    local.sweep()
    assert sorted(folder.iterdir()) == sorted(others)
