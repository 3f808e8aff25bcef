"""A client of the swarm: finds a run and its holders, and asks their chain for text or for the loss on a text.

No node is needed and no block is held; the identity is made for one command. `SwarmClient` is also the Python API: `async with
SwarmClient.connect(…) as swarm`, then `swarm.generate(request)`, which gives an async iterator of pieces, or `swarm.loss(windows)`.
What the commands need of a model is `Model`; a file taken home (compute/takehome.py) is one as well, without a swarm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from blocktrain.node import identity as identities
from blocktrain.node.compute.evaluation import ChainLoss, chain_loss
from blocktrain.node.compute.generation import Request, TextSweep
from blocktrain.node.config import ClientConfig, EvalConfig, GenerateConfig
from blocktrain.node.config import Network as NetworkConfig
from blocktrain.node.join import ask, find_run
from blocktrain.node.launch import AGENT, look
from blocktrain.node.local import read_local
from blocktrain.node.network import Net, open_network
from blocktrain.node.runtime import Runtime
from blocktrain.node.status import Status
from blocktrain.node.transport import Met
from blocktrain.node.traversal import Report, SwarmChain
from blocktrain.protocol import ids
from blocktrain.protocol.errors import NetworkFault, PeerFault, UsageError
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import PeerId
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.membership import Members
from blocktrain.protocol.sweep import SPECULATIVE

if TYPE_CHECKING:
    from blocktrain.node.compute.drafting import Drafter

log = logging.getLogger("blocktrain.client")

LOOKS: Final = 3  # at the directory that were answered, before a block counts as missing
MOST_LOOKS: Final = 7  # answered or not: who was asked may be frozen, or gone this moment, and then nothing is known yet
LOOK_PAUSE_S: Final = 0.5
LOOK_EVERY_S: Final = 5.0  # while a client lives: well below an announcement's life
LOOK_TIMEOUT_S: Final = 2.0  # while somebody waits for a text
PING_TIMEOUT_S: Final = 1.5
MOST_ASKED: Final = 4  # peers who may remember who held a block
MOST_PINGED: Final = 8  # holders of a block whose round trip is measured before one is chosen

Decode = Callable[[Sequence[int], bool], bytes]


class Model(Protocol):
    """What text can be asked of: a swarm, or a file."""

    @property
    def manifest(self) -> Manifest: ...

    def generate(self, request: Request, decode: Decode | None = None) -> AbstractAsyncContextManager[tuple[TextSweep, Report]]:
        """A request at work: iterate over `pieces()`, then ask for `result()`; the report says who served it."""
        ...

    async def loss(self, windows: Sequence[Sequence[int]]) -> tuple[ChainLoss, Report]:
        """The chain's loss on windows of equal length, nats per token."""
        ...


class SwarmClient:
    """A connection to one run. Make it with `connect`."""

    def __init__(self, net: Net, manifest: Manifest, runtime: Runtime, route: str = "auto") -> None:
        self.net = net
        self.manifest = manifest
        self.runtime = runtime
        self.route = route
        self.members = Members(manifest.run, manifest.blocks, net.directory.peer)
        self.drafter: Drafter | None = None  # a block of our own that drafts; none: the first holder does
        self._pinged: set[PeerId] = set()
        net.transport.on_hello = self._met

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, config: ClientConfig, runtime: Runtime, route: str = "auto") -> AsyncIterator[SwarmClient]:
        """Find the run that is meant and who holds its blocks. `route`: as in `traversal.SwarmChain`.

        Raises: Unreachable, NoPeers, UsageError, RefusedBySwarm: in one line.
        """
        initial_peers = config.initial_peers or _local_addresses(runtime)
        network = NetworkConfig(initial_peers=initial_peers, daemon_start_timeout_s=config.daemon_start_timeout_s)
        with identities.temporary() as nobody:
            async with open_network(
                network, nobody, Greeting(None, AGENT), runtime.clock, children=runtime.children, client_mode=True
            ) as net:
                manifest = await find_run(net.directory, net.transport, config.run, timeout_s=config.timeout_s)
                net.transport.greeting = Greeting(manifest, AGENT)
                client = cls(net, manifest, runtime, route)
                await client.look()
                looking = asyncio.create_task(client._keep_looking(), name="look")
                try:
                    yield client
                finally:
                    looking.cancel()
                    await asyncio.gather(looking, return_exceptions=True)

    async def look(self) -> None:
        """Read who holds what, now. What cannot be read in time stays as it was known."""
        await self._read()

    async def _read(self) -> bool:
        """Whether all of it could be read."""
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                await look(self.net, self.manifest, self.members, self.runtime.clock)
        except (NetworkFault, TimeoutError) as fault:
            log.debug("the directory did not answer: %s", fault)
            return False
        return True

    async def see_all_blocks(self) -> None:
        """Look until every block has a holder, but not for long: what is missing then is missing."""
        answered = 1
        for _ in range(MOST_LOOKS - 1):
            if answered >= LOOKS or not self.members.missing(self.runtime.clock(), None):
                break
            await asyncio.sleep(LOOK_PAUSE_S)
            answered += await self._read()
        if self.members.missing(self.runtime.clock(), None):
            await self._ask_who_was_there()

    @contextlib.asynccontextmanager
    async def chain(self, *, require_all: bool = True) -> AsyncIterator[SwarmChain]:
        """One peer per block, near ones first. Raises: NoPeers: naming the block that nobody holds."""
        await self.see_all_blocks()
        await self._measure()
        async with SwarmChain(
            self.net.transport,
            self.manifest,
            self.members,
            look=self.look,
            clock=self.runtime.clock,
            rng=self.runtime.rng,
            require_all=require_all,
            route=self.route,
        ) as chain:
            yield chain

    @contextlib.asynccontextmanager
    async def generate(self, request: Request, decode: Decode | None = None) -> AsyncIterator[tuple[TextSweep, Report]]:
        request.check(self.manifest)
        async with self.chain(require_all=not request.allow_missing) as chain:
            chain.report.drafted_here = self.drafter is not None and request.mode == SPECULATIVE
            travels = self.drafter.over(chain) if self.drafter is not None and request.mode == SPECULATIVE else chain
            yield TextSweep(travels, self.manifest, request, decode=decode), chain.report

    async def loss(self, windows: Sequence[Sequence[int]]) -> tuple[ChainLoss, Report]:
        async with self.chain() as chain:
            return await chain_loss(chain, self.manifest, windows), chain.report

    def _met(self, met: Met) -> None:
        if met.rtt_s is not None:
            self.members.succeeded(met.peer, self.runtime.clock(), met.rtt_s)

    async def _measure(self) -> None:
        """Ping holders that we have not met, so that the first choice is a measured one, and the dead are not chosen."""

        async def ping(peer: PeerId) -> None:
            try:
                await ask(self.net.transport, peer, "ping", timeout_s=PING_TIMEOUT_S)
            except (NetworkFault, PeerFault) as fault:
                self.members.failed(peer, self.runtime.clock(), str(fault))

        now, strangers = self.runtime.clock(), set[PeerId]()
        for block in range(self.manifest.blocks):
            unknown = [member.peer for member in self.members.holders(block, now) if member.rtt_s is None and not member.avoided_s]
            strangers.update(peer for peer in unknown[:MOST_PINGED] if peer not in self._pinged)
        self._pinged |= strangers
        await asyncio.gather(*(ping(peer) for peer in strangers))

    async def _ask_who_was_there(self) -> None:
        """Who holds other blocks remembers who held one that nobody holds now: for longer than records live."""
        now = self.runtime.clock()
        absent = {block for block in self.members.missing(now, None) if self.members.last_seen(block) is None}
        asked = [member.peer for member in self.members.everybody(now) if not member.avoided_s][:MOST_ASKED] if absent else []

        async def hear(peer: PeerId) -> None:
            with contextlib.suppress(NetworkFault, PeerFault):
                body = await ask(self.net.transport, peer, "status", timeout_s=PING_TIMEOUT_S)
                for row in Status.from_json(bytes(body)).absent:
                    if row.block in absent and row.seen_s_ago is not None:
                        ids.peer_bytes(PeerId(row.peer))
                        self.members.hearsay(row.block, PeerId(row.peer), now - row.seen_s_ago)

        await asyncio.gather(*(hear(peer) for peer in asked))

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._pinged.clear()
            await self.look()


@contextlib.asynccontextmanager
async def open_model(
    config: ClientConfig, file: Path | None, runtime: Runtime, route: str = "auto", drafter: Path | None = None
) -> AsyncIterator[Model]:
    """The swarm's model, or the one in a file. `drafter`: a file with a block that drafts here.

    Raises: UsageError, Unreachable, NoPeers, RefusedBySwarm: in one line.
    """
    if file is not None:
        from blocktrain.node.compute.takehome import OfflineModel

        if config.initial_peers:
            raise UsageError("--model answers without the swarm: leave out --initial-peers")
        if drafter is not None:
            raise UsageError("--drafter drafts for the swarm: leave it out with --model")
        yield await asyncio.to_thread(OfflineModel.load, file)
        return
    async with SwarmClient.connect(config, runtime, route) as swarm:
        if drafter is None:
            yield swarm
            return
        from blocktrain.node.compute.drafting import Drafter

        swarm.drafter = await asyncio.to_thread(Drafter.load, drafter, swarm.manifest)
        try:
            yield swarm
        finally:
            swarm.drafter.close()


def _local_addresses(runtime: Runtime) -> tuple[str, ...]:
    """Addresses of this user's nodes on this machine. Raises: UsageError: there is none."""
    found = tuple(status.addresses[0] for status in read_local(runtime.clock) if status.addresses)
    if not found:
        raise UsageError("no node runs on this machine; give an address of the swarm with --initial-peers /ip4/…/tcp/…/p2p/…")
    return found


# ---- the commands, which stand in asking.py ---------------------------------------------------------------------------------------


async def generate(config: ClientConfig, wish: GenerateConfig, prompt: bytes, runtime: Runtime) -> int:
    """`blocktrain generate`."""
    from blocktrain.node import asking

    return await asking.generate(config, wish, prompt, runtime)


async def evaluate(config: ClientConfig, wish: EvalConfig, runtime: Runtime) -> int:
    """`blocktrain eval`."""
    from blocktrain.node import asking

    return await asking.evaluate(config, wish, runtime)
