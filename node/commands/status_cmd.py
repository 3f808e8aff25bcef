"""`blocktrain status`: what this machine's nodes, or a swarm, say about themselves.

The nodes of this machine are read from their small files, without a network and without importing one, so that it answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from blocktrain.node import local, runtime
from blocktrain.node.commands import checks, frame
from blocktrain.node.commands.settings import ConfigFile
from blocktrain.node.config import ClientConfig, StatusConfig
from blocktrain.node.runtime import Runtime
from blocktrain.node.status import Status, render
from blocktrain.protocol.errors import NoPeers, UsageError

WATCH_EVERY_S: Final = 2.0
PIPED_WIDTH: Final = 250  # columns; a pipe has no width of its own, and a folded table cannot be searched


def status_(client: ClientConfig | None = None, view: StatusConfig | None = None, *, config: ConfigFile = None) -> int:
    """Show this machine's nodes: block, round, loss, peers, exchanges, and what each is waiting for.

    With --initial-peers, show the swarm that they know instead. With --json, print one object per node and line.
    """
    client, view = client or ClientConfig(), view or StatusConfig()
    checks.check_client(client)
    if client.initial_peers:
        if view.watch:
            raise UsageError("--watch follows this machine's nodes; with --initial-peers, ask once")
        return runtime.run(lambda real: _ask_swarm(client, view, real))
    if view.watch:
        return runtime.run(lambda real: _watch(client, view, real))
    _show(_read(client, runtime.wall_clock), view)
    return 0


async def _ask_swarm(client: ClientConfig, view: StatusConfig, real: Runtime) -> int:
    from blocktrain.node import survey

    _show(await survey.statuses(client, real), view)
    return 0


async def _watch(client: ClientConfig, view: StatusConfig, real: Runtime) -> int:
    while True:
        if frame.is_terminal(sys.stdout) and not view.json:
            sys.stdout.write("\033[H\033[2J")  # clear the screen, cursor home
        _show(_read(client, real.clock), view)
        if await real.stopped_within(WATCH_EVERY_S):
            return 0


def _read(client: ClientConfig, clock: runtime.Clock) -> list[Status]:
    """This machine's nodes, of one run where one is asked for. Raises: NoPeers: there is none."""
    found = local.read_local(clock)
    fitting = [status for status in found if not client.run or client.run == status.run_name or status.run.startswith(client.run.lower())]
    if fitting:
        return fitting
    if found:
        runs = ", ".join(sorted({f"{status.run_name} ({status.run[:12]})" for status in found}))
        raise NoPeers(f"no node of this user on this machine holds a block of run {client.run!r}; there are nodes of {runs}")
    raise NoPeers("no node of this user runs on this machine; start one with blocktrain-node, or ask a swarm with --initial-peers")


def _show(statuses: Sequence[Status], view: StatusConfig) -> None:
    if view.json:
        for status in statuses:
            print(status.to_json())
        sys.stdout.flush()
        return
    from rich.console import Console

    console = Console() if frame.is_terminal(sys.stdout) else Console(width=PIPED_WIDTH, color_system=None)
    console.print(render(statuses))
