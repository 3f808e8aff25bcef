"""Who a node is: an Ed25519 key in a file, held by one process at a time.

The file has the libp2p daemon's own format: four bytes of protobuf, 32 of private key, 32 of public key, mode 0400. It is written beside
and renamed, never overwritten, and locked for the life of the process: two nodes with one identity would take each other's connections
away. The peer id contains the public key, so a signature by it needs no directory.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from blocktrain.protocol import ids
from blocktrain.protocol.errors import DoesNotFit, Malformed, UsageError
from blocktrain.protocol.ids import PeerId

_PREFIX: Final = bytes.fromhex("08011240")  # protobuf: key type 1 (Ed25519), then 64 bytes of data
_RSA_PREFIX: Final = bytes.fromhex("0800")
_KEY_BYTES: Final = 32
FILE_BYTES: Final = len(_PREFIX) + 2 * _KEY_BYTES
_REMEDY: Final = "put its backup there, or move the file away to get a new identity"


class Identity:
    """An Ed25519 key, and the lock on its file if it has one. Leaving the context (or `release`) gives the lock back."""

    def __init__(self, private_key: bytes, lock: int | None) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(private_key)
        self.peer_id: PeerId = ids.peer_id_of_key(self._key.public_key().public_bytes_raw())
        self.peer_bytes: bytes = ids.peer_bytes(self.peer_id)
        self._lock = lock

    def sign(self, data: bytes) -> bytes:
        """64 bytes of Ed25519 signature over `data`."""
        return self._key.sign(data)

    def file_bytes(self) -> bytes:
        """What its file holds, if it has one, and what the daemon reads."""
        return _bytes(self._key)

    @staticmethod
    def verify(peer_bytes: bytes, signature: bytes, data: bytes) -> bool:
        """Whether `signature` over `data` was made by the key inside a binary peer id. Bad bytes of any kind are a plain no."""
        try:
            Ed25519PublicKey.from_public_bytes(ids.key_of_peer_bytes(peer_bytes)).verify(signature, data)
        except (InvalidSignature, Malformed, ValueError):
            return False
        return True

    def release(self) -> None:
        """Let another process use the file. The lock file itself stays: removing it would let two processes lock two files."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Identity:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def load_or_create(path: Path, like: Identity | None = None) -> Identity:
    """The identity in `path`, made if there is none, locked for this process. `like`: one to keep there, where there is none yet.

    Raises: UsageError: another process holds it, it is not an Ed25519 identity, or it cannot be read or written.
        DoesNotFit: this system has no such locks.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
    except OSError as error:
        raise UsageError(f"identity {path}: {error.strerror or error}; give another place with --identity") from None
    try:
        if not path.exists():
            _write(path, _fresh() if like is None else like.file_bytes())
        return Identity(_read(path), lock)
    except OSError as error:
        os.close(lock)
        raise UsageError(f"identity {path}: {error.strerror or error}; give another place with --identity") from None
    except BaseException:
        os.close(lock)
        raise


def temporary() -> Identity:
    """An identity for one command. It has no file, so that none can be left behind."""
    return Identity(Ed25519PrivateKey.generate().private_bytes_raw(), None)


def _fresh() -> bytes:
    return _bytes(Ed25519PrivateKey.generate())


def _bytes(key: Ed25519PrivateKey) -> bytes:
    return _PREFIX + key.private_bytes_raw() + key.public_key().public_bytes_raw()


def _read(path: Path) -> bytes:
    """The private key in a file. Raises: UsageError, OSError."""
    with path.open("rb") as file:
        data = file.read(FILE_BYTES + 1)
    if not data.startswith(_PREFIX[: len(data)]) or not data:
        rsa = " but an RSA one (stock hivemind's)" if data.startswith(_RSA_PREFIX) else ""
        kind = f"holds no Ed25519 identity{rsa}" if data else "is empty"
        raise UsageError(f"identity {path} {kind}: {_REMEDY}")
    if len(data) != FILE_BYTES:
        what = f"is truncated ({len(data)} of {FILE_BYTES} bytes)" if len(data) < FILE_BYTES else f"is longer than {FILE_BYTES} bytes"
        raise UsageError(f"identity {path} {what}: {_REMEDY}")
    private, public = data[len(_PREFIX) : -_KEY_BYTES], data[-_KEY_BYTES:]
    if Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw() != public:
        raise UsageError(f"identity {path} is damaged (its two halves do not belong together): {_REMEDY}")
    return private


def _write(path: Path, data: bytes) -> None:
    """Write beside, flush to the disk, rename, flush the folder: after a crash there is a whole file or none."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)  # the caller holds the lock and saw that there is no file
    finally:
        beside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _lock(path: Path) -> int:
    """An exclusive lock on the sibling `.lock` file, as an open descriptor. Raises: UsageError: held by another, DoesNotFit, OSError."""
    try:
        import fcntl
    except ImportError:
        raise DoesNotFit("a node runs on Linux and macOS only; on Windows, run it in WSL") from None
    beside = path.with_name(path.name + ".lock")
    handle = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(handle, 20, 0).decode("ascii", "replace").strip()
        os.close(handle)
        by = f" by process {holder}" if holder.isdigit() else ""
        raise UsageError(f"identity {path} is in use{by}: stop that node, or give this one its own --identity") from None
    except BaseException:
        os.close(handle)
        raise
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle
