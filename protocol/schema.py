"""Strict, bounded decoding of maps that come from peers and files into frozen dataclasses.

A field's rule is part of its declaration: `round: int = field(Int(0, 2**40))`. Decoding refuses a wrong type, a value out of
bounds and a missing required key. Unknown keys are ignored in messages, so that later versions may add optional ones, and refused
in manifests, where they would change what a digest means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from blocktrain.protocol.errors import Malformed

T = TypeVar("T")


class Rule(Protocol):
    """Checks one value from outside and returns it in our own form. Raises: Malformed."""

    def check(self, value: object, where: str) -> Any: ...


@dataclass(frozen=True)
class Int:
    low: int
    high: int

    def check(self, value: object, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise Malformed(f"{where} must be a whole number, not {_kind(value)}")
        if not self.low <= value <= self.high:
            raise Malformed(f"{where} is {shown(value)}; it must be {self.low} … {self.high}")
        return value


@dataclass(frozen=True)
class Float:
    low: float
    high: float

    def check(self, value: object, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Malformed(f"{where} must be a number, not {_kind(value)}")
        if not self.low <= value <= self.high:  # not true of NaN either
            raise Malformed(f"{where} is {shown(value)}; it must be {self.low:g} … {self.high:g}")
        return float(value)


@dataclass(frozen=True)
class Bool:
    def check(self, value: object, where: str) -> bool:
        if not isinstance(value, bool):
            raise Malformed(f"{where} must be true or false, not {_kind(value)}")
        return value


@dataclass(frozen=True)
class Text:
    longest: int
    shortest: int = 0

    def check(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            raise Malformed(f"{where} must be text, not {_kind(value)}")
        if not self.shortest <= len(value) <= self.longest:
            raise Malformed(f"{where} has {len(value)} characters; it must have {self.shortest} … {self.longest}")
        if not value.isprintable():
            raise Malformed(f"{where} holds control characters")
        return value


@dataclass(frozen=True)
class Choice:
    options: tuple[str, ...]

    def check(self, value: object, where: str) -> str:
        if not isinstance(value, str) or value not in self.options:
            raise Malformed(f"{where} is {shown(value)}; it must be one of {', '.join(self.options)}")
        return value


@dataclass(frozen=True)
class Raw:
    longest: int
    shortest: int = 0

    def check(self, value: object, where: str) -> bytes:
        if not isinstance(value, bytes):
            raise Malformed(f"{where} must be bytes, not {_kind(value)}")
        if not self.shortest <= len(value) <= self.longest:
            raise Malformed(f"{where} has {len(value)} bytes; it must have {self.shortest} … {self.longest}")
        return value


@dataclass(frozen=True)
class Many:
    item: Rule
    most: int

    def check(self, value: object, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise Malformed(f"{where} must be a list, not {_kind(value)}")
        if len(value) > self.most:
            raise Malformed(f"{where} has {len(value)} items; at most {self.most} are allowed")
        return tuple(self.item.check(item, f"{where}[{index}]") for index, item in enumerate(value))


@dataclass(frozen=True)
class Table:
    """A map that is itself a dataclass of declared fields."""

    cls: type

    def check(self, value: object, where: str) -> Any:
        if isinstance(value, self.cls):
            return value
        if not isinstance(value, Mapping):
            raise Malformed(f"{where} must be a table, not {_kind(value)}")
        return decode(self.cls, value, where=where, strict=True)


def field(rule: Rule, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field with its rule; with a default it is optional on the wire."""
    return dataclasses.field(default=default, metadata={"rule": rule})


def decode(cls: type[T], data: Mapping[Any, object], *, where: str = "", strict: bool = False) -> T:
    """Build `cls` from a map, checking every field by its rule.

    Args:
        where: what the map is, for the error's text.
        strict: refuse unknown keys and missing keys, defaults included (for manifests).
    Raises: Malformed: with the field's full name and the allowed values.
    """
    fields = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    dotted = f"{where}." if where else ""
    if strict:
        for key in data:
            if key not in fields:
                raise Malformed(f"unknown key {dotted}{shown(key)}; known are {', '.join(fields)}")
    values: dict[str, object] = {}
    for name, item in fields.items():
        if name in data:
            values[name] = item.metadata["rule"].check(data[name], f"{dotted}{name}")
        elif strict or item.default is dataclasses.MISSING:
            raise Malformed(f"missing key {dotted}{name}")
    return cls(**values)


def encode(value: object) -> dict[str, object]:
    """The map of a dataclass instance, nested ones included, ready for `wire.pack`."""
    out: dict[str, object] = {}
    for item in dataclasses.fields(value):  # type: ignore[arg-type]
        inner = getattr(value, item.name)
        out[item.name] = encode(inner) if dataclasses.is_dataclass(inner) else inner
    return out


def shown(value: object) -> str:
    """A value from outside for an error's text: short, on one line, and safe however deep or large it is."""
    if isinstance(value, str):
        short = value[:40]
        return short if short.isprintable() and short else repr(short)
    if isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 64):
        return str(value)
    return _kind(value)


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
