"""`bench gossip`, part `train`: how fast a block of 10M parameters trains while its node exchanges without a pause.

Two processes: one trains, the other holds the same block and only exchanges. Windows with and without exchanges alternate; a window begins
and ends with the end of a step, so that no part of a step is lost. The ratio is that of steps per second, pair by pair. `…_cpu` is the
same per second of the machine's time that the training thread was given: it says whether the exchange, or the machine, made the
difference.
"""

from __future__ import annotations

import statistics
import time
from typing import Final

from blocktrain.swarm_sim.benches import Session
from blocktrain.swarm_sim.gossip_sides import LOCAL, Puppet
from blocktrain.swarm_sim.processes import Failure

SHAPE: Final = (384, 6)
PAIRS: Final = 9
WINDOW_S: Final = 15.0
BRIEF_PAIRS: Final = 3
BRIEF_WINDOW_S: Final = 8.0


def measure(session: Session) -> dict[str, object]:
    """The ratio, its spread, and how many exchanges went on meanwhile."""
    pairs, seconds = (BRIEF_PAIRS, BRIEF_WINDOW_S) if session.brief else (PAIRS, WINDOW_S)
    puppets: list[Puppet] = []
    try:
        trains = Puppet("gossip_peer", LOCAL.ours[0], [], session.folder / "trains.log")
        puppets.append(trains)
        partner = Puppet("gossip_peer", LOCAL.ours[0], trains.call("who")["addresses"], session.folder / "partner.log")
        puppets.append(partner)
        name = partner.call("who")["peer"]
        for index, puppet in enumerate(puppets):
            puppet.call("build", width=SHAPE[0], layers=SHAPE[1], seed=index, heldout=True)
        trains.call("train")
        trains.call("mark")
        ratios: list[float] = []
        by_thread: list[float] = []
        exchanges = 0
        for pair in range(pairs):
            rates: dict[bool, tuple[float, float]] = {}
            for busy in (True, False) if pair % 2 else (False, True):
                before = trains.call("mark")
                count = _window(trains, partner, name, seconds, busy=busy)
                after = trains.call("mark")
                steps = after["steps"] - before["steps"]
                rates[busy] = steps / (after["at"] - before["at"]), steps / (after["thread_s"] - before["thread_s"])
                exchanges += count
            ratios.append(rates[True][0] / rates[False][0])
            by_thread.append(rates[True][1] / rates[False][1])
            session.say(f"training beside exchanges, pair {pair + 1} of {pairs}: {ratios[-1]:.3f}, by thread time {by_thread[-1]:.3f}")
    finally:
        for puppet in puppets:
            puppet.stop()
    return {
        "train_during_exchange": statistics.median(ratios),
        "train_during_exchange_low": min(ratios),
        "train_during_exchange_high": max(ratios),
        "train_during_exchange_cpu": statistics.median(by_thread),
        "train_exchanges": exchanges,
    }


def _window(trains: Puppet, partner: Puppet, name: str, seconds: float, *, busy: bool) -> int:
    """Let time pass, with exchanges back to back or without. How many there were."""
    end = time.monotonic() + seconds
    if not busy:
        time.sleep(seconds)
        return 0
    count = 0
    while time.monotonic() < end:
        trains.ask("exchange", peer=name, codec="bf16")
        partner.ask("took")
        mine, theirs = trains.hear(), partner.hear()
        if (mine["kind"], theirs["kind"]) != ("merged", "merged"):
            raise Failure(f"an exchange ended as {mine['kind']}: {mine['why']}")
        count += 1
    return count
