"""One side of `bench gossip`: a process with a real daemon, transport, replica and exchanger, told by lines of JSON what to do.

    python -m blocktrain.swarm_sim.gossip_peer [INITIAL_PEER…]

Each line on stdin is a command, each line on stdout its answer, in order. There is no service and no directory record: the bench decides
who exchanges with whom, and everything below that decision is what a node runs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import blake3
import numpy as np
import psutil

from blocktrain.node import heap, identity, recipe_file
from blocktrain.node.config import Network
from blocktrain.node.exchanger import Exchanger, Side
from blocktrain.node.network import Net, open_network
from blocktrain.node.ports import Stream
from blocktrain.node.runtime import Runtime, run
from blocktrain.protocol import limits
from blocktrain.protocol.facts import Ended, Fact, SendOffer, Take
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import Digest, PeerId
from blocktrain.protocol.manifest import Grams, Manifest, Model
from blocktrain.protocol.messages import EXCHANGE, Lane, Offer
from blocktrain.swarm_sim.leash import end_with_parent

if TYPE_CHECKING:
    from blocktrain.node.compute.replica import TorchReplica

TAU_S: Final = 120.0
LEARNING_RATE: Final = 1e-4
POLL_S: Final = 0.005
SPREAD: Final = 1e-3  # replicas differ by so much noise, as a share of a standard normal weight
HELDOUT_MARGIN: Final = 1e9  # untrained blocks: the check is made and timed, its verdict is of no interest


def manifest_of(width: int, layers: int) -> Manifest:
    """A run whose blocks have the size that is asked for."""
    base = recipe_file.load_recipe("tiny")
    model = Model(width=width, layers=layers, heads=4, context=128, vocabulary=256)
    # Small steps: a partner that does not train has no way of its own, by which it could tell how far is plausible.
    return replace(base, name="gossip", model=model, grams=Grams(), schedule=replace(base.schedule, learning_rate=LEARNING_RATE))


class Noise:
    """`compute.trainer.Batches` of random bytes: text is not what is measured."""

    def __init__(self, batch: int, context: int, seed: int) -> None:
        self._shape = (batch, context + 1)
        self._rng = np.random.default_rng(seed)

    def next_batch(self) -> np.ndarray[Any, Any]:
        return self._rng.integers(0, 256, self._shape)

    def heldout(self, count: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng(0).integers(0, 256, (count, self._shape[1]))

    def position(self) -> dict[str, object]:
        return {}

    def seek(self, position: Mapping[str, object]) -> bool:
        return True


class Peer:
    """Answers commands. One replica and one exchanger at a time."""

    def __init__(self, net: Net, runtime: Runtime) -> None:
        self._net = net
        self._runtime = runtime
        self._replica: TorchReplica | None = None
        self._exchanger: Exchanger | None = None
        self._side: Side | None = None
        self._ended: asyncio.Queue[Ended] = asyncio.Queue()
        self._commands: dict[str, Callable[..., Awaitable[dict[str, object]]]] = {
            "who": self._who,
            "build": self._build,
            "exchange": self._exchange,
            "took": self._took,
            "train": self._train,
            "mark": self._mark,
        }

    async def answer(self, command: dict[str, Any]) -> dict[str, object]:
        return await self._commands[command.pop("do")](**command)

    async def _who(self) -> dict[str, object]:
        return {"peer": self._net.directory.peer, "addresses": list(self._net.directory.addresses())}

    async def _build(self, width: int, layers: int, seed: int, heldout: bool) -> dict[str, object]:
        """A fresh, untrained replica that differs from everybody's else by a little noise."""
        from blocktrain.node.compute.replica import Options, TorchReplica

        if self._replica is not None:
            await self._replica.stop()
        manifest = manifest_of(width, layers)
        batches = Noise(manifest.optimizer.batch, manifest.model.context, seed)
        options = Options(device="cpu", seed=seed, heldout=heldout)
        replica = await asyncio.to_thread(lambda: TorchReplica(manifest, 0, batches, None, options))
        self._net.transport.greeting = Greeting(manifest, "bench")
        self._replica = replica
        self._side = Side(self._net.directory.peer, manifest, 0, "bf16", HELDOUT_MARGIN)
        self._exchanger = Exchanger(self._side, self._net.transport, replica, self._report, self._runtime.clock)
        state = np.frombuffer(replica.state()[1], "<f4") + np.float32(SPREAD) * np.random.default_rng(seed).standard_normal(
            replica.state_bytes // 4, np.float32
        )
        payload = state.astype("<f4").tobytes()
        await replica.load(payload, 1, Digest(blake3.blake3(payload).digest()))
        heap.settle()  # as a node does
        return {"parameters": replica.state_bytes // 4}

    def _report(self, fact: Fact) -> None:
        if isinstance(fact, Ended):
            self._ended.put_nowait(fact)

    async def inbound(self, stream: Stream) -> None:
        """Take whatever is offered; lanes go to their exchange."""
        first, _ = await stream.receive(timeout_s=limits.OPEN_TIMEOUT_S)
        assert self._exchanger is not None
        if isinstance(first, Lane):
            await self._exchanger.lane(first, stream)
        else:
            assert isinstance(first, Offer)
            await self._exchanger.take(Take(first.exchange, stream.peer, self._runtime.clock() + TAU_S), first, stream)

    async def _exchange(self, peer: str, codec: str, streams: int | None = None) -> dict[str, object]:
        """Offer an exchange and see it through. `began` is the wish, `ended` the end, of time.monotonic()."""
        exchanger = self._exchanger
        assert exchanger is not None
        exchanger.side = replace(exchanger.side, codec=codec, streams=streams)
        began, cpu = time.monotonic(), time.process_time()
        order = SendOffer(self._runtime.rng.randbytes(16), PeerId(peer), self._runtime.clock() + TAU_S)
        offering = asyncio.create_task(exchanger.offer(order), name="offer")
        ended = await self._ended.get()  # as a node's core hears it: streams are hung up after
        end = time.monotonic()
        await offering
        timing = exchanger.timing
        return {
            "kind": ended.result.kind,
            "why": ended.result.why,
            "began": began,
            "ended": end,
            "cpu_s": time.process_time() - cpu,
            "first_chunk_at": timing.first_chunk_at,
            "verified_at": timing.verified_at,
            "bytes": timing.payload_bytes,
            "lanes": timing.lanes,
        }

    async def _took(self) -> dict[str, object]:
        """The end of the exchange that somebody offered us."""
        async with asyncio.timeout(TAU_S):
            ended = await self._ended.get()
        return {"kind": ended.result.kind, "why": ended.result.why, "ended": time.monotonic()}

    async def _train(self) -> dict[str, object]:
        assert self._replica is not None
        self._replica.start(lambda: None)
        return {}

    async def _mark(self) -> dict[str, object]:
        """The next end of a step: how many there were, when it was, and the training thread's own time."""
        assert self._replica is not None
        begin = self._replica.progress().steps
        while (steps := self._replica.progress().steps) == begin:  # noqa: ASYNC110 - a step tells nobody that it ended
            await asyncio.sleep(POLL_S)
        return {"steps": steps, "at": time.monotonic(), "thread_s": _training_thread_s()}

    async def stop(self) -> None:
        if self._replica is not None:
            await self._replica.stop()


def _training_thread_s() -> float:
    """CPU seconds of the thread that trains."""
    names = {thread.native_id for thread in threading.enumerate() if thread.name == "blocktrain-train"}
    return float(sum(each.user_time + each.system_time for each in psutil.Process().threads() if each.id in names))


async def main(runtime: Runtime, kind: type[Peer] = Peer) -> int:
    """One peer, told by stdin: argv is the address to listen on, and whom to connect to."""
    network = Network(host_maddrs=(sys.argv[1],), initial_peers=tuple(sys.argv[2:]))
    with identity.temporary() as who:
        async with open_network(network, who, Greeting(None, "bench"), runtime.clock, children=runtime.children) as net:
            peer = kind(net, runtime)
            await net.transport.serve(EXCHANGE, peer.inbound)
            reader = asyncio.StreamReader(limit=1 << 20)
            await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
            try:
                while line := await reader.readline():
                    print(json.dumps(await peer.answer(json.loads(line))), flush=True)
            finally:
                await peer.stop()
    return 0


if __name__ == "__main__":
    end_with_parent()
    sys.exit(run(main))
