"""What the pages say about the program is what the program says about itself."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_parts_are_up_to_date(generator: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    code = generator.main(["--check"])
    assert code == 0, f"{capsys.readouterr().err.strip()}: run `make docs`"


def test_every_command_has_its_table(generator: ModuleType) -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    for name in generator.parts():
        if name.startswith("blocktrain ") or name == "blocktrain-sim local":
            assert f"<!-- generated: {name} -->" in text


def test_a_stale_table_is_found(generator: ModuleType) -> None:
    text = "before\n<!-- generated: exit codes -->\nold\n<!-- end -->\nafter\n"
    new = generator.renewed(text, generator.parts())
    assert "\nold\n" not in new
    assert "| 130 |" in new
    assert new.startswith("before\n")
    assert new.endswith("<!-- end -->\nafter\n")
    assert generator.renewed(new, generator.parts()) == new


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_and_file_that_a_page_names_exists(page: Path, generator: ModuleType) -> None:
    text = page.read_text(encoding="utf-8")
    known = {option for table in generator.parts().values() for option in re.findall(r"--[a-z][a-z-]*", table())}
    known |= {"--help", "--version", "--brief"}
    for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"<!--.*?-->", "", text)):
        assert option in known, f"{page.name} names {option}"
    for name in re.findall(r"`((?:node|protocol|swarm_sim|compute|commands)/[\w/]+\.py)`", text):
        assert (ROOT / name).exists() or (ROOT / "node" / name).exists(), f"{page.name} names {name}"
