"""`blocktrain generate`: ask the swarm for text."""

from __future__ import annotations

import sys
from typing import Final

from blocktrain.node.commands import checks
from blocktrain.node.commands.settings import ConfigFile
from blocktrain.node.config import ChatConfig, ClientConfig, GenerateConfig
from blocktrain.protocol.errors import UsageError

MAX_PROMPT_BYTES: Final = 1 << 20  # far more than any context; whoever pipes in a disk by mistake is told


def generate_(client: ClientConfig | None = None, request: GenerateConfig | None = None, *, config: ConfigFile = None) -> int:
    """Continue a prompt with the swarm's model: one peer per block, chosen anew when one is lost.

    The text goes to stdout, what is worth knowing about it to stderr.
    """
    client, request = client or ClientConfig(), request or GenerateConfig()
    checks.check_client(client)
    prompt = read_prompt(request.prompt)
    from blocktrain.node import client as swarm
    from blocktrain.node import runtime

    return runtime.run(lambda real: swarm.generate(client, request, prompt, real))


def chat_(client: ClientConfig | None = None, request: ChatConfig | None = None, *, config: ConfigFile = None) -> int:
    """A loop of prompts: each line is one, and the text goes on. These models continue text; they follow no instructions."""
    client, request = client or ClientConfig(), request or ChatConfig()
    checks.check_client(client)
    from blocktrain.node import asking, runtime

    return runtime.run(lambda real: asking.chat(client, request, real))


def read_prompt(given: str | None) -> bytes:
    """The prompt's bytes: the one given, or else what is piped in. An empty one is fine: a text from nothing.

    Raises: UsageError: neither, or one that is too long.
    """
    if given is not None:
        prompt = given.encode("utf-8", "surrogateescape")
    elif not sys.stdin.isatty():
        prompt = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    else:
        raise UsageError("no prompt: give --prompt TEXT, or pipe one in")
    if len(prompt) > MAX_PROMPT_BYTES:
        raise UsageError(f"the prompt is longer than {MAX_PROMPT_BYTES} bytes")
    return prompt
