"""`blocktrain-sim local` with trouble: nodes are killed and started again, frozen, reached over bad links, or lie; then all must be well.

Two phases, as in the virtual world. In the first a holder is killed every so many seconds, as a power cut would, and started again with
its identity or as somebody new; others are frozen and thawed; and now and then a client asks for text. In the second the swarm is left
alone, and must recover. A block's only good holder is spared: a state that only one machine has is gone with that machine, whatever the
program.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from blocktrain.protocol.core import FETCH_WHEN_BEHIND
from blocktrain.swarm_sim.cluster import Cluster, Member, number
from blocktrain.swarm_sim.links import Links
from blocktrain.swarm_sim.processes import Child, Children
from blocktrain.swarm_sim.timeline import Timeline

LIES: Final = ("nan", "huge", "flipped", "random", "chunks")  # what liar.py can do, in the order in which `--byzantine N` takes them
NEW_IDENTITY: Final = 0.3  # of those that are started again
RESTART_S: Final = (0.5, 4.0)  # until somebody starts it again
FREEZE_EVERY_S: Final = (8.0, 30.0)
FROZEN_S: Final = (2.0, 15.0)
TEXT_EVERY_S: Final = 30.0
TEXT_BYTES: Final = 16
FRESH_S: Final = 5.0  # how old a node's last word may be, for it to count as well


@dataclass(frozen=True)
class Trouble:
    """What shall befall a swarm. `seed`: for everything that is drawn."""

    kill_every_s: float = 0.0  # 0: nobody is killed
    freeze: bool = False
    links: Links | None = None
    byzantine: int = 0
    seed: int = 0

    @property
    def any(self) -> bool:
        return bool(self.kill_every_s or self.freeze or self.links or self.byzantine)


@dataclass
class Tally:
    """What befell it."""

    kills: int = 0
    spared: int = 0  # kills that were due and had to wait: every block had but one good holder
    same: int = 0  # started again with their identity
    new: int = 0  # as somebody new
    freezes: int = 0
    texts: int = 0
    texts_failed: list[str] = field(default_factory=list)
    liars: int = 0
    recovered_s: float | None = None

    def as_json(self) -> dict[str, object]:
        return {
            "kills": self.kills,
            "kills_that_waited": self.spared,
            "started_again_as_the_same": self.same,
            "started_again_as_somebody_new": self.new,
            "freezes": self.freezes,
            "liars": self.liars,
            "texts": self.texts,
            "texts_failed": len(self.texts_failed),
            "recovered_s": None if self.recovered_s is None else round(self.recovered_s, 1),
        }


class Monkey:
    """Makes the trouble. `act` is called a few times a second, and waits for nothing."""

    def __init__(
        self,
        trouble: Trouble,
        cluster: Cluster,
        children: Children,
        timeline: Timeline,
        say: Callable[[str], None],
        prompt: str,
    ) -> None:
        self.trouble = trouble
        self.tally = Tally()
        self._cluster = cluster
        self._children = children
        self._timeline = timeline
        self._say = say
        self._prompt = prompt
        self._rng = Random(f"{trouble.seed} monkey")
        self._begun = False
        self._kill_at = self._freeze_at = self._text_at = 0.0
        self._waits = False
        self._dead: list[tuple[float, Member]] = []  # when to start it again
        self._frozen: list[tuple[float, Member]] = []  # when to thaw it
        self._text: Child | None = None
        self._asked_at = 0.0

    def begin(self, now: float) -> None:
        """From now on. Liars join."""
        trouble, rng = self.trouble, self._rng
        self._kill_at = now + trouble.kill_every_s
        self._freeze_at = now + rng.uniform(*FREEZE_EVERY_S)
        self._text_at = now + TEXT_EVERY_S / 2
        for index in range(trouble.byzantine):
            member = self._cluster.join(index % self._cluster.blocks, paused=False, lie=LIES[index % len(LIES)])
            self.tally.liars += 1
            self._say(f"{member.label} joined block {member.block}; it lies ({member.lie})")

    def act(self, now: float) -> bool:
        """Whatever is due. Returns False: there is always more."""
        for at, member in [each for each in self._dead if each[0] <= now]:
            self._dead.remove((at, member))
            self._revive(member)
        for at, member in [each for each in self._frozen if each[0] <= now]:
            self._frozen.remove((at, member))
            self._thaw(member)
        if self.trouble.kill_every_s and now >= self._kill_at:
            self._kill(now)
        if self.trouble.freeze and now >= self._freeze_at:
            self._freeze(now)
        self.talk(now)
        return False

    def end(self) -> None:
        """Everybody thaws, and who is dead is started again."""
        for _, member in self._frozen:
            self._thaw(member)
        for _, member in self._dead:
            self._revive(member)
        self._frozen, self._dead = [], []

    # ---- who ------------------------------------------------------------------------------------------------------------------------

    def good(self, block: int) -> list[Member]:
        """Honest holders of a block that are at work and up to date: any of the others may go."""
        holders = [member for member in self._cluster.holders(block) if not member.lie]
        newest = max((member.number("round") for member in holders), default=0.0)
        return [member for member in holders if self._at_work(member) and member.number("round") >= newest - FETCH_WHEN_BEHIND]

    def _at_work(self, member: Member) -> bool:
        quiet_s = self._timeline.now() - float(number(member.status, "written_at") or 0.0)
        return member.training and not member.child.frozen and quiet_s < FRESH_S

    def _victims(self) -> list[Member]:
        groups = [self.good(block) for block in range(self._cluster.blocks)]
        return [member for group in groups if len(group) > 1 for member in group]

    # ---- what -----------------------------------------------------------------------------------------------------------------------

    def _kill(self, now: float) -> None:
        victims = self._victims()
        if not victims:
            self.tally.spared += not self._waits
            self._waits = True
            return
        self._waits = False
        self._kill_at = max(self._kill_at + self.trouble.kill_every_s, now)
        victim = self._rng.choice(victims)
        self._cluster.kill(victim)
        self._timeline.note("kill", victim.name, victim.life)
        self.tally.kills += 1
        self._dead.append((now + self._rng.uniform(*RESTART_S), victim))

    def _revive(self, member: Member) -> None:
        if self._rng.random() < NEW_IDENTITY:
            again = self._cluster.join(member.block, paused=False)
            self.tally.new += 1
        else:
            again = self._cluster.restart(member)
            self.tally.same += 1
        self._say(f"{member.label} was killed (SIGKILL), {again.label} takes its place")

    def _freeze(self, now: float) -> None:
        self._freeze_at = now + self._rng.uniform(*FREEZE_EVERY_S)
        victims = self._victims()
        if victims:
            victim, seconds = self._rng.choice(victims), self._rng.uniform(*FROZEN_S)
            self._children.freeze([victim.child])
            self._timeline.note("freeze", victim.name, victim.life)
            self.tally.freezes += 1
            self._frozen.append((now + seconds, victim))

    def _thaw(self, member: Member) -> None:
        self._children.thaw([member.child])
        self._timeline.note("thaw", member.name, member.life)

    # ---- text -----------------------------------------------------------------------------------------------------------------------

    def talk(self, now: float) -> None:
        """Ask for text every now and then, one client at a time."""
        if self._text is not None:
            late = now - self._asked_at > self._children.patience.client_s
            if late and self._text.alive:
                self._children.kill(self._text)
            if not self._text.alive:
                self._heard(self._text, now - self._asked_at)
                self._text = None
        elif now >= self._text_at:
            self._text_at, self._asked_at = now + TEXT_EVERY_S, now
            label = f"text-{self.tally.texts + len(self.tally.texts_failed)}"
            wish = ["generate", "--prompt", self._prompt, "--max-tokens", str(TEXT_BYTES), "--seed", "0"]
            self._text = self._cluster.start_client(label, wish)

    @property
    def talking(self) -> bool:
        return self._text is not None

    def _heard(self, client: Child, took_s: float) -> None:
        answer = _object(client.out.read_bytes())
        if client.code == 0 and isinstance(answer.get("text"), str):
            self.tally.texts += 1
            seconds, traversals = number(answer, "seconds"), number(answer, "traversals")
            self._timeline.note("text", ok=True, took_s=round(took_s, 3), seconds=seconds, traversals=traversals)
        else:
            why = f"{client.label} ended with exit code {client.code}: {client.last_words()}"
            self.tally.texts_failed.append(why)
            self._timeline.note("text", ok=False, took_s=round(took_s, 3), reason=why)
            self._say(f"no text: {why}")


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
