"""Text as one long row of tokens, split once into what is trained on and a held-out tail that never is.

Nothing is loaded whole: files are mapped into memory and a window is read where it is needed, so a corpus may be larger than memory.
Each source gives its own tail (the last twentieth, cut at a document, paragraph or line where there is one), so that what is held out is
of every kind that is trained on. Windows have `context + 1` tokens: inputs and, one place on, targets.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from blocktrain.protocol.errors import UsageError

HELDOUT_SHARE: Final = 0.05
BOUNDARY_SHARE: Final = 0.025  # the tail may be this much longer, to begin where something begins
MAX_BOUNDARY_BYTES: Final = 1024 * 1024  # how far back a beginning is looked for
MAPS_KEPT: Final = 64  # files mapped at once: each costs a descriptor, and a folder may hold a hundred thousand
LONG_READ: Final = 65536  # tokens; windows are shorter
_SAMPLES: Final = 256  # places that a fingerprint looks at
_SAMPLE_TOKENS: Final = 1024
_BOUNDARIES: Final = (b"\n\n\n", b"\n\n", b"\n")  # between documents (ours), paragraphs, lines

Array: TypeAlias = np.ndarray[Any, Any]


class Piece(Protocol):
    """A run of tokens in one place."""

    count: int

    def read(self, start: int, stop: int) -> Array:
        """Tokens start … stop; a view where possible. Raises: UsageError: the file changed under us."""
        ...

    def part(self, start: int, stop: int) -> Piece: ...

    def version(self) -> str:
        """Changes when the place is written to, for files made from it."""
        ...


class MemoryPiece:
    """Tokens that we hold."""

    def __init__(self, tokens: Array) -> None:
        self.count = len(tokens)
        self._tokens = tokens

    def read(self, start: int, stop: int) -> Array:
        return self._tokens[start:stop]

    def part(self, start: int, stop: int) -> MemoryPiece:
        return MemoryPiece(self._tokens[start:stop])

    def version(self) -> str:
        return ""


class Maps:
    """The files that are mapped now, the least used going first."""

    def __init__(self, most: int = MAPS_KEPT) -> None:
        self._most = most
        self._maps: OrderedDict[tuple[Path, str], Array] = OrderedDict()

    def get(self, path: Path, dtype: str, need_bytes: int) -> Array:
        try:
            # Reading a map past the end of a file that became shorter would kill the process, so its size is asked each time (1 µs).
            if os.stat(path).st_size < need_bytes:
                raise UsageError(f"{path} became shorter while it was being read: give data that does not change")
            key = (path, dtype)
            if key not in self._maps:
                self._maps[key] = _map(path, dtype)
                if len(self._maps) > self._most:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(key)
            return self._maps[key]
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {path} any more: {error}") from error


def _map(path: Path, dtype: str) -> Array:
    """A file as an array. Windows are small and all over the place: without the advice, systems read megabytes ahead for each."""
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # closed with the last array that looks into it
        if hasattr(view, "madvise"):
            view.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(view, dtype)


class MappedPiece:
    """A run of a file's tokens: u8 or little-endian u32."""

    def __init__(self, path: Path, dtype: str, first: int, count: int, maps: Maps) -> None:
        self.count = count
        self._path = path
        self._dtype = dtype
        self._first = first
        self._maps = maps
        self._need_bytes = (first + count) * np.dtype(dtype).itemsize

    def read(self, start: int, stop: int) -> Array:
        whole = self._maps.get(self._path, self._dtype, self._need_bytes)
        if stop - start < LONG_READ:
            return whole[self._first + start : self._first + stop]
        # A long stretch is read as a file is, with the system reading ahead.
        return np.fromfile(self._path, self._dtype, stop - start, offset=(self._first + start) * whole.itemsize)

    def part(self, start: int, stop: int) -> MappedPiece:
        return MappedPiece(self._path, self._dtype, self._first + start, stop - start, self._maps)

    def version(self) -> str:
        return str(os.stat(self._path).st_mtime_ns)


class Tokens:
    """Pieces, one after the other, as one row."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(piece for piece in pieces if piece.count)
        self._ends = list(accumulate(piece.count for piece in self.pieces))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read_into(self, out: Array, start: int) -> None:
        """Fill `out` with the tokens from `start` on. Raises: UsageError."""
        done = 0
        index = bisect_right(self._ends, start)
        while done < len(out):
            piece = self.pieces[index]
            offset = start + done - (self._ends[index] - piece.count)
            take = min(len(out) - done, piece.count - offset)
            out[done : done + take] = piece.read(offset, offset + take)
            done += take
            index += 1

    def read(self, start: int, count: int) -> Array:
        """A copy of tokens start … start + count, int64."""
        out = np.empty(count, np.int64)
        self.read_into(out, start)
        return out

    def split(self, at: int) -> tuple[Tokens, Tokens]:
        """Everything before `at`, and the rest."""
        before: list[Piece] = []
        after: list[Piece] = []
        begin = 0
        for piece in self.pieces:
            cut = min(max(at - begin, 0), piece.count)
            before.append(piece.part(0, cut))
            after.append(piece.part(cut, piece.count))
            begin += piece.count
        return Tokens(before), Tokens(after)

    def begins_in(self, low: int, high: int) -> int | None:
        """The last place in low … high where a piece begins."""
        begins = [end for end in self._ends[:-1] if low <= end <= high]
        return begins[-1] if begins else None


def split_tail(text: Tokens, least: int) -> tuple[Tokens, Tokens]:
    """What of a source is trained on, and its held-out tail. `text` is bytes; `least` is how many bytes the tail must have.

    The tail is the last twentieth, or a little more to begin at a file, document, paragraph or line.
    """
    size = len(text)
    at = size - min(size, max(round(size * HELDOUT_SHARE), least))
    room = min(round(size * BOUNDARY_SHARE), MAX_BOUNDARY_BYTES, max(0, at - least))  # what is left to train on is no shorter, either
    begin = text.begins_in(at - room, at)
    if begin is not None:
        return text.split(begin)
    before = text.read(at - room, room).astype(np.uint8).tobytes()
    for boundary in _BOUNDARIES:
        found = before.rfind(boundary)
        if found >= 0:
            return text.split(at - room + found + len(boundary))
    return text.split(at)


def fingerprint(text: Tokens) -> str:
    """What tells one text from another without reading all of it: its length and samples from all over."""
    size = len(text)
    hasher = hashlib.sha256(size.to_bytes(8, "little"))
    count = min(_SAMPLE_TOKENS, size)
    places = np.unique(np.linspace(0, size - count, _SAMPLES).astype(np.int64))
    for place in places:
        hasher.update(text.read(int(place), count).tobytes())
    return hasher.hexdigest()[:16]


@dataclass(frozen=True)
class Corpus:
    """Data that fits a run: enough for at least one window of each kind."""

    name: str  # the sources, for people
    train: Tokens
    heldout: Tokens
    context: int  # T
    unit: str  # "B" or " tokens"
    fingerprint: str

    def describe(self) -> str:
        """One line: "builtin: 0.44 MB train, 23 kB held out"."""
        return f"{self.name}: {_amount(len(self.train), self.unit)} train, {_amount(len(self.heldout), self.unit)} held out"

    def heldout_windows(self, count: int) -> Array:
        """`count` windows spread evenly over the held-out tail, always the same ones: int64 [count, T + 1]. They overlap if they must."""
        out = np.empty((count, self.context + 1), np.int64)
        for row, place in enumerate(np.linspace(0, len(self.heldout) - self.context - 1, count).astype(np.int64)):
            self.heldout.read_into(out[row], int(place))
        return out


def _amount(count: int, unit: str) -> str:
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 0.1 * scale and (letter != "k" or count >= scale):
            return f"{count / scale:.{2 if count < scale else 0 if count >= 100 * scale or letter == 'k' else 2}f} {letter}{unit}"
    return f"{count} {unit.strip()}"
