"""`--block auto`: looking at a run's blocks, saying that we choose, and committing once everybody who chooses with us has been seen.

Which block it is, is decided by protocol/placement.py, from who chooses and who holds what; this file sees to it that all who choose
at the same moment see each other. A newcomer writes its claim and goes on looking until the DHT gives its own claim back and nobody new has
turned up for a while: longer than a write and a read take here. Whoever claims later has then not yet looked, and will find our
commitment. So, as long as records are seen within that while, of any two nodes either both know of each other, or the later one
knows where the earlier one went. Where a record was seen later than that, a last look after the commitment finds the block too full, and
whoever committed last goes elsewhere, before anything heavy is loaded.
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
from blocktrain.protocol import ids, limits, placement
from blocktrain.protocol.errors import NetworkFault
from blocktrain.protocol.ids import NO_DIGEST, PeerId
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.membership import Members
from blocktrain.protocol.records import Announcement

log = logging.getLogger("blocktrain.node")

READ_TIMEOUT_S: Final = 5.0  # of one block's records; those that came by then count
WRITE_TIMEOUT_S: Final = 5.0
READS_AT_ONCE: Final = 16  # of a run of many blocks
WORD_LIFE_S: Final = 60.0  # a claim outlives looks that fail, a commitment the start of the node, whose own record then replaces it
CLAIM_BUCKET: Final = 0  # the root: every chooser reads it
SLOW_FACTOR: Final = 2.0  # the quiet time is at least this many times the slowest of our own writes and looks
CORRECTIONS: Final = 2  # moves after a commitment


@dataclass(frozen=True)
class Pace:
    """How long a choice may take: a look every `pause_s` (±half, so that choosers spread), until nothing was new for `quiet_s`."""

    pause_s: float = 0.8
    quiet_s: float = 4.0
    at_most_s: float = 30.0


PACE: Final = Pace()


async def look(net: Net, manifest: Manifest, members: Members, clock: Callable[[], float]) -> bool:
    """Read every block's records into `members`, following the buckets down as they are seen to be crowded. Whether our own is among them.

    Raises: NetworkFault: a block could not be read; the others were.
    """
    directory = net.directory
    turns = asyncio.Semaphore(READS_AT_ONCE)
    found_own = False

    async def one(block: int) -> None:
        nonlocal found_own
        read: set[int] = set()
        todo = [CLAIM_BUCKET]
        while todo:
            for bucket in todo:
                read.add(bucket)
                async with turns:
                    records = await directory.read_block(manifest.run, block, bucket, timeout_s=READ_TIMEOUT_S)
                for seen in records:
                    members.observe(seen, clock())
                    found_own |= seen.peer == directory.peer
            todo = [b for b in members.to_read(block, clock(), directory.peer, Random(block)) if b not in read]

    ends = await asyncio.gather(*(one(block) for block in range(manifest.blocks)), return_exceptions=True)
    for error in ends:
        if error is not None:
            raise error
    return found_own


async def choose_block(net: Net, manifest: Manifest, *, clock: Callable[[], float], rng: Random, pace: Pace = PACE) -> int:
    """Find the block most in need of us and say in the DHT that we take it; the node that starts next under this identity keeps it.

    Raises: NetworkFault: in all that time the DHT could never be read as a whole.
    """
    choice = _Choice(net, manifest, clock, rng, pace)
    await choice.look()
    await choice.meet_the_others()
    if not choice.looked:
        raise NetworkFault(f"the DHT does not tell who holds which block of run {manifest.name}; try again in a while")
    block = choice.block()
    log.debug("taking block %d, seeing %s", block, choice.seen())
    await choice.say(block, "joining")
    for _ in range(CORRECTIONS):
        better = await choice.correction(block)
        log.debug("block %d or better %s, seeing %s", block, better, choice.seen())
        if better is None:
            break
        block = better
        await choice.say(block, "joining")
    log.info("block %d needs us most: %s", block, choice.why(block))
    return block


class _Choice:
    """What we know and say while we choose."""

    def __init__(self, net: Net, manifest: Manifest, clock: Callable[[], float], rng: Random, pace: Pace) -> None:
        self.me = net.directory.peer
        self.members = Members(manifest.run, manifest.blocks, self.me)
        self._net = net
        self._manifest = manifest
        self._clock = clock
        self._rng = rng
        self._pace = pace
        self._time = asyncio.get_running_loop().time
        self.heard = False  # our word was found in the DHT
        self.looked = False  # all blocks were read at once
        self._slowest_s = 0.0
        self._last_s = 0.0
        self._said = (-1, "")
        self._said_until = 0.0

    async def pause(self) -> None:
        """At least as long as the last look took: a crowd that chooses must not keep the DHT busy with nothing else."""
        await asyncio.sleep(max(self._last_s, self._pace.pause_s) * self._rng.uniform(0.5, 1.5))

    async def look(self) -> bool:
        """Whether all blocks could be read; where not, what was known of the others holds."""
        began = self._time()
        try:
            self.heard |= await look(self._net, self._manifest, self.members, self._clock)
        except NetworkFault:
            return False
        self._last_s = self._time() - began
        self.looked = True
        self._slowest_s = max(self._slowest_s, self._last_s)
        return True

    async def meet_the_others(self) -> None:
        """Claim, and look until it is quiet: our claim can be read, and nobody new has been seen for a while."""
        claimed = self.block()
        began = quiet_since = self._time()
        known: set[PeerId] = set()
        await self.say(claimed, "choosing")
        while self._time() - began < self._pace.at_most_s:
            await self.pause()
            looked_at = self._time()
            whole, _ = await asyncio.gather(self.look(), self.say(claimed, "choosing"))
            seen = self._others()
            if not self.heard or seen - known:
                quiet_since = self._time()
            elif whole and looked_at - quiet_since >= max(self._pace.quiet_s, SLOW_FACTOR * self._slowest_s):
                return
            known |= seen

    def _others(self) -> set[PeerId]:
        """Who chooses now or has just committed. Whoever holds a block already is found sooner or later, and takes nobody's place."""
        now = self._clock()
        promised = {member.peer for member in self.members.everybody(now) if placement.is_promise(member)}
        return promised | {peer for peer, _ in self.members.choosers(now)}

    def block(self) -> int:
        """The block that is ours by all that was seen."""
        now = self._clock()
        others = [peer for peer, _ in self.members.choosers(now)]
        return placement.divide(self._manifest.blocks, self.members.everybody(now), others, self.me)

    def seen(self) -> str:
        """What we go by, for the log of a choice that somebody wonders about."""
        now = self._clock()
        holders = [
            f"{ids.short(member.peer)}={member.block}{'?' if placement.is_promise(member) else ''}"
            for member in self.members.everybody(now)
        ]
        return " ".join([*holders, *(f"{ids.short(peer)} wants {block}" for peer, block in self.members.choosers(now))]) or "nobody"

    async def correction(self, block: int) -> int | None:
        """Where to go instead of the block that we committed to, once all commitments of this moment can be seen. None: nowhere."""
        began = self._time()
        while self._time() - began < max(self._pace.quiet_s, SLOW_FACTOR * self._slowest_s):
            await self.pause()
            await asyncio.gather(self.look(), self.say(block, "joining"))
        now = self._clock()
        holders, choosers = self.members.everybody(now), len(self.members.choosers(now))
        return placement.surplus(self._manifest.blocks, holders, choosers, self.me, block, self._said_until)

    def why(self, block: int) -> str:
        """The others' part of it, in words."""
        load = placement.loads(self._manifest.blocks, self.members.everybody(self._clock()))[block]
        if not load.replicas:
            return "nobody else holds it"
        return f"held by {load.replicas} so far, and no block has less training done on it"

    async def say(self, block: int, phase: str) -> None:
        """A claim, or a commitment. It has no address: nobody need call us yet."""
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
        began = self._time()
        if (block, phase) != self._said or phase == "choosing":
            self._said = block, phase
            self._said_until = self._clock() + WORD_LIFE_S
        with contextlib.suppress(NetworkFault, TimeoutError):  # unheard, we still choose by what we see
            if not await self._net.directory.announce(word, CLAIM_BUCKET, expires_at=self._said_until, timeout_s=WRITE_TIMEOUT_S):
                log.debug("nobody took our word on block %d", block)
            self._slowest_s = max(self._slowest_s, self._time() - began)
