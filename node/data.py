"""The data of one node: from `--data` to batches. Nothing of it ever leaves the machine.

`load_tokens` opens the sources; a `TokenStream` walks over the training part in windows. Nodes of one block take different shards without
talking to each other: each epoch is one pseudo-random order of all windows, the same for everybody who trains this block (a permutation
computed in place, not stored), and every peer enters it at a place of its own, given by its id, and walks on. So a position is one number,
two nodes cover the data together before they repeat each other, and a restart goes on exactly where it stopped.
"""

from __future__ import annotations

import codecs
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import numpy as np

from blocktrain.node import cache, fetched, sources
from blocktrain.node.cache import Progress, Report
from blocktrain.node.corpus import Array, Corpus, MappedPiece, Maps, MemoryPiece, Piece, Tokens, fingerprint, split_tail
from blocktrain.node.permutation import Permutation
from blocktrain.node.tokenizer import BYTES, Tokenizer
from blocktrain.protocol.errors import UsageError

POSITION_FORMAT: Final = 1
_READ_BYTES: Final = 1024 * 1024  # of text encoded at once
_LONGEST_LINE: Final = 64 * 1024  # characters that are encoded in one piece; longer lines are cut
_BYTES_PER_TOKEN: Final = 8  # text kept back for a token of the held-out tail; English has about 4.5

log = logging.getLogger(__name__)


def load_tokens(
    given: Sequence[str], tokenizer: Tokenizer, context: int, *, folder: Path | None = None, report: Report | None = None
) -> Corpus:
    """Open the sources of a node. Blocks (files are looked at, named sources prepared once): call it from a thread.

    Args:
        given: files, folders, globs, "builtin", "gensim", or "hf:NAME[:CONFIG[:SPLIT[:COLUMN]]]", read one after the other.
        context: T; a window has T + 1 tokens.
        folder: of prepared files; the user's cache folder by default.
        report: is told, now and then, what takes long; the log by default. What it raises ends the work.
    Raises: UsageError: a source that is missing, unreadable, empty, or all together too short.
    """
    if not given:
        raise UsageError("--data needs a source: files, folders, globs, builtin or hf:NAME")
    place = cache.cache_folder() if folder is None else folder
    progress, maps = Progress(report), Maps()
    texts = [Tokens(_open(source, place, progress, maps)) for source in given]
    least = (context + 1) * (1 if tokenizer.name == BYTES else _BYTES_PER_TOKEN)
    size = sum(map(len, texts))
    if size < 2 * (context + 1):
        raise UsageError(_too_short(given, f"{size} bytes", context))
    parts = [split_tail(text, -(-least * len(text) // size)) for text in texts]  # each source gives its share of the least
    if tokenizer.name != BYTES:
        parts = [_encoded(train, heldout, tokenizer, place, progress, maps) for train, heldout in parts]
    train = Tokens([piece for part, _ in parts for piece in part.pieces])
    heldout = Tokens([piece for _, part in parts for piece in part.pieces])
    unit = "B" if tokenizer.name == BYTES else " tokens"
    if min(len(train), len(heldout)) < context + 1:
        raise UsageError(_too_short(given, f"{len(train)} + {len(heldout)}{unit.replace('B', ' bytes')}", context))
    name = given[0] if len(given) == 1 else f"{given[0]} and {len(given) - 1} more"
    return Corpus(name, train, heldout, context, unit, fingerprint(train) + fingerprint(heldout))


def _too_short(given: Sequence[str], found: str, context: int) -> str:
    return (
        f"--data {' '.join(given)}: too short: {found}, but one sequence of this run has {context + 1} tokens, "
        f"and as many are held out: give at least {2 * (context + 1)} tokens of text"
    )


def _open(source: str, folder: Path, progress: Progress, maps: Maps) -> list[Piece]:
    if source == sources.BUILTIN:
        return [MemoryPiece(np.frombuffer(fetched.builtin_text(), np.uint8))]
    if source == sources.GENSIM:
        files = sources.find_files(str(fetched.gensim_file(folder, progress)))
    elif source.startswith(sources.HUGGING_FACE):
        files = sources.find_files(str(fetched.data_set_file(sources.parse_data_set(source), folder, progress)))
    else:
        files = sources.find_files(source)
    return [MappedPiece(file.path, "u1", 0, file.size, maps) for file in files]


# ---- tokens other than bytes ----------------------------------------------------------------------------------------------------------


def _encoded(train: Tokens, heldout: Tokens, tokenizer: Tokenizer, folder: Path, progress: Progress, maps: Maps) -> tuple[Tokens, Tokens]:
    """Both parts of a source as tokens, from files that are made once: u32, named by the digests of tokenizer and text."""
    out = []
    for text in (train, heldout):
        if not len(text):
            out.append(text)
            continue
        versions = " ".join(piece.version() for piece in text.pieces)
        digest = hashlib.sha256(f"1 {tokenizer.name} {fingerprint(text)} {versions}".encode()).hexdigest()[:32]

        def make(file: IO[bytes], text: Tokens = text) -> None:
            done = 0
            for taken, lines in _text_of(text):
                for ids in tokenizer.encode_many(lines):
                    file.write(np.asarray(ids, "<u4").tobytes())
                done += taken
                progress.say(f"encoding text: {100 * done // len(text)} %")
                cache.check_room(folder)

        path = cache.prepared(folder, f"tokens-{digest}.u32", make, progress)
        count = path.stat().st_size // 4
        out.append(Tokens([MappedPiece(path, "<u4", 0, count, maps)]))
    return out[0], out[1]


def _text_of(text: Tokens) -> Iterator[tuple[int, list[str]]]:
    """A text's bytes as strings that end at a line's end where possible, with the number of bytes taken. Files are never joined."""
    for piece in text.pieces:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        rest = ""
        for start in range(0, piece.count, _READ_BYTES):
            stop = min(start + _READ_BYTES, piece.count)
            rest += decoder.decode(piece.read(start, stop).tobytes(), final=stop == piece.count)
            end = len(rest) if stop == piece.count else rest.rfind("\n") + 1 or len(rest)
            yield stop - start, _cut(rest[:end])
            rest = rest[end:]


def _cut(text: str) -> list[str]:
    """Chunks of bounded length, at line ends where possible: tokenizers are slow on endless ones, and use all cores on many."""
    out = []
    start = 0
    while start < len(text):
        end = min(start + _LONGEST_LINE, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        out.append(text[start:end])
        start = end
    return out


# ---- walking --------------------------------------------------------------------------------------------------------------------------


class TokenStream:
    """Batches of one peer's shard. Not thread-safe: one thread calls `next_batch`; `position` may be read between two calls.

    Windows begin every T tokens, at a shift that changes with the epoch, and share one token with the next: the target of the one is the
    input of the other.
    """

    def __init__(self, corpus: Corpus, *, batch: int, peer: str, block: int, seed: int) -> None:
        self.corpus = corpus
        self._batch = batch
        self._key = f"{seed}/{block}"
        length, context = len(corpus.train), corpus.context
        self._windows = max(1, (length - context) // context)
        self._slack = min(context - 1, length - 1 - self._windows * context)  # the largest shift
        self._enter = _number(f"{self._key}/enter/{peer}") % self._windows
        self._next = 0  # windows read so far
        self._epoch = -1
        self._order = Permutation(1, "")
        self._shift = 0

    @property
    def windows(self) -> int:
        """Windows in an epoch."""
        return self._windows

    def next_batch(self) -> Array:
        """The next windows of the walk: int64 [batch, T + 1]. Raises: UsageError: a file is gone or became shorter."""
        out = np.empty((self._batch, self.corpus.context + 1), np.int64)
        row = 0
        while row < self._batch:
            epoch, done = divmod(self._next, self._windows)
            self._begin(epoch)
            take = min(self._batch - row, self._windows - done)
            walk = (self._enter + done + np.arange(take)) % self._windows
            for window in self._order(walk):
                self.corpus.train.read_into(out[row], self._shift + int(window) * self.corpus.context)
                row += 1
            self._next += take
        return out

    def heldout(self, count: int) -> Array:
        """Fixed windows of the held-out tail: int64 [count, T + 1]."""
        return self.corpus.heldout_windows(count)

    def position(self) -> dict[str, object]:
        """Where the walk is, for a checkpoint; JSON values."""
        return {"format": POSITION_FORMAT, "data": self.corpus.fingerprint, "windows": self._windows, "next": self._next}

    def seek(self, position: Mapping[str, object]) -> bool:
        """Go on where `position` was taken. False: it is of other data or another format; the walk stays where it is."""
        here = self.position()
        place = position.get("next")
        same = all(position.get(key) == here[key] for key in ("format", "data", "windows"))
        if not same or isinstance(place, bool) or not isinstance(place, int) or place < 0:
            return False
        self._next = place
        return True

    def _begin(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = Permutation(self._windows, f"{self._key}/order/{epoch}")
            self._shift = _number(f"{self._key}/shift/{epoch}") % (self._slack + 1)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
