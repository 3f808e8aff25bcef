"""A download of state in the world: what node/catchup.py does on both sides, as events.

Donors are asked one after the other in random order; one that is gone, busy, untrained or too old costs its time and is blamed once the
download ends, as the service does. What arrives is checked before it is applied, and a donor that lies is found out by the digest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from blocktrain.protocol import facts as f
from blocktrain.protocol import limits
from blocktrain.protocol.ids import Digest, PeerId
from blocktrain.swarm_sim.world import talk

if TYPE_CHECKING:
    from blocktrain.swarm_sim.world.node import Node

MAX_DOWNLOADS_SERVED: Final = 3  # as in node/catchup.py


@dataclass(slots=True)
class Download:
    """One order of the core, until it ends."""

    order: f.Fetch
    left: list[PeerId]
    failed: list[tuple[PeerId, str, bool]] = field(default_factory=list)


def begin(node: Node, order: f.Fetch) -> None:
    _next(node, Download(order, node.rng.sample(list(order.donors), len(order.donors))))


def _next(node: Node, download: Download) -> None:
    if not download.left:
        _end(node, download, "; ".join(why for _, why, _ in download.failed) or "no donor")
        return
    world = node.world
    peer = download.left.pop(0)
    donor = world.by_peer[peer]
    node.traffic.messages += 2
    if not world.network.callable(node.number, donor.number):
        node.later(limits.OPEN_TIMEOUT_S, _failed, node, download, peer, "no answer", False)
    elif not donor.up:
        node.later(2 * world.network.way_s(node.number, donor.number), _failed, node, download, peer, "nobody there", False)
    elif donor.frozen:
        node.later(limits.OPEN_TIMEOUT_S, _failed, node, download, peer, "no answer", False)
    else:
        way_s = 1.5 * world.network.way_s(node.number, donor.number)
        world.queue.at(world.queue.now + way_s, None, _asked, donor, donor.epoch, node, node.epoch, download)


def _asked(donor: Node, donors_epoch: int, node: Node, epoch: int, download: Download) -> None:
    """At the donor: answer with what it has, or refuse; one that died or froze meanwhile does neither."""
    if node.epoch != epoch:
        return
    world, compute = node.world, donor.compute
    way_s = world.network.way_s(donor.number, node.number)
    if donor.epoch != donors_epoch:
        node.later(way_s, _failed, node, download, donor.peer, "the stream ended", False)
        return
    if donor.frozen:
        node.later(limits.OPEN_TIMEOUT_S, _failed, node, download, donor.peer, "no answer", False)
        return
    donor.traffic.messages += 1
    round = compute.round + talk.tale(donor)
    why = ""
    if compute.round == 0:
        why = "unknown, its replica has no rounds yet"
    elif donor.serving >= MAX_DOWNLOADS_SERVED:
        why = "busy"
    elif round < download.order.round:
        why = f"its state is of round {round}, older than {download.order.round}"
    if why:
        node.later(way_s, _failed, node, download, donor.peer, why, False)
        return
    payload, digest = compute.payload, compute.digest
    if donor.who.lies:
        payload, digest = talk.corrupt(donor.who.lies, payload, digest)
    if round > download.order.most:
        node.later(
            way_s, _failed, node, download, donor.peer, f"a state of round {round}; nobody else is beyond {download.order.most}", True
        )
        return
    donor.serving += 1
    host = world.network.hosts[donor.number]
    host.flows += 1
    took_s = way_s + world.network.flow_s(donor.number, node.number, world.state_bytes)
    donor.traffic.sent_bytes += world.state_bytes
    world.queue.at(world.queue.now + took_s, None, _sent, donor, donor.epoch)
    node.later(took_s, _arrived, node, download, donor, donor.epoch, (round, digest, payload))


def _sent(donor: Node, epoch: int) -> None:
    host = donor.world.network.hosts[donor.number]
    host.flows = max(0, host.flows - 1)
    if donor.epoch == epoch:
        donor.serving = max(0, donor.serving - 1)


def _arrived(node: Node, download: Download, donor: Node, epoch: int, state: tuple[int, Digest, bytes]) -> None:
    if donor.epoch != epoch:
        _failed(node, download, donor.peer, "the stream ended", False)
        return
    if donor.frozen or not node.world.network.connected(node.number, donor.number):
        node.later(limits.STALL_TIMEOUT_S, _failed, node, download, donor.peer, "no byte for 10 s", False)
        return
    round, digest, payload = state
    node.catch_up_steps()
    if not node.compute.load(payload, round, digest):
        _failed(node, download, donor.peer, "the state does not have the digest that was announced, or is no number", True)
        return
    for watcher in node.world.watchers.loaded:
        watcher(node, donor, payload, digest)
    node.new_round()
    _blame(node, download)
    node.published("fetched", donor.peer)
    node.tell(f.FetchEnded(""))


def _failed(node: Node, download: Download, peer: PeerId, why: str, offence: bool) -> None:
    download.failed.append((peer, why, offence))
    _next(node, download)


def _end(node: Node, download: Download, why: str) -> None:
    _blame(node, download)
    node.tell(f.FetchEnded(why))


def _blame(node: Node, download: Download) -> None:
    for peer, why, offence in download.failed:
        node.tell(f.Blamed(peer, why, offence))
