"""The proxy that stands between processes of a bench: what it delays, limits and cuts, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from blocktrain.swarm_sim.delay import Emulator, Proxy


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    """A port that sends back what it gets."""
    open_now: set[asyncio.StreamWriter] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now.add(writer)
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for writer in open_now:
        writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    proxy = Proxy()
    yield proxy
    await proxy.close()


async def round_trip_s(port: int, data: bytes = b"x") -> float:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    loop = asyncio.get_running_loop()
    began = loop.time()
    writer.write(data)
    assert await asyncio.wait_for(reader.readexactly(len(data)), 20) == data
    took = loop.time() - began
    writer.close()
    return took


async def test_what_goes_through_arrives_whole_and_late(proxy: Proxy, echo: int) -> None:
    port = await proxy.open(echo)
    proxy.links[port].delay_s = 0.05
    assert await round_trip_s(port, bytes(range(256)) * 2000) >= 0.1
    proxy.links[port].delay_s = 0.2
    assert await round_trip_s(port) >= 0.4


async def test_a_rate_holds_each_way(proxy: Proxy, echo: int) -> None:
    port = await proxy.open(echo)
    proxy.links[port].rate_bytes_per_s = 1e6
    assert await round_trip_s(port, bytes(300_000)) >= 0.3


async def test_a_link_that_is_down_tells_nobody_and_delivers_when_it_is_up(proxy: Proxy, echo: int) -> None:
    port = await proxy.open(echo)
    proxy.links[port].up = False
    waiting = asyncio.create_task(round_trip_s(port))
    done, _ = await asyncio.wait({waiting}, timeout=0.1)
    assert not done
    proxy.links[port].up = True
    assert await waiting >= 0.1


async def test_a_reset_ends_connections_and_new_ones_are_taken(proxy: Proxy, echo: int) -> None:
    port = await proxy.open(echo)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"a")
    assert await reader.readexactly(1) == b"a"
    proxy.reset(port)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await asyncio.wait_for(reader.readexactly(1), 10)
    writer.close()
    await round_trip_s(port)


async def test_a_target_that_hangs_up_is_heard(proxy: Proxy) -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    port = await proxy.open(server.sockets[0].getsockname()[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    server.close()


async def test_the_process_of_its_own_takes_orders_and_ends(echo: int) -> None:
    with Emulator() as emulator:
        (port,) = await asyncio.to_thread(emulator.open, [echo])
        await asyncio.to_thread(emulator.set, [port], delay_s=0.05)
        assert await round_trip_s(port) >= 0.1
        await asyncio.to_thread(emulator.reset, [port])
    assert emulator._process.returncode == 0


async def test_a_lost_packet_holds_up_what_is_behind_it_and_all_arrives_in_order(proxy: Proxy, echo: int) -> None:
    port = await proxy.open(echo)
    proxy.links[port].delay_s = 0.01
    quick = await round_trip_s(port, bytes(range(256)) * 400)
    proxy.links[port].loss = 0.5  # of a hundred packets some are lost for certain
    assert await round_trip_s(port, bytes(range(256)) * 400) >= quick + 0.15


async def test_jitter_delays_by_up_to_so_much_more(proxy: Proxy, echo: int) -> None:
    port = await proxy.open(echo)
    proxy.links[port].jitter_s = 0.2
    took = [await round_trip_s(port) for _ in range(8)]
    assert max(took) > 0.1
    assert len({round(each, 3) for each in took}) > 1
