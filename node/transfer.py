"""The transfer inside an exchange: our encoded snapshot out, theirs in, both at once, over as many streams as there are.

One stream carries only about a window per round trip (facts §3), so a long link needs several. The exchange's own stream is the first
lane; the offerer opens more, and both sides send on all that are up. Each lane takes the next chunk when it is free, so a slow lane
carries less and none waits for another. The receiver puts chunks where they belong and knows which are missing; nothing is decoded
before all are there and their digest is right.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from blocktrain.node.ports import Stream
from blocktrain.protocol import limits
from blocktrain.protocol.errors import Malformed, NetworkFault, PeerFault
from blocktrain.protocol.messages import Chunk, End, Outcome

CHUNK_BYTES: Final = limits.CHUNK_BYTES


class Transfer:
    """One exchange's two snapshots under way. Lanes may be added until it is over; the first that fails ends it.

    Attributes:
        theirs: the received bytes, complete when `done` returns.
        began_at: time.monotonic() of our first chunk; None before.
        outcome: what they made of it, where that overtook chunks on other lanes.
        lanes: streams that take part.
    """

    def __init__(self, payload: memoryview, size: int, streams: int = 1) -> None:
        """`streams`: how many were agreed on. Raises: Malformed: the announced size is not that of a snapshot like ours."""
        if size != len(payload):
            raise Malformed(f"a snapshot of {size} bytes; ours has {len(payload)}")
        self.theirs = np.empty(size, np.uint8).data
        self.began_at: float | None = None
        self.outcome: Outcome | None = None
        self.lanes = 0
        self._streams = streams
        self._heard_at = time.monotonic()
        self._payload = payload
        self._to_send: Iterator[int] = iter(range(0, size, CHUNK_BYTES))
        self._missing = size
        self._unsent = -(-size // CHUNK_BYTES)
        self._spans = _Spans()
        self._finished = asyncio.Event()
        self._over = asyncio.Event()
        self._fault: BaseException | None = None

    @property
    def over(self) -> bool:
        """Whether nothing moves any more: complete, failed or ended."""
        return self._finished.is_set()

    async def run(self, lane: Stream) -> None:
        """Send and receive on the exchange's own stream until both snapshots are through. Raises: NetworkFault, PeerFault."""
        await self._both(lane)
        if self._fault is not None:
            raise self._fault

    async def help(self, lane: Stream, *, closes: bool) -> None:
        """Send and receive on one more stream, and keep it open until the exchange is `end`ed.

        Args:
            closes: we opened it: we say the last word on it, and the other side hangs up.
        """
        with contextlib.suppress(NetworkFault, PeerFault):  # kept in `_fault`, and raised by `run`
            await self._both(lane)
            await self._over.wait()
            if closes:
                await lane.send(End("ok"), timeout_s=limits.OPEN_TIMEOUT_S)
            else:
                await lane.receive(timeout_s=limits.OPEN_TIMEOUT_S)

    def end(self) -> None:
        """The exchange is over, well or not: lanes may be closed. What was not through will never be."""
        self._over.set()
        self._finished.set()

    async def _both(self, lane: Stream) -> None:
        """A fault on a lane is everybody's: chunks that were under way on it are lost."""
        self.lanes += 1
        work = [
            asyncio.create_task(self._send(lane), name="exchange-send"),
            asyncio.create_task(self._receive(lane), name="exchange-receive"),
        ]
        finished = asyncio.create_task(self._finished.wait(), name="exchange-finished")
        try:
            await asyncio.wait((finished, *work), return_when=asyncio.FIRST_COMPLETED)
            while not self._finished.is_set():
                failed = [task for task in work if task.done() and task.exception() is not None]
                if failed:
                    self._fail(failed[0].exception())
                    break
                await asyncio.wait({finished, *(task for task in work if not task.done())}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (finished, *work):
                task.cancel()
            await asyncio.gather(finished, *work, return_exceptions=True)

    def _fail(self, fault: BaseException | None) -> None:
        if self._fault is None:
            self._fault = fault
        self._finished.set()

    async def _send(self, lane: Stream) -> None:
        for offset in self._to_send:
            if self.began_at is None:
                self.began_at = time.monotonic()
            await lane.send(Chunk(offset), self._payload[offset : offset + CHUNK_BYTES], timeout_s=limits.STALL_TIMEOUT_S)
            self._unsent -= 1
        self._check()

    async def _receive(self, lane: Stream) -> None:
        """Until all is there. A lane may be silent as long as others are not."""
        last = 0
        while self._missing:
            asked_at = time.monotonic()
            try:
                message, body = await lane.receive(timeout_s=limits.STALL_TIMEOUT_S, max_body=CHUNK_BYTES)
            except NetworkFault:
                now = time.monotonic()
                if now - asked_at < limits.STALL_TIMEOUT_S or now - self._heard_at >= limits.STALL_TIMEOUT_S:
                    raise
                continue
            self._heard_at = time.monotonic()
            if isinstance(message, Chunk):
                last = self._put(message, body, last)
            elif isinstance(message, Outcome) and self._streams > 1 and self.outcome is None:
                self.outcome = message
                return
            else:
                detail = f": {message.detail}" if isinstance(message, End) and message.detail else ""
                raise NetworkFault(f"{type(message).__name__} in the middle of a transfer{detail}")
        self._check()

    def _put(self, chunk: Chunk, body: memoryview, last: int) -> int:
        """Take a chunk of a lane whose chunks ended at `last`. Returns where it ends. Raises: Malformed."""
        end = chunk.offset + len(body)
        in_order = chunk.offset == last if self._streams == 1 else chunk.offset >= last
        if not body or end > len(self.theirs) or not in_order or not self._spans.add(chunk.offset, end):
            raise Malformed(f"a chunk of {len(body)} bytes at {chunk.offset} after {last}: not a missing piece of {len(self.theirs)}")
        self.theirs[chunk.offset : end] = body
        self._missing -= len(body)
        return end

    def _check(self) -> None:
        if not self._missing and not self._unsent:
            self._finished.set()


class _Spans:
    """Which bytes are there: spans that neither overlap nor touch, in order. As many as there are lanes, mostly."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> bool:
        """False: some of these bytes are there already."""
        at = bisect.bisect_right(self._begins, begin)
        if (at > 0 and self._ends[at - 1] > begin) or (at < len(self._begins) and self._begins[at] < end):
            return False
        if at > 0 and self._ends[at - 1] == begin:  # grows the span before
            at -= 1
            begin = self._begins.pop(at)
            del self._ends[at]
        if at < len(self._begins) and self._begins[at] == end:  # and may close the gap to the one behind
            del self._begins[at]
            end = self._ends.pop(at)
        self._begins.insert(at, begin)
        self._ends.insert(at, end)
        return True
