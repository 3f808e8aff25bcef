"""The doctor looks at real things and says how to mend what is wrong; what it reckons is what a block really has."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import resource
import socket
import time
from collections import namedtuple
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from blocktrain.node import doctor, identity, join, proof, sizes
from blocktrain.node.commands import app
from blocktrain.node.config import DoctorConfig
from blocktrain.node.doctor import FAIL, OK, WARN, Finding
from blocktrain.node.reachability import Witness
from blocktrain.node.recipe_file import load_recipe
from blocktrain.node.runtime import Runtime, wall_clock
from blocktrain.node.status import Status
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import PeerId, peer_id_of_key
from blocktrain.protocol.manifest import Grams, Manifest
from blocktrain.protocol.messages import INFO
from tests.conftest import MakeNet
from tests.swarm_kit import Nodes, until

NOBODY = peer_id_of_key(bytes(32))
Memory = namedtuple("Memory", "available")
Disk = namedtuple("Disk", "total used free")


def with_sizes(manifest: Manifest, width: int, layers: int, heads: int) -> Manifest:
    return dataclasses.replace(manifest, model=dataclasses.replace(manifest.model, width=width, layers=layers, heads=heads))


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


# What is reckoned


def test_the_speed_of_a_recipe_here_is_told_with_what_it_means_for_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from blocktrain.node.compute import inventory

    tiny = load_recipe("tiny")
    monkeypatch.setattr(inventory, "matrix_speed", lambda device: 10_000 * sizes.training_flops(tiny) / 0.45)
    finding = only(list(doctor.check_speed(DoctorConfig(recipe=Path("tiny"), device="cpu"))))
    assert finding.level == OK
    assert "about 10.0k tokens/s" in finding.text
    assert "a round in 2 s" in finding.text
    assert "60 planned rounds take 2 min 3 s where 3 volunteers" in finding.text
    slow = only(list(doctor.check_speed(DoctorConfig(recipe=Path("gpu"), device="cpu"))))
    assert (slow.level, bool(slow.fix)) == (WARN, True)
    assert list(doctor.check_speed(DoctorConfig(device="cpu"))) == []


def test_matrix_products_are_really_timed() -> None:
    import torch

    from blocktrain.node.compute import inventory

    assert inventory.matrix_speed(torch.device("cpu"), 0.01) > 1e6


@pytest.mark.parametrize(("width", "layers", "heads"), [(128, 2, 4), (32, 1, 2), (64, 5, 4)])
def test_the_reckoned_parameters_are_those_of_the_real_block(width: int, layers: int, heads: int) -> None:
    from blocktrain.node.compute.model import Block

    manifest = with_sizes(load_recipe("tiny"), width, layers, heads)
    for run in (manifest, dataclasses.replace(manifest, grams=Grams())):
        assert sizes.parameters(run) == sum(parameter.numel() for parameter in Block(run, 0).parameters())


def test_every_ready_recipe_has_its_needs_in_the_right_order() -> None:
    tiny, small, gpu = (sizes.needs(load_recipe(name)) for name in ("tiny", "small", "gpu"))
    assert tiny.memory < small.memory < gpu.memory
    assert gpu.optimizer == 16 * gpu.parameters
    assert tiny.exchange == 2 * tiny.parameters
    assert sizes.needs(load_recipe("tiny"), "fp32").exchange == 2 * tiny.exchange


def test_a_batch_in_parts_needs_less_memory() -> None:
    whole = load_recipe("tiny")
    parts = dataclasses.replace(whole, optimizer=dataclasses.replace(whole.optimizer, accumulate=8))
    assert sizes.needs(parts).memory < sizes.needs(whole).memory


# This machine


def test_12_versions_come_from_really_importing_what_a_node_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = only(list(doctor.check_versions(DoctorConfig())))
    assert finding.level == OK
    assert "hivemind 1.1" in finding.text
    monkeypatch.setattr(doctor, "_IMPORTS", ("json", "nothing_of_this_name"))
    broken, versions = doctor.check_versions(DoctorConfig())
    assert (broken.level, versions.level) == (FAIL, OK)
    assert "nothing_of_this_name cannot be imported: ModuleNotFoundError" in broken.text


def test_a_device_that_is_not_there_fails_with_its_exit_code() -> None:
    finding = only(doctor._all_of(doctor.check_device, DoctorConfig(device="cuda:99")))
    assert (finding.check, finding.level, finding.code) == ("device", FAIL, 5)
    assert "cuda:99" in finding.text
    assert only(list(doctor.check_device(DoctorConfig(device="cpu")))).text.startswith("cpu")


@pytest.mark.parametrize(("share", "level"), [(10.0, OK), (1.1, WARN), (0.9, FAIL)])
def test_memory_is_compared_with_what_the_block_needs(share: float, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need = sizes.needs(load_recipe("tiny")).memory
    monkeypatch.setattr("psutil.virtual_memory", lambda: Memory(int(need * share)))
    monkeypatch.setattr(doctor, "_cgroup_left", lambda: float("inf"))
    finding = only(list(doctor.check_memory(DoctorConfig(recipe=Path("tiny")))))
    assert finding.level == level
    assert (finding.fix == "") == (level == OK)


def test_a_containers_limit_counts_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: Memory(10**15))
    monkeypatch.setattr(doctor, "_cgroup_left", lambda: 10.0**6)
    assert only(list(doctor.check_memory(DoctorConfig(recipe=Path("tiny"))))).level == FAIL


def test_a_full_disk_and_a_folder_of_somebody_else_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DoctorConfig(store=tmp_path / "not" / "there" / "yet")
    assert only(list(doctor.check_disk(config))).level == OK
    assert not (tmp_path / "not").exists()
    monkeypatch.setattr("shutil.disk_usage", lambda path: Disk(10**9, 10**9, 1000))
    assert only(list(doctor.check_disk(config))).level == FAIL
    (tmp_path / "file").touch()
    finding = only(list(doctor.check_disk(DoctorConfig(store=tmp_path / "file"))))
    assert (finding.level, finding.code) == (FAIL, 2)


def test_data_that_is_missing_or_too_short_fails(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("less than one sequence")
    finding = only(list(doctor.check_data(DoctorConfig(data=(str(short),), recipe=Path("tiny")))))
    assert (finding.level, finding.code) == (FAIL, 2)
    assert "one sequence of 129" in finding.text
    assert only(list(doctor.check_data(DoctorConfig(data=(str(short), "builtin"), recipe=Path("tiny"))))).level == OK
    missing = only(doctor._all_of(doctor.check_data, DoctorConfig(data=("missing.txt",))))
    assert (missing.level, missing.code) == (FAIL, 2)


@pytest.mark.parametrize(("soft", "level"), [(256, WARN), (1024, OK), (resource.RLIM_INFINITY, OK)])
def test_few_open_files_are_a_warning(soft: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (soft, 4096))
    finding = only(list(doctor.check_files(DoctorConfig())))
    assert finding.level == level
    assert ("ulimit -n" in finding.fix) == (level == WARN)


def test_a_port_in_use_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        finding = only(doctor._all_of(doctor.check_ports, DoctorConfig(host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",))))
    assert (finding.level, finding.code) == (FAIL, 2)
    assert f"port {port} is in use" in finding.text


@pytest.mark.parametrize(("known", "level"), [(True, OK), (False, WARN), (None, OK)])
def test_an_unsynchronised_clock_is_a_warning(known: bool | None, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_synchronised", lambda: known)
    assert only(list(doctor.check_clock(DoctorConfig()))).level == level


# Peers


@contextlib.asynccontextmanager
async def a_peer(*, answers: bool, clock: Callable[[], float] = wall_clock) -> AsyncIterator[str]:
    """A real libp2p node on loopback; with `answers` it also answers questions like a node of a run. Yields its address."""
    from blocktrain.node.daemon import Settings
    from blocktrain.node.libp2p import Libp2p
    from blocktrain.node.transport import Libp2pTransport

    manifest = load_recipe("tiny")
    with identity.temporary() as who:
        settings = Settings(host_maddrs=("/ip4/127.0.0.1/tcp/0",), local=True)
        libp2p = Libp2p(settings, who, clock)
        await libp2p.start()
        try:
            if answers:
                transport = Libp2pTransport(libp2p, Greeting(manifest, "blocktrain/test"), clock)
                await transport.serve(INFO, join.Info(manifest, lambda: "{}").handle)
            address = next(text for text in await libp2p.addresses() if "127.0.0.1" in text)
            yield f"{address}/p2p/{who.peer_id}"
        finally:
            await libp2p.stop()


async def findings(*peers: str) -> list[Finding]:
    runtime = Runtime(rng=random.Random(0))
    return [finding async for finding in doctor.check_network(DoctorConfig(initial_peers=peers, timeout_s=5), runtime)]


@pytest.mark.real
async def test_peers_are_dialled_and_told_apart() -> None:
    async with a_peer(answers=True) as node, a_peer(answers=False) as bootstrap:
        dead = f"/ip4/127.0.0.1/tcp/9/p2p/{NOBODY}"
        daemon, first, second, third, link, reach = await findings(node, bootstrap, dead)
    assert (daemon.check, daemon.level) == ("daemon", OK)
    assert first.level == OK
    assert "blocktrain/test" in first.text
    assert " ms, its clock " in first.text
    assert second.level == OK
    assert "a DHT node without a block" in second.text
    assert (third.level, third.code) == (FAIL, 3)
    assert third.text.startswith(f"{dead}: ")
    assert third.fix
    assert (link.check, link.level) == ("link", OK)
    assert link.text.startswith("not measured: ")  # neither of them has a state
    assert (reach.check, reach.level) == ("reach", OK)
    assert "nobody who could be asked" in reach.text  # neither of them dials back


@pytest.mark.real
@pytest.mark.parametrize(("slow", "level"), [(1.0, OK), (1e12, WARN)])
async def test_the_bandwidth_to_a_peer_with_a_state_is_measured(
    net_factory: MakeNet, monkeypatch: pytest.MonkeyPatch, slow: float, level: str
) -> None:
    monkeypatch.setattr(doctor, "SLOW_BYTES_PER_S", slow)
    nodes = Nodes(net_factory)
    host = await nodes.start(0)
    host.node._info._status_json = lambda: Status(run=nodes.run.run.hex(), block=0, blocks=3, round=host.round).to_json()
    await until(lambda: host.round >= 1, host.said)
    *_, link, _ = await findings(host.address)
    await nodes.close()
    assert (link.check, link.level, bool(link.fix)) == ("link", level, level == WARN)
    assert "/s from " in link.text, link


@pytest.mark.real
@pytest.mark.parametrize("reached", [True, False])
async def test_a_peer_is_asked_to_dial_this_machine(net_factory: MakeNet, monkeypatch: pytest.MonkeyPatch, reached: bool) -> None:
    if not reached:
        monkeypatch.setattr(proof, "answers_as", refuse)
    host = await net_factory()
    witness = Witness(host.libp2p.seen_at, time.monotonic)
    await host.transport.serve(INFO, join.Info(load_recipe("tiny"), lambda: "{}", witness.answer).handle)
    *_, reach = await findings(host.directory.addresses()[0])
    if reached:
        assert (reach.check, reach.level) == ("reach", OK)
        assert reach.text.startswith("direct: ")
    else:
        assert (reach.check, reach.level) == ("reach", WARN)
        assert "no answer" in reach.text
        assert all(words in reach.fix for words in ("UPnP", "--announce-maddrs", "--relay"))


async def refuse(host: str, port: int, peer: PeerId, timeout_s: float) -> str:
    return "no answer"


@pytest.mark.real
@pytest.mark.parametrize(("ahead_s", "level"), [(5.0, WARN), (60.0, FAIL)])
async def test_a_clock_that_differs_from_a_peers_is_told(ahead_s: float, level: str) -> None:
    async with a_peer(answers=True, clock=lambda: wall_clock() + ahead_s) as node:
        _, finding, *_ = await findings(node)
    assert finding.level == level
    assert f"its clock +{ahead_s:.1f} s" in finding.text


@pytest.mark.real
def test_doctor_prints_one_object_with_every_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["doctor", "--run", "tiny", "--store", str(tmp_path), "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    checks = {finding["check"] for finding in report["findings"]}
    assert checks == {
        "versions",
        "recipe",
        "device",
        "speed",
        "memory",
        "disk",
        "data",
        "files",
        "ports",
        "clock",
        "daemon",
        "peers",
        "reach",
    }


@pytest.mark.real
def test_doctor_ends_with_what_a_node_would_end_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["doctor", "--store", str(tmp_path), "--initial-peers", f"/ip4/127.0.0.1/tcp/9/p2p/{NOBODY}"]) == 3
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if line.startswith("fail  peers")]
    assert err == ""


def test_doctor_leaves_no_task_behind() -> None:
    async def tasks_after() -> set[str]:
        await findings()
        return {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}

    assert asyncio.run(tasks_after()) == set()
