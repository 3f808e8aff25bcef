"""Whether others can call us: some peers are asked to dial the addresses that we announce, and the status says what came of it.

libp2p would answer over the connection that is open already, so who is asked makes a new one, and lets the other side prove that it has the
asker's peer id (proof.py): another node that answers behind the same router does not count. That must not become a tool against others: a
peer dials only addresses whose host is the very one that it sees the asker come from (AutoNAT's rule), at most `MOST_DIALS` of them with a
short deadline, once per asker in `REST_S`, few at a time. Behind NAT an asker without a forwarded port is told so; one that has a relay's
address is reached by that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from blocktrain.node import addresses as parsing
from blocktrain.node import dialing, proof
from blocktrain.node.addresses import Address
from blocktrain.node.config import Network
from blocktrain.node.network import open_network
from blocktrain.node.ports import Transport
from blocktrain.node.runtime import Runtime
from blocktrain.protocol import limits, schema, wire
from blocktrain.protocol.errors import Malformed, NetworkFault, PeerFault, UsageError
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import PeerId, short
from blocktrain.protocol.messages import INFO, Answer, Ask, End
from blocktrain.protocol.schema import Bool, Text

log = logging.getLogger("blocktrain.node")

DIAL_TIMEOUT_S: Final = 3.0  # for one address
MOST_DIALS: Final = 2
AT_ONCE: Final = 4  # askers served at the same time
REST_S: Final = 10.0  # before the same peer is served again
MAX_ASKERS: Final = 256  # remembered
ANSWER_TIMEOUT_S: Final = 12.0
ANSWER_BYTES: Final = 2048
WITNESSES: Final = 3  # peers asked in one check
MAPPING_S: Final = 5.0  # that a router gets to open a port for us (UPnP, NAT-PMP)
MAPPING_LOOK_S: Final = 0.5
CHECK_S: Final = 5.0  # how often we look whether there is a reason to ask
AGAIN_S: Final = 600.0  # after an answer
AGAIN_UNSURE_S: Final = 60.0  # after a no, or none


@dataclass(frozen=True)
class Echo:
    """What a witness tells: from where it sees the asker, and whether a dial to there was answered."""

    seen: str = schema.field(Text(64))
    reached: bool = schema.field(Bool())
    address: str = schema.field(Text(limits.MAX_WHOLE_ADDRESS_CHARS), "")  # the one that was reached
    why: str = schema.field(Text(limits.MAX_TEXT_CHARS), "")


class Witness:
    """Dials askers back. `seen_at` tells from which addresses a peer is connected to us."""

    def __init__(self, seen_at: Callable[[PeerId], Awaitable[list[str]]], clock: Callable[[], float]) -> None:
        self._seen_at = seen_at
        self._clock = clock
        self._served: OrderedDict[PeerId, float] = OrderedDict()
        self._busy = 0

    async def answer(self, peer: PeerId, wanted: Sequence[str]) -> bytes:
        """The body of the answer to Ask("dial-back"). Raises: NetworkFault: not now. Malformed: no addresses."""
        now = self._clock()
        if self._busy >= AT_ONCE or now - self._served.get(peer, -REST_S) < REST_S:
            raise NetworkFault("asked too often; try another peer")
        try:
            asked = parsing.parse_all(wanted, "an address to dial back")
        except UsageError as error:
            raise Malformed(str(error), peer) from None
        self._served[peer] = now
        self._served.move_to_end(peer)
        if len(self._served) > MAX_ASKERS:
            self._served.popitem(last=False)
        self._busy += 1
        try:
            echo = await self._dial(peer, asked)
        finally:
            self._busy -= 1
        return wire.pack(schema.encode(echo))

    async def _dial(self, peer: PeerId, asked: Sequence[Address]) -> Echo:
        seen = [parsing.parse(text, "the daemon's address") for text in await self._seen_at(peer)]
        hosts = [address.host for address in seen if not address.relayed]
        if not hosts:
            return Echo("", False, "", "the connection to you runs through a relay")
        fitting = [address for address in asked if address.host in hosts and address.port and not address.relayed]
        why = f"you come from {hosts[0]}, and announce no address with that host"
        for address in fitting[:MOST_DIALS]:
            assert address.port is not None
            why = await proof.answers_as(address.host, address.port, peer, DIAL_TIMEOUT_S)
            if not why:
                return Echo(hosts[0], True, address.text)
            why = f"port {address.port} of {address.host}: {why}"
        return Echo(hosts[0], False, "", why)


@dataclass(frozen=True)
class Verdict:
    """What the status says: direct, relay, no or unknown; and why, with the address or the remedy."""

    word: str = "unknown"
    why: str = "nobody has been asked yet"


async def ask_back(transport: Transport, peer: PeerId, own: Sequence[str]) -> Echo:
    """Ask one peer to dial us. Raises: NetworkFault, PeerFault."""
    stream = await transport.open(peer, INFO, timeout_s=limits.OPEN_TIMEOUT_S)
    try:
        await stream.send(Ask("dial-back", tuple(own[: limits.MAX_ADDRESSES])), timeout_s=limits.OPEN_TIMEOUT_S)
        answer, body = await stream.receive(timeout_s=ANSWER_TIMEOUT_S, max_body=ANSWER_BYTES)
        if isinstance(answer, End):
            raise NetworkFault(f"{short(peer)}: {answer.reason}{f', {answer.detail}' if answer.detail else ''}")
        table = wire.unpack(body, ANSWER_BYTES) if isinstance(answer, Answer) else None
        if not isinstance(table, dict):
            raise Malformed(f"{type(answer).__name__} in answer to dial-back", peer)
        return schema.decode(Echo, table)
    finally:
        await stream.close()


def judge(own: Sequence[str], echoes: Sequence[tuple[PeerId, Echo]]) -> Verdict:
    """The verdict on our addresses from what witnesses said. One that reached us is enough: others may be cut off themselves."""
    for peer, echo in echoes:
        if echo.reached:
            return Verdict("direct", f"{short(peer)} dialled {echo.address or echo.seen}")
    relayed = [text for text in own if "/p2p-circuit" in text]
    if relayed:
        return Verdict("relay", f"by {relayed[0]}")
    if not echoes:
        return Verdict("unknown", "nobody who could be asked to dial us is known")
    peer, echo = echoes[0]
    remedy = (
        "turn on UPnP in the router or forward that port to this machine, and name it with --announce-maddrs; or give relays with --relay"
    )
    return Verdict("no", f"{short(peer)} could not dial us ({echo.why or 'no reason given'}); {remedy}")


class Reachability:
    """Keeps our verdict true: asks when there is somebody to ask, when our addresses change, and now and then."""

    def __init__(self, transport: Transport, own: Callable[[], Sequence[str]], peers: Callable[[], Sequence[PeerId]], rng: Random) -> None:
        self._transport = transport
        self._own = own
        self._peers = peers
        self._rng = rng
        self.verdict = Verdict()

    async def keep(self) -> None:
        """For the node's life."""
        loop = asyncio.get_running_loop()
        due = 0.0
        checked: tuple[str, ...] = ()
        while True:
            own = tuple(self._own())
            if loop.time() >= due or own != checked:
                peers = self._peers()
                if own and peers:
                    before, self.verdict, checked = self.verdict, await self.check(own, peers), own
                    due = loop.time() + (AGAIN_S if self.verdict.word in ("direct", "relay") else AGAIN_UNSURE_S)
                    if self.verdict.word != before.word:
                        level = logging.WARNING if self.verdict.word == "no" else logging.INFO
                        log.log(level, "reachable: %s; %s", self.verdict.word, self.verdict.why)
            await asyncio.sleep(CHECK_S)

    async def check(self, own: Sequence[str], peers: Sequence[PeerId]) -> Verdict:
        """Ask a few peers, one after the other, until one has reached us."""
        echoes: list[tuple[PeerId, Echo]] = []
        for peer in self._rng.sample(list(peers), min(WITNESSES, len(peers))):
            try:
                echoes.append((peer, await ask_back(self._transport, peer, own)))
            except (NetworkFault, PeerFault) as fault:
                log.debug("dial-back by %s: %s", short(peer), fault)
                continue
            if echoes[-1][1].reached:
                break
        return judge(own, echoes)


async def try_out(network: Network, runtime: Runtime, agent: str) -> Verdict:
    """Listen for a moment as a node with these settings would, and ask its initial peers to dial us. For `doctor`.

    Raises: UsageError: an address is of no use, or a port taken. Unreachable: no initial peer answers.
    """
    time_s = asyncio.get_running_loop().time
    async with open_network(network, None, Greeting(None, agent), runtime.clock, children=runtime.children) as net:
        until = time_s() + MAPPING_S
        while net.maps_ports and not any(dialing.is_public(text) for text in net.directory.addresses()) and time_s() < until:
            await asyncio.sleep(MAPPING_LOOK_S)
            await net.directory.refresh_addresses()
        own = net.directory.addresses()
        peers = [PeerId(parsing.parse(text, "--initial-peers", needs_peer=True).peer) for text in network.initial_peers]
        return await Reachability(net.transport, lambda: own, lambda: peers, runtime.rng).check(own, peers)
