"""What one training of the lab is, as data: everything that its result depends on, so that a result can be kept under its digest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Final

from blocktrain.protocol.manifest import Manifest

VERSION: Final = 3  # raise it when the same spec trains to something else: kept results are then not used
GENSIM: Final = ("gensim",)


@dataclass(frozen=True)
class Member:
    """One block in training. `walk` names its walk over the data; `part` (i, n): it sees only the i-th of n parts of the text.

    `data`: its own sources, instead of the spec's.
    """

    block: int
    walk: str = "lab"
    part: tuple[int, int] = (0, 1)
    data: tuple[str, ...] = ()


@dataclass(frozen=True)
class Switches:
    """What research changes in a block; the defaults are the recipe."""

    muon: bool = False  # Muon instead of AdamW for the layers' matrices
    true_noise: bool = False  # every position carries z, and its own token is known
    upstream: float | None = None  # read the block before's belief; the share of sequences where it is dropped
    distill: float = 0.0  # share of the loss that is the chain's distribution instead of the true byte
    same_order: bool = False  # all blocks see the same batches


@dataclass(frozen=True)
class Sharing:
    """What members average, and how often. `parameters` "shared": the objective's shared part; "all": replicas of one block.

    Attributes:
        participation: chance of each member, in each round, that its state arrives; those that do not arrive take no mean.
        discard: a member that does not take part loses its round's work (the paper's way) instead of keeping it.
        outer: "mean", or "nesterov" (DiLoCo's outer optimiser, learning rate 0.7 and momentum 0.9).
    """

    every: int = 0  # steps; 0: never
    parameters: str = "shared"
    participation: float = 1.0
    discard: bool = False
    outer: str = "mean"


@dataclass(frozen=True)
class Spec:
    """One training: members step in turn, on one thread."""

    label: str  # for people; not in the digest
    manifest: Manifest
    members: tuple[Member, ...]
    steps: int
    switches: Switches = Switches()
    sharing: Sharing = Sharing()
    data: tuple[str, ...] = GENSIM
    compile: bool = False
    device: str = "cpu"

    @property
    def digest(self) -> str:
        table = asdict(self)
        del table["label"]
        del table["manifest"]["optimizer"]["recompute"]  # the result is the same
        for member in table["members"]:
            if not member["data"]:
                del member["data"]
        text = json.dumps([VERSION, table], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    @property
    def cost(self) -> float:
        """Rough work, for the time left: steps x layers."""
        model = self.manifest.model
        passes = 1 + 0.35 * self.manifest.blocks * bool(self.switches.distill) + 0.35 * bool(self.switches.upstream is not None)
        return self.steps * len(self.members) * (model.layers + 0.5) * passes
