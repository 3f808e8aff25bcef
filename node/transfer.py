"""The transfer inside an exchange: our encoded snapshot out, theirs in, both at once, over as many streams as there are.

One stream carries only about a window per round trip (facts §3), so a long link needs several. The exchange's own stream is the first
lane; the offerer opens more, and both sides send on all that are up. Each lane takes the next chunk when it is free, so a slow lane
carries less and none waits for another. Ours is encoded while it is sent. Theirs is put in order, whichever lanes its chunks came on, and
goes to the merge at once; what waits for that is bounded. Whether it is what they said shows in their Seal, and only then counts.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import time
from collections.abc import Coroutine
from typing import Any, Final

from blocktrain.node.ports import Stream, Swap
from blocktrain.protocol import limits
from blocktrain.protocol.errors import Malformed, NetworkFault, PeerFault
from blocktrain.protocol.ids import Digest
from blocktrain.protocol.messages import Chunk, End, Outcome, Seal

READY_CHUNKS: Final = 4  # encoded ahead of several lanes; half as many, which are larger, ahead of a single one
LANE_CHUNK_BYTES: Final = 128 * 1024  # where several share: what is on its way on one when the others have nothing left is waited for
LANE_AHEAD_BYTES: Final = 64 * 1024  # and so is what waits to be sent on one
WAITING_BYTES: Final = 2 * 1024 * 1024  # of theirs, not merged yet; above it we read only what can bring the next to be merged


class Transfer:
    """One exchange's two snapshots under way. Lanes may be added until it is over; the first that fails ends it.

    Attributes:
        began_at: time.monotonic() of our first chunk; None before.
        seal: the digest that they gave, when `run` has returned.
        outcome: what they made of it, where that overtook chunks on other lanes.
        lanes: streams that take part.
    """

    def __init__(self, swap: Swap, size: int, streams: int = 1) -> None:
        """`streams`: how many were agreed on. Raises: Malformed: the announced size is not that of a snapshot like ours."""
        if size != swap.size:
            raise Malformed(f"a snapshot of {size} bytes; ours has {swap.size}")
        self.size = size
        self.began_at: float | None = None
        self.seal: Digest | None = None
        self.outcome: Outcome | None = None
        self.lanes = 0
        self._swap = swap
        self._streams = streams
        self._heard_at = time.monotonic()
        self._ready: asyncio.Queue[tuple[int, memoryview] | None] = asyncio.Queue(READY_CHUNKS if streams > 1 else READY_CHUNKS // 2)
        self._unsent = size
        self._sealed = False  # we have said what ours is
        self._missing = size
        self._spans = _Spans()
        self._waiting: dict[int, memoryview] = {}  # offset → bytes of theirs
        self._waiting_bytes = 0
        self._merged = 0  # bytes of theirs that are, or are being
        self._unmerged = size
        self._came = asyncio.Event()
        self._went = asyncio.Event()
        self._finished = asyncio.Event()
        self._over = asyncio.Event()
        self._fault: BaseException | None = None

    @property
    def over(self) -> bool:
        """Whether nothing moves any more: complete, failed or ended."""
        return self._finished.is_set()

    async def run(self, lane: Stream) -> None:
        """Send and receive on the exchange's own stream until both snapshots are through and merged. Raises: NetworkFault, PeerFault."""
        self.lanes += 1
        await self._work(self._encode(), self._merge(), self._send(lane, last=True), self._receive(lane, last=True))
        if self._fault is not None:
            raise self._fault

    async def help(self, lane: Stream, *, closes: bool) -> None:
        """Send and receive on one more stream, and keep it open until the exchange is `end`ed.

        Args:
            closes: we opened it: we say the last word on it, and the other side hangs up.
        """
        self.lanes += 1
        with contextlib.suppress(NetworkFault, PeerFault):
            await self._work(self._send(lane), self._receive(lane))
            await self._over.wait()
            if closes:
                await lane.send(End("ok"), timeout_s=limits.OPEN_TIMEOUT_S)
            else:
                await lane.receive(timeout_s=limits.OPEN_TIMEOUT_S)

    def end(self) -> None:
        """The exchange is over, well or not: lanes may be closed. What was not through will never be."""
        self._over.set()
        self._finished.set()

    async def _work(self, *work: Coroutine[Any, Any, None]) -> None:
        """Until the transfer is finished. A fault of one is everybody's: chunks that were under way on a lane are lost."""
        tasks = [asyncio.create_task(each, name="exchange") for each in work]
        finished = asyncio.create_task(self._finished.wait(), name="exchange finished")
        try:
            while not self._finished.is_set():
                await asyncio.wait({finished, *(task for task in tasks if not task.done())}, return_when=asyncio.FIRST_COMPLETED)
                failed = [task for task in tasks if task.done() and task.exception() is not None]
                if failed and not self._finished.is_set():
                    self._fault = failed[0].exception()
                    self._finished.set()
        finally:
            for task in (finished, *tasks):
                task.cancel()
            await asyncio.gather(finished, *tasks, return_exceptions=True)

    def _check(self) -> None:
        if self._sealed and self.seal is not None and not self._unsent and not self._unmerged:
            self._finished.set()

    # ---- ours -------------------------------------------------------------------------------------------------------------------

    async def _encode(self) -> None:
        offset = 0
        most_bytes = limits.CHUNK_BYTES if self._streams == 1 else LANE_CHUNK_BYTES
        while data := await self._swap.give(most_bytes):
            await self._ready.put((offset, data))
            offset += len(data)
        await self._ready.put(None)

    async def _send(self, lane: Stream, *, last: bool = False) -> None:
        """Until nothing is left to send; `last`: say what it was."""
        if self._streams > 1:
            lane.pace(LANE_AHEAD_BYTES)
        while (ready := await self._ready.get()) is not None:
            if self.began_at is None:
                self.began_at = time.monotonic()
            offset, data = ready
            await lane.send(Chunk(offset), data, timeout_s=limits.STALL_TIMEOUT_S)
            self._unsent -= len(data)
        self._ready.put_nowait(None)  # for the other lanes
        if last:
            await lane.send(Seal(self._swap.digest), timeout_s=limits.STALL_TIMEOUT_S)
            self._sealed = True
        self._check()

    # ---- theirs -----------------------------------------------------------------------------------------------------------------

    async def _receive(self, lane: Stream, *, last: bool = False) -> None:
        """Until all is there; `last`: and sealed. A lane may be silent as long as others are not."""
        end = 0
        while self._missing or (last and self.seal is None):
            asked_at = time.monotonic()
            try:
                message, body = await lane.receive(timeout_s=limits.STALL_TIMEOUT_S, max_body=limits.CHUNK_BYTES)
            except NetworkFault:
                if not self._missing and (self.seal is not None or not last):
                    return  # other lanes brought the rest
                now = time.monotonic()
                if now - asked_at < limits.STALL_TIMEOUT_S or now - self._heard_at >= limits.STALL_TIMEOUT_S:
                    raise
                continue
            self._heard_at = time.monotonic()
            if isinstance(message, Chunk):
                end = self._put(message, body, end)
                del body  # it counts as waiting from here on, and not after
                await self._room(end)
            elif isinstance(message, Seal) and last and self.seal is None:
                self.seal = Digest(message.digest)
            elif isinstance(message, Outcome) and self._streams > 1 and self.seal is not None and self.outcome is None:
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
        if not body or end > self.size or not in_order or not self._spans.add(chunk.offset, end):
            raise Malformed(f"a chunk of {len(body)} bytes at {chunk.offset} after {last}: not a missing piece of {self.size}")
        self._waiting[chunk.offset] = body
        self._waiting_bytes += len(body)
        self._missing -= len(body)
        self._came.set()
        return end

    async def _room(self, last: int) -> None:
        """Wait until the merge has caught up. Where it waits for a chunk itself, the lane that brings it must go on.

        A lane's chunks are in order: one whose chunks came to `last` does not bring anything before that.
        """
        while self._waiting_bytes > WAITING_BYTES and (self._merged in self._waiting or last > self._merged):
            self._went.clear()
            await self._went.wait()

    async def _merge(self) -> None:
        while self._unmerged:
            while self._merged not in self._waiting:
                self._came.clear()
                await self._came.wait()
            data = self._waiting.pop(self._merged)
            self._merged += len(data)
            self._waiting_bytes -= len(data)
            self._went.set()
            await self._swap.take(data)
            self._unmerged -= len(data)
        self._check()


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
