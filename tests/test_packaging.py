"""What is installed is what stands in the rooms: every module, every data file, one import name, and it works far from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"node": "blocktrain/node", "protocol": "blocktrain/protocol", "swarm_sim": "blocktrain/swarm_sim"}
NOT_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "swarm-*")


def ran(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def sources(checkout: Path) -> Iterator[str]:
    """Every file that an installation must hold, by its name inside it."""
    for room, package in ROOMS.items():
        for path in (checkout / room).rglob("*"):
            if path.suffix in (".py", ".toml"):
                yield f"{package}/{path.relative_to(checkout / room).as_posix()}"
    yield "blocktrain/__init__.py"
    yield "blocktrain/py.typed"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that building leaves nothing in the real one."""
    copy = tmp_path_factory.mktemp("checkout") / "blocktrain"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=NOT_SOURCES)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    ran(sys.executable, "-m", "pip", "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation", "-w", out, checkout, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel, and nothing else, was installed."""
    target = tmp_path_factory.mktemp("site")
    ran(sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", target, wheel, cwd=target)
    return target


def elsewhere(installed: Path) -> dict[str, str]:
    """An environment in which the installed copy, not the checkout, is found."""
    return {**os.environ, "PYTHONPATH": str(installed)}


def test_the_wheel_holds_every_module_and_data_file_of_the_three_rooms(checkout: Path, wheel: Path) -> None:
    assert wheel.name.startswith("blocktrain-")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == set(sources(checkout))


def test_only_the_name_blocktrain_is_installed(wheel: Path) -> None:
    top = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"blocktrain"}


def test_the_wheel_names_its_commands_licence_and_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name.split(".dist-info/")[1]: name for name in archive.namelist() if ".dist-info/" in name}
        scripts = archive.read(names["entry_points.txt"]).decode()
        metadata = archive.read(names["METADATA"]).decode()
    assert "licenses/LICENSE" in names
    for program in ("blocktrain", "blocktrain-node", "blocktrain-sim"):
        assert f"{program} = blocktrain." in scripts
    for extra in ("dev", "datasets"):
        assert f"Provides-Extra: {extra}\n" in metadata


def test_every_module_of_the_installed_wheel_imports_far_from_the_checkout(checkout: Path, installed: Path, tmp_path: Path) -> None:
    script = """
import importlib, pkgutil, blocktrain
names = [module.name for module in pkgutil.walk_packages(blocktrain.__path__, "blocktrain.")]
for name in names:
    importlib.import_module(name)
print(blocktrain.__file__, len(names))
"""
    where, count = ran(sys.executable, "-c", script, cwd=tmp_path, env=elsewhere(installed)).split()
    assert Path(where).is_relative_to(installed)
    assert int(count) == len([name for name in sources(checkout) if name.endswith(".py")]) - 1  # all but blocktrain itself


def test_a_source_archive_builds_the_same_wheel(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    build = "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])"
    ran(sys.executable, "-c", build, "sdist", tmp_path, cwd=checkout)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    ran(sys.executable, "-c", build, "wheel", tmp_path, cwd=tmp_path / archive.name.removesuffix(".tar.gz"))
    (again,) = tmp_path.glob("*.whl")
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())
