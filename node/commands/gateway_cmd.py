"""`blocktrain gateway`: the swarm behind an OpenAI-compatible endpoint on this machine."""

from __future__ import annotations

from blocktrain.node.commands import checks
from blocktrain.node.commands.settings import ConfigFile
from blocktrain.node.config import ClientConfig, GatewayConfig


def gateway_(client: ClientConfig | None = None, request: GatewayConfig | None = None, *, config: ConfigFile = None) -> int:
    """Serve `/v1/models` and `/v1/completions` on loopback until told to stop, with the swarm (or a file) behind them."""
    client, request = client or ClientConfig(), request or GatewayConfig()
    checks.check_client(client)
    from blocktrain.node import gateway, runtime

    return runtime.run(lambda real: gateway.run(client, request, real))
