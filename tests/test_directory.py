"""The notice board: real nodes see each other's records, and nobody can forge, overwrite or hide another's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from blocktrain.node.network import Net
from blocktrain.protocol import ids, limits, records
from blocktrain.protocol.ids import Digest, PeerId, RunId
from blocktrain.protocol.records import Announcement, RunRecord
from tests import swarm_kit
from tests.conftest import MakeNet

pytestmark = pytest.mark.real

RUN = RunId(bytes(range(32)))
KEY = records.block_key(RUN, 0, 0)


def announcement(block: int = 0, phase: str = "training", round: int = 1, addresses: tuple[str, ...] = ()) -> Announcement:
    return Announcement(RUN, block, phase, round, Digest(bytes(32)), 100.0, 0.0, 1, 1, addresses)


async def announce(net: Net, *, block: int = 0, phase: str = "training", round: int = 1, life_s: float = 30.0) -> bool:
    said = announcement(block, phase, round, tuple(net.directory.addresses()[:1]))
    return await net.directory.announce(said, 0, expires_at=time.time() + life_s, timeout_s=10)


async def seen_by(net: Net, block: int = 0) -> dict[PeerId, Announcement]:
    return {each.peer: each.announcement for each in await net.directory.read_block(RUN, block, 0, timeout_s=10)}


async def until(check: Callable[[], Awaitable[bool]], within_s: float = 20.0) -> None:
    """Ask again and again until it is so."""
    async with asyncio.timeout(within_s):
        while not await check():  # noqa: ASYNC110 what is waited for is another node's doing
            await asyncio.sleep(0.05)


async def until_async(check: Callable[[], bool], within_s: float = 10.0) -> None:
    async def asked() -> bool:
        return check()

    await until(asked, within_s)


async def test_two_nodes_see_each_others_announcement(net_factory: MakeNet) -> None:
    host = await net_factory()
    joiner = await net_factory(host)
    assert await announce(host, round=3)
    assert await announce(joiner, round=4)
    for net in (host, joiner):
        assert {peer: said.round for peer, said in (await seen_by(net)).items()} == {host.directory.peer: 3, joiner.directory.peer: 4}


async def test_three_nodes_and_a_client_agree_though_each_knows_only_one_address(net_factory: MakeNet) -> None:
    host = await net_factory()
    nets = [host, await net_factory(host), await net_factory(host)]
    client = await net_factory(host, client_mode=True)
    assert all([await announce(net) for net in nets])
    for net in (*nets, client):
        assert set(await seen_by(net)) == {each.directory.peer for each in nets}
    assert client.directory.peer not in host.libp2p.neighbours(), "a client is no DHT node"


async def test_a_node_that_is_alone_keeps_its_own_records(net_factory: MakeNet) -> None:
    host = await net_factory()
    assert await announce(host)
    record = RunRecord(RUN, "tiny", 1, 1)
    assert await host.directory.announce_run(record, expires_at=time.time() + 30, timeout_s=5)
    later = await net_factory(host)
    assert set(await seen_by(later)) == {host.directory.peer}
    assert [(peer, run) for peer, run, _ in await later.directory.read_runs(timeout_s=5)] == [(host.directory.peer, record)]


async def test_18_who_leaves_and_comes_back_at_once_is_seen_again(net_factory: MakeNet) -> None:
    host = await net_factory()
    joiner = await net_factory(host)
    for phase in ("training", "left", "joining", "left", "training"):
        assert await announce(joiner, phase=phase)
        assert (await seen_by(host))[joiner.directory.peer].phase == phase


async def test_a_shorter_life_after_a_restart_still_replaces_the_old_record(net_factory: MakeNet) -> None:
    """A new process with the same identity and a smaller --ttl-s: its first record would expire before the old one."""
    host = await net_factory()
    joiner = await net_factory(host)
    assert await announce(joiner, round=1, life_s=100)
    joiner.directory._last_expiry.clear()  # as after a restart
    assert await announce(joiner, round=2, life_s=30)
    assert (await seen_by(host))[joiner.directory.peer].round == 2


async def test_a_record_ends_with_its_life(net_factory: MakeNet) -> None:
    host = await net_factory()
    joiner = await net_factory(host)
    assert await announce(joiner, life_s=1.5)
    assert joiner.directory.peer in await seen_by(host)

    async def gone() -> bool:
        return joiner.directory.peer not in await seen_by(host)

    await until(gone, within_s=5)


async def test_an_older_copy_does_not_shorten_the_life_of_a_newer_one(net_factory: MakeNet) -> None:
    """hivemind's storage would forget the newer record when the replayed older one's time is over."""
    host = await net_factory()
    joiner = await net_factory(host)
    replayer = await net_factory(host)
    old = time.time() + 1.0
    await joiner.directory.announce(announcement(round=1), 0, expires_at=old, timeout_s=5)
    old_record = await stored_value(host, joiner.directory.peer)
    assert await announce(joiner, round=2, life_s=30)
    assert await raw_store(replayer, host, joiner.libp2p._identity.peer_bytes, old_record, old) == [False]
    storage = host.libp2p._dht.protocol.storage

    async def past_the_old_life() -> bool:
        return time.time() > old + 0.1

    await until(past_the_old_life)
    assert joiner.libp2p._identity.peer_bytes in storage.get(hashed(KEY)).value


# ---- hostile writers: they speak the DHT's own calls, as a changed node would ---------------------------------------------------------


def hivemind_module(name: str) -> Any:
    """A module of hivemind that our node has loaded already: importing it by name would load all of hivemind, and torch."""
    import blocktrain.node.libp2p as loaded

    assert loaded
    return sys.modules[f"hivemind.{name}"]


def hashed(key: records.Key) -> Any:
    from blocktrain.node.libp2p import DHTID

    return DHTID.generate(source=key)


async def raw_store(attacker: Net, victim: Net | Any, subkey: object, value: bytes, expires_at: float) -> list[bool] | None:
    """A store call of the attacker's own making. `subkey` None: a plain value in the place of the dictionary."""
    peer = victim.libp2p._p2p.peer_id if isinstance(victim, Net) else victim
    answer: list[bool] | None = await attacker.libp2p._dht.protocol.call_store(peer, [hashed(KEY)], [value], [expires_at], [subkey])
    return None if answer is None else list(answer)


async def stored_value(net: Net, writer: PeerId) -> bytes:
    value: bytes = net.libp2p._dht.protocol.storage.get(hashed(KEY)).value.data[ids.peer_bytes(writer)].value
    return value


def sealed_by(net: Net, payload: bytes, expires_at: float, key: records.Key = KEY) -> bytes:
    return net.libp2p._seals.seal(hashed(key).to_bytes(), payload, expires_at)


async def test_another_peers_record_cannot_be_forged_prolonged_or_moved(net_factory: MakeNet) -> None:
    host = await net_factory()
    victim = await net_factory(host)
    attacker = await net_factory(host)
    assert await announce(victim, round=7)
    true_value = await stored_value(host, victim.directory.peer)
    name = victim.libp2p._identity.peer_bytes
    payload = records.pack_record(announcement(round=999))
    later = time.time() + 60
    assert await raw_store(attacker, host, name, sealed_by(attacker, payload, later), later) == [False], "signed by somebody else"
    assert await raw_store(attacker, host, name, true_value, later) == [False], "the true record with a longer life"
    other = records.block_key(RUN, 1, 0)
    moved = await attacker.libp2p._dht.protocol.call_store(host.libp2p._p2p.peer_id, [hashed(other)], [true_value], [later], [name])
    assert list(moved) == [False], "the true record under another key"
    assert (await seen_by(host))[victim.directory.peer].round == 7
    assert host.libp2p.refused_records >= 3


@pytest.mark.parametrize(
    "value",
    [b"", b"\xc1 is never msgpack", b"\x90" * 2000, bytes(5000), b"\x93\x01\x02\x03"],
    ids=["empty", "junk", "deep", "long", "list"],
)
async def test_the_whole_dictionary_cannot_be_overwritten_by_a_plain_value(net_factory: MakeNet, value: bytes) -> None:
    host = await net_factory()
    attacker = await net_factory(host)
    assert await announce(host)
    assert await raw_store(attacker, host, None, value, time.time() + 1000) == [False]
    assert host.directory.peer in await seen_by(host)
    assert host.directory.peer in await seen_by(attacker)


async def test_a_dictionary_with_one_bad_record_loses_only_that_one(net_factory: MakeNet) -> None:
    from blocktrain.node.libp2p import DictionaryDHTValue

    host = await net_factory()
    attacker = await net_factory(host)
    expires = time.time() + 30
    mixed = DictionaryDHTValue()
    name = attacker.libp2p._identity.peer_bytes
    mixed.store(name, sealed_by(attacker, records.pack_record(announcement(round=5)), expires), expires)
    mixed.store(b"no peer id", b"\xc1", expires)
    mixed.store(("a", "tuple"), b"", time.time() + 1e9)
    answer = await attacker.libp2p._dht.protocol.call_store(host.libp2p._p2p.peer_id, [hashed(KEY)], [mixed], [expires])
    assert list(answer) == [True]
    assert {peer: said.round for peer, said in (await seen_by(host)).items()} == {attacker.directory.peer: 5}


async def test_a_record_cannot_live_longer_than_allowed_nor_hold_what_is_none(net_factory: MakeNet) -> None:
    host = await net_factory()
    attacker = await net_factory(host)
    name = attacker.libp2p._identity.peer_bytes
    good = records.pack_record(announcement())
    for expires in (time.time() + 2 * limits.MAX_RECORD_LIFE_S, 1e300, float("inf"), float("nan")):
        assert await raw_store(attacker, host, name, b"\x92\xc4\x00\xc4\x00", expires) == [False]
    long = time.time() + 2 * limits.MAX_RECORD_LIFE_S
    assert await raw_store(attacker, host, name, sealed_by(attacker, good, long), long) == [False], "well signed, but too long"
    soon = time.time() + 30
    for payload in (b"", b"\xc1", b"\x80", good + b"\x00", bytes(300)):
        assert await raw_store(attacker, host, name, sealed_by(attacker, payload, soon), soon) == [False]


async def test_a_sound_record_under_the_wrong_blocks_key_is_dropped_and_counted(
    net_factory: MakeNet, caplog: pytest.LogCaptureFixture
) -> None:
    host = await net_factory()
    liar = await net_factory(host)
    expires = time.time() + 30
    payload = records.pack_record(announcement(block=1))  # stored under block 0's key, and honestly signed there
    assert await raw_store(liar, host, liar.libp2p._identity.peer_bytes, sealed_by(liar, payload, expires), expires) == [True]
    for _ in range(3):
        assert liar.directory.peer not in await seen_by(host)
    assert host.directory.dropped == 3
    lines = [
        record.getMessage() for record in caplog.records if "dropped a record" in record.getMessage() and record.levelname == "WARNING"
    ]
    assert len(lines) == 1
    assert ids.short(liar.directory.peer) in lines[0]


async def test_a_liar_about_expiry_is_not_believed(net_factory: MakeNet) -> None:
    """hivemind ends a search when a dictionary claims to live for ever: the others would not be asked."""
    from blocktrain.node.libp2p import DictionaryDHTValue, ValueWithExpiration

    host = await net_factory()
    liar = await net_factory(host)
    expires = time.time() + 30
    claimed = DictionaryDHTValue()
    name = liar.libp2p._identity.peer_bytes
    claimed.store(name, sealed_by(liar, records.pack_record(announcement()), expires), expires)

    class Endless(dict):  # type: ignore[type-arg]
        def get(self, key: object, default: object = None) -> object:
            return ValueWithExpiration(claimed, float("inf"))

    liar.libp2p._dht.protocol.storage = liar.libp2p._dht.protocol.cache = Endless()
    find = host.libp2p._dht.protocol.call_find
    answer = (await find(liar.libp2p._p2p.peer_id, [hashed(KEY)]))[hashed(KEY)][0]
    assert set(answer.value.data) == {name}
    assert answer.expiration_time == expires
    claimed.clear()
    assert (await find(liar.libp2p._p2p.peer_id, [hashed(KEY)]))[hashed(KEY)][0] is None


async def test_hostile_node_ids_leave_no_traceback(net_factory: MakeNet, caplog: pytest.LogCaptureFixture) -> None:
    """hivemind handles these in tasks that nobody awaits: the loop would print their tracebacks."""
    import gc

    dht_pb2 = hivemind_module("proto.dht_pb2")
    host = await net_factory()
    attacker = await net_factory(host)
    stub = attacker.libp2p._dht.protocol.get_stub(host.libp2p._p2p.peer_id)
    for size in (1, 21, 5000):
        bad = dht_pb2.NodeInfo(node_id=b"\xff" * size)
        for call, request in (
            (stub.rpc_find, dht_pb2.FindRequest(keys=[bytes(20)], peer=bad)),
            (stub.rpc_store, dht_pb2.StoreRequest(keys=[], peer=bad)),
            (stub.rpc_ping, dht_pb2.PingRequest(peer=bad)),
        ):
            with contextlib.suppress(Exception):  # whatever hivemind says: the host must survive it
                await call(request, timeout=2)
    gc.collect()
    assert await announce(attacker)
    assert attacker.directory.peer in await seen_by(host)
    assert [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


async def test_one_peer_cannot_fill_a_routing_table_nor_take_anothers_place(net_factory: MakeNet) -> None:
    dht_pb2 = hivemind_module("proto.dht_pb2")
    from blocktrain.node.libp2p import DHTID

    host = await net_factory()
    victim = await net_factory(host)
    attacker = await net_factory(host)
    table = host.libp2p._dht.protocol.routing_table
    stub = attacker.libp2p._dht.protocol.get_stub(host.libp2p._p2p.peer_id)
    victims_id = victim.libp2p._dht.node_id
    for claimed in [*(DHTID.generate() for _ in range(60)), victims_id]:
        await stub.rpc_ping(dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=claimed.to_bytes())), timeout=5)
    await until_async(lambda: attacker.directory.peer in host.libp2p.neighbours())
    assert len(table.uid_to_peer_id) <= 2
    assert table.get(node_id=victims_id) == victim.libp2p._p2p.peer_id
    assert await announce(victim)
    assert victim.directory.peer in await seen_by(host)


async def test_a_frozen_node_costs_the_time_given_but_not_what_the_others_answered(net_factory: MakeNet) -> None:
    host = await net_factory()
    joiner = await net_factory(host)
    frozen = await net_factory(host)
    for net in (host, joiner, frozen):
        assert await announce(net)
    client = await net_factory(host, client_mode=True)  # which keeps no records itself
    assert len(await seen_by(client)) == 3
    pid = frozen.libp2p.daemon_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        seen = await client.directory.read_block(RUN, 0, 0, timeout_s=1.0)
        assert time.monotonic() - began < 2.5
        assert {each.peer for each in seen} >= {host.directory.peer, joiner.directory.peer}
    finally:
        os.kill(pid, signal.SIGCONT)


# ---- what is kept for others, without a network -----------------------------------------------------------------------------------------


def names(count: int) -> list[bytes]:
    return [ids.peer_bytes(ids.peer_id_of_key(number.to_bytes(32, "big"))) for number in range(count)]


def test_a_dictionary_from_a_peer_is_read_around_what_cannot_be_a_record() -> None:
    import msgpack

    from blocktrain.node.libp2p import _DICTIONARY, _Records, _Serializer

    far = time.time() + 60
    good = names(2)
    items = [[good[0], b"a", far], [7, b"b", far], ["text", b"c", far], [b"short", b"d", far], [good[1], {"x": 1}, far],
             [good[1], b"e", "far"], [[1], b"f", far], [good[1], b"g"], None, [good[1], b"h", far]]  # fmt: skip
    packed = msgpack.packb(msgpack.ExtType(_DICTIONARY, msgpack.packb([None, far, items])))
    read = _Serializer.loads(packed)
    assert isinstance(read, _Records)
    assert {name: item.value for name, item in read.items()} == {good[0]: b"a", good[1]: b"h"}
    assert {name: item.value for name, item in _Serializer.loads(_Serializer.dumps(read)).items()} == {good[0]: b"a", good[1]: b"h"}


def test_what_is_kept_for_others_is_bounded_and_members_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    from blocktrain.node import libp2p

    monkeypatch.setattr(limits, "MAX_MEMBERS", 5)
    monkeypatch.setattr(libp2p, "MAX_KEYS_HELD", 3)
    monkeypatch.setattr(libp2p, "MAX_RECORDS_HELD", 9)
    storage, far = libp2p._Storage(), time.time() + 60
    keys = [libp2p.DHTID.generate(source=number) for number in range(5)]
    kept = [[storage.store_subkey(key, name, b"v", far) for name in names(7)] for key in keys]
    assert [sum(each) for each in kept] == [5, 4, 0, 0, 0], "five a key, nine in all"
    assert storage.store_subkey(keys[0], names(1)[0], b"w", far + 1), "who is there can renew"
    assert not storage.store_subkey(keys[0], names(1)[0], b"x", far), "by a later record only"
    assert storage.get(keys[0]).expiration_time == far + 1
    assert storage.get(keys[0]).value.data[names(1)[0]].value == b"w"


def test_places_are_free_again_when_records_have_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_storage = hivemind_module("utils.timed_storage")
    from blocktrain.node import libp2p

    now = 1000.0
    monkeypatch.setattr(timed_storage, "get_dht_time", lambda: now)
    monkeypatch.setattr(libp2p, "MAX_RECORDS_HELD", 3)
    storage, key = libp2p._Storage(), libp2p.DHTID.generate(source=1)
    assert [storage.store_subkey(key, name, b"v", now + 10) for name in names(4)] == [True, True, True, False]
    now = 1011.0
    assert storage.store_subkey(key, names(4)[3], b"v", now + 10)


async def test_an_answer_to_a_call_that_was_given_up_does_not_break_the_reader() -> None:
    """hivemind sets the result of whatever call the answer names; a cancelled one would raise, and end the only reader."""
    from blocktrain.node.taming import Calls

    calls = Calls()
    calls[1] = asyncio.get_running_loop().create_future()
    assert 1 in calls
    calls[1].cancel()
    assert 1 not in calls
    assert calls.pop(1, None) is not None


# ---- a stock hivemind-dht process as the only bootstrap: it stores anything -----------------------------------------------------------


@pytest.fixture
def stock_bootstrap(nothing_is_left: None) -> Iterator[str]:
    """Its address."""
    with swarm_kit.stock_bootstrap("--refresh_period", "1") as address:
        yield address


async def test_a_stock_hivemind_dht_is_enough_to_find_each_other(net_factory: MakeNet, stock_bootstrap: str) -> None:
    first = await net_factory(stock_bootstrap)
    second = await net_factory(stock_bootstrap)
    stock = first.libp2p._dht.protocol.routing_table.peer_id_to_uid
    for net in (first, second):
        assert await announce(net)
    for net in (first, second):
        assert set(await seen_by(net)) == {first.directory.peer, second.directory.peer}
    # Values that make a reader without our validator hang or fail, under our key, at a node that stores anything.
    attacker = second
    target = next(peer for peer in stock if peer.to_base58() in stock_bootstrap)
    far = time.time() + 100_000
    for subkey, value in ((b"x", b"\xc1"), ("text", b""), (first.libp2p._identity.peer_bytes, b"\xc1 forged"), (7, bytes(3000))):
        far += 1
        assert await raw_store(attacker, target, subkey, value, far) == [True], "the stock node was expected to take it"
    for net in (first, second):
        assert await announce(net, round=2)
    for net in (first, second):
        seen = await seen_by(net)
        assert {peer: said.round for peer, said in seen.items()} == {first.directory.peer: 2, second.directory.peer: 2}
    # Even the whole dictionary replaced there: our nodes keep the records themselves, too.
    await raw_store(attacker, target, None, b"\xc1", far + 1)
    third = await net_factory(stock_bootstrap)

    async def all_three() -> bool:
        for net in (first, second, third):
            assert await announce(net, round=3)
        return all([len(await seen_by(net)) == 3 for net in (first, second, third)])

    await until(all_three)
