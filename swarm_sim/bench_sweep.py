"""`blocktrain-sim bench sweep`: how fast a chain of real processes writes, in three ways, over two routes, with a network between them.

**speed.** One node a block (sweep_swarm.py), weights trained for 500 steps, every connection through a proxy that delays it. For each
round trip time all ways take turns, in alternating order, and a way's speed-up is the median over the pairs of its tokens/s ÷ that of
autoregressive over `chain` in the same turn. Sessions are open before the clock starts, and the prompt rides in the first traversal.
`star_speedup` is autoregressive over `star`; `star_speculative_speedup` is speculative over `star`; in `client_drafts` the client
holds the first block as well and drafts itself, over `star`. Keys end in the round trip time, with `b6_` before it for six blocks;
`speculative` drafts 8 tokens at a time, and `adaptive` lets the width follow acceptance and network.

`hop_overhead` of a way over `chain` is (seconds of its traversals - their computing - the link's (B + 1)/2 round trips) ÷ B.

**clients.** One client and eight at once at 50 ms, every way: tokens/s of all together. `clients_` is speculative over `chain`.

**hop.** What a hop costs beyond computing and the link: (seconds of an autoregressive traversal over `chain` - seconds of computing
in it) ÷ blocks, on a swarm of three without an emulator, so that the link is the loopback and counts as nothing. It holds the
streams, both daemons, the loops on both sides and the wait for the thread. `hop_overhead_rest_ms` is with all holders at rest.
`hop_overhead_ms` is the hop through a holder that trains, with a core to spare, as at home: the middle one alone trains, and of a
traversal's seconds the usual ones of the two hops at rest are taken off. `hop_overhead_all_ms` is a hop where all three train on this
machine's cores.

**context.** Milliseconds of computing for one token over its place in the context, holders at rest: with a cache it is flat.
`context_cost_ratio` is the last eighth that texts reach ÷ the second.

**quality.** The judge's nats per byte of 64 bytes after held-out prompts of 32 bytes at temperature 1, for every way, and of the true
text. The judge is a stack as deep as three blocks, trained end to end for as many steps.

**share.** What serving costs training, and training serving: steps/s of all nodes without and with a client that never pauses, and that
client's tokens/s without and with training; then the last two once more where every node serves at most a fifth of its time
(`--serve-share`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from blocktrain.node.compute.drafting import Drafter
from blocktrain.node.compute.generation import Generation
from blocktrain.protocol.errors import UsageError
from blocktrain.swarm_sim import sweep_measures as measures
from blocktrain.swarm_sim import sweep_tables
from blocktrain.swarm_sim.benches import Bench, Numbers, Session
from blocktrain.swarm_sim.delay import Emulator
from blocktrain.swarm_sim.processes import Children
from blocktrain.swarm_sim.sweep_measures import CLIENTS, CONTEXT_BINS, DRAFT, SPECULATION, WAYS, YARDSTICK, Way, with_client
from blocktrain.swarm_sim.sweep_swarm import STEPS, SweepSwarm, Trained, trained

BASE_MS: Final = 50
BASE_BLOCKS: Final = 3
PAIRS, BRIEF_PAIRS = 9, 3
HOP_TEXTS, BRIEF_HOP_TEXTS = 8, 3
HOP_TOKENS: Final = 110
JUDGED, BRIEF_JUDGED = 48, 12
SHARE_S, BRIEF_SHARE_S = 20.0, 6.0
CLIENT_TEXTS, BRIEF_CLIENT_TEXTS = 4, 2
BAR: Final = 40  # characters


@dataclass(frozen=True)
class Plan:
    """What the command line asks for."""

    rtts_ms: tuple[int, ...]
    blocks: tuple[int, ...]
    plot: Path | None = None


def plan(rtts_ms: str, blocks: str, plot: Path | None = None) -> Plan:
    """From "0,20,50" and "3,6". Raises: UsageError."""
    if plot is not None and not plot.absolute().parent.is_dir():
        raise UsageError(f"--plot {plot}: give a file in a folder that exists")
    return Plan(_numbers("--rtt-ms", rtts_ms, 0, 2000), _numbers("--blocks", blocks, 2, 16), plot)


def _numbers(flag: str, text: str, low: int, high: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and low <= int(part) <= high for part in parts):
        raise UsageError(f"{flag} {text!r}: give numbers from {low} to {high}, with commas between them")
    return tuple(dict.fromkeys(int(part) for part in parts))


def bench(wanted: Plan) -> Bench:
    """The bench with the keys that this plan gives."""
    speed = []
    for blocks in wanted.blocks:
        for rtt_ms in wanted.rtts_ms:
            end = _suffix(blocks, rtt_ms)
            for way in WAYS:
                speed += [f"{way.name}_{what}_{end}" for what in ("tokens_per_s", "first_byte_s", "tokens_per_traversal")]
                speed += [f"{way.name}_hop_overhead_ms_{end}"] if way.route == "chain" else []
                speed += [f"{way.name}_speedup_{end}", f"{way.name}_speedup_spread_{end}"] if way is not YARDSTICK else []
            speed += [f"tokens_per_traversal_{end}", f"acceptance_{end}"]
    parts = {
        "speed": (*speed, "tokens_per_traversal", "acceptance", "first_byte_traversals"),
        "clients": (
            "clients_tokens_per_s",
            "clients_one_tokens_per_s",
            *(f"{count}_{way.name}_tokens_per_s" for way in WAYS for count in ("one", "eight")),
        ),
        "hop": tuple(
            f"hop_{what}{who}_ms_{share}" for who in ("", "_all", "_rest") for what in ("overhead", "compute") for share in ("p50", "p99")
        ),
        "context": ("context_cost_ms", "context_cost_ratio"),
        "quality": ("judge_autoregressive", "judge_speculative", "judge_one_sweep", "judge_true_text", "samples"),
        "share": (
            "share_steps_alone",
            "share_steps_serving",
            "share_tokens_alone",
            "share_tokens_training",
            "share_steps_fifth",
            "share_tokens_fifth",
        ),
    }
    return Bench("sweep", parts, lambda session: run(session, wanted), ("rtts_ms", "chain_lengths"))


def _suffix(blocks: int, rtt_ms: int) -> str:
    return f"{rtt_ms}ms" if blocks == BASE_BLOCKS else f"b{blocks}_{rtt_ms}ms"


def run(session: Session, wanted: Plan) -> None:
    """Every number of blocks has a swarm of its own, one after the other."""
    torch.set_num_threads(1)
    session.numbers.update(
        steps_trained=STEPS, draft=DRAFT, clients=CLIENTS, rtts_ms=list(wanted.rtts_ms), chain_lengths=list(wanted.blocks),
        judge=f"6 layers end to end, {STEPS} steps",
    )  # fmt: skip
    for blocks in wanted.blocks:
        with session.guard(*session.bench.parts):
            session.say(f"{blocks} blocks: weights of {STEPS} steps, from the cache or trained now")
            _blocks(session, wanted, trained(session.folder, blocks, session.say))


def _blocks(session: Session, wanted: Plan, model: Trained) -> None:
    base = model.manifest.blocks == BASE_BLOCKS
    if base:
        session.measure("quality", lambda: _quality(session, model))
    with Emulator() as emulator, Children(session.folder) as children:
        if session.wants("speed") or (base and session.wants("clients")):
            _with_network(session, SweepSwarm(children, emulator, model), wanted.rtts_ms)
        if base and session.wants("hop", "context", "share"):
            _without_network(session, SweepSwarm(children, None, model), wanted.plot)


def _with_network(session: Session, swarm: SweepSwarm, rtts_ms: Sequence[int]) -> None:
    """The parts that are about the network."""
    blocks = swarm.model.manifest.blocks
    swarm.start()
    if session.wants("speed"):
        for rtt_ms in rtts_ms:
            session.say(f"{blocks} blocks, round trips of {rtt_ms} ms")
            swarm.network(rtt_ms / 1000)
            session.numbers.update(_speed(session, swarm, rtt_ms))
    if blocks == BASE_BLOCKS and session.wants("clients"):
        swarm.network(BASE_MS / 1000)
        session.measure("clients", lambda: _clients(swarm, BRIEF_CLIENT_TEXTS if session.brief else CLIENT_TEXTS))
    swarm.stop()


def _without_network(session: Session, swarm: SweepSwarm, plot: Path | None) -> None:
    """The parts that need a swarm of three blocks with nothing between its nodes: first at rest, then one trains, then all."""
    seconds = BRIEF_SHARE_S if session.brief else SHARE_S
    swarm.start("plain")
    at_rest: list[measures.Traversal] = []
    if session.wants("hop", "context"):
        at_rest = _traversals(session, swarm)
    alone = with_client(swarm, lambda client: measures.busy(client, seconds)) if session.wants("share") else 0.0
    session.measure("context", lambda: _context(session, swarm, at_rest, plot))
    session.measure("hop", lambda: _hop(session, swarm, at_rest))
    session.measure("share", lambda: {**_share(swarm, seconds, alone), **_fifth(swarm, seconds)})
    swarm.stop()


def _speed(session: Session, swarm: SweepSwarm, rtt_ms: int) -> dict[str, object]:
    blocks = swarm.model.manifest.blocks
    end = _suffix(blocks, rtt_ms)
    count = BRIEF_PAIRS if session.brief else PAIRS
    drafter = Drafter(swarm.model.manifest, swarm.model.blocks[0])
    found = with_client(swarm, lambda client: measures.pairs(client, count, drafter))
    drafter.close()
    numbers: dict[str, object] = {"pairs": count}
    yardstick = found[YARDSTICK.name]
    for way in WAYS:
        results = found[way.name]
        numbers[f"{way.name}_tokens_per_s_{end}"] = statistics.median(one.tokens_per_s for one in results)
        numbers[f"{way.name}_first_byte_s_{end}"] = statistics.median(one.first_token_s or 0.0 for one in results)
        numbers[f"{way.name}_tokens_per_traversal_{end}"] = statistics.median(one.tokens_per_traversal for one in results)
        if way.route == "chain":
            numbers[f"{way.name}_hop_overhead_ms_{end}"] = 1000 * statistics.median(_beyond(one, blocks, rtt_ms / 1000) for one in results)
        if way is not YARDSTICK:
            ratios = [one.tokens_per_s / other.tokens_per_s for one, other in zip(results, yardstick, strict=True)]
            numbers[f"{way.name}_speedup_{end}"] = statistics.median(ratios)
            numbers[f"{way.name}_speedup_spread_{end}"] = [min(ratios), max(ratios)]
    numbers |= _drafts(found[SPECULATION.name], f"_{end}")
    if end == f"{BASE_MS}ms":
        numbers |= _drafts(found[SPECULATION.name], "")
        numbers["first_byte_traversals"] = _first_byte_traversals(yardstick)
    return numbers


def _drafts(results: Sequence[Generation], end: str) -> dict[str, object]:
    return {
        f"tokens_per_traversal{end}": sum(one.tokens for one in results) / sum(one.traversals for one in results),
        f"acceptance{end}": sum(one.kept for one in results) / max(1, sum(one.drafted for one in results)),
    }


def _beyond(one: Generation, blocks: int, rtt_s: float) -> float:
    """Seconds of a hop beyond computing and link, over a text's traversals along the chain."""
    return ((one.seconds - one.compute_s) / one.traversals - rtt_s * (blocks + 1) / 2) / blocks


def _first_byte_traversals(results: Sequence[Generation]) -> float:
    """Seconds to the first byte, in those of an average traversal after it."""
    return statistics.median(
        (one.first_token_s or 0.0) / ((one.seconds - (one.first_token_s or 0.0)) / (one.traversals - 1)) for one in results
    )


def _clients(swarm: SweepSwarm, texts: int) -> Numbers:
    numbers = {}
    drafter = Drafter(swarm.model.manifest, swarm.model.blocks[0])

    def measure(way: Way) -> tuple[float, float]:
        return with_client(swarm, lambda client: measures.many(client, way, texts, drafter))

    for way in WAYS:
        numbers[f"one_{way.name}_tokens_per_s"], numbers[f"eight_{way.name}_tokens_per_s"] = measure(way)
    drafter.close()
    one, eight = (numbers[f"{count}_{SPECULATION.name}_tokens_per_s"] for count in ("one", "eight"))
    return {**numbers, "clients_tokens_per_s": eight, "clients_one_tokens_per_s": one}


def _traversals(session: Session, swarm: SweepSwarm) -> list[measures.Traversal]:
    texts = BRIEF_HOP_TEXTS if session.brief else HOP_TEXTS
    return with_client(swarm, lambda client: measures.traversals(client, texts, HOP_TOKENS))


def _context(session: Session, swarm: SweepSwarm, at_rest: list[measures.Traversal], plot: Path | None) -> Numbers:
    context = swarm.model.manifest.model.context
    cost = measures.by_context(at_rest, context)
    for place, milliseconds in enumerate(cost):
        session.say(f"context {place + 1}/{len(cost)} {'█' * round(BAR * milliseconds / max(cost))} {milliseconds:.2f} ms")
    if plot is not None:
        sweep_tables.draw(plot, cost, context // CONTEXT_BINS, context)
        session.say(f"the plot is {plot}")
    return {"context_cost_ms": cost, "context_cost_ratio": cost[-1] / cost[1]}


def _hop(session: Session, swarm: SweepSwarm, at_rest: list[measures.Traversal]) -> Numbers:
    numbers = _hops("_rest", at_rest, BASE_BLOCKS)
    usual = [float(str(numbers[f"hop_{what}_rest_ms_p50"])) * (BASE_BLOCKS - 1) for what in ("overhead", "compute")]
    swarm.resume(BASE_BLOCKS // 2)
    numbers |= _hops("", _traversals(session, swarm), 1, *usual)
    swarm.resume()
    return numbers | _hops("_all", _traversals(session, swarm), BASE_BLOCKS)


def _hops(who: str, seen: Sequence[measures.Traversal], hops: int, beyond_ms: float = 0.0, compute_ms: float = 0.0) -> dict[str, object]:
    """Milliseconds of a hop, of computing and beyond it: what traversals took, less what is known of other hops, ÷ `hops`."""
    numbers = dict[str, object]()
    beyond = sorted((1000 * (one.seconds - one.compute_s) - beyond_ms) / hops for one in seen)
    compute = sorted((1000 * one.compute_s - compute_ms) / hops for one in seen)
    for what, values in (("overhead", beyond), ("compute", compute)):
        numbers[f"hop_{what}{who}_ms_p50"] = statistics.median(values)
        numbers[f"hop_{what}{who}_ms_p99"] = values[int(0.99 * len(values))]
    return numbers


def _share(swarm: SweepSwarm, seconds: float, alone: float) -> Numbers:
    swarm.resume()
    rates = []
    tokens = 0.0
    for serving in (False, True):
        begun = swarm.steps()
        if serving:
            tokens = with_client(swarm, lambda client: measures.busy(client, seconds))
        else:
            swarm.children.run(seconds)
        rates.append(swarm.steps_since(begun))
    return {
        "share_steps_alone": rates[0],
        "share_steps_serving": rates[1],
        "share_tokens_alone": alone,
        "share_tokens_training": tokens,
    }


def _fifth(before: SweepSwarm, seconds: float) -> Numbers:
    """The same with nodes that serve at most a fifth of their time."""
    before.stop()
    swarm = SweepSwarm(before.children, before.emulator, before.model)
    swarm.start("fifth", ("--serve-share", "0.2"))
    swarm.resume()
    begun = swarm.steps()
    tokens = with_client(swarm, lambda client: measures.busy(client, seconds))
    numbers = {"share_steps_fifth": swarm.steps_since(begun), "share_tokens_fifth": tokens}
    swarm.stop()
    return numbers


def _quality(session: Session, model: Trained) -> Numbers:
    nats, samples = measures.quality(model, BRIEF_JUDGED if session.brief else JUDGED)
    return {**{f"judge_{name}": value for name, value in nats.items()}, "samples": [f"{name}: {text}" for name, text in samples.items()]}
