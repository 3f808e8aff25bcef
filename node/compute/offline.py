"""A chain of blocks inside this process, for a model taken home and for tests: the same steps as in the swarm, without streams.

The blocks see exactly what holders see (`Worker.step`), so the same states give the same bytes for the same seed as the swarm does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from blocktrain.node.compute.model import Block
from blocktrain.node.compute.worker import Worker
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import Scored, Step
from blocktrain.protocol.sweep import scored


class OfflineChain:
    """Implements `Traversals` over blocks at hand, in the chain's order. One text at a time; use as `async with`.

    The caches stay between texts: a new one begins at position 0 and cuts them back.
    """

    def __init__(self, manifest: Manifest, blocks: Sequence[Block]) -> None:
        self._workers = [Worker(manifest, block) for block in blocks]
        self._caches = [worker.cache() for worker in self._workers]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chain")

    async def __aenter__(self) -> OfflineChain:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)

    async def traverse(self, step: Step, body: bytes = b"") -> tuple[Scored, memoryview]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._through, step, body)

    def _through(self, step: Step, body: bytes) -> tuple[Scored, memoryview]:
        for worker, cache in zip(self._workers, self._caches, strict=True):
            step, body = worker.step(cache, step, body)
        return scored(step, self._workers[0].shape), memoryview(body)
