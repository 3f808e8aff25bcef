"""`blocktrain doctor`: whether this machine can hold a block, and how to mend what is in the way."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from blocktrain.node import runtime
from blocktrain.node.commands import checks, frame
from blocktrain.node.commands.settings import ConfigFile
from blocktrain.node.config import DoctorConfig
from blocktrain.node.runtime import Runtime

if TYPE_CHECKING:
    from blocktrain.node.doctor import Finding

_COLOURS: Final = {"ok": "\033[32m", "warn": "\033[33m", "fail": "\033[31m"}
_RESET: Final = "\033[0m"


def doctor_(wanted: DoctorConfig | None = None, *, config: ConfigFile = None) -> int:
    """Check this machine before it joins: versions, device, memory, disk, data, files, ports, clock, each initial peer, and NAT.

    Every line begins with ok, warn or fail; warn and fail say how to mend it. The exit code is 0 unless something failed.
    """
    wanted = wanted or DoctorConfig()
    checks.check_doctor(wanted)
    return runtime.run(lambda real: _examine(wanted, real))


async def _examine(wanted: DoctorConfig, real: Runtime) -> int:
    from blocktrain.node.doctor import FAIL, examine

    found: list[Finding] = []
    async for finding in examine(wanted, real):
        found.append(finding)
        if not wanted.json:
            print(_line(finding), flush=True)
        if real.stop.is_set():
            return 0
    failed = [finding for finding in found if finding.level == FAIL]
    if wanted.json:
        rows = [{key: value for key, value in asdict(finding).items() if key != "code"} for finding in found]
        print(json.dumps({"ok": not failed, "findings": rows}))
    return failed[0].code if failed else 0


def _line(finding: Finding) -> str:
    level = f"{finding.level:<4}"
    if frame.colourful(sys.stdout):
        level = f"{_COLOURS[finding.level]}{level}{_RESET}"
    return f"{level}  {finding.check:<8}  {finding.text}{f' -> {finding.fix}' if finding.fix else ''}"
