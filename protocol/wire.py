"""Bytes on the wire: canonical msgpack, and frames of a small header plus a raw body.

A frame is `u32 header length | u32 body length | header (msgpack map) | body`. The header is for the protocol, the body is for
tensors and is never parsed here. Both lengths are checked before a byte of them is read. Canonical msgpack (sorted string keys,
shortest forms, no floats that are not finite) makes equal values equal bytes, so that they can be hashed and signed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar

import msgpack

from blocktrain.protocol import limits
from blocktrain.protocol.errors import Malformed

T = TypeVar("T", bound=Collection[object])

_PREFIX: Final = struct.Struct(">II")
PREFIX_BYTES: Final = _PREFIX.size


def pack(value: object) -> bytes:
    """Canonical msgpack of None, bool, int, finite float, str, bytes, and lists and string-keyed maps of them."""
    packed: bytes = msgpack.packb(_canonical(value), use_bin_type=True)
    return packed


def _canonical(value: object) -> object:
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("keys of canonical msgpack are strings")
        return {key: _canonical(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("floats of canonical msgpack are finite")
        return value + 0.0  # -0.0 equals 0.0, so it must give the same bytes
    if value is None or isinstance(value, bool | int | str | bytes):
        return value
    raise TypeError(f"{type(value).__name__} has no canonical msgpack form")


def unpack(data: bytes | memoryview, max_bytes: int) -> Any:
    """Parse one msgpack value from a peer.

    Raises: Malformed: longer than `max_bytes`, not msgpack, trailing bytes, or an extension type.
    """
    if len(data) > max_bytes:
        raise Malformed(f"{len(data)} bytes where at most {max_bytes} are allowed")
    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_no_extension, object_hook=_plain_map, list_hook=_plain)
        return _plain([value])[0]
    except Malformed:
        raise
    except Exception as error:  # msgpack raises ValueError, StackError, OverflowError, UnicodeDecodeError … on hostile bytes
        raise Malformed(f"not msgpack: {type(error).__name__}") from None


def _no_extension(code: int, data: bytes) -> object:
    raise Malformed(f"msgpack extension {code}")


def _plain_map(value: dict[str, object]) -> dict[str, object]:
    _plain(value.values())
    return value


def _plain(values: T) -> T:
    """msgpack makes its own timestamps into objects without asking `ext_hook`."""
    if any(type(value) is msgpack.Timestamp for value in values):
        raise Malformed("msgpack timestamp")
    return values


def frame(header: Mapping[str, object], body_bytes: int = 0) -> bytes:
    """Prefix and header of a frame whose body of `body_bytes` bytes follows."""
    packed = pack(header)
    assert len(packed) <= limits.MAX_HEADER_BYTES, f"our own header has {len(packed)} bytes"
    assert body_bytes <= limits.MAX_BODY_BYTES, f"our own body has {body_bytes} bytes"
    return _PREFIX.pack(len(packed), body_bytes) + packed


def prefix(data: bytes) -> tuple[int, int]:
    """Lengths of header and body, from the first `PREFIX_BYTES` bytes of a frame. Raises: Malformed."""
    if len(data) != PREFIX_BYTES:
        raise Malformed(f"a frame begins with {PREFIX_BYTES} bytes of lengths, not {len(data)}")
    header_bytes, body_bytes = _PREFIX.unpack(data)
    if not 0 < header_bytes <= limits.MAX_HEADER_BYTES:
        raise Malformed(f"a header of {header_bytes} bytes; at most {limits.MAX_HEADER_BYTES} are allowed")
    if body_bytes > limits.MAX_BODY_BYTES:
        raise Malformed(f"a body of {body_bytes} bytes; at most {limits.MAX_BODY_BYTES} are allowed")
    return header_bytes, body_bytes
