"""A node's whole presence in the network, opened and closed as one: daemon, DHT, streams, notice board, and the search for the swarm.

What the service and the client commands use. A client (`client_mode`) listens nowhere, serves nothing and keeps no records for others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from blocktrain.node import addresses, dialing, identity
from blocktrain.node.bootstrap import Bootstrap
from blocktrain.node.config import Network
from blocktrain.node.daemon import Children, Owned, Settings
from blocktrain.node.directory import DhtDirectory
from blocktrain.node.identity import Identity
from blocktrain.node.transport import Libp2pTransport, Met
from blocktrain.protocol.errors import NetworkFault, Unreachable
from blocktrain.protocol.handshake import Greeting

if TYPE_CHECKING:
    from blocktrain.node.libp2p import Libp2p

log = logging.getLogger(__name__)

ADDRESSES_S: Final = 10.0  # how often our own addresses are looked up again


@dataclass(frozen=True)
class Net:
    """An open network. `died` is set when the daemon is gone, `reason` says how: open another, or end."""

    transport: Libp2pTransport
    directory: DhtDirectory
    libp2p: Libp2p
    maps_ports: bool = False  # a router is asked to open a port

    @property
    def died(self) -> asyncio.Event:
        return self.libp2p.died

    @property
    def reason(self) -> str:
        return self.libp2p.reason


@asynccontextmanager
async def open_network(
    config: Network,
    who: Identity | None,
    greeting: Greeting,
    clock: Callable[[], float],
    *,
    client_mode: bool = False,
    children: Children | None = None,
    on_hello: Callable[[Met], None] = lambda met: None,
) -> AsyncIterator[Net]:
    """Go online and join by the initial peers.

    Args:
        who: our identity; None makes one for this time only.
        greeting: what our hellos say; `transport.greeting` may be changed later, when the run is known.
        clock: Unix seconds, as the swarm has it.
        children: told of the daemon's pid, to kill it if we are ended by force.
        on_hello: called with every hello that a peer sends us, for clock skew and round trips.
    Raises: UsageError: an address is malformed, or a port in use. DoesNotFit: no daemon for this platform. Unreachable: the daemon does not
        start, or no initial peer answers (unless `config.wait`: then we start alone and keep trying).
    """
    addresses.parse_all(config.initial_peers, "--initial-peers", needs_peer=True)
    addresses.parse_all(config.relays, "--relay", needs_peer=True)
    local = dialing.on_loopback(config.host_maddrs, config.initial_peers)
    dialing.check_announce(config.announce_maddrs, local)
    if not client_mode:
        dialing.check_reachable(config.host_maddrs, config.announce_maddrs, local)
        dialing.check_ports(config.host_maddrs)
    me = identity.temporary() if who is None else who
    settings = Settings(
        host_maddrs=config.host_maddrs,
        announce_maddrs=config.announce_maddrs,
        relays=config.relays,
        public=config.public,
        client=client_mode,
        local=local,
        start_timeout_s=config.daemon_start_timeout_s,
    )
    tasks = Owned()
    try:
        from blocktrain.node.libp2p import Libp2p  # late: it imports hivemind

        libp2p = Libp2p(settings, me, clock, children)
        try:
            await libp2p.start()
            transport = Libp2pTransport(libp2p, greeting, clock, on_hello)
            directory = DhtDirectory(libp2p, clock, swarm_is_loopback=local)
            await directory.refresh_addresses()
            bootstrap = Bootstrap(libp2p, config.initial_peers)
            try:
                await bootstrap.join()
            except Unreachable as error:
                if not config.wait:
                    raise
                log.warning("%s; starting alone, and trying again", error)
            tasks.start(bootstrap.keep(), "bootstrap")
            tasks.start(_keep_addresses(directory), "addresses")
            yield Net(transport, directory, libp2p, settings.maps_ports)
        finally:
            await tasks.close()
            await libp2p.stop()
    finally:
        if who is None:
            me.release()


async def _keep_addresses(directory: DhtDirectory) -> None:
    while True:
        await asyncio.sleep(ADDRESSES_S)
        try:
            await directory.refresh_addresses()
        except NetworkFault as fault:
            log.debug("our addresses: %s", fault)
