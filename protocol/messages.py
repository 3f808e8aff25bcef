"""Every message between two nodes, and the only way in and out of bytes.

A stream begins with `Hello` from both sides (the opener sends its first request right behind it, without waiting) and ends with `End`
from the side that finishes last; whoever receives the last frame closes first (facts §3). Five kinds of stream:

  /blocktrain/1/info      Ask → Answer (body: manifest, or status as JSON)
  /blocktrain/1/exchange  Offer → Accept | Decline; then Chunk… and Seal, Outcome, both ways at once            (protocol/exchange.py)
                          Lane: more streams for the chunks of an accepted exchange; Chunk… both ways; End
  /blocktrain/1/state     Want → Have | End; Chunk…; End
  /blocktrain/1/sweep     Open → Ready | End; Step → Scored, as often as wanted; Close → End                   (protocol/sweep.py)
  /blocktrain/1/link      Link → Ready | End; Step … : holder to holder, inside a session

A message is a frozen dataclass; its tag and fields are the frame's header, tensors are the frame's body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from blocktrain.protocol import limits, schema, wire
from blocktrain.protocol.errors import Malformed
from blocktrain.protocol.ids import DIGEST_BYTES, RunId
from blocktrain.protocol.records import MAX_ROUND
from blocktrain.protocol.schema import Bool, Choice, Float, Int, Many, Raw, Text

INFO: Final = "/blocktrain/1/info"
EXCHANGE: Final = "/blocktrain/1/exchange"
STATE: Final = "/blocktrain/1/state"
SWEEP: Final = "/blocktrain/1/sweep"
LINK: Final = "/blocktrain/1/link"
STREAMS: Final = (INFO, EXCHANGE, STATE, SWEEP, LINK)

CODECS: Final = ("fp32", "bf16", "int8", "sparse")
QUESTIONS: Final = ("manifest", "status", "ping", "dial-back")
PARTS: Final = ("block", "shared")
TOPOLOGIES: Final = ("pairs", "ring", "expander", "small-world", "full")

_RUN = Raw(DIGEST_BYTES, DIGEST_BYTES)
_DIGEST = Raw(DIGEST_BYTES, DIGEST_BYTES)
_ID = Raw(16, 16)
_WORDS = Text(limits.MAX_TEXT_CHARS)
_ROUND = Int(0, MAX_ROUND)
_BLOCK = Int(0, limits.MAX_BLOCKS - 1)
_SIZE = Int(0, limits.MAX_STATE_BYTES)
_TOKENS = Raw(limits.MAX_TOKEN_BYTES)
_PLACE = Int(0, 2**31 - 1)  # a position in a text


@dataclass(frozen=True)
class Hello:
    """First frame of both sides. `run` is empty where a client does not know one yet."""

    protocol_min: int = schema.field(Int(1, 1_000_000))
    protocol_max: int = schema.field(Int(1, 1_000_000))
    run: bytes = schema.field(Raw(DIGEST_BYTES))
    sigma: tuple[float, ...] = schema.field(Many(Float(0.0, 1e6), 2))  # lowest and highest edge, so that a mismatch has a name
    sent_at: float = schema.field(Float(0.0, 1e12))  # the sender's clock, Unix seconds
    agent: str = schema.field(Text(64), "")
    topology: str = schema.field(Text(20), "pairs")


@dataclass(frozen=True)
class End:
    """Last frame of a stream, or a refusal. `reason` is a word for machines, `detail` a line for people."""

    reason: str = schema.field(Choice(("ok", "busy", "refused", "malformed", "incompatible", "unknown", "late", "gone", "failed")))
    detail: str = schema.field(_WORDS, "")
    retry_after_s: float = schema.field(Float(0.0, 3600.0), 0.0)


@dataclass(frozen=True)
class Ask:
    """A question about the node. "dial-back": can you dial me at these addresses? (reachability.py)"""

    what: str = schema.field(Choice(QUESTIONS))
    addresses: tuple[str, ...] = schema.field(Many(Text(limits.MAX_WHOLE_ADDRESS_CHARS), limits.MAX_ADDRESSES), ())


@dataclass(frozen=True)
class Answer:
    """Body: the manifest's canonical bytes, a status as JSON, what came of dialling back, or nothing for a ping."""

    what: str = schema.field(Choice(QUESTIONS))


@dataclass(frozen=True)
class Offer:
    """Proposes an exchange. The snapshot was taken; it is encoded while it is sent, so its digest comes last, in a Seal."""

    exchange: bytes = schema.field(_ID)  # drawn by the offerer
    run: RunId = schema.field(_RUN)
    block: int = schema.field(_BLOCK)
    part: str = schema.field(Choice(PARTS))
    round: int = schema.field(_ROUND)  # of the offerer's published state
    codec: str = schema.field(Choice(CODECS))
    weight: float = schema.field(Float(0.0, 1e15))  # tokens trained since the last merge
    size: int = schema.field(_SIZE)  # bytes of the encoded snapshot
    reference: bytes = schema.field(Raw(DIGEST_BYTES), b"")  # sparse: the last merge that both sides share
    streams: int = schema.field(Int(1, 16), 1)  # over how many streams the snapshots are striped
    keep: bool = schema.field(Bool(), False)  # both sides shall keep the merge: a sparse offer relative to it will come


@dataclass(frozen=True)
class Accept:
    """The same of the other side, for the same exchange."""

    exchange: bytes = schema.field(_ID)
    round: int = schema.field(_ROUND)
    weight: float = schema.field(Float(0.0, 1e15))
    size: int = schema.field(_SIZE)
    codec: str = schema.field(Choice(CODECS))


@dataclass(frozen=True)
class Decline:
    """No, with the reason and when to ask again."""

    exchange: bytes = schema.field(_ID)
    reason: str = schema.field(
        Choice(("busy", "crossed", "behind", "ahead", "joining", "put-off", "codec", "stopping", "block", "not-training"))
    )
    retry_after_s: float = schema.field(Float(0.0, 3600.0), 0.0)


@dataclass(frozen=True)
class Lane:
    """First request on one more stream for an exchange that was accepted: chunks of both sides may travel on it, too."""

    exchange: bytes = schema.field(_ID)


@dataclass(frozen=True)
class Chunk:
    """A piece of a transfer; the body is its bytes. On one stream they come in order and join; lanes may share."""

    offset: int = schema.field(_SIZE)


@dataclass(frozen=True)
class Seal:
    """Behind the last chunk on the exchange's own stream: what the whole snapshot is. Other lanes may still carry chunks."""

    digest: bytes = schema.field(_DIGEST)  # blake3 of the encoded snapshot


@dataclass(frozen=True)
class Outcome:
    """What this side made of the exchange. `merged` is the digest of its merge, zeros where it refused."""

    accepted: bool = schema.field(Bool())
    merged: bytes = schema.field(_DIGEST)
    reason: str = schema.field(_WORDS, "")


@dataclass(frozen=True)
class Want:
    """Asks for a published state. Zeros for `digest` mean the newest that the donor has; `shards`: its shards' hashes, too."""

    run: RunId = schema.field(_RUN)
    block: int = schema.field(_BLOCK)
    part: str = schema.field(Choice(PARTS))
    digest: bytes = schema.field(_DIGEST)
    offset: int = schema.field(_SIZE, 0)
    length: int = schema.field(_SIZE, 0)  # 0: to the end
    shards: bool = schema.field(Bool(), False)


@dataclass(frozen=True)
class Have:
    """What the donor will send now: bytes `offset` … `offset + length` of the state with this round and digest.

    `shards` names the list of its shards' hashes (node/shards.py). The body is that list where it was asked for, else empty.
    """

    round: int = schema.field(_ROUND)
    digest: bytes = schema.field(_DIGEST)
    size: int = schema.field(_SIZE)
    offset: int = schema.field(_SIZE)
    length: int = schema.field(_SIZE)
    shards: bytes = schema.field(Raw(DIGEST_BYTES), b"")


@dataclass(frozen=True)
class Open:
    """Opens a sweep session on one holder. The client sends one to each holder of its chain."""

    session: bytes = schema.field(_ID)
    run: RunId = schema.field(_RUN)
    block: int = schema.field(_BLOCK)
    digest: bytes = schema.field(_DIGEST)  # the state to be used; zeros: the newest, and Ready says which
    next_peer: str = schema.field(Text(128), "")  # whom to pass the accumulator to; empty: answer the client
    next_block: int = schema.field(Int(-1, limits.MAX_BLOCKS - 1), -1)


@dataclass(frozen=True)
class Link:
    """Opens a holder's stream to the next holder of a session, which the client opened there before."""

    session: bytes = schema.field(_ID)
    run: RunId = schema.field(_RUN)
    block: int = schema.field(_BLOCK)  # the block that receives


@dataclass(frozen=True)
class Ready:
    session: bytes = schema.field(_ID)
    block: int = schema.field(_BLOCK)
    round: int = schema.field(_ROUND)
    digest: bytes = schema.field(_DIGEST)


@dataclass(frozen=True)
class Step:
    """One traversal's work: `rows` texts of equal length, continued at `position`, the last `want` positions of each scored.

    The body is the accumulator: fp16, rows × want × vocabulary, the sum of log-probabilities of the holders before; empty at the first.
    A cache that reaches past `position` is cut back to it (rejected drafts). With `rows` > 1 nothing is cached.
    With `draft` > 0 the first holder extends the (single) text by that many tokens of its own before it scores, and passes them on.
    `drafted` counts the drafted tokens at the end of `tokens`; the body then ends in `drafted` + 1 rows more: the drafter's own
    log-probabilities of each drafted token and of the one after them, which pass through to the client unchanged.
    A `noisy` step (one-sweep) scores a window: the last `want` - 1 tokens are unknown (and sent as 0); the body then ends in their z, fp16,
    (`want` - 1) × width, drawn by the first holder from the seed and moved on by each. Noisy positions do not stay in the cache.
    """

    sequence: int = schema.field(Int(0, 2**40))
    position: int = schema.field(_PLACE)
    rows: int = schema.field(Int(1, 256))
    want: int = schema.field(Int(0, 65536))
    tokens: bytes = schema.field(_TOKENS)  # u8 (bytes) or u32 little endian, row after row
    draft: int = schema.field(Int(0, 256), 0)
    drafted: int = schema.field(Int(0, 256), 0)
    temperature: float = schema.field(Float(0.0, 100.0), 1.0)
    top_k: int = schema.field(Int(0, 1_000_000), 0)
    top_p: float = schema.field(Float(0.0, 1.0), 1.0)
    seed: int = schema.field(Int(0, 2**63 - 1), 0)
    blocks: tuple[int, ...] = schema.field(Many(_BLOCK, limits.MAX_CHAIN), ())  # whose log-probabilities the body holds
    compute_s: float = schema.field(Float(0.0, 1e6), 0.0)  # spent by the holders so far, for overhead measurements
    noisy: bool = schema.field(Bool(), False)  # the last want - 1 tokens are unknown: their z rides in the body (one-sweep)
    substeps: int = schema.field(Int(1, 16), 1)  # of z inside each block, in a noisy step


@dataclass(frozen=True)
class Scored:
    """Answer to a Step, from the last holder. Body: as Step's, final. `tokens` are the drafted ones."""

    sequence: int = schema.field(Int(0, 2**40))
    want: int = schema.field(Int(0, 65536))
    drafted: int = schema.field(Int(0, 256), 0)
    tokens: bytes = schema.field(_TOKENS, b"")
    blocks: tuple[int, ...] = schema.field(Many(_BLOCK, limits.MAX_CHAIN), ())
    compute_s: float = schema.field(Float(0.0, 1e6), 0.0)  # sum over the holders, for overhead measurements


@dataclass(frozen=True)
class Close:
    """The client is done with the session."""

    session: bytes = schema.field(_ID)


Message: TypeAlias = (
    Hello | End | Ask | Answer | Offer | Accept | Decline | Lane | Chunk | Seal | Outcome
    | Want | Have | Open | Link | Ready | Step | Scored | Close
)  # fmt: skip
_TYPES: Final[dict[str, type[Any]]] = {
    cls.__name__.lower(): cls
    for cls in (
        Hello, End, Ask, Answer, Offer, Accept, Decline, Lane, Chunk, Seal, Outcome, Want, Have, Open, Link, Ready, Step, Scored, Close,
    )
}  # fmt: skip


def to_frame(message: Message, body_bytes: int = 0) -> bytes:
    """Prefix and header of a message's frame; `body_bytes` of body follow."""
    return wire.frame({"t": type(message).__name__.lower(), **schema.encode(message)}, body_bytes)


def from_header(header: bytes | memoryview) -> Message:
    """The message of a frame's header.

    Raises: Malformed: not a map, an unknown tag, or a field that breaks its rule.
    """
    data = wire.unpack(header, limits.MAX_HEADER_BYTES)
    if not isinstance(data, dict):
        raise Malformed("a header is a map")
    tag = data.get("t")
    cls = _TYPES.get(tag) if isinstance(tag, str) else None
    if cls is None:
        raise Malformed(f"unknown message {schema.shown(tag)}")
    message: Message = schema.decode(cls, data, where=cls.__name__)
    return message
