"""Which run, which block, whom to ask: everything that is decided before a node opens anything that costs.

A host reads its recipe. A joiner asks its initial peers, through a client's short-lived connection: whether our clocks agree, which runs
they know, who holds what; then the block is given, chosen (`--block auto`, placing.py), or asked for. A node that starts again takes run,
block and the addresses that worked from its store, also when all initial peers have died meanwhile. Told to `--wait`, it
tries again with growing pauses until somebody answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from blocktrain import __version__
from blocktrain.node import addresses, logs
from blocktrain.node import identity as identities
from blocktrain.node.config import AUTO, NodeConfig
from blocktrain.node.identity import Identity
from blocktrain.node.join import ask, find_run
from blocktrain.node.network import Net, open_network
from blocktrain.node.placing import choose_block, look
from blocktrain.node.runtime import Runtime
from blocktrain.node.status import quantity
from blocktrain.node.store import Store, known_stores, peek
from blocktrain.node.transport import Met
from blocktrain.protocol import limits, placement
from blocktrain.protocol.errors import NetworkFault, NoPeers, PeerFault, RefusedBySwarm, Unreachable, UsageError
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import PeerId, run_name
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.membership import Members

log = logging.getLogger("blocktrain.node")

AGENT: Final = f"blocktrain/{__version__}"
FIND_TIMEOUT_S: Final = 20.0  # for the swarm to tell which runs it knows
CLOCK_TIMEOUT_S: Final = 5.0  # for an initial peer to tell its time
RETRY_FIRST_S: Final = 2.0
RETRY_MOST_S: Final = 60.0
MAX_KNOWN: Final = 16  # addresses from a store that are dialled at the start
MAX_BLOCKS_LISTED: Final = 64


@dataclass(frozen=True)
class Plan:
    """What was decided."""

    manifest: Manifest
    block: int
    known_peers: tuple[str, ...] = ()  # to be dialled besides those of the config
    claimed_by: Identity | None = None  # under whom the block was claimed; the node keeps that identity if its store has none
    store: Path | None = None  # the store to go on from, where the config names none


def settings_for(plan: Plan, config: NodeConfig) -> NodeConfig:
    """The node's settings with what the plan adds: nobody of old need answer, but everybody is tried."""
    if not plan.known_peers:
        return config
    peers = tuple(dict.fromkeys((*config.network.initial_peers, *plan.known_peers[:MAX_KNOWN])))
    return replace(config, network=replace(config.network, initial_peers=peers, wait=True))


async def make_plan(config: NodeConfig, runtime: Runtime) -> Plan:
    """Raises: UsageError, Unreachable, NoPeers, RefusedBySwarm: in one line, with the remedy."""
    if config.new_run is not None:
        from blocktrain.node.recipe_file import load_recipe

        return Plan(load_recipe(config.new_run), config.training.block if config.training.block not in (None, AUTO) else 0)
    if not config.network.initial_peers:
        assert config.files.store is not None, "checked by the command"
        again = _from_store(config.files.store, config)
        log.info("starting again from %s, with %d known addresses", again.store, len(again.known_peers))
        return again
    pause_s = RETRY_FIRST_S
    while True:
        try:
            return await _from_swarm(config, runtime)
        except (Unreachable, NoPeers) as error:
            if isinstance(error, Unreachable) and (plan := _remembered(config)) is not None:
                log.warning("%s; going on from the store %s with %d known addresses", error, plan.store, len(plan.known_peers))
                return plan
            if not config.network.wait:
                raise
            logs.say_once_a_minute(log, logging.WARNING, "waiting", f"{error}; trying again until somebody answers")
        await asyncio.sleep(pause_s * runtime.rng.uniform(0.8, 1.2))
        pause_s = min(2 * pause_s, RETRY_MOST_S)


# ---- from the swarm -------------------------------------------------------------------------------------------------------------------


async def _from_swarm(config: NodeConfig, runtime: Runtime) -> Plan:
    met: list[Met] = []
    network = replace(config.network, wait=False)
    with identities.temporary() as nobody:
        async with open_network(
            network, nobody, Greeting(None, AGENT), runtime.clock,
            client_mode=True, children=runtime.children, on_hello=met.append,
        ) as net:  # fmt: skip
            await _ask_the_time(net, network.initial_peers)
            check_clock(met)
            manifest = await find_run(net.directory, net.transport, config.run, timeout_s=FIND_TIMEOUT_S)
            block = config.training.block
            if block in (None, AUTO) and config.files.store is not None and (owner := peek(config.files.store.expanduser())):
                block = owner[1]  # a store is for one block
            if block is None:
                block = await _ask_for_block(net, manifest, config, runtime)
            if block == AUTO:
                block = await choose_block(net, manifest, clock=runtime.clock, rng=runtime.rng)
                return Plan(manifest, block, claimed_by=nobody)
    if not 0 <= block < manifest.blocks:
        raise UsageError(f"--block {block}: run {manifest.name} has blocks 0 … {manifest.blocks - 1}")
    return Plan(manifest, block)


async def _ask_the_time(net: Net, initial_peers: tuple[str, ...]) -> None:
    """Every hello tells a clock. A stock DHT node says none, and nobody need answer."""

    async def one(text: str) -> None:
        peer = PeerId(addresses.parse(text, "--initial-peers", needs_peer=True).peer)
        with contextlib.suppress(NetworkFault, PeerFault):
            await ask(net.transport, peer, "ping", timeout_s=CLOCK_TIMEOUT_S)

    await asyncio.gather(*(one(text) for text in initial_peers))


def check_clock(met: list[Met]) -> None:
    """Compare our clock with those of the peers that we asked, and say the difference.

    Raises: RefusedBySwarm: it is too large: records would expire at once or linger, and nobody would find anybody.
    """
    skews = {each.peer: each.skew_s for each in met if each.rtt_s is not None}
    if not skews:
        return
    skew_s = statistics.median(skews.values())
    peers = f"{len(skews)} peer{'s' if len(skews) > 1 else ''}"
    words = f"{abs(skew_s):.1f} s {'behind' if skew_s > 0 else 'ahead of'} {'those' if len(skews) > 1 else 'that'} of {peers}"
    if abs(skew_s) > limits.MAX_CLOCK_SKEW_S:
        raise RefusedBySwarm(
            f"this machine's clock is {words}; at most {limits.MAX_CLOCK_SKEW_S:.0f} s are allowed, or records end too early or too late: "
            f"set the clock, for example with timedatectl set-ntp true (or that peer's, if it is the wrong one)"
        )
    log.info("this machine's clock is %s", words)


async def _ask_for_block(net: Net, manifest: Manifest, config: NodeConfig, runtime: Runtime) -> int:
    """Show who holds what, and let the person choose; without one, say what to type.

    Raises: UsageError: there is no terminal to ask on, or the answer is no block.
    """
    members = Members(manifest.run, manifest.blocks, net.directory.peer)
    await look(net, manifest, members, runtime.clock)
    rows = coverage_lines(members, runtime.clock())
    if not (sys.stdin.isatty() and sys.stderr.isatty()) or config.json:
        command = f"blocktrain-node --block auto --initial-peers {config.network.initial_peers[0]}"
        raise UsageError(
            f"which block of run {manifest.name} ({run_name(manifest.run)})? {'; '.join(rows)}; "
            f"type: {command} (or --block N in place of auto)"
        )
    print(f"run {manifest.name} ({run_name(manifest.run)}):", *rows, sep="\n  ", file=sys.stderr)
    print(f"which block? 0 … {manifest.blocks - 1}, or Enter for the one most in need: ", end="", file=sys.stderr, flush=True)
    answer = (await _line_from_terminal()).strip()
    if answer in ("", "auto"):
        return AUTO
    if not answer.isascii() or not answer.isdigit():
        raise UsageError(f"{answer!r} is neither a block number (0 … {manifest.blocks - 1}) nor auto")
    return int(answer)


def coverage_lines(members: Members, now: float) -> list[str]:
    """Per block: how many hold it, and what they train together."""
    holders = members.everybody(now)
    loads = placement.loads(members.blocks, holders)
    lines = []
    for block, load in enumerate(loads[:MAX_BLOCKS_LISTED]):
        speed = sum(member.tokens_per_s for member in holders if member.block == block)
        held = f"held by {load.replicas}, {quantity(speed)} tok/s" if load.replicas else "held by nobody"
        lines.append(f"block {block}: {held}")
    if len(loads) > MAX_BLOCKS_LISTED:
        lines.append(f"… and {len(loads) - MAX_BLOCKS_LISTED} more blocks")
    return lines


async def _line_from_terminal() -> str:
    """One line of standard input, read without a thread that would outlive a Ctrl-C."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str] = loop.create_future()
    descriptor = sys.stdin.fileno()

    def read() -> None:
        if not line.done():
            line.set_result(os.read(descriptor, 4096).decode("utf-8", "replace"))

    loop.add_reader(descriptor, read)
    try:
        return await line
    finally:
        loop.remove_reader(descriptor)


# ---- from a store ---------------------------------------------------------------------------------------------------------------------


def _from_store(folder: Path, config: NodeConfig) -> Plan:
    """A node that starts again from its own store: its run, its block, and the addresses that worked last time."""
    owner = peek(folder.expanduser())
    if owner is None:
        raise UsageError(f"there is no store in {folder}: host a run with --new-run, or join one with --initial-peers")
    run, block = owner
    if config.training.block not in (None, AUTO, block):
        raise UsageError(f"the store {folder} holds block {block}, not {config.training.block}")
    with Store.open(folder, run, block) as store:
        manifest, peers = store.load_manifest(), store.load_peers()
    if manifest is None:
        raise UsageError(f"the store {folder} has no manifest: join its run with --initial-peers")
    return Plan(manifest, block, tuple(peers), store=folder)


def _remembered(config: NodeConfig) -> Plan | None:
    """The node that we were before, where all initial peers are dead but a store remembers others: the one store that fits, or none.

    Without `--store` one fits that was joined by one of these initial peers.
    """
    folders = [config.files.store.expanduser()] if config.files.store is not None else known_stores()
    plans = []
    for folder in folders:
        with contextlib.suppress(UsageError):  # in use, damaged, or of another block
            plan = _from_store(folder, config)
            known = not config.run or plan.manifest.name == config.run or plan.manifest.run.hex().startswith(config.run.lower())
            ours = config.files.store is not None or not set(config.network.initial_peers).isdisjoint(plan.known_peers)
            if plan.known_peers and known and ours:  # a mistyped address of another swarm must not lead to an old one
                plans.append(plan)
    return plans[0] if len(plans) == 1 else None
