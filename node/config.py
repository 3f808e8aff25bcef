"""Every setting of a node and of a client, with its default, its reason and the words that help prints for it.

The command line, `blocktrain.toml`, `BLOCKTRAIN_*` and docs/commands.md all come from these classes: a field `tau_s` is `--tau-s`, the key
`tau_s` and `BLOCKTRAIN_TAU_S`. Nothing heavy may be imported here, since `--help` reads this file. What depends on the run or the machine
(is the block in range, does the device exist) is checked where that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from blocktrain.protocol import limits
from blocktrain.protocol.messages import CODECS, TOPOLOGIES

T = TypeVar("T")

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
MODES: Final = ("speculative", "one-sweep", "autoregressive")
AUTO: Final = -1  # of `block`: the one that needs us most
ROUTES: Final = ("auto", "chain", "star")


def setting(default: T, help: str) -> T:
    """A field with its default and the line that help and docs print for it."""
    return field(default=default, metadata={"help": help})


def _one_of(words: Sequence[str]) -> Callable[[object, Any], None]:
    def check(_type: object, value: Any) -> None:
        if value not in words:
            raise ValueError(f'"{value}" is not one of {", ".join(words)}')

    return check


def _block(_type: object, tokens: Sequence[Any]) -> int | None:
    """`auto` or a block's number. `_type` and the tokens' class are cyclopts'."""
    text = tokens[0].value
    if text == "auto":
        return AUTO
    if not text.isascii() or not text.isdigit():
        raise ValueError(f'"{text}" is neither a block number (0, 1, …) nor "auto"')
    return int(text)


Many = Annotated[tuple[str, ...], Parameter(consume_multiple=True)]
Block = Annotated[int | None, Parameter(converter=_block, metavar="N|auto")]
Seconds = Annotated[float, Parameter(validator=Number(gt=0, lte=86400))]
Count = Annotated[int, Parameter(validator=Number(gte=1))]


@Parameter(name="*", group=Group("Network", sort_key=1))
@dataclass(frozen=True, kw_only=True)
class Network:
    """How a node is reached and whom it asks first."""

    initial_peers: Many = setting((), "Addresses of nodes to ask first, with /p2p/ and their id; all are tried.")
    host_maddrs: Many = setting(("/ip4/0.0.0.0/tcp/0",), "Addresses to listen on; port 0 takes a free one.")
    announce_maddrs: Many = setting((), "Addresses that others should use, where they differ from those we listen on.")
    relays: Annotated[Many, Parameter(name="--relay")] = setting(
        (), "Public nodes that may relay for us when we cannot be reached; give four."
    )
    public: bool = setting(False, "Say that others can reach us (and may be relayed by us).")
    wait: bool = setting(False, "Keep trying while no initial peer answers, instead of ending with exit code 3.")
    daemon_start_timeout_s: Seconds = setting(60.0, "How long the libp2p daemon may take to start; slow disks need more.")
    ttl_s: Seconds = setting(limits.TTL_S, "Life of our announcement: a dead node is forgotten after this.")
    refresh_s: Seconds = setting(limits.REFRESH_S, "How often the announcement is renewed; well below ttl-s.")


@Parameter(name="*", group=Group("Training", sort_key=2))
@dataclass(frozen=True, kw_only=True)
class Training:
    """The block we hold and what we train it on."""

    block: Annotated[int | None, Parameter(converter=_block, metavar="N|auto")] = setting(
        None, "The block to hold, or auto: the one that needs us most; without it, you are asked."
    )
    may_move: bool = setting(False, "Take another block if nobody holds it any more and ours has holders enough; the store of ours stays.")
    data: Many = setting(("builtin",), "Files, folders, globs, builtin (text that Python carries), or hf:NAME[:CONFIG[:SPLIT[:COLUMN]]].")
    tokenizer: Path | None = setting(None, "Tokenizer file (Hugging Face JSON), where the run's tokens are not bytes.")
    device: str = setting("auto", "cpu, cuda, cuda:N, or auto: cuda where there is one.")
    threads: Count = setting(1, "Threads of the training thread's arithmetic; serving takes one more.")
    rounds: Annotated[int | None, Parameter(validator=Number(gte=1))] = setting(
        None, "Stop after this many rounds; without it, train until told to stop."
    )
    train: Annotated[bool, Parameter(negative="--no-train")] = setting(True, "Train the block; with --no-train it is held and served only.")
    paused: bool = setting(False, "Start without training, until SIGUSR1; all else works meanwhile, so a run can begin everywhere at once.")
    serve_share: Annotated[float, Parameter(validator=Number(gte=0.01, lte=1))] = setting(
        1.0, "The most of its time that the serving thread may compute; below 1 training keeps more of the machine and texts come slower."
    )
    compile: bool = setting(False, "Use torch.compile: slow to start, worth it for long runs.")


@Parameter(name="*", group=Group("Averaging", sort_key=3))
@dataclass(frozen=True, kw_only=True)
class Gossip:
    """How our replica is averaged. Local choices: peers learn what they need in hello and offer."""

    codec: Annotated[str, Parameter(validator=_one_of(CODECS))] = setting("bf16", f"How weights travel: {', '.join(CODECS)}.")
    topology: Annotated[str, Parameter(validator=_one_of(TOPOLOGIES))] = setting("pairs", f"Whom to average with: {', '.join(TOPOLOGIES)}.")
    tau_s: Seconds = setting(limits.TAU_S, "Deadline of an exchange; one that takes longer is late and skipped.")
    heldout_margin: Annotated[float, Parameter(validator=Number(gte=0))] = setting(
        0.1, "By how many nats per token a merge may be worse than ours on our held-out batch."
    )


@Parameter(name="*", group=Group("Files", sort_key=4))
@dataclass(frozen=True, kw_only=True)
class Files:
    """Where things are kept. None: the user's data folder / run / block-N."""

    store: Path | None = setting(None, "Folder of checkpoints; without it, the user's data folder / run / block-N.")
    identity: Path | None = setting(None, "File with our key; without it, one in the store.")
    checkpoint_every_s: Seconds = setting(60.0, "How often a checkpoint is written.")
    events: Path | None = setting(None, "File that gets a line of JSON for each thing that happens: rounds, exchanges, downloads, phases.")
    min_free_mib: Annotated[int, Parameter(validator=Number(gte=0))] = setting(
        200, "Below this much free disk checkpoints stop (and status says so), so that a full disk hurts nobody."
    )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """One node. `new_run` hosts a run from a run.toml; otherwise the run comes from the initial peers."""

    new_run: Path | None = setting(None, "Host a new run: the file with its recipe, or the name of one that comes with blocktrain.")
    run: str = setting("", "Name of the run, or the start of its id, where the initial peers know several.")
    network: Network = field(default_factory=Network)
    training: Training = field(default_factory=Training)
    gossip: Gossip = field(default_factory=Gossip)
    files: Files = field(default_factory=Files)
    name: str = setting("", "What status calls this node; without it, the end of its peer id.")
    log_level: Annotated[str, Parameter(validator=_one_of(LOG_LEVELS))] = setting("info", f"How much is said: {', '.join(LOG_LEVELS)}.")
    json: bool = setting(False, "Print one status per line, as JSON, on stdout.")


@Parameter(name="*", group=Group("Swarm", sort_key=5))
@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """How a command that is not a node finds the swarm."""

    initial_peers: Many = setting(
        (), "Addresses of nodes of the swarm, with /p2p/ and their id; without them, those of this machine's nodes."
    )
    run: str = setting("", "Name of the run, or the start of its id, where the initial peers know several.")
    timeout_s: Seconds = setting(30.0, "How long to look for the swarm.")
    daemon_start_timeout_s: Seconds = setting(60.0, "How long the libp2p daemon may take to start; slow disks need more.")


@Parameter(name="*", group=Group("Text", sort_key=6))
@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """What text is wanted, and from which model."""

    max_tokens: Annotated[int, Parameter(name=("--max-tokens", "--bytes"), validator=Number(gte=1, lte=1_000_000))] = setting(
        200, "How many tokens to generate; in a run with the tokenizer `bytes`, one is a byte."
    )
    mode: Annotated[str, Parameter(validator=_one_of(MODES))] = setting(
        "speculative",
        "speculative (drafted by one block, verified by all), autoregressive (the same distribution, token by token), "
        "or one-sweep (all at once from noise: fastest and roughest).",
    )
    draft: Annotated[int, Parameter(validator=Number(gte=1, lte=256))] = setting(
        8, "How many tokens are drafted ahead at first, in speculative mode; it then follows acceptance and network."
    )
    window: Annotated[int, Parameter(validator=Number(gte=1, lte=64))] = setting(
        64, "How many tokens one traversal gives, in one-sweep mode."
    )
    substeps: Annotated[int, Parameter(validator=Number(gte=1, lte=16))] = setting(
        1, "Steps of the noise inside each block, in one-sweep mode."
    )
    temperature: Annotated[float, Parameter(validator=Number(gte=0, lte=100))] = setting(
        0.8, "Below 1 safer, above 1 wilder, 0 always the likeliest token."
    )
    top_k: Annotated[int, Parameter(validator=Number(gte=0))] = setting(0, "Only the k likeliest tokens; 0: all.")
    top_p: Annotated[float, Parameter(validator=Number(gt=0, lte=1))] = setting(
        1.0, "Only the likeliest tokens that make up this probability."
    )
    seed: Annotated[int | None, Parameter(validator=Number(gte=0, lt=2**63))] = setting(
        None, "The same seed gives the same text from the same state of the blocks; without it, one is drawn."
    )
    stop: Many = setting((), "The text ends before the first of these.")
    route: Annotated[str, Parameter(validator=_one_of(ROUTES))] = setting(
        "auto", "chain (from holder to holder), star (all are asked by us), or auto: what the measured round trips favour."
    )
    allow_missing: bool = setting(False, "Go on without a block that nobody holds; the answer says so.")
    model: Path | None = setting(None, "Answer from this file, made by `blocktrain export`, without the swarm.")
    drafter: Path | None = setting(
        None, "Let the first block in this file, made by `blocktrain export`, draft here: a star then takes one round trip a traversal."
    )
    tokenizer: Path | None = setting(None, "The run's tokenizer file, where its tokens are not bytes.")


@Parameter(name="*", group=Group("Text", sort_key=6))
@dataclass(frozen=True, kw_only=True)
class GenerateConfig(TextConfig):
    """One request for text."""

    prompt: str | None = setting(None, "What the text begins with, may be empty; without it, standard input where that is a pipe.")
    json: bool = setting(False, "Print one JSON object (text, blocks, rounds, time) instead of the text as it comes.")


@Parameter(name="*", group=Group("Text", sort_key=6))
@dataclass(frozen=True, kw_only=True)
class ChatConfig(TextConfig):
    """A loop of prompts."""

    about: bool = setting(False, "After each answer, say which peers and states it came from.")


@Parameter(name="*", group=Group("File", sort_key=7))
@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """A run's model, taken home."""

    out: Path | None = setting(None, "The file to write; without it, NAME.safetensors in this folder.")
    force: bool = setting(False, "Overwrite a file that is there.")
    json: bool = setting(False, "Print one JSON object.")


@Parameter(name="*", group=Group("Gateway", sort_key=7))
@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """An OpenAI-compatible endpoint on this machine."""

    host: str = setting("127.0.0.1", "Address to listen on. There are no keys: whoever reaches it can use it.")
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = setting(
        8000, "Port to listen on; 0 takes a free one, and says it."
    )
    model: Path | None = setting(None, "Answer from this file, made by `blocktrain export`, without the swarm.")
    drafter: Path | None = setting(
        None, "Let the first block in this file, made by `blocktrain export`, draft here: a star then takes one round trip a traversal."
    )
    tokenizer: Path | None = setting(None, "The run's tokenizer file, where its tokens are not bytes.")
    route: Annotated[str, Parameter(validator=_one_of(ROUTES))] = setting(
        "auto", "chain (from holder to holder), star (all are asked by us), or auto: what the measured round trips favour."
    )
    max_tokens: Annotated[int, Parameter(validator=Number(gte=1, lte=1_000_000))] = setting(4096, "The most that one request may ask for.")
    per_client: Count = setting(4, "Requests of one client address at once; more are told to wait.")
    at_once: Count = setting(8, "Requests of all clients at once.")
    json: bool = setting(False, "Print one JSON object with the address when it listens.")


@Parameter(name="*", group=Group("Evaluation", sort_key=7))
@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """The chain's loss on held-out text."""

    data: Many = setting(("builtin",), "Text to measure on: as for a node; only its held-out tail is used.")
    route: Annotated[str, Parameter(validator=_one_of(ROUTES))] = setting(
        "auto", "chain (from holder to holder), star (all are asked by us), or auto: what the measured round trips favour."
    )
    windows: Count = setting(64, "How many windows of the model's context to score.")
    model: Path | None = setting(None, "Measure this file, made by `blocktrain export`, instead of the swarm.")
    tokenizer: Path | None = setting(None, "The run's tokenizer file, where its tokens are not bytes.")
    json: bool = setting(False, "Print one JSON object.")


@Parameter(name="*", group=Group("Status", sort_key=8))
@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """What `blocktrain status` shows."""

    watch: bool = setting(False, "Show it again every two seconds until told to stop.")
    json: bool = setting(False, "Print one JSON object per node and line.")


@Parameter(name="*", group=Group("Checks", sort_key=9))
@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """What `blocktrain doctor` looks at: a node with these settings on this machine."""

    initial_peers: Many = setting((), "Addresses to try, with /p2p/ and their id; each is timed.")
    recipe: Annotated[Path | None, Parameter(name="--run")] = setting(
        None, "Recipe of the run to fit: a run.toml, or the name of a shipped one."
    )
    data: Many = setting(("builtin",), "Data to check, as for a node.")
    device: str = setting("auto", "Device to check, as for a node.")
    store: Path | None = setting(None, "Folder of checkpoints whose disk to check; without it, the user's data folder.")
    host_maddrs: Many = setting(("/ip4/0.0.0.0/tcp/0",), "Addresses whose ports to check, as for a node.")
    timeout_s: Seconds = setting(10.0, "How long to wait for each initial peer.")
    json: bool = setting(False, "Print one JSON object.")
