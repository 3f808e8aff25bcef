"""A node that lies: `python -m blocktrain.swarm_sim.leash NICENESS liar-node LIE …`, then what `blocktrain-node` takes. For simulations.

It is the very node that everybody runs, with other parts put in where it is put together (launch.run_node): its replica hands out states
that are not its own, or its streams carry other bytes than it was given. So it announces, offers and answers as the protocol wants it, and
all digests fit what it sends. Sweeps it serves honestly: whom to believe there is not what this tries. The product has no option that leads
here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import Tensor

from blocktrain.node.commands import checks, frame
from blocktrain.node.commands.settings import ConfigFile
from blocktrain.node.compute import flat
from blocktrain.node.compute.replica import Swap
from blocktrain.node.config import NodeConfig
from blocktrain.node.ports import Buffer, Handler, Published, Replica, Server, Stream, Transport
from blocktrain.node.service import Parts
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.messages import Chunk, Message

Change = Callable[[Tensor, Tensor], Tensor]  # (what it has, its published state) → what it sends


def _anywhere(live: Tensor, published: Tensor) -> Tensor:
    """As far from its published state as training went, in a random direction."""
    direction = torch.randn_like(live)
    return published + direction * (flat.distance(live, published) / flat.norm(direction))


CHANGES: Final[dict[str, Change]] = {
    "nan": lambda live, published: torch.full_like(live, float("nan")),
    "huge": lambda live, published: live * 1e6,
    "flipped": lambda live, published: -live,
    "random": _anywhere,
}
GARBAGE: Final = "chunks"


class LyingReplica:
    """A replica that hands out changed states. Everything else is the true one's, found by `__getattr__`."""

    def __init__(self, replica: Replica, change: Change) -> None:
        self._replica = replica
        self._change = change
        self._told: dict[Published, tuple[Published, memoryview]] = {}  # the newest state → what is shown in its place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    async def begin(self, codec: str, reference: bytes = b"") -> Swap:
        swap = await self._replica.begin(codec, reference)
        assert isinstance(swap, Swap), "of a TorchReplica"
        halves = await swap.copied()
        halves.ours.copy_(self._change(halves.ours.clone(), flat.from_bytes(self._replica.state()[1], len(halves.ours))))
        halves.checks = False
        return swap

    def state(self) -> tuple[Published, memoryview]:
        published, payload = self._replica.state()
        if published not in self._told:
            state = flat.from_bytes(payload, self._replica.state_bytes // 4)
            shown = flat.to_bytes(self._change(state, state))
            self._told = {published: (Published(published.round, flat.digest(shown)), shown)}
        return self._told[published]

    def published(self) -> Published:
        return self.state()[0]


class HonestServer:
    """Serves sweeps from the true state, whatever the service hands it."""

    def __init__(self, server: Server, replica: Replica) -> None:
        self._server = server
        self._replica = replica

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def refresh(self, published: Published, state: memoryview) -> None:
        self._server.refresh(*self._replica.state())


class GarblingTransport:
    """Opens and serves streams whose chunks carry random bytes."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def open(self, *args: Any, **settings: Any) -> Stream:
        return cast("Stream", _Garbling(await self._transport.open(*args, **settings)))

    async def serve(self, kind: str, handler: Handler) -> None:
        await self._transport.serve(kind, lambda stream: handler(cast("Stream", _Garbling(stream))))


class _Garbling:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, message: Message, body: Buffer = b"", *, timeout_s: float) -> None:
        if isinstance(message, Chunk):
            body = os.urandom(len(body))
        await self._stream.send(message, body, timeout_s=timeout_s)


def outfit(lie: str, parts: Parts) -> Parts:
    """A node's parts, with those replaced that lie."""
    if lie == GARBAGE:
        return replace(parts, transport=cast("Transport", GarblingTransport(parts.transport)))
    replica = cast("Replica", LyingReplica(parts.replica, CHANGES[lie]))
    return replace(parts, replica=replica, server=cast("Server", HonestServer(parts.server, parts.replica)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one. The first argument is the lie, the rest are a node's."""
    lie, *arguments = sys.argv[1:] if argv is None else argv

    def node(settings: NodeConfig | None = None, *, config: ConfigFile = None) -> int:
        """Hold a block and lie about it."""
        settings = settings or NodeConfig()
        checks.check_node(settings)
        if lie not in (*CHANGES, GARBAGE):
            raise UsageError(f"there is no lie {lie!r}; there are {', '.join((*CHANGES, GARBAGE))}")
        from blocktrain.node import launch, runtime

        return runtime.run(lambda real: launch.run_node(settings, real, lambda parts: outfit(lie, parts)))

    app = frame.new_app("liar-node", "A node that lies, for simulations.")
    app.default(node)
    return frame.run(app, arguments)
