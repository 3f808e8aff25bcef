"""A run's model in one file, taken home from the swarm, and at work without it.

The file is safetensors: every block's published state under `blocks.N.NAME`, and in the header the manifest and each block's round and
digest. Any safetensors library reads it. `OfflineModel` answers like the swarm does: the same bytes for the same seed, from these states.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from blocktrain.node import checkpoint
from blocktrain.node.checkpoint import Damaged
from blocktrain.node.compute import flat
from blocktrain.node.compute.evaluation import ChainLoss, chain_loss
from blocktrain.node.compute.generation import Request, TextSweep
from blocktrain.node.compute.model import Block
from blocktrain.node.compute.offline import OfflineChain
from blocktrain.node.compute.worker import load_block
from blocktrain.node.ports import Buffer, Published
from blocktrain.node.traversal import Report
from blocktrain.protocol import manifest as manifests
from blocktrain.protocol.errors import Malformed, PeerFault, UsageError
from blocktrain.protocol.ids import Digest, PeerId
from blocktrain.protocol.manifest import Manifest

KIND: Final = "blocktrain model"
Decode = Callable[[Sequence[int], bool], bytes]


def state_bytes(manifest: Manifest) -> int:
    """Bytes of one block's published state."""
    return 4 * flat.count(flat.shapes_of(manifest))


def digest_of(payload: Buffer) -> Digest:
    """A state's digest, as announcements carry it. Takes a while for large states: not for the event loop."""
    return flat.digest(payload)


def save(path: Path, manifest: Manifest, states: Mapping[int, tuple[Published, Buffer]]) -> None:
    """Write the file beside and rename it: what is there under its name is complete.

    Raises: UsageError: it cannot be written. PeerFault: a state of the wrong size.
    """
    shapes = flat.shapes_of(manifest)
    tensors: checkpoint.Tensors = {}
    for block, (_, payload) in states.items():
        for name, tensor in flat.views(shapes, flat.from_bytes(payload, flat.count(shapes))).items():
            tensors[f"blocks.{block}.{name}"] = tensor.numpy()
    header = {
        "kind": KIND,
        "run": manifest.run.hex(),
        "name": manifest.name,
        "manifest": manifest.to_bytes().hex(),
        "blocks": [{"block": block, "round": p.round, "digest": p.digest.hex()} for block, (p, _) in sorted(states.items())],
    }
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        checkpoint.write_file(beside, tensors, header)
        beside.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


@dataclass(frozen=True)
class OfflineModel:
    """All blocks of a run in this process. Make it with `load`."""

    manifest: Manifest
    states: tuple[Published, ...]
    blocks: tuple[Block, ...]

    @classmethod
    def load(cls, path: Path, *, flag: str = "--model") -> OfflineModel:
        """Read a file that `save` wrote, and check every digest. Takes seconds for large models. `flag`: who named it.

        Raises: UsageError: not there, not such a file, damaged, or of another version.
        """
        try:
            tensors, header = checkpoint.read_file(path)
        except OSError as error:
            raise UsageError(f"{flag} {path}: {error.strerror}") from error
        except Damaged as damage:
            raise UsageError(f"{flag} {path}: {damage}") from damage
        if header.get("kind") != KIND:
            raise UsageError(f"{flag} {path} is no model of a run: make one with `blocktrain export` (a node's checkpoint is one block)")
        try:
            manifest = manifests.from_bytes(bytes.fromhex(str(header["manifest"])), None)
            found = [_block(manifest, tensors, row) for row in header["blocks"]]
        except (KeyError, TypeError, ValueError, Malformed, PeerFault) as error:
            raise UsageError(f"{flag} {path} does not hold what its header says: {error}") from error
        return cls(manifest, tuple(state for state, _ in found), tuple(block for _, block in found))

    @contextlib.asynccontextmanager
    async def generate(self, request: Request, decode: Decode | None = None) -> AsyncIterator[tuple[TextSweep, Report]]:
        """A request at work, as `SwarmClient.generate`."""
        async with OfflineChain(self.manifest, self.blocks) as chain:
            yield TextSweep(chain, self.manifest, request, decode=decode), self._report()

    async def loss(self, windows: Sequence[Sequence[int]]) -> tuple[ChainLoss, Report]:
        """The chain's loss on windows of equal length, nats per token."""
        async with OfflineChain(self.manifest, self.blocks) as chain:
            return await chain_loss(chain, self.manifest, windows), self._report()

    def _report(self) -> Report:
        rows = zip(self.blocks, self.states, strict=True)
        missing = sorted(set(range(self.manifest.blocks)) - {block.block for block in self.blocks})
        return Report(peers=[(block.block, PeerId(""), state.round, state.digest.hex()) for block, state in rows], missing=missing)


def _block(manifest: Manifest, tensors: checkpoint.Tensors, row: Mapping[str, Any]) -> tuple[Published, Block]:
    number, published = int(row["block"]), Published(int(row["round"]), Digest(bytes.fromhex(row["digest"])))
    shapes = flat.shapes_of(manifest)
    for name, shape in shapes.items():
        if tensors[f"blocks.{number}.{name}"].shape != shape:
            raise ValueError(f"blocks.{number}.{name} has another shape than the manifest's")
    payload = flat.to_bytes(torch.cat([torch.from_numpy(tensors[f"blocks.{number}.{name}"]).reshape(-1) for name in shapes]))
    if digest_of(payload) != published.digest:
        raise ValueError(f"block {number} does not have its digest")
    return published, load_block(Block(manifest, number).requires_grad_(False), payload)
