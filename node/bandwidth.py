"""How fast a peer can send to us, for `doctor`: the beginning of its published state, timed, and thrown away."""

from __future__ import annotations

import time
from typing import Final

from blocktrain.node import join
from blocktrain.node.ports import Transport
from blocktrain.node.status import MAX_STATUS_BYTES, Status
from blocktrain.protocol import limits
from blocktrain.protocol.errors import Malformed, NetworkFault
from blocktrain.protocol.ids import DIGEST_BYTES, NO_DIGEST, PeerId, RunId
from blocktrain.protocol.messages import STATE, Chunk, End, Have, Want

SAMPLE_BYTES: Final = 8 * 1024 * 1024
LONGEST_S: Final = 5.0  # what has come by then is enough to tell
LEAST_BYTES: Final = 64 * 1024  # less tells the round trip, not the rate


async def measure(transport: Transport, peer: PeerId, *, timeout_s: float) -> float:
    """Bytes per second. Raises: NetworkFault: it has nothing to send. PeerFault: it broke the agreement."""
    body = await join.ask(transport, peer, "status", timeout_s=timeout_s)
    status = Status.from_json(bytes(body[:MAX_STATUS_BYTES]))
    run = bytes.fromhex(status.run) if len(status.run) == 2 * DIGEST_BYTES else b""
    if not run or status.block is None or not status.round:
        raise NetworkFault("it has no state to send yet")
    stream = await transport.open(peer, STATE, timeout_s=timeout_s)
    try:
        await stream.send(Want(RunId(run), status.block, "block", NO_DIGEST, 0, SAMPLE_BYTES), timeout_s=timeout_s)
        have, _ = await stream.receive(timeout_s=timeout_s)
        if isinstance(have, End):
            raise NetworkFault(f"{have.reason}{f', {have.detail}' if have.detail else ''}")
        if not isinstance(have, Have):
            raise Malformed(f"{type(have).__name__} in answer to a wish for state", peer)
        began, came = time.monotonic(), 0
        while came < min(have.length, SAMPLE_BYTES) and time.monotonic() - began < LONGEST_S:
            message, piece = await stream.receive(timeout_s=timeout_s, max_body=limits.MAX_BODY_BYTES)
            if not isinstance(message, Chunk):
                break
            came += len(piece)
        if came < LEAST_BYTES:
            raise NetworkFault(f"only {came} bytes came, too few to tell a rate")
        return came / max(1e-6, time.monotonic() - began)
    finally:
        await stream.close()
