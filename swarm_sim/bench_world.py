"""`blocktrain-sim bench world`: what it costs to simulate a swarm, and what a swarm costs its nodes, from ten to ten thousand of them.

**hour.** Processor seconds of one virtual hour of 1,000 nodes at a real node's settings: 4 blocks, refresh 10 s, a round every 30 s,
signatures left out at their port. With --brief five virtual minutes are run, and the rest is reckoned from them.

**scale.** For each size, in a quiet swarm that has settled: messages a node sends in a round (a DHT look-up or store counts as one), the
hops of its look-ups as modelled, bytes; the time until eight replicas list a newcomer and until it has averaged; the time until nobody
lists one that lost power; the rounds until averaging takes nine tenths of a planted distance away; and the processor seconds and the memory
that all this took. 10, 100 and 1,000 nodes start within 30 virtual seconds, are left alone up to 150 and counted for two rounds.

**large.** The same for 10,000 nodes, which start within two minutes, are left alone up to 210 seconds, and are counted for one round.

**dht.** hivemind's DHT with 4, 8 and 20 real nodes in this process: requests of a look-up, and how many of them had to wait for one
another, against the model's hops.

**learning.** The paper's asynchrony regimes with small real blocks: participation and held-out loss of its coordinator and mean, and of
our gossip, on the same replicas, data and links (world/learning.py).

**seeds.** Seeds that were run under all checkers, and those that failed.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from blocktrain.swarm_sim.benches import Bench, Numbers, Session
from blocktrain.swarm_sim.world import dht, real_dht, scale, story, tables
from blocktrain.swarm_sim.world.scenarios import REGIMES
from blocktrain.swarm_sim.world.tables import REAL, SIZES

HOUR_S: Final = 3600.0
BRIEF_S: Final = 300.0
LARGE: Final = 10_000
LARGE_JOIN_S: Final = 120.0  # 83 starts a second
LARGE_SETTLED_S: Final = 210.0
SEEDS: Final = 200

_EACH: Final = (
    "messages_per_node_round",
    "lookups_per_node_round",
    "dht_hops_per_node_round",
    "bytes_per_node_round",
    "records_read_per_node_round",
)
_PROBED: Final = ("newcomer_seen_s", "newcomer_met_s", "dead_forgotten_s", "mixing_rounds")
_LEARNED: Final = ("paper_participation", "paper_loss", "gossip_participation", "gossip_loss")


def _name(regime: str) -> str:
    return regime.replace("-", "_")


KEYS: Final = {
    "hour": ("virtual_hour_1000_nodes_s", "virtual_s_run"),
    "scale": tuple(f"{key}_{size}" for size in SIZES if size < LARGE for key in (*_EACH, *_PROBED, "world_cpu_s")),
    "large": (*(f"{key}_{LARGE}" for key in (*_EACH, *_PROBED, "world_cpu_s")), "world_peak_mb"),
    "dht": tuple(f"{key}_{size}" for key in ("real_dht_requests", "real_dht_depth", "model_dht_hops") for size in REAL),
    "learning": tuple(f"{key}_{_name(regime)}" for key in _LEARNED for regime in REGIMES),
    "seeds": ("seeds_run", "seeds_failed", "seeds_s"),
}


def bench(plots: Path | None = None) -> Bench:
    """The bench. `plots`: the folder for its pictures, growth.svg and asynchrony.svg."""
    return Bench("world", KEYS, partial(_run, plots=plots))


def _run(session: Session, *, plots: Path | None) -> None:
    session.measure("seeds", lambda: _seeds(session))
    session.measure("hour", lambda: _hour(session))
    session.measure("scale", lambda: _scale(session))
    session.measure("large", lambda: _large(session))
    session.measure("dht", lambda: _dht(session))
    session.measure("learning", lambda: _learning(session))
    if plots is not None:
        try:
            for path in tables.draw(session.numbers, plots):
                session.say(f"a picture is {path}")
        except OSError as error:  # the numbers are worth more
            session.say(f"no pictures in {plots}: {error.strerror or error}; give another folder with --plots")


def _hour(session: Session) -> Numbers:
    seconds = BRIEF_S if session.brief else HOUR_S
    session.say(f"1000 nodes for {seconds:.0f} virtual seconds")
    took_s = scale.virtual_time(1000, scale.BLOCKS, seconds, 0)
    if session.brief:  # the start, which is dearer, is in it once
        start_s = scale.virtual_time(1000, scale.BLOCKS, BRIEF_S / 2, 0)
        took_s += (took_s - start_s) * (HOUR_S - BRIEF_S) / (BRIEF_S / 2)
    return {"virtual_hour_1000_nodes_s": round(took_s, 1), "virtual_s_run": seconds}


def _scale(session: Session) -> Numbers:
    numbers: dict[str, object] = {}
    for size in SIZES:
        if size < LARGE:
            session.say(f"{size} nodes")
            numbers |= _grown(size, lambda size=size: scale.grow(size, 0))  # type: ignore[misc]
    return numbers


def _large(session: Session) -> Numbers:
    session.say(f"{LARGE} nodes")
    timing = scale.Timing(LARGE_JOIN_S, LARGE_SETTLED_S, scale.ROUND_S)
    numbers = _grown(LARGE, lambda: scale.grow(LARGE, 0, probes=not session.brief, timing=timing))
    return {**numbers, "world_peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)}


def _grown(size: int, measure: Callable[[], scale.Growth]) -> dict[str, object]:
    began = time.process_time()
    grown = measure()
    values = (grown.messages, grown.lookups, grown.hops, grown.sent_bytes, grown.records_read)
    probed = (grown.seen_s, grown.met_s, grown.forgotten_s, grown.mixing_rounds)
    return {
        **{f"{key}_{size}": round(value, 2) for key, value in zip(_EACH, values, strict=True)},
        **{f"{key}_{size}": None if value is None else round(value, 1) for key, value in zip(_PROBED, probed, strict=True)},
        f"world_cpu_s_{size}": round(time.process_time() - began, 1),
    }


def _dht(session: Session) -> Numbers:
    numbers: dict[str, object] = {}
    for size in REAL:
        session.say(f"{size} real DHT nodes")
        requests, depths = asyncio.run(real_dht.measure(size))
        numbers |= {
            f"real_dht_requests_{size}": round(statistics.mean(requests), 2),
            f"real_dht_depth_{size}": round(statistics.mean(depths), 2),
            f"model_dht_hops_{size}": dht.hops(size),
        }
    return numbers


def _learning(session: Session) -> Numbers:
    from blocktrain.swarm_sim.world import learning

    size = learning.Size(blocks=1, replicas=3, rounds=6) if session.brief else learning.Size()
    numbers: dict[str, object] = {}
    for regime in REGIMES:
        row = learning.compare(regime, size, 0)
        session.say("  ".join(learning.table([row])[1].split()))
        values = (row.paper_participation, row.paper_loss, row.gossip_participation, row.gossip_loss)
        numbers |= {f"{key}_{_name(regime)}": round(value, 4) for key, value in zip(_LEARNED, values, strict=True)}
    return numbers


def _seeds(session: Session) -> Numbers:
    count = session.seeds or SEEDS
    began = time.process_time()
    failed = [verdict for verdict in story.search(0, count) if not verdict.ok]
    for verdict in failed:
        session.say(f"did not hold: {verdict.case.command()}")
    return {"seeds_run": count, "seeds_failed": len(failed), "seeds_s": round(time.process_time() - began, 1)}
