"""The internet between the hosts: how long a message takes, how fast bytes flow, and who cannot be reached at all.

Hosts stand on a plane of one-way seconds; a message takes the distance, a jitter (so messages of different streams overtake each other),
a wait where the link is clogged, and one retransmission for every time it is lost, as TCP shows loss to those above it. A partition lets
nothing through. A NATed host can call but be called only through a relay, which adds way and narrows the pipe; without a relay, not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Final

RETRANSMIT_S: Final = 0.2
MAX_RETRANSMITS: Final = 6
RELAY_S: Final = 0.04  # one way, on top
RELAY_BYTES_PER_S: Final = 2e6
LOSS_SLOWS: Final = 12.0  # TCP on a link that loses 1 % of its packets keeps 1 / (1 + 12 · sqrt(1 %)) of its rate


@dataclass(slots=True)
class Host:
    """One computer's place on the net. `gone`: no power, as opposed to a process that ended."""

    x_s: float = 0.0
    y_s: float = 0.0
    up: float = 12.5e6  # bytes a second
    down: float = 25e6
    nat: bool = False
    relayed: bool = True  # a NATed host without a relay cannot be called
    gone: bool = False
    side: int = 0  # of a partition
    clog_s: float = 0.0  # extra way of everything in and out
    flows: int = 0  # transfers under way, which share the rate


class Network:
    """All links. `loss` is the share of packets lost on every link, `jitter` the share of the way by which it varies."""

    def __init__(self, hosts: list[Host], rng: Random) -> None:
        self.hosts = hosts
        self.loss = 0.0
        self.jitter = 0.2
        self.split = False
        self._rng = rng

    def partition(self, side: Iterable[int]) -> None:
        """Cut these hosts off from all others."""
        chosen = set(side)
        for number, host in enumerate(self.hosts):
            host.side = 1 if number in chosen else 0
        self.split = True

    def heal(self) -> None:
        """Every link works again, without loss or clog. Hosts without power stay without."""
        for host in self.hosts:
            host.side, host.clog_s = 0, 0.0
        self.split, self.loss = False, 0.0

    def connected(self, a: int, b: int) -> bool:
        """Whether packets pass between two hosts."""
        one, other = self.hosts[a], self.hosts[b]
        return one.side == other.side and not one.gone and not other.gone

    def callable(self, a: int, b: int) -> bool:
        """Whether `a` can open a stream to `b`."""
        other = self.hosts[b]
        return self.connected(a, b) and (not other.nat or other.relayed)

    def way_s(self, a: int, b: int) -> float:
        """One way, this time."""
        one, other, rng = self.hosts[a], self.hosts[b], self._rng
        way = 0.002 + math.hypot(one.x_s - other.x_s, one.y_s - other.y_s)
        if other.nat or one.nat:
            way += RELAY_S
        way *= 1.0 + self.jitter * rng.random()
        if self.loss:
            for _ in range(MAX_RETRANSMITS):
                if rng.random() >= self.loss:
                    break
                way += RETRANSMIT_S
        return way + one.clog_s + other.clog_s

    def flow_s(self, a: int, b: int, size: int) -> float:
        """Seconds that `size` bytes from `a` to `b` take beyond one way, sharing the rate with the flows that are under way."""
        one, other = self.hosts[a], self.hosts[b]
        rate = min(one.up / (1 + one.flows), other.down / (1 + other.flows))
        if one.nat and other.nat:
            rate = min(rate, RELAY_BYTES_PER_S)
        if self.loss:
            rate /= 1.0 + LOSS_SLOWS * math.sqrt(self.loss)
        return size / rate
