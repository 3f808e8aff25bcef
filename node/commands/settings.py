"""Settings from the environment and from `blocktrain.toml`, checked for names that nobody knows.

A file's top-level keys hold for every command that has such an option; those in a table `[node]`, `[generate]`, … hold for that command
only and win. A key that no command knows ends the program with one line: a misspelt setting must not be silently without effect. An
unknown `BLOCKTRAIN_*` is only mentioned, since other programs may set it.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import cyclopts
from cyclopts import App, Parameter
from cyclopts.config import Dict, Env

from blocktrain.node.commands import frame
from blocktrain.protocol.errors import UsageError

FILE_NAME: Final = "blocktrain.toml"
ENV_PREFIX: Final = "BLOCKTRAIN_"
ENV_ONLY: Final = {"config", "seed", "runtime_dir"}  # read elsewhere, or no key of a file

ConfigFile: TypeAlias = Annotated[
    Path | None,
    Parameter(name="--config", help=f"File with settings; without it, {FILE_NAME} in this folder, where there is one."),
]
Known: TypeAlias = dict[str, set[str]]  # command → keys


class Settings:
    """The sources behind the command line, for programs whose commands are those of `reference` (built only when it is needed)."""

    def __init__(self, reference: Callable[[], App]) -> None:
        self._reference = reference

    def sources(self) -> list[frame.Source]:
        return [self._environment, self._file]

    def _environment(self, app: App, commands: tuple[str, ...], arguments: cyclopts.ArgumentCollection) -> None:
        given = [name for name in os.environ if name.startswith(ENV_PREFIX)]
        if not given:
            return
        known = {key for keys in self._known().values() for key in keys} | ENV_ONLY
        for name in given:
            key = name.removeprefix(ENV_PREFIX).lower()
            if key not in known:
                frame.say(f"{name} is not a setting and has no effect{_meant(key, known)}")
        Env(ENV_PREFIX, command=False)(app, commands, arguments)

    def _file(self, app: App, commands: tuple[str, ...], arguments: cyclopts.ArgumentCollection) -> None:
        path = _file_of(arguments)
        if path is None:
            return
        chosen = choose(path, _load(path), self._known(), commands[0] if commands else "node")
        own = {_key(name) for argument in arguments for name in argument.names}
        values = {key: value for key, value in chosen.items() if key in own}
        Dict(values, source=str(path), use_commands_as_keys=False)(app, commands, arguments)

    def _known(self) -> Known:
        app = self._reference()
        return {name: keys_of(app[name]) for name in app if not name.startswith("-")}


def keys_of(command: App) -> set[str]:
    """The keys that a file may set for a command."""
    names = {name for argument in command.assemble_argument_collection() if argument.parse for name in argument.names}
    return {_key(name) for name in names} - {"config"}


def choose(path: Path, table: dict[str, Any], known: Known, command: str) -> dict[str, Any]:
    """The settings of a parsed file that concern one command, the command's own table over the top level.

    Raises: UsageError: a key or a table that no command knows.
    """
    everything = {key for keys in known.values() for key in keys}
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for name, value in table.items():
        if not isinstance(value, dict):
            _refuse_unknown(f"{path}", [name], everything)
            shared[_key(name)] = value
            continue
        if name not in known:
            raise UsageError(f"{path}: there is no command for the table [{name}]{_meant(name, known)}")
        _refuse_unknown(f"{path}: [{name}]", value, known[name])
        if name == command:
            own = {_key(key): inner for key, inner in value.items()}
    return {**shared, **own}


def _refuse_unknown(where: str, names: Iterable[str], known: set[str]) -> None:
    for name in names:
        if _key(name) not in known:
            raise UsageError(f"{where}: unknown key {name!r}{_meant(_key(name), known)}")


def _meant(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _file_of(arguments: cyclopts.ArgumentCollection) -> Path | None:
    """`--config` (or BLOCKTRAIN_CONFIG), else the file in this folder, else none."""
    for argument in arguments:
        if "--config" in argument.names and argument.tokens:
            return Path(argument.tokens[-1].value)
    path = Path(FILE_NAME)
    return path if path.is_file() else None


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the settings file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
