"""The parts of `bench gossip` that are about learning: what codecs, attacks, outer steps, moments and uneven speeds do to the loss.

Every number is a mean over seeds, and where two ways are compared, over the differences of the two at the same seed; its lowest and highest
are beside it, so that it can be seen what is larger than chance.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from blocktrain.node.compute import codecs, flat
from blocktrain.protocol import limits
from blocktrain.protocol.ids import NO_DIGEST, RunId
from blocktrain.protocol.messages import Chunk, Hello, Message, Offer, Outcome, Seal, to_frame
from blocktrain.swarm_sim.benches import Session
from blocktrain.swarm_sim.gossip_lab import ATTACKS, LO_FI, Lab, Setting, manifest_of
from blocktrain.swarm_sim.gossip_lab import Outcome as End

CODECS: Final = ("fp32", "bf16", "int8", "sparse")
GROUPS: Final = ((2, "full"), (4, "ring"))
STEPS: Final = 300
BRIEF_STEPS: Final = 100
OUTER: Final = ("mean", "noloco", "nesterov", LO_FI)
EVERY: Final = (10, 50)
MOMENTS: Final = ("local", "reset", "carried")


def sent_bytes(codec: str, size: int) -> int:
    """All that one side sends in an exchange of `size` parameters: hello, terms, chunks, seal and outcome."""
    payload = codecs.codec_of(codec).encoded_bytes(size)
    words: list[Message] = [
        Hello(1, 1, bytes(32), (0.2, 4.0), 0.0, "blocktrain/0.1", "small-world"),
        Offer(bytes(16), RunId(bytes(32)), 0, "block", 1000, codec, 1e6, payload, bytes(32), 8, True),
        *(Chunk(begin) for begin in range(0, payload, limits.CHUNK_BYTES)),
        Seal(NO_DIGEST),
        Outcome(True, NO_DIGEST),
    ]
    return payload + sum(len(to_frame(word)) for word in words)


def codec_losses(session: Session) -> dict[str, object]:
    """Bytes and loss of every codec after the same steps, two replicas and a ring of four. `loss_delta`: the worse of the two groups."""
    numbers: dict[str, object] = {}
    deltas: dict[str, list[list[float]]] = {codec: [] for codec in CODECS}
    for replicas, topology in GROUPS:
        plain: list[End] = []
        for codec in CODECS:
            ends = [Lab(Setting(replicas, codec, topology, _steps(session), seed=seed)).run() for seed in _seeds(session, 3)]
            plain = plain or ends
            name = f"{codec}_{replicas}"
            numbers |= _means(name, ends)
            apart = [end.published - base.published for end, base in zip(ends, plain, strict=True)]
            deltas[codec].append(apart)
            numbers |= _spread(f"{name}_loss_delta", apart)
            session.say(f"{name}: {_shown([end.published for end in ends])}, above fp32 {_shown(apart)}, consensus {ends[0].consensus:.4f}")
    size = flat.count(flat.shapes_of(manifest_of(Setting(2))))
    for codec in CODECS[1:]:
        numbers[f"{codec}_bytes_ratio"] = sent_bytes(codec, size) / (4 * size)
        worst = max(deltas[codec], key=statistics.fmean)
        numbers |= _spread(f"{codec}_loss_delta", worst)
    return numbers


def attacks(session: Session) -> dict[str, object]:
    """The honest two's loss after 20 rounds beside an attacker, over that of the same two without it."""
    steps = 200
    seeds = _seeds(session, 3)
    quiet = [Lab(Setting(2, steps=steps, seed=seed, topology="pairs")).run() for seed in seeds]
    numbers: dict[str, object] = {"attack_none_loss": statistics.fmean(end.published for end in quiet)}
    numbers["attack_honest_refused"] = sum(end.refused for end in quiet)
    worst = 0.0
    for attack in ATTACKS:
        ends = [Lab(Setting(3, steps=steps, seed=seed, topology="pairs", attack=attack)).run() for seed in seeds]
        ratios = [end.published / base.published for end, base in zip(ends, quiet, strict=True)]
        name = f"attack_{attack.replace(' ', '_')}"
        numbers |= _spread(f"{name}_loss_ratio", ratios)
        numbers[f"{name}_refused"] = sum(end.refused for end in ends)
        numbers[f"{name}_used"] = sum(end.used_bad for end in ends)
        worst = max(worst, statistics.fmean(ratios))
        session.say(f"attack {attack}: loss × {_shown(ratios)}, refused {numbers[f'{name}_refused']}, used {numbers[f'{name}_used']}")
    return {**numbers, "attack_worst_loss_ratio": worst}


def outer_steps(session: Session) -> dict[str, object]:
    """The loss of what is published with each outer step, short rounds and long ones, and above the plain mean's at the same seed."""
    numbers: dict[str, object] = {}
    for every in EVERY:
        plain: list[End] = []
        for outer in OUTER:
            settings = [Setting(4, steps=_steps(session), every=every, topology="pairs", outer=outer, seed=s) for s in _seeds(session, 2)]
            ends = [Lab(setting).run() for setting in settings]
            plain = plain or ends
            apart = [end.published - base.published for end, base in zip(ends, plain, strict=True)]
            numbers |= _means(f"outer_{outer}_{every}", ends)
            numbers |= _spread(f"outer_{outer}_{every}_loss_delta", apart)
            session.say(f"outer {outer}, every {every}: {_shown([end.published for end in ends])}, above the plain mean {_shown(apart)}")
    return numbers


def moments(session: Session) -> dict[str, object]:
    """The loss with moments that stay local, are reset at every merge, or are averaged too; and above local ones at the same seed."""
    numbers: dict[str, object] = {}
    plain: list[End] = []
    for choice in MOMENTS:
        ends = [Lab(Setting(2, steps=_steps(session), seed=seed, moments=choice)).run() for seed in _seeds(session, 3)]
        plain = plain or ends
        apart = [end.published - base.published for end, base in zip(ends, plain, strict=True)]
        numbers |= _means(f"moments_{choice}", ends)
        numbers |= _spread(f"moments_{choice}_loss_delta", apart)
        session.say(f"moments {choice}: {_shown([end.published for end in ends])}, above local ones {_shown(apart)}")
    return numbers


def speeds(session: Session) -> dict[str, object]:
    """A fast replica and one that makes a fifth of its steps: each beside what it reaches alone, weights by tokens."""
    steps = _steps(session)
    together = Lab(Setting(2, steps=steps, slow=5))
    together.run()
    numbers: dict[str, object] = {}
    for name, index, slow in (("fast", 0, 1), ("slow", 1, 5)):
        alone = Lab(Setting(1, steps=steps, slow=slow)).run().published
        numbers[f"speeds_{name}_loss"] = together.loss(together.learners[index].published, together.heldout)
        numbers[f"speeds_{name}_alone_loss"] = alone
        session.say(f"{name} replica: {numbers[f'speeds_{name}_loss']:.4f}, alone {alone:.4f}")
    return numbers


def _steps(session: Session) -> int:
    return BRIEF_STEPS if session.brief else STEPS


def _seeds(session: Session, usual: int) -> range:
    return range(session.seeds or (1 if session.brief else usual))


def _means(name: str, ends: Sequence[End]) -> dict[str, object]:
    return {
        f"{name}_loss": statistics.fmean(end.published for end in ends),
        f"{name}_live_loss": statistics.fmean(end.live for end in ends),
        f"{name}_consensus": statistics.fmean(end.consensus for end in ends),
        f"{name}_run_bytes": statistics.fmean(end.bytes_per_round for end in ends),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, object]:
    return {name: statistics.fmean(values), f"{name}_low": min(values), f"{name}_high": max(values)}


def _shown(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4f} ({min(values):.4f} … {max(values):.4f})"
