"""From a run.toml, or the name of a recipe that comes with blocktrain, to a manifest.

The rules of every field stand once, in protocol/manifest.py; here each of their refusals becomes one line with file, key and remedy. The
ready recipes are complete files with a word on every number, meant to be copied and changed.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final, get_type_hints

from blocktrain.node import tokenizer
from blocktrain.protocol import manifest
from blocktrain.protocol.errors import Malformed, UsageError
from blocktrain.protocol.manifest import Manifest

MAX_FILE_BYTES: Final = 64 * 1024
_EXAMPLE: Final = "tiny"


def ready_recipes() -> list[str]:
    """Names that can be given instead of a file."""
    return sorted(item.name.removesuffix(".toml") for item in _folder().iterdir() if item.name.endswith(".toml"))


def ready_text(name: str) -> str:
    """The text of a recipe that comes with blocktrain, to be shown or copied. Raises: UsageError: there is none of that name."""
    if name not in ready_recipes():
        raise UsageError(f"no recipe {name!r} comes with blocktrain; there are {', '.join(ready_recipes())}")
    return (_folder() / f"{name}.toml").read_text(encoding="utf-8")


def load_recipe(source: str | Path) -> Manifest:
    """The manifest of a run.toml, or of a ready recipe (`tiny`); a file of that name goes first.

    `tokenizer` may be the path of a tokenizers file, relative to the run.toml: its digest takes its place.
    Raises: UsageError: no such file or recipe, not TOML, or a key that is unknown, missing or out of bounds: file, key and remedy.
    """
    path = Path(source).expanduser()
    if not path.is_file() and str(source) in ready_recipes():
        return parse_recipe(ready_text(str(source)), str(source))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(
            f"{source}: there is no such file, and no recipe of that name: give a run.toml or one of {', '.join(ready_recipes())}"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {source}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{source} is too large for a run.toml: over {MAX_FILE_BYTES // 1024} KiB")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not a run.toml: byte {error.start} is not UTF-8 text") from None
    return parse_recipe(text, str(source), path.parent)


def parse_recipe(text: str, where: str, folder: Path | None = None) -> Manifest:
    """The manifest of a run.toml's text. `where` names it in errors; `folder` is where a tokenizer's path begins. Raises: UsageError."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is not valid TOML: {error}") from None
    try:
        _with_digest(table, folder or Path())
        return manifest.from_table(table)
    except Malformed as error:
        raise UsageError(f"{where}: {error.why}{_remedy(table)}") from None


def _folder() -> Traversable:
    return resources.files("blocktrain.node") / "recipes"


def _with_digest(table: dict[str, Any], folder: Path) -> None:
    """Replace a tokenizer's path by what names it for everybody."""
    name = table.get("tokenizer")
    if not isinstance(name, str) or not name.endswith(".json"):
        return
    table["tokenizer"], size = tokenizer.describe_file(folder / Path(name).expanduser())
    model = table.get("model")
    given = model.get("vocabulary") if isinstance(model, dict) else None
    if isinstance(given, int) and given < size:
        raise Malformed(f"model.vocabulary is {given}, but the tokenizer {name} has {size} tokens")


def _remedy(table: Mapping[str, Any]) -> str:
    """How to mend the first key that is unknown or missing, in the order in which `from_table` looks for them."""
    example = tomllib.loads(ready_text(_EXAMPLE))
    for prefix, cls, given in _tables(table):
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                return f"; did you mean {close[0]}?" if close else "; remove it, or see the recipe `tiny` for a complete file"
        missing = [key for key in known if key not in given and key not in manifest.OPTIONAL]
        if missing:
            return _to_add(prefix, missing[0], example)
    return ""


def _tables(table: Mapping[str, Any]) -> list[tuple[str, type, Mapping[str, Any]]]:
    """The manifest's tables that the file has: prefix, class, content."""
    out: list[tuple[str, type, Mapping[str, Any]]] = [("", Manifest, table)]
    for name, kind in get_type_hints(Manifest).items():
        inner = table.get(name)
        if is_dataclass(kind) and isinstance(kind, type) and isinstance(inner, Mapping):
            out.append((name, kind, inner))
    return out


def _to_add(prefix: str, key: str, example: Mapping[str, Any]) -> str:
    """The line that a file lacks, as the recipe `tiny` has it."""
    value = (example[prefix] if prefix else example)[key]
    if isinstance(value, Mapping):
        return f"; add the table [{key}], as the recipe `tiny` has it"
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    place = f"in [{prefix}] " if prefix else "at the top "
    return f"; add {place}for example: {key} = {shown}"
