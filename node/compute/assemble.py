"""A node's block put together from its config: data, replica with its checkpoint, server. In one place, because all of it takes seconds.

Called in a thread while the network starts; what needs the event loop (the server's thread) is made by `Prepared.start` afterwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from blocktrain.node.compute.device import choose
from blocktrain.node.compute.replica import Options, TorchReplica
from blocktrain.node.compute.serving import TorchServer
from blocktrain.node.config import Training
from blocktrain.node.data import TokenStream, load_tokens
from blocktrain.node.store import Store
from blocktrain.node.tokenizer import load_tokenizer
from blocktrain.protocol.manifest import Manifest


@dataclass(frozen=True)
class Prepared:
    """The block in memory. `start` makes its server, on the loop; `fresh`: no checkpoint was found."""

    replica: TorchReplica
    start: Callable[[], TorchServer]
    device: str
    data: str
    fresh: bool


def assemble(training: Training, manifest: Manifest, block: int, store: Store, peer: str, *, report: Callable[[str], None]) -> Prepared:
    """Read the data, build the block, restore its checkpoint.

    Args:
        report: told now and then what takes long; what it raises ends the work.
    Raises: UsageError: device, data or checkpoint. DoesNotFit: the block, or a device that is not here.
    """
    device = choose(training.device)
    tokenizer = load_tokenizer(manifest.tokenizer, manifest.model.vocabulary, training.tokenizer)
    corpus = load_tokens(training.data, tokenizer, manifest.model.context, report=report)
    batches = TokenStream(corpus, batch=manifest.optimizer.batch, peer=peer, block=block, seed=manifest.seed)
    seed = int.from_bytes(hashlib.sha256(f"{manifest.seed}/{block}/{peer}".encode()).digest()[:8], "big") >> 1
    options = Options(device=str(device), threads=training.threads, compile=training.compile, seed=seed)
    replica = TorchReplica(manifest, block, batches, store, options)
    restored = replica.restore()
    return Prepared(
        replica=replica,
        start=lambda: TorchServer(manifest, block, device=str(device), share=training.serve_share),
        device=str(device),
        data=corpus.describe(),
        fresh=not restored,
    )
