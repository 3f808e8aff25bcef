"""Byte streams whose bulk is read to where it is wanted, with asyncio's reader for all else.

asyncio's `StreamReader` gives every piece that arrives memory of its own, copies it into a buffer that grows, and out of that again. A
snapshot of 100 MB is then copied four times on the event loop, and the pieces, of all sizes, leave holes all over the heap. An `Intake`
that is told where the next bytes belong lets the system write them there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, cast

LIMIT_BYTES: Final = 256 * 1024  # of what came before anybody asked for it; at twice that we stop reading
_SCRATCH_BYTES: Final = 64 * 1024

Callback = Callable[["Intake", asyncio.StreamWriter], Awaitable[None]]


class Intake(asyncio.StreamReader):
    """A `StreamReader` that can fill memory of the caller's. One read at a time."""

    if TYPE_CHECKING:  # what it uses of its base, the same since Python 3.8
        _buffer: bytearray
        _eof: bool
        _exception: BaseException | None

        def _wakeup_waiter(self) -> None: ...
        def _maybe_resume_transport(self) -> None: ...
        async def _wait_for_data(self, func_name: str) -> None: ...

    def __init__(self, limit: int = LIMIT_BYTES) -> None:
        super().__init__(limit=limit, loop=asyncio.get_running_loop())
        self._target: memoryview | None = None
        self._filled = 0

    async def fill(self, target: memoryview) -> None:
        """Write the next bytes into `target` until it is full. One that was cut off can be called again with the same target, and goes on.

        Raises: IncompleteReadError: the stream ended first. OSError: it broke.
        """
        if self._target is not target:
            assert self._target is None, "another read is not done yet"
            self._target, self._filled = target, 0
            early = min(len(self._buffer), len(target))
            self._arrived(memoryview(self._buffer)[:early])
            del self._buffer[:early]
            self._maybe_resume_transport()
        while self._filled < len(target):
            if self._exception is not None:
                raise self._exception
            if self._eof:
                raise asyncio.IncompleteReadError(bytes(target[: self._filled]), len(target))
            await self._wait_for_data("fill")
        self._target = None

    def feed_data(self, data: Any) -> None:
        """Bytes that came elsewhere: what is wanted of them goes where it belongs."""
        wanted = len(self.room() or b"")
        if wanted:
            view = memoryview(data)
            self._arrived(view[:wanted])
            data = view[wanted:]
            if not self.room():
                self._wakeup_waiter()
        if data:
            super().feed_data(data)

    def room(self) -> memoryview | None:
        """Where the next bytes belong, if anybody has said so."""
        return None if self._target is None or self._filled == len(self._target) else self._target[self._filled :]

    def came(self, count: int) -> None:
        """So many bytes were written into `room`."""
        self._filled += count
        if not self.room():
            self._wakeup_waiter()

    def _arrived(self, data: memoryview) -> None:
        assert self._target is not None
        self._target[self._filled : self._filled + len(data)] = data
        self._filled += len(data)


class _Buffered(asyncio.BufferedProtocol):
    """asyncio's protocol of streams, with the bytes taken another way."""

    def __init__(self, reader: Intake, scratch: memoryview, on_stream: Callback | None = None) -> None:
        self.streams = asyncio.StreamReaderProtocol(reader, cast(Any, on_stream), loop=asyncio.get_running_loop())
        self._reader = reader
        self._scratch = scratch
        self.connection_made = self.streams.connection_made  # type: ignore[method-assign]
        self.connection_lost = self.streams.connection_lost  # type: ignore[method-assign]
        self.pause_writing = self.streams.pause_writing  # type: ignore[method-assign]
        self.resume_writing = self.streams.resume_writing  # type: ignore[method-assign]
        self.eof_received = self.streams.eof_received  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.room() or self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._reader.room():
            self._reader.came(nbytes)
        else:
            self._reader.feed_data(self._scratch[:nbytes])


class Intakes:
    """Opens and serves streams over Unix sockets, for one event loop."""

    def __init__(self) -> None:
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))  # a read is over before the next begins

    async def open(self, path: str) -> tuple[Intake, asyncio.StreamWriter]:
        """Raises: OSError."""
        loop = asyncio.get_running_loop()
        reader = Intake()
        transport, protocol = await loop.create_unix_connection(lambda: _Buffered(reader, self._scratch), path)
        return reader, asyncio.StreamWriter(transport, protocol.streams, reader, loop)

    async def serve(self, on_stream: Callback, path: str) -> asyncio.Server:
        """`on_stream` runs as a task for every stream that somebody opens. Raises: OSError."""
        loop = asyncio.get_running_loop()
        return await loop.create_unix_server(lambda: _Buffered(Intake(), self._scratch, on_stream), path)
