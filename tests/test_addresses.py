"""Addresses as people type them: the good ones pass, each bad one gets a line that says how to mend it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.node import addresses
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.ids import peer_id_of_key

PEER = peer_id_of_key(bytes(range(32)))
RELAY = peer_id_of_key(bytes(32))
RSA = "QmaCpDMGvV2BGHeYERUEnRQAwe3N8SzbUtfsmvsqQLuvuJ"


@pytest.mark.parametrize(
    ("text", "host", "port", "peer"),
    [
        (f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}", "203.0.113.7", 31337, PEER),
        (f"/ip6/2001:db8::7/tcp/31337/p2p/{PEER}", "2001:db8::7", 31337, PEER),
        (f"/dns4/swarm.example/tcp/443/ipfs/{RSA}", "swarm.example", 443, RSA),
        (f"/dnsaddr/swarm.example/p2p/{PEER}", "swarm.example", None, PEER),
        (f"/ip4/203.0.113.7/tcp/1/p2p/{RELAY}/p2p-circuit/p2p/{PEER}", "203.0.113.7", 1, PEER),
        ("/ip4/0.0.0.0/tcp/0", "0.0.0.0", 0, ""),
    ],
)
def test_what_a_node_can_use_is_read_in_its_parts(text: str, host: str, port: int | None, peer: str) -> None:
    address = addresses.parse(text, "--initial-peers")
    assert (address.text, address.host, address.port, address.peer) == (text, host, port, peer)
    assert address.relayed == ("p2p-circuit" in text)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "must begin with '/'"),
        ("203.0.113.7:31337", "must begin with '/'"),
        ("/ip4/203.0.113.7/tcp/31337 ", "white space"),
        ("/ip4/203.0.113.700/tcp/1", "not an IPv4 address"),
        ("/ip6/203.0.113.7/tcp/1", "not an IPv6 address"),
        ("/ip4", "nothing follows /ip4"),
        ("/ip4/203.0.113.7", "a port must follow"),
        ("/ip4/203.0.113.7/tcp", "a port must follow"),
        ("/ip4/203.0.113.7/tcp/70000", "not a port"),
        ("/ip4/203.0.113.7/tcp/-1", "not a port"),
        ("/ip4/203.0.113.7/udp/31337/quic", "only /tcp"),
        ("/unix/tmp/socket", "begins with /unix"),
        (f"/ip4/203.0.113.7/tcp/1/p2p/{PEER[:-8]}", "cut off or damaged"),
        ("/ip4/203.0.113.7/tcp/1/p2p/12D3Koo…", "damaged"),
        ("/ip4/203.0.113.7/tcp/1/p2p", "not /p2p/ and a peer id"),
        (f"/ip4/203.0.113.7/tcp/1/p2p-circuit/p2p/{PEER}", "relay"),
    ],
)
def test_a_bad_address_is_named_with_its_flag_its_fault_and_an_example(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        addresses.parse(text, "--initial-peers")
    assert hint in str(caught.value)
    assert str(caught.value).startswith(f"--initial-peers {text!r}")
    assert addresses.EXAMPLE in str(caught.value)


def test_whom_we_call_needs_a_peer_id() -> None:
    with pytest.raises(UsageError, match="add /p2p/ and the id"):
        addresses.parse("/ip4/203.0.113.7/tcp/31337", "--initial-peers", needs_peer=True)


def test_loopback_is_told_from_the_outside() -> None:
    assert addresses.is_loopback(addresses.parse("/ip4/127.0.0.1/tcp/5", "-"))
    assert addresses.is_loopback(addresses.parse("/ip6/::1/tcp/5", "-"))
    assert addresses.is_loopback(addresses.parse("/dns4/localhost/tcp/5", "-"))
    assert not addresses.is_loopback(addresses.parse("/ip4/203.0.113.7/tcp/5", "-"))
    assert not addresses.is_loopback(addresses.parse("/dns4/swarm.example/tcp/5", "-"))


@given(st.text(alphabet="/ip46dnstcp2-irua0123456789.:", max_size=60))
def test_nothing_that_is_typed_ends_in_a_traceback(text: str) -> None:
    try:
        address = addresses.parse(text, "--initial-peers")
    except UsageError:
        return
    assert address.text == text
