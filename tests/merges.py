"""Two replicas that exchange without a network."""

from __future__ import annotations

import torch
from torch import Tensor

from blocktrain.node.compute import codecs
from blocktrain.node.compute.replica import TorchReplica
from blocktrain.node.ports import Snapshot, Terms
from blocktrain.protocol.ids import PeerId

THEM = PeerId("12D3KooWthem")


def terms(snapshot: Snapshot) -> Terms:
    return Terms(THEM, snapshot.round, snapshot.weight, snapshot.digest, snapshot.codec)


async def live(each: TorchReplica) -> Tensor:
    return codecs.codec_of("fp32").decode((await each.snapshot("fp32")).payload, each.state_bytes // 4)


async def move(each: TorchReplica, seed: int) -> None:
    """As training would, without its time: every parameter by a little."""
    step = torch.randn(each.state_bytes // 4, generator=torch.Generator().manual_seed(seed)) * 1e-3
    await each._between_steps(lambda trainer: trainer.add(step))


async def exchange(low: TorchReplica, high: TorchReplica, codec: str, reference: bytes = b"") -> bytes:
    mine, theirs = await low.snapshot(codec, reference), await high.snapshot(codec, reference)
    at_low = await low.consider(mine, theirs.payload, terms(theirs), mine_first=True)
    at_high = await high.consider(theirs, mine.payload, terms(mine), mine_first=False)
    assert at_low.digest == at_high.digest
    await low.adopt(at_low, mine, keep=True)
    await high.adopt(at_high, theirs, keep=True)
    assert bytes(low.state()[1]) == bytes(high.state()[1])
    return at_low.digest
