"""Text out of a chain: three ways, one distribution, the same text for the same seed whatever lies between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from blocktrain.node.compute.evaluation import chain_loss
from blocktrain.node.compute.generation import Generation, Piece, Request, TextSweep, TokenText, Traversals, Utf8
from blocktrain.node.compute.model import Block
from blocktrain.node.compute.offline import OfflineChain
from blocktrain.node.compute.sampling import chain_row, distribution, draw, to_half
from blocktrain.protocol import sweep
from blocktrain.protocol.errors import NoPeers, PeerFault, UsageError
from blocktrain.protocol.manifest import Manifest, Model, Noise, Optimizer, Schedule
from blocktrain.protocol.messages import Scored, Step
from blocktrain.protocol.sweep import AUTOREGRESSIVE, ONE_SWEEP, SPECULATIVE, Recall, Sampling, Shape

T = 32
PROMPT = tuple(b"The river")
WARM = Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=3)
GREEDY = Sampling(temperature=0)


def some_manifest(vocabulary: int = 256, blocks: int = 3, context: int = T) -> Manifest:
    return Manifest(
        format=1,
        name="tiny",
        blocks=blocks,
        objective="evidence",
        tokenizer="bytes",
        seed=5,
        model=Model(width=32, layers=1, heads=4, context=context, vocabulary=vocabulary),
        noise=Noise(sigma_low=0.2, sigma_high=4.0, overlap=0.1, window_share=0.25),
        schedule=Schedule(steps_per_round=10, learning_rate=4e-3, warmup_rounds=1, planned_rounds=10, floor=0.1),
        optimizer=Optimizer(batch=8, accumulate=1, beta1=0.9, beta2=0.95, weight_decay=0.05, clip=1.0, warmup_steps=20),
    )


def some_blocks(manifest: Manifest) -> list[Block]:
    """Blocks that agree about as often as trained ones: the same head, other layers; every weight that reads noise is random."""
    blocks = [Block(manifest, number).requires_grad_(False) for number in range(manifest.blocks)]
    generator = torch.Generator().manual_seed(0)
    for block in blocks:
        block.head.copy_(blocks[0].head * 2)
        block.embedding.copy_(blocks[0].embedding)
        for parameter in block.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.1, generator=generator)
    return blocks


MANIFEST = some_manifest()
BLOCKS = some_blocks(MANIFEST)
SHAPE = Shape.of(MANIFEST)


class Through:
    """A chain that a test may put something before and after."""

    def __init__(self, inner: Traversals) -> None:
        self.inner = inner
        self.steps: list[Step] = []

    async def traverse(self, step: Step, body: bytes = b"") -> tuple[Scored, memoryview]:
        self.steps.append(step)
        return self.after(step, *await self.inner.traverse(self.before(step), body))

    def before(self, step: Step) -> Step:
        return step

    def after(self, step: Step, scored: Scored, body: memoryview) -> tuple[Scored, memoryview]:
        return scored, body


async def answer(chain: Traversals, request: Request, manifest: Manifest = MANIFEST) -> tuple[list[Piece], Generation]:
    sweeping = TextSweep(chain, manifest, request)
    pieces = [piece async for piece in sweeping.pieces()]
    return pieces, sweeping.result()


async def text(request: Request, blocks: Sequence[Block] = BLOCKS, manifest: Manifest = MANIFEST) -> bytes:
    async with OfflineChain(manifest, blocks) as chain:
        pieces, result = await answer(chain, request, manifest)
    data = b"".join(piece.data for piece in pieces)
    assert data == result.data
    return data


def reference(prompt: Sequence[int], count: int, sampling: Sampling) -> bytes:
    """Token by token without caches or steps, straight from the definition."""
    tokens = list(prompt)
    for _ in range(count):
        start = sweep.window_start(len(tokens), T)
        window = torch.tensor([tokens[start:]])
        total = np.zeros(256, dtype=np.float16)
        for block in BLOCKS:
            total = (total.astype(np.float32) + to_half(block(window)[0, -1].log_softmax(-1).numpy())).astype(np.float16)
        chance = sweep.uniform(sweep.seed_at(sampling.seed, start), len(tokens) - start, sweep.TOKEN)
        tokens.append(draw(distribution(chain_row(total, 3), sampling), chance))
    return bytes(tokens[len(prompt) :])


# ---- the same text --------------------------------------------------------------------------------------------------------------


async def test_greedy_text_is_the_same_drafted_token_by_token_and_by_definition_to_three_contexts() -> None:
    request = Request(PROMPT, 3 * T, sampling=GREEDY)
    drafted = await text(request)
    assert drafted == await text(replace(request, mode=AUTOREGRESSIVE))
    assert drafted == reference(PROMPT, 3 * T, GREEDY)
    assert len(set(drafted)) > 3  # not the same byte over and over


async def test_token_by_token_text_is_what_the_definition_says_to_three_contexts() -> None:
    request = Request(PROMPT, 3 * T, AUTOREGRESSIVE, WARM)
    assert await text(request) == reference(PROMPT, 3 * T, WARM)


async def test_a_seeds_text_does_not_depend_on_the_drafts_width_to_three_contexts() -> None:
    request = Request(PROMPT, 3 * T, sampling=WARM)
    adapting = await text(request)
    for width in (1, 5, 31):
        assert await text(replace(request, draft=width, adapt=False)) == adapting
    assert (await text(replace(request, tokens=20))) == adapting[:20]
    assert (await text(replace(request, sampling=replace(WARM, seed=4)))) != adapting


async def test_a_chain_whose_caches_are_lost_before_every_step_gives_the_same_text() -> None:
    class Forgetful(Through):
        recall = Recall(SHAPE)

        def before(self, step: Step) -> Step:
            return self.recall.again(step)[-1]

        def after(self, step: Step, scored: Scored, body: memoryview) -> tuple[Scored, memoryview]:
            self.recall.note(step, scored.tokens)
            return scored, body

    for request in (Request(PROMPT, 2 * T, sampling=WARM), Request(PROMPT, T, ONE_SWEEP, WARM, window=8)):
        async with OfflineChain(MANIFEST, BLOCKS) as chain:
            forgetful = Forgetful(chain)
            _, result = await answer(forgetful, request)
        assert result.data == await text(request)
        assert any(step.position for step in forgetful.steps)


async def test_a_drafter_that_drafts_badly_changes_the_speed_and_not_the_text() -> None:
    class OtherSeed(Through):
        def before(self, step: Step) -> Step:
            return replace(step, seed=step.seed ^ 1)

    request = Request(PROMPT, 40, sampling=WARM, adapt=False)
    async with OfflineChain(MANIFEST, BLOCKS) as chain:
        _, bad = await answer(OtherSeed(chain), request)
        _, good = await answer(chain, request)
    assert bad.data == good.data
    assert bad.traversals > good.traversals


async def test_texts_follow_each_other_on_one_chain() -> None:
    async with OfflineChain(MANIFEST, BLOCKS) as chain:
        texts = [(await answer(chain, Request(PROMPT, 20, sampling=WARM)))[1].data for _ in range(2)]
    assert texts[0] == texts[1]


# ---- the same distribution ------------------------------------------------------------------------------------------------------


class Toy:
    """A chain over two tokens with explicit distributions in quarters, whose drafter has others; chance is given by the test."""

    SHAPE = Shape(vocabulary=2, context=64, width=8, blocks=1)

    def __init__(self, chances: dict[tuple[int, int], float]) -> None:
        self.chances = chances
        self.texts: list[int] = []

    def chance(self, seed: int, position: int, purpose: int) -> float:
        return self.chances.get((position, purpose), 0.5)

    @staticmethod
    def p(before: Sequence[int]) -> np.ndarray:
        first = (2 + sum(before) * 5 + len(before)) % 3 + 1
        return np.array([first, 4 - first]) / 4

    @staticmethod
    def q(before: Sequence[int]) -> np.ndarray:
        return np.array([0.25, 0.75]) if (sum(before) + len(before)) % 2 else np.array([0.75, 0.25])

    async def traverse(self, step: Step, body: bytes = b"") -> tuple[Scored, memoryview]:
        del self.texts[step.position :]
        self.texts += step.tokens
        drafted = []
        for _ in range(step.draft):
            drafted.append(draw(self.q(self.texts), self.chance(step.seed, len(self.texts), sweep.DRAW)))
            self.texts.append(drafted[-1])
        ends = [len(self.texts) - step.want + 1 + index for index in range(step.want)]
        rows = [self.p(self.texts[:end]) for end in ends]
        if step.draft:
            rows += [self.q(self.texts[:end]) for end in ends[-step.draft - 1 :]]
        out = np.log(np.array(rows)).astype(np.float16).tobytes()
        return Scored(step.sequence, step.want, step.draft, bytes(drafted), (0,)), memoryview(out)


TOY = replace(some_manifest(vocabulary=2, blocks=1), model=Model(8, 1, 1, 64, 2))


async def test_drafted_text_has_the_chains_distribution_exactly_by_enumeration() -> None:
    """Every case of chance over two tokens, each equally likely: 4 for a draw, 3 for accepting (p / q is in thirds or above 1)."""
    prompt = (0, 1, 1)
    purposes = [(position, purpose) for position in (3, 4) for purpose in (sweep.DRAW, sweep.ACCEPT)]
    middles = {sweep.DRAW: [0.125, 0.375, 0.625, 0.875], sweep.ACCEPT: [1 / 6, 1 / 2, 5 / 6]}
    counts: dict[int, Counter[bytes]] = {1: Counter(), 2: Counter(), 3: Counter()}
    traversals = 0
    for values in product(*(middles[purpose] for _, purpose in purposes)):
        texts = set()
        for width, count in counts.items():
            toy = Toy(dict(zip(purposes, values, strict=True)))
            sweeping = TextSweep(
                toy, TOY, Request(prompt, 4, draft=width, adapt=False), chance=toy.chance, decode=lambda tokens, last: bytes(tokens)
            )
            data = b"".join([piece.data async for piece in sweeping.pieces()])[:2]
            count[data] += 1
            texts.add(data)
            traversals += sweeping.result().traversals
        assert len(texts) == 1  # whatever the width
    assert traversals < 3 * 144 * 4  # drafts did stay
    for first, second in product((0, 1), repeat=2):
        exact = Toy.p(prompt)[first] * Toy.p((*prompt, first))[second] * 144
        assert [count[bytes([first, second])] for count in counts.values()] == [exact] * 3


async def test_sampled_text_of_real_blocks_has_the_chains_distribution_by_chi_square() -> None:
    manifest = some_manifest(vocabulary=4, blocks=2, context=16)
    blocks, sampling = some_blocks(manifest), Sampling(temperature=1.3)
    prompt, count = [0, 3, 1], 500

    def next_token(tokens: list[int]) -> np.ndarray:
        total = sum(to_half(block(torch.tensor([tokens]))[0, -1].log_softmax(-1).numpy()) for block in blocks)
        return distribution(chain_row(np.asarray(total), 2), sampling)

    exact = {(a, b): next_token(prompt)[a] * next_token([*prompt, a])[b] for a in range(4) for b in range(4)}
    seen: Counter[tuple[int, ...]] = Counter()
    kept = drafted = 0
    async with OfflineChain(manifest, blocks) as chain:
        for seed in range(count):
            request = Request(tuple(prompt), 2, sampling=replace(sampling, seed=seed), draft=2, adapt=False)
            pieces, result = await answer(chain, request, manifest)
            seen[tuple(token for piece in pieces for token in piece.tokens)] += 1
            kept, drafted = kept + result.kept, drafted + result.drafted
    assert 0.3 < kept / drafted < 0.99  # both the accepted and the residual way were taken
    statistic = sum((seen[pair] - count * share) ** 2 / (count * share) for pair, share in exact.items())
    assert statistic < 37.7  # 15 degrees of freedom: 0.1 %


# ---- one sweep ------------------------------------------------------------------------------------------------------------------


async def test_one_sweep_brings_its_whole_window_in_one_traversal() -> None:
    async with OfflineChain(MANIFEST, BLOCKS) as chain:
        pieces, result = await answer(chain, Request(PROMPT, 20, ONE_SWEEP, WARM))
        _, again = await answer(chain, Request(PROMPT, 20, ONE_SWEEP, WARM))
        _, other = await answer(chain, Request(PROMPT, 20, ONE_SWEEP, replace(WARM, seed=9)))
        _, finer = await answer(chain, Request(PROMPT, 20, ONE_SWEEP, WARM, substeps=4))
    assert (result.traversals, result.tokens, len(pieces)) == (1, 20, 1)
    assert result.tokens_per_traversal == 20
    assert result.data == again.data
    assert len({result.data, other.data, finer.data}) == 3


async def test_windows_follow_each_other_past_the_context() -> None:
    async with OfflineChain(MANIFEST, BLOCKS) as chain:
        through = Through(chain)
        _, result = await answer(through, Request(PROMPT, 3 * T, ONE_SWEEP, WARM, window=16))
    assert result.tokens == 3 * T
    assert result.traversals <= 3 * T // 16 + 5  # some windows end at the context's edge
    assert all(step.position + len(step.tokens) <= T for step in through.steps)


async def test_the_first_token_of_a_window_is_the_one_that_token_by_token_gives() -> None:
    one = await text(Request(PROMPT, 8, ONE_SWEEP, WARM))
    assert one[0] == (await text(Request(PROMPT, 1, AUTOREGRESSIVE, WARM)))[0]


# ---- prompts, stops, characters -------------------------------------------------------------------------------------------------


async def test_an_empty_prompt_is_answered_as_after_a_line_break() -> None:
    for mode in (SPECULATIVE, AUTOREGRESSIVE, ONE_SWEEP):
        empty = Request((), 20, mode, WARM)
        assert await text(empty) == await text(replace(empty, prompt=(10,)))
    async with OfflineChain(MANIFEST, BLOCKS) as chain:
        _, result = await answer(chain, Request((), 5, sampling=WARM))
    assert (result.prompt_tokens, result.prompt_unseen, result.tokens) == (0, 0, 5)


async def test_a_prompt_longer_than_the_context_says_how_much_of_it_was_seen() -> None:
    long = tuple(bytes(range(100)))
    async with OfflineChain(MANIFEST, BLOCKS) as chain:
        _, result = await answer(chain, Request(long, 10, sampling=WARM))
    assert (result.prompt_tokens, result.prompt_unseen) == (100, 80)
    assert result.data == await text(Request((*bytes(80), *long[80:]), 10, sampling=WARM))


async def test_text_ends_before_a_stop_string_that_spans_pieces() -> None:
    whole = await text(Request(PROMPT, 60, AUTOREGRESSIVE, WARM))
    stop = whole[30:33]
    place = whole.find(stop)
    request = Request(PROMPT, 60, AUTOREGRESSIVE, WARM, stop=(b"no such text", stop))
    async with OfflineChain(MANIFEST, BLOCKS) as chain:
        pieces, result = await answer(chain, request)
    assert b"".join(piece.data for piece in pieces) == whole[:place]
    assert (result.finish, result.tokens) == ("stop", place + 3)
    half = Request(PROMPT, place + 2, AUTOREGRESSIVE, WARM, stop=(stop,))
    assert await text(half) == whole[: place + 2]  # the beginning of a stop string that never came is shown


def test_characters_that_are_split_wait_and_broken_ones_are_shown_as_such() -> None:
    utf8 = Utf8()
    data = "aé€😀".encode() + b"\xff" + "é".encode()[:1]
    shown = [utf8.feed(data[index : index + 1]) for index in range(len(data))]
    assert shown == ["a", "", "é", "", "", "€", "", "", "", "😀", "\ufffd", ""]
    assert utf8.feed(b"", last=True) == "\ufffd"


def test_tokens_of_a_tokenizer_become_whole_characters() -> None:
    pieces = [b"\xf0\x9f", b"\x98\x80", b" river", b"\xff", b" a"]

    def decode(tokens: Sequence[int]) -> str:
        return b"".join(pieces[token] for token in tokens).decode("utf-8", "replace").removeprefix(" ")

    assert TokenText(decode)([0], False) == b""
    spoken = TokenText(decode, before=[4])
    assert [spoken(tokens, False) for tokens in ([2], [0], [1, 2])] == [b" river", b"", "😀 river".encode()]
    assert spoken([3], False) == b""
    assert spoken([], True) == "\ufffd".encode()


# ---- honest answers -------------------------------------------------------------------------------------------------------------


async def test_an_answer_says_what_was_done() -> None:
    async with OfflineChain(MANIFEST, BLOCKS) as chain:
        sweeping = TextSweep(chain, MANIFEST, Request(PROMPT, 30, sampling=WARM))
        assert sweeping.result().finish == "unfinished"
        pieces = [piece async for piece in sweeping.pieces()]
        result = sweeping.result()
    tokens = [token for piece in pieces for token in piece.tokens]
    assert (result.mode, result.tokens, len(tokens), result.finish) == (SPECULATIVE, 30, 30, "length")
    assert (result.blocks, result.missing, result.sampling.seed) == ((0, 1, 2), (), 3)
    assert result.traversals == len(pieces)
    assert 0 < result.kept <= result.drafted
    assert result.tokens <= result.kept + result.traversals
    assert result.first_token_s is not None
    assert 0 < result.compute_s <= result.seconds
    assert result.first_token_s <= result.seconds
    assert result.text == bytes(tokens).decode("utf-8", "replace")


async def test_the_log_probabilities_of_the_pieces_are_the_chains() -> None:
    async with OfflineChain(MANIFEST, BLOCKS) as chain:
        pieces, result = await answer(chain, Request(PROMPT, 15, sampling=WARM))
        window = [*PROMPT, *result.data]
        loss = await chain_loss(chain, MANIFEST, [window])
        prompt_loss = await chain_loss(chain, MANIFEST, [list(PROMPT)])
    nats = -sum(value for piece in pieces for value in piece.log_probs)
    assert nats == pytest.approx(loss.nats * loss.tokens - prompt_loss.nats * prompt_loss.tokens, abs=0.1)


async def test_a_missing_block_is_named_and_left_out_only_where_that_is_allowed() -> None:
    request = Request(PROMPT, 10, sampling=WARM)
    async with OfflineChain(MANIFEST, BLOCKS[:2]) as chain:
        with pytest.raises(NoPeers, match="block 2"):
            await answer(chain, request)
        _, result = await answer(chain, replace(request, allow_missing=True))
    assert (result.blocks, result.missing, result.tokens) == ((0, 1), (2,), 10)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda scored, body: (replace(scored, sequence=9), body), "another step"),
        (lambda scored, body: (replace(scored, want=3), body), "another step"),
        (lambda scored, body: (replace(scored, drafted=0, tokens=b""), body), "another step"),
        (lambda scored, body: (replace(scored, tokens=scored.tokens[1:]), body), "drafted tokens"),
        (lambda scored, body: (replace(scored, blocks=()), body), "blocks"),
        (lambda scored, body: (replace(scored, blocks=(0, 0, 1)), body), "blocks"),
        (lambda scored, body: (replace(scored, blocks=(0, 1, 3)), body), "blocks"),
        (lambda scored, body: (scored, body[:-1]), "bytes where"),
        (lambda scored, body: (scored, memoryview(b"\x00\x7e" + bytes(body[2:]))), "log-probabilities"),
        (lambda scored, body: (scored, memoryview(bytes(body[:-2]) + b"\x00\xfc")), "log-probabilities"),
        (lambda scored, body: (scored, memoryview(bytes(body[:-2]) + b"\x00\x3c")), "log-probabilities"),
    ],
)
async def test_a_hostile_answer_is_refused(change, why: str) -> None:
    class Lying(Through):
        def after(self, step: Step, scored: Scored, body: memoryview) -> tuple[Scored, memoryview]:
            return change(scored, body)

    async with OfflineChain(MANIFEST, BLOCKS) as chain:
        with pytest.raises(PeerFault, match=why):
            await answer(Lying(chain), Request(PROMPT, 10))


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (Request(PROMPT, 0), "at least 1"),
        (Request(PROMPT, -5), "at least 1"),
        (Request(PROMPT, 5, "fast"), "unknown mode 'fast'; known are speculative, one-sweep, autoregressive"),
        (Request((300,), 5), "outside the vocabulary"),
        (Request(PROMPT, 5, draft=0), "draft is 0"),
        (Request(PROMPT, 5, draft=257), "draft is 257"),
        (Request(PROMPT, 5, window=65), "window is 65"),
        (Request(PROMPT, 5, substeps=0), "substeps is 0"),
        (Request(PROMPT, 5, stop=(b"",)), "stop string"),
        (Request(PROMPT, 5, alternatives=21), "alternatives is 21"),
        (Request(PROMPT, 5, sampling=Sampling(temperature=float("nan"))), "temperature"),
        (Request(PROMPT, 5, sampling=Sampling(temperature=-1)), "temperature"),
        (Request(PROMPT, 5, sampling=Sampling(top_k=-1)), "top_k"),
        (Request(PROMPT, 5, sampling=Sampling(top_p=0)), "top_p"),
        (Request(PROMPT, 5, sampling=Sampling(seed=2**63)), "seed"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_in_one_line(request_: Request, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        TextSweep(Toy({}), MANIFEST, request_)


async def test_a_run_without_noise_has_no_one_sweep() -> None:
    with pytest.raises(UsageError, match="trained on noise"):
        TextSweep(Toy({}), replace(MANIFEST, objective="autoregressive"), Request(PROMPT, 5, ONE_SWEEP))


# ---- the loss of a chain --------------------------------------------------------------------------------------------------------


async def test_the_chains_loss_is_that_of_the_mean_of_log_probabilities() -> None:
    windows = np.random.default_rng(0).integers(0, 256, (130, T + 1))
    async with OfflineChain(MANIFEST, BLOCKS) as chain:
        loss = await chain_loss(chain, MANIFEST, windows.tolist())
    tokens = torch.from_numpy(windows)
    mean = sum(block(tokens[:, :-1]).log_softmax(-1) for block in BLOCKS) / 3
    exact = torch.nn.functional.cross_entropy(mean.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.nats == pytest.approx(float(exact), abs=1e-3)
    assert (loss.tokens, loss.blocks, loss.missing, loss.traversals) == (130 * T, (0, 1, 2), (), 1)


async def test_a_loss_over_more_than_one_step_counts_every_window_once() -> None:
    windows = np.random.default_rng(0).integers(0, 256, (300, 5)).tolist()
    async with OfflineChain(MANIFEST, BLOCKS[1:2]) as chain:
        whole = await chain_loss(chain, MANIFEST, windows)
        parts = [await chain_loss(chain, MANIFEST, windows[begin : begin + 100]) for begin in (0, 100, 200)]
    assert whole.nats == pytest.approx(sum(part.nats for part in parts) / 3)
    assert (whole.traversals, whole.blocks, whole.missing) == (2, (1,), (0, 2))


async def test_windows_that_cannot_be_scored_are_refused() -> None:
    for windows in ([], [[1]], [[1, 2], [1, 2, 3]], [[1] * (T + 2)]):
        with pytest.raises(UsageError, match="same length"):
            await chain_loss(Toy({}), MANIFEST, windows)


@pytest.mark.parametrize("draft", [1, 3, 8, 31])
async def test_the_draft_width_changes_no_token_up_to_three_contexts(draft: int) -> None:
    """Where the window is full no step can draft: that token is drawn the same way whether a draft ends there or a step begins."""
    wish = Request(PROMPT, 3 * T, SPECULATIVE, WARM, draft=draft, adapt=False)
    async with OfflineChain(MANIFEST, BLOCKS) as chain:
        first = TextSweep(chain, MANIFEST, replace(wish, draft=5))
        expected = b"".join([piece.data async for piece in first.pieces()])
        text = TextSweep(chain, MANIFEST, wish)
        assert b"".join([piece.data async for piece in text.pieces()]) == expected
