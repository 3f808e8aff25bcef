"""The libp2p daemon (`p2pd`, in hivemind's wheel) as a child process: started, watched, stopped, its last words kept.

We start it ourselves rather than through `hivemind.P2P.create`, for three reasons: it gets a session of its own, so that Ctrl-C in a
terminal reaches us and not it, and we can still say good-bye to the swarm; its output is at hand for messages; and it is killed when it
does not stop. When this process dies, the daemon notices and ends by itself. It reads our key from a pipe: no copy of it lies in a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import logging
import os
import platform
import secrets
import signal
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from blocktrain.node.leftovers import SOCKETS, sweep_sockets
from blocktrain.protocol.errors import BlocktrainError, DoesNotFit, Unreachable

log = logging.getLogger("blocktrain.libp2p")

STOP_TIMEOUT_S: Final = 2.0  # from SIGTERM to SIGKILL
HEALTH_S: Final = 5.0  # how often it is asked whether it is there
FROZEN_S: Final = 30.0  # one that has answered nothing for this long, though asked again and again, is of no use any more
LAST_LINES_S: Final = 0.5  # after its end, to read what it said
LAST_LINES: Final = 20  # of the daemon's output, for messages
MAX_UNARY_BYTES: Final = 4 * 1024 * 1024  # one DHT message


class Children(Protocol):
    """Who kills what is left when this process is ended by force (`runtime.Children`)."""

    def add(self, pid: int) -> None: ...

    def remove(self, pid: int) -> None: ...


@dataclass(frozen=True)
class Settings:
    """What the daemon is started with. Addresses were checked before."""

    host_maddrs: Sequence[str]
    announce_maddrs: Sequence[str] = ()
    relays: Sequence[str] = ()
    public: bool = False
    client: bool = False  # dial only: listen nowhere, serve nobody
    local: bool = False  # the swarm is on this machine: ask no router to map a port
    start_timeout_s: float = 60.0

    @property
    def relayed(self) -> bool:
        return bool(self.relays) and not self.public

    @property
    def maps_ports(self) -> bool:
        """Whether a router is asked to open a port for us."""
        return not (self.local or self.relayed or self.client)


class Owned:
    """Background tasks that belong to an object with a beginning and an end: what raises in them is logged, `close` ends them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s ended by %s: %s", task.get_name(), type(error).__name__, error, exc_info=error)

    async def close(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class Daemon:
    """One running `p2pd`. `died` is set when it ended without being asked to; `reason` then says how.

    Args:
        key: who it is, as an identity's file holds it.
    """

    def __init__(self, settings: Settings, key: bytes, children: Children | None = None) -> None:
        stem = f"hivemind-blocktrain-{os.getpid()}-{secrets.token_hex(6)}"
        self.control_socket = SOCKETS / f"{stem}-p2pd.sock"
        self.client_socket = SOCKETS / f"{stem}-client.sock"
        self.died = asyncio.Event()
        self.reason = ""
        self._settings = settings
        self._key = key
        self._children = children
        self._child: asyncio.subprocess.Process | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._ready = asyncio.Event()
        self._stopping = False
        self._tasks = Owned()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    async def start(self) -> None:
        """Start it and wait until it answers.

        Raises: DoesNotFit: it does not run on this platform. Unreachable: it ended, or was not ready in time; with its last words.
        """
        sweep_sockets()
        binary = find_binary()
        timeout_s = self._settings.start_timeout_s
        key = _to_read(self._key)
        try:
            self._child = await asyncio.create_subprocess_exec(
                str(binary),
                *arguments(self._settings, self.control_socket),
                stdin=key,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={"GOLOG_LOG_LEVEL": "error", **os.environ, "GOLOG_LOG_FMT": "nocolor"},
                start_new_session=True,
            )
        except OSError as error:
            raise _cannot_run(binary, error) from None
        finally:
            os.close(key)
        if self._children is not None:
            self._children.add(self._child.pid)
        output = self._tasks.start(self._read(), "p2pd output")
        self._tasks.start(self._watch(output), "p2pd watch")
        died = asyncio.create_task(self.died.wait())
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({died, ready}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            died.cancel()
            ready.cancel()
            if not self._ready.is_set():
                await self.stop()
        if self.died.is_set():
            raise Unreachable(f"the libp2p daemon did not start: {self.reason}")
        if not self._ready.is_set():
            raise Unreachable(
                f"the libp2p daemon was not ready within {timeout_s:g} s{self._last_words()}; "
                "on a slow disk give it longer with --daemon-start-timeout-s"
            )

    async def stop(self) -> None:
        """End it and wait for that: SIGTERM, then SIGKILL after STOP_TIMEOUT_S. Its sockets are removed. May be called twice."""
        self._stopping = True
        child = self._child
        try:
            if child is not None and child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.terminate()
                try:
                    async with asyncio.timeout(STOP_TIMEOUT_S):
                        await child.wait()
                except TimeoutError:
                    with contextlib.suppress(ProcessLookupError):
                        child.kill()
                    await child.wait()
        except asyncio.CancelledError:
            if child is not None and child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
            raise
        finally:
            if child is not None and self._children is not None:
                self._children.remove(child.pid)
            self.control_socket.unlink(missing_ok=True)
            self.client_socket.unlink(missing_ok=True)
        await self._tasks.close()

    def fail(self, reason: str) -> None:
        """Somebody found out that it is of no use any more."""
        if not self._stopping and not self.died.is_set():
            self.reason = reason
            self.died.set()

    async def _watch(self, output: asyncio.Task[None]) -> None:
        assert self._child is not None
        code = await self._child.wait()
        await asyncio.wait({output}, timeout=LAST_LINES_S)
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self.fail(f"the libp2p daemon ended {how}{self._last_words()}")

    async def _read(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        while True:
            try:
                line = await self._child.stdout.readline()
            except ValueError:  # a line longer than the reader's limit; it was dropped
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").strip()
            self._lines.append(text)
            log.debug("p2pd: %s", text)
            if text.startswith("Peer ID:"):
                self._ready.set()

    def _last_words(self) -> str:
        said = [line[:200] for line in self._lines if line and not line.startswith(("Control socket:", "Peer ID:", "Peer Addrs:", "/"))]
        return f"; it said: {' | '.join(said[-3:])}" if said else ""


def _to_read(data: bytes) -> int:
    """A descriptor that gives a child `data`, which must fit a pipe's buffer, and then the end."""
    ours, theirs = os.pipe()
    with open(theirs, "wb") as file:
        file.write(data)
    return ours


def find_binary() -> Path:
    """The daemon in hivemind's wheel, found without importing hivemind. Raises: DoesNotFit."""
    spec = importlib.util.find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        raise DoesNotFit("hivemind is not installed: pip install 'hivemind>=1.1.12,<1.2'")
    binary = Path(next(iter(spec.submodule_search_locations))) / "hivemind_cli" / "p2pd"
    if not binary.exists():
        raise DoesNotFit(f"hivemind came without its libp2p daemon ({binary} is missing): install its wheel, on Linux or macOS")
    return binary


def _cannot_run(binary: Path, error: OSError) -> BlocktrainError:
    here = f"{platform.system()} on {platform.machine()}"
    if error.errno == errno.ENOEXEC:
        return DoesNotFit(f"the libp2p daemon of this hivemind does not run on {here}: it was built for another kind of machine")
    return DoesNotFit(f"the libp2p daemon {binary} cannot be started on {here}: {error.strerror}")


def arguments(settings: Settings, control_socket: Path) -> list[str]:
    """The daemon's command line. TCP only; no bootstrap peers: we connect to them ourselves and know why one does not answer."""
    flags: dict[str, object] = {
        "listen": f"/unix{control_socket}",
        "id": "/dev/stdin",
        "b": 0,
        "tls": 1,
        "quic": 0,
        "connManager": 1,
        "autonat": 1,
        "relay": 1,
        "autoRelay": int(settings.relayed),
        "natPortMap": int(settings.maps_ports),
        "idleTimeout": "30s",  # ends the daemon if we died before we spoke to it
        "persistentConnMaxMsgSize": MAX_UNARY_BYTES,
        "dhtClient" if settings.client else "dhtServer": 1,
    }
    if settings.client:
        flags["noListenAddrs"] = 1
    else:
        flags["hostAddrs"] = ",".join(settings.host_maddrs)
    if settings.announce_maddrs:
        flags["announceAddrs"] = ",".join(settings.announce_maddrs)
    if settings.relays:
        flags["trustedRelays"] = ",".join(settings.relays)
    if settings.public:
        flags["forceReachabilityPublic"] = 1
    elif settings.relayed:
        flags["forceReachabilityPrivate"] = 1
    return [f"-{key}={value}" for key, value in flags.items()]
