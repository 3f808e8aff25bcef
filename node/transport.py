"""Streams of messages between peers: frames, hellos, deadlines, and the order in which two sides hang up.

Between `libp2p`, which gives raw byte streams whose other end TLS has proved, and all that exchanges messages (`ports.Stream`). Both sides
begin with a Hello: the opener sends its own and its first request at once, the responder checks, answers with its own, and only then the
handler runs. Whatever goes wrong below or in a handler becomes an `End` to the peer where that is possible, and one line here. What libp2p
demands in hanging up is handled once, in `PeerStream.close`: closing right after writing destroys what was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from blocktrain.node import logs
from blocktrain.node.intake import Intake
from blocktrain.node.ports import Buffer, Busy, Handler, UnknownState
from blocktrain.node.room import room
from blocktrain.protocol import handshake, ids, limits, messages, wire
from blocktrain.protocol.errors import BlocktrainError, Incompatible, Malformed, NetworkFault, PeerFault
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import PeerId
from blocktrain.protocol.messages import End, Hello, Message

log = logging.getLogger(__name__)

SLICE_BYTES: Final = 256 * 1024  # of a body, written at once: keeps each turn of the event loop short
WRITE_BUFFER_BYTES: Final = 1024 * 1024
LINGER_S: Final = 2.0  # how long the last writer waits for the reader to hang up …
UNDER_WAY_BYTES: Final = 2 * 1024 * 1024  # … and longer if what it wrote last can still be in buffers …
SLOWEST_BYTES_PER_S: Final = 64 * 1024  # … on a slow link
END_TIMEOUT_S: Final = 2.0  # to tell a peer that its stream ends badly
BUSY_RETRY_S: Final = 2.0  # what a peer over the bound of streams is told

Reader: TypeAlias = Intake
Writer: TypeAlias = asyncio.StreamWriter


class Wire(Protocol):
    """What `Libp2p` gives: raw streams to peers who proved their id."""

    @property
    def peer(self) -> PeerId: ...

    async def open_stream(self, peer: PeerId, kind: str, *, timeout_s: float) -> tuple[Reader, Writer]: ...

    async def handle(self, kind: str, handler: Callable[[PeerId, Reader, Writer], Awaitable[None]]) -> None: ...


@dataclass
class Traffic:
    """Bytes of frames since the start, over all streams."""

    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(frozen=True)
class Met:
    """What one hello told: to `on_hello`. `skew_s` is the peer's clock minus ours."""

    peer: PeerId
    hello: Hello
    rtt_s: float | None  # None where we were asked: the skew then holds one way's delay
    skew_s: float


class PeerStream:
    """`ports.Stream` over a pair of asyncio streams. Sending and receiving may go on at once; two sends, or two receives, may not."""

    def __init__(self, transport: Libp2pTransport, peer: PeerId, reader: Reader, writer: Writer) -> None:
        self._transport = transport
        self._peer = peer
        self._reader = reader
        self._writer = writer
        self._greeted_at: tuple[float, float] | None = None  # our hello's time, by the clock and by the monotonic one; None: done
        self._incoming: tuple[int, int] | Message | None = None  # how far a frame was read when its `receive` ran out of time
        self._body_bytes = 0
        self._body: memoryview | None = None  # of that frame, as far as it was read
        self._unanswered_bytes = 0  # written since the last frame from the other side; 0: we did not write last
        self._mid_frame = False  # we wrote part of a frame: nothing more can follow
        self._broken = False
        self._closed = False
        self.rtt_s: float | None = None
        writer.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    @property
    def peer(self) -> PeerId:
        return self._peer

    def pace(self, ahead_bytes: int) -> None:
        """Let at most about so much wait on our side to be sent before `send` waits."""
        self._writer.transport.set_write_buffer_limits(high=ahead_bytes)

    async def send(self, message: Message, body: Buffer = b"", *, timeout_s: float) -> None:
        """Write one frame. `body` must not change until the stream is closed. Raises: NetworkFault."""
        view = memoryview(body).cast("B")
        header = messages.to_frame(message, view.nbytes)
        if self._mid_frame:
            raise self._fault("was left in the middle of a message")
        self._mid_frame = True
        try:
            async with asyncio.timeout(timeout_s):
                self._write(header)
                for start in range(0, view.nbytes, SLICE_BYTES):
                    self._write(view[start : start + SLICE_BYTES])
                    await self._writer.drain()
                await self._writer.drain()
        except TimeoutError:
            raise self._fault(f"took nothing for {timeout_s:.3g} s") from None
        except OSError:
            raise self._fault("hung up") from None
        self._transport.traffic.bytes_out += len(header) + view.nbytes
        self._mid_frame = self._broken = False
        self._unanswered_bytes += len(header) + view.nbytes

    async def receive(self, *, timeout_s: float, max_body: int = 0) -> tuple[Message, memoryview]:
        """Read one frame. After a deadline that passed it can be called again. Raises: NetworkFault, Malformed, Incompatible."""
        try:
            async with asyncio.timeout(timeout_s):
                if self._greeted_at is not None:
                    early = await self._meet(*self._greeted_at)
                    self._greeted_at = None
                    if early is not None:
                        return early, memoryview(b"")
                return await self._frame(max_body)
        except TimeoutError:
            raise self._fault(f"sent nothing for {timeout_s:.3g} s") from None
        except (OSError, EOFError):
            raise self._fault("hung up") from None
        except PeerFault as fault:
            self._broken = True
            raise fault.by(self._peer) from None

    def greet(self) -> None:
        """Send our hello without waiting; the first `receive` reads and checks the other's."""
        now = self._transport.clock()
        self._greeted_at = (now, time.monotonic())
        frame = messages.to_frame(self._transport.greeting.hello(now))
        self._write(frame)
        self._transport.traffic.bytes_out += len(frame)

    async def be_greeted(self, timeout_s: float) -> None:
        """The responder's side: read the hello, answer with ours, check. Raises: NetworkFault, Malformed, Incompatible."""
        message, _ = await self.receive(timeout_s=timeout_s)
        if not isinstance(message, Hello):
            raise Malformed("the first message is not a hello", self._peer)
        now = self._transport.clock()
        ours = self._transport.greeting.hello(now)
        await self.send(ours, timeout_s=timeout_s)
        self._transport.on_hello(Met(self._peer, message, None, message.sent_at - now))
        _check(ours, message, self._peer)

    async def _meet(self, asked_at: float, asked_mono: float) -> End | None:
        """The opener's side: read and check the responder's hello. An End instead says that it has no room for us."""
        message, _ = await self._frame(0)
        if isinstance(message, End):
            return message
        if not isinstance(message, Hello):
            raise Malformed("the first message is not a hello")
        rtt_s = self.rtt_s = time.monotonic() - asked_mono
        self._transport.on_hello(Met(self._peer, message, rtt_s, handshake.skew_s(message.sent_at, asked_at, asked_at + rtt_s)))
        _check(self._transport.greeting.hello(asked_at), message, self._peer)
        return None

    async def _frame(self, max_body: int) -> tuple[Message, memoryview]:
        """What was read of a frame is kept: a receive that ran out of time loses no bytes."""
        if self._incoming is None:
            self._incoming = wire.prefix(await self._reader.readexactly(wire.PREFIX_BYTES))
        if isinstance(self._incoming, tuple):
            header_bytes, self._body_bytes = self._incoming
            header = await self._reader.readexactly(header_bytes)
            self._transport.traffic.bytes_in += wire.PREFIX_BYTES + header_bytes
            self._incoming = messages.from_header(header)
        message, body_bytes = self._incoming, self._body_bytes
        if body_bytes > max_body:
            raise Malformed(f"{type(message).__name__} with a body of {body_bytes} bytes; at most {max_body} are expected")
        if self._body is None:
            self._body = room(body_bytes)
        await self._reader.fill(self._body)
        body, self._body, self._incoming = self._body, None, None
        self._transport.traffic.bytes_in += body_bytes
        self._unanswered_bytes = 0
        return message, body

    def _write(self, data: bytes | memoryview) -> None:
        if self._closed or self._writer.transport.is_closing():
            raise ConnectionResetError
        self._writer.write(data)

    def _fault(self, what: str) -> NetworkFault:
        self._broken = True
        return NetworkFault(f"peer {ids.short(self._peer)} {what}")

    async def close(self) -> None:
        """Hang up. If we wrote last, first wait for the reader to do so, since libp2p drops what was not read yet; not for long."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._unanswered_bytes and not self._broken:
                linger_s = LINGER_S + min(self._unanswered_bytes, UNDER_WAY_BYTES) / SLOWEST_BYTES_PER_S
                with contextlib.suppress(TimeoutError, OSError):
                    async with asyncio.timeout(linger_s):
                        while await self._reader.read(SLICE_BYTES):
                            pass
        finally:
            self._hang_up()

    def drop(self) -> None:
        """Hang up at once, whatever was not read yet."""
        self._closed = True
        self._hang_up()

    def _hang_up(self) -> None:
        if self._writer.transport.get_write_buffer_size():
            self._writer.transport.abort()  # a reader that takes nothing would keep it for ever
        else:
            self._writer.close()


def _check(ours: Hello, theirs: Hello, peer: PeerId) -> None:
    try:
        handshake.check(ours, theirs)
    except Incompatible as fault:
        logs.say_once_a_minute(log, logging.WARNING, f"incompatible {peer}", f"peer {ids.short(peer)} cannot work with us: {fault.why}")
        raise fault.by(peer) from None


class Libp2pTransport:
    """`ports.Transport`. `greeting` may change when a client has chosen its run; `on_hello` must not block."""

    def __init__(
        self, libp2p: Wire, greeting: Greeting, clock: Callable[[], float], on_hello: Callable[[Met], None] = lambda met: None
    ) -> None:
        self.greeting = greeting
        self.clock = clock
        self.on_hello = on_hello
        self.traffic = Traffic()
        self._libp2p = libp2p
        self._serving: Counter[PeerId] = Counter()

    @property
    def serving(self) -> int:
        """Inbound streams that are being served."""
        return self._serving.total()

    async def open(self, peer: PeerId, kind: str, *, timeout_s: float) -> PeerStream:
        """Open a stream and send our hello. Raises: NetworkFault."""
        if peer == self._libp2p.peer:
            raise NetworkFault("a node opens no stream to itself")
        try:
            reader, writer = await self._libp2p.open_stream(peer, kind, timeout_s=timeout_s)
        except NetworkFault as fault:
            raise NetworkFault(f"peer {ids.short(peer)}: {fault}") from None
        stream = PeerStream(self, peer, reader, writer)
        try:
            stream.greet()
        except OSError:
            writer.close()
            raise NetworkFault(f"peer {ids.short(peer)} hung up") from None
        return stream

    async def serve(self, kind: str, handler: Handler) -> None:
        """Serve inbound streams of a kind from now on. Raises: NetworkFault: the daemon is gone."""

        async def inbound(peer: PeerId, reader: Reader, writer: Writer) -> None:
            await self._serve_one(PeerStream(self, peer, reader, writer), kind, handler)

        await self._libp2p.handle(kind, inbound)

    async def _serve_one(self, stream: PeerStream, kind: str, handler: Handler) -> None:
        """One inbound stream from hello to hanging up. Its place counts until it is hung up."""
        peer = stream.peer
        everybody, this_one = self._serving.total(), self._serving[peer]
        if peer == self._libp2p.peer or everybody >= 2 * limits.MAX_STREAMS_IN or this_one >= 2 * limits.MAX_STREAMS_PER_PEER:
            stream.drop()  # a flood is not even told
            return
        self._serving[peer] += 1
        try:
            try:
                if everybody >= limits.MAX_STREAMS_IN or this_one >= limits.MAX_STREAMS_PER_PEER:
                    raise Busy(BUSY_RETRY_S)
                await stream.be_greeted(limits.OPEN_TIMEOUT_S)
                await handler(stream)
            except Exception as error:
                with contextlib.suppress(NetworkFault):
                    await stream.send(ending(error, peer, kind), timeout_s=END_TIMEOUT_S)
            await stream.close()
        except asyncio.CancelledError:
            stream.drop()
            raise
        finally:
            self._serving[peer] -= 1
            if not self._serving[peer]:
                del self._serving[peer]


def ending(error: Exception, peer: PeerId, kind: str) -> End:
    """What the peer is told about a handler's failure; the log is told here, once a minute for a peer."""
    what = f"{kind.rsplit('/', 1)[-1]} stream with peer {ids.short(peer)}"
    detail = logs.one_line(str(error))[: limits.MAX_TEXT_CHARS]
    level, words = logging.INFO, f"{what}: {detail}"
    if isinstance(error, Busy):
        return End("busy", detail, error.retry_after_s)
    if isinstance(error, UnknownState):
        return End("unknown", detail)
    if isinstance(error, Incompatible):
        return End("incompatible", error.why[: limits.MAX_TEXT_CHARS])
    if isinstance(error, PeerFault):
        end, level = End("malformed", error.why[: limits.MAX_TEXT_CHARS]), logging.WARNING
    elif isinstance(error, TimeoutError | NetworkFault):
        end, words = End("late", detail), f"{what}: {detail or 'out of time'}"
    elif isinstance(error, BlocktrainError):
        end = End("refused", detail)
    else:
        end, level, words = End("failed"), logging.ERROR, f"{what}: a bug of ours: {type(error).__name__}: {detail}"
        log.debug("%s", words, exc_info=error)
    logs.say_once_a_minute(log, level, f"stream {peer}", words)
    return end
