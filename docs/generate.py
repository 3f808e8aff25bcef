"""Writes the parts of docs/ that the code already knows: option tables, exit codes, the keys of a status, and what benches measured.

    python docs/generate.py           write them
    python docs/generate.py --check   say what is out of date, and exit with 1 if anything is

A page holds a pair of comments around each generated part: `<!-- generated: NAME -->` and `<!-- end -->`. A test runs the check.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

from cyclopts import App

from blocktrain.node import recipe_file
from blocktrain.node.commands.app import blocktrain
from blocktrain.node.status import PeerStatus, Status
from blocktrain.protocol import errors
from blocktrain.swarm_sim import gossip_speed_tables, gossip_tables, sweep_tables
from blocktrain.swarm_sim.app import simulator
from blocktrain.swarm_sim.lab import report
from blocktrain.swarm_sim.world import tables as world_tables

DOCS = Path(__file__).resolve().parent
PART = re.compile(r"(<!-- generated: (?P<name>[^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def options(command: App) -> str:
    """A table of a command's options, group by group, as its help has them."""
    rows = []
    for argument in command.assemble_argument_collection():
        if not argument.parse or not argument.show:
            continue
        negative = argument.parameter.negative or ()
        names = ", ".join(f"`{name}`" for name in [*argument.names, *((negative,) if isinstance(negative, str) else negative)])
        rows.append((names, _default(argument.field_info.default), argument.parameter.help or ""))
    return table(("Option", "Default", "What it does"), rows)


def table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in cells) + " |\n"

    heading = list(heading)
    return line(heading) + line("---" for _ in heading) + "".join(line(row) for row in rows)


def exit_codes() -> str:
    def tree(cls: type[errors.BlocktrainError]) -> list[type[errors.BlocktrainError]]:
        return [cls, *(below for child in cls.__subclasses__() for below in tree(child))]

    words: dict[int, list[str]] = {0: ["What was asked for was done; or a node was told to stop, and its state is saved."]}
    for cls in tree(errors.BlocktrainError):
        ours = cls.__module__ == errors.__name__  # rooms above refine them, and may or may not be imported here
        if ours and cls.exit_code > 1 and cls.__doc__ and cls is not errors.NetworkFault:
            words.setdefault(cls.exit_code, []).append(cls.__doc__.strip().splitlines()[0])
    words[1] = ["A bug in blocktrain; the line says where its traceback is."]
    words[130] = ["Ended by force: a second Ctrl-C, or it did not stop within its five seconds."]
    return table(("Exit code", "When"), ((str(code), " ".join(lines)) for code, lines in sorted(words.items())))


def status_keys() -> str:
    keys = ", ".join(f"`{field.name}`" for field in fields(Status))
    peers = ", ".join(f"`{field.name}`" for field in fields(PeerStatus))
    return f"{keys}.\n\nEach of `peers`: {peers}.\n"


def recipes() -> str:
    rows = []
    for name in recipe_file.ready_recipes():
        model = recipe_file.load_recipe(name)
        first = recipe_file.ready_text(name).splitlines()[0].removeprefix("#").strip()
        shape = f"{model.blocks} × {model.model.layers} layers of width {model.model.width}, {model.model.context} tokens"
        rows.append((f"`{name}`", shape, first.removeprefix(f"{name}: ").split(". ")[0].removesuffix(".")))
    return table(("Recipe", "Blocks", "For"), rows)


def measured(path: Path) -> str:
    """The tables of one run of a bench, from its JSON file."""
    numbers = json.loads(path.read_text(encoding="utf-8"))
    writers = {
        "quality": report.quality,
        "ideas": report.ideas,
        "gossip": lambda numbers: gossip_tables.tables(numbers) or gossip_speed_tables.tables(numbers),
        "sweep": sweep_tables.tables,
        "world": world_tables.tables,
    }
    return writers[numbers["bench"]](numbers)


def parts() -> dict[str, Callable[[], str]]:
    """Everything that a page can ask for."""
    found: dict[str, Callable[[], str]] = {"exit codes": exit_codes, "status keys": status_keys, "recipes": recipes}
    for path in sorted((DOCS / "measured").glob("*.json")):
        found[f"measured {path.stem}"] = lambda path=path: measured(path)
    for program in (blocktrain(), simulator()):
        found.update(_commands(program.name[0], program))
    return found


def _commands(name: str, app: App) -> dict[str, Callable[[], str]]:
    """The option tables of a program's commands, and of theirs."""
    found: dict[str, Callable[[], str]] = {}
    for word in app:
        if not word.startswith("-"):
            found |= _commands(f"{name} {word}", app[word])
    if not found or app.default_command is not None:  # `world` is a command, and has commands
        found[name] = lambda: options(app)
    return found


def renewed(text: str, known: dict[str, Callable[[], str]]) -> str:
    """A page with its generated parts written anew. Raises: KeyError: a part that nobody makes."""
    return PART.sub(lambda match: f"{match[1]}{known[match['name']]()}{match[3]}", text)


def _default(value: object) -> str:
    if value is None or value is False or value in ((), "") or isinstance(value, type):
        return ""
    if value is True:
        return "yes"
    return f"`{' '.join(map(str, value)) if isinstance(value, tuple) else value}`"


def main(argv: list[str]) -> int:
    known, stale = parts(), []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = renewed(text, known)
        if new == text:
            continue
        stale.append(page.name)
        if "--check" not in argv:
            page.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'out of date' if '--check' in argv else 'written'}: {', '.join(stale)}", file=sys.stderr)
    return 1 if stale and "--check" in argv else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
