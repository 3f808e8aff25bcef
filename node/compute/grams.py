"""Hashed n-grams: what the last few tokens say together, looked up in a small table and added to what the first layer reads.

A block of few layers spends much of its depth on recognising short strings; a table knows them at once (hash embeddings, arXiv
1709.03933; of byte n-grams in front of a transformer: Byte Latent Transformer, 2412.09871). All lengths share one table of narrow rows,
and a projection brings what was found to the block's width: so the table is no larger than the rest of a block, and costs hardly any time.

Which row an n-gram has is whole-number arithmetic on token ids, the same on every machine. Its constants follow from the manifest's seed
and the block: each block mixes up other n-grams, and the mean of all mixes up fewer. The table begins at zero: a fresh block is one
without it.

Shapes: R rows (texts), N positions of a pass, O lengths (2 … `longest`), K numbers a row of the table, D width of the block.
"""

from __future__ import annotations

import hashlib
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blocktrain.protocol.manifest import Manifest

TABLE: Final = "grams.table"  # its name among the parameters of a block
PROJECTION_GAIN: Final = 18.0  # times the embedding's own deviation: large, so that small steps of the table count (docs/recipe.md)
_PRIME: Final = 2**31 - 1  # everything is a remainder of it, so that no product leaves 63 bits (token ids are below 2**20)
_FOLD: Final = 15  # bits


class Grams(nn.Module):
    """The table of one block. Without initial weights: the block gives them."""

    def __init__(self, manifest: Manifest, block: int) -> None:
        super().__init__()
        given = manifest.grams
        self.reach = given.longest - 1  # tokens before its own that a position looks at
        self.rows = given.rows
        self.table = nn.Parameter(torch.empty(given.rows, given.row_width))
        self.project = nn.Parameter(torch.empty(manifest.model.width, self.reach * given.row_width))
        if self.table.is_meta:
            return
        names = [f"{manifest.seed}/{block}/grams/{index}" for index in range(2 * given.longest)]
        drawn = torch.tensor([_constant(name) for name in names])
        self.register_buffer("factors", drawn[: given.longest].flip(0).contiguous(), persistent=False)  # oldest token first
        self.register_buffer("salts", drawn[given.longest : -1], persistent=False)  # of each length
        self.register_buffer("mix", drawn[-1], persistent=False)

    factors: Tensor
    salts: Tensor
    mix: Tensor

    def said(self, tokens_RN: Tensor) -> Tensor:
        """Tokens as `rows_of` takes them, for a text that begins here: [R, reach + N], 0 where nothing was and a token's id + 1 else."""
        return F.pad(tokens_RN + 1, (self.reach, 0))

    def rows_of(self, said_RS: Tensor) -> Tensor:
        """The table's row for each length at each position, [R, N, O], int64: 0 … rows - 1."""
        windows_RNn = said_RS.unfold(1, self.reach + 1, 1)
        sums_RNO = (windows_RNn * self.factors).flip(2).cumsum(2)[:, :, 1:]
        hashed = (sums_RNO + self.salts) % _PRIME
        return ((hashed ^ (hashed >> _FOLD)) * self.mix) % _PRIME % self.rows

    def forward(self, rows_MO: Tensor) -> Tensor:
        """What the rows say, [M, D]."""
        return F.linear(F.embedding(rows_MO, self.table).flatten(1), self.project)


def _constant(name: str) -> int:
    """A whole number from 1 to the prime less one."""
    drawn = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    return 1 + drawn % (_PRIME - 1)
