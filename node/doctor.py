"""What `blocktrain doctor` finds out before somebody joins: will it work here, and if not, what mends it?

Every check looks at the real thing with the code that a node uses: it imports what a node imports, starts the daemon, binds the ports,
dials the peers. A finding is ok, warn (it will work, but …) or fail (it will not), the last two with a remedy.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blocktrain import __version__
from blocktrain.node import addresses, dialing, sizes
from blocktrain.node.config import DoctorConfig, Network
from blocktrain.node.runtime import Runtime
from blocktrain.node.status import duration, quantity
from blocktrain.protocol import limits
from blocktrain.protocol.errors import BlocktrainError, DoesNotFit, NetworkFault, PeerFault, RefusedBySwarm, Unreachable, UsageError
from blocktrain.protocol.manifest import Manifest

if TYPE_CHECKING:
    from blocktrain.node.libp2p import Libp2p
    from blocktrain.node.transport import Met

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"

FEW_FILES: Final = 1024  # below it a node lowers its number of streams
MIN_DISK_BYTES: Final = 200 * 1024**2
DAEMON_TIMEOUT_S: Final = 60.0
SHARE_REACHED: Final = {"cpu": 0.45, "cuda": 0.35}  # of a matrix product's speed: measured on a CPU; on GPUs a cautious guess
LONG_S: Final = 365 * 86400.0
SLOW_BYTES_PER_S: Final = 256 * 1024
NOTABLE_SKEW_S: Final = 2.0
_IMPORTS: Final = ("torch", "numpy", "blocktrain.node.libp2p", "msgpack", "blake3", "cryptography", "psutil", "tokenizers", "safetensors")
_VERSIONS: Final = ("torch", "numpy", "hivemind", "protobuf", "uvloop", "msgpack", "cryptography", "safetensors", "tokenizers")
_UNSYNCHRONISED: Final = 0x0040  # STA_UNSYNC of adjtimex(2)


@dataclass(frozen=True)
class Finding:
    """One line. `fix` says what mends a warn or fail; `code` is the exit code that a fail stands for."""

    check: str
    level: str
    text: str
    fix: str = ""
    code: int = DoesNotFit.exit_code


Check = Callable[[DoctorConfig], Iterator[Finding]]


async def examine(config: DoctorConfig, runtime: Runtime) -> AsyncIterator[Finding]:
    """All checks, each as soon as it is known. Nothing is left behind; the network is used only to reach `config.initial_peers`."""
    for check in CHECKS:
        for finding in await asyncio.to_thread(_all_of, check, config):
            yield finding
    async for finding in check_network(config, runtime):
        yield finding


def _all_of(check: Check, config: DoctorConfig) -> list[Finding]:
    """The findings of one check; an expected error in it is one, too."""
    name = check.__name__.removeprefix("check_")
    try:
        return list(check(config))
    except BlocktrainError as error:
        return [Finding(name, FAIL, str(error), code=error.exit_code)]


# ---- this machine ---------------------------------------------------------------------------------------------------------------------


def check_versions(config: DoctorConfig) -> Iterator[Finding]:
    """Import everything that a node imports, and say which versions these are."""
    for name in _IMPORTS:
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken installation raises whatever it likes
            text = f"{name} cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            yield Finding("versions", FAIL, text, "install again in a fresh virtual environment: pip install blocktrain")
    found = ", ".join(f"{name} {_version(name)}" for name in _VERSIONS)
    system = f"{platform.system()} {platform.machine()}"
    yield Finding("versions", OK, f"blocktrain {__version__} on Python {platform.python_version()}, {system}: {found}")


def check_recipe(config: DoctorConfig) -> Iterator[Finding]:
    manifest = _manifest(config)
    if manifest is None:
        return
    need = sizes.needs(manifest)
    schedule = manifest.schedule
    yield Finding(
        "recipe",
        OK,
        f"{manifest.name}: {manifest.blocks} blocks of {need.parameters:,} parameters; a block needs about {_size(need.memory)} of memory "
        f"({_size(need.optimizer)} of it for weights, gradients and moments) and {_size(need.disk)} of disk; "
        f"an exchange moves {_size(need.exchange)} each way in bf16, every {schedule.steps_per_round} steps",
    )


def check_device(config: DoctorConfig) -> Iterator[Finding]:
    from blocktrain.node.compute import device, inventory

    chosen = device.choose(config.device)
    if chosen.type == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if cores < 2:
            yield Finding("device", WARN, "cpu, one core", "training and serving will share it; a second core keeps answers quick")
        else:
            yield Finding("device", OK, f"cpu, {cores} cores")
        return
    gpu = inventory.look(chosen)
    text = f"{chosen}, {gpu.name}, {_size(gpu.free)} of {_size(gpu.total)} free"
    manifest = _manifest(config)
    if manifest is not None and sizes.needs(manifest).gpu > gpu.free:
        text += f", a block of {manifest.name} needs about {_size(sizes.needs(manifest).gpu)} of it"
        yield Finding("device", FAIL, text, "end what else uses the GPU, or train on the CPU with --device cpu")
    else:
        yield Finding("device", OK, text)


def check_speed(config: DoctorConfig) -> Iterator[Finding]:
    """How fast this device would train the recipe's block, and how long its planned rounds are at that pace."""
    from blocktrain.node.compute import device, inventory

    manifest = _manifest(config)
    if manifest is None:
        return
    chosen = device.choose(config.device)
    tokens_per_s = SHARE_REACHED[chosen.type] * inventory.matrix_speed(chosen) / sizes.training_flops(manifest)
    round_s = sizes.tokens_per_round(manifest) / tokens_per_s
    rounds, needed = manifest.schedule.planned_rounds, sizes.needs(manifest)
    text = (
        f"about {quantity(tokens_per_s)} tokens/s of a block of {manifest.name} here (reckoned from a matrix product), a round in "
        f"{duration(round_s)}, with {_size(needed.exchange)} each way; the {rounds} planned rounds take {duration(rounds * round_s)} where "
        f"{manifest.blocks} volunteers like this hold a block each, and train on twice the text where {2 * manifest.blocks} do"
    )
    if rounds * round_s > LONG_S:
        yield Finding("speed", WARN, text, "hold a block of a smaller recipe here, or use a faster device")
    else:
        yield Finding("speed", OK, text)


def check_memory(config: DoctorConfig) -> Iterator[Finding]:
    import psutil

    free = min(psutil.virtual_memory().available, _cgroup_left())
    manifest = _manifest(config)
    if manifest is None:
        level = OK if free > 2 * sizes.PROCESS_BYTES else WARN
        yield Finding(
            "memory", level, f"{_size(free)} free; --run FILE tells what a block needs", "" if level == OK else "end other programs"
        )
        return
    need = sizes.needs(manifest).memory
    text = f"{_size(free)} free, a block of {manifest.name} needs about {_size(need)}"
    if need > free:
        yield Finding("memory", FAIL, text, "free memory, or host a run with smaller blocks (width, layers, or batch and accumulate)")
    elif need > 0.8 * free:
        yield Finding("memory", WARN, text, "it is close: end other programs first")
    else:
        yield Finding("memory", OK, text)


def check_disk(config: DoctorConfig) -> Iterator[Finding]:
    import platformdirs

    wanted = config.store or Path(platformdirs.user_data_dir("blocktrain"))
    folder = next(parent for parent in (wanted.absolute(), *wanted.absolute().parents) if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        text = f"{wanted} cannot be written by this user"
        yield Finding("disk", FAIL, text, "give another folder with --store", UsageError.exit_code)
        return
    free = shutil.disk_usage(folder).free
    manifest = _manifest(config)
    need = MIN_DISK_BYTES + (sizes.needs(manifest).disk if manifest else 0)
    text = f"{_size(free)} free for checkpoints in {wanted}"
    if free < need:
        yield Finding("disk", FAIL, f"{text}, {_size(need)} are needed", "free some, or give a folder on another disk with --store")
    else:
        yield Finding("disk", OK, text)


def check_data(config: DoctorConfig) -> Iterator[Finding]:
    from blocktrain.node import sources
    from blocktrain.node.commands import checks

    checks.check_data(config.data)
    manifest = _manifest(config)
    local = [source for source in config.data if not checks.has_name(source)]
    size = sum(file.size for source in local for file in sources.find_files(source))
    words = [f"{_size(size)} in local files"] if local else []
    words += [source for source in config.data if source not in local]
    if any(source.startswith(sources.HUGGING_FACE) for source in config.data):
        try:
            importlib.import_module("datasets")
        except ImportError:
            yield Finding("data", FAIL, "the package datasets is not installed", "pip install 'blocktrain[datasets]'", UsageError.exit_code)
            return
    if manifest is not None and local and size <= manifest.model.context and len(local) == len(config.data):
        text = f"{size} bytes are less than one sequence of {manifest.model.context + 1}"
        yield Finding("data", FAIL, text, "give more text with --data", UsageError.exit_code)
        return
    yield Finding("data", OK, ", ".join(words))


def check_files(config: DoctorConfig) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{'no limit' if soft == resource.RLIM_INFINITY else soft} open files allowed"
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        more = "" if hard in (resource.RLIM_INFINITY, soft) else f" (up to {hard} without the administrator)"
        yield Finding("files", WARN, f"only {text}", f"raise it with: ulimit -n {FEW_FILES * 4}{more}")
    else:
        yield Finding("files", OK, text)


def check_ports(config: DoctorConfig) -> Iterator[Finding]:
    dialing.check_ports(config.host_maddrs)
    yield Finding("ports", OK, f"can listen on {' '.join(config.host_maddrs)}")


def check_clock(config: DoctorConfig) -> Iterator[Finding]:
    """Whether the system keeps the clock right. How far it is from the peers' is found when they are asked."""
    synchronised = _synchronised()
    if synchronised is False:
        text = "the system does not know whether its clock is right (no NTP synchronisation)"
        yield Finding("clock", WARN, text, "turn it on: timedatectl set-ntp true; in a container, on its host")
    else:
        yield Finding("clock", OK, "synchronised" if synchronised else "this system does not say whether it is synchronised")


def _synchronised() -> bool | None:
    """What the kernel knows of NTP; None where it cannot be asked (other than Linux)."""
    if sys.platform != "linux":
        return None

    class Timex(ctypes.Structure):
        _fields_ = (
            ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
            ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("rest", ctypes.c_char * 512),
        )  # fmt: skip

    timex = Timex()
    try:
        if ctypes.CDLL(None).adjtimex(ctypes.byref(timex)) < 0:
            return None
    except (OSError, AttributeError):
        return None
    return not timex.status & _UNSYNCHRONISED


CHECKS: Final[tuple[Check, ...]] = (
    check_versions, check_recipe, check_device, check_speed, check_memory, check_disk, check_data, check_files, check_ports, check_clock,
)  # fmt: skip


# ---- the network ----------------------------------------------------------------------------------------------------------------------


async def check_network(config: DoctorConfig, runtime: Runtime) -> AsyncIterator[Finding]:
    """Start the daemon as a client, and reach each initial peer."""
    from blocktrain.node import identity
    from blocktrain.node.daemon import Settings
    from blocktrain.node.libp2p import Libp2p

    try:
        peers = addresses.parse_all(config.initial_peers, "--initial-peers", needs_peer=True)
    except UsageError as error:
        yield Finding("peers", FAIL, str(error), code=error.exit_code)
        return
    loop = asyncio.get_running_loop()
    with identity.temporary() as nobody:
        settings = Settings(host_maddrs=(), client=True, start_timeout_s=DAEMON_TIMEOUT_S)
        libp2p = Libp2p(settings, nobody, runtime.clock, runtime.children)
        began = loop.time()
        try:
            await libp2p.start()
        except BlocktrainError as error:
            yield Finding("daemon", FAIL, str(error), code=error.exit_code)
            return
        try:
            yield Finding("daemon", OK, f"libp2p starts in {loop.time() - began:.1f} s")
            if not peers:
                yield Finding("peers", OK, "none given; --initial-peers ADDRESS … tries and times them")
            found = await asyncio.gather(*(_check_peer(libp2p, address, config.timeout_s, runtime) for address in peers))
            for finding in found:
                yield finding
            sound = [address for address, finding in zip(peers, found, strict=True) if finding.level != FAIL]
            if sound:
                yield await _check_bandwidth(libp2p, sound, config.timeout_s, runtime)
        finally:
            await libp2p.stop()
    yield await _check_reach(config, sound, runtime)


async def _check_reach(config: DoctorConfig, peers: list[addresses.Address], runtime: Runtime) -> Finding:
    """Whether others could call a node here: directly, or not without help."""
    from blocktrain.node import reachability

    if not peers:
        return Finding("reach", OK, "not tried: --initial-peers ADDRESS … of a swarm asks its nodes to dial this machine")
    network = Network(initial_peers=tuple(address.text for address in peers), host_maddrs=config.host_maddrs)
    try:
        verdict = await reachability.try_out(network, runtime, f"blocktrain/{__version__} doctor")
    except BlocktrainError as error:
        return Finding("reach", FAIL, str(error), code=error.exit_code)
    if verdict.word == "direct":
        return Finding("reach", OK, f"direct: {verdict.why}")
    if verdict.word == "no":
        why, _, fix = verdict.why.partition("; ")
        return Finding("reach", WARN, f"{why}: a node here would train, but serve nobody", f"{fix}, best four of them")
    return Finding("reach", OK, f"{verdict.word}: {verdict.why}")


async def _check_peer(libp2p: Libp2p, address: addresses.Address, timeout_s: float, runtime: Runtime) -> Finding:
    """Dial one peer and ask it for nothing but an answer."""
    from blocktrain.node import join
    from blocktrain.node.transport import Libp2pTransport
    from blocktrain.protocol.handshake import Greeting
    from blocktrain.protocol.ids import PeerId

    peer = PeerId(address.peer)
    met: list[Met] = []
    unreachable = Finding("peers", FAIL, address.text, code=Unreachable.exit_code)
    try:
        await libp2p.connect(peer, [address.text], timeout_s=timeout_s)
    except NetworkFault as fault:
        return replace(unreachable, text=f"{address.text}: {fault}", fix="ask its owner whether it runs and whether its port is open")
    transport = Libp2pTransport(libp2p, Greeting(None, f"blocktrain/{__version__} doctor"), runtime.clock, met.append)
    try:
        await join.ask(transport, peer, "ping", timeout_s=timeout_s)
    except (NetworkFault, PeerFault) as fault:
        if not met:
            if await libp2p.ping(peer, timeout_s=timeout_s):
                return Finding("peers", OK, f"{address.text}: a DHT node without a block; it can introduce us to others")
            return replace(unreachable, text=f"{address.text}: connected, but no answer: {fault}", fix="try another initial peer")
        text = f"{address.text}: {fault}"
        return Finding("peers", FAIL, text, "install the version of blocktrain that the swarm uses", RefusedBySwarm.exit_code)
    rtt_ms, skew_s = (met[0].rtt_s or 0.0) * 1000, met[0].skew_s
    text = f"{address.text}: {met[0].hello.agent or 'answers'}, {rtt_ms:.0f} ms, its clock {skew_s:+.1f} s from ours"
    if abs(skew_s) > limits.MAX_CLOCK_SKEW_S:
        return Finding("peers", FAIL, text, "set this machine's clock (timedatectl set-ntp true)", RefusedBySwarm.exit_code)
    if abs(skew_s) > NOTABLE_SKEW_S:
        return Finding("peers", WARN, text, "set this machine's clock (timedatectl set-ntp true)")
    return Finding("peers", OK, text)


async def _check_bandwidth(libp2p: Libp2p, peers: list[addresses.Address], timeout_s: float, runtime: Runtime) -> Finding:
    """From the first peer that has something to send."""
    from blocktrain.node import bandwidth
    from blocktrain.node.transport import Libp2pTransport
    from blocktrain.protocol.handshake import Greeting
    from blocktrain.protocol.ids import PeerId

    transport = Libp2pTransport(libp2p, Greeting(None, f"blocktrain/{__version__} doctor"), runtime.clock)
    why = ""
    for address in peers:
        try:
            rate = await bandwidth.measure(transport, PeerId(address.peer), timeout_s=timeout_s)
        except (NetworkFault, PeerFault) as fault:
            why = str(fault)
            continue
        if rate < SLOW_BYTES_PER_S:
            text = f"{_size(rate)}/s from {address.text}"
            return Finding("link", WARN, text, "exchanges may miss their deadline: choose a smaller codec (int8) or a longer tau-s")
        return Finding("link", OK, f"{_size(rate)}/s from {address.text}")
    return Finding("link", OK, f"not measured: {why}")


# ---- small things ---------------------------------------------------------------------------------------------------------------------


def _manifest(config: DoctorConfig) -> Manifest | None:
    """The recipe to fit, if one was given. Raises: UsageError: it is none."""
    if config.recipe is None:
        return None
    from blocktrain.node.recipe_file import load_recipe

    return load_recipe(config.recipe)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _cgroup_left() -> float:
    """Memory that a container's limit leaves us, in bytes; infinite without one."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if limit == "max" else max(0.0, int(limit) - used)


def _size(count: float) -> str:
    """Bytes for people, in the units in which memory is sold."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
