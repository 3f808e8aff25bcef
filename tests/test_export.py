"""A model taken home: whole, verified, and the same text without the swarm."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest
from safetensors import safe_open

from blocktrain.node import export
from blocktrain.node.catchup import Donor
from blocktrain.node.client import SwarmClient
from blocktrain.node.compute import flat, takehome
from blocktrain.node.compute.takehome import OfflineModel
from blocktrain.node.ports import Published, Replica
from blocktrain.node.runtime import Runtime
from blocktrain.protocol.errors import NoPeers, UsageError
from blocktrain.protocol.messages import STATE
from blocktrain.protocol.sweep import AUTOREGRESSIVE, ONE_SWEEP, SPECULATIVE
from tests.sweeping import MANIFEST, Place, World, a_request, state_of

WINDOWS = [[(5 * row + place) % 256 for place in range(16)] for row in range(4)]


async def donate(world: World, name: str, spoil: Callable[[memoryview], memoryview] = lambda data: data) -> None:
    """Let a holder give its state away, as a node does."""
    place: Place = world.places[name]
    state = state_of(place.block)
    published = Published(1, flat.digest(state))
    replica = SimpleNamespace(state=lambda: (published, spoil(state)), published=lambda: published)
    await place.transport.serve(STATE, Donor(MANIFEST, place.block, cast(Replica, replica)).handle)


def a_client(world: World) -> SwarmClient:
    net = SimpleNamespace(transport=world.client.transport, directory=world.client.directory)
    client = SwarmClient(net, MANIFEST, Runtime(rng=Random(1)))  # type: ignore[arg-type]
    client.members = world.members
    client.look = world.look  # type: ignore[method-assign]
    return client


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.add("a0", "a1", "a2")
    for name in world.places:
        await donate(world, name)
    yield world
    await world.close()


@pytest.fixture
async def file(world: World, tmp_path: Path) -> Path:
    fetched = await export.fetch_all(a_client(world))
    takehome.save(tmp_path / "model.safetensors", MANIFEST, {block: row[:2] for block, row in fetched.items()})
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("mode", [SPECULATIVE, AUTOREGRESSIVE, ONE_SWEEP])
async def test_a_model_at_home_writes_what_the_swarm_writes(world: World, file: Path, mode: str) -> None:
    model = OfflineModel.load(file)
    assert model.manifest == MANIFEST
    texts, losses = [], []
    for source in (model, a_client(world)):
        async with source.generate(a_request(100, mode=mode)) as (sweep, report):
            texts.append(b"".join([piece.data async for piece in sweep.pieces()]))
        assert [row[3] for row in report.peers] == [place.server._states[-1].published.digest.hex() for place in world.places.values()]
        losses.append((await source.loss(WINDOWS))[0])
    assert texts[0] == texts[1]
    assert losses[0] == losses[1]


def test_any_safetensors_library_reads_the_file(file: Path) -> None:
    assert list(file.parent.iterdir()) == [file], "nothing half written lies beside it"
    with safe_open(str(file), "np") as opened:
        names = set(opened.keys())
        assert opened.get_tensor("blocks.2.embedding").shape == (256, 32)
    assert {name.split(".")[1] for name in names} == {"0", "1", "2"}


def test_a_damaged_or_foreign_file_is_refused_in_one_line(file: Path, tmp_path: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    for name, content, why in (
        ("damaged", bytes(data), "checksum"),
        ("short", bytes(data[:-100]), "cut off"),
        ("text", b"no model at all, but long enough", "--model"),
        ("empty", b"", "--model"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=why) as refused:
            OfflineModel.load(tmp_path / name)
        assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match="No such file"):
        OfflineModel.load(tmp_path / "nowhere")


async def test_a_donor_with_a_wrong_digest_is_passed_by(world: World) -> None:
    await world.add("b1")
    await donate(world, "b1")
    await donate(world, "a1", lambda data: memoryview(bytes(len(data))))
    for _ in range(4):  # whoever is asked first
        fetched = await export.fetch_all(a_client(world))
        assert fetched[1][2] == world.places["b1"].peer


async def test_a_block_that_nobody_gives_is_named_with_the_reasons(world: World) -> None:
    await donate(world, "a1", lambda data: memoryview(bytes(len(data))))
    with pytest.raises(NoPeers, match=r"block 1: no state to be had .*does not have its digest"):
        await export.fetch_all(a_client(world))
    world.leave("a2")
    with pytest.raises(NoPeers, match="block"):
        await export.fetch_all(a_client(world))


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(UsageError, match="--force"):
        export.check_target(tmp_path / "there", False)
    export.check_target(tmp_path / "there", True)
    with pytest.raises(UsageError, match="a folder that exists"):
        export.check_target(tmp_path / "no" / "there", False)
    with pytest.raises(UsageError, match="a folder that exists"):
        export.check_target(tmp_path, True)
