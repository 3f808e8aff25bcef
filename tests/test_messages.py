"""Every message to bytes and back; and whatever happens to the bytes, a valid message or Malformed comes out, nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blocktrain.protocol import limits, messages, schema, wire
from blocktrain.protocol.errors import Malformed
from blocktrain.protocol.messages import Message

TYPES: dict[str, type[Any]] = messages._TYPES


def values(rule: schema.Rule) -> st.SearchStrategy[Any]:
    """Random values that a rule allows, its bounds among them."""
    match rule:
        case schema.Int(low, high):
            return st.integers(low, high) | st.sampled_from([low, high])
        case schema.Float(low, high):
            return st.floats(low, high, allow_nan=False)
        case schema.Bool():
            return st.booleans()
        case schema.Text(longest, shortest):
            return st.text(max_size=longest, min_size=shortest).filter(str.isprintable)
        case schema.Choice(options):
            return st.sampled_from(options)
        case schema.Raw(longest, shortest):
            return st.binary(min_size=shortest, max_size=min(longest, 100))
        case schema.Many(item, most):
            return st.lists(values(item), max_size=min(most, 6)).map(tuple)
    raise AssertionError(f"no strategy for {rule}")


def rules(cls: type[Any]) -> dict[str, schema.Rule]:
    return {item.name: item.metadata["rule"] for item in dataclasses.fields(cls)}


def some(cls: type[Any]) -> st.SearchStrategy[Any]:
    return st.builds(cls, **{name: values(rule) for name, rule in rules(cls).items()})


ANY = st.one_of([some(cls) for cls in TYPES.values()])


def header_of(message: Message) -> bytes:
    return messages.to_frame(message)[wire.PREFIX_BYTES :]


def assert_valid(message: Any) -> None:
    """All fields obey their rules, so that what was decoded could have been sent."""
    for name, rule in rules(type(message)).items():
        value = getattr(message, name)
        assert rule.check(value, name) == value


def decodes_or_is_malformed(header: bytes) -> None:
    try:
        message = messages.from_header(header)
    except Malformed as fault:
        line = str(fault)
    else:
        assert_valid(message)
        return
    assert "\n" not in line
    assert len(line) < 500


@pytest.mark.parametrize("tag", sorted(TYPES))
def test_every_type_of_message_comes_back_as_it_was_sent(tag: str) -> None:
    @settings(max_examples=40)
    @given(some(TYPES[tag]))
    def round_trip(message: Message) -> None:
        assert messages.from_header(header_of(message)) == message
        assert header_of(message) == header_of(dataclasses.replace(message))

    round_trip()


@given(ANY, st.data())
def test_a_flipped_bit_gives_a_valid_message_or_malformed(message: Message, data: st.DataObject) -> None:
    header = bytearray(header_of(message))
    bit = data.draw(st.integers(0, len(header) * 8 - 1))
    header[bit // 8] ^= 1 << bit % 8
    decodes_or_is_malformed(bytes(header))


@given(ANY, st.data())
def test_a_truncated_header_is_malformed(message: Message, data: st.DataObject) -> None:
    header = header_of(message)
    with pytest.raises(Malformed):
        messages.from_header(header[: data.draw(st.integers(0, len(header) - 1))])


@given(ANY, st.binary(min_size=1, max_size=4))
def test_trailing_bytes_are_malformed(message: Message, tail: bytes) -> None:
    with pytest.raises(Malformed):
        messages.from_header(header_of(message) + tail)


ODD: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=50) | st.binary(max_size=50),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(ANY, ODD, st.data())
def test_a_field_of_any_other_value_gives_a_valid_message_or_malformed(message: Message, odd: Any, data: st.DataObject) -> None:
    fields = {"t": type(message).__name__.lower(), **schema.encode(message)}
    fields[data.draw(st.sampled_from(sorted(fields)))] = odd
    decodes_or_is_malformed(msgpack.packb(fields))


@given(st.binary(max_size=100))
@example(msgpack.packb([1, 2]))
@example(msgpack.packb({"t": b"end"}))
@example(msgpack.packb({b"t": "end", "reason": "ok"}))
@example(b"\x81\xa1t" + b"\x91" * 1020 + b"\xc0")  # msgpack allows it, Python's repr does not
@example(b"\x82\xa1t\xa3end\xa6reason" + b"\x91" * 1020 + b"\xc0")
def test_any_bytes_are_a_valid_message_or_malformed(header: bytes) -> None:
    decodes_or_is_malformed(header)


@pytest.mark.parametrize("tag", sorted(TYPES))
def test_every_required_field_is_missed_by_name(tag: str) -> None:
    cls = TYPES[tag]
    required = [item.name for item in dataclasses.fields(cls) if item.default is dataclasses.MISSING]
    smallest = {name: smallest_value(rules(cls)[name]) for name in required}
    messages.from_header(wire.pack({"t": tag, **smallest}))
    for name in required:
        with pytest.raises(Malformed, match=rf"missing key {cls.__name__}\.{name}"):
            messages.from_header(wire.pack({"t": tag, **{key: value for key, value in smallest.items() if key != name}}))


def smallest_value(rule: schema.Rule) -> object:
    match rule:
        case schema.Int(low, _) | schema.Float(low, _):
            return low
        case schema.Bool():
            return False
        case schema.Text(_, shortest):
            return "x" * shortest
        case schema.Choice(options):
            return options[0]
        case schema.Raw(_, shortest):
            return bytes(shortest)
    return ()


def test_keys_of_a_later_version_are_ignored() -> None:
    assert messages.from_header(wire.pack({"t": "ask", "what": "ping", "colour": "blue"})) == messages.Ask("ping")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"t": "end", "reason": "bored"}, "End.reason is bored; it must be one of ok, busy"),
        ({"t": "end", "reason": "ok", "detail": "x" * 301}, "End.detail has 301 characters"),
        ({"t": "end", "reason": "ok", "detail": "a\x1b[2Jb"}, "End.detail holds control characters"),
        ({"t": "end", "reason": "ok", "retry_after_s": True}, "End.retry_after_s must be a number, not bool"),
        ({"t": "chunk", "offset": -1}, "Chunk.offset is -1; it must be 0"),
        ({"t": "chunk", "offset": 1.0}, "Chunk.offset must be a whole number, not float"),
        ({"t": "chunk", "offset": limits.MAX_STATE_BYTES + 1}, "Chunk.offset is 68719476737"),
        ({"t": "close", "session": b"short"}, "Close.session has 5 bytes; it must have 16"),
        ({"t": "close", "session": "x" * 16}, "Close.session must be bytes, not str"),
        ({"t": "nonsense\n"}, r"unknown message 'nonsense\\n'"),
        ({"t": ""}, "unknown message ''"),
        ({}, "unknown message nothing"),
    ],
)
def test_a_broken_rule_is_said_with_the_fields_name_and_what_is_allowed(fields: dict[str, object], why: str) -> None:
    with pytest.raises(Malformed, match=why):
        messages.from_header(wire.pack(fields))


def test_the_largest_step_and_answer_fit_a_header() -> None:
    tokens = bytes(rules(messages.Step)["tokens"].longest)  # type: ignore[attr-defined]
    blocks = tuple(range(limits.MAX_CHAIN))
    step = messages.Step(2**40, 2**31 - 1, 256, 65536, tokens, 256, 256, 99.9, 10**6, 0.9, 2**63 - 1, blocks)
    scored = messages.Scored(2**40, 65536, 256, tokens, blocks, 1e6)
    for message in (step, scored):
        header_bytes, _ = wire.prefix(messages.to_frame(message, limits.MAX_BODY_BYTES)[: wire.PREFIX_BYTES])
        assert header_bytes <= limits.MAX_HEADER_BYTES


def test_a_fault_takes_the_peers_name_at_the_edge() -> None:
    fault = Malformed("bad frame").by("12D3peer")
    assert isinstance(fault, Malformed)
    assert (fault.peer, str(fault)) == ("12D3peer", "12D3peer: bad frame")
