"""What can be known to be wrong before anything heavy is imported or started: addresses, numbers that contradict each other, missing files.

Whether the block is in range, the data long enough and the device there is checked where that is known (service, compute).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blocktrain.node import addresses, dialing, recipe_file, sources
from blocktrain.node.config import ClientConfig, DoctorConfig, NodeConfig
from blocktrain.protocol import limits
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.manifest import Manifest

MAX_NAME_CHARS: Final = 40  # it stands in every line and table


def check_node(config: NodeConfig) -> None:
    """Raises: UsageError: the first contradiction, in one line."""
    network, training = config.network, config.training
    if config.new_run is None and not network.initial_peers and config.files.store is None:
        raise UsageError("which run? Host a new one with --new-run FILE, or join one with --initial-peers ADDRESS …")
    if config.new_run is not None:
        if config.run:
            raise UsageError("--run chooses among the runs of the initial peers; with --new-run the name stands in the file")
        _check_block(training.block, recipe_file.load_recipe(config.new_run))
    addresses.parse_all(network.initial_peers, "--initial-peers", needs_peer=True)
    addresses.parse_all(network.relays, "--relay", needs_peer=True)
    if not network.host_maddrs:
        raise UsageError("--host-maddrs needs an address to listen on, like /ip4/0.0.0.0/tcp/31337")
    addresses.parse_all(network.host_maddrs, "--host-maddrs")
    dialing.check_announce(network.announce_maddrs, dialing.on_loopback(network.host_maddrs, network.initial_peers))
    if network.refresh_s >= network.ttl_s:
        raise UsageError(
            f"--refresh-s {network.refresh_s:g} must be below --ttl-s {network.ttl_s:g}, else our announcement ends between two"
        )
    if network.ttl_s > limits.MAX_RECORD_LIFE_S:
        raise UsageError(f"--ttl-s {network.ttl_s:g}: other nodes keep no record for longer than {limits.MAX_RECORD_LIFE_S:g} s")
    if network.public and network.relays:
        raise UsageError("--public says that others can reach this node, --relay that they cannot: give one of them")
    if training.may_move and config.files.store is not None:
        raise UsageError("--may-move needs a store for each block it may hold, and --store names one: leave one of the two out")
    if len(config.name) > MAX_NAME_CHARS or not config.name.isprintable():
        raise UsageError(f"--name: at most {MAX_NAME_CHARS} characters, and no control characters")
    check_data(training.data)
    _check_device(training.device)
    if config.files.identity is not None and config.files.identity.is_dir():
        raise UsageError(f"--identity {config.files.identity} is a folder; give the file that holds (or shall hold) the key")
    events = config.files.events
    if events is not None and (events.is_dir() or not events.expanduser().absolute().parent.is_dir()):
        raise UsageError(f"--events {events}: give a file in a folder that exists")
    if config.files.store is not None and config.files.store.exists() and not config.files.store.is_dir():
        raise UsageError(f"--store {config.files.store} is a file; give a folder")


def check_client(config: ClientConfig) -> None:
    """Raises: UsageError."""
    addresses.parse_all(config.initial_peers, "--initial-peers", needs_peer=True)


def check_doctor(config: DoctorConfig) -> None:
    """Raises: UsageError: what cannot even be tried."""
    addresses.parse_all(config.initial_peers, "--initial-peers", needs_peer=True)
    addresses.parse_all(config.host_maddrs, "--host-maddrs")
    _check_device(config.device)


def check_data(given: Sequence[str]) -> None:
    """Whether every local source is there, may be read and has something in it. Raises: UsageError: naming the first that has not."""
    if not given:
        raise UsageError("--data needs a source: files, folders, globs, builtin or hf:NAME")
    for source in given:
        if source.startswith(sources.HUGGING_FACE):
            sources.parse_data_set(source)
        elif not has_name(source):
            sources.find_files(source)


def has_name(source: str) -> bool:
    """Whether a data source is one of those with a name, rather than something on the disk."""
    return source in (sources.BUILTIN, sources.GENSIM) or source.startswith(sources.HUGGING_FACE)


def _check_block(block: int | None, manifest: Manifest) -> None:
    if block is not None and block >= manifest.blocks:
        raise UsageError(f"--block {block}: run {manifest.name} has {manifest.blocks} blocks, 0 to {manifest.blocks - 1}")


def _check_device(device: str) -> None:
    kind, _, index = device.partition(":")
    fits = device in ("auto", "cpu", "cuda") or (kind == "cuda" and index.isascii() and index.isdigit())
    if not fits:
        raise UsageError(f"--device {device!r}: write cpu, cuda, cuda:N or auto")
