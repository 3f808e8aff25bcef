"""A client that holds a block drafts by itself: what goes to the chain is a text to be scored, and one round trip over a star is enough.

To the holders a drafted step is one with more tokens; nothing in the protocol knows who wrote them. The client decides every token from
the chain's distribution as always, so a drafter of an old state, or a poor one, changes the speed. Which tokens a seed gives depends on the
drafter's probabilities too: with the very state that the first holder serves the text is the same, with another one it is another text
of the same distribution.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from blocktrain.node.compute.generation import Traversals
from blocktrain.node.compute.model import Block
from blocktrain.node.compute.takehome import OfflineModel
from blocktrain.node.compute.worker import Worker
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.manifest import Manifest
from blocktrain.protocol.messages import Scored, Step
from blocktrain.protocol.sweep import Shape, rows_of_draft

FLAG: Final = "--drafter"


class Drafter:
    """A block at hand, for all texts of one client; one thread drafts for all of them."""

    def __init__(self, manifest: Manifest, block: Block) -> None:
        self.shape = Shape.of(manifest)
        self.worker = Worker(manifest, block)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="draft")

    @classmethod
    def load(cls, path: Path, manifest: Manifest) -> Drafter:
        """The first block in a file of `blocktrain export`. Raises: UsageError: no such file, or another run's."""
        model = OfflineModel.load(path, flag=FLAG)
        if model.manifest.run != manifest.run or not model.blocks:
            raise UsageError(f"{FLAG} {path} holds run {model.manifest.name}, not a block of {manifest.name}")
        return cls(manifest, model.blocks[0])

    def over(self, chain: Traversals) -> Traversals:
        """The chain for one text, whose drafts are made here."""
        return _Drafting(self, chain)

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)


class _Drafting:
    """Implements `Traversals`. The block's cache follows the text's, step by step."""

    def __init__(self, drafter: Drafter, chain: Traversals) -> None:
        self._drafter = drafter
        self._chain = chain
        self._cache = drafter.worker.cache()

    async def traverse(self, step: Step, body: bytes = b"") -> tuple[Scored, memoryview]:
        drafter = self._drafter
        own, rows = await asyncio.get_running_loop().run_in_executor(drafter.thread, drafter.worker.step, self._cache, step, b"")
        if not step.draft:
            return await self._chain.traverse(step, body)
        scored, answer = await self._chain.traverse(replace(step, tokens=own.tokens, draft=0))
        begin, end = (count * drafter.shape.row_bytes for count in (step.want, step.want + rows_of_draft(step.draft)))
        drafted = own.tokens[len(step.tokens) :]
        whole = replace(scored, drafted=step.draft, tokens=drafted, compute_s=scored.compute_s + own.compute_s)
        return whole, memoryview(b"".join((answer[:begin], rows[begin:end], answer[begin:])))
