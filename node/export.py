"""`blocktrain export`: every block of a run, from its holders, into one file.

Blocks are fetched at once, each from its holders in random order until one gives a whole state with the right digest. A block is a
snapshot of its own: rounds may differ by a few from block to block, as they do in the living chain.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from blocktrain import __version__
from blocktrain.node import logs
from blocktrain.node.catchup import Download, fetch
from blocktrain.node.client import SwarmClient
from blocktrain.node.compute import takehome
from blocktrain.node.config import ClientConfig, ExportConfig
from blocktrain.node.ports import Buffer, Published
from blocktrain.node.runtime import Runtime
from blocktrain.protocol.errors import NoPeers, PeerFault, UsageError
from blocktrain.protocol.ids import NO_DIGEST, PeerId, short
from blocktrain.protocol.messages import Want


async def export(config: ClientConfig, wish: ExportConfig, runtime: Runtime) -> int:
    """The command. Raises: NoPeers: a block that nobody gives. UsageError: the file."""
    logs.setup("warning")
    check_target(wish.out, wish.force)
    async with SwarmClient.connect(config, runtime) as swarm:
        path = wish.out or Path(f"{swarm.manifest.name}.safetensors")
        check_target(path, wish.force)
        fetched = await fetch_all(swarm)
        await asyncio.to_thread(takehome.save, path, swarm.manifest, {block: (p, data) for block, (p, data, _) in fetched.items()})
        rows = [
            {"block": block, "round": published.round, "digest": published.digest.hex(), "peer": donor}
            for block, (published, _, donor) in sorted(fetched.items())
        ]
        if wish.json:
            size = path.stat().st_size
            print(json.dumps({"run": swarm.manifest.run.hex(), "file": str(path), "bytes": size, "blocks": rows, "version": __version__}))
        else:
            print(path)
            for row in rows:
                print(f"block {row['block']}: round {row['round']}, from {short(PeerId(str(row['peer'])))}", file=sys.stderr)
    return 0


def check_target(path: Path | None, force: bool) -> None:
    """Raises: UsageError: it is there already, or its folder is not."""
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"--out {path}: give a file in a folder that exists")
    if path.exists() and not force:
        raise UsageError(f"{path} is there already: give another --out, or --force to overwrite it")


async def fetch_all(swarm: SwarmClient) -> dict[int, tuple[Published, Buffer, PeerId]]:
    """Block → its state, the bytes, and who gave it. Raises: NoPeers: naming the block and what each holder said."""
    await swarm.see_all_blocks()
    size = takehome.state_bytes(swarm.manifest)
    found: dict[int, tuple[Published, Buffer, PeerId]] = {}

    async def one(block: int) -> None:
        holders = swarm.members.holders(block, swarm.runtime.clock(), trained_only=True)

        async def keep(download: Download) -> Published:
            if await asyncio.to_thread(takehome.digest_of, download.payload) != download.digest:
                raise PeerFault("a state that does not have its digest", download.donor)
            published = Published(download.round, download.digest)
            found[block] = (published, download.payload, download.donor)
            return published

        want = Want(swarm.manifest.run, block, "block", NO_DIGEST)
        donors = [member.peer for member in holders]
        published, failed = await fetch(swarm.net.transport, want, donors, 1, size, rng=swarm.runtime.rng, apply=keep)
        if published is None:
            reasons = "; ".join(str(fault) for fault in failed.values()) or "nobody has trained it yet"
            raise NoPeers(f"block {block}: no state to be had ({reasons})")

    await asyncio.gather(*(one(block) for block in range(swarm.manifest.blocks)))
    return found
