"""The same layers in nothing but torch: what a block's step is timed against. It shares no code with node/compute/model.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blocktrain.protocol.manifest import Manifest


class PlainLayer(nn.Module):
    """Pre-RMSNorm, causal attention with RoPE, GELU(tanh) MLP; no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_mid = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, positions, width = h.shape
        q, k, v = self.qkv(self.norm_in(h)).view(rows, positions, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(_turn(q, cos, sin), _turn(k, cos, sin), v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).reshape(rows, positions, width))
        turned: Tensor = h + self.down(F.gelu(self.up(self.norm_mid(h)), approximate="tanh"))
        return turned


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class PlainModel(nn.Module):
    """Embedding, layers, norm, head: tokens [R, N] → logits [R, N, V]."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([PlainLayer(width, heads) for _ in range(layers)])
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocabulary, bias=False)
        half = width // heads // 2
        angle = torch.arange(context)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos().repeat(1, 2))
        self.register_buffer("sin", angle.sin().repeat(1, 2))
        for layer in self.layers:
            nn.init.normal_(layer.get_parameter("out.weight"), std=1 / math.sqrt(2 * layers * width))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(h))
        return logits


class PlainLoop:
    """The usual training loop: batches at random places of a text in memory, AdamW, clipping."""

    def __init__(self, manifest: Manifest, text: Tensor, seed: int = 0) -> None:
        model = manifest.model
        self.text, self.batch, self.context = text, manifest.optimizer.batch, model.context
        self.clip = manifest.optimizer.clip
        self.model = PlainModel(model.vocabulary, model.width, model.layers, model.heads, model.context)
        settings = manifest.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=manifest.schedule.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.generator = torch.Generator().manual_seed(seed)

    def step(self) -> float:
        """One batch, one update; the loss."""
        begins = torch.randint(0, len(self.text) - self.context - 1, (self.batch,), generator=self.generator)
        rows = torch.stack([self.text[begin : begin + self.context + 1] for begin in begins.tolist()]).long()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return float(loss.detach())
