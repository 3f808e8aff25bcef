"""Do the ranges in pyproject.toml hold? `python .ci/bounds.py oldest|newest [FOLDER]` (or `make bounds`) tries them out.

In a new virtual environment it installs blocktrain with the oldest (or newest) release that is allowed of every direct dependency
but torch, which stays as tested, imports all that a node imports (`blocktrain doctor`), and runs the tests that touch these packages most.
It is not part of every check: what others release tomorrow must not turn a change of ours red, and it downloads for a minute or two.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    "test_wire.py", "test_records.py", "test_messages.py", "test_identity.py", "test_directory.py", "test_store.py", "test_codecs.py",
    "test_cli.py", "test_status.py", "test_swarm.py", "test_user_problems_membership.py",
)  # fmt: skip


def wanted(which: str) -> list[str]:
    """What pip is to install, of the direct dependencies in pyproject.toml and torch as in constraints.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    out = [pinned]
    for line in project["dependencies"]:
        requirement, _, marker = line.partition(";")
        if requirement.startswith("torch"):
            continue
        oldest = requirement.split(",")[0].replace(">=", "==")
        out.append(f"{oldest if which == 'oldest' else requirement}{f'; {marker.strip()}' if marker else ''}")
    tests = [line for line in project["optional-dependencies"]["dev"] if line.startswith(("pytest", "hypothesis"))]
    return [*out, *tests]


def main(which: str, folder: Path) -> None:
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    upgrade = ["--upgrade", "--upgrade-strategy", "eager"] if which == "newest" else []
    subprocess.run([*pip, *upgrade, *wanted(which)], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
    names = [each.split(">")[0].split("=")[0].split(";")[0].strip() for each in wanted("newest")]
    subprocess.run([str(python), "-m", "pip", "list", "--format", "freeze"], check=True)
    say = "import sys; from blocktrain.node.commands.app import main; sys.exit(main())"
    subprocess.run([str(python), "-c", say, "doctor", "--device", "cpu"], check=True, cwd=folder)
    tests = [str(ROOT / "tests" / name) for name in TESTS]
    subprocess.run([str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], check=True, cwd=ROOT)
    print(f"the {which} of {', '.join(names)} work")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in ("oldest", "newest"):
        sys.exit(__doc__)
    if len(sys.argv) == 3:
        main(sys.argv[1], Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(sys.argv[1], Path(made))
