"""What every program's command line shares; `blocktrain-sim` uses it too.

A setting comes from the command line, else from `BLOCKTRAIN_*`, else from a `blocktrain.toml` (settings.py), else from its default. Every
expected error becomes one line on stderr and an exit code (runtime.guarded); what cyclopts has to say does, too. stdout belongs to data.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import cyclopts
from cyclopts import App, Parameter

from blocktrain import __version__
from blocktrain.node import runtime
from blocktrain.node.commands.helptext import Columns
from blocktrain.protocol.errors import UsageError

Source = Callable[[App, tuple[str, ...], cyclopts.ArgumentCollection], None]


def new_app(name: str, help: str, sources: Sequence[Source] = ()) -> App:
    """A program. `sources` fill in what the command line left open, the first one first."""
    return App(
        name=name,
        help=help,
        version=__version__,
        config=list(sources),
        default_parameter=Parameter(negative=(), show_default=_default_shown),
        help_formatter=Columns(),
        help_format="plaintext",
        result_action="return_value",
    )


def run(app: App, argv: Sequence[str] | None = None) -> int:
    """Carry out one command line and give the process's exit code."""
    return runtime.guarded(lambda: _call(app, sys.argv[1:] if argv is None else argv))


def say(line: str) -> None:
    """One line of talk, on stderr."""
    print(line, file=sys.stderr, flush=True)


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def colourful(stream: TextIO) -> bool:
    """Whether colours are welcome there: a terminal, and no NO_COLOR (https://no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def _call(app: App, argv: Sequence[str]) -> int:
    try:
        result = app(list(argv), exit_on_error=False, print_error=False)
    except cyclopts.UnusedCliTokensError as error:
        command = " ".join((*app.name, *(error.command_chain or ())))
        word = next(iter(error.unused_tokens or ()), "")
        raise UsageError(f"{word!r} stands alone: each value follows its option, as `{command} --help` shows") from error
    except cyclopts.CycloptsError as error:
        raise UsageError(str(error).rstrip(".")) from error
    return result if isinstance(result, int) else 0


def _default_shown(value: Any) -> str | None:
    """How help shows a default; None where there is none worth a word."""
    if value is None or value is False or value in ((), ""):
        return None
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
