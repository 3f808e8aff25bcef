"""What a node says: one line an event on stderr for people, everything in a bounded debug file for whoever looks into a fault.

stderr is talk (`12:03:44 info  joined run tiny`): no tracebacks, no control characters from peers, no line of a library unless it is an
asyncio error. The debug file lies in the store, holds tracebacks and libraries' lines, and rotates, so that it cannot fill a disk. What
would repeat goes through `once_a_minute`.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO

from blocktrain.protocol.errors import UsageError

LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
DEBUG_FILE: Final = "debug.log"
DEBUG_FILE_BYTES: Final = 5 * 1024 * 1024  # days of a healthy node
DEBUG_FILES_KEPT: Final = 2
MAX_LINE_CHARS: Final = 1000  # a peer's words can be in a line
MAX_KEYS: Final = 1000  # different lines that a rate limiter remembers

_WORDS: Final = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warn", logging.ERROR: "error", logging.CRITICAL: "error"}
_COLOURS: Final = {logging.DEBUG: "\033[2m", logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[31m"}
_RESET: Final = "\033[0m"


def setup(level: str = "info", stream: TextIO | None = None) -> None:
    """Say lines of at least `level` on `stream` (stderr by default). May be called again; the last call holds.

    Raises: UsageError: a level that does not exist.
    """
    if level not in LEVELS:
        raise UsageError(f"log level {level!r} does not exist; use one of {', '.join(LEVELS)}")
    out = sys.stderr if stream is None else stream
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _ForPeople)]:
        root.removeHandler(old)
    handler = _ForPeople(out)
    handler.setLevel(LEVELS[level])
    handler.setFormatter(OneLine(colours=_colourful(out)))
    root.addHandler(handler)
    logging.getLogger("blocktrain").setLevel(logging.DEBUG)
    logging.captureWarnings(True)


def keep_debug_file(folder: Path) -> Path | None:
    """Write everything, tracebacks too, to `folder`/debug.log from now on (and to no earlier one). None where that cannot be written."""
    forget_debug_file()
    path = folder / DEBUG_FILE
    try:
        handler = _DebugFile(path, maxBytes=DEBUG_FILE_BYTES, backupCount=DEBUG_FILES_KEPT, encoding="utf-8")
    except OSError as error:
        logging.getLogger(__name__).warning("no debug file: cannot write %s: %s", path, error.strerror)
        return None
    handler.setFormatter(
        logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)-7s %(threadName)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    logging.getLogger().addHandler(handler)
    return path


def debug_file() -> Path | None:
    """Where the debug file is, if one is kept."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _DebugFile):
            return Path(handler.baseFilename)
    return None


def forget_debug_file() -> None:
    """Close the debug file, if one is kept."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _DebugFile)]:
        root.removeHandler(handler)
        handler.close()


class OneLine(logging.Formatter):
    """`12:03:44 info  text`: local time, no traceback, nothing that could steer a terminal."""

    def __init__(self, *, colours: bool = False) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {_WORDS.get(record.levelno, record.levelname.lower()):5} {one_line(record.getMessage())}"
        colour = _COLOURS.get(record.levelno, "") if self._colours else ""
        return f"{colour}{line}{_RESET}" if colour else line


def one_line(text: str) -> str:
    """`text` on one line, without control characters, of bounded length."""
    clean = "".join(char if char.isprintable() else " " for char in " ".join(text[: 4 * MAX_LINE_CHARS].split()))
    return clean if len(clean) <= MAX_LINE_CHARS else clean[: MAX_LINE_CHARS - 1] + "…"


class OncePer:
    """Lets a line through once in `period_s`, by a key. `clock` is monotonic seconds."""

    def __init__(self, period_s: float, clock: Callable[[], float] = time.monotonic, most_keys: int = MAX_KEYS) -> None:
        self._period_s = period_s
        self._clock = clock
        self._most_keys = most_keys
        self._last: dict[str, tuple[float, int]] = {}  # key → when it was let through, how many were held back since

    def ready(self, key: str) -> int | None:
        """None: hold the line back. Otherwise say it; the number is how many were held back since the last."""
        now = self._clock()
        said_at, held = self._last.get(key, (None, 0))
        if said_at is not None and now - said_at < self._period_s:
            self._last[key] = (said_at, held + 1)
            return None
        self._last.pop(key, None)  # so that the newest is last, and the oldest goes first when there are too many
        self._last[key] = (now, 0)
        while len(self._last) > self._most_keys:
            del self._last[next(iter(self._last))]
        return held


_minute: Final = OncePer(60.0)


def once_a_minute(key: str) -> bool:
    """True if a line of this key was not said within the last minute: `if once_a_minute(f"dial {peer}"): log.info(…)`."""
    return _minute.ready(key) is not None


def say_once_a_minute(log: logging.Logger, level: int, key: str, text: str) -> None:
    """Log `text` unless `key` was logged within the last minute; it says how often that happened. The debug file gets every one."""
    held = _minute.ready(key)
    if held is None:
        log.debug("%s (not said again)", text)
    else:
        log.log(level, "%s%s", text, f" ({held} more times in between)" if held else "")


def _colourful(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class _ForPeople(logging.StreamHandler[TextIO]):
    """Our own lines, and asyncio's errors (a task nobody awaited is our bug); libraries talk to the debug file."""

    def filter(self, record: logging.LogRecord) -> bool:
        ours = record.name == "blocktrain" or record.name.startswith("blocktrain.")
        bug = record.name == "asyncio" and record.levelno >= logging.ERROR
        return (ours or bug) and bool(super().filter(record))

    def handleError(self, record: logging.LogRecord) -> None:
        """A terminal that went away must not stop a node, nor print about itself."""


class _DebugFile(logging.handlers.RotatingFileHandler):
    """Never complains: a full disk is the store's to report."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass
