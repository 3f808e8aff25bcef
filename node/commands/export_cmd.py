"""`blocktrain export`: take the model home."""

from __future__ import annotations

from blocktrain.node.commands import checks
from blocktrain.node.commands.settings import ConfigFile
from blocktrain.node.config import ClientConfig, ExportConfig


def export_(client: ClientConfig | None = None, request: ExportConfig | None = None, *, config: ConfigFile = None) -> int:
    """Fetch every block from its holders into one safetensors file, digests verified.

    `generate --model FILE` and `eval --model FILE` use it without the swarm.
    """
    client, request = client or ClientConfig(), request or ExportConfig()
    checks.check_client(client)
    from blocktrain.node import export, runtime

    return runtime.run(lambda real: export.export(client, request, real))
