"""The commands that ask a model: `generate`, `chat` and `eval`. Text goes to stdout as it comes, what is worth knowing to stderr."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

from blocktrain.node import answers, logs
from blocktrain.node.client import Decode, Model, open_model
from blocktrain.node.compute.generation import Generation, Request, TokenText, Utf8
from blocktrain.node.config import ChatConfig, ClientConfig, EvalConfig, GenerateConfig, TextConfig
from blocktrain.node.data import load_tokens
from blocktrain.node.runtime import Runtime
from blocktrain.node.tokenizer import BYTES, Tokenizer, load_tokenizer
from blocktrain.node.traversal import Report
from blocktrain.protocol.errors import BlocktrainError, UsageError
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.sweep import Sampling

T = TypeVar("T")
MAX_LINE_BYTES: Final = 1 << 20
HELP: Final = "a line is a prompt; an empty one goes on from where the text stands; /new forgets it; /quit or the end of input ends"


async def generate(config: ClientConfig, wish: GenerateConfig, prompt: bytes, runtime: Runtime) -> int:
    """`blocktrain generate`: the text as it comes, or one JSON object at the end."""
    logs.setup("warning")
    async with open_model(config, wish.model, runtime, wish.route, wish.drafter) as model:
        tokenizer = _tokenizer(model.manifest, wish.tokenizer)
        seed = wish.seed if wish.seed is not None else runtime.rng.getrandbits(62)
        request = request_for(wish, tokens_of(tokenizer, prompt), seed)
        screen = Screen(silent=wish.json)
        screen.show(prompt)
        try:
            result, report = await _until_stopped(runtime, _write(model, request, tokenizer, screen, runtime))
        finally:
            screen.end()  # also where the next line says what went wrong
        if wish.json:
            print(json.dumps(answers.generation_json(model.manifest, result, report, prompt)))
        else:
            print(answers.about(result, report), file=sys.stderr)
    return 0


async def chat(config: ClientConfig, wish: ChatConfig, runtime: Runtime) -> int:
    """`blocktrain chat`: a loop of prompts; each answer goes on from all the text before it."""
    logs.setup("warning")
    async with open_model(config, wish.model, runtime, wish.route, wish.drafter) as model:
        tokenizer = _tokenizer(model.manifest, wish.tokenizer)
        if sys.stdin.isatty():
            print(f"{model.manifest.name}: {HELP}", file=sys.stderr)
        text = b""
        seed = wish.seed if wish.seed is not None else runtime.rng.getrandbits(62)
        while (line := await _line(runtime)) is not None:
            command = line.strip()
            if command in (b"/quit", b"/exit"):
                break
            if command == b"/new":
                text = b""
                continue
            text = text[-MAX_LINE_BYTES:] + (line if command else b"")
            seed = (seed + 1) % 2**62
            screen = Screen()
            request = request_for(wish, tokens_of(tokenizer, text), seed)
            try:
                result, report = await _until_stopped(runtime, _write(model, request, tokenizer, screen, runtime))
            except UsageError:
                raise
            except BlocktrainError as error:  # the conversation outlives a swarm that has a hole for a minute
                screen.end()
                print(f"no answer: {error}", file=sys.stderr)
                continue
            screen.end()
            if wish.about:
                print(answers.about(result, report), file=sys.stderr)
            text += result.data
            if not text.endswith(b"\n"):
                text += b"\n"
    return 0


async def evaluate(config: ClientConfig, wish: EvalConfig, runtime: Runtime) -> int:
    """`blocktrain eval`: the loss of the living chain, or of a file, on held-out text."""
    logs.setup("warning")
    async with open_model(config, wish.model, runtime, wish.route) as model:
        manifest = model.manifest
        tokenizer = _tokenizer(manifest, wish.tokenizer)
        corpus = await asyncio.to_thread(load_tokens, wish.data, tokenizer, manifest.model.context)
        windows = corpus.heldout_windows(wish.windows)
        began = time.monotonic()
        loss, report = await _until_stopped(runtime, model.loss(windows.tolist()))
        if wish.json:
            found = answers.loss_json(manifest, loss, report, time.monotonic() - began)
            print(json.dumps({**found, "windows": len(windows), "data": list(wish.data)}))
        else:
            rounds = ", ".join(f"block {block} round {round}" for block, _, round, _ in report.peers)
            print(f"{loss.nats:.4f} nats per token on {loss.tokens} held-out tokens ({rounds})")
    return 0


class Screen:
    """stdout: characters on a terminal, the bytes as they are everywhere else."""

    def __init__(self, silent: bool = False) -> None:
        self._silent = silent
        self._terminal = sys.stdout.isatty() or not hasattr(sys.stdout, "buffer")
        self._shown = Utf8()

    def show(self, data: bytes) -> None:
        if self._silent:
            return
        if self._terminal:
            sys.stdout.write(self._shown.feed(data))
        else:
            sys.stdout.buffer.write(data)
        sys.stdout.flush()

    def end(self) -> None:
        if self._terminal and not self._silent:
            print(self._shown.feed(b"", last=True), flush=True)


async def _write(model: Model, request: Request, tokenizer: Tokenizer, screen: Screen, runtime: Runtime) -> tuple[Generation, Report]:
    """The text, on the screen as it comes; what there is of it where the user wants to stop."""
    async with model.generate(request, decoder(tokenizer, request.prompt)) as (text, report):
        try:
            async for piece in text.pieces():
                screen.show(piece.data)
        except asyncio.CancelledError:
            if not runtime.stop.is_set():
                raise
        return text.result(), report


def request_for(text: TextConfig, prompt: tuple[int, ...], seed: int) -> Request:
    """A request as the command line has it."""
    return Request(
        prompt=prompt,
        tokens=text.max_tokens,
        mode=text.mode,
        sampling=Sampling(text.temperature, text.top_k, text.top_p, seed),
        draft=text.draft,
        window=text.window,
        substeps=text.substeps,
        stop=tuple(word.encode("utf-8", "surrogateescape") for word in text.stop),
        allow_missing=text.allow_missing,
    )


def tokens_of(tokenizer: Tokenizer, text: bytes) -> tuple[int, ...]:
    """A prompt's tokens; where they are bytes, whatever bytes they are."""
    return tuple(text) if tokenizer.name == BYTES else tuple(tokenizer.encode(text.decode("utf-8", "replace")))


def decoder(tokenizer: Tokenizer, prompt: tuple[int, ...]) -> Decode | None:
    """How tokens become bytes; None: they are bytes."""
    return None if tokenizer.name == BYTES else TokenText(tokenizer.decode, prompt)


def _tokenizer(manifest: Manifest, file: Path | None) -> Tokenizer:
    return load_tokenizer(manifest.tokenizer, manifest.model.vocabulary, file)


async def _line(runtime: Runtime) -> bytes | None:
    """The next line of stdin; None at its end, or when we are asked to stop."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    reading = asyncio.create_task(asyncio.to_thread(sys.stdin.buffer.readline, MAX_LINE_BYTES))
    stop = asyncio.create_task(runtime.stop.wait(), name="stop")
    await asyncio.wait({reading, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    return (reading.result() or None) if reading.done() else None


async def _until_stopped(runtime: Runtime, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises: CancelledError: the user wants to stop; what `work` had opened is closed."""
    task = asyncio.create_task(work)
    stop = asyncio.create_task(runtime.stop.wait(), name="stop")
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        return await task
    finally:
        task.cancel()
        stop.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)
