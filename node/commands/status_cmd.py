"""`blocktrain status`: what this machine's nodes, or a swarm, say about themselves."""

from __future__ import annotations

from blocktrain.node.commands import checks
from blocktrain.node.commands.settings import ConfigFile
from blocktrain.node.config import ClientConfig, StatusConfig


def status_(client: ClientConfig | None = None, view: StatusConfig | None = None, *, config: ConfigFile = None) -> int:
    """Show this machine's nodes: block, round, loss, peers, exchanges, and what each is waiting for.

    With --initial-peers, show the swarm that they know instead.
    """
    client, view = client or ClientConfig(), view or StatusConfig()
    checks.check_client(client)
    from blocktrain.node import status

    return status.show(client, view)
