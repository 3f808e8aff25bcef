"""`blocktrain-sim bench sweep`: how fast a chain of real processes writes, in three ways, over two routes, with a network between them.

**speed.** One node a block (sweep_swarm.py), weights trained for 500 steps, every connection through a proxy that delays it. For each
round trip time all ways take turns, in alternating order, and a way's speed-up is the median over the pairs of its tokens/s ÷ that of
autoregressive over `chain` in the same turn. Sessions are open before the clock starts, and the prompt rides in the first traversal.
`star_speedup` is autoregressive over `star`; `star_speculative_speedup` is speculative over `star`. Keys end in the round trip time, with
`b6_` before it for six blocks; `speculative` drafts 8 tokens at a time, and `adaptive` lets the width follow acceptance and network.

**clients.** Eight clients at once, speculative over `chain`, at 50 ms: tokens/s of all together, and against one.

**hop.** No delay, the holders train: (seconds of a traversal - seconds of computing in it) ÷ blocks, over autoregressive traversals. That
is all that a hop costs beyond computing: the stream, the loops on both sides, the wait for the thread, and the proxy.

**context.** Milliseconds of computing for one token over its place in the context, holders at rest: with a cache it is flat.
`context_cost_ratio` is the last eighth ÷ the second. `hop_overhead_rest_ms_p50` is the hop's overhead without training beside it.

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
from typing import Final

import torch

from blocktrain.node.compute.generation import Generation
from blocktrain.protocol.errors import UsageError
from blocktrain.swarm_sim import sweep_measures as measures
from blocktrain.swarm_sim.benches import Bench, Numbers, Session
from blocktrain.swarm_sim.delay import Emulator
from blocktrain.swarm_sim.processes import Children
from blocktrain.swarm_sim.sweep_measures import CLIENTS, DRAFT, SPECULATION, WAYS, YARDSTICK, with_client
from blocktrain.swarm_sim.sweep_swarm import STEPS, SweepSwarm, Trained, trained

BASE_MS: Final = 50
BASE_BLOCKS: Final = 3
PAIRS, BRIEF_PAIRS = 9, 3
HOP_TEXTS, BRIEF_HOP_TEXTS = 8, 3
HOP_TOKENS: Final = 110
JUDGED, BRIEF_JUDGED = 48, 12
SHARE_S, BRIEF_SHARE_S = 30.0, 6.0
CLIENT_TEXTS, BRIEF_CLIENT_TEXTS = 4, 2
BAR: Final = 40  # characters


@dataclass(frozen=True)
class Plan:
    """What the command line asks for."""

    rtts_ms: tuple[int, ...]
    blocks: tuple[int, ...]


def plan(rtts_ms: str, blocks: str) -> Plan:
    """From "0,20,50" and "3,6". Raises: UsageError."""
    return Plan(_numbers("--rtt-ms", rtts_ms, 0, 2000), _numbers("--blocks", blocks, 2, 16))


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
                speed += [f"{way.name}_tokens_per_s_{end}", f"{way.name}_first_byte_s_{end}"]
                speed += [f"{way.name}_speedup_{end}", f"{way.name}_speedup_spread_{end}"] if way is not YARDSTICK else []
            speed += [f"tokens_per_traversal_{end}", f"acceptance_{end}"]
    parts = {
        "speed": (*speed, "tokens_per_traversal", "acceptance", "first_byte_traversals"),
        "clients": ("clients_tokens_per_s", "clients_one_tokens_per_s"),
        "hop": ("hop_overhead_ms_p50", "hop_overhead_ms_p99", "hop_compute_ms_p50"),
        "context": ("context_cost_ms", "context_cost_ratio", "hop_overhead_rest_ms_p50"),
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
    return Bench("sweep", parts, lambda session: run(session, wanted))


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
    if not session.wants("speed", *(("clients", "hop", "context", "share") if base else ())):
        return
    with Emulator() as emulator, Children(session.folder) as children:
        swarm = SweepSwarm(children, emulator, model)
        swarm.start()
        if session.wants("speed"):
            for rtt_ms in wanted.rtts_ms:
                session.say(f"{model.manifest.blocks} blocks, round trips of {rtt_ms} ms")
                swarm.network(rtt_ms / 1000)
                session.numbers.update(_speed(session, swarm, _suffix(model.manifest.blocks, rtt_ms)))
        if base:
            _rest(session, swarm)
        swarm.stop()


def _rest(session: Session, swarm: SweepSwarm) -> None:
    """The parts that need one swarm of three blocks."""
    texts = BRIEF_CLIENT_TEXTS if session.brief else CLIENT_TEXTS
    swarm.network(BASE_MS / 1000)
    session.measure("clients", lambda: _clients(swarm, texts))
    swarm.network(0)
    session.measure("context", lambda: _context(session, swarm))
    if session.wants("hop", "share"):
        seconds = BRIEF_SHARE_S if session.brief else SHARE_S
        alone = with_client(swarm, lambda client: measures.busy(client, seconds)) if session.wants("share") else 0.0
        swarm.resume()
        session.measure("hop", lambda: _hop(session, swarm))
        session.measure("share", lambda: {**_share(swarm, seconds, alone), **_fifth(swarm, seconds)})


def _speed(session: Session, swarm: SweepSwarm, end: str) -> dict[str, object]:
    count = BRIEF_PAIRS if session.brief else PAIRS
    found = with_client(swarm, lambda client: measures.pairs(client, count))
    numbers: dict[str, object] = {"pairs": count}
    yardstick = found[YARDSTICK.name]
    for way in WAYS:
        results = found[way.name]
        numbers[f"{way.name}_tokens_per_s_{end}"] = statistics.median(one.tokens_per_s for one in results)
        numbers[f"{way.name}_first_byte_s_{end}"] = statistics.median(one.first_token_s or 0.0 for one in results)
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


def _first_byte_traversals(results: Sequence[Generation]) -> float:
    """Seconds to the first byte, in those of an average traversal after it."""
    return statistics.median(
        (one.first_token_s or 0.0) / ((one.seconds - (one.first_token_s or 0.0)) / (one.traversals - 1)) for one in results
    )


def _clients(swarm: SweepSwarm, texts: int) -> Numbers:
    one, many = with_client(swarm, lambda client: measures.many(client, texts))
    return {"clients_tokens_per_s": many, "clients_one_tokens_per_s": one}


def _context(session: Session, swarm: SweepSwarm) -> Numbers:
    texts = BRIEF_HOP_TEXTS if session.brief else HOP_TEXTS
    seen = with_client(swarm, lambda client: measures.traversals(client, texts, HOP_TOKENS))
    cost = measures.by_context(seen, swarm.model.manifest.model.context)
    for place, milliseconds in enumerate(cost):
        session.say(f"context {place + 1}/{len(cost)} {'█' * round(BAR * milliseconds / max(cost))} {milliseconds:.2f} ms")
    rest = statistics.median(_overhead(seen, swarm))
    return {"context_cost_ms": cost, "context_cost_ratio": cost[-1] / cost[1], "hop_overhead_rest_ms_p50": rest}


def _hop(session: Session, swarm: SweepSwarm) -> Numbers:
    texts = BRIEF_HOP_TEXTS if session.brief else HOP_TEXTS
    seen = with_client(swarm, lambda client: measures.traversals(client, texts, HOP_TOKENS))
    overhead = _overhead(seen, swarm)
    return {
        "hop_overhead_ms_p50": statistics.median(overhead),
        "hop_overhead_ms_p99": overhead[int(0.99 * len(overhead))],
        "hop_compute_ms_p50": statistics.median(1000 * one.compute_s / swarm.model.manifest.blocks for one in seen),
    }


def _overhead(seen: Sequence[measures.Traversal], swarm: SweepSwarm) -> list[float]:
    """Milliseconds a hop beyond computing, the least first."""
    return sorted(1000 * (one.seconds - one.compute_s) / swarm.model.manifest.blocks for one in seen)


def _share(swarm: SweepSwarm, seconds: float, alone: float) -> Numbers:
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
