"""Our clock against the peers': measured so that setting it shows at once, and judged only by enough peers whom we asked ourselves."""

from __future__ import annotations

import asyncio

import pytest

from blocktrain.node import logs, snapshot
from blocktrain.node.snapshot import Clocks
from blocktrain.node.transport import Met
from blocktrain.protocol.errors import RefusedBySwarm
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import PeerId
from blocktrain.swarm_sim.world import virtual_loop


@pytest.fixture(autouse=True)
def say_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "say_once_a_minute", lambda log, level, key, text: log.log(level, text))


HELLO = Greeting(None, "test").hello(0.0)


class Machine:
    """Its wall clock is `off_s` from the true time, which is the loop's."""

    def __init__(self, off_s: float = 0.0) -> None:
        self.off_s = off_s
        self.clocks = Clocks(lambda: self.true() + 1e9 + self.off_s, self.true)

    def true(self) -> float:
        return asyncio.get_running_loop().time()

    def meet(self, count: int, *, wrong_s: float = 0.0, asked: bool = True, name: str = "peer") -> None:
        """Hellos of peers whose clocks are `wrong_s` from the true time."""
        for number in range(count):
            self.clocks.met(Met(PeerId(f"{name} {number}"), HELLO, 0.01 if asked else None, wrong_s - self.off_s))

    async def watched(self, seconds: float) -> RefusedBySwarm | None:
        try:
            async with asyncio.timeout(seconds):
                return await self.clocks.too_far_off()
        except TimeoutError:
            return None


def test_setting_our_clock_shows_in_readings_that_were_taken_before() -> None:
    async def story() -> None:
        machine = Machine()
        machine.meet(3)
        machine.off_s = 30.0
        assert machine.clocks.skew_s() == pytest.approx(-30.0)
        machine.off_s = 0.0
        assert machine.clocks.skew_s() == pytest.approx(0.0)

    virtual_loop.run(story())


def test_a_clock_that_stays_wrong_ends_the_node_and_one_that_is_set_right_in_time_does_not(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        machine = Machine()
        machine.meet(3)
        assert await machine.watched(100) is None
        machine.off_s = -40.0
        began = machine.true()
        assert await machine.watched(snapshot.WRONG_FOR_S - 10) is None
        machine.off_s = 1.0
        assert await machine.watched(100) is None
        assert machine.true() - began < snapshot.READING_LIFE_S
        machine.off_s = -40.0
        fault = await machine.watched(100)
        assert fault is not None
        assert fault.exit_code == 6
        assert "clock is 40 s behind its peers'" in str(fault)

    virtual_loop.run(story())
    assert any("clock is 40 s behind" in line for line in caplog.messages)


@pytest.mark.parametrize(("count", "asked"), [(2, True), (20, False)], ids=["too few", "strangers who call us"])
def test_a_few_peers_or_those_who_call_us_do_not_decide(count: int, asked: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        machine = Machine()
        machine.meet(count, wrong_s=60.0, asked=asked)
        assert await machine.watched(200) is None

    virtual_loop.run(story())
    assert any("clock is 60 s behind" in line for line in caplog.messages)


def test_callers_with_wrong_clocks_do_not_outvote_those_that_we_asked() -> None:
    async def story() -> None:
        machine = Machine()
        machine.meet(5)
        machine.meet(20, wrong_s=60.0, asked=False, name="caller")
        machine.meet(5, wrong_s=60.0, asked=False)  # the same peers, calling: what we measured stands
        assert await machine.watched(200) is None

    virtual_loop.run(story())


def test_old_readings_decide_nothing() -> None:
    async def story() -> None:
        machine = Machine(off_s=50.0)
        machine.meet(5)
        await asyncio.sleep(snapshot.READING_LIFE_S + 1)
        assert machine.clocks.skew_s() is None
        assert await machine.watched(200) is None

    virtual_loop.run(story())
