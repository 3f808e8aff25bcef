"""What a program of ours that was killed leaves on this machine, and its removal by the next one of the same user.

That is a node's status file (local.py) and its daemon's two sockets; both have the number of the process in their names. A key is never
among them: a temporary identity has no file. Nothing goes that belongs to a living process, or to somebody else.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
from pathlib import Path
from typing import Final

SOCKETS: Final = Path("/tmp")  # the daemon's own habit, and short: a socket's path has at most 107 bytes
_SOCKET_NAME: Final = re.compile(r"hivemind-blocktrain-(\d+)-[0-9a-f]+-(p2pd|client)\.sock")
_CLOCK_SLACK_S: Final = 2.0  # between a file's time and a process's start, whose resolution is coarse


def sweep_sockets() -> None:
    """Remove sockets of processes that are gone. One stays where somebody listens: a daemon that is ending, or one of another container."""
    for path in SOCKETS.glob("hivemind-blocktrain-*.sock"):
        match = _SOCKET_NAME.fullmatch(path.name)
        if match is None:
            continue
        with contextlib.suppress(OSError):
            about = path.lstat()
            ours = about.st_uid == os.getuid() and stat.S_ISSOCK(about.st_mode)
            if ours and not _alive(int(match[1]), about.st_mtime) and _refuses(path):
                path.unlink()


def sweep_statuses(folder: Path) -> None:
    """Remove status files of processes that are gone from a runtime folder, which is this user's alone."""
    for path in (*folder.glob("node-*.json"), *folder.glob("node-*.new")):
        digits = path.stem.removeprefix("node-")
        with contextlib.suppress(OSError):
            if not digits.isdigit() or not _alive(int(digits), path.stat().st_mtime):
                path.unlink()


def _alive(pid: int, written_at: float) -> bool:
    """Whether the process that wrote then still runs, and the number is not another's by now."""
    import psutil

    try:
        process = psutil.Process(pid)
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= written_at + _CLOCK_SLACK_S)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def _refuses(path: Path) -> bool:
    """Whether nobody listens at a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
