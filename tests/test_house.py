"""The house rules that no other tool checks: what is declared stands there, pins fit ranges, and nothing from a peer can run code."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("protocol", "node", "swarm_sim")
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
LONGEST_MODULE = 550  # lines; the aim is 400
LONGEST_FUNCTION = 80  # lines; the aim is 70


def modules() -> Iterator[Path]:
    for room in ROOMS:
        yield from sorted((ROOT / room).rglob("*.py"))


def texts() -> Iterator[Path]:
    """Every file that people read."""
    for pattern in ("*.md", "*.toml", "*.txt", "Makefile", ".ci/run", "docs/**/*", "tests/**/*.py", "blocktrain/*.py"):
        yield from (path for path in ROOT.glob(pattern) if path.is_file() and path.suffix not in (".png", ".pyc"))
    yield from modules()


def pins() -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {str(canonicalize_name(name)): version for name, version in (line.split("==") for line in lines if line)}


def test_every_folder_of_modules_is_a_declared_package_with_a_docstring() -> None:
    folders = PYPROJECT["tool"]["setuptools"]["package-dir"]
    assert set(folders) == set(PYPROJECT["tool"]["setuptools"]["packages"])
    assert {ROOT / folder for folder in folders.values()} == {path.parent for path in modules()} | {ROOT / "blocktrain"}
    for folder in folders.values():
        assert ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())), f"{folder} has no __init__.py with a docstring"


def test_the_rooms_are_reached_through_links_that_stay_inside() -> None:
    for room in ROOMS:
        assert (ROOT / "blocktrain" / room).readlink() == Path("..") / room


def test_every_requirement_has_a_pin_inside_its_range() -> None:
    project = PYPROJECT["project"]
    pinned = pins()
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt has no pin for {requirement.name}"
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}, which was tested"
    assert (pinned["hivemind"], pinned["torch"]) == ("1.1.12", "2.13.0")


def test_continuous_integration_runs_the_checks_and_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert [line for line in script.read_text().splitlines() if line.startswith("make ")] == ["make check", "make test"]


@pytest.mark.parametrize("path", list(modules()), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_one_idea(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says in its docstring where it belongs and why"
    assert len(text.splitlines()) <= LONGEST_MODULE
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            assert node.end_lineno - node.lineno < LONGEST_FUNCTION, f"{node.name} is too long"


def test_nothing_can_turn_bytes_into_code() -> None:
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name.split(".")[0] for alias in node.names} | {(getattr(node, "module", None) or "").split(".")[0]}
                assert not names & forbidden, f"{path}:{node.lineno}"
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "torch.load", "np.load", "numpy.load"), f"{path}:{node.lineno}: {called}"


def test_no_file_names_the_machine_it_was_written_on() -> None:
    homes = re.compile("|".join(("/" + "work/", "/" + "root/", "/" + "opt/wheels")))
    for path in texts():
        match = homes.search(path.read_text(encoding="utf-8"))
        assert match is None, f"{path.relative_to(ROOT)} names {match.group() if match else ''}"


def test_links_between_documents_lead_somewhere() -> None:
    for path in texts():
        if path.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            if not target.startswith(("http://", "https://", "mailto:")):
                assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}"
