"""What all benches share: parts that can be chosen, a table for people, flat JSON for machines, and a part's failure that stops no other.

A bench is a function that calls `Session.measure` for each of its parts. A part that could not run gives null for its keys and exit code 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from blocktrain import __version__
from blocktrain.node.commands import frame
from blocktrain.protocol.errors import BlocktrainError, UsageError
from blocktrain.swarm_sim.local_cmd import STDOUT, check_target
from blocktrain.swarm_sim.report import write_json

if TYPE_CHECKING:
    from blocktrain.swarm_sim.app import BenchOptions

Numbers = Mapping[str, object]  # key → a number, a text, a list of these, or None
LIBRARIES: Final = ("torch", "hivemind", "numpy")


@dataclass(frozen=True)
class Bench:
    """A bench: its parts with the keys that each gives, and the function that measures them."""

    name: str
    parts: Mapping[str, tuple[str, ...]]
    run: Callable[[Session], None]
    lists: tuple[str, ...] = ()  # settings whose values of several runs stand beside each other (`added`)


@dataclass
class Session:
    """One run of one bench."""

    bench: Bench
    brief: bool
    wanted: frozenset[str]
    folder: Path  # for logs; gone afterwards unless a part failed
    seeds: int | None = None
    numbers: dict[str, object] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # part → why

    def wants(self, *parts: str) -> bool:
        """Whether any of these parts is to be measured."""
        return bool(self.wanted.intersection(parts))

    def say(self, text: str) -> None:
        """One line of progress."""
        frame.say(f"{self.bench.name}: {text}")

    def measure(self, part: str, work: Callable[[], Numbers]) -> None:
        """Measure a part, if it is wanted. Its failure is noted, and the bench goes on."""
        if part in self.wanted:
            with self.guard(part):
                self.numbers.update(work())

    @contextlib.contextmanager
    def guard(self, *parts: str) -> Iterator[None]:
        """What goes wrong inside makes each of these parts fail that has not been measured yet."""
        try:
            yield
        except BlocktrainError as error:
            self._fail(parts, str(error))
        except Exception as error:  # a bug of ours; the other parts are still worth measuring
            traceback.print_exc()
            self._fail(parts, f"{type(error).__name__}: {error}")

    def _fail(self, parts: Iterable[str], why: str) -> None:
        for part in parts:
            measured = set(self.bench.parts[part]) <= self.numbers.keys()
            if part in self.wanted and not measured and part not in self.failed:
                self.failed[part] = why
                self.say(f"{part} could not be measured: {why}")


def command(bench: Bench, options: BenchOptions) -> int:
    """One bench from the command line: measure, print the table, write the JSON. Returns the exit code."""
    return commands([bench], options)


def commands(benches: Iterable[Bench], options: BenchOptions) -> int:
    """Several benches, one after the other; with more than one, keys get the bench's name and a dot in front."""
    chosen = list(benches)
    check_target(options.json)
    before = _before(chosen, options) if options.add else {}
    results = {bench.name: run(bench, options) for bench in chosen}
    for result in results.values():
        _print_table(result, to_stderr=options.json == STDOUT)
    merged = added(before, results[chosen[0].name], chosen[0].lists) if len(chosen) == 1 else _merge(results)
    if options.json == STDOUT:
        print(json.dumps(merged, indent=2, ensure_ascii=False), flush=True)
    elif options.json is not None:
        try:
            write_json(options.json, merged)
        except OSError as error:
            raise UsageError(f"--json {options.json} cannot be written: {error.strerror}") from error
    return int(any(result["failed"] for result in results.values()))


def _before(chosen: list[Bench], options: BenchOptions) -> dict[str, object]:
    """What the JSON file holds. Raises: UsageError: there is none to add to, or it is another bench's."""
    if options.json is None or options.json == STDOUT or len(chosen) > 1:
        raise UsageError("--add goes with one bench and --json FILE: there is nothing to add to")
    if not options.json.exists():
        return {}
    try:
        before = json.loads(options.json.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = None
    if not isinstance(before, dict) or before.get("bench") != chosen[0].name:
        raise UsageError(f"--add: {options.json} holds no numbers of bench {chosen[0].name}")
    return before


def added(before: Mapping[str, object], new: Mapping[str, object], lists: Iterable[str] = ()) -> dict[str, object]:
    """The numbers of an earlier run with those of a new one over them; null replaces nothing, and seconds add up."""
    if not before:
        return dict(new)
    out = {**before, **{key: value for key, value in new.items() if value is not None or key not in before}}
    for key in ("parts", *lists):
        out[key] = sorted({*_listed(before, key), *_listed(new, key)})
    out["seconds"] = round(sum(float(str(one.get("seconds", 0))) for one in (before, new)), 1)
    still = set(_listed(before, "failed")) - set(_listed(new, "parts"))
    why = {**_texts(before), **_texts(new)}
    out["failed"] = sorted(still | set(_listed(new, "failed")))
    out["why_failed"] = {part: why[part] for part in _listed(out, "failed") if part in why}
    return out


def _listed(numbers: Mapping[str, object], key: str) -> list[Any]:
    value = numbers.get(key)
    return value if isinstance(value, list) else []


def _texts(numbers: Mapping[str, object]) -> dict[str, object]:
    value = numbers.get("why_failed")
    return value if isinstance(value, dict) else {}


def run(bench: Bench, options: BenchOptions) -> dict[str, object]:
    """Measure the parts that are wanted. The result has every key of theirs, null where a part failed, and the settings.

    Raises: UsageError: there is no such part.
    """
    unknown = [part for part in options.parts if part not in bench.parts]
    if unknown:
        raise UsageError(f"bench {bench.name} has no part {unknown[0]!r}; it has {', '.join(bench.parts)}")
    wanted = frozenset(options.parts or bench.parts)
    folder = Path(tempfile.mkdtemp(prefix=f"blocktrain-bench-{bench.name}-"))
    session = Session(bench, options.brief, wanted, folder, options.seeds)
    began = time.monotonic()
    try:
        bench.run(session)
    finally:
        if session.failed and any(folder.iterdir()):
            session.say(f"logs are in {folder}")
        else:
            _remove(folder)
    keys = [key for part, keys in bench.parts.items() if part in wanted for key in keys]
    return {
        **dict.fromkeys(keys),
        **session.numbers,
        "bench": bench.name,
        "version": __version__,
        "brief": options.brief,
        "parts": sorted(wanted),
        "seeds": None if options.seeds is None else list(range(options.seeds)),
        "seconds": round(time.monotonic() - began, 1),
        "failed": sorted(session.failed),
        "why_failed": dict(sorted(session.failed.items())),
        **machine(),
    }


def machine() -> dict[str, object]:
    """Where numbers were measured."""
    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: _installed(name) for name in LIBRARIES},
    }


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _merge(results: Mapping[str, dict[str, object]]) -> dict[str, object]:
    return {f"{name}.{key}": value for name, result in results.items() for key, value in result.items()}


def _print_table(result: Mapping[str, object], *, to_stderr: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=to_stderr, highlight=False)
    table = Table(title=f"bench {result['bench']}", title_justify="left", box=None, show_header=False, pad_edge=False)
    for key, value in result.items():
        if key != "bench":
            table.add_row(key, _shown(value))
    console.print(table)


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return str(value)


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
