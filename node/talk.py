"""What the user of a node sees while it runs: the status file, JSON lines on stdout where asked for, and now and then a line on stderr."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable

from blocktrain import __version__
from blocktrain.node.config import AUTO, NodeConfig
from blocktrain.node.local import StatusFile
from blocktrain.node.logs import say_once_a_minute
from blocktrain.node.runtime import Runtime
from blocktrain.node.status import Status, one_line
from blocktrain.protocol.manifest import Manifest

log = logging.getLogger("blocktrain.node")

STATUS_EVERY_S = 1.0
TALK_EVERY_S = 30.0  # a line on the terminal, where nothing else happened


class Talk:
    """Repeats the node's status from its first moment to its last. Use it as a context.

    Attributes:
        alive: the node is up; a wish to stop is now its own business.
    """

    def __init__(self, config: NodeConfig, runtime: Runtime) -> None:
        self._config = config
        self._runtime = runtime
        self._started_at = runtime.clock()
        self._file = StatusFile()
        self._known: tuple[Manifest, int] | None = None
        self.alive = False
        self._build: Callable[[], Status] = self._starting
        self._talked_at = self._started_at

    def __enter__(self) -> Talk:
        self.write()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.remove()

    def know(self, manifest: Manifest, block: int) -> None:
        self._known = manifest, block
        self.write()

    def show(self, build: Callable[[], Status]) -> None:
        self._build = build
        self.write()

    def write(self) -> None:
        status = self._build()
        self._file.write(status)
        if self._config.json:
            _print(status.to_json())
        now = self._runtime.clock()
        if now - self._talked_at >= TALK_EVERY_S:
            self._talked_at = now
            log.info("%s", one_line(status))

    async def repeat(self) -> None:
        """For the node's life. Raises: BrokenPipeError: whoever read our JSON went away."""
        while True:
            self.write()
            await asyncio.sleep(STATUS_EVERY_S)

    def _starting(self) -> Status:
        now = self._runtime.clock()
        manifest, block = self._known or (None, self._config.training.block)
        block = None if block == AUTO else block
        return Status(
            run=manifest.run.hex() if manifest else "",
            run_name=manifest.name if manifest else "",
            block=block,
            blocks=manifest.blocks if manifest else 0,
            name=self._config.name,
            pid=os.getpid(),
            version=__version__,
            phase="starting",
            waiting_for="the network and the block" if manifest else "the initial peers' word on the run",
            next_action="join the swarm",
            phase_s=now - self._started_at,
            uptime_s=now - self._started_at,
            written_at=now,
        )


def _print(line: str) -> None:
    """A line on stdout; a full disk behind it must not end a node. Raises: BrokenPipeError."""
    try:
        print(line, file=sys.stdout, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        say_once_a_minute(log, logging.WARNING, "stdout", f"the status cannot be written to stdout: {error.strerror}")
