"""What happens to a node, as JSON lines for machines: `--events FILE`. The talk on stderr is for people, and leaves most of it out.

Every line has `at` (Unix seconds by the node's clock) and `what`; the rest depends on that:

    began       round, digest, fresh                                    the process is up with this published state
    phase       phase                                                   starting, joining, fetching, training, serving, stopping
    published   how (merged, own, fetched), round, digest, peer, …      the published state changed; `peer`: with whom, from whom
    exchange    exchange, peer, ours, ends_at                           one begins; at `ends_at` it must be through
    judged      exchange, peer, ok, reason, merge, and acceptance.Measures   of a merge (its digest), before it is used or refused
    ended       exchange, peer, kind, reason, took_s                    the exchange is over
    blamed      peer, reason, offence                                   what a peer did outside an exchange
    fetch       reason                                                  a download ended, "" where it worked

Each line is written when it happens, so a killed process leaves all that it said. Beyond `FILE_BYTES` the file becomes FILE.1.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import math
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from blocktrain.protocol import facts as f
from blocktrain.protocol.errors import UsageError

FILE_BYTES: Final = 64 * 1024 * 1024  # months of rounds of half a minute
DIGEST_CHARS: Final = 16  # of a digest in hex, as in a status

Note = Callable[..., None]


def silent(what: str, **details: object) -> None:
    """Nobody listens."""


class Events:
    """The file. Use it as a context manager. `path` None: nothing is written. `clock` is Unix seconds.

    Raises: UsageError: it cannot be written.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._phase = ""
        self._file: _Lines | None = None
        if path is not None:
            try:
                self._file = _Lines(path.expanduser(), maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8")
            except OSError as error:
                raise UsageError(f"--events {path} cannot be written: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def note(self, what: str, **details: object) -> None:
        """One line. Never blocks for long, never fails."""
        if self._file is not None:
            line = json.dumps({"at": round(self._clock(), 3), "what": what, **{key: _plain(value) for key, value in details.items()}})
            self._file.emit(logging.makeLogRecord({"msg": line}))

    def fact(self, fact: f.Fact, phase: str) -> None:
        """What the core was told, as far as it is worth a line, and the core's phase after it."""
        match fact:
            case f.Began():
                self.note("began", round=fact.round, digest=fact.digest, fresh=fact.fresh)
            case f.Ended():
                result = fact.result
                self.note("ended", exchange=fact.exchange, peer=fact.peer, kind=result.kind, reason=result.why, took_s=fact.took_s)
            case f.Blamed():
                self.note("blamed", peer=fact.peer, reason=fact.why, offence=fact.offence)
            case f.FetchEnded():
                self.note("fetch", reason=fact.why)
            case _:
                pass
        if phase != self._phase:
            self._phase = phase
            self.note("phase", phase=phase)


def _plain(value: object) -> object:
    """Bytes as the start of their hex digits; numbers that JSON does not have as null."""
    if isinstance(value, bytes):
        return value.hex()[:DIGEST_CHARS]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


class _Lines(logging.handlers.RotatingFileHandler):
    """A file that complains to nobody: a full disk is the store's to report."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass
