"""What a `--data` argument stands for: files, folders, globs, or one of the sources with a name. Nothing is read here.

The order of files is part of what a shard and a saved position mean, so it depends on names alone: a folder's files sorted by their path
inside it, a glob's by their path.
"""

from __future__ import annotations

import glob
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blocktrain.protocol.errors import UsageError

BUILTIN: Final = "builtin"
GENSIM: Final = "gensim"
HUGGING_FACE: Final = "hf:"
_WILD: Final = frozenset("*?[")


@dataclass(frozen=True)
class DataFile:
    """A file with something in it. `size` is in bytes."""

    path: Path
    size: int


@dataclass(frozen=True)
class DataSet:
    """A Hugging Face data set: hf:NAME[:CONFIG[:SPLIT[:COLUMN]]], empty parts meaning their defaults."""

    name: str
    config: str = ""
    split: str = "train"
    column: str = ""  # default: `text`, or the only column that holds text


def is_path(source: str) -> bool:
    """Whether a source is a place in the file system, rather than a name."""
    return source not in (BUILTIN, GENSIM) and not source.startswith(HUGGING_FACE)


def parse_data_set(source: str) -> DataSet:
    """Raises: UsageError: no name, or too many parts."""
    name, *rest = source.removeprefix(HUGGING_FACE).split(":")
    if not name or len(rest) > 3:
        raise UsageError(f"--data {source}: write hf:NAME[:CONFIG[:SPLIT[:COLUMN]]]")
    config, split, column = (*rest, "", "", "")[:3]
    return DataSet(name, config, split or "train", column)


def find_files(source: str) -> list[DataFile]:
    """The files of a path, folder or glob, in their order. Hidden ones and empty ones inside a folder or glob are left out.

    Raises: UsageError: nothing there, not readable, empty, or not a regular file.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        found = [_look(item) for item in _walk(path, source)]
    elif path.exists() or not _WILD & set(source):
        return [_only(path, source)]
    else:
        matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        found = [_look(item) for item in matches if item.is_file()]
        if not found:
            raise UsageError(f"--data {source}: no file matches")
    files = [file for file in found if file.size]
    if not files:
        raise UsageError(f"--data {source}: there is no text in it, only {'empty files' if found else 'no files at all'}")
    return files


def _only(path: Path, source: str) -> DataFile:
    file = _look(path)
    if not file.size:
        raise UsageError(f"--data {source}: the file is empty")
    return file


def _look(path: Path) -> DataFile:
    try:
        about = path.stat()
    except FileNotFoundError:
        raise UsageError(f"--data {path}: there is no such file or folder") from None
    except OSError as error:
        raise UsageError(f"--data {path}: {error.strerror}") from error
    if not stat.S_ISREG(about.st_mode):
        raise UsageError(f"--data {path}: not a regular file: it cannot be read at any place; save its content to a file first")
    if not os.access(path, os.R_OK):
        raise UsageError(f"--data {path}: it may not be read by this user")
    return DataFile(path, about.st_size)


def _walk(folder: Path, source: str) -> list[Path]:
    """Regular files below a folder, sorted by their path in it. Links to folders are not followed: they may lead in circles."""

    def fail(error: OSError) -> None:
        raise UsageError(f"--data {source}: cannot read {error.filename}: {error.strerror}") from error

    out: list[tuple[str, ...]] = []
    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(place).relative_to(folder).parts
        out += [(*inside, name) for name in names if not name.startswith(".") and Path(place, name).is_file()]
    return [folder.joinpath(*parts) for parts in sorted(out)]
