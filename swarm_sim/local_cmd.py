"""`blocktrain-sim local`, from its options to its exit code: where its results go, and what is said at the end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blocktrain.node.commands import frame
from blocktrain.protocol.errors import UsageError
from blocktrain.swarm_sim import local as story
from blocktrain.swarm_sim.chaos import Trouble
from blocktrain.swarm_sim.links import load
from blocktrain.swarm_sim.processes import PATIENT, Patience
from blocktrain.swarm_sim.report import Report, write_json

if TYPE_CHECKING:
    from blocktrain.swarm_sim.app import LocalOptions
    from blocktrain.swarm_sim.processes import Programs

STDOUT: Final = Path("-")


def local(options: LocalOptions, programs: Programs | None = None, patience: Patience = PATIENT) -> int:
    """Run it, say how it went, and return 0 only if all of it happened."""
    check_target(options.json)
    out = options.out or Path(time.strftime("swarm-%Y%m%d-%H%M%S"))
    links = load(options.links) if options.links is not None else None
    trouble = Trouble(options.kill_every or 0.0, options.freeze, links, options.byzantine, options.seed)
    page = _page(options.report, out, trouble)
    settings = story.Settings(
        out=out,
        blocks=options.blocks,
        replicas=options.replicas,
        minutes=options.minutes,
        recipe=options.recipe,
        data=options.data,
        prompt=options.prompt,
        kill=options.kill,
        trouble=trouble,
        page=page,
    )
    report = story.run(settings, programs, patience)
    _keep(report, options.json, page)
    lines = "\n".join(report.summary())
    if options.json == STDOUT:
        frame.say(lines)
    else:
        print(lines, flush=True)
    if report.page is not None and page is not None and page.is_file():
        frame.say(f"report: {page}")
    for what in report.failed:
        frame.say(f"blocktrain-sim: {what} (logs in {report.out / 'logs'})")
    if report.interrupted:
        frame.say("blocktrain-sim: stopped before the end")
    return report.exit_code


def check_target(path: Path | None) -> None:
    """Whether a JSON file can be written, before minutes are spent on its content. Raises: UsageError."""
    if path is None or path == STDOUT:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"--json {path}: give a file in a folder that exists, or - for standard output")


def _page(asked: Path | None, out: Path, trouble: Trouble) -> Path | None:
    """Where the report goes: where it was asked for, or into the run's folder after trouble. Raises: UsageError: it cannot go there."""
    if asked is None:
        return out.absolute() / "report.html" if trouble.any else None
    if asked.suffix not in (".html", ".htm") or asked.is_dir() or not asked.absolute().parent.is_dir():
        raise UsageError(f"--report {asked}: give a file that ends in .html, in a folder that exists")
    return asked.absolute()


def _keep(report: Report, target: Path | None, page: Path | None) -> None:
    """The plot, the summary beside it, the page, and the JSON where it was asked for. What cannot be written is one more failure."""
    try:
        if page is not None and report.page is not None:
            report.page.write_files(page)
        report.draw(report.out / "loss.png")
        write_json(report.out / "summary.json", report.as_json())
        if target == STDOUT:
            print(json.dumps(report.as_json(), indent=2, ensure_ascii=False), flush=True)
        elif target is not None:
            write_json(target, report.as_json())
    except OSError as error:
        report.fail(f"the results could not be written: {error}")
