"""`blocktrain gateway`: the swarm (or a file) behind an OpenAI-compatible HTTP endpoint on loopback.

`/v1/models` and `/v1/completions`, streamed or whole. Every answer carries an object `blocktrain` beside OpenAI's fields: mode, route,
blocks, peers, rounds and what was mended. A client that goes away ends its sessions in the swarm. There are no keys, so it listens on
loopback, answers only to a local `Host`, and takes only JSON: a web page in the user's browser cannot use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final

from aiohttp import web

from blocktrain.node import answers, heap, logs, wishes
from blocktrain.node.asking import decoder
from blocktrain.node.client import Model, open_model
from blocktrain.node.compute.generation import Generation, Piece, Request, Utf8
from blocktrain.node.config import ClientConfig, GatewayConfig
from blocktrain.node.runtime import Runtime
from blocktrain.node.tokenizer import BYTES, Tokenizer, load_tokenizer
from blocktrain.node.wishes import Refused, Wish
from blocktrain.protocol.errors import BlocktrainError, UsageError

log = logging.getLogger("blocktrain.gateway")

MAX_BODY_BYTES: Final = 4 * 1024 * 1024
RETRY_AFTER_S: Final = 1.0
STOP_S: Final = 1.0  # for answers under way when we are told to stop
LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")
LOGPROBS: Final = ("tokens", "token_logprobs", "text_offset", "top_logprobs")
Json = dict[str, object]


class Gateway:
    """The endpoint's work. One instance serves all requests."""

    def __init__(self, model: Model, tokenizer: Tokenizer, config: GatewayConfig, runtime: Runtime) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._config = config
        self._runtime = runtime
        self._began = int(runtime.clock())
        self._busy: Counter[str] = Counter()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model}", self._one_model)
        app.router.add_post("/v1/completions", self._completions)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        """Every error in OpenAI's form; nothing for strangers."""
        try:
            self._check_host(request)
            return await handler(request)
        except Refused as refused:
            return _refusal(refused)
        except BlocktrainError as error:
            return _refusal(Refused.of(error))
        except web.HTTPException as error:
            if error.status == 404:
                return _refusal(
                    Refused(404, f"there is no {request.method} {request.path}; these models continue text: use /v1/completions")
                )
            return _refusal(Refused(error.status, error.reason))

    def _check_host(self, request: web.Request) -> None:
        """A page that was loaded from elsewhere names its own host, even when its name leads here."""
        if not _is_loopback(self._config.host):
            return
        name = request.host.rsplit(":", 1)[0] if not request.host.startswith("[") else request.host.split("]")[0][1:]
        if name not in LOCAL_NAMES and not _is_loopback(name):
            raise Refused(403, f"this endpoint is for this machine only; it is not called {name[:80]!r}")

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def _one_model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["model"]
        if name != self._model.manifest.name:
            raise Refused(404, f"the model {name[:80]!r} does not exist", param="model", code="model_not_found")
        return web.json_response(self._card())

    def _card(self) -> Json:
        manifest = self._model.manifest
        return {"id": manifest.name, "object": "model", "created": self._began, "owned_by": "blocktrain", "run": manifest.run.hex()}

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != "application/json":
            raise Refused(415, "send the request as Content-Type: application/json")
        try:
            body = await request.json()
        except (ValueError, RecursionError):
            raise Refused(400, "the body is not JSON") from None
        seed = self._runtime.rng.getrandbits(62)
        wish = wishes.read(body, self._model.manifest, self._tokenizer, self._config.max_tokens, seed)
        with self._place(request):
            if wish.stream:
                return await self._stream(request, wish)
            return web.json_response(await self._whole(wish))

    @contextlib.contextmanager
    def _place(self, request: web.Request) -> Iterator[None]:
        """A place for one request. Who sends a key is one client by it, otherwise by address."""
        who = request.headers.get("Authorization") or request.remote or ""
        if self._busy[who] >= self._config.per_client:
            raise Refused(429, f"{self._config.per_client} requests of yours are under way", retry_after_s=RETRY_AFTER_S)
        if self._busy.total() >= self._config.at_once:
            raise Refused(429, f"{self._busy.total()} requests are under way, as many as this gateway takes", retry_after_s=RETRY_AFTER_S)
        self._busy[who] += 1
        try:
            yield
        finally:
            self._busy[who] -= 1
            if not self._busy[who]:
                del self._busy[who]

    # ---- answers ----------------------------------------------------------------------------------------------------------------

    async def _whole(self, wish: Wish) -> Json:
        answer = self._envelope()
        choices: list[Json] = []
        results: list[Generation] = []
        for index, request in enumerate(wish.requests):
            text = Choice(index, wish, self._tokenizer)
            pieces = [piece async for piece in self._pieces(request, text, answer, results)]
            choices.append(text.whole(pieces, results[-1]))
        return {**answer, "choices": choices, "usage": _usage(results)}

    async def _stream(self, request: web.Request, wish: Wish) -> web.StreamResponse:
        """Server-sent events. Errors before the first piece are ordinary ones; later they are an event, and the end."""
        answer, results = self._envelope(), list[Generation]()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            for index, one in enumerate(wish.requests):
                text = Choice(index, wish, self._tokenizer)
                async for piece in self._pieces(one, text, answer, results):
                    if not response.prepared:
                        await response.prepare(request)
                    await _event(response, {**answer, "choices": [piece]})
                await _event(response, {**answer, "choices": [text.end(results[-1])]})
            if wish.usage_in_stream:
                await _event(response, {**answer, "choices": [], "usage": _usage(results)})
        except BlocktrainError as error:
            if not response.prepared:
                raise
            await _event(response, Refused.of(error).body())
            await response.write_eof()
            return response
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _pieces(self, request: Request, text: Choice, answer: Json, results: list[Generation]) -> AsyncIterator[Json]:
        async with self._model.generate(request, decoder(self._tokenizer, request.prompt)) as (sweep, report):
            if text.prompt_shown:
                yield text.piece(Piece(text.prompt_shown, (), ()))
            async for piece in sweep.pieces():
                yield text.piece(piece)
            results.append(sweep.result())
            answer["blocktrain"] = {**answers.origin(results[-1], report), "prompt_unseen": results[-1].prompt_unseen}

    def _envelope(self) -> Json:
        return {
            "id": f"cmpl-{self._runtime.rng.getrandbits(96):024x}",
            "object": "text_completion",
            "created": int(self._runtime.clock()),
            "model": self._model.manifest.name,
        }


class Choice:
    """One text of an answer, in pieces."""

    def __init__(self, index: int, wish: Wish, tokenizer: Tokenizer) -> None:
        self._index = index
        self._logprobs = wish.logprobs
        self._tokenizer = tokenizer
        self._utf8 = Utf8()
        self._offset = 0
        self.prompt_shown = wish.prompts[index] if wish.echo else b""

    def piece(self, piece: Piece) -> Json:
        return self._choice(self._utf8.feed(piece.data), None, piece)

    def end(self, result: Generation) -> Json:
        return self._choice(self._utf8.feed(b"", last=True), result.finish, Piece(b"", (), ()))

    def whole(self, pieces: list[Json], result: Generation) -> Json:
        """All pieces as one."""
        parts = [*pieces, self.end(result)]
        whole: Json = {**parts[-1], "text": "".join(str(part["text"]) for part in parts)}
        rows = [part["logprobs"] for part in parts]
        if self._logprobs is not None:
            whole["logprobs"] = {key: _joined([row[key] for row in rows if isinstance(row, dict)]) for key in LOGPROBS}
        return whole

    def _choice(self, text: str, finish: str | None, piece: Piece) -> Json:
        scores = None if self._logprobs is None else self._scores(piece)
        return {"index": self._index, "text": text, "finish_reason": finish, "logprobs": scores}

    def _scores(self, piece: Piece) -> Json:
        """As OpenAI has it: beside the likeliest tokens the chosen one stands too, so there may be one more than was asked for."""
        names = [self._name(token) for token in piece.tokens]
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name) if not name.startswith("bytes:") else 1
        top = [
            {self._name(token): log_prob for token, log_prob in reversed((*ranked, chosen))}  # of tokens with one name, the likeliest
            for ranked, chosen in zip(piece.likeliest, zip(piece.tokens, piece.log_probs, strict=True), strict=bool(self._logprobs))
        ]
        return dict(zip(LOGPROBS, (names, list(piece.log_probs), offsets, top if self._logprobs else None), strict=True))

    def _name(self, token: int) -> str:
        """A token as text, a byte that is none by itself as OpenAI writes it."""
        if self._tokenizer.name == BYTES:
            return chr(token) if token < 128 else f"bytes:\\x{token:02x}"
        return self._tokenizer.decode([token])


async def run(config: ClientConfig, wish: GatewayConfig, runtime: Runtime) -> int:
    """The command: serve until told to stop.

    Raises: UsageError: the address cannot be listened on; and whatever finding the swarm raises.
    """
    logs.setup("warning")
    async with open_model(config, wish.model, runtime, wish.route, wish.drafter) as model:
        tokenizer = load_tokenizer(model.manifest.tokenizer, model.manifest.model.vocabulary, wish.tokenizer)
        async with listening(model, tokenizer, wish, runtime) as url:
            if wish.json:
                print(json.dumps({"url": url, "model": model.manifest.name}), flush=True)
            else:
                print(f"{model.manifest.name} is at {url} (OpenAI-compatible; any key will do)", file=sys.stderr, flush=True)
            if not _is_loopback(wish.host):
                print("this address is not loopback: everybody who reaches it can use it, there are no keys", file=sys.stderr)
            heap.settle()
            await runtime.stop.wait()
    return 0


@contextlib.asynccontextmanager
async def listening(model: Model, tokenizer: Tokenizer, wish: GatewayConfig, runtime: Runtime) -> AsyncIterator[str]:
    """The endpoint's URL, while it listens. Answers under way at the end are cut off after STOP_S. Raises: UsageError."""
    app = Gateway(model, tokenizer, wish, runtime).app()
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=STOP_S, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, wish.host, wish.port).start()
        except OSError as error:
            raise UsageError(f"--host {wish.host} --port {wish.port}: {error.strerror or error}") from error
        host, port = runner.addresses[0][:2]
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    finally:
        await asyncio.shield(runner.cleanup())


def _joined(parts: list[list[object] | None]) -> list[object] | None:
    return None if None in parts else [value for part in parts for value in part or ()]


async def _event(response: web.StreamResponse, data: Json) -> None:
    await response.write(b"data: " + json.dumps(data, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n")


def _refusal(refused: Refused) -> web.Response:
    headers = {"Retry-After": f"{refused.retry_after_s:g}"} if refused.retry_after_s else {}
    return web.json_response(refused.body(), status=refused.status, headers=headers)


def _usage(results: list[Generation]) -> Json:
    prompt, written = sum(result.prompt_tokens for result in results), sum(result.tokens for result in results)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
