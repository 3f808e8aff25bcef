"""The node's status at one moment, put together from the core, the replica, the network and the store."""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from blocktrain import __version__
from blocktrain.node import daemon, logs
from blocktrain.node.network import Net
from blocktrain.node.reachability import Reachability
from blocktrain.node.service import Node
from blocktrain.node.status import PeerStatus, Status
from blocktrain.node.store import Store
from blocktrain.node.transport import Met
from blocktrain.protocol import limits
from blocktrain.protocol.errors import RefusedBySwarm

log = logging.getLogger("blocktrain.node")

MAX_CLOCKS: Final = 32
READING_LIFE_S: Final = 600.0  # then a reading is too old to judge by
JUDGES: Final = 3  # peers whose clocks must be known before ours is called wrong: one alone may be the wrong one
CLOCK_CHECK_S: Final = 5.0
WRONG_FOR_S: Final = 60.0  # a clock that is being set right is given so long


@dataclass(frozen=True)
class _Reading:
    """A peer's clock minus the monotonic one; so that when our own clock is set, every reading shows it at once."""

    ahead_s: float
    at: float
    asked: bool  # we chose whom to ask, and know the round trip


class Clocks:
    """The clocks of the peers whose hellos we got, against ours: at most one reading a peer, of the last few peers."""

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._readings: OrderedDict[str, _Reading] = OrderedDict()

    def met(self, met: Met) -> None:
        now = self._monotonic()
        old = self._readings.get(met.peer)
        if old is not None and old.asked and met.rtt_s is None and now - old.at < READING_LIFE_S:
            return  # the better reading stands
        self._readings[met.peer] = _Reading(met.skew_s + self._clock() - now, now, met.rtt_s is not None)
        self._readings.move_to_end(met.peer)
        while len(self._readings) > MAX_CLOCKS:
            self._readings.popitem(last=False)

    def skew_s(self, *, asked_only: bool = False) -> float | None:
        """The peers' median clock minus ours, in seconds. None: no peer's is known."""
        found = self._fresh(asked_only)
        return statistics.median(found) if found else None

    def _fresh(self, asked_only: bool) -> list[float]:
        now, wall = self._monotonic(), self._clock()
        fresh = [each for each in self._readings.values() if now - each.at < READING_LIFE_S and (each.asked or not asked_only)]
        return [each.ahead_s + now - wall for each in fresh]

    async def too_far_off(self) -> RefusedBySwarm:
        """Watch for the node's life. Ends when our clock has been wrong for a while, by the word of enough peers that we asked ourselves.

        Where fewer are known, or for a shorter while, it is only said: it may be the others that are wrong.
        """
        since: float | None = None
        while True:
            await asyncio.sleep(CLOCK_CHECK_S)
            skew_s, judges = self.skew_s(), len(self._fresh(asked_only=True))
            if skew_s is None or abs(skew_s) <= limits.MAX_CLOCK_SKEW_S:
                since = None
                continue
            words = f"this machine's clock is {abs(skew_s):.0f} s {'behind' if skew_s > 0 else 'ahead of'} its peers'"
            remedy = "our announcements end too early or too late for them: set the clock, for example with timedatectl set-ntp true"
            logs.say_once_a_minute(log, logging.WARNING, "clock", f"{words} ({len(self._readings)} known); {remedy}")
            judged = self.skew_s(asked_only=True)
            if judges < JUDGES or judged is None or abs(judged) <= limits.MAX_CLOCK_SKEW_S:
                since = None
                continue
            since = self._monotonic() if since is None else since
            if self._monotonic() - since >= WRONG_FOR_S:
                return RefusedBySwarm(f"{words}, by the word of {judges} of them; {remedy}; then start the node again, its state is saved")


@dataclass(frozen=True)
class Static:
    """What does not change while a node lives."""

    name: str
    device: str
    data: str
    store: Store
    net: Net
    clocks: Clocks
    reachability: Reachability
    started_at: float
    fresh: bool  # no checkpoint was found: the untrained start


def build(node: Node, static: Static, now: float) -> Status:
    """Everything a node can say about itself."""
    core, members = node.core, node.core.members
    published, progress = node.parts.replica.published(), node.parts.replica.progress()
    phase, waiting_for, phase_s, then = core.waiting(now)
    if node.paused and phase == "training":
        phase, waiting_for, then = "paused", "SIGUSR1", "training"
    silent_s = static.net.libp2p.silent_s
    if silent_s:
        waiting_for = f"the libp2p daemon, which has not answered for {silent_s:.0f} s"
        then = f"ending with its reason after {daemon.FROZEN_S:.0f} s, for whoever starts nodes again"
    counters = core.counters
    return Status(
        run=node.manifest.run.hex(),
        run_name=node.manifest.name,
        name=static.name,
        peer=node.me,
        pid=os.getpid(),
        version=__version__,
        block=node.block,
        blocks=node.manifest.blocks,
        round=published.round,
        digest=published.digest.hex()[:16],
        loss=progress.loss,
        heldout=progress.heldout,
        steps=progress.steps,
        tokens=progress.tokens,
        tokens_per_s=progress.tokens_per_s,
        learning_rate=progress.learning_rate,
        peers=tuple(
            PeerStatus(
                peer=member.peer,
                block=member.block,
                phase=member.phase,
                round=member.round,
                tokens_per_s=member.tokens_per_s,
                seen_s_ago=max(0.0, now - (member.expires_at - node.config.network.ttl_s)),
                avoided=f"{members.why(member.peer)} ({member.avoided_s:.0f} s more)" if member.avoided_s > 0 else "",
                rtt_ms=None if member.rtt_s is None else member.rtt_s * 1000,
            )
            for member in core.everybody(now)
        ),
        coverage=members.coverage(now, node.block),
        absent=_absent(node, now),
        accepted=counters.accepted,
        late=counters.late,
        refused=counters.refused,
        one_sided=counters.one_sided,
        declined=counters.declined,
        own_rounds=counters.own_rounds,
        bytes_in=static.net.transport.traffic.bytes_in,
        bytes_out=static.net.transport.traffic.bytes_out,
        served_tokens=node.holder.tokens_served,
        sessions=node.holder.sessions(),
        phase=phase,
        waiting_for=waiting_for,
        phase_s=phase_s,
        next_action=then,
        addresses=tuple(static.net.directory.addresses()),
        reachable=static.reachability.verdict.word,
        reachable_why=static.reachability.verdict.why,
        skew_s=static.clocks.skew_s(),
        device=static.device,
        data=static.data,
        store=f"{static.store.folder}{f' ({static.store.trouble})' if static.store.trouble else ''}",
        checkpoint_round=static.store.checkpoint_round,
        last_refusal=core.last_refusal,
        uptime_s=now - static.started_at,
        written_at=now,
    )


def _absent(node: Node, now: float) -> tuple[PeerStatus, ...]:
    """For each block that nobody holds, who was last seen with it: newcomers cannot know (client.py asks)."""
    members = node.core.members
    last = ((block, members.last_seen(block)) for block in members.missing(now, node.block))
    return tuple(PeerStatus(peer=seen[0], block=block, seen_s_ago=max(0.0, now - seen[1])) for block, seen in last if seen is not None)
