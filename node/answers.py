"""What the commands that ask a model say about its answer: the honest part, in words and as JSON.

Every answer names its mode and route, the blocks, peers and states behind it, the traversals it took, and whether a block was missing.
"""

from __future__ import annotations

import base64

from blocktrain import __version__
from blocktrain.node.compute.evaluation import ChainLoss
from blocktrain.node.compute.generation import Generation
from blocktrain.node.traversal import Report
from blocktrain.protocol.ids import short
from blocktrain.protocol.manifest import Manifest


def about(result: Generation, report: Report) -> str:
    """A few lines for people."""
    route = f" over a {report.route}" if report.peers[1:] else ""
    words = [
        f"{result.mode}{route}{', drafted here' if report.drafted_here else ''}: {result.tokens} tokens in {result.traversals} traversals "
        f"({result.tokens_per_traversal:.1f} each), {result.tokens_per_s:.1f} tokens/s, seed {result.sampling.seed}",
        ", ".join(f"block {block} at {short(peer) or 'home'} (round {round})" for block, peer, round, _ in report.peers),
    ]
    if result.mode == "one-sweep":
        words.append("all tokens of a window come from noise at once: fast, and rough by nature")
    if result.prompt_unseen:
        words.append(
            f"the prompt is longer than the context: its first {result.prompt_unseen} of {result.prompt_tokens} tokens were not seen"
        )
    if result.missing:
        words.append(f"WITHOUT block {', '.join(map(str, result.missing))}: nobody holds it; the text is that of the others")
    if report.mended:
        changed = "; another state took over, so the same seed may not give this text again" if report.digests_changed else ""
        words.append(f"mended {len(report.mended)} times (last: {report.mended[-1]}){changed}")
    return "\n".join(words)


def generation_json(manifest: Manifest, result: Generation, report: Report, prompt: bytes) -> dict[str, object]:
    """One object for machines. `text` shows broken UTF-8 as U+FFFD; `text_base64` has the bytes as they are."""
    return {
        "run": manifest.run.hex(),
        "prompt": prompt.decode("utf-8", errors="replace"),
        "text": result.text,
        "text_base64": base64.b64encode(result.data).decode(),
        "bytes": len(result.data),
        "tokens": result.tokens,
        "temperature": result.sampling.temperature,
        "seed": result.sampling.seed,
        "drafted": result.drafted,
        "kept": result.kept,
        "prompt_tokens": result.prompt_tokens,
        "prompt_unseen": result.prompt_unseen,
        "finish": result.finish,
        "seconds": result.seconds,
        "first_token_s": result.first_token_s,
        **origin(result, report),
        "version": __version__,
    }


def origin(result: Generation, report: Report) -> dict[str, object]:
    """Where an answer came from: also what the gateway adds to its answers."""
    return {
        "mode": result.mode,
        "route": report.route,
        "drafted_here": report.drafted_here,
        "blocks": list(result.blocks),
        "missing": list(result.missing),
        "peers": peers_json(report),
        "rounds": [row[2] for row in report.peers],
        "traversals": result.traversals,
        "tokens_per_traversal": result.tokens_per_traversal,
        "compute_s": result.compute_s,
        "mended": report.mended,
        "digests_changed": report.digests_changed,
    }


def loss_json(manifest: Manifest, loss: ChainLoss, report: Report, seconds: float) -> dict[str, object]:
    return {
        "run": manifest.run.hex(),
        "loss": loss.nats,
        "tokens": loss.tokens,
        "blocks": list(loss.blocks),
        "missing": list(loss.missing),
        "peers": peers_json(report),
        "rounds": [row[2] for row in report.peers],
        "route": report.route,
        "seconds": seconds,
    }


def peers_json(report: Report) -> list[dict[str, object]]:
    return [{"block": block, "peer": peer, "round": round, "digest": digest[:16]} for block, peer, round, digest in report.peers]
