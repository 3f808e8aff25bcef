"""Where our round stands among those that the other holders of our block announce: what to believe, and how far apart is too far.

A round is a claim. Anybody may announce any, a record is as old as its last renewal, and rounds may take milliseconds or minutes. So what
is followed is within reach of the median where three or more can be compared, and reach is a matter of pace.

In a merge less is followed. Each side takes the higher round of both for its own, so who says that it is ahead, by anything within reach,
would push the numbers of its whole block on at every merge, and a schedule by rounds would run out too soon. There a round counts as far
as two others stand by it, we among them, and a few rounds beyond. One liar moves nothing alone then; one fast replica does, by the few,
and those that it lifts stand by it before the next. Both sides have the same merge, bit for bit; where one does not believe the other's
round they number it differently, for the one that is ahead cannot go back.
"""

from __future__ import annotations

import statistics
from typing import Final

from blocktrain.protocol import acceptance
from blocktrain.protocol.acceptance import MAX_REACH
from blocktrain.protocol.exchange import Tempo, tokens_per_round
from blocktrain.protocol.ids import PeerId
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.membership import Members, believable_round
from blocktrain.protocol.records import MAX_ROUND

LEAD: Final = 2  # rounds by which one replica may be ahead of all others in our merge; one is too few for one of twenty that is fast
AGE_SHARE: Final = 0.5  # of a refresh: how old a record is on average, and rounds were made since


class Standing:
    """One node's view. `round` is that of our published state; `now` is Unix seconds by the node's clock."""

    __slots__ = ("_block", "_members", "_per_round", "tempo")

    def __init__(self, members: Members, manifest: Manifest, block: int) -> None:
        self.tempo = Tempo()
        self._members = members
        self._block = block
        self._per_round = tokens_per_round(manifest)

    def reach(self, peer: PeerId) -> int:
        """How many rounds we and a peer may be apart and still average: the faster of the two has the say."""
        return self._reach(self._members.tokens_per_s(self._block, peer))

    def swarms_reach(self, now: float) -> int:
        """The same for us and the middle one of the holders: so far they may have come since they announced their rounds."""
        speeds = [member.tokens_per_s for member in self._members.holders(self._block, now, trained_only=True)]
        return self._reach(statistics.median_low(speeds) if speeds else 0.0)

    def counted(self, peer: PeerId, round: int, now: float, refresh_s: float) -> int:
        """The highest round of a peer's that counts in a merge with it; a higher one counts as this. See the module's docstring.

        With nobody else to ask, any counts: of two replicas nobody can say who is right.
        """
        first, second = self._members.highest(self._block, now, but=peer)
        if not first:
            return MAX_ROUND
        backed = min(first, max(round, second))  # the second of them and us
        return backed + LEAD + int(min(MAX_REACH, AGE_SHARE * refresh_s * self.tempo.rounds_per_s))

    def believed(self, round: int, now: float) -> int:
        """The highest round of our block that is believed, our own among them. Below our own: the others are right to decline us.

        Then we have our round by the word of somebody who made it up, or went ahead of all others without them. What we have learnt is as
        good as theirs, for all we know, so it is kept, and only its number is given up.
        """
        holders = self._members.holders(self._block, now, trained_only=True)
        return believable_round([round, *(member.round for member in holders)], self.swarms_reach(now))

    def newest(self, round: int, now: float) -> tuple[int, list[PeerId]]:
        """The newest round that can be downloaded, and who announced it; 0 where there is none. Our own has a say in what is believed."""
        found, donors = self._members.newest(self._block, now, self.swarms_reach(now))
        if not round:
            return found, donors
        believed = self.believed(round, now)
        if found <= believed:
            return found, donors
        holders = self._members.holders(self._block, now, trained_only=True)
        return believed, [member.peer for member in holders if member.round == believed]

    def behind(self, round: int, now: float) -> int:
        """Rounds between our published state and the newest that can be downloaded; not above 0 where there is none."""
        return self.newest(round, now)[0] - round

    def _reach(self, tokens_per_s: float) -> int:
        return acceptance.reach(max(self.tempo.rounds_per_s, tokens_per_s / self._per_round))
