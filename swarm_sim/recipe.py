"""The run.toml of a local run: a recipe with the number of blocks that was asked for, and a schedule of the length that it will have.

The manifest holds both, so they cannot be flags of the host: this writes the file that it is given. The recipe is checked here, as the host
would check it, so that a bad one ends in one line before anything is started.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from blocktrain.node import recipe_file

TINY: Final = "tiny"
TINY_MINUTES: Final = 4.0  # how long the schedule of `tiny` is made for


@dataclass(frozen=True)
class RunFile:
    """A recipe as written for this run."""

    path: Path
    blocks: int


def write(recipe: Path, path: Path, *, blocks: int | None, minutes: float) -> RunFile:
    """Write `recipe` (a file, or the name of one that comes with blocktrain) to `path`, changed for this run.

    Args:
        blocks: how many there shall be; None: as many as the recipe has.
    Raises: UsageError: it is not there, cannot be read, or is no manifest.
    """
    checked = recipe_file.load_recipe(recipe)
    ready = not recipe.is_file()
    table: dict[str, Any] = tomllib.loads(recipe_file.ready_text(str(recipe)) if ready else recipe.read_text(encoding="utf-8"))
    table["blocks"] = blocks = checked.blocks if blocks is None else blocks
    if table["tokenizer"].endswith(".json"):
        table["tokenizer"] = str((recipe.parent / table["tokenizer"]).absolute())
    if ready and str(recipe) == TINY:
        table["schedule"]["planned_rounds"] = max(1, round(checked.schedule.planned_rounds * minutes / TINY_MINUTES))
    path.write_text(to_toml(table), encoding="utf-8")
    return RunFile(path, blocks)


def to_toml(table: Mapping[str, Any]) -> str:
    """A table of values, and of tables of values, as TOML."""
    lines = [f"{key} = {_value(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for name, inner in table.items():
        if isinstance(inner, dict):
            lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in inner.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    """Strings, numbers and truth values, which JSON writes as TOML does."""
    return json.dumps(value, ensure_ascii=False)
