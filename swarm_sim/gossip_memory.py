"""What gossip costs in memory: a real process with daemon, transport, replica and exchanger, beside the same process that only trains.

    python -m blocktrain.swarm_sim.gossip_memory ADDRESS [INITIAL_PEER…]        one peer, told by lines of JSON (gossip_peer.py)

*Between* exchanges: the resident memory of the process with a replica, less that of the same process with a bare trainer that has made the
same steps. *During* one: the same for its peak, which the kernel keeps (VmHWM, set back through /proc/self/clear_refs right before), with
the held-out check on. The allocator gives back what is free before each reading, and nothing trains meanwhile, so that activations are
not counted. Linux only. The networking daemon, a process of its own that holds no state, is not part of it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from blocktrain.node.compute.device import Mover
from blocktrain.node.compute.thread import TrainingThread
from blocktrain.node.compute.trainer import Trainer
from blocktrain.node.network import Net
from blocktrain.node.runtime import Runtime, run
from blocktrain.swarm_sim.benches import Session
from blocktrain.swarm_sim.gossip_peer import Noise, Peer, main, manifest_of
from blocktrain.swarm_sim.gossip_sides import LOCAL, Puppet
from blocktrain.swarm_sim.leash import end_with_parent
from blocktrain.swarm_sim.processes import Failure

STEPS: Final = 2  # so that every buffer of training is touched
EXCHANGES: Final = 3  # after one that warms up
CODECS: Final = ("bf16", "int8")
SLACK_BYTES: Final = 16 << 20  # of the goal: chunks, frames and a piece of a state at a time


class MemoryPeer(Peer):
    """A peer of the bench that can say how much memory it has."""

    def __init__(self, net: Net, runtime: Runtime) -> None:
        super().__init__(net, runtime)
        self._commands |= {"bare": self._bare, "steps": self._steps, "resident": self._resident, "peak": self._peak}

    async def _bare(self, width: int, layers: int) -> dict[str, object]:
        """Resident bytes of this process with nothing but a trainer on its thread."""
        manifest = manifest_of(width, layers)
        trainer = Trainer(manifest, 0, Noise(manifest.optimizer.batch, manifest.model.context, 0), Mover(torch.device("cpu")), seed=0)
        thread = TrainingThread(trainer)
        await asyncio.wrap_future(thread.post(_steps))
        resident = _resident()
        thread.stop()
        await asyncio.wrap_future(thread.ended)
        return {"bytes": resident}

    async def _steps(self) -> dict[str, object]:
        assert self._replica is not None
        await self._replica._between_steps(_steps)
        return {}

    async def _resident(self) -> dict[str, object]:
        """Bytes now; the peak begins again."""
        return {"bytes": _resident()}

    async def _peak(self) -> dict[str, object]:
        """The most bytes since `resident` was asked."""
        return {"bytes": _status("VmHWM")}


def _steps(trainer: Trainer) -> None:
    for _ in range(STEPS):
        trainer.step()


def _resident() -> int:
    """Bytes in memory, without what the allocator can give back; sets the peak to it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def measure(session: Session, shapes: Mapping[str, tuple[int, int]]) -> dict[str, object]:
    """All sizes and codecs. `…_ratio`: beyond the training state, as a share of what is allowed, so that 1 is the goal."""
    numbers: dict[str, object] = {}
    worst: dict[str, float] = {"exchange": 0.0, "between": 0.0}
    for size, shape in shapes.items():
        for codec in CODECS:
            between, during, state = _one(session, f"{size}-{codec}", shape, codec)
            allowed = {"between": state + SLACK_BYTES, "exchange": 2 * state + SLACK_BYTES}
            for name, beyond in (("between", between), ("exchange", during)):
                numbers[f"{name}_memory_{size}_{codec}_mib"] = beyond / 2**20
                numbers[f"{name}_memory_{size}_{codec}_states"] = beyond / state
                numbers[f"{name}_memory_{size}_{codec}_ratio"] = beyond / allowed[name]
                worst[name] = max(worst[name], beyond / allowed[name])
            session.say(
                f"{size}, {codec}: a state is {state / 2**20:.0f} MiB; beyond the training state {between / 2**20:.0f} MiB "
                f"({between / state:.2f} states) between exchanges, at most {during / 2**20:.0f} MiB ({during / state:.2f}) during one"
            )
    return {**numbers, "exchange_memory_ratio": worst["exchange"], "between_memory_ratio": worst["between"]}


def _one(session: Session, name: str, shape: tuple[int, int], codec: str) -> tuple[int, int, int]:
    """(bytes between, most bytes during, bytes of a state) beyond the training state. Of two peers, the one that needs more."""
    width, layers = shape
    peers: list[Puppet] = []
    try:
        known: list[str] = []
        for index in range(2):
            peers.append(Puppet("gossip_memory", LOCAL.ours[index], known, session.folder / f"memory-{name}-{index}.log"))
            known = known or [str(address) for address in peers[0].call("who")["addresses"]]
        names = [peer.call("who")["peer"] for peer in peers]
        bare = [int(peer.call("bare", width=width, layers=layers)["bytes"]) for peer in peers]
        parameters = 0
        for index, peer in enumerate(peers):
            parameters = int(peer.call("build", width=width, layers=layers, seed=index, heldout=True)["parameters"])
            peer.call("steps")
        between, during = [0, 0], [0, 0]
        for turn in range(1 + EXCHANGES):
            low = [int(peer.call("resident")["bytes"]) for peer in peers]
            peers[0].ask("exchange", peer=names[1], codec=codec)
            peers[1].ask("took")
            ends = [peer.hear() for peer in peers]
            if [end["kind"] for end in ends] != ["merged", "merged"]:
                raise Failure(f"the exchange ended as {ends[0]['kind']}: {ends[0]['why']}; {ends[1]['kind']}: {ends[1]['why']}")
            high = [int(peer.call("peak")["bytes"]) for peer in peers]
            if turn:
                between = [max(pair) for pair in zip(between, low, strict=True)]
                during = [max(pair) for pair in zip(during, high, strict=True)]
        return max(_less(between, bare)), max(_less(during, bare)), 4 * parameters
    finally:
        for peer in peers:
            peer.stop()


def _less(a: list[int], b: list[int]) -> list[int]:
    return [one - other for one, other in zip(a, b, strict=True)]


if __name__ == "__main__":
    end_with_parent()
    sys.exit(run(lambda runtime: main(runtime, MemoryPeer)))
