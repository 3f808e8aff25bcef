"""The nodes of this user on this machine: a folder with one small file each, rewritten every second and removed at the end.

That is how `blocktrain status` finds nodes without a network, and how a client without `--initial-peers` finds an address. A file whose
process is gone (or whose number another process has by now) is swept away by whoever reads, or writes the next; one that is no longer
rewritten is shown as silent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from blocktrain.node import leftovers
from blocktrain.node.logs import once_a_minute
from blocktrain.node.status import MAX_STATUS_BYTES, Status
from blocktrain.protocol.errors import Malformed, UsageError

FOLDER_VARIABLE: Final = "BLOCKTRAIN_RUNTIME_DIR"
MAX_FILES: Final = 1000
WRITE_EVERY_S: Final = 1.0

log = logging.getLogger(__name__)


def runtime_folder() -> Path:
    """The folder, created for this user alone. Raises: UsageError: it cannot be made, or belongs to somebody else."""
    given = os.environ.get(FOLDER_VARIABLE)
    session = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    if given:
        folder = Path(given).expanduser()
    elif os.access(session, os.W_OK | os.X_OK):
        folder = Path(session) / "blocktrain"
    else:
        folder = Path(tempfile.gettempdir()) / f"blocktrain-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.lstat()
    except OSError as error:
        raise UsageError(f"cannot use the runtime folder {folder}: {error.strerror}; name another with {FOLDER_VARIABLE}") from error
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        raise UsageError(f"the runtime folder {folder} belongs to another user; name another with {FOLDER_VARIABLE}")
    return folder


class StatusFile:
    """Our own file. A context manager: leaving it removes the file. Writing never raises: a full disk must not end a node."""

    def __init__(self, folder: Path | None = None) -> None:
        """Those of nodes that are gone are removed. Raises: UsageError: no usable folder."""
        self._folder = runtime_folder() if folder is None else folder
        leftovers.sweep_statuses(self._folder)
        self.path = self._folder / f"node-{os.getpid()}.json"

    def write(self, status: Status) -> None:
        """Replace the file in one step. Not flushed to the disk: it does not outlive the process."""
        new = self.path.with_suffix(".new")
        try:
            new.write_text(status.to_json(), encoding="utf-8")
            os.replace(new, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            if once_a_minute(f"status file {self.path}"):
                log.warning("cannot write the status file %s: %s", self.path, error.strerror)

    def remove(self) -> None:
        for path in (self.path, self.path.with_suffix(".new")):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def sweep(folder: Path | None = None) -> Path:
    """Remove what nodes of this user that were killed have left on this machine. Returns the runtime folder.

    Raises: UsageError: no usable folder.
    """
    place = runtime_folder() if folder is None else folder
    leftovers.sweep_statuses(place)
    leftovers.sweep_sockets()
    return place


def read_local(clock: Callable[[], float], folder: Path | None = None) -> list[Status]:
    """What this user's nodes on this machine last said, by process number. What nodes that are gone have left is removed.

    Args:
        clock: Unix seconds, to tell how old a snapshot is.
    Raises: UsageError: no usable folder.
    """
    place = sweep(folder)
    out: list[Status] = []
    for path in sorted(place.glob("node-*.json"))[:MAX_FILES]:
        try:
            with path.open("rb") as file:
                status = Status.from_json(file.read(MAX_STATUS_BYTES + 1))
        except OSError:
            continue  # it ended between two lines of ours
        except Malformed as error:
            log.debug("%s is not read: %s", path, error)
            continue
        age_s = max(0.0, clock() - status.written_at)
        out.append(dataclasses.replace(status, silent_s=age_s if age_s > WRITE_EVERY_S else 0.0))
    return out
