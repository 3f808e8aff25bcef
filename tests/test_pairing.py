"""Whom a node asks for an exchange, in each topology."""

from __future__ import annotations

import hashlib
from random import Random

import pytest

from blocktrain.protocol.ids import PeerId, peer_id_of_key
from blocktrain.protocol.messages import TOPOLOGIES
from blocktrain.protocol.pairing import MAX_TRIES, candidates, neighbours

PEERS = sorted(peer_id_of_key(hashlib.sha256(bytes([n])).digest()) for n in range(64))


def others(me: PeerId, size: int) -> list[PeerId]:
    return [peer for peer in PEERS[:size] if peer != me]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 16, 64])
def test_candidates_are_some_others_each_once(topology: str, size: int) -> None:
    for turn in range(5):
        asked = candidates(topology, PEERS[0], others(PEERS[0], size), turn, Random(turn))
        assert len(asked) == len(set(asked)) <= MAX_TRIES
        assert set(asked) <= set(others(PEERS[0], size))
        assert bool(asked) == (size > 1)


@pytest.mark.parametrize("topology", [name for name in TOPOLOGIES if name != "pairs"])
@pytest.mark.parametrize("size", [2, 3, 8, 16, 64])
def test_graphs_are_mutual_and_connected(topology: str, size: int) -> None:
    ring = PEERS[:size]
    links = {place: set(neighbours(topology, ring, place)) for place in range(size)}
    assert all(place in links[other] for place in links for other in links[place])
    reached = {0}
    for _ in range(size):
        reached |= {other for place in reached for other in links[place]}
    assert reached == set(range(size))


def test_pairs_meet_everybody_in_time() -> None:
    rng = Random(1)
    met = {candidates("pairs", PEERS[0], others(PEERS[0], 16), turn, rng)[0] for turn in range(200)}
    assert met == set(others(PEERS[0], 16))


def test_a_graph_rotates_through_its_neighbours() -> None:
    first = [candidates("ring", PEERS[3], others(PEERS[3], 8), turn, Random(0))[0] for turn in range(4)]
    assert set(first) == {PEERS[2], PEERS[4]}


def test_an_expander_is_much_shorter_than_a_ring() -> None:
    def diameter(topology: str) -> int:
        reached, hops = {0}, 0
        while len(reached) < 64:
            reached |= {other for place in reached for other in neighbours(topology, PEERS, place)}
            hops += 1
        return hops

    assert diameter("expander") <= diameter("ring") // 4
