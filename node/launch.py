"""From a config to a running node, and back to a clean machine: `run_node`, what `blocktrain-node` does.

In this order, so that every mistake is found before anything that costs: the recipe or (through a short-lived client connection) the run
that the initial peers know; the block; the store and the identity in it; the data; the network; the block itself in memory. Then the
service lives until it is told to stop. Every step is a context, so what was opened is closed in reverse, also when a later step fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from blocktrain.node import heap, logs
from blocktrain.node import identity as identities
from blocktrain.node.config import NodeConfig
from blocktrain.node.events import Events
from blocktrain.node.network import Net, open_network
from blocktrain.node.placing import look
from blocktrain.node.planning import AGENT, Plan, make_plan, settings_for
from blocktrain.node.reachability import Reachability, Witness
from blocktrain.node.runtime import Runtime
from blocktrain.node.service import Node, Parts
from blocktrain.node.snapshot import Clocks, Static, build
from blocktrain.node.status import Status
from blocktrain.node.store import MAX_PEERS_KEPT, Store
from blocktrain.node.talk import Talk
from blocktrain.protocol.errors import RefusedBySwarm, Unreachable
from blocktrain.protocol.handshake import Greeting
from blocktrain.protocol.ids import PeerId, short
from blocktrain.protocol.placement import Mover

if TYPE_CHECKING:
    from blocktrain.node.compute.assemble import Prepared

log = logging.getLogger("blocktrain.node")

MOVE_REST_TTLS = 20.0  # lives of a record after a start or a move before the next one; ten minutes as things are by default
T = TypeVar("T")
Outfit = Callable[[Parts], Parts]
__all__ = ["AGENT", "look", "run_node"]


def as_it_is(parts: Parts) -> Parts:
    return parts


async def run_node(config: NodeConfig, runtime: Runtime, outfit: Outfit = as_it_is) -> int:
    """Run one node until it is told to stop, its rounds are done, or something ends it. Returns the exit code.

    Args:
        outfit: may replace parts of the node before it is put together; simulations do.
    Raises: BlocktrainError: whatever a person can mend, in one line.
    """
    logs.setup(config.log_level)
    threading.Thread(target=_warm_up, name="warm-up", daemon=True).start()
    with Talk(config, runtime) as talk:
        work = asyncio.create_task(_node(config, runtime, talk, outfit), name="node")
        beside = [asyncio.create_task(talk.repeat(), name="talk"), asyncio.create_task(runtime.stop.wait(), name="stop")]
        try:
            await asyncio.wait({work, *beside}, return_when=asyncio.FIRST_COMPLETED)
            if beside[0].done():  # nobody reads what we say any more (`| head`): end in order, and with that reason
                runtime.stop.set()
            if not work.done() and not talk.alive:
                log.info("stopping before the node was up")
                work.cancel()
            try:
                code = await work
            except asyncio.CancelledError:
                if not work.cancelled():
                    raise
                code = 0
            if beside[0].done():
                beside[0].result()
            return code
        finally:
            for task in (work, *beside):
                task.cancel()
            await asyncio.gather(work, *beside, return_exceptions=True)


async def _node(config: NodeConfig, runtime: Runtime, talk: Talk, outfit: Outfit) -> int:
    plan: Plan | None = await make_plan(config, runtime)
    while plan is not None:
        talk.know(plan.manifest, plan.block)
        async with _open(settings_for(plan, config), plan, runtime, outfit) as (node, static):
            talk.show(partial(_status, node, static, runtime))
            plan = await _live(node, static, runtime, talk)
        talk.alive = False
    return 0


def _status(node: Node, static: Static, runtime: Runtime) -> Status:
    return build(node, static, runtime.clock())


@contextlib.asynccontextmanager
async def _open(config: NodeConfig, plan: Plan, runtime: Runtime, outfit: Outfit) -> AsyncIterator[tuple[Node, Static]]:
    """The node and all that it stands on, closed in reverse."""
    manifest, block = plan.manifest, plan.block
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(
            Store.open(config.files.store or plan.store, manifest.run, block, min_free_bytes=config.files.min_free_mib * 1024 * 1024)
        )
        logs.keep_debug_file(store.folder)
        stack.callback(logs.forget_debug_file)
        events = stack.enter_context(Events(config.files.events, runtime.clock))
        store.save_manifest(manifest.to_bytes())
        who = stack.enter_context(identities.load_or_create(config.files.identity or store.folder / "identity.key", plan.claimed_by))
        # The network and the block do not need each other: torch is imported and weights are read while the daemon starts.
        preparing = _in_thread(lambda: _prepare(config, plan, store, who.peer_id))
        clocks = Clocks(runtime.clock)
        net = await stack.enter_async_context(
            open_network(
                config.network,
                who,
                Greeting(manifest, AGENT, config.gossip.topology),
                runtime.clock,
                children=runtime.children,
                on_hello=clocks.met,
            )
        )
        prepared = await preparing
        stack.push_async_callback(prepared.replica.stop)
        server = prepared.start()
        stack.push_async_callback(server.stop)

        def others() -> list[PeerId]:
            return [member.peer for member in node.core.everybody(runtime.clock()) if not member.avoided_s]

        static = Static(
            name=config.name or short(who.peer_id),
            device=prepared.device,
            data=prepared.data,
            store=store,
            net=net,
            clocks=clocks,
            reachability=Reachability(net.transport, net.directory.addresses, others, runtime.rng),
            started_at=runtime.clock(),
            fresh=prepared.fresh,
        )

        def status_json() -> str:
            return build(node, static, runtime.clock()).to_json()

        witness = Witness(net.libp2p.seen_at, time.monotonic)
        parts = Parts(net.transport, net.directory, prepared.replica, server, witness.answer, events)
        node = Node(config, manifest, block, outfit(parts), clock=runtime.clock, rng=runtime.rng, status_json=status_json)
        yield node, static


def _warm_up() -> None:
    """Import torch while the swarm is looked for. Whatever is wrong with it is told by whoever needs it."""
    with contextlib.suppress(Exception):
        importlib.import_module("blocktrain.node.compute.assemble")


def _prepare(config: NodeConfig, plan: Plan, store: Store, peer: str) -> Prepared:
    """In a thread: importing torch, reading data and building the block take seconds."""
    from blocktrain.node.compute.assemble import assemble

    return assemble(config.training, plan.manifest, plan.block, store, peer, report=lambda words: log.info("%s", words))


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """The result of slow work. Its thread is a daemon: a node that is stopped while it starts does not wait for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("T", result))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="prepare", daemon=True).start()
    return future


async def _live(node: Node, static: Static, runtime: Runtime, talk: Talk) -> Plan | None:
    """The service until its end, with checkpoints and watchers beside it. Returns what to do next, where it shall go on elsewhere."""
    talk.alive = True
    stop = asyncio.Event()
    end: list[BaseException] = []
    moves: list[Plan] = []

    async def wait(what: Coroutine[Any, Any, object], why: str) -> None:
        await what
        log.info("%s", why)
        stop.set()

    async def fail(reason: Coroutine[Any, Any, BaseException]) -> None:
        end.append(await reason)
        stop.set()

    helpers = [
        asyncio.create_task(wait(runtime.stop.wait(), "stopping: saving and leaving")),
        asyncio.create_task(wait(node.rounds_done.wait(), "the rounds that were asked for are done")),
        asyncio.create_task(fail(node.failure())),
        asyncio.create_task(fail(_daemon_died(static.net))),
        asyncio.create_task(fail(static.clocks.too_far_off())),
        asyncio.create_task(_checkpoints(node, static)),
        asyncio.create_task(_keep_known(node, static)),
        asyncio.create_task(static.reachability.keep()),
    ]
    if node.config.training.may_move:

        async def move() -> None:
            moves.append(await _needed_elsewhere(node))

        helpers.append(asyncio.create_task(wait(move(), "leaving this block for one that needs us more")))
    log.info("block %d of run %s; this node is %s", node.block, node.manifest.name, node.me)
    _invite(node, static)
    heap.settle()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, node.resume)
    try:
        await node.run(stop, fresh=static.fresh)
        log.debug("left the swarm")
        sound = not end or isinstance(end[0], Unreachable | RefusedBySwarm)  # neither a lost daemon nor a clock spoils what was trained
        if sound and (node.parts.replica.published().round or node.parts.replica.progress().steps):
            await node.parts.replica.save()
            if static.store.trouble:
                log.warning("what was trained last is not saved: %s", static.store.trouble)
        _remember(node, static)
        log.debug("saved")
    finally:
        heap.unsettle()  # it may go on elsewhere, with another block
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        talk.write()
    if end:
        raise end[0]
    return moves[0] if moves and not runtime.stop.is_set() and not node.rounds_done.is_set() else None


async def _needed_elsewhere(node: Node) -> Plan:
    """Wait until another block needs us and ours does not; the plan to hold it, with whom to ask for the swarm there."""
    network = node.config.network
    mover = Mover(node.me, node.block, node.manifest.blocks, ttl_s=network.ttl_s, refresh_s=network.refresh_s)
    await asyncio.sleep(MOVE_REST_TTLS * network.ttl_s)
    while True:
        await asyncio.sleep(network.refresh_s)
        members = node.core.everybody(node.clock())
        block = mover.consider(members, node.clock())
        if block is not None:
            log.info("block %d is in danger and ours has enough: moving there", block)
            return Plan(node.manifest, block, tuple(address for member in members for address in member.addresses))


def _invite(node: Node, static: Static) -> None:
    """The line that others paste to join."""
    addresses = static.net.directory.addresses()
    if addresses:
        log.info("others join with: blocktrain-node --block N --initial-peers %s", addresses[0])
    else:
        log.info("this node has no address yet that others could dial")


async def _daemon_died(net: Net) -> BaseException:
    await net.died.wait()
    return Unreachable(f"{net.reason}; start the node again, its state is saved")


async def _checkpoints(node: Node, static: Static) -> None:
    while True:
        await asyncio.sleep(node.config.files.checkpoint_every_s)
        await node.parts.replica.save()
        _remember(node, static)


async def _keep_known(node: Node, static: Static) -> None:
    """Whom we meet first is kept soon: the next start may be needed before the first checkpoint."""
    while not _remember(node, static):  # noqa: ASYNC110 others announce themselves when they like
        await asyncio.sleep(node.config.network.refresh_s)


def _remember(node: Node, static: Static) -> bool:
    """Keep where the others are, for a start when no initial peer answers. Of a swarm that is gone the last that was seen is kept."""
    members = [member for member in node.core.everybody(node.clock()) if not member.avoided_s]
    members.sort(key=lambda member: (member.block != node.block, member.peer))
    found = [address for member in members for address in member.addresses[:1]]
    if found:
        asked = node.config.network.initial_peers[:MAX_PEERS_KEPT]  # by them a store is known again (planning.py)
        static.store.save_peers(list(dict.fromkeys((*found[: MAX_PEERS_KEPT - len(asked)], *asked))))
    return bool(found)
