"""Going online and staying there: initial peers that are dead, ports in use, daemons that die, halves of a swarm that find each other."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from blocktrain.node import bootstrap, daemon, dialing, leftovers, libp2p
from blocktrain.node.bootstrap import Bootstrap
from blocktrain.node.config import Network
from blocktrain.node.network import Net, open_network
from blocktrain.node.ports import Stream
from blocktrain.protocol import ids
from blocktrain.protocol.errors import DoesNotFit, Malformed, NetworkFault, Unreachable, UsageError
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.messages import INFO, Answer, Ask
from tests.conftest import LOOPBACK, MakeNet, daemons_of_this_process, sockets_of_this_process

SOMEBODY = ids.peer_id_of_key(bytes(range(32)))


@contextmanager
def listening() -> Iterator[int]:
    """A port of ours that something else than libp2p holds, and which never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def dead(port: int | None = None) -> str:
    return f"/ip4/127.0.0.1/tcp/{port or closed_port()}/p2p/{SOMEBODY}"


async def until(check: Callable[[], bool], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not check():  # noqa: ASYNC110 what is waited for is another process's doing
            await asyncio.sleep(0.02)


async def end_daemon(net: Net) -> None:
    assert net.libp2p.daemon_pid is not None
    os.kill(net.libp2p.daemon_pid, signal.SIGKILL)


# ---- initial peers --------------------------------------------------------------------------------------------------------------------


@pytest.mark.real
async def test_03_the_first_initial_peer_is_dead_and_the_second_is_enough(net_factory: MakeNet, caplog: pytest.LogCaptureFixture) -> None:
    host = await net_factory()
    caplog.clear()
    gone = dead()
    joiner = await net_factory(gone, host)
    assert host.directory.peer in joiner.libp2p.neighbours()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert lines == [f"initial peer {gone}: nobody listens there (connection refused)"]


@pytest.mark.real
async def test_02_when_all_initial_peers_are_dead_each_is_listed_with_its_reason(
    net_factory: MakeNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "TRY_TIMEOUT_S", 1.0)
    host = await net_factory()
    host_port = host.directory.addresses()[0].split("/")[4]
    with listening() as mute:
        addresses = {
            dead(): "connection refused",
            dead(mute): "no answer within 1 s",
            dead(int(host_port)): "its id is not the one in the address",
        }
        began = time.monotonic()
        with pytest.raises(Unreachable) as caught:
            await net_factory(*addresses)
    assert time.monotonic() - began < 10
    assert "\n" not in str(caught.value)
    for address, reason in addresses.items():
        assert f"{address}: " in str(caught.value)
        assert reason in str(caught.value)


@pytest.mark.real
async def test_02_told_to_wait_a_node_starts_alone_and_joins_when_its_initial_peer_comes(
    net_factory: MakeNet, new_identity: Callable[[], object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bootstrap, "CHECK_S", 0.1)
    monkeypatch.setattr(bootstrap, "PAUSE_S", 0.2)
    late, port = new_identity(), closed_port()
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{late.peer_id}"  # type: ignore[attr-defined]
    joiner = await net_factory(address, wait=True)
    assert joiner.libp2p.neighbours() == set()
    assert "starting alone" in caplog.text
    await net_factory(who=late, host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",))
    await until(lambda: late.peer_id in joiner.libp2p.neighbours())  # type: ignore[attr-defined]


@pytest.mark.real
async def test_17_two_halves_that_lost_each_other_become_one_swarm_again(net_factory: MakeNet, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 + 2 nodes, the halves' connections cut and their tables emptied: each half knows only itself, then they meet again."""
    monkeypatch.setattr(bootstrap, "CHECK_S", 0.2)
    monkeypatch.setattr(bootstrap, "PAUSE_S", 0.2)
    host = await net_factory()
    nets = [host, *[await net_factory(host) for _ in range(3)]]
    for net in nets:
        await until(lambda net=net: len(net.libp2p.neighbours()) == 3)  # type: ignore[misc]
    for here in nets[:2]:
        for there in nets[2:]:
            await forget(here, there)
            await forget(there, here)
    for net in nets:
        await until(lambda net=net: len(net.libp2p.neighbours()) == 3)  # type: ignore[misc]


async def forget(net: Net, other: Net) -> None:
    from blocktrain.node.libp2p import PeerID, p2pd_pb2

    table = net.libp2p._dht.protocol.routing_table
    node_id = table.get(peer_id=PeerID(ids.peer_bytes(other.directory.peer)))
    if node_id is not None:
        del table[node_id]
    request = p2pd_pb2.DisconnectRequest(peer=ids.peer_bytes(other.directory.peer))
    await net.libp2p._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=request), 5.0)


@pytest.mark.real
async def test_16_a_peer_that_restarted_at_another_port_is_found_by_its_announced_address(
    net_factory: MakeNet, new_identity: Callable[[], object]
) -> None:
    mover = new_identity()
    host = await net_factory()
    settings = Network(initial_peers=(host.directory.addresses()[0],), host_maddrs=LOOPBACK)
    peer = mover.peer_id  # type: ignore[attr-defined]
    async with open_network(settings, mover, Greeting(None, "t"), time.time) as first:  # type: ignore[arg-type]
        await first.transport.serve(INFO, answer)
        assert await ask(host, peer) == Answer("ping")
        before = first.directory.addresses()[0]
    async with open_network(settings, mover, Greeting(None, "t"), time.time) as second:  # type: ignore[arg-type]
        await second.transport.serve(INFO, answer)
        assert second.directory.addresses()[0] != before
        host.libp2p.learn(peer, second.directory.addresses())
        assert await ask(host, peer) == Answer("ping")


async def answer(stream: Stream) -> None:
    await stream.receive(timeout_s=5)
    await stream.send(Answer("ping"), timeout_s=5)


async def ask(net: Net, peer: ids.PeerId) -> object:
    stream = await net.transport.open(peer, INFO, timeout_s=5)
    await stream.send(Ask("ping"), timeout_s=5)
    message, _ = await stream.receive(timeout_s=5)
    await stream.close()
    return message


async def test_a_node_given_itself_as_initial_peer_says_so() -> None:
    class Links:
        peer = SOMEBODY

    with pytest.raises(Unreachable, match="that is this node itself"):
        await Bootstrap(Links(), [dead(1)]).join()  # type: ignore[arg-type]


# ---- addresses and ports --------------------------------------------------------------------------------------------------------------


async def fails(error: type[Exception], **network: object) -> str:
    """The one line with which going online is refused, before any process is started."""
    config = Network(**{"host_maddrs": LOOPBACK, **network})  # type: ignore[arg-type]
    with pytest.raises(error) as caught:
        async with open_network(config, None, Greeting(None, "t"), time.time):
            pass
    assert "\n" not in str(caught.value)
    assert daemons_of_this_process() == []
    return str(caught.value)


async def test_07_a_port_in_use_is_named_with_its_holder() -> None:
    with listening() as port:
        said = await fails(UsageError, host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",))
        assert f"port {port} is in use by" in said
        assert f"(process {os.getpid()})" in said
        said = await fails(UsageError, host_maddrs=(f"/ip4/0.0.0.0/tcp/{port}",))
        assert f"port {port} is in use" in said


@pytest.mark.real
async def test_07_two_nodes_cannot_share_a_port(net_factory: MakeNet) -> None:
    host = await net_factory()
    port = host.directory.addresses()[0].split("/")[4]
    with pytest.raises(UsageError, match=rf"port {port} is in use by p2pd \(process {host.libp2p.daemon_pid}\)"):
        await net_factory(host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",))
    assert host.directory.peer in (await net_factory(host)).libp2p.neighbours()


@pytest.mark.parametrize(
    ("network", "says"),
    [
        ({"initial_peers": ("nonsense",)}, "--initial-peers 'nonsense'"),
        ({"initial_peers": ("/ip4/127.0.0.1/tcp/1",)}, "no peer id"),
        ({"host_maddrs": ("/ip4/127.0.0.1/udp/0/quic",)}, "only /tcp"),
        ({"host_maddrs": ("/ip4/203.0.113.9/tcp/0",)}, "not an address of this machine"),
        ({"announce_maddrs": ("/ip4/127.0.0.1/tcp/0",)}, "port 0"),
        ({"announce_maddrs": ("/ip4/0.0.0.0/tcp/5",)}, "cannot dial 0.0.0.0"),
        ({"initial_peers": (f"/ip4/203.0.113.9/tcp/5/p2p/{SOMEBODY}",)}, "--host-maddrs /ip4/127.0.0.1/tcp/0: only this machine"),
        (
            {"initial_peers": (f"/ip4/203.0.113.9/tcp/5/p2p/{SOMEBODY}",), "announce_maddrs": ("/ip4/127.0.0.1/tcp/5",)},
            "--announce-maddrs '/ip4/127.0.0.1/tcp/5': only this machine",
        ),
    ],
)
async def test_06_bad_addresses_are_refused_before_anything_starts(network: dict[str, object], says: str) -> None:
    assert says in await fails(UsageError, **network)


def test_binary_addresses_are_libp2ps() -> None:
    cases = {
        "/ip4/127.0.0.1/tcp/31337": "047f000001067a69",
        "/ip6/::1/tcp/80": "2900000000000000000000000000000001060050",
        "/dns4/example.com/tcp/443": "360b6578616d706c652e636f6d0601bb",
        f"/ip4/127.0.0.1/tcp/80/p2p/{SOMEBODY}": "047f000001060050a50326" + ids.peer_bytes(SOMEBODY).hex(),
    }
    for text, data in cases.items():
        assert dialing.to_bytes(text).hex() == data
        assert dialing.from_bytes(bytes.fromhex(data)) == text
    for useless in (b"", b"\x04\x7f", b"\xff" * 40, bytes.fromhex("047f0000019102" + "1000" + "cc03")):
        with pytest.raises(Malformed):
            dialing.from_bytes(useless)
    relayed = f"/ip4/203.0.113.7/tcp/4001/p2p/{SOMEBODY}/p2p-circuit"
    assert dialing.from_bytes(dialing.to_bytes(relayed)) == relayed


def test_the_best_address_comes_first_and_what_nobody_can_dial_is_left_out() -> None:
    visible = [
        "/ip4/127.0.0.1/tcp/4000", "/ip4/192.168.1.5/tcp/4000", "/ip4/0.0.0.0/tcp/4000", "/ip4/8.8.8.8/tcp/4000", "/ip4/9.9.9.9/tcp/0",
        f"/ip4/8.8.4.4/tcp/4001/p2p/{SOMEBODY}/p2p-circuit",
    ]  # fmt: skip
    me = ids.peer_id_of_key(bytes(32))
    shared = [text.removesuffix(f"/p2p/{me}") for text in dialing.to_share(visible, me, swarm_is_loopback=False)]
    assert shared == [visible[3], visible[1], visible[5], visible[0]]
    assert dialing.to_share(visible, me, swarm_is_loopback=True)[0] == f"{visible[0]}/p2p/{me}"


# ---- the daemon -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.real
async def test_the_death_of_the_daemon_is_noticed_with_its_reason_and_nothing_hangs(net_factory: MakeNet) -> None:
    host = await net_factory()
    joiner = await net_factory(host)
    reading = asyncio.create_task(joiner.directory.read_runs(timeout_s=30))
    await end_daemon(joiner)
    async with asyncio.timeout(2):
        await joiner.died.wait()
    assert "SIGKILL" in joiner.reason
    async with asyncio.timeout(5):
        await asyncio.gather(reading, return_exceptions=True)
        with pytest.raises(NetworkFault, match="SIGKILL"):
            await joiner.transport.open(host.directory.peer, INFO, timeout_s=5)
        with pytest.raises(NetworkFault, match="SIGKILL"):
            await joiner.directory.read_runs(timeout_s=5)
    assert not host.died.is_set()


@pytest.mark.real
async def test_37_a_daemon_that_is_frozen_is_noticed_said_and_given_up_and_one_that_wakes_in_time_is_not(
    net_factory: MakeNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "HEALTH_S", 0.1)
    monkeypatch.setattr(libp2p, "CONTROL_TIMEOUT_S", 0.3)
    net = await net_factory()
    pid = net.libp2p.daemon_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: net.libp2p.silent_s > 0)
    os.kill(pid, signal.SIGCONT)
    await until(lambda: net.libp2p.silent_s == 0)
    assert not net.died.is_set()
    monkeypatch.setattr(daemon, "FROZEN_S", 1.0)
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(30):
        await net.died.wait()
    assert "has not answered for" in net.reason
    with pytest.raises(NetworkFault, match="has not answered for"):
        await net.directory.read_runs(timeout_s=5)
    async with asyncio.timeout(10):
        await net.libp2p.stop()


@pytest.mark.real
async def test_a_stop_leaves_no_process_and_no_socket_and_is_not_a_death() -> None:
    async with open_network(Network(host_maddrs=LOOPBACK), None, Greeting(None, "t"), time.time) as net:
        assert len(daemons_of_this_process()) == 1
        assert len(sockets_of_this_process()) == 2
    assert not net.died.is_set()
    assert daemons_of_this_process() == []


@pytest.mark.real
async def test_a_start_that_is_cancelled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    task = asyncio.create_task(open_network(Network(host_maddrs=LOOPBACK), None, Greeting(None, "t"), time.time).__aenter__())
    await until(lambda: len(daemons_of_this_process()) == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert daemons_of_this_process() == []


def stub(folder: Path, script: str) -> Path:
    path = folder / "p2pd"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.real
async def test_01_a_daemon_that_needs_long_to_start_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = daemon.find_binary()
    slow = stub(tmp_path, f'sleep 1.5; exec {real} "$@"')
    monkeypatch.setattr(daemon, "find_binary", lambda: slow)
    async with open_network(Network(host_maddrs=LOOPBACK), None, Greeting(None, "t"), time.time) as net:
        assert net.directory.addresses()


@pytest.mark.real
async def test_01_a_daemon_that_does_not_start_is_reported_with_its_last_words_and_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        daemon, "find_binary", lambda: stub(tmp_path, "echo reading a slow disk; trap '' TERM; while :; do sleep 0.1; done")
    )
    monkeypatch.setattr(daemon, "STOP_TIMEOUT_S", 0.2)
    said = await fails(Unreachable, daemon_start_timeout_s=0.5)
    assert "reading a slow disk" in said
    assert "--daemon-start-timeout-s" in said
    monkeypatch.setattr(daemon, "find_binary", lambda: stub(tmp_path, "echo panic: no memory >&2; exit 3"))
    said = await fails(Unreachable)
    assert "exit code 3" in said
    assert "panic: no memory" in said


async def test_13_a_machine_that_the_daemon_was_not_built_for_gets_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "p2pd"
    broken.write_bytes(b"\x7fELF" + bytes(100))
    broken.chmod(0o755)
    monkeypatch.setattr(daemon, "find_binary", lambda: broken)
    assert "does not run on" in await fails(DoesNotFit)


@pytest.mark.real
def test_a_node_that_is_killed_takes_its_daemon_with_it_and_its_sockets_are_removed_by_the_next(tmp_path: Path) -> None:
    script = """
import asyncio, os, signal, time
from blocktrain.node.config import Network
from blocktrain.node.network import open_network
from blocktrain.protocol.handshake import Greeting
async def main():
    async with open_network(Network(host_maddrs=("/ip4/127.0.0.1/tcp/0",)), None, Greeting(None, "t"), time.time) as net:
        print(net.libp2p.daemon_pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment, text=True)
    said, _ = process.communicate(timeout=60)
    orphan = int(said)
    deadline = time.monotonic() + 15
    while Path(f"/proc/{orphan}").exists() and "Z" not in Path(f"/proc/{orphan}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the daemon outlived its node"
        time.sleep(0.05)
    left = list(leftovers.SOCKETS.glob(f"hivemind-blocktrain-{process.pid}-*.sock"))
    leftovers.sweep_sockets()
    assert left
    assert not any(path.exists() for path in left)
    assert list(tmp_path.iterdir()) == [], "a temporary identity's key is nowhere but in memory"


@pytest.mark.real
def test_a_whole_exchange_of_messages_runs_under_uvloop_too() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> object:
        host_config = Network(host_maddrs=LOOPBACK)
        async with open_network(host_config, None, Greeting(None, "t"), time.time) as host:
            await host.transport.serve(INFO, answer)
            config = Network(host_maddrs=LOOPBACK, initial_peers=(host.directory.addresses()[0],))
            async with open_network(config, None, Greeting(None, "t"), time.time) as joiner:
                said = await ask(joiner, host.directory.peer)
                await end_daemon(joiner)
                async with asyncio.timeout(2):
                    await joiner.died.wait()
                return said

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == Answer("ping")


def test_going_online_needs_no_torch_and_what_people_only_read_needs_no_hivemind() -> None:
    script = """
import sys
from blocktrain.node import bootstrap, daemon, dialing, directory, identity, network, ports, transport
assert not {"hivemind", "torch"} & set(sys.modules), "imported for nothing"
from blocktrain.node import libp2p
assert "torch" not in sys.modules, "torch came with hivemind"
import logging
assert logging.getLevelName(logging.WARNING) == "WARNING", "hivemind renamed the level"
assert not logging.getLogger().handlers
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
