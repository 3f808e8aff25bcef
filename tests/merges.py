"""Replicas that exchange without a network: whole snapshots, and their merges."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch
from torch import Tensor

from blocktrain.node.compute.codecs import codec_of
from blocktrain.node.compute.replica import Swap, TorchReplica
from blocktrain.node.compute.swap import Halves
from blocktrain.node.ports import Buffer, Terms, Trial
from blocktrain.protocol import limits
from blocktrain.protocol.ids import Digest, PeerId


@dataclass(frozen=True)
class Snapshot:
    """All that one side sends in an exchange, and what it began with. It may go into any number of merges."""

    codec: str
    round: int
    weight: float
    digest: Digest
    payload: memoryview
    swap: Swap
    live: Tensor
    published: Tensor
    reference: Tensor | None


@dataclass(frozen=True)
class Said:
    """What the other side says of its snapshot."""

    peer: PeerId
    round: int
    weight: float
    digest: Digest
    codec: str


def terms_of(snapshot: Snapshot, peer: str = "other") -> Said:
    return Said(PeerId(peer), snapshot.round, snapshot.weight, snapshot.digest, snapshot.codec)


async def snapshot_of(replica: TorchReplica, codec: str, reference: bytes = b"") -> Snapshot:
    swap = await replica.begin(codec, reference)
    halves = await swap.copied()
    live = halves.ours.clone()
    parts = []
    while part := await swap.give(limits.CHUNK_BYTES):
        parts.append(part)
    base = replica._reference(codec, reference)
    published = halves._published
    return Snapshot(codec, swap.round, swap.weight, swap.digest, memoryview(b"".join(parts)), swap, live, published, base)


async def merge_of(replica: TorchReplica, mine: Snapshot, payload: Buffer, theirs: Said, *, mine_first: bool) -> Trial:
    """Raises: PeerFault, as an exchange would."""
    began = await mine.swap.copied()
    whole, aside = began.pair is None, began._aside
    halves = Halves(codec_of(mine.codec), mine.live.clone(), mine.published, mine.reference, whole=whole, aside=aside)
    copied: asyncio.Future[Halves] = asyncio.get_running_loop().create_future()
    copied.set_result(halves)
    swap = Swap(replica, mine.swap.moment, copied)
    swap.meet(Terms(theirs.peer, theirs.round, theirs.weight, theirs.codec), mine_first=mine_first)
    await swap.take(payload)
    return await swap.finish(theirs.digest)


async def live(each: TorchReplica) -> Tensor:
    """Its parameters, by the lossless codec."""
    return codec_of("fp32").decode((await snapshot_of(each, "fp32")).payload, each.state_bytes // 4)


async def move(each: TorchReplica, seed: int) -> None:
    """As training would, without its time: every parameter by a little."""
    step = torch.randn(each.state_bytes // 4, generator=torch.Generator().manual_seed(seed)) * 1e-3
    await each._between_steps(lambda trainer: trainer.add(step))


async def exchange(low: TorchReplica, high: TorchReplica, codec: str, reference: bytes = b"") -> bytes:
    mine, theirs = await snapshot_of(low, codec, reference), await snapshot_of(high, codec, reference)
    at_low = await merge_of(low, mine, theirs.payload, terms_of(theirs), mine_first=True)
    at_high = await merge_of(high, theirs, mine.payload, terms_of(mine), mine_first=False)
    assert at_low.digest == at_high.digest
    await low.adopt(at_low, keep=True)
    await high.adopt(at_high, keep=True)
    assert bytes(low.state()[1]) == bytes(high.state()[1])
    return at_low.digest
