"""With whom we would rather not exchange just now, though nothing that they did breaks the agreement.

Two kinds: who declined said when to ask again; and who begins exchanges and lets them hang keeps us from all others, since we have one at a
time. Both are remembered for a bounded number of peers, the longest remembered are forgotten first.
"""

from __future__ import annotations

from typing import Final, TypeVar

from blocktrain.protocol.exchange import Result
from blocktrain.protocol.ids import PeerId

STALLS_FORGIVEN: Final = 2  # exchanges in a row that a peer begins and lets hang; then its offers are declined while it is put off
MOMENT_S: Final = 1.0  # who is busy for so long may be asked again in our next round, though that comes sooner
MOST_S: Final = 30.0  # so long we leave alone who asks for it, at most: it may start anew meanwhile
MAX_REMEMBERED: Final = 256  # peers, of each kind

Value = TypeVar("Value")


class Patience:
    """One node's memory of both. `now` is Unix seconds by the node's clock."""

    def __init__(self) -> None:
        self._until: dict[PeerId, float] = {}
        self._stalls: dict[PeerId, int] = {}

    def declined(self, peer: PeerId, result: Result, now: float) -> None:
        """It declined our offer; a round trip and a snapshot are saved where we ask no sooner than it said."""
        self._until.pop(peer, None)
        if result.retry_s > MOMENT_S:
            _remember(self._until, peer, now + min(result.retry_s, MOST_S))

    def came(self, peer: PeerId) -> None:
        """It wants an exchange with us: whatever it said before is over."""
        self._until.pop(peer, None)

    def ended(self, peer: PeerId, result: Result, *, ours: bool) -> None:
        """An exchange that was under way is over. `ours`: we had offered it."""
        if result.kind in ("merged", "one_sided"):
            self._stalls.pop(peer, None)
        elif not ours and result.kind in ("late", "lost"):
            _remember(self._stalls, peer, self._stalls.pop(peer, 0) + 1)

    def may_ask(self, peer: PeerId, now: float) -> bool:
        return self._until.get(peer, 0.0) <= now

    def stalls(self, peer: PeerId) -> bool:
        """Whether it let more exchanges in a row hang than is forgiven."""
        return self._stalls.get(peer, 0) >= STALLS_FORGIVEN


def _remember(shelf: dict[PeerId, Value], peer: PeerId, value: Value) -> None:
    shelf[peer] = value
    if len(shelf) > MAX_REMEMBERED:
        del shelf[next(iter(shelf))]
