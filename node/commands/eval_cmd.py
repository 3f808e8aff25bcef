"""`blocktrain eval`: the loss of the living chain on text that no node trained on."""

from __future__ import annotations

from blocktrain.node.commands import checks
from blocktrain.node.commands.settings import ConfigFile
from blocktrain.node.config import ClientConfig, EvalConfig


def eval_(client: ClientConfig | None = None, request: EvalConfig | None = None, *, config: ConfigFile = None) -> int:
    """Measure the chain of all blocks on held-out text, in nats per token, beside each block alone."""
    client, request = client or ClientConfig(), request or EvalConfig()
    checks.check_client(client)
    checks.check_data(request.data)
    from blocktrain.node import client as swarm
    from blocktrain.node import runtime

    return runtime.run(lambda real: swarm.evaluate(client, request, real))
