"""What a node says about itself: one snapshot, the same for the terminal, `status --json`, peers, and tools.

Always there: the phase, for how long, what it waits for and what comes next, so that slow can be told from stuck. Every node of this user
writes its snapshot each second into the user's runtime folder; `blocktrain status` reads them. A snapshot can also come from a peer, so
it is decoded by rules with bounds like every other message. Rendering imports rich only when a table is drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from blocktrain.protocol import limits, schema
from blocktrain.protocol.errors import Malformed
from blocktrain.protocol.ids import short
from blocktrain.protocol.records import MAX_ROUND
from blocktrain.protocol.schema import Float, Int, Many, Text

if TYPE_CHECKING:
    from rich.table import Table

MAX_STATUS_BYTES: Final = 1024 * 1024  # a thousand peers' lines
MAX_PEERS_SHOWN: Final = 1000
MAX_TALK_CHARS: Final = 1000
SILENT_AFTER_S: Final = 5.0  # snapshots come each second; after this long without one something is wrong

_COUNT = Int(0, 2**63 - 1)
_AMOUNT = Float(0.0, 1e18)
_NUMBER = Float(-1e18, 1e18)
_WORDS = Text(MAX_TALK_CHARS)


@dataclass(frozen=True)
class _Maybe:
    """A rule whose value may be missing: null in JSON."""

    rule: schema.Rule

    def check(self, value: object, where: str) -> Any:
        return None if value is None else self.rule.check(value, where)


@dataclass(frozen=True)
class _Row:
    """A map in a list, with unknown keys ignored: a later version may say more."""

    cls: type

    def check(self, value: object, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise Malformed(f"{where} must be a table, not {type(value).__name__}")
        return schema.decode(self.cls, value, where=where)


@dataclass(frozen=True)
class PeerStatus:
    """What we know of one peer. `avoided`: why it is left alone for now, "" if it is not."""

    peer: str = schema.field(Text(128))
    block: int = schema.field(Int(0, limits.MAX_BLOCKS - 1))
    phase: str = schema.field(Text(40), "")
    round: int = schema.field(Int(0, MAX_ROUND), 0)
    tokens_per_s: float = schema.field(_AMOUNT, 0.0)
    seen_s_ago: float | None = schema.field(_Maybe(_AMOUNT), None)
    avoided: str = schema.field(Text(200), "")
    rtt_ms: float | None = schema.field(_Maybe(_AMOUNT), None)


@dataclass(frozen=True)
class Status:
    """One node at one moment. Times in seconds, losses in nats per token; null where there is no value yet."""

    run: str = schema.field(Text(64), "")  # hex
    run_name: str = schema.field(Text(64), "")
    name: str = schema.field(Text(128), "")
    peer: str = schema.field(Text(128), "")
    pid: int = schema.field(Int(0, 2**31 - 1), 0)
    version: str = schema.field(Text(64), "")
    block: int | None = schema.field(_Maybe(Int(0, limits.MAX_BLOCKS - 1)), None)  # null until "auto" has chosen
    blocks: int = schema.field(Int(0, limits.MAX_BLOCKS), 0)
    round: int = schema.field(Int(0, MAX_ROUND), 0)  # of the published state
    digest: str = schema.field(Text(16), "")  # first 16 hex digits, of the published state
    loss: float | None = schema.field(_Maybe(_NUMBER), None)
    heldout: float | None = schema.field(_Maybe(_NUMBER), None)
    steps: int = schema.field(_COUNT, 0)
    tokens: int = schema.field(_COUNT, 0)
    tokens_per_s: float = schema.field(_AMOUNT, 0.0)
    learning_rate: float | None = schema.field(_Maybe(_NUMBER), None)
    peers: tuple[PeerStatus, ...] = schema.field(Many(_Row(PeerStatus), MAX_PEERS_SHOWN), ())
    coverage: tuple[int, ...] = schema.field(Many(_COUNT, limits.MAX_BLOCKS), ())  # replicas of each block, ourselves included
    absent: tuple[PeerStatus, ...] = schema.field(Many(_Row(PeerStatus), limits.MAX_BLOCKS), ())  # who last held what nobody holds now
    accepted: int = schema.field(_COUNT, 0)
    late: int = schema.field(_COUNT, 0)
    refused: int = schema.field(_COUNT, 0)
    one_sided: int = schema.field(_COUNT, 0)
    declined: int = schema.field(_COUNT, 0)
    own_rounds: int = schema.field(_COUNT, 0)
    bytes_in: int = schema.field(_COUNT, 0)
    bytes_out: int = schema.field(_COUNT, 0)
    served_tokens: int = schema.field(_COUNT, 0)
    sessions: int = schema.field(_COUNT, 0)
    phase: str = schema.field(Text(40), "starting")  # starting, joining, isolated, training, serving, paused, stopping
    waiting_for: str = schema.field(_WORDS, "")  # plain words; "" while it waits for nothing
    phase_s: float = schema.field(_AMOUNT, 0.0)
    next_action: str = schema.field(_WORDS, "")
    addresses: tuple[str, ...] = schema.field(Many(Text(256), 64), ())
    reachable: str = schema.field(Text(40), "unknown")  # direct, relay, no, unknown: whether others can call us
    reachable_why: str = schema.field(_WORDS, "")  # at which address, or what mends it
    skew_s: float | None = schema.field(_Maybe(_NUMBER), None)  # our clock against the peers' median
    device: str = schema.field(Text(80), "")
    data: str = schema.field(_WORDS, "")
    store: str = schema.field(_WORDS, "")
    checkpoint_round: int | None = schema.field(_Maybe(Int(0, MAX_ROUND)), None)
    last_refusal: str = schema.field(_WORDS, "")
    uptime_s: float = schema.field(_AMOUNT, 0.0)
    written_at: float = schema.field(_AMOUNT, 0.0)  # Unix seconds
    silent_s: float = schema.field(_AMOUNT, 0.0)  # filled in by who reads: how old the snapshot is, beyond the usual second

    def to_json(self) -> str:
        """One line of JSON. Values that JSON does not have become null; words are cut to their bounds, so that it can be read again."""
        table = asdict(replace(self, peers=self.peers[:MAX_PEERS_SHOWN]))
        return json.dumps(_fit(table, Status), separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Status:
        """Raises: Malformed: too long, not JSON, or a field that breaks its rule. Unknown keys are ignored, missing ones are default."""
        if len(text) > MAX_STATUS_BYTES:
            raise Malformed(f"a status of {len(text)} bytes; at most {MAX_STATUS_BYTES} are allowed")
        try:
            table = json.loads(text)
        except (ValueError, RecursionError):
            raise Malformed("a status is JSON") from None
        if not isinstance(table, dict):
            raise Malformed("a status is a map")
        return schema.decode(cls, table, where="status")


def _fit(table: dict[str, Any], cls: type) -> dict[str, Any]:
    """Our own values as the rules allow them: no NaN, no endless words, no control characters."""
    out: dict[str, Any] = {}
    for name, value in table.items():
        if name in ("peers", "absent"):
            out[name] = [_fit(row, PeerStatus) for row in value]
        elif isinstance(value, float) and not math.isfinite(value):
            out[name] = None if isinstance(_rule(cls, name), _Maybe) else 0.0
        elif isinstance(value, str):
            rule = _rule(cls, name)
            assert isinstance(rule, Text)
            out[name] = "".join(char if char.isprintable() else " " for char in value[: rule.longest])
        else:
            out[name] = value
    return out


def _rule(cls: type, name: str) -> object:
    return cls.__dataclass_fields__[name].metadata["rule"]  # type: ignore[attr-defined]


# ---- for people -----------------------------------------------------------------------------------------------------------------------


def one_line(status: Status) -> str:
    """The line that a node repeats on its terminal: who, where, how well, with whom, and what it waits for."""
    parts = [
        f"{status.name or short(status.peer)} block {_block(status)}",
        f"round {status.round}",
        f"loss {_loss(status.loss)}",
        f"held-out {_loss(status.heldout)}",
        f"{quantity(status.tokens_per_s)} tok/s",
        f"{len(status.peers)} peers",
        f"merged {status.accepted}, late {status.late}, refused {status.refused}",
        f"reachable: {status.reachable}",
        doing(status),
    ]
    return " · ".join(parts)


def doing(status: Status) -> str:
    """Phase, for how long, why it waits, and what comes next; or that nothing was heard of it."""
    if status.silent_s > SILENT_AFTER_S:
        return f"no word for {duration(status.silent_s)}: frozen?"
    words = f"{status.phase} for {duration(status.phase_s)}"
    if status.waiting_for:
        words += f", waiting for {status.waiting_for}"
    if status.next_action:
        words += f", next: {status.next_action}"
    return words


def render(statuses: Sequence[Status]) -> Table:
    """A table of nodes, one a row, by run and block."""
    from rich.table import Table
    from rich.text import Text as Cell

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, right in (
        ("run", False), ("block", True), ("node", False), ("round", True), ("state", False), ("loss", True), ("held-out", True),
        ("tok/s", True), ("peers", True), ("merged/late/refused", True), ("in/out", True), ("doing", False),
    ):  # fmt: skip
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading != "doing", overflow="fold")
    for status in sorted(
        statuses, key=lambda status: (status.run_name, status.run, -1 if status.block is None else status.block, status.name)
    ):
        cells = (
            status.run_name, _block(status), status.name or short(status.peer), str(status.round), status.digest[:8],
            _loss(status.loss), _loss(status.heldout), quantity(status.tokens_per_s), str(len(status.peers)),
            f"{status.accepted}/{status.late}/{status.refused}", f"{quantity(status.bytes_in)}B/{quantity(status.bytes_out)}B",
            doing(status),
        )  # fmt: skip
        table.add_row(*map(Cell, cells), style="yellow" if status.silent_s > SILENT_AFTER_S else None)
    return table


def quantity(value: float) -> str:
    """1234567 → "1.2M": three digits are enough to compare."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            return f"{value:.0f}{unit}" if abs(value) >= 99.5 or (unit == "" and value == int(value)) else f"{value:.1f}{unit}"
        value /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """75 → "1 min 15 s", in the two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _block(status: Status) -> str:
    return "?" if status.block is None else f"{status.block}/{status.blocks}"


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
