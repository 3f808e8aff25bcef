"""From text to tokens and back. The run's manifest names the tokenizer; a node that has another one cannot train the run.

Two kinds: `bytes` (every byte of UTF-8 is a token, nothing to fetch), and any Hugging Face `tokenizers` file, named in the manifest by its
sha256, so that two nodes with different files never average. The library is imported only where such a file is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from blocktrain.protocol.errors import UsageError

BYTES: Final = "bytes"
MAX_FILE_BYTES: Final = 256 * 1024 * 1024  # the largest published ones have about 30 MB


class Tokenizer(Protocol):
    """What the rest needs of a tokenizer. `name` is the manifest's `tokenizer`."""

    name: str
    vocabulary: int

    def encode(self, text: str) -> list[int]: ...

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens as text; what is no valid UTF-8 becomes U+FFFD. Tokens outside the vocabulary are left out."""
        ...


class Bytes:
    """One token a byte of UTF-8."""

    name = BYTES
    vocabulary = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if 0 <= token < 256).decode("utf-8", errors="replace")


class FromFile:
    """A Hugging Face `tokenizers` file. No special tokens are added: a window begins anywhere in a text."""

    def __init__(self, name: str, inner: Any) -> None:
        self.name = name
        inner.no_truncation()  # a published file may be set up for some model's inputs
        inner.no_padding()
        self.vocabulary: int = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._inner.decode([token for token in tokens if 0 <= token < self.vocabulary], skip_special_tokens=False)
        return text


def load_tokenizer(name: str, vocabulary: int, file: Path | None = None) -> Tokenizer:
    """The tokenizer that a manifest asks for.

    Args:
        name: the manifest's `tokenizer`: "bytes", or "sha256:" and the file's digest.
        vocabulary: the manifest's `model.vocabulary`; the tokenizer's may be smaller, not larger.
        file: the user's tokenizer file, where the run needs one.
    Raises: UsageError: no file where one is needed, another file, not a tokenizer, or too large a vocabulary.
    """
    if name == BYTES:
        if file is not None:
            raise UsageError(f"this run's tokens are bytes: leave out the tokenizer file {file}")
        return Bytes()
    if file is None:
        raise UsageError(
            f"this run needs the tokenizer file with {name}: get it from whoever hosts the run and give it with --tokenizer FILE"
        )
    data = _read(file)
    found = _digest(data)
    if found != name:
        raise UsageError(f"{file} is not this run's tokenizer: it has {found}, the run has {name}")
    tokenizer = FromFile(name, _parse(file, data))
    if tokenizer.vocabulary > vocabulary:
        raise UsageError(f"{file} has {tokenizer.vocabulary} tokens, but the run's model.vocabulary is {vocabulary}")
    return tokenizer


def describe_file(file: Path) -> tuple[str, int]:
    """Name (for a manifest) and vocabulary of a tokenizer file. Raises: UsageError."""
    data = _read(file)
    name = _digest(data)
    return name, FromFile(name, _parse(file, data)).vocabulary


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _read(file: Path) -> bytes:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{file} is too large for a tokenizer file (over {MAX_FILE_BYTES // 2**20} MiB)")
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the tokenizer file {file}: {error.strerror}") from error


def _parse(file: Path, data: bytes) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UsageError(f"{file} needs the package tokenizers: pip install tokenizers") from None
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises plain Exception and ValueError
        raise UsageError(f"{file} is not a tokenizers file (tokenizer.json): {str(error)[:200]}") from None
