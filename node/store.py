"""What survives a restart: one folder for one block of one run, held by one process.

    store.json               which run and block this folder belongs to
    manifest.msgpack         the run's manifest, so that a node can start again while nobody else is up
    checkpoint.safetensors   live parameters, optimiser and published state, with a small header; .bak is the one before
    peers.json               addresses that worked, for the next start
    lock                     held for as long as the process lives

A checkpoint is written beside, flushed to the disk and renamed, so that a kill at any moment leaves a complete one. Older never replaces
newer. A full disk costs checkpoints, never the node.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import numpy as np

from blocktrain.node import checkpoint
from blocktrain.node.checkpoint import Damaged
from blocktrain.protocol import ids, manifest
from blocktrain.protocol.errors import Malformed, UsageError
from blocktrain.protocol.ids import RunId

FORMAT: Final = 1
CHECKPOINT: Final = "checkpoint.safetensors"
BACKUP: Final = "checkpoint.safetensors.bak"
MAX_SUFFIX: Final = 64  # nodes of one block on one machine
MAX_PEERS_KEPT: Final = 64
MAX_SMALL_FILE_BYTES: Final = 1024 * 1024
MIN_FREE_BYTES: Final = 200 * 1024 * 1024

Tensors: TypeAlias = dict[str, np.ndarray[Any, Any]]
Header: TypeAlias = dict[str, Any]
Order: TypeAlias = tuple[int, int, int]  # how often its round was lowered, its round, its steps

log = logging.getLogger(__name__)


def default_folder(run: RunId, block: int) -> Path:
    """The user's data folder / run / block-N."""
    import platformdirs

    return Path(platformdirs.user_data_dir("blocktrain")) / ids.run_name(run) / f"block-{block}"


def known_stores() -> list[Path]:
    """The stores in the user's data folder, in use or not."""
    import platformdirs

    return sorted(path.parent for path in Path(platformdirs.user_data_dir("blocktrain")).glob("*/block-*/store.json"))


def peek(folder: Path) -> tuple[RunId, int] | None:
    """Run and block of an existing store, without opening it. None: there is none. Raises: UsageError: unreadable."""
    path = folder / "store.json"
    try:
        data = json.loads(_read_small(path) or "null")
        if data is None:
            return None
        run = bytes.fromhex(data["run"])
        block = data["block"]
        if data["format"] != FORMAT or len(run) != ids.DIGEST_BYTES or not isinstance(block, int):
            raise ValueError
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"{path} is damaged or of another version: move the folder {folder} away, or give another --store") from None
    return RunId(run), block


class Store:
    """One block's folder, locked. Use it as a context manager, or call `close`.

    Attributes:
        folder: where it is.
        trouble: why checkpoints are not being written, in plain words; "" while they are.
        checkpoint_round: round of the newest complete checkpoint; None before the first.
    """

    def __init__(self, folder: Path, run: RunId, block: int, lock: int, min_free_bytes: int) -> None:
        self.folder = folder
        self.run = run
        self.block = block
        self.trouble = ""
        self._lock: int | None = lock
        self._min_free_bytes = min_free_bytes
        self._order: Order | None = None  # of the newest checkpoint that is not known to be damaged
        for left_over in folder.glob("*.new"):  # of a process that was killed
            left_over.unlink(missing_ok=True)
        with contextlib.suppress(OSError, Damaged):
            self._order = _order(checkpoint.read_header(folder / CHECKPOINT))

    @classmethod
    def open(cls, path: Path | None, run: RunId, block: int, *, root: Path | None = None, min_free_bytes: int = MIN_FREE_BYTES) -> Store:
        """Open or create the store of a block.

        Args:
            path: the user's choice: it must be free and belong to this run and block. None: the default folder, or the next
                free one (-2, -3, …) if another node has it.
            root: replaces the default folder where `path` is None.
        Raises: UsageError: locked, of another run or block, or not writable.
        """
        if path is not None:
            return cls._open(path.expanduser(), run, block, min_free_bytes)
        first = root if root is not None else default_folder(run, block)
        for number in range(1, MAX_SUFFIX + 1):
            folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
            try:
                store = cls._open(folder, run, block, min_free_bytes)
            except _Locked as locked:
                log.debug("%s", locked)
                continue
            if number > 1:
                log.info("the store %s is used by another node; this one uses %s", first, folder)
            return store
        raise UsageError(f"{MAX_SUFFIX} nodes hold stores of this block under {first.parent}: give another folder with --store")

    @classmethod
    def _open(cls, folder: Path, run: RunId, block: int, min_free_bytes: int) -> Store:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(folder)
        except OSError as error:
            raise UsageError(f"cannot use the store {folder}: {error.strerror}; give a folder you may write to with --store") from error
        try:
            owner = peek(folder)
            if owner is None:
                own = {"format": FORMAT, "run": run.hex(), "block": block}
                write_atomically(folder / "store.json", json.dumps(own).encode())
            elif owner != (run, block):
                theirs = f"block {owner[1]} of run {ids.run_name(owner[0])}"
                raise UsageError(f"the store {folder} holds {theirs}, not block {block} of run {ids.run_name(run)}: give another --store")
            return cls(folder, run, block, lock, min_free_bytes)
        except OSError as error:
            os.close(lock)
            raise UsageError(f"cannot use the store {folder}: {error.strerror}; give a folder you may write to with --store") from error
        except BaseException:
            os.close(lock)
            raise

    def close(self) -> None:
        """Release the lock. Nothing is written."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def checkpoint_round(self) -> int | None:
        return None if self._order is None else self._order[1]

    def write(self, tensors: Mapping[str, np.ndarray[Any, Any]], header: Mapping[str, object]) -> bool:
        """Write a checkpoint. Blocks for as long as the disk takes: call it from a thread. Arrays must not change meanwhile.

        Args:
            header: JSON values; `round`, `steps` and `digest` (hex, of the published state) must be among them, and `renumbered`
                where the round was ever lowered: how often. The store adds its format, run and block.
        Returns: whether it is on the disk. If not, `trouble` says why, one line was logged, and the checkpoint before is intact.
        """
        assert self._lock is not None, "the store is closed"
        if any(name.startswith(checkpoint.PUBLISHED) for name in tensors):
            assert checkpoint.state_digest(tensors).hex() == header["digest"], "the published state has another digest than the header says"
        full: Header = {**header, "format": FORMAT, "run": self.run.hex(), "block": self.block}
        order = _order(full)
        if self._order is not None and order < self._order:
            return self._report(f"the checkpoint in {self.folder} is newer (round {self._order[1]}) than this one (round {order[1]}): kept")
        new = self.folder / f"{CHECKPOINT}.new"
        try:
            need = sum(array.nbytes for array in tensors.values())
            free = shutil.disk_usage(self.folder).free
            if free - need < self._min_free_bytes:
                return self._report(
                    f"checkpoints stopped: {_mib(free)} free on the disk of {self.folder}, "
                    f"{_mib(need + self._min_free_bytes)} needed; free some space, or lower --min-free-mib"
                )
            checkpoint.write_file(new, tensors, full)
            self._keep_previous()
            os.replace(new, self.folder / CHECKPOINT)
            sync_folder(self.folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            full_disk = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "the disk is full" if full_disk else error.strerror or str(error)
            return self._report(f"checkpoints stopped: cannot write to {self.folder}: {why}; the one before is intact")
        self._order = order
        if self.trouble:
            log.info("checkpoints are written again")
            self.trouble = ""
        return True

    def read(self, shapes: Mapping[str, tuple[int, ...]] | None = None) -> tuple[Tensors, Header] | None:
        """The newest complete checkpoint, verified; the one before if the newest is damaged (one warning). None: there is none.

        Args:
            shapes: what the block expects; every one of these tensors must be there with this shape.
        Raises: UsageError: a checkpoint of another run, block or shape, or both are damaged.
        """
        damaged: list[str] = []
        for name in (CHECKPOINT, BACKUP):
            path = self.folder / name
            try:
                tensors, header = checkpoint.read_file(path)
                order = _order(header)
            except FileNotFoundError:
                continue
            except PermissionError as error:
                raise UsageError(f"cannot read {path}: {error.strerror}") from error
            except (Damaged, OSError) as error:
                damaged.append(f"{path}: {error}")
                continue
            self._check_owner(path, header)
            _check_shapes(path, tensors, shapes)
            if damaged:
                log.warning("the newest checkpoint is damaged (%s); going on from the one before, round %d", damaged[0], order[1])
                self._drop_damaged()
            self._order = (*order[:2], 0)  # whatever this process trains from here is newer, even if it counts its steps from zero
            return tensors, header
        if damaged:
            raise UsageError(
                f"no checkpoint in {self.folder} can be read ({'; '.join(damaged)}): move the folder away to start from the swarm's state"
            )
        self._order = None
        return None

    def save_manifest(self, data: bytes) -> None:
        """Keep the run's manifest. A failure is only logged: it can be had from the swarm."""
        self._save_small("manifest.msgpack", data)

    def load_manifest(self) -> manifest.Manifest | None:
        """The manifest kept; None where there is none or it is damaged."""
        try:
            data = _read_small(self.folder / "manifest.msgpack")
            return manifest.from_bytes(data, self.run) if data else None
        except (OSError, ValueError, Malformed) as error:
            log.warning("the manifest kept in %s is not used: %s", self.folder, error)
            return None

    def save_peers(self, addresses: Sequence[str]) -> None:
        """Keep addresses of peers that answered, the best first. A failure is only logged."""
        self._save_small("peers.json", json.dumps(list(addresses)[:MAX_PEERS_KEPT]).encode())

    def load_peers(self) -> list[str]:
        """The addresses kept; empty where there are none."""
        try:
            data = json.loads(_read_small(self.folder / "peers.json") or "[]")
        except (OSError, ValueError, RecursionError) as error:
            log.warning("the peers kept in %s are not used: %s", self.folder, error)
            return []
        return [item for item in data if isinstance(item, str)][:MAX_PEERS_KEPT] if isinstance(data, list) else []

    def _save_small(self, name: str, data: bytes) -> None:
        try:
            write_atomically(self.folder / name, data)
        except OSError as error:
            log.warning("cannot write %s: %s", self.folder / name, error.strerror)

    def _keep_previous(self) -> None:
        """Make the newest checkpoint the backup, while it stays the newest: at every moment there is one under its name."""
        current = self.folder / CHECKPOINT
        if self._order is None or not current.exists():
            return  # none, or a damaged one, which must not push out the good backup
        link = self.folder / f"{BACKUP}.new"
        link.unlink(missing_ok=True)
        try:
            os.link(current, link)
        except OSError:  # a file system without hard links: for an instant only the backup exists, and `read` takes it
            os.replace(current, self.folder / BACKUP)
            return
        os.replace(link, self.folder / BACKUP)

    def _drop_damaged(self) -> None:
        """Remove a newest checkpoint that cannot be read, so that it is warned of once and never becomes the backup."""
        with contextlib.suppress(OSError):
            (self.folder / CHECKPOINT).unlink()

    def _check_owner(self, path: Path, header: Header) -> None:
        run, block = header.get("run"), header.get("block")
        if run != self.run.hex() or block != self.block:
            theirs = f"block {block} of run {str(run)[:12]}"
            raise UsageError(f"{path} is a checkpoint of {theirs}, not of block {self.block} of run {ids.run_name(self.run)}")

    def _report(self, text: str) -> bool:
        """Say it once, until it changes kind or ends."""
        if self.trouble.partition(":")[0] != text.partition(":")[0]:
            log.warning("%s", text)
        self.trouble = text
        return False


class _Locked(UsageError):
    """Another process holds the folder."""


def _take_lock(folder: Path) -> int:
    """An open, locked descriptor: the lock ends with the process, however it ends. Raises: _Locked, OSError."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
        os.close(handle)
        who = f" (process {holder})" if holder.isdigit() else ""
        raise _Locked(f"the store {folder} is in use by another node{who}: stop it, or give another folder with --store") from None
    except BaseException:
        os.close(handle)
        raise
    with contextlib.suppress(OSError):  # the number is a courtesy; a full disk must not keep a node from starting
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that readers, and a crash, see the old one or the new one. Raises: OSError."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_small(path: Path) -> bytes:
    """The file's bytes; empty where there is none. Raises: OSError; ValueError: too large."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SMALL_FILE_BYTES + 1)
    except FileNotFoundError:
        return b""
    if len(data) > MAX_SMALL_FILE_BYTES:
        raise ValueError(f"{path} is too large")
    return data


def _order(header: Mapping[str, object]) -> Order:
    """What makes one checkpoint newer than another. Raises: Damaged."""
    renumbered, round, steps = header.get("renumbered", 0), header.get("round"), header.get("steps")
    if not isinstance(renumbered, int) or not isinstance(round, int) or not isinstance(steps, int):
        raise Damaged("its header has no round and steps")
    return renumbered, round, steps


def _check_shapes(path: Path, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]] | None) -> None:
    for name, shape in (shapes or {}).items():
        if name not in tensors:
            raise UsageError(f"{path} is a checkpoint of another shape: it has no tensor {name}; give another --store")
        if tensors[name].shape != tuple(shape):
            found = "×".join(map(str, tensors[name].shape))
            raise UsageError(f"{path} is a checkpoint of another shape: {name} is {found}, this run needs {'×'.join(map(str, shape))}")


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
