"""The one file that knows hivemind: its DHT, and the libp2p daemon's control socket, inside our own event loop.

hivemind's `DHTNode` does the DHT over a `P2P` that we attach to a daemon of ours (`daemon`). Streams, dials and questions about peers go to
the daemon directly, each on a connection of its own with a deadline; that is a small protocol (protobuf messages of hivemind's) and keeps
every failure's reason. What this file hardens in hivemind is said at each place. Import it late: only who really goes online needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Final

import msgpack

from blocktrain.node import daemon, dialing, lean, taming
from blocktrain.node.daemon import MAX_UNARY_BYTES, Children, Daemon, Owned, Settings
from blocktrain.node.identity import Identity
from blocktrain.node.intake import Intake, Intakes
from blocktrain.node.sealing import Seals, split
from blocktrain.protocol import ids, limits
from blocktrain.protocol.errors import Malformed, NetworkFault
from blocktrain.protocol.ids import PeerId
from blocktrain.protocol.records import Key

with lean.packages():
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
    from hivemind.proto import p2pd_pb2
    from hivemind.utils.multiaddr import Multiaddr
    from hivemind.utils.serializer import MSGPackSerializer
    from hivemind.utils.timed_storage import ValueWithExpiration

log = logging.getLogger("blocktrain.libp2p")

RPC_TIMEOUT_S: Final = 3.0  # one DHT call to one node; a lookup makes several, side by side
CONTROL_TIMEOUT_S: Final = 5.0  # a question to our own daemon
PEER_BYTES: Final = 38  # of an Ed25519 peer id, the only kind of subkey
MAX_KEYS_HELD: Final = 1024  # DHT keys that we keep for others
MAX_RECORDS_HELD: Final = 32768  # records in all of them, about 1 KB each
MAX_TABLE: Final = 4096  # nodes in our routing table; Kademlia needs some hundred
MAX_BOOK: Final = 1024  # peers whose addresses we remember

_DICTIONARY: Final[int] = MSGPackSerializer._ext_types[DictionaryDHTValue]

Inbound = Callable[[PeerId, Intake, asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Sealed:
    """One verified record as it was found. `payload` is still packed."""

    peer: PeerId
    payload: bytes
    expires_at: float


class Libp2p:
    """One node's presence in libp2p and in the DHT. `died` is set when it is of no use any more; `reason` says why."""

    def __init__(self, settings: Settings, identity: Identity, clock: Callable[[], float], children: Children | None = None) -> None:
        self.peer = identity.peer_id
        self._settings = settings
        self._identity = identity
        self._seals = Seals(identity, clock)
        self._daemon = Daemon(settings, identity.file_bytes(), children)
        self._tasks = Owned()
        self._book: OrderedDict[PeerId, tuple[str, ...]] = OrderedDict()
        self._handlers: dict[str, Inbound] = {}
        self._serving: set[asyncio.Task[Any]] = set()
        self._server: asyncio.AbstractServer | None = None
        self._intakes = Intakes()
        self._silent_since: float | None = None
        self._p2p: Any = None
        self._dht: Any = None
        self._answers: dict[tuple[int, float], list[bool]] = {}  # stores in progress: what the other nodes said
        self._searches: list[tuple[int, _Records]] = []  # in progress: the key, and what was found so far

    @property
    def died(self) -> asyncio.Event:
        return self._daemon.died

    @property
    def reason(self) -> str:
        return self._daemon.reason

    @property
    def daemon_pid(self) -> int | None:
        return self._daemon.pid

    @property
    def silent_s(self) -> float:
        """For how long our daemon has not answered, though asked; 0 while it does."""
        return 0.0 if self._silent_since is None else asyncio.get_running_loop().time() - self._silent_since

    @property
    def refused_records(self) -> int:
        return self._seals.refused

    # ---- life ---------------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the daemon and the DHT node; nobody is connected yet. Raises: DoesNotFit, Unreachable (see `Daemon.start`)."""
        taming.quiet_logging()
        taming.quiet_tasks(asyncio.get_running_loop())
        await self._daemon.start()
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._attach()
        except (TimeoutError, OSError, EOFError, P2PDaemonError) as error:
            await self.stop()
            raise NetworkFault(f"the libp2p daemon does not answer: {error or 'no reply in time'}") from None
        except BaseException:
            await self.stop()
            raise

    async def _attach(self) -> None:
        control = Multiaddr(f"/unix{self._daemon.control_socket}")
        ours = Multiaddr(f"/unix{self._daemon.client_socket}")
        self._p2p = P2P()
        self._p2p._daemon_listen_maddr, self._p2p._client_listen_maddr = control, ours
        self._p2p._client = await Client.create(control, ours, persistent_conn_max_msg_size=MAX_UNARY_BYTES)
        self._p2p._client.control._pending_calls = taming.Calls()
        self._p2p._client.control._handler_tasks = taming.Serving()
        self._p2p.peer_id = PeerID(self._identity.peer_bytes)
        self._p2p._alive = True
        self._server = await self._intakes.serve(self._inbound, str(self._daemon.client_socket))
        self._dht = await DHTNode.create(
            p2p=self._p2p,
            node_id=DHTID.generate(source=self._identity.peer_bytes),  # the same after a restart: nobody keeps a ghost of us
            wait_timeout=RPC_TIMEOUT_S,
            num_workers=8,  # calls of one lookup side by side: a few frozen nodes cost one timeout, not several
            cache_locally=False,  # answers from caches are late
            cache_on_store=False,
            cache_nearest=0,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
            blacklist_time=2.0,  # the default ban doubles without a cap
            backoff_rate=1.0,
            client_mode=self._settings.client,
            record_validator=_Validator(self._seals),
        )
        self._harden(self._dht.protocol)
        self._tasks.start(self._watch(), "libp2p watch")
        self._tasks.start(self._keep_asking(), "libp2p health")

    async def stop(self) -> None:
        """End streams, DHT and daemon, and wait for them. May be called twice."""
        if self._server is not None:
            self._server.close()
        serving = [task for task in self._serving if task is not asyncio.current_task()]
        for task in serving:
            task.cancel()
        if serving:
            await asyncio.wait(serving, timeout=CONTROL_TIMEOUT_S)
        await self._tasks.close()
        await self._daemon.stop()  # before our connection to it closes, which would end it, too, but without our knowing when
        if self._dht is not None:
            self._dht.is_alive = False
        if self._p2p is not None and self._p2p._client is not None:
            control = self._p2p._client.control
            control.close()
            self._fail_calls("this node is stopping")
            await asyncio.gather(control._read_task, control._write_task, return_exceptions=True)
            self._p2p._alive = False

    async def _watch(self) -> None:
        """hivemind does not notice the end of its daemon: calls would hang for ever."""
        control = self._p2p._client.control
        died = asyncio.ensure_future(self._daemon.died.wait())
        try:
            await asyncio.wait({died, control._read_task, control._write_task}, return_when=asyncio.FIRST_COMPLETED)
            if not self._daemon.died.is_set():
                with contextlib.suppress(TimeoutError):  # the connection ends a moment before the process
                    await asyncio.wait_for(self._daemon.died.wait(), 1.0)
            self._daemon.fail("the connection to the libp2p daemon was lost")
            self._fail_calls(self._daemon.reason)
        finally:
            died.cancel()

    async def _keep_asking(self) -> None:
        """A frozen daemon (stopped, or swapped out) holds every connection open and says nothing: only a question tells."""
        time = asyncio.get_running_loop().time
        while not self.died.is_set():
            await asyncio.sleep(daemon.HEALTH_S)
            asked_at = time()
            try:
                await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), CONTROL_TIMEOUT_S)
                self._silent_since = None
            except NetworkFault:
                self._silent_since = self._silent_since or asked_at
                if self.silent_s >= daemon.FROZEN_S:
                    words = f"the libp2p daemon has not answered for {self.silent_s:.0f} s"
                    self._daemon.fail(f"{words}: is it stopped, or the machine out of memory?")

    def _fail_calls(self, why: str) -> None:
        for call in list(self._p2p._client.control._pending_calls.values()):
            if not call.done():
                call.set_exception(P2PDaemonError(why))

    # ---- peers --------------------------------------------------------------------------------------------------------------------

    async def addresses(self) -> list[str]:
        """Where the daemon listens or is announced, without /p2p/ of our own. Raises: NetworkFault."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), CONTROL_TIMEOUT_S)
        found = []
        for raw in response.identify.addrs:
            with contextlib.suppress(Malformed):  # QUIC and the like
                found.append(dialing.from_bytes(raw))
        return found

    async def connected(self) -> set[PeerId]:
        """Peers with an open connection. Raises: NetworkFault."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), CONTROL_TIMEOUT_S)
        return {PeerId(ids.base58_encode(info.id)) for info in response.peers}

    async def seen_at(self, peer: PeerId) -> list[str]:
        """From which addresses a peer is connected to us. Raises: NetworkFault."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), CONTROL_TIMEOUT_S)
        found = []
        for info in response.peers:
            if info.id == ids.peer_bytes(peer):
                for raw in info.addrs:
                    with contextlib.suppress(Malformed):
                        found.append(dialing.from_bytes(raw))
        return found

    def neighbours(self) -> set[PeerId]:
        """DHT nodes that answered us and are believed to be there."""
        return {PeerId(peer.to_base58()) for peer in self._dht.protocol.routing_table.peer_id_to_uid} - {self.peer}

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Remember where a peer can be dialled: it may have restarted elsewhere, or be nobody's neighbour yet."""
        found = tuple(addresses)[: limits.MAX_ADDRESSES]
        if found and peer != self.peer:
            self._book[peer] = found
            self._book.move_to_end(peer)
            if len(self._book) > MAX_BOOK:
                self._book.popitem(last=False)

    def known(self) -> list[PeerId]:
        """Peers whose addresses we remember, the latest last."""
        return list(self._book)

    async def connect(self, peer: PeerId, addresses: Sequence[str] = (), *, timeout_s: float) -> None:
        """Dial a peer at these addresses (or wherever libp2p finds it). Raises: NetworkFault: with the reason."""
        texts = addresses or self._book.get(peer, ())
        request = p2pd_pb2.ConnectRequest(
            peer=ids.peer_bytes(peer), addrs=[dialing.to_bytes(_without_peer(text, peer)) for text in texts], timeout=math.ceil(timeout_s)
        )
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request), timeout_s)

    async def ping(self, peer: PeerId, *, timeout_s: float) -> bool:
        """A DHT round trip: whether a DHT node answers there. Both sides then know each other."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._dht.protocol.call_ping(PeerID(ids.peer_bytes(peer))) is not None
        except TimeoutError:
            return False

    async def look_around(self, *, timeout_s: float) -> None:
        """Ask neighbours for our nearest nodes, so that the routing table fills and the dead leave it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._dht.find_nearest_nodes([self._dht.node_id])

    # ---- streams ------------------------------------------------------------------------------------------------------------------

    async def open_stream(self, peer: PeerId, kind: str, *, timeout_s: float) -> tuple[Intake, asyncio.StreamWriter]:
        """A stream to a peer's handler of this kind. It may "succeed" though nobody is there: the first answer proves it.

        Raises: NetworkFault: with the reason.
        """
        request = p2pd_pb2.StreamOpenRequest(peer=ids.peer_bytes(peer), proto=[kind], timeout=math.ceil(timeout_s))
        message = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request)
        began = asyncio.get_running_loop().time()
        try:
            _, reader, writer = await self._talk(message, timeout_s)
        except NetworkFault:
            left_s = timeout_s - (asyncio.get_running_loop().time() - began)
            if peer not in self._book or left_s <= 0:
                raise
            await self.connect(peer, timeout_s=left_s)  # libp2p may not know the way, or an old one
            _, reader, writer = await self._talk(message, max(0.1, timeout_s - (asyncio.get_running_loop().time() - began)))
        return reader, writer

    async def handle(self, kind: str, handler: Inbound) -> None:
        """Give inbound streams of a kind to `handler`, which owns and closes them. Raises: NetworkFault."""
        self._handlers[kind] = handler
        where = Multiaddr(f"/unix{self._daemon.client_socket}").to_bytes()
        request = p2pd_pb2.StreamHandlerRequest(addr=where, proto=[kind], balanced=False)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=request), CONTROL_TIMEOUT_S)

    async def _inbound(self, reader: Intake, writer: asyncio.StreamWriter) -> None:
        """A stream from our daemon. It says first who is there, which TLS has proved."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            info = p2pd_pb2.StreamInfo()
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                await read_pbmsg_safe(reader, info)
            handler = self._handlers.get(info.proto)
            if handler is not None:
                await handler(PeerId(ids.base58_encode(info.peer)), reader, writer)
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            log.debug("an inbound stream ended before it began: %r", error)
        except asyncio.CancelledError:
            pass  # we are closing, and asyncio's own callback of this task logs a traceback for one that was cancelled
        finally:
            self._serving.discard(task)
            writer.close()

    # ---- the daemon's control socket ----------------------------------------------------------------------------------------------

    async def _ask(self, message: Any, timeout_s: float) -> Any:
        response, _, writer = await self._talk(message, timeout_s)
        writer.close()
        return response

    async def _talk(self, message: Any, timeout_s: float) -> tuple[Any, Intake, asyncio.StreamWriter]:
        """One request on a connection of its own, which stays open. Raises: NetworkFault."""
        if self.died.is_set():
            raise NetworkFault(self.reason)
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await self._intakes.open(str(self._daemon.control_socket))
                await write_pbmsg(writer, message)
                response = p2pd_pb2.Response()
                await read_pbmsg_safe(reader, response)
            if response.type == p2pd_pb2.Response.ERROR:
                raise NetworkFault(dialing.plain_reason(response.error.msg))
            return response, reader, writer
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            if isinstance(error, TimeoutError):
                raise NetworkFault(f"no answer within {timeout_s:.3g} s") from None
            if isinstance(error, OSError | EOFError):
                raise NetworkFault(f"the libp2p daemon hung up: {self.reason or error}") from None
            raise

    # ---- records ------------------------------------------------------------------------------------------------------------------

    async def store(self, key: Key, payload: bytes, *, expires_at: float, timeout_s: float) -> bool:
        """Put our record under `key`. True if it can be found: another node took it, or we keep it and the others do not ignore us."""
        name = (DHTID.generate(source=key), expires_at)
        answers = self._answers[name] = []
        alone = not self.neighbours()
        try:
            async with asyncio.timeout(timeout_s):
                await self._dht.store(key, payload, expires_at, subkey=self._identity.peer_bytes)
        except TimeoutError:
            log.debug("storing a record took longer than %.3g s", timeout_s)
        finally:
            del self._answers[name]
        held = self._dht.protocol.storage.get(name[0])
        kept = held is not None and held.value.expiry_of(self._identity.peer_bytes) == expires_at
        return any(answers) or (kept and (alone or bool(answers)))

    async def get(self, key: Key, *, timeout_s: float) -> list[Sealed]:
        """The newest verified records under `key`, from all nodes that hold it; when time runs out, from those that answered.

        Raises: NetworkFault: nobody answered in time, or the daemon is gone.
        """
        if self.died.is_set():
            raise NetworkFault(self.reason)
        name, found = DHTID.generate(source=key), _Records()
        search = (name, found)
        self._searches.append(search)
        try:
            async with asyncio.timeout(timeout_s):
                await self._dht.get(key, latest=True)
        except TimeoutError:
            if not found.data:
                raise NetworkFault(f"the DHT did not answer within {timeout_s:.3g} s") from None
            log.debug("a search took longer than %.3g s; going on with %d records", timeout_s, len(found.data))
        finally:
            self._searches.remove(search)
        own = self._dht.protocol.storage.get(name)
        found.merge(own.value if own is not None else _Records())
        return [Sealed(PeerId(ids.base58_encode(peer)), split(value)[0], expires_at) for peer, (value, expires_at) in found.items()]

    def _harden(self, protocol: Any) -> None:
        """Replace what one hostile or forgetful DHT node could turn against us. Nobody is connected yet."""
        find, store, update = protocol.call_find, protocol.call_store, protocol.update_routing_table

        def keep_sound(key: bytes, dictionary: Any) -> bool:
            """hivemind refuses a whole dictionary for one bad record, which anybody could put there."""
            with dictionary.freeze():
                items = list(dictionary.items())
            for subkey, (value, expires_at) in items:
                if self._seals.open(key, protocol.serializer.dumps(subkey), value, expires_at) is None:
                    del dictionary[subkey]
            return True

        async def call_find(peer: Any, keys: Any) -> Any:
            """hivemind believes the expiry that a node claims for a dictionary, ends its search early for a large one, and visits any
            number of nodes that are claimed to be near."""
            found = await find(peer, keys)
            if not found:
                return found
            answers = {}
            for key, (value, nearest) in found.items():
                records = _Records()
                if value is not None:
                    records.merge(value.value)
                for name, search in self._searches:
                    if name == key:
                        search.merge(records)
                sound = ValueWithExpiration(records, records.latest_expiration_time) if records.data else None
                answers[key] = sound, dict(islice(nearest.items(), protocol.bucket_size))
            return answers

        async def call_store(peer: Any, keys: Any, values: Any, expiration_time: Any, *rest: Any, **more: Any) -> Any:
            """hivemind reports the last node's answer only."""
            taken = await store(peer, keys, values, expiration_time, *rest, **more)
            for key, expires_at, ok in zip(keys, expiration_time, taken or (), strict=False):
                self._answers.get((key, expires_at), []).append(ok)
            return taken

        async def update_routing_table(node_id: Any, peer_id: Any, responded: bool = True) -> None:
            """hivemind lets one peer fill its table with made-up node ids, and take the place of another by claiming its id."""
            if responded and node_id is not None:
                table = protocol.routing_table
                before, holder = table.get(peer_id=peer_id), table.get(node_id=node_id)
                if before is None and len(table.uid_to_peer_id) >= MAX_TABLE:
                    return
                if holder is not None and holder != peer_id and node_id != DHTID.generate(source=peer_id.to_bytes()):
                    return
                if before is not None and before != node_id:
                    del table[before]
            await update(node_id, peer_id, responded)

        protocol.serializer = _Serializer
        protocol.storage = protocol.cache = _Storage()
        protocol._validate_dictionary = keep_sound
        protocol.call_find = call_find
        protocol.call_store = call_store
        protocol.update_routing_table = update_routing_table


def _without_peer(text: str, peer: PeerId) -> str:
    return text.removesuffix(f"/p2p/{peer}").removesuffix(f"/ipfs/{peer}")


class _Validator(RecordValidatorBase):  # type: ignore[misc]
    """hivemind's door to our seals."""

    def __init__(self, seals: Seals) -> None:
        self._seals = seals

    def validate(self, record: DHTRecord) -> bool:
        return self._seals.open(record.key, record.subkey, record.value, record.expiration_time) is not None

    def sign_value(self, record: DHTRecord) -> bytes:
        return self._seals.seal(record.key, MSGPackSerializer.loads(record.value), record.expiration_time)

    def strip_value(self, record: DHTRecord) -> bytes:
        return bytes(MSGPackSerializer.dumps(split(record.value)[0]))  # of a record that passed validate


class _Records(DictionaryDHTValue):  # type: ignore[misc]
    """The records under one key. Bounded, and an older copy is refused before hivemind can shorten the newer one's life by it."""

    def store(self, key: Any, value: Any, expiration_time: float) -> bool:
        held = self.data.get(key)
        if held is not None and held.expiration_time >= expiration_time:
            return False
        if held is None and len(self.data) >= limits.MAX_MEMBERS and len(self) >= limits.MAX_MEMBERS:
            return False  # who is there stays: a flood of new names cannot push members out
        return bool(super().store(key, value, expiration_time))

    def merge(self, other: Any) -> None:
        for subkey, (value, expires_at) in other.items():
            self.store(subkey, value, expires_at)

    def expiry_of(self, subkey: bytes) -> float | None:
        held = self.data.get(subkey)
        return None if held is None else float(held.expiration_time)

    @classmethod
    def unpackb(cls, raw: bytes) -> _Records:
        """Of a dictionary from a peer, what can be ours at all; hivemind would fail at the first odd key, and read none of it."""
        _, _, items = msgpack.unpackb(raw, raw=False)
        records = cls()
        with records.freeze():
            for item in items:
                if isinstance(item, list) and tuple(map(type, item)) == (bytes, bytes, float) and len(item[0]) == PEER_BYTES:
                    records.store(*item)
        return records


class _Serializer(MSGPackSerializer):  # type: ignore[misc]
    """For our protocol object only: dictionaries become `_Records`, and no other extension is known."""

    _ext_types: ClassVar[dict[Any, int]] = {_Records: _DICTIONARY, DictionaryDHTValue: _DICTIONARY}
    _ext_type_codes: ClassVar[dict[int, Any]] = {_DICTIONARY: _Records}


class _Storage(DHTLocalStorage):  # type: ignore[misc]
    """What we keep for others: dictionaries of verified records only, bounded in keys and in all."""

    def __init__(self) -> None:
        super().__init__()
        self._added = 0  # new records since the last count, and that count: never less than what is held

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        held = self.get(key)
        if held is None and len(self) >= MAX_KEYS_HELD:
            return False
        kept = held.value if held is not None else _Records()
        if subkey not in kept.data:
            if self._added >= MAX_RECORDS_HELD:
                self._added = sum(len(each.value) for each in self.data.values())
            if self._added >= MAX_RECORDS_HELD:
                return False
            self._added += 1
        if not kept.store(subkey, value, expiration_time):
            return False
        if held is None or expiration_time > held.expiration_time:
            DHTLocalStorage.store(self, key, kept, expiration_time)
        return True
