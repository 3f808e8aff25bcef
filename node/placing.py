"""`--block auto`: looking at a run's blocks, claiming one, and staying once all others who choose at the same moment have claimed theirs.

What to claim is decided by protocol/placement.py; this file writes claims and reads those of others until the picture is firm. It takes a
few seconds, before anything heavy is loaded. Of two nodes that claim at once at least one reads after the other has written; and whoever
commits says so ("joining" instead of "choosing") before it goes on, so the other then sees a holder that does not move any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from blocktrain.node.network import Net
from blocktrain.protocol import limits, placement
from blocktrain.protocol.errors import NetworkFault
from blocktrain.protocol.ids import NO_DIGEST
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.membership import Members
from blocktrain.protocol.records import Announcement

log = logging.getLogger("blocktrain.node")

READ_TIMEOUT_S: Final = 8.0
CLAIM_LIFE_S: Final = 60.0  # a claim outlives the start of the node that made it; its own announcement then replaces it
CLAIM_BUCKET: Final = 0  # the root: every chooser reads it


@dataclass(frozen=True)
class Pace:
    """How long a choice may take. A firm picture must be seen `looks` times in a row, `pause_s` apart (±half, so that choosers spread)."""

    pause_s: float = 1.0
    looks: int = 3
    at_most_s: float = 20.0


PACE: Final = Pace()


async def look(net: Net, manifest: Manifest, members: Members, clock: Callable[[], float]) -> None:
    """Read every block's records into `members`, all blocks at once, following the buckets down as they are seen to be crowded."""

    directory = net.directory

    async def one(block: int) -> None:
        read: set[int] = set()
        todo = [CLAIM_BUCKET]
        while todo:
            for bucket in todo:
                read.add(bucket)
                for seen in await directory.read_block(manifest.run, block, bucket, timeout_s=READ_TIMEOUT_S):
                    members.observe(seen, clock())
            todo = [b for b in members.to_read(block, clock(), directory.peer, Random(block)) if b not in read]

    await asyncio.gather(*(one(block) for block in range(manifest.blocks)))


async def choose_block(net: Net, manifest: Manifest, *, clock: Callable[[], float], rng: Random, pace: Pace = PACE) -> int:
    """Find the block most in need of us and say in the DHT that we take it; the node that starts next under this identity keeps it.

    Raises: NetworkFault: the DHT could not be read at all.
    """
    choice = _Choice(net, manifest, clock)
    await choice.look()
    block = placement.most_needed(manifest.blocks, choice.members.everybody(clock()), choice.me)
    await choice.say(block, "choosing")
    began, firm = clock(), 0
    while firm < pace.looks and clock() - began < pace.at_most_s:
        await asyncio.sleep(pace.pause_s * rng.uniform(0.5, 1.5))
        with contextlib.suppress(NetworkFault):  # what is known so far holds
            await choice.look()
        settled = choice.settle(block)
        if settled.block != block:
            log.debug("block %d has claims enough; taking block %d", block, settled.block)
            block, firm = settled.block, 0
            await choice.say(block, "choosing")
        else:
            firm = firm + 1 if settled.firm else 0
    await choice.say(block, "joining")
    log.info("block %d needs us most: %s", block, choice.why(block))
    return block


class _Choice:
    """What we know and say while we choose."""

    def __init__(self, net: Net, manifest: Manifest, clock: Callable[[], float]) -> None:
        self.me = net.directory.peer
        self.members = Members(manifest.run, manifest.blocks, self.me)
        self._net = net
        self._manifest = manifest
        self._clock = clock

    async def look(self) -> None:
        await look(self._net, self._manifest, self.members, self._clock)

    def settle(self, block: int) -> placement.Settled:
        now, me = self._clock(), self.me
        claims = [*self.members.choosers(now), (me, block)]
        return placement.settle(self._manifest.blocks, self.members.everybody(now), claims, me)

    def why(self, block: int) -> str:
        """The others' part of it, in words."""
        load = placement.loads(self._manifest.blocks, self.members.everybody(self._clock()))[block]
        if not load.replicas:
            return "nobody else holds it"
        return f"held by {load.replicas} so far, and no block has less training done on it"

    async def say(self, block: int, phase: str) -> None:
        """A claim, or that it stands. It has no address: nobody need call us yet."""
        word = Announcement(
            run=self._manifest.run,
            block=block,
            phase=phase,
            round=0,
            digest=NO_DIGEST,
            tokens_per_s=0.0,
            load=0.0,
            protocol_min=limits.PROTOCOL_MIN,
            protocol_max=limits.PROTOCOL_MAX,
        )
        with contextlib.suppress(NetworkFault, TimeoutError):  # unheard, we still choose by what we see
            await self._net.directory.announce(word, CLAIM_BUCKET, expires_at=self._clock() + CLAIM_LIFE_S, timeout_s=READ_TIMEOUT_S)
