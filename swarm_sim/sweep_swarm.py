"""The swarm of `bench sweep`: one real node for each block, with trained weights, and a network between them that the bench sets.

Every node listens behind a proxy of its own (delay.py), so the client's connections and those between holders are delayed alike; without
an emulator nothing lies between them but the machine's loopback. Nodes start paused: they hold and serve what was put into their stores,
and train only when told to.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blocktrain.node.compute import flat
from blocktrain.node.compute.model import Block
from blocktrain.node.compute.replica import Options, TorchReplica
from blocktrain.node.data import TokenStream, load_tokens
from blocktrain.node.recipe_file import load_recipe
from blocktrain.node.store import Store
from blocktrain.node.tokenizer import load_tokenizer
from blocktrain.protocol.manifest import Manifest
from blocktrain.swarm_sim import recipe
from blocktrain.swarm_sim.delay import Emulator
from blocktrain.swarm_sim.lab import cells, pool, presets, train
from blocktrain.swarm_sim.processes import Child, Children, installed

STEPS: Final = 500  # of every block, and of the judge
ROUND: Final = 25  # which the trained states claim: 500 steps of 20
LAYERS, WIDTH = 2, 128
TTL_S: Final = 120.0  # a bench that keeps the machine busy shall not lose its nodes' records


@dataclass(frozen=True)
class Trained:
    """Blocks of one run, trained, and the stack that judges their text."""

    manifest: Manifest
    run_file: Path
    blocks: tuple[Block, ...]
    judge: Block


def trained(folder: Path, blocks: int, say: Callable[[str], None], processes: int = 2) -> Trained:
    """Take the weights from the user's cache, or train them now (minutes)."""
    size = presets.Preset(WIDTH, LAYERS, blocks)
    judge = cells.reference(presets.Preset(WIDTH, LAYERS, 3), STEPS, 0)
    results = pool.train_all([*cells.chain(size, STEPS, 0), judge], train.folder(), say, processes=processes)
    run_file = recipe.write(Path(recipe.TINY), folder / f"run-{blocks}.toml", blocks=blocks, minutes=recipe.TINY_MINUTES).path
    manifest = load_recipe(run_file)
    found = []
    for number, result in enumerate(results[:-1]):
        block = Block(manifest, number).requires_grad_(False)
        flat.Flat(block).data.copy_(result.final[0])
        found.append(block)
    return Trained(manifest, run_file, tuple(found), results[-1].blocks()[0])


class SweepSwarm:
    """Use as a context manager's inside: `start`, then the addresses of its nodes are in `addresses`."""

    def __init__(self, children: Children, emulator: Emulator | None, model: Trained) -> None:
        self.children = children
        self.emulator = emulator
        self.model = model
        self.nodes: list[Child] = []
        self.addresses: tuple[str, ...] = ()
        self._ports: list[int] = []

    def start(self, label: str = "sweep", flags: Sequence[str] = ()) -> None:
        """One node a block, paused, and wait until all know each other. `flags`: more of `blocktrain-node`'s."""
        manifest = self.model.manifest
        stores = [self.children.folder / "nodes" / f"{label}-{manifest.blocks}-{block}" for block in range(manifest.blocks)]
        asyncio.run(_fill(manifest, self.model.blocks, stores))
        listening = [_free_port() for _ in stores]
        self._ports = self.emulator.open(listening) if self.emulator is not None else listening
        program = installed().node
        for block, store in enumerate(stores):
            command = [*program, *flags, "--block", str(block), "--store", str(store), "--json", "--paused", "--ttl-s", f"{TTL_S:g}"]
            command += ["--host-maddrs", f"/ip4/127.0.0.1/tcp/{listening[block]}"]
            command += ["--announce-maddrs", f"/ip4/127.0.0.1/tcp/{self._ports[block]}"]
            command += ["--initial-peers", *self.addresses[:1]] if block else ["--new-run", str(self.model.run_file)]
            node = self.children.start(f"{label}-{manifest.blocks}-{block}", command)
            self.nodes.append(node)
            self.children.wait(lambda node=node: bool(node.status.get("addresses")), 120, f"{node.label} did not listen")  # type: ignore[misc]
            self.addresses += (f"/ip4/127.0.0.1/tcp/{self._ports[block]}/p2p/{node.status['peer']}",)
        self.children.wait(self._met, 120, "the nodes did not see each other")

    def network(self, rtt_s: float) -> None:
        """From now on. Only with an emulator."""
        assert self.emulator is not None
        self.emulator.set(self._ports, delay_s=rtt_s / 2)

    def resume(self, *blocks: int) -> None:
        """Let the nodes of these blocks train; all of them where none is named."""
        nodes = [self.nodes[block] for block in blocks] or self.nodes
        for node in nodes:
            if not _steps(node):
                node.process.send_signal(signal.SIGUSR1)
        self.children.wait(lambda: all(_steps(node) > 0 for node in nodes), 60, "the nodes did not begin to train")

    def steps(self) -> list[tuple[float, float]]:
        """(steps, the node's own clock) of each node, by its next word."""
        before = [node.said_at for node in self.nodes]
        heard = lambda: all(node.said_at > then for node, then in zip(self.nodes, before, strict=True))  # noqa: E731
        self.children.wait(heard, 45, "not every node said how far it is")
        return [(_steps(node), float(node.status.get("written_at", 0.0))) for node in self.nodes]

    def steps_since(self, before: list[tuple[float, float]]) -> float:
        """Steps/s of all nodes together since then, each by its own clock."""
        return sum((now[0] - then[0]) / max(1e-9, now[1] - then[1]) for now, then in zip(self.steps(), before, strict=True))

    def stop(self) -> None:
        nodes, self.nodes = self.nodes, []
        for node in nodes:
            self.children.kill(node)

    def _met(self) -> bool:
        return all(min(node.status.get("coverage") or (0,)) >= 1 for node in self.nodes)


async def _fill(manifest: Manifest, blocks: Sequence[Block], stores: Sequence[Path]) -> None:
    """Write each block's state into a store, as a node that was trained elsewhere would find it."""
    corpus = load_tokens(("builtin",), load_tokenizer(manifest.tokenizer, manifest.model.vocabulary), manifest.model.context)
    for number, folder in enumerate(stores):
        with Store.open(folder, manifest.run, number) as store:
            batches = TokenStream(corpus, batch=manifest.optimizer.batch, peer="", block=number, seed=manifest.seed)
            replica = TorchReplica(manifest, number, batches, store, Options(device="cpu"))
            state = flat.to_bytes(flat.Flat(blocks[number]).data)
            await replica.load(state, ROUND, flat.digest(state))
            await replica.save()
            await replica.stop()
            store.save_manifest(manifest.to_bytes())


def _steps(node: Child) -> float:
    value = node.status.get("steps")
    return float(value) if isinstance(value, int | float) else 0.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
