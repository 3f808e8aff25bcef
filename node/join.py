"""From initial peers to a manifest: which runs the swarm knows, which one is meant, and what exactly it is.

A joiner knows nothing but an address. It reads the run records, picks the run (asking for a name where there are several), fetches the
manifest from anybody who announced it and checks it against the run id. The same steps serve a node and a client, and the other
side of them, answering `Ask` on the info stream, stands here too, so that the agreement can be read in one place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from blocktrain.node.ports import Directory, Stream, Transport
from blocktrain.protocol import limits
from blocktrain.protocol.errors import Malformed, NetworkFault, NoPeers, PeerFault, RefusedBySwarm, UsageError
from blocktrain.protocol.ids import PeerId, RunId, run_name, short
from blocktrain.protocol.manifest import Manifest, from_bytes
from blocktrain.protocol.messages import INFO, Answer, Ask, End
from blocktrain.protocol.records import RunRecord

DialBack: TypeAlias = Callable[[PeerId, Sequence[str]], Awaitable[bytes]]

READ_TIMEOUT_S = 5.0
RETRY_S = 0.5


@dataclass(frozen=True)
class KnownRun:
    """A run that the swarm knows, and who says so."""

    run: RunId
    name: str
    peers: tuple[PeerId, ...]
    protocol_min: int
    protocol_max: int


async def known_runs(directory: Directory, *, timeout_s: float) -> list[KnownRun]:
    """Every run that is announced, at most `limits.MAX_RUNS_LISTED`; the ones with most peers first."""
    by_run: dict[RunId, list[tuple[PeerId, RunRecord]]] = {}
    for peer, record, _ in await directory.read_runs(timeout_s=timeout_s):
        by_run.setdefault(record.run, []).append((peer, record))
    runs = [
        KnownRun(
            run,
            members[0][1].name,
            tuple(peer for peer, _ in members),
            min(record.protocol_min for _, record in members),
            max(record.protocol_max for _, record in members),
        )
        for run, members in by_run.items()
    ]
    runs.sort(key=lambda known: (-len(known.peers), known.run))
    return runs[: limits.MAX_RUNS_LISTED]


def choose_run(runs: Sequence[KnownRun], wanted: str) -> KnownRun:
    """The run that is meant by a name, the start of an id, or nothing where there is only one.

    Raises: NoPeers: none is known, or none of that name. UsageError: several fit.
    """
    if not runs:
        raise NoPeers("the initial peers were reached, but they know no run; is a node of the run up and past its start?")
    fitting = [known for known in runs if not wanted or known.name == wanted or known.run.hex().startswith(wanted.lower())]
    listed = ", ".join(f"{known.name} ({run_name(known.run)}, {len(known.peers)} peers)" for known in runs)
    if not fitting:
        raise NoPeers(f"no run {wanted!r} in this swarm; known are: {listed}")
    if len(fitting) > 1:
        raise UsageError(f"several runs fit; choose one with --run NAME or --run ID: {listed}")
    known = fitting[0]
    if known.protocol_max < limits.PROTOCOL_MIN or known.protocol_min > limits.PROTOCOL_MAX:
        raise RefusedBySwarm(
            f"run {known.name} speaks protocol {known.protocol_min}-{known.protocol_max}, this program "
            f"{limits.PROTOCOL_MIN}-{limits.PROTOCOL_MAX}; install a matching version of blocktrain"
        )
    return known


async def fetch_manifest(transport: Transport, known: KnownRun, *, timeout_s: float) -> Manifest:
    """The manifest of a run, from the first announcer who has it.

    Raises: RefusedBySwarm: somebody answered, but refused us. NoPeers: nobody gave it, each named with its reason.
    """
    faults: list[str] = []
    for peer in known.peers:
        try:
            data = await ask(transport, peer, "manifest", timeout_s=timeout_s)
            return from_bytes(bytes(data), known.run)
        except (NetworkFault, PeerFault) as fault:
            faults.append(f"{short(peer)}: {fault}")
    raise NoPeers(f"nobody gave the manifest of run {known.name} ({'; '.join(faults[:5])})")


async def find_run(directory: Directory, transport: Transport, wanted: str, *, timeout_s: float) -> Manifest:
    """The manifest of the run that is meant, waiting a while for the first records to be seen.

    Raises: NoPeers, UsageError, RefusedBySwarm: as `choose_run` and `fetch_manifest`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        runs = await known_runs(directory, timeout_s=READ_TIMEOUT_S)
        try:
            return await fetch_manifest(transport, choose_run(runs, wanted), timeout_s=min(READ_TIMEOUT_S, timeout_s))
        except NoPeers:
            if loop.time() + RETRY_S > deadline:
                raise
        await asyncio.sleep(RETRY_S)


async def ask(transport: Transport, peer: PeerId, what: str, *, timeout_s: float) -> memoryview:
    """One question on an info stream. Raises: NetworkFault, PeerFault."""
    stream = await transport.open(peer, INFO, timeout_s=timeout_s)
    try:
        await stream.send(Ask(what), timeout_s=timeout_s)
        answer, body = await stream.receive(timeout_s=timeout_s, max_body=limits.MAX_BODY_BYTES)
        if isinstance(answer, End):
            raise NetworkFault(f"{answer.reason}{f', {answer.detail}' if answer.detail else ''}")
        if not isinstance(answer, Answer) or answer.what != what:
            raise Malformed(f"{type(answer).__name__} in answer to {what}", peer)
        return body
    finally:
        await stream.close()


class Info:
    """Answers `Ask`: the manifest, our status as JSON, a ping, and whether we can dial who asks."""

    def __init__(self, manifest: Manifest, status_json: Callable[[], str], dial_back: DialBack | None = None) -> None:
        self._manifest = manifest.to_bytes()
        self._status_json = status_json
        self._dial_back = dial_back

    async def handle(self, stream: Stream) -> None:
        question, _ = await stream.receive(timeout_s=limits.OPEN_TIMEOUT_S)
        if not isinstance(question, Ask):
            raise Malformed(f"{type(question).__name__} on an info stream")
        body = b""
        if question.what == "manifest":
            body = self._manifest
        elif question.what == "status":
            body = self._status_json().encode()
        elif question.what == "dial-back":
            if self._dial_back is None:
                raise NetworkFault("this node dials nobody back")
            body = await self._dial_back(stream.peer, question.addresses)
        await stream.send(Answer(question.what), body, timeout_s=limits.OPEN_TIMEOUT_S)
