"""The story of `blocktrain-sim local` with trouble: its middle is what chaos.py does to the nodes, and then they recover."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blocktrain.swarm_sim.chaos import Monkey
from blocktrain.swarm_sim.cluster import Member
from blocktrain.swarm_sim.local import MIN_TRAIN_S, Story

TROUBLED: Final = ("start", "meet", "measure before", "chaos", "recover", "measure after", "stop")
LEAST_KILLS: Final = 2.5  # are waited for, however slow the machine was to start


class TroubledStory(Story):
    """A run whose middle is trouble, and then peace."""

    phases = TROUBLED

    def _middle(self, begun: float, until: float) -> None:
        settings, display, cluster = self._settings, self._display, self._cluster
        monkey = Monkey(settings.trouble, cluster, self._children, self._timeline, display.say, settings.prompt)
        self._report.tally = monkey.tally
        display.phase("chaos")
        last = max(begun + max(MIN_TRAIN_S, LEAST_KILLS * settings.trouble.kill_every_s), until - settings.recovery_s)
        monkey.begin(self._now())
        self._children.wait(lambda: monkey.act(self._now()) or self._now() >= last, last - begun + 60, "this machine did not keep time")
        display.phase("recover")
        monkey.end()
        self._timeline.note("heal")
        self._heal_at_s = self._now()
        until = max(until, self._heal_at_s + settings.recovery_s)
        self._recover(monkey)
        self._children.wait(lambda: self._quiet(monkey, until), self._patience.client_s + until, "this machine did not keep time")

    def _recover(self, monkey: Monkey) -> None:
        """Everybody trains on: a round more each, and an exchange wherever there is another honest holder."""
        cluster, began = self._cluster, self._now()
        honest = [member for member in cluster.lives.values() if not member.killed and not member.lie]
        before = {member.label: (member.number("round"), member.number("accepted")) for member in honest}

        def waiting() -> list[str]:
            monkey.talk(self._now())
            slow = []
            for member in honest:
                round, accepted = before[member.label]
                alone = sum(other.block == member.block for other in honest) < 2
                averaged = alone or member.number("accepted") > accepted
                if not (member.training and member.number("round") > round and averaged):
                    slow.append(f"{member.label} ({member.phase}, round {member.number('round'):.0f})")
            return slow

        self._children.wait(
            lambda: not waiting(), self._patience.rejoin_s, lambda: f"{', '.join(waiting())} did not train and average again"
        )
        monkey.tally.recovered_s = self._now() - began
        self._display.say(f"all {len(honest)} nodes train and average again after {monkey.tally.recovered_s:.0f} s")

    def _quiet(self, monkey: Monkey, until: float) -> bool:
        monkey.talk(self._now())
        return self._now() >= until and not monkey.talking

    def _shown(self) -> Sequence[Member]:
        return self._cluster.living
