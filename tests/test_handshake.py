"""Whether two nodes can talk: both sides come to the same answer and name the field, ours and theirs."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol import handshake, limits
from blocktrain.protocol.errors import Incompatible
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.manifest import Manifest, Model, Noise, Optimizer, Schedule
from blocktrain.protocol.messages import Hello

MANIFEST = Manifest(
    1, "demo", 3, "evidence", "bytes", 7,
    Model(32, 1, 2, 32, 256), Noise(0.2, 4.0, 0.1, 0.25), Schedule(20, 4e-3, 5, 100, 0.1), Optimizer(8, 1, 0.9, 0.95, 0.05, 1.0, 20),
)  # fmt: skip


def hello(**changes: object) -> Hello:
    return dataclasses.replace(Greeting(MANIFEST, "test 1").hello(1000.0), **changes)  # type: ignore[arg-type]


def test_two_nodes_of_one_run_talk_in_the_highest_common_version() -> None:
    assert handshake.check(hello(), hello()) == limits.PROTOCOL_MAX
    assert handshake.check(hello(protocol_min=1, protocol_max=3), hello(protocol_min=2, protocol_max=5)) == 3


versions = st.tuples(st.integers(1, 9), st.integers(0, 9)).map(lambda pair: {"protocol_min": pair[0], "protocol_max": pair[0] + pair[1]})


@given(versions, versions)
def test_both_sides_agree_on_the_version_or_both_refuse(ours: dict[str, int], theirs: dict[str, int]) -> None:
    answers = []
    for one, other in ((ours, theirs), (theirs, ours)):
        try:
            answers.append(handshake.check(hello(**one), hello(**other)))
        except Incompatible:
            answers.append(0)
    both = set(range(ours["protocol_min"], ours["protocol_max"] + 1)) & set(range(theirs["protocol_min"], theirs["protocol_max"] + 1))
    assert answers == [max(both, default=0)] * 2


def test_versions_without_a_common_one_are_named() -> None:
    with pytest.raises(Incompatible, match=r"^protocol version: ours 1-1, theirs 2-4$"):
        handshake.check(hello(), hello(protocol_min=2, protocol_max=4))


def test_another_run_is_named_by_both_ids() -> None:
    other = dataclasses.replace(MANIFEST, seed=8)
    with pytest.raises(Incompatible, match=f"^run: ours {MANIFEST.run.hex()[:12]}, theirs {other.run.hex()[:12]}$"):
        handshake.check(hello(), Greeting(other, "test 1").hello(0.0))


def test_another_sigma_partition_is_named_by_its_edges_rather_than_by_the_run() -> None:
    other = dataclasses.replace(MANIFEST, noise=Noise(0.5, 10.0, 0.1, 0.25))
    with pytest.raises(Incompatible, match=r"^sigma partition: ours 0.2-4, theirs 0.5-10$"):
        handshake.check(hello(), Greeting(other, "test 1").hello(0.0))


def test_a_hello_of_a_run_without_its_sigma_partition_is_refused() -> None:
    with pytest.raises(Incompatible, match="theirs none"):
        handshake.check(hello(), hello(sigma=()))


def test_a_client_that_has_no_run_yet_matches_every_run_but_not_every_version() -> None:
    client = Greeting(None, "client").hello(0.0)
    assert (client.run, client.sigma) == (b"", ())
    assert handshake.check(client, hello()) == handshake.check(hello(), client) == limits.PROTOCOL_MAX
    with pytest.raises(Incompatible, match="protocol version"):
        handshake.check(client, hello(protocol_min=7, protocol_max=7))


def test_a_greeting_says_who_we_are_and_when() -> None:
    said = Greeting(MANIFEST, "blocktrain 0.1", "ring").hello(1234.5)
    assert (said.run, said.sigma, said.sent_at, said.agent, said.topology) == (MANIFEST.run, (0.2, 4.0), 1234.5, "blocktrain 0.1", "ring")


@given(skew=st.floats(-1000, 1000), there_s=st.floats(0, 5), back_s=st.floats(0, 5))
def test_the_clocks_difference_is_right_within_half_a_round_trip(skew: float, there_s: float, back_s: float) -> None:
    asked_at = 1e9
    sent_at = asked_at + there_s + skew
    assert abs(handshake.skew_s(sent_at, asked_at, asked_at + there_s + back_s) - skew) <= (there_s + back_s) / 2 + 1e-5
