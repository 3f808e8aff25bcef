"""A crowd of `--block auto` nodes that start together, in virtual time: node/placing.py itself, on a DHT with delayed and lost views.

What runs is the real `choose_block`, the real directory (node/directory.py), `Members` and `Mover`; only what Libp2p gives the directory is
replaced, by `Board`: every reader sees every version of a record after a delay of its own, reads leave records out or fail altogether,
writes are slow or lost. How bad it is comes from the seed. After its choice a node starts up, announces itself at every refresh and asks
its mover whether to go elsewhere, as node/launch.py does for `--may-move`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final, cast

from blocktrain.node import placing
from blocktrain.node.directory import DhtDirectory
from blocktrain.protocol import limits
from blocktrain.protocol.errors import NetworkFault
from blocktrain.protocol.ids import NO_DIGEST, PeerId, peer_id_of_key
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.membership import Members
from blocktrain.protocol.placement import Mover
from blocktrain.protocol.records import Announcement, Key
from blocktrain.swarm_sim.world import virtual_loop
from blocktrain.swarm_sim.world.checkers import even
from blocktrain.swarm_sim.world.checkers.base import Violation
from blocktrain.swarm_sim.world.clock import EPOCH_S
from blocktrain.swarm_sim.world.world import manifest_of

if TYPE_CHECKING:
    from blocktrain.node.network import Net

START_S: Final = 3.0  # within which everybody starts
LOADING_S: Final = (2.0, 15.0)  # from the choice to the node's own announcement
AFTER_S: Final = 240.0  # that everybody stays, to be seen moving
TOKENS_PER_S: Final = 1000.0
DHT_TIMEOUT_S: Final = 8.0


@dataclass(frozen=True)
class Weather:
    """How badly the DHT serves its readers and writers. Shares are of reads, records or writes; seconds are the longest of each."""

    late: float  # records that become visible late
    late_s: float
    left_out: float  # records missing from a read
    failed: float  # reads and writes that fail at their deadline
    lost: float  # writes that look stored and are not
    slow_s: float  # of a read or write
    skew_s: float

    @classmethod
    def drawn(cls, rng: Random) -> Weather:
        return cls(
            late=rng.uniform(0, 0.4), late_s=rng.uniform(0.2, 5), left_out=rng.uniform(0, 0.15), failed=rng.uniform(0, 0.08),
            lost=rng.uniform(0, 0.08), slow_s=rng.uniform(0.05, 1.5), skew_s=rng.uniform(0, 1.0),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sealed:
    """`node.directory.SealedRecord`."""

    peer: PeerId
    payload: bytes
    expires_at: float


@dataclass
class Board:
    """All records: key → writer → versions, oldest first, each with when it was written."""

    weather: Weather
    rng: Random
    versions: dict[Key, dict[PeerId, list[tuple[float, Sealed]]]] = field(default_factory=dict)
    delays: dict[tuple[PeerId, PeerId, float], float] = field(default_factory=dict)  # reader, writer, when written → seconds

    def write(self, key: Key, record: Sealed, now: float) -> bool:
        if self.rng.random() < self.weather.lost:
            return True
        written = self.versions.setdefault(key, {}).setdefault(record.peer, [])
        if written and written[-1][1].expires_at >= record.expires_at:
            return False
        written.append((now, record))
        return True

    def read(self, key: Key, reader: PeerId, now: float) -> Iterator[Sealed]:
        for versions in self.versions.get(key, {}).values():
            if self.rng.random() < self.weather.left_out:
                continue
            for at, record in reversed(versions):
                if at + self._delay_s(reader, record.peer, at) <= now:
                    yield record
                    break

    def _delay_s(self, reader: PeerId, writer: PeerId, at: float) -> float:
        name = reader, writer, at
        if name not in self.delays:
            late = reader != writer and self.rng.random() < self.weather.late
            self.delays[name] = self.rng.uniform(0, self.weather.late_s) if late else 0.0
        return self.delays[name]


class BoardDht:
    """One node's way to the board: `node.directory.Dht`."""

    def __init__(self, board: Board, peer: PeerId) -> None:
        self.peer = peer
        self._board = board

    async def addresses(self) -> list[str]:
        return []

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        pass

    async def store(self, key: Key, payload: bytes, *, expires_at: float, timeout_s: float) -> bool:
        await self._wait(timeout_s)
        return self._board.write(key, Sealed(self.peer, payload, expires_at), asyncio.get_running_loop().time())

    async def get(self, key: Key, *, timeout_s: float) -> Sequence[Sealed]:
        await self._wait(timeout_s)
        return list(self._board.read(key, self.peer, asyncio.get_running_loop().time()))

    async def _wait(self, timeout_s: float) -> None:
        board = self._board
        if board.rng.random() < board.weather.failed:
            await asyncio.sleep(timeout_s)
            raise NetworkFault("the DHT did not answer")
        await asyncio.sleep(board.rng.uniform(0.02, board.weather.slow_s))


@dataclass(frozen=True)
class _Net:
    """As much of `node.network.Net` as choosing uses."""

    directory: DhtDirectory


@dataclass(frozen=True)
class Choice:
    """What came of one seed."""

    seed: int
    nodes: int
    blocks: int
    diary: tuple[even.Said, ...]
    starts_s: tuple[float, ...]
    violations: tuple[Violation, ...]

    def command(self) -> str:
        return f"blocktrain-sim world choose --first {self.seed} --seeds 1 --nodes {self.nodes} --blocks {self.blocks} --tell"


class _Directory(DhtDirectory):
    """The real one; what is said through it is written into the diary."""

    def __init__(self, dht: BoardDht, clock: Callable[[], float], hear: Callable[[Announcement], None]) -> None:
        super().__init__(dht, clock, swarm_is_loopback=True)
        self._hear = hear

    async def announce(self, announcement: Announcement, bucket: int, *, expires_at: float, timeout_s: float) -> bool:
        self._hear(announcement)
        return await super().announce(announcement, bucket, expires_at=expires_at, timeout_s=timeout_s)


class _Crowd:
    """All nodes of a seed, on one loop."""

    def __init__(self, seed: int, nodes: int, blocks: int, trains: bool) -> None:
        self.seed = seed
        self.trains = trains
        self.rng = Random(f"{seed} crowd {nodes} {blocks}")
        self.manifest = manifest_of(blocks)
        self.board = Board(Weather.drawn(self.rng), self.rng)
        self.starts_s = [self.rng.uniform(0, START_S) for _ in range(nodes)]
        self.skews = [self.rng.uniform(-1, 1) * self.board.weather.skew_s for _ in range(nodes)]
        self.diary: list[even.Said] = []
        self._last: dict[int, tuple[str, int]] = {}

    def note(self, number: int, phase: str, block: int) -> None:
        if self._last.get(number) != (phase, block):
            self._last[number] = phase, block
            self.diary.append(even.Said(asyncio.get_running_loop().time(), number, phase, block))

    async def live(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(self.starts_s)):
                tasks.create_task(self._node(number), name=f"node {number}")

    async def _node(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        peer = peer_id_of_key(hashlib.sha256(f"{self.seed} auto {number}".encode()).digest())

        def clock() -> float:
            return EPOCH_S + loop.time() + self.skews[number]

        def directory() -> _Directory:  # anew for every connection, as a process has it
            return _Directory(BoardDht(self.board, peer), clock, lambda word: self.note(number, word.phase, word.block))

        await asyncio.sleep(self.starts_s[number])
        block = None
        while block is None:
            with contextlib.suppress(NetworkFault):  # no view at all: the process ends with a line, and its owner starts it again
                net = cast("Net", _Net(directory()))
                block = await placing.choose_block(net, self.manifest, clock=clock, rng=Random(f"{self.seed} chooser {number}"))
        await asyncio.sleep(self.rng.uniform(*LOADING_S))
        until = loop.time() + AFTER_S
        while loop.time() < until:
            block = await _hold(directory(), self.manifest, block, clock, until - loop.time(), self.trains)


async def _hold(directory: DhtDirectory, manifest: Manifest, block: int, clock: Callable[[], float], seconds: float, trains: bool) -> int:
    """Hold a block as a running node does, until its mover says another; or for so long."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    members = Members(manifest.run, manifest.blocks, directory.peer)
    mover = Mover(directory.peer, block, manifest.blocks, ttl_s=limits.TTL_S, refresh_s=limits.REFRESH_S)
    phase = "joining"
    while loop.time() < until:
        word = Announcement(
            manifest.run, block, phase, int(phase == "training"), NO_DIGEST, TOKENS_PER_S * (phase == "training"), 0.0, 1, 1
        )
        with contextlib.suppress(NetworkFault):
            for bucket in members.to_announce(block, clock()):
                await directory.announce(word, bucket, expires_at=clock() + limits.TTL_S, timeout_s=DHT_TIMEOUT_S)
        phase = "training" if trains else "serving"
        for each in range(manifest.blocks):
            with contextlib.suppress(NetworkFault):
                members.hear(each, await directory.read_block(manifest.run, each, 0, timeout_s=DHT_TIMEOUT_S), clock())
        there = mover.consider(members.everybody(clock()), clock())
        if there is not None:
            return there
        await asyncio.sleep(limits.REFRESH_S)
    return block


def tell(seed: int, nodes: int = 8, blocks: int = 4, *, trains: bool = True) -> Choice:
    """One seed: a crowd's choice, and what is wrong with it. `trains`: what all do with their blocks; else they only serve them."""
    crowd = _Crowd(seed, nodes, blocks, trains)
    virtual_loop.run(crowd.live())
    wrong = even.check(crowd.diary, nodes, blocks, crowd.starts_s, placing.PACE.at_most_s)
    return Choice(seed, nodes, blocks, tuple(crowd.diary), tuple(crowd.starts_s), tuple(wrong))


def search(first: int, count: int, nodes: int = 8, blocks: int = 4, *, trains: bool = True) -> Iterator[Choice]:
    """`count` seeds from `first` on."""
    for seed in range(first, first + count):
        yield tell(seed, nodes, blocks, trains=trains)
