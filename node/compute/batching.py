"""Steps of several sessions in one pass of a block: what concurrent texts share is the matrices, what each keeps is its own cache.

A pass over one position costs mostly overhead, not arithmetic, so eight sessions that draft together cost little more than one. Rows are at
different positions of their texts: rotary angles and attention are each row's own, everything else is done once for all.

Shapes: R rows (sessions), N positions of this pass, equal for all, D width, V vocabulary, H heads, K width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from blocktrain.node.compute.model import Block, Cache, Layer, _norm, _rotate


def forward_each(block: Block, tokens_RN: Tensor, caches: Sequence[Cache], want: int) -> Tensor:
    """Logits at the last `want` positions of each row, [R, want, V]; row r continues and extends `caches[r]`.

    The same as a pass for each row, up to the rounding of float32. For blocks that read clean tokens only.
    """
    rows, positions = tokens_RN.shape
    begins = [cache.length for cache in caches]
    if max(begins) + positions > block.context:
        raise ValueError(f"{max(begins) + positions} positions do not fit a context of {block.context}")
    place_RN = torch.tensor(begins, device=tokens_RN.device)[:, None] + torch.arange(positions, device=tokens_RN.device)
    cos_R1NK, sin_R1NK = block.rope_cos[place_RN][:, None], block.rope_sin[place_RN][:, None]
    masks = [
        torch.ones(positions, begin + positions, dtype=torch.bool, device=tokens_RN.device).tril(begin) if begin and positions > 1 else None
        for begin in begins
    ]
    said_RS = None
    if block.grams is not None:
        said_RS = torch.cat([cache.said(tokens_RN[row : row + 1]) for row, cache in enumerate(caches)])
    h_RND = block.embed(tokens_RN, None, said_RS)
    for number, module in enumerate(block.layers):
        layer = cast(Layer, module)
        qkv = F.linear(_norm(h_RND, layer.norm_in), layer.qkv)
        qkv = qkv.view(rows, positions, 3, layer.heads, block.width // layer.heads).permute(2, 0, 3, 1, 4)
        q_RHNK, k_RHNK, v_RHNK = _rotate(qkv[0], cos_R1NK, sin_R1NK), _rotate(qkv[1], cos_R1NK, sin_R1NK), qkv[2]
        mixed = []
        for row, (cache, begin, mask) in enumerate(zip(caches, begins, masks, strict=True)):
            keys, values = (part[:, :, : begin + positions] for part in cache.layers[number])
            keys[:, :, begin:] = k_RHNK[row]
            values[:, :, begin:] = v_RHNK[row]
            causal = mask is None and positions > 1
            mixed.append(F.scaled_dot_product_attention(q_RHNK[row : row + 1], keys, values, attn_mask=mask, is_causal=causal))
        mixed_RND = torch.cat(mixed).transpose(1, 2).reshape(rows, positions, block.width)
        h_RND = h_RND + F.linear(mixed_RND, layer.out)
        x = F.gelu(F.linear(_norm(h_RND, layer.norm_mid), layer.up), approximate="tanh")
        h_RND = h_RND + F.linear(x, layer.down)
    for cache in caches:
        cache.length += positions
    return block._logits(h_RND, None, want)
