"""What `bench sweep` measures on a swarm, as the client that every application is: one function for each part."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Final, TypeVar

import torch

from blocktrain.node.client import SwarmClient
from blocktrain.node.compute.drafting import Drafter
from blocktrain.node.compute.generation import Generation, Request, TextSweep, Traversals
from blocktrain.node.compute.offline import OfflineChain
from blocktrain.node.config import ClientConfig
from blocktrain.node.data import load_tokens
from blocktrain.node.runtime import Runtime
from blocktrain.node.tokenizer import load_tokenizer
from blocktrain.node.traversal import SwarmChain
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import Step
from blocktrain.protocol.sweep import AUTOREGRESSIVE, ONE_SWEEP, SPECULATIVE, Sampling
from blocktrain.swarm_sim.lab.judge import judge
from blocktrain.swarm_sim.sweep_swarm import SweepSwarm, Trained

T = TypeVar("T")
DRAFT: Final = 8
CLIENTS: Final = 8
PROMPT: Final = b"The history of the river is that of the people who "
PROMPT_BYTES, TEXT_BYTES = 32, 64
CONTEXT_BINS: Final = 8


@dataclass(frozen=True)
class Way:
    """One way to make text, and how many tokens of it are made to measure it."""

    name: str
    mode: str
    route: str
    tokens: int
    adapt: bool = False
    here: bool = False  # the client holds the first block, too, and drafts with it

    def request(self, seed: int, tokens: int | None = None, prompt: bytes = PROMPT) -> Request:
        sampling = Sampling(1.0, seed=seed)
        return Request(tuple(prompt), tokens or self.tokens, self.mode, sampling, draft=DRAFT, adapt=self.adapt)


YARDSTICK: Final = Way("autoregressive", AUTOREGRESSIVE, "chain", 20)
SPECULATION: Final = Way("speculative", SPECULATIVE, "chain", 64)
SWEEP: Final = Way("one_sweep", ONE_SWEEP, "chain", 64)
WAYS: Final = (
    YARDSTICK,
    SPECULATION,
    Way("adaptive", SPECULATIVE, "chain", 64, adapt=True),
    SWEEP,
    Way("star", AUTOREGRESSIVE, "star", 20),
    Way("star_speculative", SPECULATIVE, "star", 64),
    Way("client_drafts", SPECULATIVE, "star", 64, here=True),
)


@dataclass(frozen=True)
class Traversal:
    """One traversal as the client saw it."""

    position: int  # of the first token that it gave, in the context
    seconds: float
    compute_s: float


def with_client(swarm: SweepSwarm, work: Callable[[SwarmClient], Awaitable[T]]) -> T:
    """Do `work` with a client of the swarm, in an event loop of its own; the children are heard meanwhile."""

    async def whole() -> T:
        config = ClientConfig(initial_peers=swarm.addresses)
        async with SwarmClient.connect(config, Runtime(rng=Random(0))) as client:
            listening = asyncio.create_task(_listen(swarm))
            try:
                return await work(client)
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)

    return asyncio.run(whole())


async def _listen(swarm: SweepSwarm) -> None:
    while True:
        swarm.children.poll()
        await asyncio.sleep(1.0)


@contextlib.asynccontextmanager
async def opened(client: SwarmClient, route: str) -> AsyncIterator[SwarmChain]:
    """A chain whose sessions are open and whose streams are warm."""
    client.route = route
    async with client.chain() as chain:
        for sequence in range(2):
            await chain.traverse(Step(sequence, 0, 1, 1, PROMPT))
        yield chain


async def write(
    chain: Traversals, manifest: Manifest, request: Request, each: Callable[[int, float, float], None] = lambda *_: None
) -> Generation:
    """A whole text. `each` gets, for every traversal, the tokens before it, its seconds, and those of computing."""
    sweep = TextSweep(chain, manifest, request)
    began, compute_s, tokens = time.perf_counter(), 0.0, len(request.prompt)
    async for piece in sweep.pieces():
        now, spent = time.perf_counter(), sweep.result().compute_s
        each(tokens, now - began, spent - compute_s)
        began, compute_s, tokens = now, spent, tokens + len(piece.tokens)
    return sweep.result()


async def pairs(client: SwarmClient, count: int, drafter: Drafter) -> dict[str, list[Generation]]:
    """Every way in turn, `count` times, the order reversed each time."""
    results: dict[str, list[Generation]] = {way.name: [] for way in WAYS}
    async with opened(client, "chain") as along, opened(client, "star") as around:
        for turn in range(count):
            for way in WAYS if turn % 2 else reversed(WAYS):
                chain: Traversals = along if way.route == "chain" else drafter.over(around) if way.here else around
                results[way.name].append(await write(chain, client.manifest, way.request(turn)))
    return results


async def many(client: SwarmClient, way: Way, texts: int, drafter: Drafter) -> tuple[float, float]:
    """Tokens/s of one client and of eight at once, all of them together."""

    async def one(seed: int, chain: SwarmChain) -> int:
        travels = drafter.over(chain) if way.here else chain
        return sum([(await write(travels, client.manifest, way.request(seed + turn))).tokens for turn in range(texts)])

    rates = []
    for clients in (1, CLIENTS):
        async with contextlib.AsyncExitStack() as stack:
            chains = [await stack.enter_async_context(opened(client, way.route)) for _ in range(clients)]
            began = time.perf_counter()
            tokens = await asyncio.gather(*(one(100 * index, chain) for index, chain in enumerate(chains)))
            rates.append(sum(tokens) / (time.perf_counter() - began))
    return rates[0], rates[1]


async def traversals(client: SwarmClient, texts: int, tokens: int) -> list[Traversal]:
    """Those of autoregressive texts that begin with one byte and stay within the context."""
    seen: list[Traversal] = []
    async with opened(client, "chain") as chain:
        for seed in range(texts):
            await write(chain, client.manifest, YARDSTICK.request(seed, tokens, b"T"), lambda *row: seen.append(Traversal(*row)))
    return seen


async def busy(client: SwarmClient, seconds: float) -> float:
    """Tokens/s of a client that never pauses."""
    async with opened(client, "chain") as chain:
        began, tokens, seed = time.perf_counter(), 0, 0
        while time.perf_counter() - began < seconds:
            tokens += (await write(chain, client.manifest, SPECULATION.request(seed))).tokens
            seed += 1
        return tokens / (time.perf_counter() - began)


def by_context(seen: list[Traversal], context: int) -> list[float]:
    """Median milliseconds of computing for a token, by its place in the context, in equal bins."""
    bins: list[list[float]] = [[] for _ in range(CONTEXT_BINS)]
    for one in seen:
        bins[min(CONTEXT_BINS - 1, one.position * CONTEXT_BINS // context)].append(1000 * one.compute_s)
    return [statistics.median(values) for values in bins if values]


def quality(model: Trained, count: int) -> tuple[dict[str, float], dict[str, str]]:
    """The judge's nats per byte for each way and for the true text, and a sample of each."""
    manifest = model.manifest
    corpus = load_tokens(("gensim",), load_tokenizer(manifest.tokenizer, 256), manifest.model.context)
    whole = torch.from_numpy(corpus.heldout_windows(count))[:, : PROMPT_BYTES + TEXT_BYTES]
    prompts = whole[:, :PROMPT_BYTES]
    nats = {"true_text": judge(model.judge, prompts, whole[:, PROMPT_BYTES:])}
    samples: dict[str, str] = {}

    async def texts(way: Way) -> list[bytes]:
        async with OfflineChain(manifest, model.blocks) as chain:
            out = []
            for seed, prompt in enumerate(prompts.tolist()):
                request = replace(way.request(seed, TEXT_BYTES), prompt=tuple(prompt))
                sweep = TextSweep(chain, manifest, request)
                async for _ in sweep.pieces():
                    pass
                out.append(sweep.result().data)
            return out

    for way in (YARDSTICK, SPECULATION, SWEEP):
        made = asyncio.run(texts(way))
        nats[way.name] = judge(model.judge, prompts, torch.tensor([list(text) for text in made]))
        samples[way.name] = made[0].decode("utf-8", "replace")
    return nats, samples
