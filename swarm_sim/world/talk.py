"""An exchange in the world: what node/exchanger.py does on both sides, as events, with the protocol's own `Exchange` and `judge`.

Each side has its own deadline and its own end. A side whose partner died sees the end of the stream; one whose partner froze or was cut off
sees nothing until a timeout. What liars send is made here, at the last moment before it travels, so their own cores stay honest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from blocktrain.protocol import acceptance, limits
from blocktrain.protocol import facts as f
from blocktrain.protocol.acceptance import FAR_BEHIND_ROUNDS
from blocktrain.protocol.errors import PeerFault, Unfit
from blocktrain.protocol.exchange import Exchange, Result
from blocktrain.protocol.ids import NO_DIGEST, Digest
from blocktrain.protocol.messages import Accept, Offer, Outcome
from blocktrain.protocol.records import MAX_ROUND
from blocktrain.swarm_sim.world.compute import Taken, Terms, digest_of, pack, unpack
from blocktrain.swarm_sim.world.links import Host

if TYPE_CHECKING:
    from blocktrain.swarm_sim.world.node import Node

OUTCOME_TIMEOUT_S: Final = 15.0  # as in node/exchanger.py
EOF_S: Final = 0.045  # until the end of a dead process's stream is seen
MARGIN: Final = 0.1  # nats per token, a node's default
LIES: Final = ("nan", "huge", "digest", "weight", "ahead", "tall", "edge")
FEW_ROUNDS: Final = 40  # a tale within what is believed
TALL: Final = 10**6


def tale(node: Node) -> int:
    """By how many rounds a node overstates what it has."""
    return {"ahead": FEW_ROUNDS, "edge": FEW_ROUNDS, "tall": TALL}.get(node.who.lies, 0)


def corrupt(lie: str, payload: bytes, digest: Digest) -> tuple[bytes, Digest]:
    """A state as a liar sends it: (bytes, the digest it claims)."""
    if lie == "nan":
        payload = b"\x00\x00\xc0\x7f" + payload[4:]
        return payload, digest_of(payload)
    if lie == "huge":
        payload = pack([number * 1e6 for number in unpack(payload)])
        return payload, digest_of(payload)
    if lie == "digest":
        return payload[::-1], digest
    return payload, digest


@dataclass(slots=True, eq=False)
class Side:
    """One side of one exchange."""

    node: Node
    exchange: Exchange
    mine: Taken
    began: float
    talk: Talk
    payload: bytes = b""  # as it is sent; a liar's is not its own state
    digest: Digest = NO_DIGEST
    reach: int = FAR_BEHIND_ROUNDS  # by the order of the one who offers
    most: int = MAX_ROUND  # of the other's round, so much counts in our merge
    stage: str = "open"  # open → swapping → settling → telling → over
    outcome: Outcome | None = None
    refusal: Result | None = None
    heard: Outcome | None = None

    @property
    def other(self) -> Side | None:
        return self.talk.responder if self is self.talk.offerer else self.talk.offerer

    def terms(self) -> Terms:
        """As this side tells them; a liar on the edge is ahead of its partner by all that is within reach."""
        node, lies = self.node, self.node.who.lies
        round = self.mine.round + tale(node)
        if lies == "edge":
            round = max(round, node.world.by_peer[self.exchange.peer].compute.round + FAR_BEHIND_ROUNDS - 1)
        return Terms(round, 1e15 if lies == "weight" else self.mine.weight, self.digest)


@dataclass(slots=True, eq=False)
class Talk:
    """Both sides. `broken`: no byte passes any more, though nobody was told."""

    offerer: Side | None = None
    responder: Side | None = None
    broken: bool = False


def _side(node: Node, peer: Node, order: f.SendOffer | f.Take, talk: Talk, *, ours: bool) -> Side:
    node.catch_up_steps()
    now = node.read_clock()
    mine = node.compute.snapshot()
    exchange = Exchange(node.peer, peer.peer, order.exchange, ours=ours, now=now, tau_s=order.deadline - now)
    side = Side(node, exchange, mine, now, talk, mine.payload, mine.digest)
    if node.who.lies:
        side.payload, side.digest = corrupt(node.who.lies, mine.payload, mine.digest)
    side.most = order.most
    node.talks[order.exchange] = side
    node.later(order.deadline - now, _deadline, side)
    return side


# ---- the offerer ----------------------------------------------------------------------------------------------------------------


def offer(node: Node, order: f.SendOffer) -> None:
    """Take a snapshot, open a stream, offer. `Ended` comes in any case, unless it is withdrawn."""
    world = node.world
    peer = world.by_peer[order.peer]
    talk = Talk()
    talk.offerer = side = _side(node, peer, order, talk, ours=True)
    side.reach = order.reach
    node.traffic.messages += 1
    node.traffic.sent_bytes += 300
    if not world.network.callable(node.number, peer.number):
        node.later(limits.OPEN_TIMEOUT_S, _silence, side, "no answer: the stream could not be opened")
        return
    way_s = world.network.way_s(node.number, peer.number)
    if not peer.up:
        node.later(2 * way_s, _silence, side, "nobody there")
        return
    peer.later(3 * way_s, _offered, peer, side)
    node.later(3 * way_s + limits.OPEN_TIMEOUT_S, _unanswered, side)


def _offered(node: Node, theirs: Side) -> None:
    """At the responder: the core's word on an offer that arrived."""
    offerer, talk = theirs.node, theirs.talk
    terms = theirs.terms()
    message = Offer(
        theirs.exchange.id, node.world.run_id, offerer.block, "block", terms.round, "bf16", min(terms.weight, 1e15),
        node.world.state_bytes,
    )  # fmt: skip
    answer: f.Take | f.Refuse | None = None
    for decision in node.decide(f.Offered(offerer.peer, message)):
        if isinstance(decision, f.Take | f.Refuse):
            answer = decision
        else:
            node.carry_out(decision)
    assert answer is not None, "the core answers every offer"
    node.traffic.messages += 1
    node.traffic.sent_bytes += 200
    if isinstance(answer, f.Take):
        talk.responder = _side(node, offerer, answer, talk, ours=False)
        talk.responder.stage = "swapping"
        if theirs.stage == "over":
            node.later(EOF_S, _silence, talk.responder, "the stream ended")
            return
    _pass(node, offerer, _answered, theirs, message, answer)


def _answered(side: Side, message: Offer, answer: f.Take | f.Refuse) -> None:
    if side.stage != "open":
        return
    node, talk = side.node, side.talk
    if isinstance(answer, f.Refuse):
        _end(side, side.exchange.declined(answer.reason, answer.retry_after_s))
        return
    theirs = talk.responder
    assert theirs is not None
    terms = theirs.terms()
    accept = Accept(side.exchange.id, terms.round, terms.weight, message.size, message.codec)
    wrong = side.exchange.accepted(accept, message, side.reach)
    if wrong:
        _end(side, side.exchange.refused(wrong, offence=True))
        return
    side.stage = "swapping"
    node.tell(f.Answered(side.exchange.id))
    _swap(side, theirs)


def withdraw(node: Node, exchange: bytes) -> None:
    """Our own offer is given up without a word to the core: it crossed one that stands."""
    side = node.talks.pop(exchange, None)
    if side is not None:
        side.stage = "over"
        _tell_other_of_end(side)
        _drop(side.talk)


# ---- both sides -----------------------------------------------------------------------------------------------------------------


def _swap(a: Side, b: Side) -> None:
    """Both snapshots travel at once. Each side is done when it has theirs and has sent its own."""
    world = a.node.world
    network, size, one, two = world.network, world.exchange_bytes, a.node.number, b.node.number
    to_b, to_a = network.flow_s(one, two, size), network.flow_s(two, one, size)
    way_s = network.way_s(one, two)
    for side in (a, b):
        network.hosts[side.node.number].flows += 1
        side.node.traffic.messages += world.exchange_frames + 1  # and the seal
        side.node.traffic.sent_bytes += size
    world.queue.at(world.queue.now + max(to_a, to_b), None, _flowed, network.hosts[one], network.hosts[two])
    a.node.later(max(way_s + to_a, to_b), _swapped, a)
    b.node.later(max(way_s + to_b, to_a), _swapped, b)


def _flowed(*hosts: Host) -> None:
    for host in hosts:
        host.flows = max(0, host.flows - 1)


def _swapped(side: Side) -> None:
    if side.stage != "swapping" or side.talk.broken:
        return
    side.stage = "settling"
    side.node.later(side.node.world.settle_s, _settle, side)


def _settle(side: Side) -> None:
    """Verify, merge, judge, adopt; then tell the other side."""
    if side.stage != "settling":
        return
    node, other = side.node, side.other
    assert other is not None
    node.catch_up_steps()
    try:
        mixed = _verified(side, other)
    except PeerFault as fault:
        side.refusal = side.exchange.refused(fault.why, offence=not isinstance(fault, Unfit))
        side.outcome = Outcome(False, NO_DIGEST, fault.why[: limits.MAX_TEXT_CHARS])
    else:
        side.exchange.judged(mixed)
        side.outcome = Outcome(True, mixed)
    if node.talks.get(side.exchange.id) is not side:
        return  # it ended while the new state was told to the core
    side.stage = "telling"
    node.later(OUTCOME_TIMEOUT_S, _no_outcome, side)
    _send_outcome(side)
    if side.heard is not None:
        _conclude(side)


def _verified(side: Side, other: Side) -> Digest:
    """Judge the merge and adopt it. Raises: PeerFault."""
    node, terms = side.node, other.terms()
    terms = replace(terms, round=min(terms.round, side.most))
    if digest_of(other.payload) != terms.digest:
        raise PeerFault("the snapshot does not have the digest that was announced", other.node.peer)
    mixed = node.compute.consider(side.mine, other.payload, terms, mine_first=side.exchange.mine_first)
    acceptance.judge(mixed.measures, MARGIN)
    if not node.compute.adopt(mixed, side.mine):
        raise PeerFault("the replica took a downloaded state during the exchange")
    for watcher in node.world.watchers.adopted:
        watcher(side, other, mixed)
    node.new_round()
    node.published("merged", other.node.peer)
    return mixed.digest


def _send_outcome(side: Side) -> None:
    side.node.traffic.messages += 1
    side.node.traffic.sent_bytes += 100
    other = side.other
    assert other is not None
    if not side.talk.broken:
        _pass(side.node, other.node, _hear, other, side.outcome)


def _hear(side: Side, outcome: Outcome) -> None:
    side.heard = outcome
    if side.stage == "telling":
        _conclude(side)


def _conclude(side: Side) -> None:
    """Our outcome is told and theirs is heard: the end, on this side."""
    assert side.heard is not None
    _end(side, side.refusal or side.exchange.heard(side.heard))


# ---- ends -----------------------------------------------------------------------------------------------------------------------


def _end(side: Side, result: Result) -> None:
    if side.stage == "over":
        return
    told = side.stage == "telling"
    side.stage = "over"
    node = side.node
    node.talks.pop(side.exchange.id, None)
    if not told:
        _tell_other_of_end(side)
    _drop(side.talk)
    peer = node.world.by_peer[side.exchange.peer]
    for watcher in node.world.watchers.ended_exchange:
        watcher(node, peer, result)
    node.tell(f.Ended(side.exchange.id, side.exchange.peer, result, node.read_clock() - side.began))


def _deadline(side: Side) -> None:
    if side.stage in ("open", "swapping"):
        _end(side, side.exchange.late())


def _unanswered(side: Side) -> None:
    if side.stage == "open":
        _end(side, side.exchange.silent("no answer"))


def _no_outcome(side: Side) -> None:
    if side.stage == "telling":
        _end(side, side.refusal or side.exchange.silent("no outcome"))


def _silence(side: Side, why: str) -> None:
    """The stream ended, or never was."""
    if side.stage in ("open", "swapping", "telling"):
        _end(side, side.refusal or side.exchange.silent(why))


def _tell_other_of_end(side: Side) -> None:
    other = side.other
    if other is not None and other.stage != "over" and not side.talk.broken:
        _pass(side.node, other.node, _silence, other, "the stream ended", extra_s=EOF_S)


def _drop(talk: Talk) -> None:
    """Where both sides are over they let go of each other: nobody collects cycles while a large world runs."""
    if all(side is None or side.stage == "over" for side in (talk.offerer, talk.responder)):
        talk.offerer = talk.responder = None


def _pass(node: Node, to: Node, call: Callable[..., None], *args: Any, extra_s: float = 0.0) -> None:
    """A message, or a stream's end, on its way; nothing arrives across a cut."""
    network = node.world.network
    if network.connected(node.number, to.number):
        to.later(network.way_s(node.number, to.number) + extra_s, call, *args)


def died(node: Node) -> None:
    """Its streams end: the other sides see it, if the host still has power."""
    for side in list(node.talks.values()):
        side.stage = "over"
        side.talk.broken = side.talk.broken or node.world.network.hosts[node.number].gone
        if side.talk.broken:
            stall(side)
        else:
            _tell_other_of_end(side)
        _drop(side.talk)


def stalled(node: Node) -> None:
    """It stops moving: the others see no byte any more."""
    for side in list(node.talks.values()):
        stall(side)


def stall(side: Side) -> None:
    side.talk.broken = True
    for end in (side, side.other):
        if end is not None and end.stage != "over":
            end.node.later(limits.STALL_TIMEOUT_S, _silence, end, "no byte for 10 s")
