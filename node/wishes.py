"""A completion request in OpenAI's form, checked: what of it we can do, what is refused by name, and the errors in that form.

Kept apart from gateway.py, which has the HTTP. A field that would silently have no effect is refused instead, since nobody would notice;
`user` and others that change nothing about the text are let through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from blocktrain.node.compute.generation import Request
from blocktrain.node.tokenizer import Tokenizer
from blocktrain.protocol.errors import BlocktrainError, NetworkFault, NoPeers, PeerFault, UsageError
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.sweep import SPECULATIVE, Sampling

MAX_CHOICES: Final = 8  # texts of one request: prompts x n
MAX_STOPS: Final = 4
MAX_LOGPROBS: Final = 5
DEFAULT_TOKENS: Final = 16  # as OpenAI's
IGNORED: Final = frozenset({"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"})
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {  # what these may say, since it is what we do anyway
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
}
OURS: Final = ("mode", "top_k", "draft", "window", "substeps", "allow_missing")  # beyond OpenAI's: give them as extra_body
THEIRS: Final = (
    "model", "prompt", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "logprobs", "echo", "stop", "seed",
)  # fmt: skip


class Refused(Exception):
    """An error as a client of the API sees it. `param`: the field at fault."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float = 0) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @classmethod
    def of(cls, error: BlocktrainError) -> Refused:
        """What went wrong below, as an HTTP error."""
        if isinstance(error, UsageError):
            return cls(400, str(error))
        if isinstance(error, NoPeers):
            return cls(503, str(error), code="no_peers", retry_after_s=5)
        if isinstance(error, NetworkFault | PeerFault):
            return cls(502, str(error), code="swarm_failed", retry_after_s=1)
        return cls(500, str(error))


@dataclass(frozen=True)
class Wish:
    """One checked request."""

    prompts: tuple[bytes, ...]
    requests: tuple[Request, ...]  # prompts x n, in the order of the answer's choices
    stream: bool
    usage_in_stream: bool
    logprobs: int | None  # how many of the likeliest are told beside each chosen token; None: no log-probabilities at all
    echo: bool


def read(body: object, manifest: Manifest, tokenizer: Tokenizer, most_tokens: int, seed: int) -> Wish:
    """`seed` is used where the request has none. Raises: Refused: naming the field."""
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    _check_fields(body)
    model = body.get("model")
    if not isinstance(model, str):
        raise Refused(400, f"you must give a model: {manifest.name}", param="model")
    if model != manifest.name and not (len(model) >= 6 and manifest.run.hex().startswith(model)):
        raise Refused(404, f"the model {model[:80]!r} does not exist; there is {manifest.name}", param="model", code="model_not_found")
    prompts = _prompts(body.get("prompt", ""), tokenizer, manifest.model.vocabulary)
    n = _whole(body, "n", 1, 1, MAX_CHOICES)
    if n * len(prompts) > MAX_CHOICES:
        raise Refused(400, f"{n * len(prompts)} texts are asked for; at most {MAX_CHOICES} at a time", param="n")
    logprobs = None if body.get("logprobs") is None else _whole(body, "logprobs", 0, 0, MAX_LOGPROBS)
    stream_options = body.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise Refused(400, "stream_options must be an object", param="stream_options")
    echo, stream = _flag(body, "echo"), _flag(body, "stream")
    if echo and logprobs is not None:
        raise Refused(400, "echo with logprobs is not supported: the prompt is not scored", param="echo")
    given = body.get("seed")
    first_seed = seed if given is None else _whole(body, "seed", 0, -(2**63), 2**63 - 1) % 2**63
    base = Request(
        prompt=(),
        tokens=_whole(body, "max_tokens", DEFAULT_TOKENS, 1, most_tokens),
        mode=_text(body, "mode", SPECULATIVE),
        draft=_whole(body, "draft", 8, 1, 256),
        window=_whole(body, "window", 64, 1, 64),
        substeps=_whole(body, "substeps", 1, 1, 16),
        stop=_stops(body.get("stop")),
        alternatives=logprobs or 0,
        allow_missing=_flag(body, "allow_missing"),
    )
    requests = []
    for tokens, _ in prompts:
        for index in range(n):
            sampling = Sampling(
                _number(body, "temperature", 1.0, 0.0, 100.0),
                _whole(body, "top_k", 0, 0, 1_000_000),
                _number(body, "top_p", 1.0, 0.0, 1.0) or 1e-9,  # 0 means: only the likeliest
                (first_seed + index) % 2**63,
            )
            requests.append(_checked(base, tokens, sampling, manifest))
    return Wish(
        tuple(text for _, text in prompts for _ in range(n)),
        tuple(requests),
        stream,
        bool(stream_options.get("include_usage")),
        logprobs,
        echo,
    )


def _checked(base: Request, tokens: tuple[int, ...], sampling: Sampling, manifest: Manifest) -> Request:
    request = replace(base, prompt=tokens, sampling=sampling)
    try:
        request.check(manifest)
    except UsageError as error:
        raise Refused(400, str(error)) from error
    return request


def _check_fields(body: Mapping[str, Any]) -> None:
    for name, allowed in NEUTRAL.items():
        if name in body and body[name] not in allowed:
            raise Refused(400, f"{name} is not supported", param=name, code="unsupported_parameter")
    unknown = sorted(set(body) - set(THEIRS) - set(OURS) - set(NEUTRAL) - IGNORED)
    if unknown:
        raise Refused(400, f"unknown parameter {str(unknown[0])[:80]!r}", param=str(unknown[0])[:80], code="unknown_parameter")


def _prompts(given: object, tokenizer: Tokenizer, vocabulary: int) -> list[tuple[tuple[int, ...], bytes]]:
    """Tokens and bytes of each prompt: a text, tokens, or a list of either."""
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    out = []
    for one in given if several and isinstance(given, list) else [given]:
        if isinstance(one, str):
            data = one.encode("utf-8", "surrogatepass")
            out.append((tuple(data) if tokenizer.name == "bytes" else tuple(tokenizer.encode(one)), data))
        elif isinstance(one, list) and all(type(token) is int and 0 <= token < vocabulary for token in one):
            data = bytes(one) if tokenizer.name == "bytes" else tokenizer.decode(one).encode("utf-8", "replace")
            out.append((tuple(one), data))
        else:
            raise Refused(400, f"a prompt is a text or a list of tokens below {vocabulary}", param="prompt")
    return out


def _stops(given: object) -> tuple[bytes, ...]:
    words = [given] if isinstance(given, str) else (given or [])
    if not isinstance(words, list) or len(words) > MAX_STOPS or not all(isinstance(word, str) and word for word in words):
        raise Refused(400, f"stop is a text or up to {MAX_STOPS} of them, none empty", param="stop")
    return tuple(word.encode("utf-8", "surrogatepass") for word in words)


def _whole(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise Refused(400, f"{name} must be a whole number from {low} to {high}", param=name)
    return value


def _number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise Refused(400, f"{name} must be a number from {low:g} to {high:g}", param=name)
    return float(value)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refused(400, f"{name} must be true or false", param=name)
    return bool(value)


def _text(body: Mapping[str, Any], name: str, default: str) -> str:
    value = body.get(name, default)
    if not isinstance(value, str):
        raise Refused(400, f"{name} must be a text", param=name)
    return value
