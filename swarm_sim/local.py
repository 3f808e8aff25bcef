"""`blocktrain-sim local`: the whole life of a swarm, as real processes on this machine, each step checked.

A host and its joiners meet; the untrained chain is measured; they train and average; one is killed in the middle, and the others carry on;
a replacement joins and takes the state from the swarm; the chain is measured again and writes a text; all end, and nothing is left behind.
The story stops at the first thing that does not happen. It sees what users see: status lines, logs, exit codes, and what clients print.
With trouble (chaos.py) its middle is another: much befalls the nodes, then they recover, and checkers judge what they logged.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from blocktrain.node.commands import checks
from blocktrain.protocol import limits
from blocktrain.protocol.errors import UsageError
from blocktrain.swarm_sim import recipe, timeline
from blocktrain.swarm_sim.chaos import Trouble
from blocktrain.swarm_sim.chaos_checks import judge
from blocktrain.swarm_sim.chaos_page import Pictures, page_of
from blocktrain.swarm_sim.chaos_scene import Bounds, Recorded
from blocktrain.swarm_sim.cluster import Cluster, Member, Run, number
from blocktrain.swarm_sim.delay import Emulator
from blocktrain.swarm_sim.display import Display
from blocktrain.swarm_sim.links import Wiring
from blocktrain.swarm_sim.plots import Point
from blocktrain.swarm_sim.processes import PATIENT, Child, Children, Ending, Failure, Interrupted, Patience, Programs, Status, installed
from blocktrain.swarm_sim.report import Report
from blocktrain.swarm_sim.timeline import Timeline
from blocktrain.swarm_sim.world.checkers.base import SLACK_S

PHASES: Final = ("start", "meet", "measure before", "train", "kill one", "rejoin", "train on", "measure after", "stop")
CALM_S: Final = 25.0  # after the longest that a node's word on others may lag behind, until the story ends
KILL_AT: Final = 0.4  # of the training time
SERVED_BYTES: Final = 16  # a short text is proof enough that the chain is whole
STOP_RESERVE_S: Final = 8.0  # to end six nodes and draw a picture
DOWNLOADED: Final = b"downloaded the state of round"  # what a node logs when it has
MIN_TRAIN_S: Final = 0.5  # however short the run shall be
POINT_S: Final = 1.0  # two points of a node in the plot are at least this far apart


@dataclass(frozen=True)
class Settings:
    """What may be chosen. `out` gets everything that the run leaves; it must be new or empty."""

    out: Path
    blocks: int | None = None  # None: as the recipe has it
    replicas: int = 2
    minutes: float = 4.0
    recipe: Path = Path("tiny")
    data: tuple[str, ...] = ("builtin",)
    prompt: str = "The "
    length: int = 200  # bytes to generate
    windows: int = 64  # held-out windows to measure on
    kill: bool = True
    trouble: Trouble = Trouble()
    page: Path | None = None  # where the report goes, JSON beside it; the same checkers judge a run without trouble, then
    ttl_s: float = limits.TTL_S
    refresh_s: float = limits.REFRESH_S
    calm_s: float = CALM_S

    @property
    def recovery_s(self) -> float:
        """From the end of the trouble to the last measurement."""
        return self.ttl_s + self.refresh_s + SLACK_S + self.calm_s

    @property
    def judged(self) -> bool:
        return self.trouble.any or self.page is not None


def check(settings: Settings) -> Settings:
    """The settings with absolute paths, since children have another working folder.

    Raises: UsageError: in one line, what cannot be and what can.
    """
    trouble = settings.trouble
    if trouble.kill_every_s and settings.replicas < 2:
        raise UsageError("--kill-every needs a second holder of each block: give --replicas 2 or more")
    if trouble.any and settings.minutes * 60 < settings.recovery_s + 30:
        least = (settings.recovery_s + 30) / 60
        raise UsageError(
            f"--minutes {settings.minutes:g} is too short: the swarm recovers for {settings.recovery_s:g} s; give {least:.1f} or more"
        )
    if trouble.kill_every_s and trouble.kill_every_s > settings.minutes * 60 - settings.recovery_s:
        raise UsageError(
            f"--kill-every {trouble.kill_every_s:g}: in --minutes {settings.minutes:g} nobody would be killed; give more minutes"
        )
    if settings.kill and not trouble.any and settings.replicas < 2:
        raise UsageError("killing one replica needs a second one of its block: give --replicas 2 or more, or --no-kill")
    if not settings.prompt:
        raise UsageError("--prompt is empty: the model continues a text of at least one byte")
    checks.check_data(settings.data)
    data = tuple(source if source == "builtin" or source.startswith("hf:") else str(Path(source).absolute()) for source in settings.data)
    out = settings.out.absolute()
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"--out {settings.out} is not an empty folder: give a new one, so that two runs are not mixed up")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {settings.out} cannot be written: {error.strerror}") from error
    return replace(settings, out=out, data=data)


def run(settings: Settings, programs: Programs | None = None, patience: Patience = PATIENT) -> Report:
    """Tell the story and return what happened, as far as it went. No process of it is left, whatever happened.

    Raises: UsageError: the settings cannot be.
    """
    settings = check(settings)
    run_file = recipe.write(settings.recipe, settings.out / "run.toml", blocks=settings.blocks, minutes=settings.minutes)
    report = Report(settings.out, _as_keys(settings, run_file.blocks))
    with contextlib.ExitStack() as stack:
        run_ = Run(run_file.path, settings.data)
        if (settings.ttl_s, settings.refresh_s) != (limits.TTL_S, limits.REFRESH_S):
            run_ = replace(run_, flags=("--ttl-s", f"{settings.ttl_s:g}", "--refresh-s", f"{settings.refresh_s:g}"))
        if settings.trouble.links is not None:
            run_ = replace(run_, listen=Wiring(settings.trouble.links, stack.enter_context(Emulator())).flags)
        from blocktrain.swarm_sim.chaos_story import TroubledStory  # which stands on this module

        story = TroubledStory if settings.trouble.any else Story
        story(settings, programs or installed(), run_, run_file.blocks, report, patience).tell()
    return report


class Story:
    """One run, phase by phase."""

    phases: tuple[str, ...] = PHASES

    def __init__(self, settings: Settings, programs: Programs, run: Run, blocks: int, report: Report, patience: Patience) -> None:
        self._settings = settings
        self._blocks = blocks
        self._report = report
        self._patience = patience
        self._children = Children(settings.out, self._heard, self._poll, patience)
        self._timeline = Timeline()
        self._cluster = Cluster(self._children, programs, run)
        self._cluster.on_start = self._started
        self._display = Display(self._shown, self.phases, settings.minutes * 60)
        self._heal_at_s = 0.0
        self._begun = time.monotonic()
        self._last_point: dict[str, float] = {}

    def tell(self) -> None:
        """Everything, in order; what goes wrong on the way stands in the report."""
        report = self._report
        with self._display, self._children:
            try:
                self._all()
            except Failure as failure:
                report.fail(str(failure))
            except Interrupted:
                report.interrupted = True
            ended_s = self._now()
            self._display.phase("stop")
            self._end(self._children.stop())
            self._judge(ended_s)

    def _all(self) -> None:
        self._start()
        measuring_s = self._measure_before()
        self._cluster.resume()
        begun = self._now()
        # What comes after training takes about as long as the first measurement did, twice over on a machine that is busy training.
        until = max(begun + MIN_TRAIN_S, self._settings.minutes * 60 - 2.5 * measuring_s - STOP_RESERVE_S)
        self._heal_at_s = begun
        self._middle(begun, until)
        self._measure_after()

    def _middle(self, begun: float, until: float) -> None:
        """What happens while the nodes train, up to the second `until`."""
        self._display.phase("train")
        self._train(begun + KILL_AT * (until - begun))
        if self._settings.kill:
            self._kill_one_and_replace_it()
            self._heal_at_s = self._now()
        self._display.phase("train on")
        self._children.run(max(MIN_TRAIN_S, until - self._now()))

    def _start(self) -> None:
        settings, display = self._settings, self._display
        display.phase("start")
        display.say(f"{self._blocks} blocks x {settings.replicas} replicas, about {settings.minutes:g} min; logs in {self._children.logs}")
        self._cluster.start_host()
        display.say(f"the host listens at {self._cluster.address()}")
        for copy in range(settings.replicas):
            for block in range(self._blocks):
                if (copy, block) != (0, 0):
                    self._cluster.join(block)
        display.phase("meet")
        self._cluster.wait_met()
        self._report.met_s = self._now()
        display.say(f"all {len(self._cluster.members)} nodes see each other")

    def _measure_before(self) -> float:
        """The loss of the chain as it starts. Returns the seconds that measuring took."""
        self._display.phase("measure before")
        began = self._now()
        answer = self._cluster.ask("eval-before", self._eval())
        self._report.before(self._now(), self._loss_of("eval-before", answer))
        self._display.say(f"the untrained chain has {self._report.loss_before:.3f} nats per token on held-out text")
        return self._now() - began

    def _train(self, until: float) -> None:
        """Let everybody train until then, and longer if some block has not yet averaged anything."""
        self._children.run(max(0.0, until - self._now()))
        if self._settings.replicas > 1:
            self._children.wait(lambda: not self._not_averaged(), self._patience.exchange_s, self._which_not_averaged)

    def _kill_one_and_replace_it(self) -> None:
        """SIGKILL one replica, the last of the last block, which is never the host; see that all goes on; start another."""
        cluster, display, report = self._cluster, self._display, self._report
        display.phase("kill one")
        victim = cluster.holders(cluster.blocks - 1)[-1]
        cluster.kill(victim)
        self._timeline.note("kill", victim.name, victim.life)
        report.killed, report.killed_at_s = victim.label, self._now()
        display.say(f"killed {victim.label} (SIGKILL), which held block {victim.block}")
        before = {member.label: member.number("round") for member in cluster.living}
        text = cluster.ask("generate-after-kill", self._generate(SERVED_BYTES))
        if not text.get("text"):
            raise Failure(f"block {victim.block} was not served after {victim.label} was killed: the chain gave no text")
        display.say(f"block {victim.block} is still served: the chain wrote {text['text']!r}")

        def behind() -> list[str]:
            return [member.label for member in cluster.living if member.number("round") <= before[member.label]]

        self._children.wait(
            lambda: not behind(), self._patience.carry_on_s, lambda: f"after the kill {', '.join(behind())} did not make a round more"
        )
        display.say(f"the other {len(before)} nodes carry on")
        self._rejoin(victim)

    def _rejoin(self, victim: Member) -> None:
        cluster, display, report = self._cluster, self._display, self._report
        display.phase("rejoin")
        began = self._now()
        goal = max(holder.number("round") for holder in cluster.holders(victim.block))
        member = cluster.join(victim.block, paused=False)

        def downloaded() -> bool:
            # The round alone would not tell a download from a merge with somebody who is ahead.
            return member.number("round") >= goal and DOWNLOADED in member.child.log.read_bytes()

        what = f"{member.label} did not take the state of round {goal:.0f} or later from the swarm"
        self._children.wait(
            downloaded, self._patience.rejoin_s, lambda: f"{what} (its phase is {member.phase!r}, its round {member.number('round'):.0f})"
        )
        report.rejoined, report.rejoined_at_s, report.rejoin_s = member.label, self._now(), self._now() - began
        display.say(f"{member.label} took the state of round {member.number('round'):.0f} after {report.rejoin_s:.1f} s")
        what = f"{member.label} was not accepted in an exchange"
        self._children.wait(lambda: member.number("accepted") > 0, self._patience.rejoin_s, what)
        display.say(f"{member.label} averages with the others")

    def _measure_after(self) -> None:
        """The chain's loss and a text, asked for at once: both mostly wait for their turn on a busy machine."""
        cluster, display, report, settings = self._cluster, self._display, self._report, self._settings
        display.phase("measure after")
        clients = [cluster.start_client("eval-after", self._eval()), cluster.start_client("generate", self._generate(settings.length))]
        measured, written = (cluster.answer(client) for client in clients)
        report.after(self._now(), self._loss_of("eval-after", measured))
        display.say(f"the trained chain has {report.loss_after:.3f} nats per token on held-out text")
        report.wrote(settings.prompt, written)
        if report.loss_after >= report.loss_before:
            raise Failure(f"training did not help: the chain's loss was {report.loss_before:.3f} and is {report.loss_after:.3f}")
        if report.text_bytes != settings.length:
            raise Failure(f"the chain wrote {report.text_bytes} bytes instead of {settings.length}")

    def _end(self, ending: Ending) -> None:
        """The last look at what the nodes said, and at what is left."""
        cluster, report = self._cluster, self._report
        report.count(cluster.members, self._now())
        report.ended(ending, self._children.tracebacks())

    def _judge(self, ended_s: float) -> None:
        """Write down all that happened, and let the checkers look at it where that was asked for."""
        settings, report = self._settings, self._report
        lines = self._timeline.merged()
        try:
            timeline.write(self._children.logs / "timeline.jsonl", lines)
        except OSError as error:
            report.fail(f"the timeline could not be written: {error}")
        if not settings.judged or not self._cluster.members:
            return
        grace_s = (ended_s - self._heal_at_s) / 2 - 5
        bounds = Bounds(self._blocks, self._heal_at_s, ended_s, settings.ttl_s, settings.refresh_s, max(5.0, grace_s))
        scene = Recorded(bounds, lines, self._timeline.began)
        pictures = Pictures(scene)
        violations = judge(scene)
        report.judged([str(violation) for violation in violations], pictures.found(violations))
        report.page = page_of(report, scene, pictures, violations)

    def _eval(self) -> list[str]:
        return ["eval", "--data", *self._settings.data, "--windows", str(self._settings.windows)]

    def _generate(self, length: int) -> list[str]:
        return ["generate", "--prompt", self._settings.prompt, "--max-tokens", str(length), "--seed", "0"]

    def _loss_of(self, label: str, answer: dict[str, Any]) -> float:
        """The whole chain's loss. Raises: Failure: there is none, or a block was missing."""
        loss, missing = number(answer, "loss"), answer.get("missing")
        if loss is None or missing:
            raise Failure(f"{label} gave no loss of the whole chain: {str(answer)[:200]}")
        return loss

    def _not_averaged(self) -> list[int]:
        cluster = self._cluster
        return [block for block in range(cluster.blocks) if not any(member.number("accepted") for member in cluster.holders(block))]

    def _which_not_averaged(self) -> str:
        return f"no exchange was accepted in block {', '.join(map(str, self._not_averaged()))}"

    def _heard(self, child: Child, status: Status) -> None:
        """A point of the plot, where the last one is old enough."""
        member = next((member for member in self._cluster.members if member.child is child), None)
        if member is not None:
            self._timeline.said(child, member.name, member.life, status)
        at_s = self._now()
        if member is None or at_s - self._last_point.get(child.label, -POINT_S) < POINT_S:
            return
        self._last_point[child.label] = at_s
        loss, heldout = number(status, "loss"), number(status, "heldout")
        self._report.points.append(
            Point(at_s, child.label, member.block, int(member.number("round")), int(member.number("steps")), loss, heldout)
        )

    def _started(self, member: Member, events: Path) -> None:
        lie = {"lie": member.lie} if member.lie else {}
        self._timeline.note("start", member.name, member.life, block=member.block, **lie)
        self._timeline.expect(member.name, member.life, events)

    def _shown(self) -> Sequence[Member]:
        return self._cluster.members

    def _poll(self) -> None:
        self._display.poll()

    def _now(self) -> float:
        return time.monotonic() - self._begun


def _as_keys(settings: Settings, blocks: int) -> dict[str, object]:
    """The settings as the JSON's keys."""
    return {
        "blocks": blocks,
        "replicas": settings.replicas,
        "minutes": settings.minutes,
        "recipe": str(settings.recipe),
        "data": list(settings.data),
        "windows": settings.windows,
        "kill": settings.kill,
        "text_seed": 0,
        **({"trouble": _trouble(settings.trouble)} if settings.trouble.any else {}),
    }


def _trouble(trouble: Trouble) -> dict[str, object]:
    return asdict(trouble)
