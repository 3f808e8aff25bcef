"""Sweeps of the papers' objective: z goes from block to block at every position, and the last block is read."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from blocktrain.node.compute import diffusionblocks
from blocktrain.node.compute.evaluation import chain_loss
from blocktrain.node.compute.generation import Generation, Request, TextSweep
from blocktrain.node.compute.model import Block, Noisy
from blocktrain.node.compute.objective import objective_of
from blocktrain.node.compute.offline import OfflineChain
from blocktrain.node.compute.sampling import distribution, draw, noise
from blocktrain.node.compute.worker import Worker
from blocktrain.protocol import sweep
from blocktrain.protocol.errors import PeerFault, UsageError
from blocktrain.protocol.manifest import OBJECTIVES
from blocktrain.protocol.messages import Step
from blocktrain.protocol.sweep import AUTOREGRESSIVE, ONE_SWEEP, SPECULATIVE, TOKEN, Sampling
from tests.sweeping import MANIFEST, PROMPT, World, written

RUN = replace(MANIFEST, objective="diffusionblocks", noise=replace(MANIFEST.noise, sigma_low=0.5, sigma_high=5.0))
SHAPE = sweep.Shape.of(RUN)
WARM = Sampling(0.9, seed=7)
SEED = sweep.seed_at(WARM.seed, 0)  # of the first window


def some_blocks() -> list[Block]:
    """Untrained but for what reads noise, which would be silent otherwise."""
    blocks = [Block(RUN, number).requires_grad_(False) for number in range(RUN.blocks)]
    for block in blocks:
        draws = torch.Generator().manual_seed(block.block)
        for name, parameter in block.named_parameters():
            if not parameter.any():
                parameter.normal_(0, 0.3, generator=draws)
            elif name == "head":
                parameter.mul_(6)
    return blocks


BLOCKS = some_blocks()


def by_definition(tokens: list[int], seed: int = SEED) -> torch.Tensor:
    """The last block's log-probabilities [N, V] in the papers' sampler over the whole text at once, without a cache."""
    count, width = len(tokens), RUN.model.width
    z = torch.from_numpy(np.stack([noise(seed, place, width) for place in range(count)])) * RUN.noise.sigma_high
    everywhere, zeros = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    for block in BLOCKS:
        low, high = RUN.sigma_interval(block.block)
        logits = block(torch.tensor([tokens]), Noisy(everywhere, z, torch.full((count,), high), zeros))[0]
        z = (z + (low - high) / high * (z - logits.softmax(-1) @ block.targets)).half().float()
    return logits.log_softmax(-1)


async def at_home(request: Request) -> Generation:
    async with OfflineChain(RUN, BLOCKS) as chain:
        text = TextSweep(chain, RUN, request)
        async for _ in text.pieces():
            pass
        return text.result()


def test_protocol_and_objectives_agree_on_who_is_sequential() -> None:
    for name in OBJECTIVES:
        assert (objective_of(replace(MANIFEST, objective=name), 0).sweep == "sequential") == (name in sweep.SEQUENTIAL)


async def test_token_by_token_is_the_papers_sampler_read_at_its_last_block() -> None:
    result = await at_home(Request(PROMPT, 20, AUTOREGRESSIVE, WARM))
    tokens = list(PROMPT)
    for byte in result.data:
        p = distribution(by_definition(tokens)[-1].numpy(), WARM)
        expected = draw(p, sweep.uniform(SEED, len(tokens), TOKEN))
        assert byte == expected or p[byte] == pytest.approx(p[expected], abs=1e-3), f"byte {len(tokens)}"
        tokens.append(byte)
    blocks = [by_definition(tokens), *list(diffusionblocks.sweep(RUN, BLOCKS, torch.tensor([tokens]), torch.Generator().manual_seed(1)))]
    assert all(not torch.allclose(a, b, atol=0.1) for a, b in pairwise(map(torch.squeeze, blocks))), "blocks and noises differ"


@pytest.mark.parametrize("mode", [AUTOREGRESSIVE, SPECULATIVE])
async def test_greedy_text_is_the_same_drafted_and_token_by_token_past_the_context(mode: str) -> None:
    greedy = Sampling(0.0, seed=7)
    plain = await at_home(Request(PROMPT, 3 * RUN.model.context, AUTOREGRESSIVE, greedy))
    assert (await at_home(Request(PROMPT, 3 * RUN.model.context, mode, greedy, draft=5, adapt=False))).data == plain.data


async def test_a_drafted_text_does_not_depend_on_the_drafts_width() -> None:
    texts = {(await at_home(Request(PROMPT, 70, SPECULATIVE, WARM, draft=width, adapt=False))).data for width in (1, 4, 9)}
    assert len(texts) == 1


async def test_a_whole_window_begins_with_the_token_that_token_by_token_gives() -> None:
    window = await at_home(Request(PROMPT, 12, ONE_SWEEP, WARM, window=12))
    assert window.traversals == 1
    assert window.data[0] == (await at_home(Request(PROMPT, 1, AUTOREGRESSIVE, WARM))).data[0]
    with pytest.raises(UsageError, match="substeps is 2; blocks of 'diffusionblocks' take one step each"):
        Request(PROMPT, 5, ONE_SWEEP, substeps=2).check(RUN)


async def test_the_loss_is_the_last_blocks() -> None:
    windows = [list(b"The river is long and slow"), list(b"and the sea is wide & deep")]
    async with OfflineChain(RUN, BLOCKS) as chain:
        loss = await chain_loss(chain, RUN, windows)
    expected = [by_definition(window[:-1], seed=0)[torch.arange(len(window) - 1), window[1:]] for window in windows]
    assert loss.nats == pytest.approx(-float(torch.cat(expected).mean()), abs=5e-3)


def test_a_z_that_is_not_finite_is_refused() -> None:
    first, second = Worker(RUN, BLOCKS[0]), Worker(RUN, BLOCKS[1])
    onward, body = first.step(first.cache(), Step(0, 0, 1, 1, bytes(PROMPT)), b"")
    assert len(body) == SHAPE.row_bytes + len(PROMPT) * SHAPE.z_bytes
    with pytest.raises(PeerFault, match="z is not finite"):
        second.step(second.cache(), onward, body[:-2] + np.float16("nan").tobytes())
    with pytest.raises(PeerFault, match="a body of"):
        second.step(second.cache(), onward, body[:-2])


# ---- in a swarm ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def world():  # type: ignore[no-untyped-def]
    world = World(manifest=RUN)
    await world.add("a0", "a1", "a2", "b1")
    world.prefer("a0", "a1", "a2")
    yield world
    await world.close()


async def test_a_star_is_refused_in_one_line(world: World) -> None:
    with pytest.raises(UsageError, match="route star: blocks of 'diffusionblocks' hand z on"):
        async with world.chain(route="star"):
            pass


@pytest.mark.parametrize("mode", [AUTOREGRESSIVE, SPECULATIVE])
async def test_a_lost_holder_changes_nothing_and_a_cut_link_is_bypassed(world: World, mode: str) -> None:
    request = Request(PROMPT, 60, mode, WARM, draft=4)
    async with world.chain() as chain:
        expected = await written(chain, request)
    assert chain.report.route == "chain"
    async with world.chain() as chain:
        text = await written(chain, request, [lambda: world.swarm.kill(world.places["a1"].peer)])
    assert text.data == expected.data
    assert chain.report.mended
    world.swarm.cut(world.places["a0"].peer, world.places["b1"].peer)
    async with world.chain() as chain:
        text = await written(chain, request)
    assert text.data == expected.data
