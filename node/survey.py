"""A look at a whole swarm from outside: who holds what, and what each of them says about itself. Behind `status --initial-peers`.

The signed records say who is there; each is then asked for its own status over a stream. Who does not answer is shown with what its record
says. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from blocktrain.node import join
from blocktrain.node.config import ClientConfig, Network
from blocktrain.node.launch import AGENT, look
from blocktrain.node.network import Net, open_network
from blocktrain.node.runtime import Runtime
from blocktrain.node.status import Status
from blocktrain.protocol.errors import NetworkFault, NoPeers, PeerFault
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import short
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.membership import Member, Members

ASK_TIMEOUT_S: Final = 5.0
ASKED_AT_ONCE: Final = 16


async def statuses(client: ClientConfig, runtime: Runtime) -> list[Status]:
    """Every node of the run that is meant, by block.

    Raises: Unreachable, NoPeers, UsageError, RefusedBySwarm: why there is nothing to show, in one line.
    """
    network = Network(initial_peers=client.initial_peers, daemon_start_timeout_s=client.daemon_start_timeout_s)
    async with open_network(network, None, Greeting(None, AGENT), runtime.clock, client_mode=True, children=runtime.children) as net:
        manifest = await join.find_run(net.directory, net.transport, client.run, timeout_s=client.timeout_s)
        net.transport.greeting = Greeting(manifest, AGENT)
        members = Members(manifest.run, manifest.blocks, net.directory.peer)
        await look(net, manifest, members, runtime.clock)
        found = members.everybody(runtime.clock())
        if not found:
            raise NoPeers(f"run {manifest.name} is known, but nobody announces a block of it")
        coverage = members.coverage(runtime.clock(), None)
        room = asyncio.Semaphore(ASKED_AT_ONCE)
        return list(await asyncio.gather(*(_ask(net, manifest, member, coverage, room) for member in found)))


async def _ask(net: Net, manifest: Manifest, member: Member, coverage: tuple[int, ...], room: asyncio.Semaphore) -> Status:
    """What one node says about itself, or what its record says where it does not answer. Its names for itself are not believed."""
    async with room:
        try:
            body = await join.ask(net.transport, member.peer, "status", timeout_s=ASK_TIMEOUT_S)
            status = Status.from_json(bytes(body))
            waiting_for = status.waiting_for
        except (NetworkFault, PeerFault) as fault:
            status = Status(round=member.round, digest=member.digest.hex()[:16], tokens_per_s=member.tokens_per_s, phase=member.phase)
            waiting_for = f"nothing it tells us ({fault})"
    return replace(
        status,
        run=manifest.run.hex(),
        run_name=manifest.name,
        blocks=manifest.blocks,
        block=member.block,
        peer=member.peer,
        name=status.name or short(member.peer),
        coverage=coverage,
        waiting_for=waiting_for,
        silent_s=0.0,
    )
