"""Settings of the whole suite, and what several files need: real networks of nodes in this process, and a check that nothing is left."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from blocktrain.node import identity
from blocktrain.node.config import Network
from blocktrain.node.identity import Identity
from blocktrain.node.network import Net, open_network
from blocktrain.protocol.handshake import Greeting
from tests.swarm_kit import Nodes

# No limit on one example's time: a busy machine is not a bug. A failure prints the line that replays it.
settings.register_profile("blocktrain", deadline=None, print_blob=True, database=None)
settings.load_profile("blocktrain")

CACHES = ("torchinductor_", "matplotlib-")  # libraries keep what they compiled
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
MakeNet = Callable[..., Awaitable[Net]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real nodes wait for daemons and for each other, within deadlines. Where a machine is so busy that one is missed, the test is tried
    again, and the summary says RERUN: a test that fails three times is broken, one that shows up there often is badly made."""
    for item in items:
        waits = inspect.iscoroutinefunction(getattr(item, "obj", None))  # over twins in memory: deadlines, too
        if waits or item.get_closest_marker("real"):
            item.add_marker(pytest.mark.flaky(reruns=2))


def daemons_of_this_process() -> list[int]:
    """The libp2p daemons that this process started and that still run."""
    return [child.pid for child in psutil.Process().children() if child.name() == "p2pd" and child.status() != psutil.STATUS_ZOMBIE]


def sockets_of_this_process() -> list[str]:
    return sorted(str(path) for path in Path("/tmp").glob(f"hivemind-blocktrain-{os.getpid()}-*.sock"))


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Path, str]]:
    """A temporary folder and a runtime folder of our own, which all programs that tests start inherit, and which must be empty at the end.

    What lay in it after a test stands in the dictionary, with that test.
    """
    tmp_path_factory.getbasetemp()  # pytest's own folders stay where they are kept for a look at a failure
    folder = Path(tempfile.mkdtemp(prefix="bt-"))  # short: sockets lie in it, whose paths have at most 107 bytes
    seen: dict[Path, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield seen
    left = [f"{path.relative_to(folder)}, since {seen.get(path, 'the last test')}" for path in things_in(folder)]
    shutil.rmtree(folder)
    assert not left, "left in the temporary folder: " + "; ".join(left)


def things_in(folder: Path) -> list[Path]:
    """What lies in a temporary folder, but for libraries' caches and the runtime folder itself, and what lies in that one."""
    runtime = folder / "blocktrain"
    top = [path for path in folder.iterdir() if path != runtime and not path.name.startswith(CACHES)]
    return sorted([*top, *runtime.glob("*")])


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest, temporary_folder: dict[Path, str]) -> Iterator[None]:
    """After a `real` test no daemon of this process runs and none of its sockets lies about."""
    yield
    for path in things_in(Path(tempfile.gettempdir())):
        temporary_folder.setdefault(path, request.node.nodeid)
    if request.node.get_closest_marker("real"):
        assert daemons_of_this_process() == []
        assert sockets_of_this_process() == []


@pytest.fixture
def new_identity(tmp_path: Path) -> Iterator[Callable[[], Identity]]:
    """Makes identities that are released at the end."""
    made: list[Identity] = []

    def make() -> Identity:
        made.append(identity.load_or_create(tmp_path / "identities" / f"{len(made)}.key"))
        return made[-1]

    yield make
    for each in made:
        each.release()


@pytest.fixture
async def net_factory(nothing_is_left: None, new_identity: Callable[[], Identity]) -> AsyncIterator[MakeNet]:
    """Opens real networks in this process, and closes them at the end, the last first.

    `await net_factory(*initial)`: `initial` are addresses, or nets whose address is taken. Named arguments: `who`, `greeting`, `clock`,
    `client_mode`, `on_hello`, and those of `config.Network`.
    """
    async with AsyncExitStack() as stack:

        async def make(
            *initial: Net | str,
            who: Identity | None = None,
            greeting: Greeting | None = None,
            clock: Callable[[], float] = time.time,
            client_mode: bool = False,
            **more: object,
        ) -> Net:
            on_hello = more.pop("on_hello", lambda met: None)
            peers = tuple(each if isinstance(each, str) else each.directory.addresses()[0] for each in initial)
            config = Network(**{"initial_peers": peers, "host_maddrs": LOOPBACK, **more})  # type: ignore[arg-type]
            me = who if who is not None or client_mode else new_identity()
            said = greeting or Greeting(None, "test")
            return await stack.enter_async_context(
                open_network(config, me, said, clock, client_mode=client_mode, on_hello=on_hello)  # type: ignore[arg-type]
            )

        yield make


@pytest.fixture
async def nodes(net_factory: MakeNet) -> AsyncIterator[Nodes]:
    """Starts real nodes in this process and ends them."""
    made = Nodes(net_factory)
    yield made
    await made.close()
