"""Every setting of a node, with its default and its reason. The command line, `blocktrain.toml`, `BLOCKTRAIN_*` and the docs come from here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from blocktrain.protocol import limits


@dataclass(frozen=True)
class Network:
    """How a node is reached and whom it asks first."""

    initial_peers: tuple[str, ...] = ()  # multiaddrs with /p2p/…; all are tried
    host_maddrs: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)  # where we listen; port 0 takes a free one
    announce_maddrs: tuple[str, ...] = ()  # addresses others should use, where they differ from host_maddrs
    relays: tuple[str, ...] = ()  # public nodes that may relay for us
    public: bool = False  # say that we are reachable (and may relay for others)
    wait: bool = False  # keep trying while no initial peer answers, instead of exiting with 3
    daemon_start_timeout_s: float = 60.0  # slow disks need it: the libp2p daemon's start
    ttl_s: float = limits.TTL_S
    refresh_s: float = limits.REFRESH_S


@dataclass(frozen=True)
class Training:
    """The block we hold and what we train it on."""

    block: int | None = None  # None: the block most in need ("auto")
    data: tuple[str, ...] = ("builtin",)  # files, folders, globs, "builtin", or "hf:NAME[:CONFIG[:SPLIT[:COLUMN]]]"
    device: str = "auto"  # "cpu", "cuda", "cuda:1", "auto": cuda where there is one
    threads: int = 1  # of the training thread's math; the serving thread takes one more
    rounds: int | None = None  # stop after this many rounds; None: until told to stop
    train: bool = True  # False: hold and serve the block without training it
    compile: bool = False  # torch.compile: 1.5 x after 40 s; worth it for long runs


@dataclass(frozen=True)
class Gossip:
    """How our replica is averaged. Local choices: peers learn what they need in hello and offer."""

    codec: str = "bf16"
    topology: str = "pairs"
    tau_s: float = limits.TAU_S  # an exchange that takes longer is late
    heldout_margin: float = 0.1  # nats per token by which a merge may be worse than our own snapshot on our held-out batch


@dataclass(frozen=True)
class Files:
    """Where things are kept. None: the user's data folder / run / block-N."""

    store: Path | None = None
    identity: Path | None = None
    checkpoint_every_s: float = 60.0
    min_free_mib: int = 200  # below it checkpoints stop (and status says so), so that a full disk hurts nobody


@dataclass(frozen=True)
class NodeConfig:
    """One node. `new_run` hosts a run from a run.toml; otherwise the run comes from the initial peers."""

    new_run: Path | None = None
    run: str = ""  # name or id prefix, where the initial peers know several runs
    network: Network = field(default_factory=Network)
    training: Training = field(default_factory=Training)
    gossip: Gossip = field(default_factory=Gossip)
    files: Files = field(default_factory=Files)
    name: str = ""  # shown in status; default: the last six characters of the peer id
    log_level: str = "info"
    json: bool = False  # stdout: one status per line, as JSON, instead of talk on stderr only
