"""A checkpoint as a file: the safetensors format, with our header inside and everything checked when it is read.

Written tensor by tensor from the arrays themselves (safetensors' own writer copies all of them first, which a block of many gigabytes
cannot afford), readable by any safetensors library. Two checks: `content` is blake3 over all tensor bytes, against a damaged disk; `digest`
is that of the published state as peers know it, against a checkpoint that would announce what it does not hold.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import blake3
import numpy as np

from blocktrain.protocol.ids import Digest

Tensors: TypeAlias = dict[str, np.ndarray[Any, Any]]
Header: TypeAlias = dict[str, Any]

PUBLISHED: Final = "published."  # tensors whose name begins so are the published state, in the order of their names
MAX_INDEX_BYTES: Final = 16 * 1024 * 1024  # of names, shapes and our header
_ALIGNMENT: Final = 8
_DTYPES: Final = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "|b1",
}  # fmt: skip
_NAMES: Final = {np.dtype(code): name for name, code in _DTYPES.items()}
_LENGTH: Final = struct.Struct("<Q")


class Damaged(Exception):
    """A file that is not a complete checkpoint of ours. Its text says what is wrong."""


def state_digest(tensors: Mapping[str, np.ndarray[Any, Any]]) -> Digest:
    """blake3 over the published state among `tensors`: fp32, little endian, parameters in name order, as `Replica.state` serves it."""
    hasher = blake3.blake3()
    for name in sorted(tensors):
        if name.startswith(PUBLISHED):
            hasher.update(_raw(tensors[name]))
    return Digest(hasher.digest())


def write_file(path: Path, tensors: Mapping[str, np.ndarray[Any, Any]], header: Mapping[str, object]) -> None:
    """Write and flush to the disk. Raises: OSError."""
    hasher = blake3.blake3()
    index: dict[str, object] = {}
    offset = 0
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # wide types first: everything stays aligned
    for name in names:
        array = tensors[name]
        hasher.update(_raw(array))
        dtype = _NAMES[array.dtype.newbyteorder("<")]
        index[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    ours = {**header, "content": hasher.hexdigest()}
    index["__metadata__"] = {"blocktrain": json.dumps(ours, allow_nan=False)}
    text = json.dumps(index, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write_all(handle, _LENGTH.pack(len(text)) + text)
        for name in names:
            _write_all(handle, _raw(tensors[name]))
        os.fsync(handle)
    finally:
        os.close(handle)


def read_header(path: Path) -> Header:
    """Our header alone, without the tensors. Raises: OSError, Damaged."""
    with path.open("rb") as file:
        return _ours(_index(file.read(_LENGTH.size), file.read(MAX_INDEX_BYTES + 1))[0])


def read_file(path: Path) -> tuple[Tensors, Header]:
    """All tensors (writable copies) and our header, verified. Raises: OSError, Damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        index, length = _index(start, file.read(MAX_INDEX_BYTES + 1))
        header = _ours(index)
        hasher = blake3.blake3()
        tensors: Tensors = {}
        begin = _LENGTH.size + length
        expected = 0
        for name, entry in sorted(index.items(), key=lambda item: _offsets(item[1])):
            if name == "__metadata__":
                continue
            dtype, shape, (low, high) = _entry(name, entry)
            if low != expected or begin + high > size:
                raise Damaged(f"{name} lies outside the file: it was cut off")
            if math.prod(shape) * dtype.itemsize != high - low:
                raise Damaged(f"{name} has {high - low} bytes, which its shape {shape} does not need")
            array = np.empty(shape, dtype)
            raw = _raw(array)
            file.seek(begin + low)
            if file.readinto(raw) != array.nbytes:
                raise Damaged(f"{name} was cut off")
            hasher.update(raw)
            tensors[name] = array
            expected = high
    if begin + expected != size:
        raise Damaged(f"it has {size} bytes where its index needs {begin + expected}")
    if hasher.hexdigest() != header.get("content"):
        raise Damaged("its bytes do not match their checksum")
    if any(name.startswith(PUBLISHED) for name in tensors) and state_digest(tensors).hex() != header.get("digest"):
        raise Damaged("its published state does not have the digest in its header")
    return tensors, header


def _raw(array: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of a contiguous array, without a copy, little endian, in C order."""
    assert array.flags.c_contiguous, "checkpoint arrays are contiguous"
    assert array.dtype.byteorder in "<=|", "checkpoint arrays are little endian"
    return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(bytearray())


def _write_all(handle: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view[: 1 << 28]) :]


def _index(start: bytes, text: bytes) -> tuple[dict[str, Any], int]:
    """The file's index and its length in bytes. `text` may hold what follows it."""
    if len(start) != _LENGTH.size:
        raise Damaged("it is empty" if not start else "it was cut off")
    (length,) = _LENGTH.unpack(start)
    if length > MAX_INDEX_BYTES or length > len(text):
        raise Damaged("its index was cut off, or it is not a safetensors file")
    try:
        index = json.loads(text[:length])
    except (ValueError, RecursionError):
        raise Damaged("its index is not JSON") from None
    if not isinstance(index, dict):
        raise Damaged("its index is not a map")
    return index, length


def _ours(index: dict[str, Any]) -> Header:
    try:
        header = json.loads(index["__metadata__"]["blocktrain"])
    except (KeyError, TypeError, ValueError, RecursionError):
        raise Damaged("it has no blocktrain header") from None
    if not isinstance(header, dict):
        raise Damaged("its header is not a map")
    return header


def _offsets(entry: Any) -> int:
    try:
        return int(entry["data_offsets"][0]) if "data_offsets" in entry else -1
    except (TypeError, KeyError, IndexError, ValueError):
        raise Damaged("its index is malformed") from None


def _entry(name: str, entry: Any) -> tuple[np.dtype[Any], tuple[int, ...], tuple[int, int]]:
    try:
        dtype = np.dtype(_DTYPES[entry["dtype"]])
        shape = tuple(int(n) for n in entry["shape"])
        low, high = (int(n) for n in entry["data_offsets"])
    except (TypeError, KeyError, ValueError):
        raise Damaged(f"its index is malformed at {name}") from None
    if min((low, high - low, *shape)) < 0:
        raise Damaged(f"its index is malformed at {name}")
    return dtype, shape, (low, high)
