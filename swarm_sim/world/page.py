"""A world's verdict as a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blocktrain.swarm_sim.page import Bar, Page, Plot

if TYPE_CHECKING:
    from blocktrain.swarm_sim.world.recorder import Recorder
    from blocktrain.swarm_sim.world.story import Verdict


def page_of(verdict: Verdict, seen: Recorder) -> Page:
    """What happened, what was found, and the command that does it again."""
    case, world, plan = verdict.case, verdict.world, verdict.plan
    page = Page(f"world {case.scenario}, {case.nodes} nodes, seed {case.seed}", verdict.ok)
    rounds = plan.end_s / plan.round_s
    page.facts = {
        "scenario": case.scenario,
        "nodes": case.nodes,
        "blocks": plan.blocks,
        "seed": case.seed,
        "virtual_s": plan.end_s,
        "safety_phase_s": plan.heal_at_s,
        "refresh_s": plan.refresh_s,
        "ttl_s": plan.ttl_s,
        "round_s": plan.round_s,
        "tau_s": plan.tau_s,
        "events_handled": world.queue.handled,
        "ends_of_exchanges": dict(seen.counts),
        "messages_per_node_round": sum(node.traffic.messages for node in world.nodes) / len(world.nodes) / rounds,
        "dht_hops_per_node_round": sum(node.traffic.hops for node in world.nodes) / len(world.nodes) / rounds,
        "bytes_per_node_round": sum(node.traffic.sent_bytes for node in world.nodes) / len(world.nodes) / rounds,
        "trace": verdict.trace.digest,
        "replay": case.command(),
    }
    page.plots = [
        Plot("loss per block", "half squared distance from the optimum", _by_block(seen.loss), log=True),
        Plot("coverage", "replicas", _by_block(seen.held)),
        Plot("consensus distance", "between replicas", _by_block(seen.distance), log=True),
        Plot("bytes", "sent by a node between two samples", {"bytes": seen.bytes_per_node}),
        Plot("messages", "sent by a node between two samples", {"messages": seen.messages_per_node}),
        Plot("latency of a traversal", "seconds", {"sweep": seen.sweep}),
    ]
    page.bars = [
        Bar(f"{number} (block {world.nodes[number].block})", begin, min(end, plan.end_s), world.nodes[number].block)
        for number, lives in sorted(seen.lives.items())
        for begin, end in lives
    ]
    page.lists = {"violations": [str(violation) for violation in verdict.violations], "events": [str(event) for event in plan.events[:500]]}
    return page


def _by_block(series: dict[int, list[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    return {f"block {block}": line for block, line in series.items()}
