"""A client of the swarm: finds a run and its holders, and asks their chain for text or for the loss on a text.

No node is needed and no block is held; the identity is made for one command. `SwarmClient` is also the Python API: `async with
SwarmClient.connect(…) as swarm`, then `swarm.generate(request)`, which is an async iterator of pieces, or `swarm.loss(windows)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from blocktrain import __version__
from blocktrain.node import identity as identities
from blocktrain.node import logs
from blocktrain.node.compute.evaluation import ChainLoss, chain_loss
from blocktrain.node.compute.generation import Generation, Piece, Request, TextSweep, Utf8
from blocktrain.node.config import ClientConfig, EvalConfig, GenerateConfig
from blocktrain.node.config import Network as NetworkConfig
from blocktrain.node.join import find_run
from blocktrain.node.launch import AGENT, look
from blocktrain.node.local import read_local
from blocktrain.node.network import Net, open_network
from blocktrain.node.runtime import Runtime
from blocktrain.node.traversal import Report, SwarmChain
from blocktrain.protocol.errors import NoPeers, UsageError
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import short
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.membership import Members
from blocktrain.protocol.sweep import Sampling

LOOKS = 3  # at the directory, before a block counts as missing
LOOK_PAUSE_S = 0.5


@dataclass(frozen=True)
class SwarmClient:
    """A connection to one run. Make it with `connect`."""

    net: Net
    manifest: Manifest
    members: Members
    runtime: Runtime

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, config: ClientConfig, runtime: Runtime) -> AsyncIterator[SwarmClient]:
        """Find the run that is meant and who holds its blocks.

        Raises: Unreachable, NoPeers, UsageError, RefusedBySwarm: in one line.
        """
        initial_peers = config.initial_peers or _local_addresses(runtime)
        network = NetworkConfig(initial_peers=initial_peers, daemon_start_timeout_s=config.daemon_start_timeout_s)
        with identities.temporary() as nobody:
            async with open_network(
                network, nobody, Greeting(None, AGENT), runtime.clock, children=runtime.children, client_mode=True
            ) as net:
                manifest = await find_run(net.directory, net.transport, config.run, timeout_s=config.timeout_s)
                net.transport.greeting = Greeting(manifest, AGENT)
                client = cls(net, manifest, Members(manifest.run, manifest.blocks, net.directory.peer), runtime)
                await client.look()
                yield client

    async def look(self) -> None:
        """Read who holds what, now."""
        await look(self.net, self.manifest, self.members, self.runtime.clock)

    @contextlib.asynccontextmanager
    async def chain(self, *, require_all: bool = True) -> AsyncIterator[SwarmChain]:
        """One peer per block, with open sessions. Raises: NoPeers: naming the block that nobody holds."""
        for attempt in range(LOOKS):
            chain = SwarmChain(
                self.net.transport,
                self.manifest,
                self.members,
                look=self.look,
                clock=self.runtime.clock,
                rng=self.runtime.rng,
                require_all=require_all,
            )
            try:
                await chain.__aenter__()
                break
            except NoPeers:
                if attempt == LOOKS - 1:
                    raise
                await asyncio.sleep(LOOK_PAUSE_S)
                await self.look()
        try:
            yield chain
        finally:
            await chain.__aexit__()

    @contextlib.asynccontextmanager
    async def generate(self, request: Request, *, require_all: bool = True) -> AsyncIterator[tuple[TextSweep, Report]]:
        """A request at work: iterate over `pieces()`, then ask for `result()`; the report says who served it."""
        async with self.chain(require_all=require_all) as chain:
            yield TextSweep(chain, self.manifest, request), chain.report

    async def loss(self, windows: Sequence[Sequence[int]]) -> tuple[ChainLoss, Report]:
        """The chain's loss on windows of equal length, nats per token."""
        async with self.chain() as chain:
            return await chain_loss(chain, self.manifest, windows), chain.report


def _local_addresses(runtime: Runtime) -> tuple[str, ...]:
    """Addresses of this user's nodes on this machine. Raises: UsageError: there is none."""
    found = tuple(status.addresses[0] for status in read_local(runtime.clock) if status.addresses)
    if not found:
        raise UsageError("no node runs on this machine; give an address of the swarm with --initial-peers /ip4/…/tcp/…/p2p/…")
    return found


# ---- the commands ---------------------------------------------------------------------------------------------------------------


async def generate(config: ClientConfig, wish: GenerateConfig, prompt: bytes, runtime: Runtime) -> int:
    """`blocktrain generate`: text to stdout as it comes (or one JSON object at the end), what is worth knowing to stderr."""
    logs.setup("warning")
    async with SwarmClient.connect(config, runtime) as swarm:
        seed = wish.seed if wish.seed is not None else runtime.rng.getrandbits(62)
        request = Request(
            prompt=_tokens(swarm.manifest, prompt),
            tokens=wish.max_tokens,
            mode=wish.mode,
            sampling=Sampling(wish.temperature, wish.top_k, wish.top_p, seed),
            draft=wish.draft,
        )
        async with swarm.generate(request) as (text, report):
            shown = Utf8()
            if not wish.json:
                sys.stdout.write(shown.feed(prompt))
            async for piece in text.pieces():
                _show(piece, shown, wish.json)
                if runtime.stop.is_set():
                    break
            result = text.result()
            if wish.json:
                print(json.dumps(_generation_json(swarm.manifest, result, report, prompt)))
            else:
                print(shown.feed(b"", last=True), flush=True)
                print(_about(result, report), file=sys.stderr)
    return 0


async def evaluate(config: ClientConfig, wish: EvalConfig, runtime: Runtime) -> int:
    """`blocktrain eval`: the loss of the living chain on held-out text."""
    from blocktrain.node.data import load_tokens
    from blocktrain.node.tokenizer import load_tokenizer

    logs.setup("warning")
    async with SwarmClient.connect(config, runtime) as swarm:
        tokenizer = load_tokenizer(swarm.manifest.tokenizer, swarm.manifest.model.vocabulary)
        corpus = await asyncio.to_thread(load_tokens, wish.data, tokenizer, swarm.manifest.model.context)
        windows = corpus.heldout_windows(wish.windows)
        began = time.monotonic()
        loss, report = await swarm.loss(windows.tolist())
        seconds = time.monotonic() - began
        if wish.json:
            print(
                json.dumps(
                    {
                        "run": swarm.manifest.run.hex(),
                        "loss": loss.nats,
                        "tokens": loss.tokens,
                        "windows": len(windows),
                        "data": list(wish.data),
                        "blocks": list(loss.blocks),
                        "missing": list(loss.missing),
                        "peers": _peers_json(report),
                        "rounds": [row[2] for row in report.peers],
                        "seconds": seconds,
                    }
                )
            )
        else:
            rounds = ", ".join(f"block {block} round {round} at {short(peer)}" for block, peer, round, _ in report.peers)
            print(f"{loss.nats:.4f} nats per token on {loss.tokens} held-out tokens ({rounds})")
    return 0


def _tokens(manifest: Manifest, prompt: bytes) -> tuple[int, ...]:
    if manifest.tokenizer != "bytes":
        raise UsageError(f"run {manifest.name} has the tokenizer {manifest.tokenizer[:20]}…; generate needs its file (not supported yet)")
    return tuple(prompt)


def _show(piece: Piece, shown: Utf8, quiet: bool) -> None:
    if not quiet:
        sys.stdout.write(shown.feed(piece.data))
        sys.stdout.flush()


def _about(result: Generation, report: Report) -> str:
    served = ", ".join(f"block {block} at {short(peer)} (round {round})" for block, peer, round, _ in report.peers)
    words = [
        f"{result.mode}: {result.tokens} tokens in {result.traversals} traversals "
        f"({result.tokens_per_traversal:.1f} each), {result.tokens_per_s:.1f} tokens/s, seed {result.sampling.seed}",
        served,
    ]
    if result.mode == "one-sweep":
        words.append("all bytes of a window come from noise at once: fast, and rough by nature")
    if result.prompt_unseen:
        words.append(f"the first {result.prompt_unseen} tokens of the prompt do not fit the context and were not seen")
    if result.missing:
        words.append(f"WITHOUT block {', '.join(map(str, result.missing))}")
    if report.mended:
        changed = "; another state took over, so the same seed may not give this text again" if report.digests_changed else ""
        words.append(f"mended {len(report.mended)} times (last: {report.mended[-1]}){changed}")
    return "\n".join(words)


def _generation_json(manifest: Manifest, result: Generation, report: Report, prompt: bytes) -> dict[str, object]:
    return {
        "run": manifest.run.hex(),
        "prompt": prompt.decode("utf-8", errors="replace"),
        "text": result.text,
        "bytes": len(result.data),
        "tokens": result.tokens,
        "mode": result.mode,
        "temperature": result.sampling.temperature,
        "seed": result.sampling.seed,
        "traversals": result.traversals,
        "tokens_per_traversal": result.tokens_per_traversal,
        "drafted": result.drafted,
        "kept": result.kept,
        "blocks": list(result.blocks),
        "missing": list(result.missing),
        "peers": _peers_json(report),
        "rounds": [row[2] for row in report.peers],
        "mended": report.mended,
        "digests_changed": report.digests_changed,
        "prompt_unseen": result.prompt_unseen,
        "finish": result.finish,
        "seconds": result.seconds,
        "first_token_s": result.first_token_s,
        "compute_s": result.compute_s,
        "version": __version__,
    }


def _peers_json(report: Report) -> list[dict[str, object]]:
    return [{"block": block, "peer": peer, "round": round, "digest": digest[:16]} for block, peer, round, digest in report.peers]
