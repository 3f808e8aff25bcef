"""The same training without a node: data, block, optimiser and steps in a plain loop. What `bench node` compares a node's speed with.

    python -m blocktrain.swarm_sim.leash NICENESS bare-loop RECIPE BLOCK SHARD

Prints a line of JSON with `steps` and `written_at` each second, as a node does, until SIGINT. No network, no daemon, no event loop, no
held-out check, no serving: nothing but `Trainer.step`.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final

EVERY_S: Final = 1.0


def main() -> int:
    import torch

    from blocktrain.node.compute.device import Mover
    from blocktrain.node.compute.trainer import Trainer
    from blocktrain.node.data import TokenStream, load_tokens
    from blocktrain.node.recipe_file import load_recipe
    from blocktrain.node.tokenizer import load_tokenizer

    recipe, block, shard = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    torch.set_num_threads(1)  # as a node's default
    manifest = load_recipe(recipe)
    corpus = load_tokens(("builtin",), load_tokenizer(manifest.tokenizer, manifest.model.vocabulary), manifest.model.context)
    batches = TokenStream(corpus, batch=manifest.optimizer.batch, peer=shard, block=block, seed=manifest.seed)
    trainer = Trainer(manifest, block, batches, Mover(torch.device("cpu")), seed=0)
    said = 0.0
    while not stop.is_set():
        trainer.step()
        now = time.time()
        if now - said >= EVERY_S:
            said = now
            print(json.dumps({"steps": trainer.counters.steps, "written_at": now}), flush=True)
    return 0
