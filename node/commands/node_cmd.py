"""`blocktrain node`, which is `blocktrain-node`: hold one block, train it, average it, serve it."""

from __future__ import annotations

from blocktrain.node.commands import checks
from blocktrain.node.commands.settings import ConfigFile
from blocktrain.node.config import NodeConfig


def node_(settings: NodeConfig | None = None, *, config: ConfigFile = None) -> int:
    """Hold one block of a run, train it, average it with its other holders, and serve it.

    Host a new run with --new-run, or join one with --initial-peers; everything else comes from the swarm.
    """
    settings = settings or NodeConfig()
    checks.check_node(settings)
    from blocktrain.node import launch, runtime

    return runtime.run(lambda real: launch.run_node(settings, real))
