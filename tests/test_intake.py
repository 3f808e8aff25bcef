"""Streams whose bulk is read to where it is wanted, over real Unix sockets and uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from blocktrain.node.intake import LIMIT_BYTES, Intake, Intakes

DEADLINE_S = 20.0
DATA = random.Random(3).randbytes(5 * LIMIT_BYTES)

Ends = tuple[Intake, asyncio.StreamWriter, Intake, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[Ends]:
    """Both ends of one stream: the opener's reader and writer, and the server's."""
    served: asyncio.Queue[tuple[Intake, asyncio.StreamWriter]] = asyncio.Queue()

    async def on_stream(reader: Intake, writer: asyncio.StreamWriter) -> None:
        served.put_nowait((reader, writer))

    intakes = Intakes()
    with tempfile.TemporaryDirectory(prefix="bt-") as folder:
        path = str(Path(folder) / "s")
        server = await intakes.serve(on_stream, path)
        try:
            async with asyncio.timeout(DEADLINE_S):
                opened, (reader, writer) = await asyncio.gather(intakes.open(path), served.get())
                yield (*opened, reader, writer)
            opened[1].close()
            writer.close()
        finally:
            server.close()
            await server.wait_closed()


async def test_bulk_between_headers_arrives_where_it_is_wanted_and_nothing_is_lost():
    async with connected() as (_, writer, reader, _):
        writer.write(b"head" + DATA + b"foot")
        assert await reader.readexactly(4) == b"head"
        target = memoryview(bytearray(len(DATA)))
        await reader.fill(target)
        assert target == DATA
        assert await reader.readexactly(4) == b"foot"


async def test_both_directions_at_once():
    async with connected() as (near, near_writer, far, far_writer):
        targets = memoryview(bytearray(len(DATA))), memoryview(bytearray(len(DATA)))
        near_writer.write(DATA)
        far_writer.write(DATA[::-1])
        await asyncio.gather(near.fill(targets[0]), far.fill(targets[1]))
        assert (targets[0], targets[1]) == (DATA[::-1], DATA)


async def test_a_fill_that_was_cut_off_goes_on_where_it_was():
    async with connected() as (_, writer, reader, _):
        target = memoryview(bytearray(1000))
        writer.write(DATA[:400])
        filling = asyncio.create_task(reader.fill(target))
        while target[399] != DATA[399]:  # noqa: ASYNC110 - what arrives in memory tells nobody
            await asyncio.sleep(0)
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
        writer.write(DATA[400:1004])
        await reader.fill(target)
        assert target == DATA[:1000]
        assert await reader.readexactly(4) == DATA[1000:1004]


async def test_what_nobody_asked_for_is_bounded():
    async with connected() as (_, writer, reader, _):
        writer.transport.set_write_buffer_limits(high=0)
        writer.write(DATA)
        draining = asyncio.create_task(writer.drain())
        while len(reader._buffer) <= 2 * LIMIT_BYTES:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(reader._buffer) < 3 * LIMIT_BYTES < len(DATA)
        target = memoryview(bytearray(len(DATA)))
        await reader.fill(target)
        await draining
        assert target == DATA


async def test_an_end_in_the_middle_is_an_end():
    async with connected() as (_, writer, reader, _):
        writer.write(DATA[:10])
        writer.close()
        with pytest.raises(EOFError):
            await reader.fill(memoryview(bytearray(11)))


async def test_bytes_that_are_fed_by_hand_go_the_same_way():
    reader = Intake()
    reader.feed_data(b"ab")
    target = memoryview(bytearray(4))
    filling = asyncio.create_task(reader.fill(target))
    await asyncio.sleep(0)
    reader.feed_data(b"cdef")
    await filling
    assert target == b"abcd"
    assert await reader.readexactly(2) == b"ef"
    await reader.fill(memoryview(bytearray(0)))
