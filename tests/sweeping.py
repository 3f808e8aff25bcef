"""Small blocks, holders of them on any transport, and a client's chain: for the tests of sweeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import torch

from blocktrain.node.compute import flat
from blocktrain.node.compute.generation import Generation, Request, TextSweep
from blocktrain.node.compute.model import Block
from blocktrain.node.compute.serving import TorchServer
from blocktrain.node.holder import Holder
from blocktrain.node.join import Info
from blocktrain.node.ports import Published, Transport
from blocktrain.node.traversal import SwarmChain
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import Digest, PeerId
from blocktrain.protocol.manifest import Manifest, Model, Noise, Optimizer, Schedule
from blocktrain.protocol.membership import Members
from blocktrain.protocol.messages import INFO, LINK, SWEEP
from blocktrain.protocol.records import Announcement, Seen
from blocktrain.protocol.sweep import Sampling
from tests.twins import Swarm, Twin

MANIFEST = Manifest(
    format=1,
    name="tiny",
    blocks=3,
    objective="evidence",
    tokenizer="bytes",
    seed=5,
    model=Model(width=32, layers=1, heads=4, context=32, vocabulary=256),
    noise=Noise(sigma_low=0.2, sigma_high=4.0, overlap=0.1, window_share=0.25),
    schedule=Schedule(steps_per_round=10, learning_rate=4e-3, warmup_rounds=1, planned_rounds=10, floor=0.1),
    optimizer=Optimizer(batch=8, accumulate=1, beta1=0.9, beta2=0.95, weight_decay=0.05, clip=1.0, warmup_steps=20),
)
PROMPT = tuple(b"The river")


def state_of(number: int, seed: int = 0, manifest: Manifest = MANIFEST) -> memoryview:
    """The bytes of a block whose every weight is random; blocks agree about as often as trained ones (the same head)."""
    block = Block(manifest, number).requires_grad_(False)
    block.head.copy_(Block(manifest, 0).head * (6 if block.literal else 2))
    generator = torch.Generator().manual_seed(seed)
    for parameter in block.parameters():
        if not parameter.any():
            parameter.normal_(0, 0.1, generator=generator)
    return flat.to_bytes(torch.cat([parameter.detach().reshape(-1) for _, parameter in sorted(block.named_parameters())]))


@dataclass
class Place:
    """One holder of a block."""

    peer: PeerId
    block: int
    holder: Holder
    server: TorchServer
    transport: Transport
    twin: Twin | None = None

    def publish(self, round: int, state: memoryview) -> None:
        self.server.refresh(Published(round, flat.digest(state)), state)


async def serve(
    transport: Transport, peer: PeerId, block: int, *, seed: int = 0, idle_s: float = 60.0, manifest: Manifest = MANIFEST, **more: int
) -> Place:
    """Hold a block on a transport, with the state of round 1."""
    server = TorchServer(manifest, block, **more)  # type: ignore[arg-type]
    place = Place(peer, block, Holder(manifest, block, server, transport, idle_s=idle_s), server, transport)
    place.publish(1, state_of(block, seed, manifest))
    await transport.serve(SWEEP, place.holder.handle_sweep)
    await transport.serve(LINK, place.holder.handle_link)
    await transport.serve(INFO, Info(manifest, lambda: "{}").handle)
    return place


@dataclass
class World:
    """A swarm in memory with holders a0, a1, a2, b0 … (replica and block), and one client."""

    swarm: Swarm = field(default_factory=Swarm)
    places: dict[str, Place] = field(default_factory=dict)
    looks: int = 0
    manifest: Manifest = MANIFEST

    def __post_init__(self) -> None:
        self.client = self.swarm.node("client", Greeting(self.manifest, "test"))
        self.members = Members(self.manifest.run, self.manifest.blocks, self.client.peer)

    async def add(self, *names: str, **more: int) -> None:
        for name in names:
            twin = self.swarm.node(name, Greeting(self.manifest, "test"))
            self.places[name] = await serve(twin.transport, twin.peer, int(name[1:]), manifest=self.manifest, **more)
            self.places[name].twin = twin
            self.announce(name)

    def announce(self, name: str, load: float = 0.0) -> None:
        place, now = self.places[name], time.time()
        digest = place.server._states[-1].published.digest
        self.members.observe(announced(place.peer, place.block, digest, now, load, self.manifest), now)

    def leave(self, name: str) -> None:
        """Say goodbye, as a node does that stops."""
        place, now = self.places[name], time.time()
        seen = announced(place.peer, place.block, place.server._states[-1].published.digest, now + 1, manifest=self.manifest)
        self.members.observe(replace(seen, announcement=replace(seen.announcement, phase="left")), now)

    def prefer(self, *names: str) -> None:
        """Let these look nearest."""
        for name, place in self.places.items():
            self.members.succeeded(place.peer, time.time(), 0.001 if name in names else 0.2)

    async def look(self) -> None:
        self.looks += 1

    def chain(self, **more: object) -> SwarmChain:
        return SwarmChain(
            self.client.transport,
            self.manifest,
            self.members,
            look=self.look,
            clock=time.time,
            rng=Random(self.swarm.clock()),
            **more,  # type: ignore[arg-type]
        )

    def sessions(self) -> dict[str, int]:
        return {name: place.holder.sessions() + place.server.sessions() for name, place in self.places.items()}

    async def close(self) -> None:
        await self.swarm.close()
        for place in self.places.values():
            await place.server.stop()


def announced(peer: PeerId, block: int, digest: Digest, now: float, load: float = 0.0, manifest: Manifest = MANIFEST) -> Seen:
    return Seen(peer, Announcement(manifest.run, block, "training", 1, digest, 100.0, load, 1, 1), now + 100)


def a_request(tokens: int = 40, seed: int = 7, **more: object) -> Request:
    return Request(prompt=PROMPT, tokens=tokens, sampling=Sampling(temperature=0.9, seed=seed), **more)  # type: ignore[arg-type]


async def written(chain: SwarmChain, request: Request, after: Sequence[Callable[[], None]] = ()) -> Generation:
    """The whole text; after the first piece the first of `after` is called, and so on."""
    text = TextSweep(chain, chain.manifest, request)
    todo = list(after)
    async for _ in text.pieces():
        if todo:
            todo.pop(0)()
    return text.result()
