"""Finding the swarm, and finding it again: every initial peer is tried, each failure has its reason, and nobody stays alone for long.

`join` connects at the start; "connected" means a DHT node answered a question there. `keep` runs for the node's life: whoever ought to be
our neighbour and is not (an initial peer, or a peer whose address we once read) is dialled again with growing pauses, so that two halves of
a swarm that lost each other become one again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from blocktrain.node import logs
from blocktrain.node.addresses import Address, parse
from blocktrain.protocol import ids
from blocktrain.protocol.errors import NetworkFault, Unreachable
from blocktrain.protocol.ids import PeerId

log = logging.getLogger(__name__)

TRY_TIMEOUT_S: Final = 8.0  # to dial one initial peer; a loaded one needs seconds
PING_TIMEOUT_S: Final = 5.0
GRACE_S: Final = 1.0  # how long the other initial peers may take after the first answered
CHECK_S: Final = 5.0  # how often `keep` looks; libp2p itself refuses to dial again within 5 s
PAUSE_S: Final = 5.0  # after a failed try, doubled with each
INITIAL_PAUSE_MAX_S: Final = 20.0  # two halves of a swarm are one again within a minute
KNOWN_PAUSE_MAX_S: Final = 120.0  # for the many others
AT_ONCE: Final = 4  # known peers dialled in one look
LOOK_AROUND_S: Final = 30.0
FIRST_LOOK_S: Final = 2.0  # at the start; dead nodes among the first that we hear of shall not delay it


class Links(Protocol):
    """What `Libp2p` gives."""

    @property
    def peer(self) -> PeerId: ...

    async def connect(self, peer: PeerId, addresses: Sequence[str] = (), *, timeout_s: float) -> None: ...

    async def ping(self, peer: PeerId, *, timeout_s: float) -> bool: ...

    async def look_around(self, *, timeout_s: float) -> None: ...

    def neighbours(self) -> set[PeerId]: ...

    def known(self) -> list[PeerId]: ...


@dataclass
class _Pause:
    until: float = 0.0
    length_s: float = PAUSE_S


class Bootstrap:
    """Joins by, and keeps to, these initial peers. `clock` is monotonic seconds."""

    def __init__(self, links: Links, initial_peers: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._links = links
        self._clock = clock
        self._initial = [parse(text, "--initial-peers", needs_peer=True) for text in initial_peers]
        self._pauses: dict[PeerId, _Pause] = {}
        self._looked_at = clock()

    async def join(self) -> None:
        """Try all initial peers at once; return soon after one answered. Each that failed is logged with its reason.

        Raises: Unreachable: none answered; every address with its reason.
        """
        if not self._initial:
            return
        tries = {asyncio.create_task(self._try(address), name=f"join {address.text}"): address for address in self._initial}
        reasons: dict[str, str] = {}
        pending: set[asyncio.Task[str]] = set(tries)
        timeout_s: float | None = None
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for task in done:
                    if reason := task.result():
                        reasons[tries[task].text] = reason
                        log.warning("initial peer %s: %s", tries[task].text, reason)
                    else:
                        timeout_s = GRACE_S
        finally:
            for task in pending:
                task.cancel()
        if timeout_s is None:
            each = "; ".join(f"{text}: {reason}" for text, reason in reasons.items())
            raise Unreachable(f"no initial peer answered ({each}); is one of them running, and reachable from here?")
        await self._links.look_around(timeout_s=FIRST_LOOK_S)

    async def _try(self, address: Address) -> str:
        """Dial one and ask it something. The reason why not, or ""."""
        peer = PeerId(address.peer)
        if peer == self._links.peer:
            return "that is this node itself"
        try:
            await self._links.connect(peer, [address.text], timeout_s=TRY_TIMEOUT_S)
        except NetworkFault as fault:
            return str(fault)
        if not await self._links.ping(peer, timeout_s=PING_TIMEOUT_S):
            return "it can be dialled, but no DHT node answers there"
        return ""

    async def keep(self) -> None:
        """For ever: dial whom we miss, and look around now and then."""
        while True:
            await asyncio.sleep(CHECK_S)
            now = self._clock()
            neighbours = self._links.neighbours()
            missed = [(PeerId(each.peer), each.text) for each in self._initial if each.peer not in neighbours]
            known = [(peer, "") for peer in reversed(self._links.known()) if peer not in neighbours]
            due = [(peer, text) for peer, text in missed if self._due(peer, now)]
            due += [(peer, text) for peer, text in known if self._due(peer, now) and peer not in dict(missed)][:AT_ONCE]
            found = await asyncio.gather(*(self._again(peer, text, now) for peer, text in due))
            for peer in neighbours:
                self._pauses.pop(peer, None)
            if any(found) or (neighbours and now - self._looked_at >= LOOK_AROUND_S):  # who was found knows others
                self._looked_at = now
                await self._links.look_around(timeout_s=PING_TIMEOUT_S)

    def _due(self, peer: PeerId, now: float) -> bool:
        return peer != self._links.peer and now >= self._pauses.setdefault(peer, _Pause()).until

    async def _again(self, peer: PeerId, text: str, now: float) -> bool:
        """Dial one whom we miss. Whether it is there."""
        pause = self._pauses[peer]
        pause.until = now + pause.length_s
        pause.length_s = min(2 * pause.length_s, INITIAL_PAUSE_MAX_S if text else KNOWN_PAUSE_MAX_S)
        with contextlib.suppress(NetworkFault):
            await self._links.connect(peer, [text] if text else (), timeout_s=TRY_TIMEOUT_S)
            if await self._links.ping(peer, timeout_s=PING_TIMEOUT_S):
                what = "initial peer" if text else "peer"
                logs.say_once_a_minute(log, logging.INFO, f"found {peer}", f"{what} {ids.short(peer)} answers (again)")
                self._pauses.pop(peer, None)
                return True
        return False
