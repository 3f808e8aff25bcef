"""What addresses are to the libp2p daemon: their binary form, which of ours to hand out, which ports to try before it does.

`addresses` reads what people type; this is the other end. Pure but for `check_ports`. The binary form is py-multiaddr's, because
hivemind's own encoder garbles /p2p/.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable, Sequence

from blocktrain.node.addresses import Address, is_loopback, parse
from blocktrain.protocol.errors import Malformed, UsageError
from blocktrain.protocol.ids import PeerId


def to_bytes(text: str) -> bytes:
    """The binary form of an address that `addresses.parse` accepted."""
    from multiaddr import Multiaddr

    data: bytes = Multiaddr(text).to_bytes()
    return data


def from_bytes(data: bytes) -> str:
    """The text of a binary address. Raises: Malformed: not an address, or of a protocol that we do not use (QUIC, WebSocket …)."""
    from multiaddr import Multiaddr

    try:
        text = str(Multiaddr(data))
        parse(text, "address")
    except UsageError as error:
        raise Malformed(str(error)) from None
    except Exception as error:  # the library raises its own errors, ValueError, and now and then others
        raise Malformed(f"not a multiaddress: {type(error).__name__}") from None
    return text


def plain_reason(message: str) -> str:
    """The daemon's error in words for people. Unknown ones are shortened."""
    lowered = message.lower()
    for sign, words in (
        ("connection refused", "nobody listens there (connection refused)"),
        ("peer id mismatch", "another node answers there: its id is not the one in the address"),
        ("dial to self", "that is this node itself"),
        ("no such host", "its name does not exist"),
        ("network is unreachable", "its network is unreachable"),
        ("no route to host", "there is no route to it"),
        ("i/o timeout", "no answer"),
        ("context deadline exceeded", "no answer"),
        ("protocols not supported", "it does not speak our protocol"),
        ("negotiate security protocol", "what answers there is not a libp2p node"),
        ("routing: not found", "nobody knows where it is"),
        ("no good addresses", "its address cannot be used (does that name exist?)"),
        ("no addresses", "nobody knows where it is"),
        ("dial backoff", "it did not answer a moment ago"),
    ):
        if sign in lowered:
            return words
    return " ".join(message.split())[-150:]


def on_loopback(host_maddrs: Iterable[str], initial_peers: Iterable[str]) -> bool:
    """Whether the swarm lives on this machine only: whom we ask first is here, or, where we begin, we listen here only."""
    asked = [parse(text, "--initial-peers") for text in initial_peers]
    listening = [parse(text, "--host-maddrs") for text in host_maddrs]
    return all(is_loopback(address) for address in asked or listening)


def check_reachable(host_maddrs: Sequence[str], announce_maddrs: Sequence[str], swarm_is_loopback: bool) -> None:
    """Refuse to join a swarm on other machines while listening on loopback only. Raises: UsageError."""
    if not swarm_is_loopback and not announce_maddrs and all(is_loopback(parse(text, "--host-maddrs")) for text in host_maddrs):
        raise UsageError(
            f"--host-maddrs {' '.join(host_maddrs)}: only this machine can dial that, and the initial peers are elsewhere; "
            "listen on /ip4/0.0.0.0/tcp/0, or say with --announce-maddrs where others reach this node"
        )


def check_announce(maddrs: Iterable[str], swarm_is_loopback: bool) -> None:
    """Refuse to announce what others cannot dial: port 0, 0.0.0.0, or loopback to a swarm that is not on this machine.

    Raises: UsageError: naming the address and the flag.
    """
    for text in maddrs:
        address = parse(text, "--announce-maddrs")
        fault = ""
        if address.port == 0:
            fault = "others cannot dial port 0; give the port that reaches this node"
        elif address.host in ("0.0.0.0", "::"):
            fault = f"others cannot dial {address.host}; give this machine's outside address"
        elif is_loopback(address) and not address.relayed and not swarm_is_loopback:
            fault = "only this machine can dial it, and the swarm is not on this machine; give this machine's outside address"
        if fault:
            raise UsageError(f"--announce-maddrs {text!r}: {fault}")


def to_share(visible: Iterable[str], peer: PeerId, swarm_is_loopback: bool) -> list[str]:
    """Our addresses as others should use them, with /p2p/, the best first.

    In a swarm on this machine that is loopback; elsewhere public addresses come first, then private ones, then relays', and loopback last
    (somebody on this machine can still use it). Among equals the shorter is first. What nobody can dial is left out.
    """
    ranked: list[tuple[int, int, str]] = []
    for text in visible:
        address = parse(text, "the daemon's address")
        if address.port == 0 or address.host in ("0.0.0.0", "::"):
            continue
        ranked.append((_rank(address, swarm_is_loopback), len(text), text if text.endswith(f"/p2p/{peer}") else f"{text}/p2p/{peer}"))
    return [text for _, _, text in sorted(ranked)]


def _rank(address: Address, swarm_is_loopback: bool) -> int:
    if address.relayed:
        return 3
    if is_loopback(address):
        return 0 if swarm_is_loopback else 4
    return 1 if is_public(address.text) else 2


def is_public(text: str) -> bool:
    """Whether an address is of the open internet, as far as it tells. A name is one that somebody chose to announce."""
    address = parse(text, "an address")
    try:
        return not address.relayed and ipaddress.ip_address(address.host).is_global
    except ValueError:
        return True


def check_ports(host_maddrs: Sequence[str]) -> None:
    """Try to listen where the daemon will: it would share a port in use with its holder without a word, and dials would fail at random.

    Raises: UsageError: the port is in use (by whom, where that can be known), or the address is not this machine's.
    """
    for text in host_maddrs:
        address = parse(text, "--host-maddrs")
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, proto, _, where = found[0]
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that closed a moment ago is free
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(where)
                probe.listen(1)
        except OSError as error:
            raise UsageError(f"--host-maddrs {text}: {_why(error, address)}") from None


def _why(error: OSError, address: Address) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {address.port} is in use{_holder(address.port)}; give another port, or 0 for a free one"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"{address.host} is not an address of this machine; 0.0.0.0 listens on all it has"
    if error.errno == errno.EACCES:
        return f"this user may not listen on port {address.port}; give one above 1023"
    return f"cannot listen there: {error.strerror}"


def _holder(port: int | None) -> str:
    """` by NAME (process N)` where the system tells us."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except (psutil.Error, OSError):
        pass
    return ""
