"""Stories by name: from a number of nodes and a source of chance to a plan. Everything random is drawn here, so it can be printed.

Sessions and absences of churn are log-normal: most stays are short and a few very long, as measured of residential peers in
file-sharing networks (Stutzbach and Rejaie, IMC 2006, find such heavy-tailed sessions); medians here are ten minutes on and five off,
with a deviation of 1.1 in the logarithm. The paper's regimes (arXiv 2606.24722, tables 4 and 5) give latency, bandwidth, dropping and
deadline as we set them, since the paper states only what came of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from blocktrain.swarm_sim.world.plan import Event, Person, Plan, Scenario

HEAL_S: Final = 240.0
END_S: Final = 600.0
ROUND_S: Final = 15.0  # short rounds: a story of ten minutes has forty of them
SESSION_S: Final = (600.0, 1.1)  # median, deviation of the logarithm
ABSENCE_S: Final = (300.0, 1.1)


def _people(n: int, rng: Random, blocks: int) -> list[Person]:
    """Ordinary homes: rounds within a fifth of each other, links from 2 to 25 MB/s up, clocks a little off."""
    return [
        Person(
            block=number % blocks,
            speed=rng.uniform(0.9, 1.1),
            up=rng.uniform(2e6, 2.5e7),
            down=rng.uniform(5e6, 5e7),
            skew_s=rng.uniform(-0.5, 0.5),
            drift=rng.uniform(-2e-5, 2e-5),
        )
        for number in range(n)
    ]


def _blocks(n: int) -> int:
    return 3 if n >= 9 else 2 if n >= 4 else 1


def _starts(n: int, rng: Random, spread_s: float) -> list[Event]:
    """The first node hosts the run; the others join within a while."""
    return [Event(0.0, "start", (0,)), *(Event(rng.uniform(1.0, 1.0 + spread_s), "start", (number,)) for number in range(1, n))]


def _plan(people: list[Person], events: list[Event], blocks: int, **other: object) -> Plan:
    events.sort(key=lambda event: event.at_s)
    base = Plan(tuple(people), tuple(events), blocks, HEAL_S, END_S, revived=tuple(range(len(people))), round_s=ROUND_S)
    return replace(base, **other)  # type: ignore[arg-type]


def calm(n: int, rng: Random) -> Plan:
    """Nothing happens."""
    blocks = _blocks(n)
    return _plan(_people(n, rng, blocks), _starts(n, rng, 30.0), blocks)


def join_storm(n: int, rng: Random) -> Plan:
    """One node has trained for two minutes, then everybody comes within two seconds."""
    blocks = _blocks(n)
    first = [Event(0.0, "start", tuple(range(blocks)))]
    return _plan(_people(n, rng, blocks), first + [Event(rng.uniform(120.0, 122.0), "start", (k,)) for k in range(blocks, n)], blocks)


def churn(n: int, rng: Random) -> Plan:
    """Everybody but the first comes and goes, as people do at home; one in five leaves politely."""
    blocks = _blocks(n)
    events = _starts(n, rng, 60.0)
    for number in range(1, n):
        at = rng.uniform(0, 60) + _lognormal(rng, SESSION_S) * rng.random()
        while at < HEAL_S:
            events.append(Event(at, "leave" if rng.random() < 0.2 else "crash", (number,)))
            at += 5.0 + _lognormal(rng, ABSENCE_S) * 0.3
            events.append(Event(at, "start", (number,)))
            at += 5.0 + _lognormal(rng, SESSION_S)
    return _plan(_people(n, rng, blocks), [event for event in events if event.at_s < HEAL_S], blocks)


def _lognormal(rng: Random, shape: tuple[float, float]) -> float:
    return float(shape[0] * 2.718281828 ** (shape[1] * rng.gauss(0, 1)))


def flash_departure(n: int, rng: Random) -> Plan:
    """Half of a block's replicas lose power at one moment, and stay away."""
    blocks = _blocks(n)
    block = rng.randrange(blocks)
    members = [number for number in range(1, n) if number % blocks == block]
    gone = tuple(sorted(rng.sample(members, len(members) // 2)))
    events = [*_starts(n, rng, 30.0), Event(rng.uniform(100, 200), "vanish", gone)]
    return _plan(_people(n, rng, blocks), events, blocks, revived=tuple(k for k in range(n) if k not in gone))


def partition(n: int, rng: Random) -> Plan:
    """The swarm is cut in two for a minute or two, once or twice."""
    blocks = _blocks(n)
    events = _starts(n, rng, 30.0)
    at = rng.uniform(60, 100)
    for _ in range(rng.randrange(1, 3)):
        side = tuple(sorted(rng.sample(range(n), rng.randrange(1, n))))
        events += [Event(at, "cut", side), Event(at + rng.uniform(20, 120), "join-net")]
        at += 130.0
    return _plan(_people(n, rng, blocks), [event for event in events if event.at_s < HEAL_S], blocks)


def freezes(n: int, rng: Random) -> Plan:
    """Processes stop for seconds or minutes and go on, as laptops do whose lid is closed."""
    blocks = _blocks(n)
    events = _starts(n, rng, 30.0)
    for _ in range(n):
        at, who = rng.uniform(40, HEAL_S - 10), (rng.randrange(1, n),)
        events += [Event(at, "freeze", who), Event(min(HEAL_S, at + rng.uniform(1, 90)), "thaw", who)]
    return _plan(_people(n, rng, blocks), events, blocks)


def slow_minority(n: int, rng: Random) -> Plan:
    """A quarter trains four times slower, over links of 100 to 400 kB/s."""
    blocks = _blocks(n)
    people = _people(n, rng, blocks)
    for number in rng.sample(range(1, n), n // 4):
        people[number] = replace(people[number], speed=4.0, up=rng.uniform(1e5, 4e5), down=rng.uniform(4e5, 1e6))
    return _plan(people, _starts(n, rng, 30.0), blocks)


def liar_minority(n: int, rng: Random) -> Plan:
    """One in five sends what it should not: no numbers, huge ones, another digest, absurd weights, rounds it never had.

    From the beginning: some joiners meet a liar as the only trained replica of their block.
    """
    blocks = _blocks(n)
    people = _people(n, rng, blocks)
    liars = rng.sample(range(1, n), max(1, n // 5))
    for number in liars:
        people[number] = replace(people[number], lies=rng.choice(["nan", "huge", "digest", "weight", "ahead", "tall"]))
    return _plan(people, _starts(n, rng, 30.0), blocks)


def rush(n: int, rng: Random) -> Plan:
    """In every block one, but for the first node, says in each exchange that it is ahead by all that is within reach."""
    blocks = _blocks(n)
    people = _people(n, rng, blocks)
    for block in range(blocks):
        members = [number for number in range(1, n) if number % blocks == block]
        if len(members) >= 3:  # of two replicas nobody can say who is right
            number = rng.choice(members)
            people[number] = replace(people[number], lies="edge")
    return _plan(people, _starts(n, rng, 30.0), blocks)


def last_replica(n: int, rng: Random) -> Plan:
    """All replicas of a block die, one after the other, and nobody takes their place."""
    blocks = max(2, _blocks(n))
    block = 1 + rng.randrange(blocks - 1) if blocks > 1 else 0
    events = _starts(n, rng, 30.0)
    members = [number for number in range(n) if number % blocks == block]
    for number in members:
        events.append(Event(rng.uniform(80, 200), "vanish" if rng.random() < 0.5 else "crash", (number,)))
    staying = tuple(number for number in range(n) if number not in members)
    return _plan(_people(n, rng, blocks), events, blocks, revived=staying, dead_blocks=(block,))


def bootstrap_gone(n: int, rng: Random) -> Plan:
    """The first node, whose address everybody was given, is gone for good; others die and come back without it."""
    blocks = _blocks(n)
    events = [*_starts(n, rng, 30.0), Event(rng.uniform(60, 90), "vanish", (0,))]
    for number in rng.sample(range(1, n), n // 3):
        at = rng.uniform(100, 180)
        events += [Event(at, "crash", (number,)), Event(at + rng.uniform(2, 40), "start", (number,))]
    return _plan(_people(n, rng, blocks), events, blocks, revived=tuple(range(1, n)))


def clock_skew(n: int, rng: Random) -> Plan:
    """Clocks are off by up to four seconds (two of them by what a node still accepts), and drift by up to a second in three hours."""
    blocks = _blocks(n)
    people = [replace(p, skew_s=rng.uniform(-4, 4), drift=rng.uniform(-1e-4, 1e-4)) for p in _people(n, rng, blocks)]
    return _plan(people, _starts(n, rng, 30.0), blocks)


def bad_links(n: int, rng: Random) -> Plan:
    """Packets are lost everywhere, and some hosts' links clog for a while."""
    blocks = _blocks(n)
    events = [*_starts(n, rng, 30.0), Event(0.0, "loss", (), rng.uniform(0.01, 0.15))]
    for _ in range(n // 2):
        at, who = rng.uniform(30, HEAL_S - 30), (rng.randrange(n),)
        events += [Event(at, "clog", who, rng.uniform(0.2, 6.0)), Event(at + rng.uniform(5, 60), "clog", who, 0.0)]
    return _plan(_people(n, rng, blocks), events, blocks)


def nat(n: int, rng: Random) -> Plan:
    """Half are behind NAT, most of them with a relay."""
    blocks = _blocks(n)
    people = _people(n, rng, blocks)
    for number in rng.sample(range(1, n), n // 2):
        people[number] = replace(people[number], nat=True, relayed=rng.random() < 0.8)
    return _plan(people, _starts(n, rng, 30.0), blocks)


def chaos(n: int, rng: Random) -> Plan:
    """Some of everything at once."""
    stories = rng.sample([churn, partition, freezes, bad_links], 3)
    plans = [story(n, rng) for story in stories]
    events = {event for plan in plans for event in plan.events if event.kind != "start" or plan is plans[0]}
    restarts = {event for plan in plans[1:] for event in plan.events if event.kind == "start" and event.at_s > 60}
    people = list(plans[0].people)
    liar = rng.randrange(1, n)
    people[liar] = replace(people[liar], lies=rng.choice(["nan", "huge", "digest", "ahead"]))
    ordered = sorted(events | restarts, key=lambda event: (event.at_s, event.kind, event.who))
    return _plan(people, ordered, plans[0].blocks)


@dataclass(frozen=True)
class Regime:
    """A setting of the paper's asynchrony experiments. Latency and jitter in seconds, rate in bytes a second, both ways."""

    latency_s: float
    rate: float
    dropped: float  # share of workers whose round never arrives
    slow: float  # rounds take up to this many times longer
    tau_s: float


REGIMES: Final = {
    "lockstep": Regime(0.001, 1e9, 0.0, 1.0, 60.0),
    "mild": Regime(0.03, 2e7, 0.02, 1.3, 20.0),
    "wan-tight": Regime(0.10, 4e6, 0.05, 1.5, 2.0),
    "wan-mid": Regime(0.10, 4e6, 0.05, 1.5, 3.5),
    "wan-loose": Regime(0.10, 4e6, 0.05, 1.5, 8.0),
    "edge-mid": Regime(0.20, 1e6, 0.12, 2.0, 18.0),
    "bad-edge": Regime(0.40, 4e5, 0.25, 3.0, 10.0),
    "bad-edge-loose": Regime(0.40, 4e5, 0.25, 3.0, 37.0),
}


def _regime(name: str) -> Scenario:
    regime = REGIMES[name]

    def story(n: int, rng: Random) -> Plan:
        blocks = _blocks(n)
        people = [
            replace(p, speed=rng.uniform(1.0, regime.slow), up=regime.rate * rng.uniform(0.7, 1.3), down=regime.rate * 2)
            for p in _people(n, rng, blocks)
        ]
        events = _starts(n, rng, 30.0)
        return _plan(
            people, events, blocks, tau_s=regime.tau_s, spread_s=2 * regime.latency_s, loss=regime.dropped / 5, hopeless=name == "bad-edge"
        )

    story.__doc__ = f"The paper's regime {name}: {regime.latency_s:g} s one way, {regime.rate:g} B/s, deadline {regime.tau_s:g} s."
    return story


SCENARIOS: Final[dict[str, Callable[[int, Random], Plan]]] = {
    "calm": calm,
    "join-storm": join_storm,
    "churn": churn,
    "flash-departure": flash_departure,
    "partition": partition,
    "freezes": freezes,
    "slow-minority": slow_minority,
    "liar-minority": liar_minority,
    "last-replica": last_replica,
    "bootstrap-gone": bootstrap_gone,
    "clock-skew": clock_skew,
    "bad-links": bad_links,
    "nat": nat,
    "chaos": chaos,
    "rush": rush,
    **{name: _regime(name) for name in REGIMES},
}
