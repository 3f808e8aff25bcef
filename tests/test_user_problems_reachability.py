"""What users of such swarms complained about, by number: peers that nobody can call and that do not know it (5)."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from blocktrain.node import proof
from blocktrain.node.addresses import parse
from blocktrain.node.join import Info
from blocktrain.node.network import Net
from blocktrain.node.reachability import Echo, Reachability, Witness, ask_back, judge
from blocktrain.protocol import ids
from blocktrain.protocol.errors import Malformed, NetworkFault
from blocktrain.protocol.ids import PeerId
from blocktrain.protocol.messages import INFO
from tests.conftest import MakeNet
from tests.swarm_kit import manifest
from tests.test_network import closed_port

GREETING = b"\x13/multistream/1.0.0\n"
A, B = (ids.peer_id_of_key(bytes([number]) * 32) for number in (1, 2))


async def witness(net: Net) -> None:
    await net.transport.serve(INFO, Info(manifest(), lambda: "{}", Witness(net.libp2p.seen_at, time.monotonic).answer).handle)


@pytest.mark.real
async def test_05_a_node_learns_from_a_peer_that_it_can_be_called(net_factory: MakeNet) -> None:
    host = await net_factory()
    await witness(host)
    joiner = await net_factory(host)
    checker = Reachability(joiner.transport, joiner.directory.addresses, lambda: [host.directory.peer], Random(1))
    keeping = asyncio.create_task(checker.keep())
    async with asyncio.timeout(30):
        while checker.verdict.word == "unknown":  # noqa: ASYNC110 the daemon and a peer must do their part
            await asyncio.sleep(0.02)
    keeping.cancel()
    assert checker.verdict.word == "direct"
    assert joiner.directory.addresses()[0] in checker.verdict.why


@pytest.mark.real
async def test_05_a_node_whose_port_nobody_can_dial_is_told_so_with_the_remedy(net_factory: MakeNet) -> None:
    host = await net_factory()
    await witness(host)
    port = closed_port()
    joiner = await net_factory(host, announce_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",))
    checker = Reachability(joiner.transport, joiner.directory.addresses, lambda: [host.directory.peer], Random(1))
    verdict = await checker.check(joiner.directory.addresses(), [host.directory.peer])
    assert verdict.word == "no"
    for words in (f"port {port}", "refused", "--announce-maddrs", "--relay"):
        assert words in verdict.why, verdict


@pytest.mark.real
async def test_05_asking_often_is_refused_so_that_nobody_is_used_to_dial(net_factory: MakeNet) -> None:
    host = await net_factory()
    await witness(host)
    joiner = await net_factory(host)
    own = joiner.directory.addresses()
    assert (await ask_back(joiner.transport, host.directory.peer, own)).reached
    with pytest.raises(NetworkFault, match="asked too often"):
        await ask_back(joiner.transport, host.directory.peer, own)


async def seen_from(*addresses: str) -> list[str]:
    return list(addresses)


def asked(addresses: Sequence[str], *seen: str) -> tuple[Witness, list[str]]:
    return Witness(lambda peer: seen_from(*seen), lambda: 0.0), list(addresses)


async def echo(wanted: Sequence[str], *seen: str) -> Echo:
    told, addresses = asked(wanted, *seen)
    from blocktrain.protocol import schema, wire

    return schema.decode(Echo, wire.unpack(await told.answer(A, addresses), 4096))


async def test_only_the_host_that_the_asker_comes_from_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled = []

    async def dial(host: str, port: int, peer: PeerId, timeout_s: float) -> str:
        assert peer == A
        dialled.append((host, port))
        return ""

    monkeypatch.setattr(proof, "answers_as", dial)
    victim, own = "/ip4/198.51.100.1/tcp/80", "/ip4/203.0.113.7/tcp/4001"
    assert not (await echo([victim], "/ip4/203.0.113.7/tcp/55555")).reached
    assert dialled == []
    assert (await echo([victim, own], "/ip4/203.0.113.7/tcp/55555")).address == own
    assert dialled == [("203.0.113.7", 4001)]
    relay = f"/ip4/203.0.113.7/tcp/1/p2p/{B}/p2p-circuit"
    assert "relay" in (await echo([own], relay)).why
    assert dialled == [("203.0.113.7", 4001)]


async def test_an_address_that_is_none_is_the_askers_fault() -> None:
    with pytest.raises(Malformed, match="not an address"):
        await Witness(lambda peer: seen_from(), lambda: 0.0).answer(A, ["nonsense"])


@pytest.mark.real
async def test_05_another_node_that_answers_at_our_address_does_not_count(net_factory: MakeNet) -> None:
    """A router forwards the port to a neighbour's node, or two containers share a host."""
    host, neighbour = await net_factory(), await net_factory()
    await witness(host)
    joiner = await net_factory(host)
    port = parse(neighbour.directory.addresses()[0], "an address").port
    assert port is not None
    for peer, why in ((neighbour.directory.peer, ""), (joiner.directory.peer, "a node with another id answers")):
        assert await proof.answers_as("127.0.0.1", port, peer, 10.0) == why
    claimed = [neighbour.directory.addresses()[0].replace(neighbour.directory.peer, joiner.directory.peer)]
    told = await ask_back(joiner.transport, host.directory.peer, claimed)
    assert not told.reached
    assert "another id" in told.why


async def test_a_listener_that_is_not_libp2p_does_not_count() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert await proof.answers_as("127.0.0.1", mute.getsockname()[1], A, 0.3) == "no answer"
    for said, why in (
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "something else"),
        (b"\x13/multi", "hung up"),
        (GREETING * 40, "something else"),
    ):

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: bytes = said) -> None:
            await reader.read(100)
            writer.write(said)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            assert why in await proof.answers_as("127.0.0.1", server.sockets[0].getsockname()[1], A, 5.0)


def certificate(extension: bytes | None) -> bytes:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    if extension is not None:
        made = made.add_extension(x509.UnrecognizedExtension(x509.ObjectIdentifier(proof.EXTENSION), extension), critical=False)
    return made.sign(key, SHA256()).public_bytes(Encoding.DER)


@pytest.mark.parametrize("extension", [None, b"", b"0", bytes(106), b"0h\x04$" + ids.peer_bytes(A)[2:] + b"\x04@" + bytes(64)])
def test_a_certificate_that_the_peers_key_did_not_sign_proves_nothing(extension: bytes | None) -> None:
    assert not proof.is_of(certificate(extension), A)


def test_bytes_that_are_no_certificate_prove_nothing() -> None:
    assert not proof.is_of(b"\x30\x03nonsense", A)


@pytest.mark.parametrize(
    ("own", "echoes", "word", "why"),
    [
        (
            ["/ip4/203.0.113.7/tcp/1"],
            [(A, Echo("203.0.113.7", False, "", "no answer")), (B, Echo("203.0.113.7", True))],
            "direct",
            "dialled",
        ),
        ([f"/ip4/203.0.113.9/tcp/1/p2p/{B}/p2p-circuit"], [(A, Echo("203.0.113.7", False))], "relay", "p2p-circuit"),
        (["/ip4/192.168.1.5/tcp/1"], [(A, Echo("203.0.113.7", False, "", "you come from 203.0.113.7"))], "no", "--announce-maddrs"),
        (["/ip4/192.168.1.5/tcp/1"], [], "unknown", "nobody"),
    ],
)
def test_the_verdict_needs_one_witness_who_reached_us(own: list[str], echoes: list[tuple[PeerId, Echo]], word: str, why: str) -> None:
    verdict = judge(own, echoes)
    assert verdict.word == word
    assert why in verdict.why
