"""The node's status at one moment, put together from the core, the replica, the network and the store."""

from __future__ import annotations

import logging
import os
import statistics
from collections import OrderedDict
from dataclasses import dataclass

from blocktrain import __version__
from blocktrain.node import logs
from blocktrain.node.network import Net
from blocktrain.node.reachability import Reachability
from blocktrain.node.service import Node
from blocktrain.node.status import PeerStatus, Status
from blocktrain.node.store import Store
from blocktrain.node.transport import Met
from blocktrain.protocol import limits

log = logging.getLogger("blocktrain.node")

MAX_CLOCKS = 32


class Clocks:
    """The clocks of the peers whose hellos we got, against ours: at most one reading a peer, of the last few peers."""

    def __init__(self) -> None:
        self._skews: OrderedDict[str, float] = OrderedDict()

    def met(self, met: Met) -> None:
        self._skews[met.peer] = met.skew_s
        self._skews.move_to_end(met.peer)
        while len(self._skews) > MAX_CLOCKS:
            self._skews.popitem(last=False)
        skew_s = self.skew_s()
        if skew_s is not None and abs(skew_s) > limits.MAX_CLOCK_SKEW_S:
            words = f"this machine's clock is {abs(skew_s):.0f} s {'behind' if skew_s > 0 else 'ahead of'} its peers'"
            remedy = "our announcements end too early or too late for them: set the clock, for example with timedatectl set-ntp true"
            logs.say_once_a_minute(log, logging.WARNING, "clock", f"{words} ({len(self._skews)} asked); {remedy}")

    def skew_s(self) -> float | None:
        """The peers' median clock minus ours, in seconds."""
        return statistics.median(self._skews.values()) if self._skews else None


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
