"""Text out of a chain: the client's engine for all three ways, over the swarm and offline alike (design §6).

The engine asks a small port for traversals and decides every token itself, from log-probabilities and its own random numbers. So the
same seed gives the same text from the same states, whichever route, draft width or failover lies between; and a holder that drafts badly
changes the speed, not the text. It needs numpy, not torch.
"""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from blocktrain.node.compute.rows import unpack
from blocktrain.node.compute.sampling import Half, Row, chain_row, couple, distribution, draw, likeliest
from blocktrain.protocol import sweep
from blocktrain.protocol.errors import NoPeers, PeerFault, UsageError
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import Scored, Step
from blocktrain.protocol.sweep import ACCEPT, AUTOREGRESSIVE, DRAW, MODES, ONE_SWEEP, RESIDUAL, SPECULATIVE, TOKEN, Sampling, Shape

MAX_SUBSTEPS: Final = 16  # as the field's rule in messages.Step
MAX_ALTERNATIVES: Final = 20  # told for each token; more is a distribution, and nobody reads it

Ranked = tuple[tuple[int, float], ...]  # tokens with their log-probabilities, the likeliest first


class Traversals(Protocol):
    """A chain with one open session. Failover happens below this line: an answer may come from other holders than the last."""

    async def traverse(self, step: Step, body: bytes = b"") -> tuple[Scored, memoryview]:
        """Send one step through the chain and wait for the answer.

        Raises: NetworkFault, NoPeers: the chain is broken and could not be mended in time. PeerFault: an answer out of bounds.
        """
        ...


@dataclass(frozen=True)
class Request:
    """What text is wanted. `check` it against the run before use."""

    prompt: tuple[int, ...]  # tokens; may be empty
    tokens: int  # how many to generate
    mode: str = SPECULATIVE
    sampling: Sampling = Sampling()
    draft: int = 8  # speculative: tokens drafted at a time, at the beginning where it adapts
    adapt: bool = True  # let the draft's width follow acceptance and network
    window: int = sweep.MAX_WINDOW  # one-sweep: tokens of one traversal
    substeps: int = 1  # one-sweep: steps of z inside each block
    stop: tuple[bytes, ...] = ()  # the text ends before the first of these
    alternatives: int = 0  # how many of the likeliest tokens are told for each position
    allow_missing: bool = False  # go on where a block did not take part

    def check(self, manifest: Manifest) -> None:
        """Raises: UsageError: the field and what is allowed."""
        choice = self.sampling
        rules = (
            (self.mode in MODES, f"unknown mode {self.mode[:40]!r}; known are {', '.join(MODES)}"),
            (self.tokens >= 1, f"{self.tokens} tokens are asked for; at least 1 is needed"),
            (1 <= self.draft <= sweep.MAX_DRAFT, f"draft is {self.draft}; it must be 1 … {sweep.MAX_DRAFT}"),
            (1 <= self.window <= sweep.MAX_WINDOW, f"window is {self.window}; it must be 1 … {sweep.MAX_WINDOW}"),
            (1 <= self.substeps <= MAX_SUBSTEPS, f"substeps is {self.substeps}; it must be 1 … {MAX_SUBSTEPS}"),
            (
                math.isfinite(choice.temperature) and 0 <= choice.temperature <= 100,
                f"temperature is {choice.temperature}; it must be 0 … 100",
            ),
            (0 <= choice.top_k <= 1_000_000, f"top_k is {choice.top_k}; it must be 0 (all) … 1000000"),
            (0 < choice.top_p <= 1, f"top_p is {choice.top_p}; it must be above 0, at most 1"),
            (0 <= choice.seed < 2**63, f"seed is {choice.seed}; it must be 0 … 2^63 - 1"),
            (all(self.stop), "a stop string is empty"),
            (
                0 <= self.alternatives <= MAX_ALTERNATIVES,
                f"alternatives is {self.alternatives}; it must be 0 … {MAX_ALTERNATIVES}",
            ),
            (
                all(0 <= token < manifest.model.vocabulary for token in self.prompt),
                f"the prompt holds a token outside the vocabulary of {manifest.model.vocabulary}",
            ),
            (
                self.mode != ONE_SWEEP or manifest.objective != "autoregressive",
                "one-sweep needs a run that is trained on noise; this one's objective is 'autoregressive'",
            ),
            (
                self.substeps == 1 or manifest.objective not in sweep.SEQUENTIAL,
                f"substeps is {self.substeps}; blocks of {manifest.objective!r} take one step each, as they hand z on",
            ),
        )
        for fine, what in rules:
            if not fine:
                raise UsageError(what)


@dataclass(frozen=True)
class Piece:
    """What one traversal brought."""

    data: bytes  # to be shown now; the tokens' bytes may follow later where a stop string or a character is half seen
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]  # the chain's, of each token, at temperature 1
    likeliest: tuple[Ranked, ...] = ()  # for each token the `alternatives` that were likeliest there, whether chosen or not


@dataclass(frozen=True)
class Generation:
    """What was done, honestly. Who served it and with which states, the network's client adds."""

    mode: str
    sampling: Sampling
    data: bytes  # all the text that was shown
    tokens: int  # generated, those of a stop string included
    prompt_tokens: int
    prompt_unseen: int  # tokens at the prompt's beginning that no block saw, since the context was full
    traversals: int
    blocks: tuple[int, ...]  # that took part in every traversal
    missing: tuple[int, ...]  # that were absent from at least one
    drafted: int
    kept: int  # drafted tokens that stayed
    finish: str  # "length", "stop", or "unfinished" until the end
    seconds: float
    first_token_s: float | None
    compute_s: float  # the holders' part, added up

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", errors="replace")

    @property
    def tokens_per_traversal(self) -> float:
        return self.tokens / self.traversals if self.traversals else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class TextSweep:
    """One request at work: iterate over `pieces()` once, then (or meanwhile) ask for `result()`.

    Args:
        decode: turns the tokens of each piece, and whether it is the last one, into bytes, in order; by default a token is a byte.
            `TokenText` is for other tokenizers.
        clock: monotonic, in seconds.
        chance: the random number of (seed, position, purpose), the drafter's and ours.
    Raises: UsageError: a request that the run cannot answer.
    """

    def __init__(
        self,
        traversals: Traversals,
        manifest: Manifest,
        request: Request,
        *,
        decode: Callable[[Sequence[int], bool], bytes] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        chance: Callable[[int, int, int], float] = sweep.uniform,
    ) -> None:
        request.check(manifest)
        self._traversals, self._request, self._clock, self._chance = traversals, request, clock, chance
        self._decode = decode or (lambda tokens, last: bytes(tokens))
        self._shape = Shape.of(manifest)
        self._book = sweep.Continuation(self._shape, request.prompt)
        self._pace = sweep.Pace()
        self._stop = _Stop(request.stop)
        self._began = clock()
        self._data = bytearray()
        self._seen_by_all = set(range(manifest.blocks))
        self._result = Generation(
            request.mode, request.sampling, b"", 0, self._book.shown, self._book.start, 0, tuple(range(manifest.blocks)), (),
            0, 0, "unfinished", 0.0, None, 0.0,
        )  # fmt: skip

    def result(self) -> Generation:
        return replace(self._result, data=bytes(self._data))

    async def pieces(self) -> AsyncIterator[Piece]:
        """The text as it comes, at least one token a piece.

        Raises: NetworkFault, PeerFault: from the chain. NoPeers: a block did not take part, and the request does not allow that.
        """
        left = self._request.tokens
        while left and not self._stop.found:
            step = self._book.plan(self._request.mode, self._width(left), self._request.sampling, substeps=self._request.substeps)
            began = self._clock()
            scored, body = await self._traversals.traverse(step)
            if not step.want:
                self._book.settle(step, (), 0)
                self._count(scored, 0, 0)
                continue
            totals, drafts = read_answer(step, scored, body, self._shape)
            self._note_blocks(scored.blocks)
            tokens, rows = self._tokens(scored, totals, drafts)
            tokens, rows = tokens[:left], rows[:left]
            # Of the drafts, the last token is the first that was not drafted so (or comes after them all): it is in no cache.
            kept = len(tokens) - 1 if scored.drafted else 0
            self._book.settle(step, tokens, kept)
            self._pace = self._pace.after(step, kept, blocks=len(scored.blocks), seconds=self._clock() - began, compute_s=scored.compute_s)
            left -= len(tokens)
            data = self._stop.feed(self._decode(tokens, not left), last=not left)
            self._data += data
            self._count(scored, len(tokens), kept)
            if self._stop.found or not left:
                self._result = replace(self._result, finish="stop" if self._stop.found else "length")
            log_probs = tuple(float(row[token]) for row, token in zip(rows, tokens, strict=True))
            most = self._request.alternatives
            yield Piece(data, tuple(tokens), log_probs, tuple(likeliest(row, most) for row in rows) if most else ())

    def _width(self, left: int) -> int:
        """How many tokens beyond the first one the next traversal should bring."""
        if self._request.mode == AUTOREGRESSIVE:
            return 0
        if self._request.mode == ONE_SWEEP:
            return min(self._request.window, left) - 1
        width = self._pace.width(self._shape.blocks, self._request.draft) if self._request.adapt else self._request.draft
        return min(width, max(1, left - 1))

    def _tokens(self, scored: Scored, totals: Half, drafts: Half) -> tuple[list[int], list[Row]]:
        """Decide the tokens of one answer; with each, the chain's log-probabilities there."""
        sampling, book = self._request.sampling, self._book
        seed, first = sweep.seed_at(sampling.seed, book.start), len(book.tokens) - book.start
        drafted = sweep.unpack_tokens(scored.tokens, self._shape)
        tokens: list[int] = []
        rows: list[Row] = []
        for index in range(len(totals)):
            row = chain_row(totals[index], self._shape.terms(len(scored.blocks)))
            p = distribution(row, sampling)
            place = first + index
            if scored.drafted and place < self._shape.context:  # at the context's end no step can draft: the token is drawn the other way
                draws = (self._chance(seed, place, DRAW), self._chance(seed, place, ACCEPT), self._chance(seed, place, RESIDUAL))
                token = couple(p, distribution(drafts[index], sampling), draws)
            else:
                token = draw(p, self._chance(seed, place, TOKEN))
            tokens.append(token)
            rows.append(row)
            if index < len(drafted) and token != drafted[index]:
                break  # the rows after this one speak about another text
        return tokens, rows

    def _note_blocks(self, blocks: tuple[int, ...]) -> None:
        self._seen_by_all &= set(blocks)
        missing = tuple(block for block in range(self._shape.blocks) if block not in self._seen_by_all)
        if missing and not self._request.allow_missing:
            names = ", ".join(map(str, missing))
            raise NoPeers(f"no answer from block {names}: its share of the text is missing, and the request does not allow that")
        self._result = replace(self._result, blocks=tuple(sorted(self._seen_by_all)), missing=missing)

    def _count(self, scored: Scored, tokens: int, kept: int) -> None:
        now, done = self._clock() - self._began, self._result
        self._result = replace(
            done,
            tokens=done.tokens + tokens,
            traversals=done.traversals + 1,
            drafted=done.drafted + scored.drafted,
            kept=done.kept + kept,
            seconds=now,
            first_token_s=now if done.first_token_s is None and tokens else done.first_token_s,
            compute_s=done.compute_s + scored.compute_s,
        )


def read_answer(step: Step, scored: Scored, body: memoryview, shape: Shape) -> tuple[Half, Half]:
    """The sums of log-probabilities [rows x want, V] and the drafter's rows [drafted + 1 or 0, V] of an answer to `step`.

    Raises: PeerFault: it does not answer the step, has another size, or does not hold log-probabilities.
    """
    if (scored.sequence, scored.want, scored.drafted) != (step.sequence, step.want, step.draft):
        raise PeerFault("an answer to another step")
    if not scored.blocks or len(set(scored.blocks)) < len(scored.blocks) or max(scored.blocks) >= shape.blocks:
        raise PeerFault(f"an answer from blocks {scored.blocks[:8]} of {shape.blocks}")
    if len(sweep.unpack_tokens(scored.tokens, shape)) != scored.drafted:
        raise PeerFault(f"{len(scored.tokens)} bytes of drafted tokens where there are {scored.drafted}")
    rows, draft_rows = step.rows * step.want, sweep.rows_of_draft(scored.drafted)
    due = (rows + draft_rows) * shape.row_bytes + sweep.rows_of_z(step, shape, scored.drafted) * shape.z_bytes
    more = len(body) - due
    if more and not (shape.sequential and more > 0 and more % shape.z_bytes == 0):  # z of tokens that were sent again, after a loss
        raise PeerFault(f"an answer of {len(body)} bytes where {due} are due")
    values = unpack(body[: (rows + draft_rows) * shape.row_bytes], shape)
    if values.size and not (values.max() <= 0 and np.isfinite(values.min())):  # NaN fails both
        raise PeerFault("an answer that does not hold log-probabilities")
    return values[:rows], values[rows:]


# ---- bytes and text -------------------------------------------------------------------------------------------------------------


class Utf8:
    """Bytes as text for showing, piece by piece: a character that is half there waits, one that is broken becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes, *, last: bool = False) -> str:
        return self._decoder.decode(data, last)


class TokenText:
    """Tokens of a tokenizer as UTF-8 bytes, piece by piece; pass the instance as `decode`.

    A token's text can depend on the one before it, and a character can be spread over several. So a few tokens back are decoded
    again each time, and what is new is passed on once it ends in a whole character.
    """

    _WAIT = 8  # tokens after which a character that is still broken is shown as such

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        """`before`: the prompt's tokens, since the first token's text may depend on the last of them."""
        self._text_of = decode
        self._shown = list(before[-self._WAIT :])  # the last tokens that were passed on
        self._waiting: list[int] = []

    def __call__(self, tokens: Sequence[int], last: bool) -> bytes:
        self._waiting += tokens
        before = self._text_of(self._shown)
        text = self._text_of(self._shown + self._waiting)[len(before) :]
        if text.endswith("\ufffd") and len(self._waiting) < self._WAIT and not last:
            return b""
        self._shown, self._waiting = (self._shown + self._waiting)[-self._WAIT :], []
        return text.encode("utf-8")


class _Stop:
    """Cuts a text before the first stop string, and holds back what may be the beginning of one."""

    def __init__(self, words: Sequence[bytes]) -> None:
        self._words = tuple(words)
        self._held = b""
        self.found = False

    def feed(self, data: bytes, *, last: bool) -> bytes:
        held = self._held + data
        places = [place for place in (held.find(word) for word in self._words) if place >= 0]
        if places:
            self.found, self._held = True, b""
            return held[: min(places)]
        keep = 0 if last else max((_overlap(held, word) for word in self._words), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(data: bytes, word: bytes) -> int:
    """The length of the longest end of `data` that begins `word`."""
    return next((size for size in range(min(len(data), len(word) - 1), 0, -1) if data.endswith(word[:size])), 0)
