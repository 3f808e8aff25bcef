"""What a chaos run is judged by, on timelines made by hand: each checker finds what it is there for, and objects to nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blocktrain.protocol.errors import UsageError
from blocktrain.swarm_sim import liar, links, processes, timeline
from blocktrain.swarm_sim.app import main
from blocktrain.swarm_sim.chaos import LIES, Monkey, Trouble
from blocktrain.swarm_sim.chaos_checks import CHECKERS, judge
from blocktrain.swarm_sim.chaos_page import Pictures
from blocktrain.swarm_sim.chaos_scene import Bounds, Recorded
from blocktrain.swarm_sim.cluster import Member
from blocktrain.swarm_sim.page import Bar, Mark, Page, Plot
from blocktrain.swarm_sim.timeline import Timeline
from blocktrain.swarm_sim.world.checkers.base import Violation
from blocktrain.swarm_sim.world.checkers.kept import Kept

Line = dict[str, Any]
BOUNDS = Bounds(blocks=2, heal_at_s=100.0, end_s=300.0, ttl_s=30.0, refresh_s=10.0, grace_s=60.0)
NODES = ("0a", "0b", "1a", "1b")
ROUND_S = 10


def digest(block: int, round: int) -> str:
    return f"{block:04x}{round:012x}"


def said(at_s: float, node: str, round: int, **changes: Any) -> Line:
    known = [[f"peer-{other}", int(other[0])] for other in NODES if other != node]
    usual = {
        "phase": "training", "waiting_for": "nothing", "phase_s": 5.0, "next_action": "an exchange", "round": round, "loss": 2.0,
        "coverage": [2, 2], "peer": f"peer-{node}", "known": known, "checkpoint_round": None, "bytes_out": 1000 * round,
    }  # fmt: skip
    return {"at_s": at_s, "what": "said", "node": node, "life": 1, **usual, **changes}


def healthy() -> list[Line]:
    """Four nodes of two blocks that merge in pairs every ten seconds for five minutes, and say so."""
    lines: list[Line] = []
    for node in NODES:
        block = int(node[0])
        who = {"node": node, "life": 1}
        lines.append({"at_s": 0.0, "what": "start", **who, "block": block})
        lines.append({"at_s": 5.0, "what": "began", **who, "round": 0, "digest": digest(block, 0), "fresh": True})
        lines.append({"at_s": 6.0, "what": "phase", **who, "phase": "training"})
        other = f"peer-{block}{'b' if node[1] == 'a' else 'a'}"
        for round in range(1, 30):
            at_s, id = float(ROUND_S * round), f"{block:02x}{round:02x}"
            measured = {"finite": True, "distance": 1.0, "drift": 1.0, "own_norm": 50.0, "merge": digest(block, round)}
            merged = {"how": "merged", "exchange": id, "round": round, "digest": digest(block, round), "peer": other}
            lines.append({"at_s": at_s, "what": "exchange", **who, "exchange": id, "peer": other, "ours": True, "ends_at": at_s + 20})
            lines.append({"at_s": at_s + 1, "what": "judged", **who, "exchange": id, "peer": other, "ok": True, "reason": "", **measured})
            lines.append({"at_s": at_s + 1, "what": "published", **who, **merged})
            lines.append({"at_s": at_s + 2, "what": "ended", **who, "exchange": id, "peer": other, "kind": "merged", "reason": ""})
        lines += [said(2.0 * tick, node, int(2.0 * tick) // ROUND_S) for tick in range(3, 150)]
    return sorted(lines, key=lambda line: line["at_s"])


def names(lines: list[Line], bounds: Bounds = BOUNDS) -> set[str]:
    """Which checkers object."""
    lines = sorted(lines, key=lambda line: line["at_s"])
    return {violation.checker for violation in judge(Recorded(bounds, lines, 0.0))}


def changed(lines: list[Line], which: Callable[[Line], bool], **changes: Any) -> list[Line]:
    found = [{**line, **changes} if which(line) else line for line in lines]
    assert found != lines, "the change changes something"
    return found


def of(node: str, what: str, since_s: float = 0.0) -> Callable[[Line], bool]:
    return lambda line: line.get("node") == node and line["what"] == what and line["at_s"] >= since_s


def test_a_healthy_swarm_gives_nobody_a_reason_to_object() -> None:
    assert names(healthy()) == set()


def test_there_is_a_fault_for_every_checker() -> None:
    assert {name for name, _ in FAULTS} == {checker.name for checker in CHECKERS}


def dies(lines: list[Line], node: str, at_s: float) -> list[Line]:
    return [line for line in lines if line.get("node") != node or line["at_s"] < at_s] + [
        {"at_s": at_s, "what": "kill", "node": node, "life": 1}
    ]


def back(lines: list[Line]) -> list[Line]:
    """0b publishes an older state in the middle."""
    return [*lines, {"at_s": 155.5, "what": "published", "node": "0b", "life": 1, "how": "own", "round": 3, "digest": digest(0, 3)}]


def fetched(lines: list[Line]) -> list[Line]:
    """0b downloads a state that nobody honest ever had."""
    line = {"at_s": 155.5, "what": "published", "node": "0b", "life": 1, "how": "fetched", "round": 15, "digest": "ff" * 8, "peer": "x"}
    return [*lines, line]


def comes_back_without(lines: list[Line]) -> list[Line]:
    """0b had saved round 9, is killed, and comes back with round 2."""
    lines = changed(lines, of("0b", "said", 95.0), checkpoint_round=9)
    who = {"node": "0b", "life": 2}
    again = [
        {"at_s": 120.0, "what": "start", **who, "block": 0},
        {"at_s": 125.0, "what": "began", **who, "round": 2, "digest": digest(0, 2), "fresh": False},
    ]
    return [*dies(lines, "0b", 110.0), *again]


def learns_alone(lines: list[Line]) -> list[Line]:
    """0b runs ahead with rounds of its own that nobody else gets, and is gone."""
    own = [
        {"at_s": 100.0 + round / 2, "what": "published", "node": "0b", "life": 1, "how": "own", "round": round, "digest": "aa" * 8}
        for round in range(20, 45)
    ]
    return dies([*lines, *own], "0b", 115.0)


FAULTS: list[tuple[str, Callable[[list[Line]], list[Line]]]] = [
    ("order", back),
    ("verified", fetched),
    ("verified", lambda lines: changed(lines, of("0b", "judged", 150.0), finite=False, distance=None)),
    ("verified", lambda lines: changed(lines, of("0b", "judged", 150.0), distance=1e6)),
    ("verified", lambda lines: changed(lines, of("0b", "judged", 150.0), merge="00" * 8)),
    ("verified", lambda lines: [line for line in lines if not of("0b", "judged", 150.0)(line)]),
    ("coverage", lambda lines: changed(lines, of("1a", "said", 150.0), coverage=[0, 2])),
    ("coverage", lambda lines: dies(dies(lines, "0a", 110.0), "0b", 112.0)),
    ("kept", learns_alone),
    ("kept", comes_back_without),
    ("views", lambda lines: changed(lines, of("1a", "said", 280.0), known=[["peer-1b", 1]])),
    ("views", lambda lines: dies(lines, "0b", 110.0)),  # and the others go on to count it
    ("waits", lambda lines: changed(lines, of("1a", "said", 150.0), waiting_for="")),
    ("waits", lambda lines: [line for line in lines if not of("1b", "exchange", 105.0)(line) and not of("1b", "ended", 95.0)(line)]),
    ("progress", lambda lines: [line for line in lines if not of("1b", "published", 200.0)(line)]),
    ("progress", lambda lines: [*lines, {"at_s": 290.0, "what": "phase", "node": "1b", "life": 1, "phase": "joining"}]),
]


@pytest.mark.parametrize(("checker", "fault"), FAULTS)
def test_each_checker_finds_what_it_is_there_for(checker: str, fault: Callable[[list[Line]], list[Line]]) -> None:
    assert checker in names(fault(healthy()))


def test_a_liar_may_say_what_it_likes_and_what_it_is_believed_counts() -> None:
    lines = changed(healthy(), of("0b", "start"), lie="nan")
    lines = changed(lines, of("0b", "judged"), finite=False, merge="00" * 8)
    assert names(lines) == set()
    assert "verified" in names(changed(lines, of("0a", "judged"), finite=False, distance=None))
    scene = Recorded(BOUNDS, lines, 0.0)
    pictures = Pictures(scene)
    scene.run()
    assert (pictures.found([])["lies_used"], pictures.found([])["lies_refused"]) == (29, 0)


def test_a_frozen_node_is_not_asked_and_its_late_exchange_is_forgiven() -> None:
    freeze = {"at_s": 101.0, "what": "freeze", "node": "1b", "life": 1}
    thaw = {"at_s": 159.5, "what": "thaw", "node": "1b", "life": 1}
    asleep = [line for line in healthy() if line.get("node") != "1b" or not 101 < line["at_s"] < 160]
    assert names([*asleep, freeze, thaw]) == set()


def test_lines_of_a_process_that_is_gone_are_not_believed() -> None:
    lines = dies(healthy(), "0b", 110.0)
    late = {"at_s": 120.0, "what": "published", "node": "0b", "life": 0, "how": "own", "round": 1, "digest": digest(0, 1)}
    assert "order" not in names([*lines, late])


def test_a_lost_block_is_counted_and_one_that_was_never_held_is_not() -> None:
    scene = Recorded(replace(BOUNDS, blocks=3), dies(dies(healthy(), "0a", 110.0), "0b", 112.0), 0.0)
    pictures = Pictures(scene)
    scene.run()
    found = pictures.found([Violation(1.0, "kept", "something"), Violation(2.0, "order", "something")])
    assert (found["blocks_lost"], found["states_lost"], found["violations"]) == (1, 1, 2)
    assert {bar.what for bar in pictures.bars} >= {"starting", "training"}
    assert [mark.row for mark in pictures.marks] == ["0a", "0b"]


def test_checkers_of_the_processes_are_those_of_the_world() -> None:
    assert all(checker.__mro__[-3].__module__.startswith("blocktrain.swarm_sim.world.checkers") for checker in CHECKERS)
    assert any(issubclass(checker, Kept) for checker in CHECKERS)


# ---- the timeline -----------------------------------------------------------------------------------------------------------------


def test_a_timeline_merges_what_nodes_wrote_and_leaves_out_half_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('{"at": 1007.5, "what": "began", "round": 0}\n{"at": 1006.0, "what": "phase", "phase": "joining"}\n{"at": 10')
    story = Timeline(began=1000.0)
    story.expect("0a", 2, log)
    story.expect("0b", 1, tmp_path / "never written")
    assert story.merged() == [
        {"at_s": 6.0, "what": "phase", "node": "0a", "life": 2, "phase": "joining"},
        {"at_s": 7.5, "what": "began", "node": "0a", "life": 2, "round": 0},
    ]
    timeline.write(tmp_path / "timeline", story.merged())
    assert timeline.read(tmp_path / "timeline") == story.merged()


# ---- links --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["home", "wan", "edge"])
def test_ready_links_are_there(name: str) -> None:
    assert links.load(Path(name)).all.delay_ms > 0


def test_a_node_of_its_own_link_has_the_rest_from_all(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[all]\ndelay_ms = 5\nloss = 0.01\n[nodes.1b]\ndelay_ms = 300\n")
    found = links.load(tmp_path / "my.toml")
    assert found.of("0a") == links.Quality(delay_ms=5, loss=0.01)
    assert found.of("1b") == links.Quality(delay_ms=300, loss=0.01)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[all", "cannot be read"),
        ("[every]\n", "'every' is neither"),
        ("all = 3\n", "must be a table"),
        ("nodes = 3\n", "must be tables"),
        ("[all]\nspeed = 3\n", "has 'speed'; there are delay_ms, jitter_ms, rate_mbit, loss"),
        ("[nodes.1b]\ndelay_ms = -1\n", r"\[nodes.1b\]: delay_ms must be a number from 0 to 10000"),
        ("[all]\nloss = true\n", "loss must be a number from 0 to 0.5"),
    ],
)
def test_a_links_file_that_makes_no_sense_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        links.load(tmp_path / "bad.toml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--links", "nowhere"], "edge, home, wan"),
        (["--kill-every", "5", "--replicas", "1"], "--kill-every needs a second holder"),
        (["--kill-every", "5", "--minutes", "0.5"], "--minutes 0.5 is too short"),
        (["--kill-every", "3600", "--minutes", "10"], "in --minutes 10 nobody would be killed"),
        (["--kill-every", "0"], "--kill-every"),
        (["--byzantine", "-1"], "--byzantine"),
        (["--report", "page.txt"], "--report page.txt: give a file that ends in .html"),
        (["--report", "nowhere/page.html"], "in a folder that exists"),
    ],
)
def test_trouble_that_cannot_be_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["local", "--out", str(tmp_path / "out"), *options]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_every_lie_that_can_be_asked_for_can_be_told() -> None:
    assert set(LIES) == {*liar.CHANGES, liar.GARBAGE}


# ---- the page -----------------------------------------------------------------------------------------------------------------------


def test_a_page_is_one_file_that_fetches_nothing_and_its_json_has_the_same(tmp_path: Path) -> None:
    page = Page(
        "a <swarm>",
        False,
        {"states lost": 0},
        [Plot("loss", "nats", {"block 0": [(0.0, 5.0), (10.0, 2.0)]})],
        [Bar("0a", 0.0, 8.0, 2, "training"), Bar("0a", 8.0, 10.0, 0, "frozen")],
        [Mark("0a", 10.0, "killed")],
        {"violations": ["   1.0 s  order: <b>"]},
    )
    text = page.write_files(tmp_path / "page.html").read_text()
    assert "a &lt;swarm&gt;" in text
    assert "did not hold" in text
    assert "&lt;b&gt;" in text
    assert text.count("<svg") == 2
    assert "killed" in text
    assert "src=" not in text
    assert 'href="http' not in text
    found = json.loads((tmp_path / "page.json").read_text())
    assert found["states lost"] == 0
    assert found["lives"] == [["0a", 0.0, 8.0, "training"], ["0a", 8.0, 10.0, "frozen"]]
    assert found["marks"] == [["0a", 10.0, "killed"]]


# ---- who is killed ------------------------------------------------------------------------------------------------------------------


class Stage:
    """A cluster and its children, as far as trouble needs them: nobody is really there."""

    def __init__(self, tmp_path: Path, nodes: str) -> None:
        self.timeline = Timeline()
        self.members = [self._member(tmp_path, name) for name in nodes.split()]
        self.blocks = 2
        self.folder = tmp_path
        self.patience = processes.PATIENT
        self.asked: list[str] = []

    def _member(self, tmp_path: Path, name: str, life: int = 1) -> Member:
        child = processes.Child(f"node-{name}", None, "", tmp_path / "out", tmp_path / "log", 0.0, 0.0)  # type: ignore[arg-type]
        child.status = {"phase": "training", "round": 50, "written_at": self.timeline.now()}
        return Member(child, int(name[0]), name=name, life=life)

    def holders(self, block: int) -> list[Member]:
        return [member for member in self.members if member.block == block and not member.killed]

    def kill(self, member: Member) -> None:
        member.killed = True

    def restart(self, member: Member) -> Member:
        self.members.append(self._member(self.folder, member.name, member.life + 1))
        return self.members[-1]

    def join(self, block: int, paused: bool = False, lie: str = "") -> Member:
        self.members.append(self._member(self.folder, f"{block}n{len(self.members)}"))
        self.members[-1].lie = lie
        return self.members[-1]

    def freeze(self, children: list[processes.Child]) -> None:
        for child in children:
            child.frozen = True

    def thaw(self, children: list[processes.Child]) -> None:
        for child in children:
            child.frozen = False

    def start_client(self, label: str, arguments: list[str]) -> processes.Child:
        self.asked.append(label)
        (self.folder / label).write_text('{"text": "so", "seconds": 2.0, "traversals": 4}')
        ended = SimpleNamespace(poll=lambda: 0, pid=0)
        return processes.Child(label, ended, "", self.folder / label, self.folder / label, 0.0, 0.0)  # type: ignore[arg-type]


def monkey(stage: Stage, **trouble: Any) -> Monkey:
    new = Monkey(Trouble(**trouble), stage, stage, stage.timeline, lambda text: None, "The ")  # type: ignore[arg-type]
    new.begin(0.0)
    return new


def happened(stage: Stage, what: str) -> list[str]:
    return [line["node"] for line in stage.timeline.lines if line["what"] == what]


def test_a_kill_comes_when_it_is_due_and_the_node_or_somebody_new_comes_back(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "0a 0b 1a 1b")
    chaos = monkey(stage, kill_every_s=10.0)
    for now in range(200):
        chaos.act(float(now))
    chaos.end()
    tally = chaos.tally
    assert tally.kills == len(happened(stage, "kill")) == 19
    assert tally.same + tally.new == tally.kills
    assert tally.same > tally.new > 0
    assert all(stage.holders(block) for block in range(2))


def test_the_only_good_holder_of_a_block_is_spared(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "0a 0b 1a")
    stage.members[1].child.status["round"] = 3  # 0b has yet to catch up
    chaos = monkey(stage, kill_every_s=10.0)
    for now in range(40):
        chaos.act(float(now))
    assert (chaos.tally.kills, chaos.tally.spared) == (0, 1)
    stage.members[1].child.status["round"] = 48
    chaos.act(41.0)
    assert chaos.tally.kills == 1
    assert happened(stage, "kill")[0] in ("0a", "0b")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda member: member.child.status.update(phase="joining"),
        lambda member: member.child.status.update(written_at=1.0),
        lambda member: setattr(member.child, "frozen", True),
        lambda member: setattr(member, "lie", "nan"),
        lambda member: setattr(member, "killed", True),
    ],
    ids=["joining", "silent", "frozen", "lies", "killed"],
)
def test_who_is_not_at_work_is_no_good_holder(tmp_path: Path, spoil: Callable[[Member], None]) -> None:
    stage = Stage(tmp_path, "0a 0b 1a")
    spoil(stage.members[1])
    chaos = monkey(stage, kill_every_s=10.0)
    chaos.act(11.0)
    assert happened(stage, "kill") == []


def test_the_frozen_thaw_and_at_the_end_all_do(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "0a 0b 1a 1b")
    chaos = monkey(stage, freeze=True)
    for now in range(300):
        chaos.act(float(now))
    chaos.end()
    assert chaos.tally.freezes == len(happened(stage, "freeze")) == len(happened(stage, "thaw")) > 5
    assert not any(member.child.frozen for member in stage.members)


def test_the_same_seed_takes_the_same_victims_and_another_one_others(tmp_path: Path) -> None:
    stories = []
    for seed in (1, 1, 2):
        stage = Stage(tmp_path, "0a 0b 0c 1a 1b 1c")
        chaos = monkey(stage, kill_every_s=10.0, freeze=True, seed=seed)
        for now in range(200):
            chaos.act(float(now))
        stories.append([(line["what"], line.get("node")) for line in stage.timeline.lines])
    assert stories[0] == stories[1] != stories[2]


def test_text_is_asked_for_now_and_then_and_counted(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "0a 1a")
    chaos = monkey(stage, byzantine=1)
    for now in range(100):
        chaos.act(float(now))
    assert stage.asked == ["text-0", "text-1", "text-2"]
    assert (chaos.tally.texts, chaos.tally.texts_failed, chaos.tally.liars) == (3, [], 1)
    assert [line["seconds"] for line in stage.timeline.lines if line["what"] == "text"] == [2.0] * 3
