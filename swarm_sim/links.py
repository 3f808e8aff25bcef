"""What lies between the nodes of a local swarm: a links file for `blocktrain-sim local --links`, and the proxies that carry it out.

    [all]                   # every node's link
    delay_ms = 50           # one way
    jitter_ms = 10          # up to so much more, drawn for each piece
    rate_mbit = 20          # each way, for each connection; 0, or left out: any
    loss = 0.001            # share of packets lost: what is behind one waits until it was sent again

    [nodes.1b]              # other values for one node, by its name in the table; what is left out is as in [all]
    delay_ms = 300

A node listens behind a proxy (delay.py) and announces the proxy's address. A connection has the link of the node that was dialled, whoever
dials it. Files that come with blocktrain are in the folder links/ and are given by name: home, wan, edge.
"""

from __future__ import annotations

import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from blocktrain.protocol.errors import UsageError
from blocktrain.swarm_sim.delay import Emulator

READY: Final = Path(__file__).with_name("links")
MOST: Final = {"delay_ms": 10_000.0, "jitter_ms": 10_000.0, "rate_mbit": 100_000.0, "loss": 0.5}


@dataclass(frozen=True)
class Quality:
    """One link."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    rate_mbit: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True)
class Links:
    """A links file. `nodes`: a node's name → its link; everybody else has `all`."""

    all: Quality = Quality()
    nodes: Mapping[str, Quality] = field(default_factory=dict)

    def of(self, node: str) -> Quality:
        return self.nodes.get(node, self.all)


def load(given: Path) -> Links:
    """A links file, or one that comes with blocktrain by its name. Raises: UsageError: in one line, what is wrong with it."""
    path = given if given.is_file() else READY / f"{given}.toml"
    if not path.is_file():
        names = ", ".join(sorted(each.stem for each in READY.glob("*.toml")))
        raise UsageError(f"--links {given}: there is no such file; give one, or one of those that come with blocktrain: {names}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--links {given} cannot be read: {error}") from error
    unknown = [name for name in table if name not in ("all", "nodes")]
    if unknown:
        raise UsageError(f"--links {given}: {unknown[0]!r} is neither [all] nor [nodes.NAME]")
    everybody = _quality(table.get("all", {}), Quality(), f"--links {given}: [all]")
    nodes = table.get("nodes", {})
    if not isinstance(nodes, dict):
        raise UsageError(f"--links {given}: nodes must be tables, like [nodes.1b]")
    return Links(everybody, {name: _quality(values, everybody, f"--links {given}: [nodes.{name}]") for name, values in nodes.items()})


def _quality(values: Any, base: Quality, where: str) -> Quality:
    if not isinstance(values, dict):
        raise UsageError(f"{where} must be a table")
    known = [each.name for each in fields(Quality)]
    for name, value in values.items():
        if name not in known:
            raise UsageError(f"{where} has {name!r}; there are {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST[name]:
            raise UsageError(f"{where}: {name} must be a number from 0 to {MOST[name]:g}")
    return replace(base, **values)


class Wiring:
    """Puts proxies before nodes. `emulator` is their process."""

    def __init__(self, links: Links, emulator: Emulator) -> None:
        self._links = links
        self._emulator = emulator

    def flags(self, node: str) -> list[str]:
        """A node's options, so that it listens behind a new proxy with its link. A life of a node has a port of its own."""
        quality, port = self._links.of(node), _free_port()
        (front,) = self._emulator.open([port])
        self._emulator.set(
            [front],
            delay_s=quality.delay_ms / 1000,
            jitter_s=quality.jitter_ms / 1000,
            rate_bytes_per_s=quality.rate_mbit * 125_000,
            loss=quality.loss,
        )
        return ["--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}", "--announce-maddrs", f"/ip4/127.0.0.1/tcp/{front}"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
