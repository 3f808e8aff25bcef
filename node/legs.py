"""One open session across the holders of a chain: a stream to each of them, and whatever they say on it.

The client's half of node/holder.py, without any decision: `traversal.SwarmChain` decides what is sent where and what to do when a session
breaks. Every stream is listened to all the time, because the holder whose stream ends, or who says that the next one is gone, is the one
to replace. A holder that is frozen says nothing: when an answer is later than usual all are pinged, and those that are silent are named.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from blocktrain.node.join import ask
from blocktrain.node.ports import Stream, Transport
from blocktrain.protocol import limits
from blocktrain.protocol.chains import Hop
from blocktrain.protocol.errors import Malformed, NetworkFault, PeerFault
from blocktrain.protocol.ids import NO_DIGEST, PeerId, short
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import SWEEP, Close, End, Open, Ready, Scored, Step

PING_TIMEOUT_S: Final = 2.0
FOREVER_S: Final = 86_400.0  # a holder's silence is no fault here: an answer has its own deadline
GOODBYE_S: Final = 1.0
GONE_S: Final = 0.05


@dataclass(frozen=True)
class Leg:
    """One holder of the open session. `hop` says what it really serves, by its own word."""

    hop: Hop
    stream: Stream
    listening: asyncio.Task[None]


class Broken(Exception):
    """The session cannot go on.

    Attributes:
        culprits: the peers that failed; none where nobody is to blame (an evicted session).
        offence: they broke the agreement.
        retry_after_s: they have no room, and say when to ask again.
        relay: everybody is there, but two holders cannot reach each other: the client must carry what goes between them.
    """

    def __init__(
        self, why: str, culprits: Collection[PeerId] = (), *, offence: bool = False, retry_after_s: float = 0.0, relay: bool = False
    ) -> None:
        super().__init__(why)
        self.culprits = set(culprits)
        self.offence = offence
        self.retry_after_s = retry_after_s
        self.relay = relay


class Session:
    """Open it with `await Session.open(…)`, close it with `close`."""

    def __init__(self, transport: Transport, session: bytes, linked: bool) -> None:
        self.legs: list[Leg] = []
        self.linked = linked
        self._transport = transport
        self._id = session
        self._heard: asyncio.Queue[tuple[Leg, Scored, memoryview] | Broken] = asyncio.Queue()

    @classmethod
    async def open(
        cls, transport: Transport, manifest: Manifest, hops: Sequence[Hop], session: bytes, *, linked: bool, met: Callable[[PeerId], None]
    ) -> Session:
        """Open on all holders at once. `linked`: each passes its work on to the next one; otherwise all answer us.

        Args:
            hops: with the digest to ask for; where a holder has that no more, it serves its newest state.
            met: called for every holder that answered.
        Raises: Broken: naming those who did not open.
        """
        self = cls(transport, session, linked)
        onward: list[Hop | None] = [*hops[1:], None] if linked else [None] * len(hops)
        tasks = [asyncio.create_task(self._leg(manifest, hop, after)) for hop, after in zip(hops, onward, strict=True)]
        try:
            results = await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            settled = await asyncio.gather(*tasks, return_exceptions=True)
            self.legs = [leg for leg in settled if isinstance(leg, Leg)]
            await self.close()
            raise
        self.legs = [result for result in results if isinstance(result, Leg)]
        for leg in self.legs:
            met(leg.hop.peer)
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            await self.close()
            for error in failed:
                if not isinstance(error, Broken):
                    raise error
            faults = [error for error in failed if isinstance(error, Broken)]
            raise Broken(
                "; ".join(map(str, faults)),
                {peer for fault in faults for peer in fault.culprits},
                offence=any(fault.offence for fault in faults),
                retry_after_s=max(fault.retry_after_s for fault in faults) if all(fault.retry_after_s for fault in faults) else 0.0,
            )
        return self

    async def _leg(self, manifest: Manifest, hop: Hop, onward: Hop | None) -> Leg:
        for digest in (hop.digest, NO_DIGEST) if hop.digest != NO_DIGEST else (NO_DIGEST,):
            stream: Stream | None = None
            try:
                stream = await self._transport.open(hop.peer, SWEEP, timeout_s=limits.OPEN_TIMEOUT_S)
                request = Open(
                    session=self._id,
                    run=manifest.run,
                    block=hop.block,
                    digest=digest,
                    next_peer=onward.peer if onward else "",
                    next_block=onward.block if onward else -1,
                )
                await stream.send(request, timeout_s=limits.OPEN_TIMEOUT_S)
                ready, _ = await stream.receive(timeout_s=limits.OPEN_TIMEOUT_S)
                if isinstance(ready, End):
                    await stream.close()
                    if ready.reason == "unknown" and digest != NO_DIGEST:
                        continue
                    detail = f"{ready.reason}{f', {ready.detail}' if ready.detail else ''}"
                    wait_s = max(ready.retry_after_s, 0.1) if ready.reason == "busy" else 0.0
                    raise Broken(f"block {hop.block} at {short(hop.peer)}: {detail}", [hop.peer], retry_after_s=wait_s)
                if not isinstance(ready, Ready) or ready.block != hop.block:
                    raise Malformed(f"{type(ready).__name__} in answer to Open")
            except (NetworkFault, PeerFault) as fault:
                if stream is not None:
                    await stream.close()
                why = f"block {hop.block} at {short(hop.peer)}: {fault}"
                raise Broken(why, [hop.peer], offence=isinstance(fault, PeerFault)) from None
            except asyncio.CancelledError:
                if stream is not None:
                    await stream.close()
                raise
            served = replace(hop, round=ready.round, digest=ready.digest)
            return Leg(served, stream, asyncio.create_task(self._listen(served, stream), name=f"sweep-{short(hop.peer)}"))
        raise AssertionError("the last digest asked for is none")

    async def _listen(self, hop: Hop, stream: Stream) -> None:
        """Pass on what a holder says, to its end."""
        try:
            while True:
                message, body = await stream.receive(timeout_s=FOREVER_S, max_body=limits.MAX_BODY_BYTES)
                if isinstance(message, End):
                    self._heard.put_nowait(await self._ended(hop, message))
                    return
                if not isinstance(message, Scored):
                    raise Malformed(f"{type(message).__name__} inside a session")
                leg = next((leg for leg in self.legs if leg.hop == hop), None)
                if leg is not None:
                    self._heard.put_nowait((leg, message, body))
        except (NetworkFault, PeerFault) as fault:
            why = f"block {hop.block} at {short(hop.peer)}: {fault}"
            self._heard.put_nowait(Broken(why, [hop.peer], offence=isinstance(fault, PeerFault)))

    async def _ended(self, hop: Hop, end: End) -> Broken:
        """Who is to blame when a holder ends the session."""
        why = f"block {hop.block} at {short(hop.peer)}: {end.reason}{f', {end.detail}' if end.detail else ''}"
        if end.reason in ("unknown", "late"):
            return Broken(why)  # it made room; a new session will do
        peers = [leg.hop.peer for leg in self.legs]
        place = peers.index(hop.peer) if hop.peer in peers else 0
        if end.reason == "gone" and place + 1 < len(peers):
            following = peers[place + 1]
            if await self._answers(following):
                return Broken(why, relay=True)
            return Broken(why, [following])
        if end.reason == "malformed" and place and self.linked:
            return Broken(why, peers[place - 1 : place + 1])  # either of the two; what we sent, our own holder accepted
        return Broken(why, [hop.peer])

    async def send(self, leg: Leg, step: Step, body: bytes = b"") -> None:
        """Raises: Broken."""
        try:
            await leg.stream.send(step, body, timeout_s=limits.HOP_TIMEOUT_S)
        except NetworkFault as fault:
            raise Broken(f"block {leg.hop.block} at {short(leg.hop.peer)}: {fault}", [leg.hop.peer]) from None

    async def answer(self, sequence: int, *, usual_s: float) -> tuple[Leg, Scored, memoryview]:
        """The next answer to step `sequence`. Later than `usual_s`, all holders are pinged; who is silent then is named.

        Raises: Broken: somebody ended the session, is silent, or the answer took longer than one hop's deadline for each holder.
        """
        try:
            async with asyncio.timeout(limits.HOP_TIMEOUT_S * len(self.legs)):
                while True:
                    try:
                        async with asyncio.timeout(min(usual_s, limits.HOP_TIMEOUT_S / 2)):
                            heard = await self._heard.get()
                    except TimeoutError:
                        silent = await self.silent()
                        if silent and self._heard.empty():
                            names = ", ".join(short(peer) for peer in silent)
                            raise Broken(f"no answer for {usual_s:.3g} s, nor to a ping: {names}", silent) from None
                        continue
                    if isinstance(heard, Broken):
                        raise heard
                    if heard[1].sequence == sequence:
                        return heard
        except TimeoutError:
            silent = await self.silent()
            why = f"no answer in {limits.HOP_TIMEOUT_S * len(self.legs):g} s"
            if silent:
                raise Broken(f"{why}, nor to a ping: {', '.join(map(short, silent))}", silent) from None
            raise Broken(f"{why}, but everybody is there", relay=True) from None

    async def silent(self) -> list[PeerId]:
        """Who does not answer a ping now."""
        peers = [leg.hop.peer for leg in self.legs]
        answers = await asyncio.gather(*(self._answers(peer) for peer in peers))
        return [peer for peer, answered in zip(peers, answers, strict=True) if not answered]

    async def _answers(self, peer: PeerId) -> bool:
        with contextlib.suppress(NetworkFault, PeerFault):
            await ask(self._transport, peer, "ping", timeout_s=PING_TIMEOUT_S)
            return True
        return False

    async def close(self, gone: Collection[PeerId] = ()) -> None:
        """Say goodbye to everybody, so that their memory is free at once; not for long, and hardly to those in `gone`."""
        legs, self.legs = self.legs, []
        for leg in legs:
            leg.listening.cancel()
        await asyncio.gather(*(leg.listening for leg in legs), return_exceptions=True)
        await asyncio.gather(*(self._goodbye(leg, GONE_S if leg.hop.peer in gone else GOODBYE_S) for leg in legs))

    async def _goodbye(self, leg: Leg, timeout_s: float) -> None:
        try:
            with contextlib.suppress(NetworkFault, PeerFault):
                await leg.stream.send(Close(self._id), timeout_s=timeout_s)
                while not isinstance((await leg.stream.receive(timeout_s=timeout_s, max_body=limits.MAX_BODY_BYTES))[0], End):
                    pass  # an answer that nobody waits for any more
        finally:
            await leg.stream.close()
