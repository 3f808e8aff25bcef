"""Sweeps: how a text grows over a chain of holders, as decisions about positions, widths and sizes.

Everything here is a rule that both sides, or two holders of one block, must agree on, so that the same seed gives the same text from
the same states whoever serves it: which part of a long text is the context, which random number decides which position, what a step
may ask of a holder, and what the client has to send again after a holder was lost. Tensors are node/compute's business.

A text is a row of tokens s[0], s[1], …; the block's output at position p speaks about s[p+1]. An empty prompt begins with one token
that is not shown (`start_token`). With `cached` tokens in the holders' caches and n tokens known, a step sends s[cached … n-1] at
`position` = cached and wants the last position scored: the distribution of s[n]. With w drafted tokens behind them it wants w + 1.

Positions in a step count from the window's start (`window_start`), where the holders' rotary positions are 0 too.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from blocktrain.protocol import limits
from blocktrain.protocol.errors import Malformed
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import Scored, Step

SPECULATIVE: Final = "speculative"
ONE_SWEEP: Final = "one-sweep"
AUTOREGRESSIVE: Final = "autoregressive"
MODES: Final = (SPECULATIVE, ONE_SWEEP, AUTOREGRESSIVE)

NEWLINE: Final = 10  # what an empty prompt starts from: the end of a line that is not shown
MAX_DRAFT: Final = 256  # as the field's rule in messages.Step
MAX_WINDOW: Final = 64  # positions of a one-sweep window, the known one before it included: no longer ones are trained
MAX_STEP_POSITIONS: Final = 16384  # rows x positions of one step, so that none holds a holder's thread for long
SEQUENTIAL: Final = ("diffusionblocks",)  # objectives whose blocks hand z on; the others' blocks add up what they say
HALF_BYTES: Final = 2  # log-probabilities and z travel as fp16
WHOLE_VOCABULARY: Final = 4096  # up to so many tokens a row of log-probabilities travels whole: 8 KiB
KEPT_TOKENS: Final = 512  # of larger ones, the likeliest, and one value for all others (docs/recipe.md has the error)

# What a random number decides. One number a purpose and position, so that no decision shares its chance with another.
DRAW: Final = 0  # the drafter's token
ACCEPT: Final = 1  # whether it stays
RESIDUAL: Final = 2  # what replaces it
TOKEN: Final = 3  # a token drawn from the chain's distribution directly


@dataclass(frozen=True)
class Shape:
    """What sizes depend on. Build it with `Shape.of`."""

    vocabulary: int
    context: int  # T
    width: int  # d, for z
    blocks: int  # B
    sequential: bool = False  # every position carries z from block to block, and the last block is read
    kept: int = 0  # tokens that a row names as it travels (node/compute/rows.py); 0: all, in order

    @classmethod
    def of(cls, manifest: Manifest) -> Shape:
        model = manifest.model
        return cls(
            model.vocabulary, model.context, model.width, manifest.blocks, manifest.objective in SEQUENTIAL, kept_of(model.vocabulary)
        )

    @property
    def token_bytes(self) -> int:
        return 1 if self.vocabulary <= 256 else 4

    @property
    def row_bytes(self) -> int:
        """One position's log-probabilities on the wire."""
        return self.kept * (self.place_bytes + HALF_BYTES) + HALF_BYTES if self.kept else self.vocabulary * HALF_BYTES

    @property
    def place_bytes(self) -> int:
        """A token's number in a row that names its tokens."""
        return 2 if self.vocabulary <= 65536 else 4

    @property
    def start_token(self) -> int:
        """What stands before a text with an empty prompt: a newline where tokens are bytes, the same number elsewhere."""
        return min(NEWLINE, self.vocabulary - 1)

    @property
    def step_tokens(self) -> int:
        """How many tokens one step can carry; where each has a z, half of a frame is for those."""
        most = limits.MAX_TOKEN_BYTES // self.token_bytes
        return min(most, limits.MAX_BODY_BYTES // (2 * self.z_bytes)) if self.sequential else most

    @property
    def z_bytes(self) -> int:
        """One position's z on the wire."""
        return self.width * HALF_BYTES

    @property
    def score_bytes(self) -> int:
        """Of one frame, for log-probabilities. Rows that name their tokens are no more than whole ones could be: they are read as such."""
        most = limits.MAX_BODY_BYTES // 2 if self.sequential else limits.MAX_BODY_BYTES
        return most // (self.vocabulary * HALF_BYTES) * self.row_bytes if self.kept else most

    def terms(self, blocks: int) -> int:
        """How many blocks' log-probabilities an answer of so many blocks holds in each row."""
        return 1 if self.sequential else blocks


def kept_of(vocabulary: int) -> int:
    """How many tokens a row of log-probabilities names as it travels; 0: it travels whole."""
    return 0 if vocabulary <= WHOLE_VOCABULARY else KEPT_TOKENS


# ---- positions and chance -------------------------------------------------------------------------------------------------------


def window_start(known: int, context: int) -> int:
    """Where the context begins when `known` tokens are there and the next one is asked for.

    Up to T tokens everything is seen. When the context is full the last T/2 stay (rounded down) and are computed anew as the
    beginning of a text; so it goes on, every T - T/2 tokens. A function of the position alone: the same in every mode and route.
    """
    if known <= context:
        return 0
    jump = context - context // 2
    return jump * -(-(known - context) // jump)


def room(known: int, context: int) -> int:
    """How many tokens beyond the `known` ones fit before the window moves: the most that one step may draft."""
    return window_start(known, context) + context - known


def seed_at(seed: int, start: int) -> int:
    """The seed for the window that begins at `start`: what `Step.seed` holds, so that (seed, position in the window) never repeats."""
    return int.from_bytes(hashlib.blake2b(struct.pack("<QQ", seed, start), digest_size=8, person=b"bt-window").digest(), "little") >> 1


def uniform(seed: int, position: int, purpose: int) -> float:
    """The random number in [0, 1) that decides `purpose` for the token at `position`: the same on every machine, in any order."""
    digest = hashlib.blake2b(struct.pack("<QQB", seed, position, purpose), digest_size=8, person=b"bt-uniform").digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


# ---- tokens on the wire ---------------------------------------------------------------------------------------------------------


def pack_tokens(tokens: Sequence[int], shape: Shape) -> bytes:
    """u8 for vocabularies of up to 256, u32 little endian above."""
    if shape.token_bytes == 1:
        return bytes(tokens)
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(data: bytes, shape: Shape) -> list[int]:
    """Raises: Malformed: not whole tokens, or one outside the vocabulary."""
    if len(data) % shape.token_bytes:
        raise Malformed(f"{len(data)} bytes are not whole tokens of {shape.token_bytes} bytes")
    tokens = list(data) if shape.token_bytes == 1 else list(struct.unpack(f"<{len(data) // 4}I", data))
    if tokens and max(tokens) >= shape.vocabulary:
        raise Malformed(f"token {max(tokens)} is outside the vocabulary of {shape.vocabulary}")
    return tokens


# ---- a holder's side ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A step that passed every check: what a holder has to do. Lengths are per row."""

    tokens: list[int]  # rows after each other; in a noisy step without the unknown ones
    length: int  # known tokens per row
    unknown: int  # positions of a noisy window behind them, each with a z
    cached: int  # positions in the cache afterwards
    score_bytes: int  # of the outgoing body: rows x want x vocabulary
    draft_rows: int  # rows of the drafter's own behind them, coming in or to be made here
    z_rows: int  # positions whose z comes in at the end of the body


def check_step(step: Step, body_bytes: int, shape: Shape, *, block: int, cached: int) -> Work:
    """What a holder of `block` with `cached` positions in the session's cache must do for a step.

    Raises: Malformed: whatever does not fit the model, the session or the sizes; nothing was changed.
    """
    tokens = unpack_tokens(step.tokens, shape)
    if not tokens or len(tokens) % step.rows:
        raise Malformed(f"{len(tokens)} tokens do not make {step.rows} rows")
    length = len(tokens) // step.rows
    if step.rows > 1 and (step.position or step.draft or step.drafted or step.noisy):
        raise Malformed("several rows are scored from position 0, without drafts or noise")
    if step.position > cached:
        raise Malformed(f"position {step.position}, but only {cached} are cached here")
    if step.rows * length > max(MAX_STEP_POSITIONS, shape.context):
        raise Malformed(f"{step.rows} rows of {length} positions are too many for one step")
    if step.rows * length + step.draft > shape.step_tokens:
        raise Malformed(f"{length} tokens leave no room for {step.draft} drafted ones in one step")
    if step.position + length + step.draft > shape.context:
        raise Malformed(f"positions up to {step.position + length + step.draft}; the context has {shape.context}")
    if step.want > length + step.draft:
        raise Malformed(f"{step.want} positions wanted of {length + step.draft}")
    if any(other >= shape.blocks for other in step.blocks) or len(set(step.blocks)) < len(step.blocks):
        raise Malformed(f"the body claims blocks {step.blocks[:8]} of {shape.blocks}")
    if block in step.blocks:
        raise Malformed(f"block {block} is in the body already")
    if step.draft and (step.blocks or step.drafted or step.noisy or step.want <= step.draft):
        raise Malformed("only the first holder drafts, once, and what it drafts is wanted")
    if step.drafted and (not step.blocks or step.noisy or not step.drafted < step.want):
        raise Malformed(f"{step.drafted} drafted tokens do not fit {step.want} wanted positions")
    if step.noisy and not 1 <= step.want <= min(length, MAX_WINDOW):
        raise Malformed(f"a noisy window of {step.want} positions; it has 1 … {min(length, MAX_WINDOW)}, the first of them known")
    unknown = step.want - 1 if step.noisy else 0
    draft_rows = rows_of_draft(step.drafted)
    score_bytes = step.rows * step.want * shape.row_bytes
    z_rows = rows_of_z(step, shape)
    expected = score_bytes + draft_rows * shape.row_bytes + z_rows * shape.z_bytes if step.blocks else 0
    if body_bytes != expected:
        raise Malformed(f"a body of {body_bytes} bytes where {expected} are due")
    draft_rows = max(draft_rows, rows_of_draft(step.draft))
    if score_bytes + draft_rows * shape.row_bytes + rows_of_z(step, shape, step.draft) * shape.z_bytes > limits.MAX_BODY_BYTES:
        raise Malformed(f"{step.rows} x {step.want} positions do not fit one frame")
    if shape.kept and score_bytes + draft_rows * shape.row_bytes > shape.score_bytes:
        raise Malformed(f"{step.rows} x {step.want} positions are more than whole rows of {shape.vocabulary} tokens fit one frame")
    known = length - unknown
    after = step.position + known + step.draft if step.rows == 1 else cached
    return Work(tokens[: known * step.rows], known, unknown, after, score_bytes, draft_rows, z_rows)


def rows_of_z(step: Step, shape: Shape, drafted: int = 0) -> int:
    """How many positions' z follow the rows: the unknown ones; in a sequential sweep all that a step names, and those drafted since."""
    if shape.sequential:
        return len(step.tokens) // shape.token_bytes + drafted
    return step.want - 1 if step.noisy else 0


def rows_of_draft(drafted: int) -> int:
    """How many rows the drafter adds to the body: one for each drafted token and one for the token after them."""
    return drafted + 1 if drafted else 0


def scored(step: Step, shape: Shape) -> Scored:
    """The answer to the client, from the step that left the last holder. Its body is the answer's body."""
    drafted = step.tokens[len(step.tokens) - step.drafted * shape.token_bytes :] if step.drafted else b""
    return Scored(step.sequence, step.want, step.drafted, drafted, step.blocks, step.compute_s)


# ---- the client's side ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from a distribution: temperature first, then the k likeliest, then the likeliest that make up p."""

    temperature: float = 1.0  # 0: always the likeliest
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0


class Continuation:
    """The client's book of one text: its tokens, the window, and how much of it the holders have in their caches."""

    def __init__(self, shape: Shape, prompt: Sequence[int]) -> None:
        self.shape = shape
        self.tokens = array("I", list(prompt) or [shape.start_token])
        self.shown = len(prompt)  # prompt tokens that are the caller's own
        self.start = window_start(len(self.tokens), shape.context)  # of the prompt, everything before it is never seen
        self.cached = 0  # positions of the window that the holders have
        self.sequence = 0

    def plan(self, mode: str, width: int, sampling: Sampling, *, substeps: int = 1) -> Step:
        """The next step: up to `width` tokens beyond the one that any traversal gives.

        A step with `want` 0 only fills the caches, where the text does not fit one step. The width is cut to the window, to
        what a frame holds, and in speculative mode is at least 1 where the window has room, because a position's token must not
        depend on the width (see node/compute/sampling.couple).
        """
        known = len(self.tokens)
        start = window_start(known, self.shape.context)
        if start != self.start:
            self.start, self.cached = start, 0
        pending = self.tokens[self.start + self.cached :]
        extra = min(self._reach(mode, width), room(known, self.shape.context))
        unknown = extra if mode == ONE_SWEEP else 0
        step = Step(
            sequence=self.sequence,
            position=self.cached,
            rows=1,
            want=extra + 1,
            tokens=pack_tokens([*pending, *[0] * unknown], self.shape) if len(pending) + extra <= self.shape.step_tokens else b"",
            draft=extra if mode == SPECULATIVE else 0,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=seed_at(sampling.seed, self.start),
            noisy=bool(unknown),
            substeps=substeps,
        )
        if not step.tokens:
            # One is left for the step that wants something.
            part = pack_tokens(pending[: min(self.shape.step_tokens, len(pending) - 1)], self.shape)
            step = replace(step, tokens=part, want=0, draft=0, noisy=False)
        self.sequence += 1
        return step

    def _reach(self, mode: str, width: int) -> int:
        """The width that a mode, a frame's body and the rules of a step allow."""
        if mode == SPECULATIVE:
            return min(max(width, 1), MAX_DRAFT, self.shape.score_bytes // (2 * self.shape.row_bytes) - 1)
        if mode == ONE_SWEEP:
            per_position = self.shape.row_bytes + self.shape.z_bytes
            return max(0, min(width, MAX_WINDOW - 1, self.shape.score_bytes // per_position - 1))
        return 0

    def settle(self, step: Step, tokens: Sequence[int], kept: int) -> None:
        """A traversal gave `tokens`; the first `kept` of them stand in the holders' caches, as drafts that stay."""
        sent = len(step.tokens) // self.shape.token_bytes
        self.cached = step.position + sent - (step.want - 1 if step.noisy else 0) + kept
        self.tokens.extend(tokens)


class Recall:
    """The tokens that a session's caches hold, kept by whoever may have to fill the cache of another holder (failover)."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._tokens = b""

    def note(self, step: Step, drafted: bytes = b"") -> None:
        """A step went through; `drafted` are the tokens that its first holder added."""
        size = self._shape.token_bytes
        known = len(step.tokens) - (step.want - 1 if step.noisy else 0) * size
        if step.rows == 1:
            self._tokens = self._tokens[: step.position * size] + step.tokens[:known] + drafted

    def again(self, step: Step) -> list[Step]:
        """The same work for caches that are empty: one step, or several where the tokens do not fit one. Only the last wants anything."""
        if step.rows > 1 or not step.position:
            return [step]
        size, most = self._shape.token_bytes, self._shape.step_tokens * self._shape.token_bytes
        tokens = self._tokens[: step.position * size] + step.tokens
        fill = replace(step, want=0, draft=0, noisy=False)
        steps = []
        offset = 0
        while len(tokens) - offset + step.draft * size > most:
            # The last step keeps the tokens of the original one, since it wants positions among them.
            end = min(offset + most, len(tokens) - len(step.tokens))
            steps.append(replace(fill, position=offset // size, tokens=tokens[offset:end]))
            offset = end
        return [*steps, replace(step, position=offset // size, tokens=tokens[offset:])]


@dataclass(frozen=True)
class Pace:
    """How many tokens to draft, learned from past traversals. It changes the speed of a text, never the text.

    A token is kept with probability a, so w drafts give 1 + a + … + a^w tokens, for the price of one traversal's network time and
    w + B passes of one block. The best w is the one with the most tokens per second.
    """

    widest: int = 32
    hits: float = 8.5  # kept drafts, fading; the start is worth ten drafts at the acceptance of 0.85 that is measured for B = 3
    tries: float = 10.0
    network_s: float | None = None  # of one traversal
    pass_s: float | None = None  # of one block over a few positions

    FADE = 0.95  # how much of the past a traversal leaves
    MIX = 0.2  # share of the newest time

    def after(self, step: Step, kept: int, *, blocks: int, seconds: float, compute_s: float) -> Pace:
        """What a traversal with drafts taught; `kept` of them stayed, and it took `seconds`, `compute_s` of them computing.

        Where a whole window was computed, or a session opened first, only the drafts are counted.
        """
        if not step.draft:
            return self
        counted = replace(self, hits=self.hits * self.FADE + kept, tries=self.tries * self.FADE + kept + (kept < step.draft))
        if not step.position:
            return counted
        one_pass = compute_s / (step.draft + max(1, blocks))
        network = max(0.0, seconds - compute_s)
        return replace(
            counted,
            network_s=network if self.network_s is None else self.network_s + self.MIX * (network - self.network_s),
            pass_s=one_pass if self.pass_s is None else self.pass_s + self.MIX * (one_pass - self.pass_s),
        )

    def width(self, blocks: int, first: int) -> int:
        """The width for the next traversal; `first` until a time is known."""
        if self.network_s is None or self.pass_s is None or self.network_s + self.pass_s <= 0:
            return min(first, self.widest)
        keep = self.hits / self.tries
        best, best_rate = 1, 0.0
        tokens = 1.0
        for width in range(1, self.widest + 1):
            tokens += keep**width
            rate = tokens / (self.network_s + (width + blocks) * self.pass_s)
            if rate > best_rate:
                best, best_rate = width, rate
        return best
