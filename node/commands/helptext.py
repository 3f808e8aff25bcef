"""How `--help` looks: two plain columns, the same in a terminal and in a pipe, without boxes."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

MAX_LABEL_CHARS: Final = 28  # a longer one stands on a line of its own
MAX_LINE_CHARS: Final = 110  # longer lines are hard to read, however wide the terminal is
MIN_LINE_CHARS: Final = 40


class Columns:
    """A help formatter for cyclopts."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        rows = [(_label(entry), _description(entry)) for entry in panel.entries]
        if not rows:
            return
        width = max(MIN_LINE_CHARS, min(console.width, MAX_LINE_CHARS))
        column = min(MAX_LABEL_CHARS, max(len(label) for label, _ in rows)) + 4
        _print(console, f"{_plain(panel.title)}:", style="bold")
        for label, text in rows:
            lines = textwrap.wrap(text, width - column) or [""]
            first = f"  {label}"
            if len(first) + 2 > column:
                _print(console, first)
            else:
                _print(console, f"{first:<{column}}{lines.pop(0)}".rstrip())
            for line in lines:
                _print(console, " " * column + line)
        _print(console, "")

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        _print(console, f"Usage: {_plain(usage).removeprefix('Usage:').strip()}\n")

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        width = max(MIN_LINE_CHARS, min(console.width, MAX_LINE_CHARS))
        for paragraph in _plain(description).split("\n\n"):
            _print(console, textwrap.fill(" ".join(paragraph.split()), width) + "\n")


def _label(entry: HelpEntry) -> str:
    names = [*entry.positive_names, *entry.positive_shorts, *entry.negative_names]
    return f"{', '.join(names)} {entry.metavar or ''}".strip()


def _description(entry: HelpEntry) -> str:
    text = " ".join(_plain(entry.description).split())
    return f"{text} [default: {entry.default}]" if entry.default is not None else text


def _plain(value: Any) -> str:
    """The words of whatever cyclopts hands over: a string, a rich Text, or one of its own wrappers around them."""
    if value is None:
        return ""
    return str(getattr(value, "plain", None) or getattr(value, "primary_renderable", None) or value)


def _print(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, emoji=False, soft_wrap=True)
