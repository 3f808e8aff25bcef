"""What users of such swarms complained about, by number: donors that die (28), crowds of joiners (29), older states that win (30).

Real nodes in this process. The many ways in which a donor can be wrong are in test_catchup.py, over a network in memory.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from blocktrain.node import download, shards
from blocktrain.node.catchup import Donor
from blocktrain.node.config import Training
from blocktrain.node.ports import Buffer, Stream
from blocktrain.protocol import limits
from blocktrain.protocol.messages import Chunk, Message
from tests import swarm_kit
from tests.swarm_kit import Live, Nodes, until

pytestmark = pytest.mark.real
IDLE = Training(block=0, train=False)


@pytest.fixture
def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that even a small state is worth being cut up."""
    monkeypatch.setattr(download, "SMALL_BYTES", 0)
    monkeypatch.setattr(shards, "SHARD_BYTES", 4096)
    monkeypatch.setattr(limits, "CHUNK_BYTES", 2048)


class Fatal:
    """A donor's stream that kills its node's daemon in the middle of the transfer, as a SIGKILL would."""

    def __init__(self, stream: Stream, live: Live) -> None:
        self._stream = stream
        self._live = live
        self._chunks = 0
        self.peer = stream.peer
        self.receive = stream.receive
        self.close = stream.close

    async def send(self, message: Message, body: Buffer = b"", *, timeout_s: float) -> None:
        self._chunks += isinstance(message, Chunk)
        if self._chunks > 6:
            pid = self._live.net.libp2p.daemon_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await self._live.net.died.wait()
        await self._stream.send(message, body, timeout_s=timeout_s)


async def test_28_a_donor_that_is_killed_in_mid_transfer_costs_no_second_download(
    nodes: Nodes, in_small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await nodes.start(0)
    await until(lambda: host.round >= 2, host.said)
    victim = await nodes.start(0, host, training=IDLE)
    await until(lambda: victim.node.core.counters.fetched == 1, victim.said)
    send, jobs = Donor._send, []

    async def dying(self: Donor, stream: Stream, want: object) -> None:
        await send(self, Fatal(stream, victim) if self is victim.node._donor else stream, want)  # type: ignore[arg-type]

    run = download.Job.run

    async def noted(self: download.Job, others: object) -> download.Download:
        jobs.append(self)
        return await run(self, others)  # type: ignore[arg-type]

    monkeypatch.setattr(Donor, "_send", dying)
    monkeypatch.setattr(download.Job, "run", noted)
    joiner = await nodes.start(0, host)
    await until(lambda: joiner.node.core.counters.fetched == 1 and joiner.phase == "training", joiner.said)
    for job in jobs:
        assert set(job.failed) <= {victim.peer}
    assert joiner.history[1].round >= 2


async def test_29_six_joiners_at_once_are_spread_over_the_donors_which_lose_no_round(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    host = await nodes.start(0)
    donors = [host, await nodes.start(0, host)]
    await until(lambda: all(live.accepted >= 2 for live in donors), host.said)
    most: dict[Donor, int] = {}
    send = Donor._send

    async def counted(self: Donor, stream: Stream, want: object) -> None:
        most[self] = max(most.get(self, 0), self.serving)
        started = host.round
        await until(lambda: host.round >= started + 2, host.said)  # long enough for the others to ask, too
        await send(self, stream, want)  # type: ignore[arg-type]

    monkeypatch.setattr(Donor, "_send", counted)
    late = [live.node.core.counters.late + live.node.core.counters.lost for live in donors]
    joiners = await asyncio.gather(*(nodes.start(0, host) for _ in range(6)))
    for joiner in joiners:
        await until(lambda joiner=joiner: joiner.node.core.counters.fetched, joiner.said)  # type: ignore[misc]
    first = {live.node._donor for live in donors}
    assert max(count for donor, count in most.items() if donor in first) <= 4  # six joiners over two donors, and one more
    assert [live.node.core.counters.late + live.node.core.counters.lost for live in donors] == late
    assert all(joiner.history[1].round >= 2 for joiner in joiners)


async def test_30_the_newest_state_is_taken_and_an_older_one_never_replaces_a_newer(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    host = await nodes.start(0)
    await until(lambda: host.round >= 2, host.said)
    stale = await nodes.start(0, host, training=IDLE)  # it keeps the state that it got
    await until(lambda: stale.node.core.counters.fetched == 1, stale.said)
    newer = stale.round + 3
    await until(lambda: host.round >= newer, host.said)
    joiner = await nodes.start(0, stale, training=IDLE)
    await until(lambda: joiner.node.core.counters.fetched == 1, joiner.said)
    assert joiner.round >= newer

    # A node that starts again with what the host had, where only the stale one is left.
    published, state = host.replica.state()
    await host.stop()
    await joiner.stop()
    await until(lambda: not stale.knows(host) and not stale.knows(joiner), stale.said)
    mine = swarm_kit.replica(nodes.run)
    await mine.load(bytes(state), published.round, published.digest)
    monkeypatch.setattr(swarm_kit, "replica", lambda *given: mine)
    again = await nodes.start(0, stale, fresh=False)
    await until(lambda: again.round > published.round, again.said)
    assert again.node.core.counters.fetched == 0
    assert [each.round for each in again.history] == sorted(each.round for each in again.history)
    assert again.history[0] == published
