"""Files that were prepared once and are kept: a cleaned excerpt, a fetched data set, a text as tokens.

They lie in the user's cache folder, may be deleted at any time, and are written beside and renamed, so that half a file is never used. Of
several nodes that need the same one, one prepares it and the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

from blocktrain.protocol.errors import UsageError

MIN_FREE_BYTES: Final = 500 * 1024 * 1024  # preparing stops before it fills the disk
REPORT_EVERY_S: Final = 5.0
WAIT_FOR_OTHER_S: Final = 3600.0  # then we prepare it ourselves: both write the same bytes
_POLL_S: Final = 0.2

Report = Callable[[str], None]

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("blocktrain"))


class Progress:
    """Says what goes on, at most every few seconds. `report` may raise to give up: nothing is left behind then."""

    def __init__(self, report: Report | None, every_s: float = REPORT_EVERY_S) -> None:
        self._report = log.info if report is None else report
        self._every_s = every_s
        self._last = time.monotonic()

    def say(self, text: str) -> bool:
        """True if it was time to say it: time, too, for checks that cost something."""
        if time.monotonic() - self._last < self._every_s:
            return False
        self._last = time.monotonic()
        self._report(text)
        return True


def prepared(folder: Path, name: str, make: Callable[[IO[bytes]], None], progress: Progress) -> Path:
    """The file `name` in the cache, made by `make` unless it is there.

    Raises: UsageError: the folder cannot be written or the disk is (nearly) full; and whatever `make` raises.
    """
    path = folder / name
    if path.is_file():
        return path
    new = folder / f"{name}.{os.getpid()}.new"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _turn(folder / f"{name}.lock", path, progress) as alone:
            if alone:
                for left_over in folder.glob(f"{glob.escape(name)}.*.new"):  # of a process that was killed
                    left_over.unlink(missing_ok=True)
            if not path.is_file():
                with new.open("wb") as file:
                    make(file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(new, path)
    except OSError as error:
        raise UsageError(f"cannot prepare {path}: {error.strerror or error}; XDG_CACHE_HOME chooses another folder") from error
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
    return path


def check_room(folder: Path) -> None:
    """Raises: UsageError: the disk is nearly full."""
    if shutil.disk_usage(folder).free < MIN_FREE_BYTES:
        raise UsageError(
            f"the disk of {folder} is nearly full ({MIN_FREE_BYTES // 2**20} MiB are kept free): make room, or set XDG_CACHE_HOME"
        )


@contextlib.contextmanager
def _turn(lock: Path, path: Path, progress: Progress) -> Iterator[bool]:
    """Our turn to make `path`: nobody else does, or somebody has just done it. False: somebody still does, after all the waiting."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        alone = False
        deadline = time.monotonic() + WAIT_FOR_OTHER_S
        while not alone and time.monotonic() < deadline:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                progress.say(f"another process prepares {path.name}")
                time.sleep(_POLL_S)
        yield alone
        lock.unlink(missing_ok=True)
    finally:
        os.close(handle)
