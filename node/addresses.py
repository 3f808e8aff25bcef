"""Multiaddresses as people type them: checked before anything is started, with the way to mend them in the message.

Only what a node can use is allowed: TCP over IP or a name, an optional /p2p/ peer id, and circuits through a relay (the daemon's other
transports were slower or lost replies). https://github.com/multiformats/multiaddr
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from blocktrain.protocol.errors import Malformed, UsageError
from blocktrain.protocol.ids import base58_decode

EXAMPLE: Final = "/ip4/203.0.113.7/tcp/31337/p2p/12D3Koo…"
_HOSTS: Final = ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr")
_PEER_ID_BYTES: Final = range(34, 43)  # multihashes of RSA keys have 34 bytes, Ed25519 ids have 38


@dataclass(frozen=True)
class Address:
    """A multiaddress in its parts. `port` is None only for dnsaddr; `peer` is "" where none is given."""

    text: str
    host: str
    port: int | None
    peer: str
    relayed: bool = False


def parse(text: str, flag: str, *, needs_peer: bool = False) -> Address:
    """Read one multiaddress.

    Args:
        flag: the option it was given with, for the message.
        needs_peer: whether /p2p/ and a peer id must be there (whom we call), rather than may (where we listen).
    Raises: UsageError: what is wrong, and an example.
    """
    try:
        address = _parse(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text!r} is not an address: {error}; it should look like {EXAMPLE}") from error
    if needs_peer and not address.peer:
        raise UsageError(f"{flag} {text!r} has no peer id: add /p2p/ and the id that the node printed, like {EXAMPLE}")
    return address


def parse_all(texts: Iterable[str], flag: str, *, needs_peer: bool = False) -> list[Address]:
    """Read several; the first bad one is named. Raises: UsageError."""
    return [parse(text, flag, needs_peer=needs_peer) for text in texts]


def is_loopback(address: Address) -> bool:
    """Whether only this machine can dial it."""
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return address.host == "localhost"


def _parse(text: str) -> Address:
    if not text.startswith("/"):
        raise ValueError("it must begin with '/'")
    if text != text.strip() or any(char.isspace() for char in text):
        raise ValueError("it holds white space")
    outer, circuit, inner = text.partition("/p2p-circuit")
    parts = outer[1:].split("/")
    host = _host(parts)
    port = _port(parts) if parts[0] != "dnsaddr" else None
    rest = parts[4:] if port is not None else parts[2:]
    peer = _peer(rest)
    if circuit:
        if not peer:
            raise ValueError("the relay before /p2p-circuit needs its /p2p/ id")
        peer = _peer(inner[1:].split("/")) if inner else ""
    return Address(text, host, port, peer, bool(circuit))


def _host(parts: list[str]) -> str:
    if parts[0] not in _HOSTS:
        raise ValueError(f"it begins with /{parts[0]}, not with one of {', '.join('/' + kind for kind in _HOSTS)}")
    if len(parts) < 2 or not parts[1]:
        raise ValueError(f"nothing follows /{parts[0]}")
    if parts[0] in ("ip4", "ip6"):
        try:
            (ipaddress.IPv4Address if parts[0] == "ip4" else ipaddress.IPv6Address)(parts[1])
        except ValueError as error:
            raise ValueError(f"{parts[1]!r} is not an {'IPv4' if parts[0] == 'ip4' else 'IPv6'} address") from error
    return parts[1]


def _port(parts: list[str]) -> int:
    if len(parts) < 4 or not parts[3]:
        raise ValueError("/tcp/ and a port must follow the host")
    if parts[2] != "tcp":
        raise ValueError(f"/{parts[2]} is not supported, only /tcp")
    if not (parts[3].isascii() and parts[3].isdigit() and int(parts[3]) <= 65535):
        raise ValueError(f"{parts[3]!r} is not a port")
    return int(parts[3])


def _peer(rest: list[str]) -> str:
    if not rest:
        return ""
    if rest[0] not in ("p2p", "ipfs") or len(rest) != 2:
        raise ValueError(f"{'/' + '/'.join(rest)!r} is not /p2p/ and a peer id")
    try:
        raw = base58_decode(rest[1])
    except Malformed as error:
        raise ValueError(f"the peer id is damaged: {error}") from error
    # A multihash: its kind (identity or sha256), its length, and so many bytes. A cut-off id can have the length of another kind of key.
    if len(raw) not in _PEER_ID_BYTES or raw[0] not in (0x00, 0x12) or raw[1] != len(raw) - 2:
        raise ValueError(f"the peer id {rest[1]!r} is cut off or damaged")
    return rest[1]
