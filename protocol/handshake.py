"""Whether two nodes can talk at all: protocol version, run, σ partition, clock. Both sides check, both say field, ours and theirs."""

from __future__ import annotations

from dataclasses import dataclass

from blocktrain.protocol import limits
from blocktrain.protocol.errors import Incompatible
from blocktrain.protocol.ids import run_name
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import Hello


@dataclass(frozen=True)
class Greeting:
    """What our side says in every hello. `manifest` is None while a client has not chosen a run."""

    manifest: Manifest | None
    agent: str
    topology: str = "pairs"

    def hello(self, now: float) -> Hello:
        sigma: tuple[float, ...] = ()
        if self.manifest is not None:
            sigma = (self.manifest.noise.sigma_low, self.manifest.noise.sigma_high)
        return Hello(
            protocol_min=limits.PROTOCOL_MIN,
            protocol_max=limits.PROTOCOL_MAX,
            run=self.manifest.run if self.manifest else b"",
            sigma=sigma,
            sent_at=now,
            agent=self.agent,
            topology=self.topology,
        )


def check(ours: Hello, theirs: Hello) -> int:
    """The highest protocol version that both sides speak.

    A side without a run (a client that is still looking) matches every run.
    Raises: Incompatible: naming the field, ours and theirs.
    """
    version = min(ours.protocol_max, theirs.protocol_max)
    if version < max(ours.protocol_min, theirs.protocol_min):
        raise Incompatible(
            f"protocol version: ours {ours.protocol_min}-{ours.protocol_max}, theirs {theirs.protocol_min}-{theirs.protocol_max}"
        )
    if ours.run and theirs.run:
        if ours.sigma != theirs.sigma:
            raise Incompatible(f"sigma partition: ours {_edges(ours)}, theirs {_edges(theirs)}")
        if ours.run != theirs.run:
            raise Incompatible(f"run: ours {run_name(ours.run)}, theirs {run_name(theirs.run)}")
    return version


def _edges(hello: Hello) -> str:
    return "-".join(f"{edge:g}" for edge in hello.sigma) or "none"


def skew_s(sent_at: float, asked_at: float, answered_at: float) -> float:
    """The peer's clock minus ours, in seconds, from its hello: `sent_at` lies between our asking and our receiving."""
    return sent_at - (asked_at + answered_at) / 2
