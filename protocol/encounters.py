"""What a node remembers of a peer from having met it, beyond the record that everybody can read: how calls went, and whether it lied.

A failed call puts a peer off for seconds, a broken agreement for much longer; both double when it happens again, and fade when they are
over. Most peers are never met, so membership.py keeps this apart from their records.
"""

from __future__ import annotations

import math
from typing import Final

FAILED_FIRST_S: Final = 2.0  # put off after the first failed call: long enough to try somebody else
FAILED_MOST_S: Final = 60.0
FAILED_HALF_LIFE_S: Final = 60.0  # after the back-off ended, the next one is halved for every minute that passes
OFFENDED_FIRST_S: Final = 30.0
OFFENDED_MOST_S: Final = 3600.0
OFFENDED_HALF_LIFE_S: Final = 3600.0
FRIEND_KEPT_S: Final = 600.0  # how long the RTT of a peer whose record ended is remembered: it may come back
RTT_SHARE: Final = 0.25  # weight of the newest RTT in the moving average


class _Ban:
    """A back-off that doubles with every strike and fades once it is over."""

    __slots__ = ("length_s", "until")

    def __init__(self) -> None:
        self.until = 0.0
        self.length_s = 0.0

    def faded_s(self, now: float, half_life_s: float) -> float:
        return self.length_s * math.exp2(-max(0.0, now - self.until) / half_life_s)

    def strike(self, now: float, first_s: float, most_s: float, half_life_s: float) -> None:
        if now >= self.until:  # calls that were already under way when it began do not double it
            self.length_s = min(most_s, max(first_s, 2 * self.faded_s(now, half_life_s)))
        self.until = now + self.length_s


class Met:
    """What came of meeting one peer. `friend`: the last word is that it answers and keeps to the rules."""

    __slots__ = ("_failing", "_offending", "_used_at", "friend", "rtt_s", "why")

    def __init__(self) -> None:
        self.friend = False
        self.rtt_s: float | None = None  # None: no call measured one
        self.why = ""  # the last thing that went wrong
        self._used_at = 0.0
        self._failing: _Ban | None = None
        self._offending: _Ban | None = None

    def succeeded(self, now: float, rtt_s: float | None) -> None:
        self._failing = None
        self._used_at = now
        if rtt_s is not None:
            self.rtt_s = rtt_s if self.rtt_s is None else self.rtt_s + RTT_SHARE * (rtt_s - self.rtt_s)
        if not self.offence_s(now):
            self.friend = True

    def failed(self, now: float, why: str) -> None:
        self._failing = self._failing or _Ban()
        self._failing.strike(now, FAILED_FIRST_S, FAILED_MOST_S, FAILED_HALF_LIFE_S)
        self.why = why

    def offended(self, now: float, why: str) -> None:
        self._offending = self._offending or _Ban()
        self._offending.strike(now, OFFENDED_FIRST_S, OFFENDED_MOST_S, OFFENDED_HALF_LIFE_S)
        self.why = why
        self.friend = False

    def avoided_s(self, now: float) -> float:
        """Seconds for which it should be left alone."""
        if self._failing is None and self._offending is None:
            return 0.0
        return max(self.offence_s(now), self._failing.until - now if self._failing else 0.0)

    def offence_s(self, now: float) -> float:
        """Seconds for which it is banned for breaking the agreement."""
        return max(0.0, self._offending.until - now) if self._offending else 0.0

    def doubt_s(self, now: float) -> float:
        """Its last back-off for failed calls, faded."""
        return self._failing.faded_s(now, FAILED_HALF_LIFE_S) if self._failing else 0.0

    def kept_until(self) -> float:
        """Until when this is worth remembering, as long as there is room."""
        until = self._used_at + FRIEND_KEPT_S if self.friend else 0.0
        if self._failing:
            until = max(until, self._failing.until + FAILED_HALF_LIFE_S)
        if self._offending:
            until = max(until, self._offending.until + OFFENDED_HALF_LIFE_S)
        return until
