"""How a client finds out that nobody holds a block: by answers. A directory that does not answer has said nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from blocktrain.node import client
from blocktrain.node.client import LOOKS, MOST_LOOKS, SwarmClient
from blocktrain.node.recipe_file import parse_recipe, ready_text
from blocktrain.node.runtime import Runtime
from blocktrain.protocol.errors import NetworkFault
from blocktrain.protocol.ids import Digest, PeerId, RunId, peer_id_of_key
from blocktrain.protocol.records import Announcement, Seen

RUN = parse_recipe(ready_text("tiny"), "the test's recipe")
ME = peer_id_of_key(b"\x01" * 32)
Answer = Callable[[int, int], bool]  # (how many looks before this one, block) → whether somebody is found


class Directory:
    """Answers as it is told; what raises NetworkFault did not answer."""

    def __init__(self, answer: Answer) -> None:
        self.peer = ME
        self.looks = 0
        self._answer = answer

    async def read_block(self, run: RunId, block: int, bucket: int, *, timeout_s: float) -> list[Seen]:
        self.looks += block == 0 and bucket == 0
        if not self._answer(self.looks - 1, block):
            return []
        word = Announcement(run, block, "training", 3, Digest(b"\x02" * 32), 100.0, 0.0, 1, 1)
        return [Seen(PeerId(peer_id_of_key(bytes([10 + block]) * 32)), word, Runtime().clock() + 30)]


async def looks(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> tuple[int, tuple[int, ...]]:
    """How often a client looked, and which blocks it takes for missing in the end."""
    monkeypatch.setattr(client, "LOOK_PAUSE_S", 0.001)
    directory, runtime = Directory(answer), Runtime()

    async def nobody(*_: object, **__: object) -> None:
        raise NetworkFault("nobody there")

    net = SimpleNamespace(directory=directory, transport=SimpleNamespace(on_hello=None, open=nobody))
    swarm = SwarmClient(net, RUN, runtime)  # type: ignore[arg-type]
    await swarm.look()
    await asyncio.wait_for(swarm.see_all_blocks(), 20)
    return directory.looks, swarm.members.missing(runtime.clock(), None)


async def test_one_look_is_enough_where_everybody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await looks(lambda number, block: True, monkeypatch) == (1, ())


async def test_a_block_that_answers_know_nothing_of_is_missing_after_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await looks(lambda number, block: block != 2, monkeypatch) == (LOOKS, (2,))


async def test_no_answer_is_no_reason_to_take_a_block_for_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent_at_first(number: int, block: int) -> bool:
        if block == 1 and number < LOOKS + 1:
            raise NetworkFault("frozen")
        return True

    assert await looks(silent_at_first, monkeypatch) == (LOOKS + 2, ())


async def test_nobody_waits_for_an_answer_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(number: int, block: int) -> bool:
        raise NetworkFault("frozen")

    assert await looks(silent, monkeypatch) == (MOST_LOOKS, (0, 1, 2))
