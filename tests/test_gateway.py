"""The gateway with the real `openai` package and with plain HTTP: answers, streams, limits, errors, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from random import Random

import aiohttp
import numpy as np
import openai
import pytest

from blocktrain.node import gateway
from blocktrain.node.client import Decode
from blocktrain.node.compute.evaluation import ChainLoss
from blocktrain.node.compute.generation import Request, TextSweep
from blocktrain.node.compute.model import Block
from blocktrain.node.compute.offline import OfflineChain
from blocktrain.node.compute.takehome import OfflineModel
from blocktrain.node.compute.worker import load_block
from blocktrain.node.config import GatewayConfig
from blocktrain.node.ports import Published
from blocktrain.node.runtime import Runtime
from blocktrain.node.tokenizer import Bytes
from blocktrain.node.traversal import Report
from blocktrain.protocol.errors import NetworkFault, NoPeers
from blocktrain.protocol.ids import Digest
from blocktrain.protocol.messages import Step
from blocktrain.protocol.sweep import window_start
from tests.sweeping import MANIFEST, PROMPT, state_of

WISH = {"model": "tiny", "prompt": "The river", "max_tokens": 30, "temperature": 0.9, "seed": 7}


class Faulty:
    """A model whose next answers fail, or wait at the gate; it counts who is inside."""

    def __init__(self, inner: OfflineModel) -> None:
        self.manifest = inner.manifest
        self.inside = 0
        self.entered = asyncio.Event()
        self.gate: asyncio.Event | None = None
        self.fault: Exception | None = None
        self.fault_after_pieces = 0
        self._inner = inner

    @contextlib.asynccontextmanager
    async def generate(self, request: Request, decode: Decode | None = None) -> AsyncIterator[tuple[TextSweep, Report]]:
        if self.fault is not None and not self.fault_after_pieces:
            raise self.fault
        self.inside += 1
        self.entered.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
            async with self._inner.generate(request, decode) as (sweep, report):
                if self.fault is not None:
                    whole = sweep.pieces()

                    async def some():  # type: ignore[no-untyped-def]
                        for _ in range(self.fault_after_pieces):
                            yield await anext(whole)
                        raise self.fault

                    sweep.pieces = some  # type: ignore[method-assign]
                yield sweep, report
        finally:
            self.inside -= 1

    async def loss(self, windows: Sequence[Sequence[int]]) -> tuple[ChainLoss, Report]:
        return await self._inner.loss(windows)


@pytest.fixture(scope="module")
def home() -> OfflineModel:
    blocks = tuple(load_block(Block(MANIFEST, number).requires_grad_(False), state_of(number)) for number in range(3))
    return OfflineModel(MANIFEST, tuple(Published(1, Digest(bytes(32))) for _ in blocks), blocks)


@pytest.fixture
async def model(home: OfflineModel) -> Faulty:
    return Faulty(home)


@pytest.fixture
async def url(model: Faulty) -> AsyncIterator[str]:
    config = GatewayConfig(port=0, per_client=2, at_once=3, max_tokens=200)
    async with gateway.listening(model, Bytes(), config, Runtime(rng=Random(1))) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def at_home(home: OfflineModel, **more: object) -> bytes:
    """The same text without HTTP."""
    from blocktrain.protocol.sweep import Sampling

    request = Request(PROMPT, 30, sampling=Sampling(0.9, seed=7))
    async with home.generate(replace(request, **more)) as (sweep, _):  # type: ignore[arg-type]
        return b"".join([piece.data async for piece in sweep.pieces()])


async def test_the_openai_client_gets_a_text_whole_and_streamed(client: openai.AsyncOpenAI, home: OfflineModel) -> None:
    expected = (await at_home(home)).decode("utf-8", "replace")
    whole = await client.completions.create(**WISH)  # type: ignore[arg-type]
    assert whole.choices[0].text == expected
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (9, 30, 39)
    origin = whole.model_extra["blocktrain"]  # type: ignore[index]
    assert origin["mode"] == "speculative"
    assert origin["blocks"] == [0, 1, 2]
    assert origin["traversals"] >= 1

    text, usage, finish = "", None, None
    async for event in await client.completions.create(**WISH, stream=True, stream_options={"include_usage": True}):  # type: ignore[call-overload]
        for choice in event.choices:
            text += choice.text
            finish = choice.finish_reason or finish
        usage = event.usage or usage
    assert text == expected
    assert finish == "length"
    assert usage is not None
    assert usage.completion_tokens == 30


async def test_the_models_are_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "blocktrain"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.models.retrieve("other")


async def test_stop_seed_echo_and_choices(client: openai.AsyncOpenAI, home: OfflineModel) -> None:
    text = await at_home(home)
    stop = text[10:12].decode("latin-1") if text[10:12].isascii() else None
    if stop:
        cut = await client.completions.create(**WISH, stop=stop)  # type: ignore[arg-type]
        assert cut.choices[0].finish_reason == "stop"
        assert cut.choices[0].text == text[: text.index(stop.encode())].decode("utf-8", "replace")
    echoed = await client.completions.create(**WISH, echo=True, n=2)  # type: ignore[arg-type]
    assert [choice.index for choice in echoed.choices] == [0, 1]
    assert echoed.choices[0].text == "The river" + text.decode("utf-8", "replace")
    assert echoed.choices[1].text != echoed.choices[0].text, "the second one has a seed of its own"
    several = await client.completions.create(**{**WISH, "prompt": ["The river", [84, 104, 101]]})  # type: ignore[arg-type]
    assert len(several.choices) == 2
    empty = await client.completions.create(**{**WISH, "prompt": ""})  # type: ignore[arg-type]
    assert empty.usage is not None
    assert empty.usage.prompt_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_come_with_the_likeliest_tokens(client: openai.AsyncOpenAI, home: OfflineModel, stream: bool) -> None:
    """Against the definition: each text so far is scored by itself, and its tokens are sorted."""
    text = await at_home(home)
    if stream:
        events = [event async for event in await client.completions.create(**WISH, logprobs=3, stream=True)]  # type: ignore[call-overload]
        parts = [event.choices[0].logprobs for event in events]
    else:
        parts = [(await client.completions.create(**WISH, logprobs=3)).choices[0].logprobs]  # type: ignore[arg-type]
    tokens = [token for part in parts for token in part.tokens]
    chosen = [value for part in parts for value in part.token_logprobs]
    tops = [top for part in parts for top in part.top_logprobs]
    assert len(tokens) == len(chosen) == len(tops) == len(text) == 30
    assert tokens == [name_of(byte) for byte in text]
    for place, (token, log_prob, top) in enumerate(zip(tokens, chosen, tops, strict=True)):
        row = await row_after(home, [*PROMPT, *text[:place]])
        scores = {name_of(byte): row[byte] for byte in range(256)}
        assert top == pytest.approx({name: scores[name] for name in top}, abs=0.02), f"token {place}"
        ranked = sorted(top.values())[-3:]
        assert sorted(scores.values())[-3:] == pytest.approx(ranked, abs=0.02)
        assert top[token] == log_prob
        assert len(top) == (3 if log_prob >= ranked[0] else 4)


async def test_without_a_number_only_the_chosen_tokens_are_scored(client: openai.AsyncOpenAI) -> None:
    scores = (await client.completions.create(**WISH, logprobs=0)).choices[0].logprobs  # type: ignore[arg-type]
    assert scores is not None
    assert scores.top_logprobs is None
    assert len(scores.token_logprobs or ()) == 30
    assert (await client.completions.create(**WISH)).choices[0].logprobs is None  # type: ignore[arg-type]


def name_of(byte: int) -> str:
    return chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}"


async def row_after(home: OfflineModel, text: list[int]) -> list[float]:
    """The chain's log-probabilities of the next byte, from a traversal of its own."""
    async with OfflineChain(home.manifest, home.blocks) as chain:
        _, body = await chain.traverse(Step(0, 0, 1, 1, bytes(text[window_start(len(text), home.manifest.model.context) :])))
    mean = np.frombuffer(body, dtype="<f2").astype(np.float64) / home.manifest.blocks
    return list(mean - np.log(np.exp(mean).sum()))


async def test_our_own_settings_go_in_extra_body(client: openai.AsyncOpenAI, home: OfflineModel) -> None:
    got = await client.completions.create(**WISH, extra_body={"mode": "one-sweep", "window": 16})  # type: ignore[arg-type]
    assert got.choices[0].text == (await at_home(home, mode="one-sweep", window=16)).decode("utf-8", "replace")
    assert got.model_extra["blocktrain"]["mode"] == "one-sweep"  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "status", "param", "why"),
    [
        ({"model": "gpt"}, 404, "model", "does not exist"),
        ({"model": None}, 400, "model", "must give a model"),
        ({"max_tokens": 0}, 400, "max_tokens", "from 1 to 200"),
        ({"max_tokens": 10**9}, 400, "max_tokens", "from 1 to 200"),
        ({"max_tokens": "many"}, 400, "max_tokens", "whole number"),
        ({"temperature": -1}, 400, "temperature", "from 0 to 100"),
        ({"temperature": True}, 400, "temperature", "a number"),
        ({"top_p": 2}, 400, "top_p", "from 0 to 1"),
        ({"n": 9}, 400, "n", "from 1 to 8"),
        ({"n": 5, "prompt": ["a", "b"]}, 400, "n", "at most 8"),
        ({"prompt": [256]}, 400, "prompt", "tokens below 256"),
        ({"prompt": [-1]}, 400, "prompt", "tokens below 256"),
        ({"prompt": {"a": 1}}, 400, "prompt", "a text or a list"),
        ({"stop": ["a"] * 5}, 400, "stop", "up to 4"),
        ({"stop": [""]}, 400, "stop", "none empty"),
        ({"seed": "x"}, 400, "seed", "whole number"),
        ({"mode": "fast"}, 400, None, "unknown mode 'fast'"),
        ({"presence_penalty": 1.5}, 400, "presence_penalty", "not supported"),
        ({"logit_bias": {"1": 5}}, 400, "logit_bias", "not supported"),
        ({"tempature": 1}, 400, "tempature", "unknown parameter"),
        ({"stream": "yes"}, 400, "stream", "true or false"),
        ({"echo": True, "logprobs": 1}, 400, "echo", "not scored"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(
    url: str, http: aiohttp.ClientSession, change: dict[str, object], status: int, param: str | None, why: str
) -> None:
    async with http.post(f"{url}/completions", json={**WISH, **change}) as response:
        assert response.status == status
        error = (await response.json())["error"]
    assert why in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


async def test_other_bodies_and_paths_are_refused_too(url: str, http: aiohttp.ClientSession) -> None:
    for data, kind, status in ((b"{", "application/json", 400), (b"[]", "application/json", 400), (b"{}", "text/plain", 415)):
        async with http.post(f"{url}/completions", data=data, headers={"Content-Type": kind}) as response:
            assert response.status == status
            assert "error" in await response.json()
    async with http.post(f"{url}/completions", data=b" " * 5_000_000, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 413
    async with http.post(f"{url}/chat/completions", json={}) as response:
        assert response.status == 404
        assert "/v1/completions" in (await response.json())["error"]["message"]
    async with http.get(f"{url}/completions") as response:
        assert response.status == 405
    async with http.get(f"{url}/models", headers={"Host": "evil.example"}) as response:
        assert response.status == 403, "a page from elsewhere, whose name was made to lead here"


async def test_one_client_cannot_take_all_places(model: Faulty, url: str, http: aiohttp.ClientSession) -> None:
    model.gate = asyncio.Event()

    async def ask(key: str) -> int:
        async with http.post(f"{url}/completions", json=WISH, headers={"Authorization": key}) as response:
            if response.status == 429:
                assert float(response.headers["Retry-After"]) > 0
                assert (await response.json())["error"]["type"] == "rate_limit_error"
            return response.status

    greedy = [asyncio.create_task(ask("greedy")) for _ in range(2)]
    async with asyncio.timeout(10):
        while model.inside < 2:  # noqa: ASYNC110 (what changes is behind HTTP)
            await asyncio.sleep(0.01)
    assert await ask("greedy") == 429
    modest = asyncio.create_task(ask("modest"))
    async with asyncio.timeout(10):
        while model.inside < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await ask("third") == 429, "all places are taken"
    model.gate.set()
    assert await asyncio.gather(*greedy, modest) == [200, 200, 200]
    assert await ask("third") == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_sessions(model: Faulty, url: str, stream: bool) -> None:
    model.gate = asyncio.Event()
    async with aiohttp.ClientSession() as leaving:
        asking = asyncio.create_task(leaving.post(f"{url}/completions", json={**WISH, "stream": stream}))
        await model.entered.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    async with asyncio.timeout(10):
        while model.inside:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_fails_in_the_swarm_is_an_error_in_their_form(model: Faulty, client: openai.AsyncOpenAI) -> None:
    model.fault = NoPeers("block 2 has no holder; the last one seen was abc, 3 s ago")
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="block 2 has no holder") as failed:
            await client.completions.create(**WISH, stream=stream)  # type: ignore[call-overload]
        assert failed.value.status_code == 503
    model.fault, model.fault_after_pieces = NetworkFault("the chain broke"), 1
    with pytest.raises(openai.InternalServerError):
        await client.completions.create(**WISH)  # type: ignore[arg-type]
    with pytest.raises(openai.APIError, match="the chain broke"):
        async for _ in await client.completions.create(**WISH, stream=True):  # type: ignore[call-overload]
            pass


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_gets_a_text_and_a_stream(url: str, home: OfflineModel) -> None:
    async def curl(*more: str) -> bytes:
        process = await asyncio.create_subprocess_exec(
            "curl", "-sS", "-N", f"{url}/completions", "-H", "Content-Type: application/json", *more, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 0
        return out

    expected = (await at_home(home)).decode("utf-8", "replace")
    assert json.loads(await curl("-d", json.dumps(WISH)))["choices"][0]["text"] == expected
    lines = (await curl("-d", json.dumps({**WISH, "stream": True}))).decode().split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == expected
