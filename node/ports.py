"""What the service needs from outside, as types. The real ones are libp2p/transport/directory, compute/ and store; tests bring twins.

All waiting has a deadline, given by the caller in seconds. Errors: `NetworkFault` (ended, late), `PeerFault` (broke the agreement).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from blocktrain.protocol.acceptance import Measures
from blocktrain.protocol.errors import BlocktrainError
from blocktrain.protocol.ids import Digest, PeerId, RunId
from blocktrain.protocol.messages import Message, Step
from blocktrain.protocol.records import Announcement, RunRecord, Seen

Buffer: TypeAlias = bytes | bytearray | memoryview


class Stream(Protocol):
    """One open stream to a peer. Hellos are exchanged and checked below this interface."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def rtt_s(self) -> float | None:
        """Round trip of the hellos; None where we were asked, and before the first `receive`."""
        ...

    def pace(self, ahead_bytes: int) -> None:
        """Let at most about so much wait on our side to be sent before `send` waits."""
        ...

    async def send(self, message: Message, body: Buffer = b"", *, timeout_s: float) -> None:
        """Write one frame. Raises: NetworkFault."""
        ...

    async def receive(self, *, timeout_s: float, max_body: int = 0) -> tuple[Message, memoryview]:
        """Read one frame; a body longer than `max_body` is a fault. An `End` is returned like any other message.

        Raises: NetworkFault: the stream ended or `timeout_s` passed. PeerFault: malformed or incompatible.
        """
        ...

    async def close(self) -> None:
        """Close our side; never raises, never waits for long. The side that received the last frame calls it first."""
        ...


Handler = Callable[[Stream], Awaitable[None]]


class Transport(Protocol):
    """Opens and serves streams."""

    async def open(self, peer: PeerId, kind: str, *, timeout_s: float) -> Stream:
        """Raises: NetworkFault: nobody there, refused, or late."""
        ...

    async def serve(self, kind: str, handler: Handler) -> None:
        """Serve inbound streams of a kind. Whatever the handler raises becomes an `End` to the peer and one log line."""
        ...


class Directory(Protocol):
    """Reads and writes signed records in the DHT. Everything returned was verified."""

    @property
    def peer(self) -> PeerId: ...

    def addresses(self) -> Sequence[str]:
        """Our multiaddrs with /p2p/, the shortest working first."""
        ...

    async def announce(self, announcement: Announcement, bucket: int, *, expires_at: float, timeout_s: float) -> bool: ...

    async def announce_run(self, record: RunRecord, *, expires_at: float, timeout_s: float) -> bool: ...

    async def read_block(self, run: RunId, block: int, bucket: int, *, timeout_s: float) -> list[Seen]: ...

    async def read_runs(self, *, timeout_s: float) -> list[tuple[PeerId, RunRecord, float]]: ...


@dataclass(frozen=True)
class Published:
    """Which state is served: the last merge, or the last own round."""

    round: int
    digest: Digest


@dataclass(frozen=True)
class Terms:
    """The other side's terms for a merge, from its Offer or Accept."""

    peer: PeerId
    round: int
    weight: float
    codec: str


@dataclass(frozen=True)
class Trial:
    """A merge that is computed and measured but not applied. `token` is the compute's own handle."""

    round: int
    digest: Digest  # of the merged state, equal on both sides
    measures: Measures
    token: object
    verified_at: float = 0.0  # time.monotonic() when their snapshot was complete and its digest right


@dataclass(frozen=True)
class Progress:
    """What training has done since the process began."""

    steps: int
    tokens: int
    loss: float | None  # running mean of the training loss, nats per token
    heldout: float | None  # this block's loss on our held-out batch, at the last published state
    tokens_per_s: float
    steps_since_merge: int
    learning_rate: float


class Swap(Protocol):
    """Our part of one exchange in compute: our live parameters at one moment on their way out, theirs on their way in, and the merge.

    Nothing of it touches the block. All work happens in compute's thread, in the order in which it was asked for.
    """

    @property
    def codec(self) -> str: ...

    @property
    def round(self) -> int: ...

    @property
    def weight(self) -> float:
        """Tokens trained since the last merge."""
        ...

    @property
    def size(self) -> int:
        """Bytes of either encoded snapshot."""
        ...

    async def give(self, most_bytes: int) -> memoryview:
        """The next bytes of our encoded snapshot, so many where its pieces are not larger; none after the last."""
        ...

    @property
    def digest(self) -> Digest:
        """blake3 of our encoded snapshot, when all of it was given."""
        ...

    def meet(self, terms: Terms, *, mine_first: bool) -> None:
        """Theirs will come under these terms. `mine_first`: our peer id is the lower one."""
        ...

    async def take(self, data: Buffer) -> None:
        """The next bytes of theirs, which are decoded and merged at once. They must not change any more. Raises: PeerFault."""
        ...

    async def finish(self, digest: Digest) -> Trial:
        """Verify that all of theirs is there and has this digest, and measure the merge. Raises: PeerFault."""
        ...


class Replica(Protocol):
    """One block in training. Methods may be called from the event loop only; work happens in compute's threads."""

    async def failed(self) -> BlocktrainError:
        """Wait until training cannot go on; the reason, for one line."""
        ...

    def published(self) -> Published: ...

    def progress(self) -> Progress: ...

    def start(self, on_round: Callable[[], None]) -> None:
        """Start training. `on_round` is called on the loop whenever H more steps passed since the last merge or own round."""
        ...

    async def begin(self, codec: str, reference: bytes = b"") -> Swap:
        """Copy the live parameters as they are now (between two steps), for one exchange. Training goes on.

        It may return when that has begun: what went wrong with the copy is then raised by the first use of it.

        Args:
            reference: for the sparse codec, the digest of the merge that both sides kept.
        Raises: PeerFault: that merge is not kept here.
        """
        ...

    def has_reference(self, reference: bytes) -> bool:
        """Whether a merge is kept, so that sparse snapshots can be relative to it."""
        ...

    async def adopt(self, trial: Trial, *, keep: bool = False) -> Published:
        """Make a trial the published state; live += merged - own encoded snapshot. `keep` it as a reference for sparse snapshots."""
        ...

    async def publish_own(self, round: int | None = None) -> Published:
        """H steps without a merge: the live parameters become the published state of round + 1; of `round`, where that is given and lower.

        Where another state is published first, that one stays and is returned.
        """
        ...

    async def load(self, payload: Buffer, round: int, digest: Digest) -> Published:
        """Replace live and published by a downloaded state; moments start at zero, with a warm-up.

        Raises: PeerFault: wrong size, digest, or not finite.
        """
        ...

    def state(self) -> tuple[Published, memoryview]:
        """The published state as bytes (fp32, little endian, parameters in name order). Immutable: safe to stream."""
        ...

    @property
    def state_bytes(self) -> int: ...

    async def save(self) -> None:
        """Write a checkpoint through the store."""
        ...

    async def stop(self) -> None:
        """Stop both threads after the step in hand."""
        ...


class Server(Protocol):
    """The published state at work: sweeps, on a thread of its own with its own weights, so that no step of training delays them."""

    def refresh(self, published: Published, state: memoryview) -> None:
        """Serve this state from now on. Sessions that are open stay pinned to theirs while it is kept (a few are)."""
        ...

    async def open(self, session: bytes, digest: Digest) -> Published:
        """A session with its own key/value cache. All zeros for `digest`: the newest state.

        Raises: UnknownState: we do not have that state (any more). Busy: too many sessions.
        """
        ...

    async def step(self, session: bytes, step: Step, body: memoryview) -> tuple[Step, bytes]:
        """Our block's part of a traversal: the step and body for the next holder. Drafts where the step asks for it.

        Raises: PeerFault: sizes that do not fit the model or the session. UnknownState: the session is not open (any more).
        """
        ...

    def close(self, session: bytes) -> None: ...

    def sessions(self) -> int: ...

    async def stop(self) -> None: ...


class Busy(Exception):
    """No room for another session; `retry_after_s` says when to ask again."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"busy, try again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class UnknownState(Exception):
    """The state asked for is not kept here (any more)."""
