"""`blocktrain-sim bench gossip`: our exchange beside hivemind's averager, over loopback and over an emulated link, and what gossip costs.

**loopback.** Two (and four) processes of ours and as many of hivemind's `DecentralizedAverager` live at the same time and take turns, a
step each, with states of 1M, 10M and 50M parameters. Ours is the whole exchange: snapshot, offer, both transfers, digest, merge, checks,
adoption; the held-out check, which hivemind has no like of, is left out and measured as a column of its own. hivemind's step is timed from
the moment its group is complete: matchmaking is printed, and taken out. CPU seconds are those of all processes of a side, daemons
included. With four peers hivemind averages one group of four; ours needs two rounds of two pairs each for the same result.

**wan.** The same over an emulated link (link.py), ours in int8 over as many streams as the link needs.

The other parts: `train` (training speed during back-to-back exchanges, gossip_train.py); `memory` (what an exchange takes beside training,
gossip_memory.py); `codecs`, `attacks`, `outer`, `moments` and `speeds` (what they do to the loss, gossip_loss.py); `mixing` (how fast each
topology brings replicas together, gossip_mixing.py).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from blocktrain.protocol.messages import TOPOLOGIES
from blocktrain.swarm_sim import gossip_mixing
from blocktrain.swarm_sim.benches import Bench, Session
from blocktrain.swarm_sim.gossip_sides import LOCAL, Ours, Place, Sample, Theirs, open_sides

SIZES: Final = {"1m": (128, 5), "10m": (384, 6), "50m": (1024, 4)}  # width and layers of a block of about so many parameters
PAIRS: Final = {"1m": 9, "10m": 9, "50m": 5}
BRIEF_PAIRS: Final = 3
MATCH_S: Final = 15.0
PHASES: Final = ("agree", "transfer", "settle")  # of an exchange, at the offerer: to its first chunk, to "verified", to the end
RIVAL_CODECS: Final = {"fp32": None, "fp16": "fp16"}
COMPARED: Final = ("parameters", "speedup", "speedup_low", "speedup_high", "speedup_fp16", "cpu_ratio", "ours_s", "ours_cpu_s", "theirs_s",
                   "theirs_cpu_s", "ours_bytes", "matchmaking_s", *(f"ours_{phase}_s" for phase in PHASES))  # fmt: skip
ATTACKED: Final = ("nan", "million", "sign", "sign_of_the_change", "random")
KEYS: Final = {
    "loopback": tuple(f"loopback_{size}_{what}" for size in SIZES for what in (*COMPARED, "ours_heldout_s")),
    "four": tuple(f"four_10m_{what}" for what in COMPARED),
    "wan": (*(f"wan_{size}_{what}" for size in ("10m", "50m") for what in (*COMPARED, "link_share")), "wan_link_share"),
    "train": ("train_during_exchange", "train_during_exchange_low", "train_during_exchange_high", "train_during_exchange_cpu"),
    "codecs": tuple(
        f"{codec}_{what}"
        for codec in ("bf16", "int8", "sparse")
        for what in ("bytes_ratio", "loss_delta", "loss_delta_low", "loss_delta_high")
    ),
    "attacks": (*(f"attack_{name}_loss_ratio" for name in ATTACKED), "attack_worst_loss_ratio", "attack_honest_refused"),
    "outer": tuple(f"outer_{outer}_{every}_loss" for outer in ("mean", "noloco", "nesterov", "lo-fi") for every in (10, 50)),
    "moments": tuple(f"moments_{choice}_loss" for choice in ("local", "reset", "carried")),
    "speeds": ("speeds_fast_loss", "speeds_fast_alone_loss", "speeds_slow_loss", "speeds_slow_alone_loss"),
    "memory": ("exchange_memory_ratio", "between_memory_ratio"),
    "mixing": tuple(f"mixing_{topology}_{size}" for topology in TOPOLOGIES for size in gossip_mixing.SIZES),
}


@dataclass(frozen=True)
class Column:
    """Medians of one side's samples, with the spread of its wall times."""

    wall_s: float
    cpu_s: float
    low_s: float
    high_s: float

    @staticmethod
    def of(samples: Sequence[Sample]) -> Column:
        walls = [sample.wall_s for sample in samples]
        return Column(statistics.median(walls), statistics.median(s.cpu_s for s in samples), min(walls), max(walls))


def run(session: Session) -> None:
    """All parts that are wanted."""
    from blocktrain.swarm_sim import gossip_loss, gossip_memory, gossip_train

    session.measure("mixing", gossip_mixing.numbers)
    session.measure("attacks", lambda: gossip_loss.attacks(session))
    session.measure("outer", lambda: gossip_loss.outer_steps(session))
    session.measure("moments", lambda: gossip_loss.moments(session))
    session.measure("speeds", lambda: gossip_loss.speeds(session))
    session.measure("codecs", lambda: gossip_loss.codec_losses(session))
    session.measure("memory", lambda: gossip_memory.measure(session, {size: SIZES[size] for size in ("10m", "50m")}))
    session.measure("train", lambda: gossip_train.measure(session))
    session.measure("loopback", lambda: _loopback(session))
    session.measure("four", lambda: _four(session))
    session.measure("wan", lambda: _wan(session))


def _loopback(session: Session) -> Mapping[str, object]:
    numbers: dict[str, object] = {}
    for size in SIZES:
        with open_sides(session, LOCAL, 2, SIZES[size]) as (ours, theirs):
            numbers |= _compare(session, f"loopback_{size}", ours, theirs, codec="bf16", pairs=_pairs(session, size))
            numbers |= _with_heldout(f"loopback_{size}", ours)
    return numbers


def _four(session: Session) -> Mapping[str, object]:
    with open_sides(session, LOCAL, 4, SIZES["10m"]) as (ours, theirs):
        return _compare(session, "four_10m", ours, theirs, codec="bf16", pairs=_pairs(session, "10m"))


def _wan(session: Session) -> Mapping[str, object]:
    from blocktrain.swarm_sim.gossip_link import ONE_WAY_S, RATE_BYTES_PER_S, emulated

    numbers: dict[str, object] = {}
    with emulated() as ends:
        for size in ("10m", "50m"):
            session.say(f"{size} over {RATE_BYTES_PER_S * 8 / 1e6:.0f} Mbit/s, {2e3 * ONE_WAY_S:.0f} ms")
            with open_sides(session, Place(ends, ends), 2, SIZES[size]) as (ours, theirs):
                ours.rate_bytes_per_s = RATE_BYTES_PER_S
                numbers |= _compare(session, f"wan_{size}", ours, theirs, codec="int8", pairs=_pairs(session, size) if size == "10m" else 3)
                numbers[f"wan_{size}_link_share"] = statistics.median(ours.link_shares)
                numbers[f"wan_{size}_lanes"] = ours.lanes
    numbers["wan_link_share"] = numbers["wan_50m_link_share"]
    return numbers


def _pairs(session: Session, size: str) -> int:
    return BRIEF_PAIRS if session.brief else PAIRS[size]


def _compare(session: Session, name: str, ours: Ours, theirs: Theirs, *, codec: str, pairs: int) -> dict[str, object]:
    """Alternate the two sides. One pair beforehand warms both up, and lets ours see what the link carries."""
    samples: dict[str, list[Sample]] = {"ours": [], "fp32": [], "fp16": []}
    for pair in range(-1, pairs):
        steps = {"ours": lambda: ours.step(codec), "fp32": lambda: theirs.step("fp32"), "fp16": lambda: theirs.step("fp16")}
        for side in steps if pair % 2 else reversed(steps):
            sample = steps[side]()
            if pair >= 0:
                samples[side].append(sample)
        if pair < 0:
            ours.link_shares.clear()
            ours.phases.clear()
    columns = {side: Column.of(taken) for side, taken in samples.items()}
    mine, plain, half = columns["ours"], columns["fp32"], columns["fp16"]
    session.say(
        f"{name}: ours {mine.wall_s:.3f} s, {mine.cpu_s:.2f} CPU s; hivemind {plain.wall_s:.3f} s, {plain.cpu_s:.2f} CPU s; "
        f"in fp16 {half.wall_s:.3f} s"
    )
    ratios = [theirs_.wall_s / ours_.wall_s for theirs_, ours_ in zip(samples["fp32"], samples["ours"], strict=True)]
    return {
        f"{name}_parameters": ours.parameters,
        f"{name}_speedup": statistics.median(ratios),
        f"{name}_speedup_low": min(ratios),
        f"{name}_speedup_high": max(ratios),
        f"{name}_speedup_fp16": half.wall_s / mine.wall_s,
        f"{name}_cpu_ratio": plain.cpu_s / mine.cpu_s,
        f"{name}_ours_s": mine.wall_s,
        f"{name}_ours_cpu_s": mine.cpu_s,
        **{f"{name}_ours_{phase}_s": statistics.median(took) for phase, took in zip(PHASES, zip(*ours.phases, strict=True), strict=True)},
        f"{name}_ours_bytes": ours.bytes_sent,
        f"{name}_ours_peak_mib": ours.peak_mib(),
        f"{name}_theirs_s": plain.wall_s,
        f"{name}_theirs_cpu_s": plain.cpu_s,
        f"{name}_theirs_fp16_s": half.wall_s,
        f"{name}_theirs_peak_mib": theirs.peak_mib(),
        f"{name}_theirs_wrong": theirs.wrong,
        f"{name}_matchmaking_s": statistics.median(s.waited_s for s in samples["fp32"]),
    }


def _with_heldout(name: str, ours: Ours) -> dict[str, object]:
    ours.build(heldout=True)
    samples = [ours.step("bf16") for _ in range(3)]
    return {f"{name}_ours_heldout_s": statistics.median(s.wall_s for s in samples)}


# ---- hivemind's side: a process that is told by lines of JSON what to do ------------------------------------------------------------


class Rival:
    """A DHT and, for each codec, one averager of hivemind, over tensors of a block's size."""

    def __init__(self, address: str, initial_peers: Sequence[str]) -> None:
        import hivemind

        self._dht = hivemind.DHT(host_maddrs=[address], initial_peers=list(initial_peers), start=True)
        self._averagers: dict[str, Any] = {}
        self._value = 0.0
        self._control: Any = None

    def answer(self, command: dict[str, Any]) -> dict[str, object]:
        what = command.pop("do")
        answered: dict[str, object] = getattr(self, f"do_{what}")(**command)
        return answered

    def do_who(self) -> dict[str, object]:
        return {"addresses": [str(address) for address in self._dht.get_visible_maddrs()]}

    def do_build(self, parameters: int, group: int, index: int) -> dict[str, object]:
        """Fresh averagers. Tensors are of a hundredth of the state each, as a block's are many."""
        import hivemind
        import torch
        from hivemind import compression

        for averager in self._averagers.values():
            averager.shutdown()
        torch.set_num_threads(1)
        for name in RIVAL_CODECS:
            tensors = [torch.full((len(part),), float(index)) for part in torch.empty(parameters).chunk(100)]
            coding = compression.Float16Compression() if name == "fp16" else compression.NoCompression()
            self._averagers[name] = hivemind.DecentralizedAverager(
                tensors,
                self._dht,
                prefix=f"bench_{name}_{parameters}_{group}",
                target_group_size=group,
                min_group_size=group,
                min_matchmaking_time=2.0,
                request_timeout=1.0,
                compression=coding,
                start=True,
            )
        self._value = float(index)
        return {"parameters": parameters}

    def do_match(self, codec: str) -> dict[str, object]:
        """Find the group; the averaging itself waits for `do_average`."""
        from hivemind.averaging.control import AveragingStage

        if self._control is not None and not self._control.done():
            self._control.cancel()  # of a group that fell apart: the others of it look again, too
        began = time.monotonic()
        with self._averagers[codec].get_tensors() as tensors:
            for tensor in tensors:
                tensor.fill_(self._value)
        self._control = self._averagers[codec].step(wait=False, require_trigger=True, timeout=MATCH_S, allow_retries=False)
        while self._control.stage != AveragingStage.AWAITING_TRIGGER and not self._control.done():
            time.sleep(0.005)
        return {"waited_s": time.monotonic() - began, "failed": self._control.done()}

    def do_average(self, codec: str, expected: float) -> dict[str, object]:
        began = time.monotonic()
        self._control.allow_allreduce()
        self._control.result(timeout=300)
        took_s = time.monotonic() - began
        with self._averagers[codec].get_tensors() as tensors:
            worst = max(float((tensor - expected).abs().max()) for tensor in tensors)
        return {"seconds": took_s, "worst": worst}


def _main() -> int:
    from blocktrain.swarm_sim.leash import end_with_parent

    end_with_parent()
    from hivemind.p2p import P2P

    # hivemind's averagers leave sockets behind; a short path, because a socket's has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="blocktrain-rival-", dir="/tmp") as folder:
        P2P._UNIX_SOCKET_PREFIX = f"/unix{folder}/"
        rival = Rival(sys.argv[1], sys.argv[2:])
        for line in sys.stdin:
            print(json.dumps(rival.answer(json.loads(line))), flush=True)
        for averager in rival._averagers.values():
            averager.shutdown()
        rival._dht.shutdown()
    return 0


BENCH: Final = Bench("gossip", KEYS, run)

if __name__ == "__main__":
    sys.exit(_main())
