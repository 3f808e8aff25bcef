"""Sources with a name: text that Python itself carries, the excerpt in the gensim wheel, and Hugging Face data sets.

The last two are written once into the user's cache as plain text, documents two empty lines apart, and read from there like any file.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final
from xml.etree import ElementTree

from blocktrain.node import cache, wiki
from blocktrain.node.cache import Progress
from blocktrain.node.sources import DataSet
from blocktrain.protocol.errors import UsageError

MAX_DATA_SET_BYTES: Final = 8 * 1024**3  # of text kept from one data set: a home disk's share, and months of a block's training
BETWEEN_DOCUMENTS: Final = b"\n\n\n"

log = logging.getLogger(__name__)


def builtin_text() -> bytes:
    """The language reference that `help()` prints, about half a megabyte: real prose that every Python has. The same on every machine
    with this version of Python.
    """
    from pydoc_data import topics

    return "".join(topics.topics[key] for key in sorted(topics.topics)).encode()


def gensim_file(folder: Path, progress: Progress) -> Path:
    """The Wikipedia excerpt of the gensim wheel as plain text. Raises: UsageError: gensim is not installed, or its excerpt is damaged."""
    excerpt = wiki.excerpt_file()

    def make(file: IO[bytes]) -> None:
        try:
            _write(file, wiki.articles(excerpt), folder, progress, "cleaning the Wikipedia excerpt")
        except (ElementTree.ParseError, EOFError) as error:
            raise UsageError(f"{excerpt} is damaged ({error}): install gensim again") from error

    return cache.prepared(folder, f"gensim-wiki-{wiki.VERSION}-{excerpt.stat().st_size}.txt", make, progress)


def data_set_file(wanted: DataSet, folder: Path, progress: Progress) -> Path:
    """A Hugging Face data set's text column as plain text.

    Raises: UsageError: the extra is not installed, or the data set, its config, split or column does not exist.
    """
    local = Path(wanted.name)
    stamp = max((item.stat().st_mtime_ns for item in (local, *local.rglob("*"))), default=0) if local.exists() else 0
    digest = hashlib.sha256(f"{wanted} {stamp}".encode()).hexdigest()[:16]
    slug = "".join(char if char.isalnum() else "-" for char in wanted.name)[-40:]

    def make(file: IO[bytes]) -> None:
        log.info("fetching the data set %s; it is kept in %s", wanted.name, folder)
        _write(file, _documents(wanted), folder, progress, f"fetching {wanted.name}")

    return cache.prepared(folder, f"hf-{slug}-{digest}.txt", make, progress)


def _documents(wanted: DataSet) -> Iterator[str]:
    """The text of each row, streamed: the data set is never on the disk twice."""
    try:
        import datasets
    except ImportError:
        raise UsageError(f"--data hf:{wanted.name} needs an extra package: pip install 'blocktrain[datasets]'") from None
    getattr(datasets, "disable_progress_bars", lambda: None)()  # we say ourselves how far it is
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(wanted.name, wanted.config or None, split=wanted.split, streaming=True)
        column = wanted.column
        for row in rows:
            column = column or _text_column(row, wanted)
            if not isinstance(row.get(column), str):
                raise UsageError(f"--data hf:{wanted.name}: no text in column {column!r}; the columns are {', '.join(row)}")
            yield row[column]
    except (UsageError, GeneratorExit):
        raise
    except Exception as error:  # the library raises its own and those of every file system and network library below it
        raise UsageError(f"--data hf:{wanted.name}: cannot be fetched: {type(error).__name__}: {str(error)[:300]}") from error


def _text_column(row: Mapping[str, Any], wanted: DataSet) -> str:
    """`text`, or the only column that holds text."""
    if isinstance(row.get("text"), str):
        return "text"
    columns = [name for name, value in row.items() if isinstance(value, str)]
    if len(columns) == 1:
        return columns[0]
    split = f"hf:{wanted.name}:{wanted.config}:{wanted.split}:COLUMN"
    raise UsageError(f"--data hf:{wanted.name}: which column? Write {split} with one of {', '.join(columns or row)}")


def _write(file: IO[bytes], documents: Iterable[str], folder: Path, progress: Progress, doing: str) -> None:
    """One document after the other. Rows that end in a newline are lines of a text, as some data sets have them, and follow directly."""
    size = 0
    gap = b""
    for document in documents:
        data = document.encode("utf-8", errors="replace")
        if not data:
            continue
        if size + len(gap) + len(data) > MAX_DATA_SET_BYTES:
            log.warning("%s: stopped at %.1f GB of text", doing, size / 1e9)
            break
        size += file.write(gap) + file.write(data)
        gap = b"" if data.endswith(b"\n") else BETWEEN_DOCUMENTS
        if progress.say(f"{doing}: {size / 1e6:.1f} MB so far"):
            cache.check_room(folder)
    if not size:
        raise UsageError(f"{doing}: there is no text in it")
