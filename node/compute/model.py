"""One block of the model: a small causal transformer of its own, which reads clean tokens and noisy targets (recipe §3).

Every parameter is private to the block. What all blocks share is a function of the manifest's seed and never travels: Y, the fixed
unit-norm target of each token. Both Y and the initial weights come from a counter-based generator and exact integer arithmetic, so
that every replica of a block starts from the same bytes on every machine.

Under the objective `diffusionblocks` (recipe §2) a block differs in four ways: z is read at every position, its scale is σ_data, the
head gives a feature of width D that is preconditioned as in EDM, and Y is the normalised embedding table, which learns and is shared.

Shapes: R rows (texts), N positions of this pass, M noisy positions, D width, V vocabulary, H heads, K width of a head, S positions
in the cache. All tensors are float32 unless said; under autocast the layers may run in bfloat16, logits never do.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from blocktrain.node.compute.grams import PROJECTION_GAIN, Grams
from blocktrain.protocol.manifest import Manifest

MAX_WINDOW: Final = 64  # positions of the longest noisy window; the first is clean, so offsets end at MAX_WINDOW - 1
SIGMA_DATA: Final = 0.5  # σ_d of EDM's preconditioning (arXiv 2206.00364, table 1); the papers do not say theirs
LITERAL: Final = "diffusionblocks"
FULL_EMBEDDING_LAYERS: Final = 6  # a block's embedding begins with deviation 1 from so many layers on, in proportion below (docs/recipe.md)
_FREQUENCIES: Final = 16
_TIME_WIDTH: Final = 64
_ROPE_BASE: Final = 10_000.0
_EPS: Final = 1e-6


@dataclass(frozen=True)
class Noisy:
    """The positions of a pass that carry a noisy target z = Y[target] + σε.

    Attributes:
        at_M: int64, where: row * N + position in this pass, each at most once.
        z_MD: the noisy targets.
        sigma_M: their σ.
        offset_M: int64, 0 where the position's own token is known; k where it is unknown and the last known one is k positions
            before, inside this pass, k < MAX_WINDOW. The token at an unknown position is never read; none that is known follows it.
    """

    at_M: Tensor
    z_MD: Tensor
    sigma_M: Tensor
    offset_M: Tensor

    @staticmethod
    def tail(z_RWD: Tensor, sigma: float, positions: int) -> Noisy:
        """The window at the end of a pass of `positions`: z for its last W positions, whose tokens are unknown."""
        rows, window, width = z_RWD.shape
        if not 0 < window < min(positions, MAX_WINDOW):
            raise ValueError(
                f"a window of {window} unknown positions in a pass of {positions}; at most {MAX_WINDOW - 1}, after a known one"
            )
        device = z_RWD.device
        place = torch.arange(positions - window, positions, device=device)
        at = (torch.arange(rows, device=device)[:, None] * positions + place).reshape(-1)
        offset = torch.arange(1, window + 1, device=device).repeat(rows)
        return Noisy(at, z_RWD.reshape(-1, width), torch.full((rows * window,), sigma, device=device), offset)


class Cache:
    """Keys, values and tokens of the positions that a text already has, preallocated for `capacity` positions.

    The next pass continues at position `length`. Cutting back is `truncate`: rejected drafts and noisy positions leave nothing behind.
    """

    def __init__(self, block: Block, rows: int = 1, capacity: int | None = None) -> None:
        self.capacity = min(capacity or block.context, block.context)
        shape = (rows, block.heads, self.capacity, block.width // block.heads)
        weight = block.embedding
        self.layers = [
            (torch.empty(shape, dtype=weight.dtype, device=weight.device), torch.empty(shape, dtype=weight.dtype, device=weight.device))
            for _ in range(len(block.layers))
        ]
        self.rows = rows
        self.length = 0
        self._reach = block.grams.reach if block.grams is not None else 0
        self._said = torch.zeros(rows, self._reach + self.capacity, dtype=torch.int64, device=weight.device)

    def said(self, tokens_RN: Tensor) -> Tensor:
        """Note the tokens of the pass that begins at `length`: they, and the few they follow, as `Grams.rows_of` takes them."""
        end = self.length + tokens_RN.shape[1] + self._reach
        self._said[:, self.length + self._reach : end] = tokens_RN + 1
        return self._said[:, self.length : end]

    @property
    def nbytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self.layers)

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot cut a cache of {self.length} positions back to {length}")
        self.length = length


class Layer(nn.Module):
    """Pre-RMSNorm, causal attention with RoPE, GELU(tanh) MLP of 4 D; no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_in = nn.Parameter(torch.empty(width))
        self.qkv = nn.Parameter(torch.empty(3 * width, width))
        self.out = nn.Parameter(torch.empty(width, width))
        self.norm_mid = nn.Parameter(torch.empty(width))
        self.up = nn.Parameter(torch.empty(4 * width, width))
        self.down = nn.Parameter(torch.empty(width, 4 * width))

    def forward(
        self,
        h_RND: Tensor,
        cos_NK: Tensor,
        sin_NK: Tensor,
        cached: tuple[Tensor, Tensor] | None = None,
        mask_NS: Tensor | None = None,
    ) -> Tensor:
        """`cached`: views of the cache up to the end of this pass, which writes its own keys and values at their end."""
        rows, positions, width = h_RND.shape
        x = _norm(h_RND, self.norm_in)
        qkv = F.linear(x, self.qkv).view(rows, positions, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q_RHNK, k_RHNK, v_RHNK = _rotate(qkv[0], cos_NK, sin_NK), _rotate(qkv[1], cos_NK, sin_NK), qkv[2]
        if cached is not None:
            keys, values = cached
            keys[:, :, -positions:] = k_RHNK
            values[:, :, -positions:] = v_RHNK
            k_RHNK, v_RHNK = keys, values
        causal = mask_NS is None and positions == k_RHNK.shape[2] and positions > 1
        mixed = F.scaled_dot_product_attention(q_RHNK, k_RHNK, v_RHNK, attn_mask=mask_NS, is_causal=causal)
        h_RND = h_RND + F.linear(mixed.transpose(1, 2).reshape(rows, positions, width), self.out)
        x = F.gelu(F.linear(_norm(h_RND, self.norm_mid), self.up), approximate="tanh")
        return h_RND + F.linear(x, self.down)


class Block(nn.Module):
    """Block `block` of a run, with the initial weights that the manifest's seed gives it.

    `initial=False` leaves the parameters unset, for a block that is about to be loaded. On the device "meta" it has shapes only.
    """

    def __init__(self, manifest: Manifest, block: int, *, initial: bool = True) -> None:
        super().__init__()
        model = manifest.model
        self.block = block
        self.width, self.heads, self.context, self.vocabulary = model.width, model.heads, model.context, model.vocabulary
        width = model.width
        self.recompute = manifest.optimizer.recompute
        self.literal = manifest.objective == LITERAL
        self.embedding = nn.Parameter(torch.empty(model.vocabulary, width))  # Ctx
        self.offset = nn.Parameter(torch.empty(MAX_WINDOW - 1, width))  # Off
        self.noise_in = nn.Parameter(torch.empty(width, width))  # W_z
        self.time_in = nn.Parameter(torch.empty(_TIME_WIDTH, 2 * _FREQUENCIES))
        self.time_in_bias = nn.Parameter(torch.empty(_TIME_WIDTH))
        self.time_out = nn.Parameter(torch.empty(width, _TIME_WIDTH))
        self.time_out_bias = nn.Parameter(torch.empty(width))
        self.grams = Grams(manifest, block) if manifest.grams.rows else None
        self.layers = nn.ModuleList([Layer(width, model.heads) for _ in range(model.layers)])
        self.norm_out = nn.Parameter(torch.empty(width))
        self.head = nn.Parameter(torch.empty(width if self.literal else model.vocabulary, width))
        self._trunk: Callable[[Tensor, Tensor, Tensor], Tensor] = self._layers
        if self.embedding.is_meta:
            return
        if initial:
            self._initialise(manifest.seed)
        self._constants(manifest)

    def _constants(self, manifest: Manifest) -> None:
        """What is a function of the manifest: never trained, sent or saved."""
        model, width = manifest.model, self.width
        if self.literal:
            start = normal(f"{manifest.seed}/noise", model.context * width).astype(np.float32)
            start *= np.float32(manifest.sigma_interval(self.block)[1])
            self.register_buffer("start", torch.from_numpy(start).view(model.context, width), persistent=False)
            self.start_sigma = manifest.sigma_interval(self.block)[1]
        else:
            targets = torch.from_numpy(unit_rows(f"{manifest.seed}/targets", model.vocabulary, width))
            self.register_buffer("fixed_targets", targets, persistent=False)
        half = width // model.heads // 2
        angle = torch.arange(model.context)[:, None] * _ROPE_BASE ** (-torch.arange(half) / half)
        self.register_buffer("rope_cos", angle.cos().repeat(1, 2), persistent=False)  # [context, K]
        self.register_buffer("rope_sin", torch.cat((-angle.sin(), angle.sin()), dim=1), persistent=False)
        self.register_buffer("frequencies", torch.logspace(0, math.log10(30.0), _FREQUENCIES), persistent=False)

    fixed_targets: Tensor
    start: Tensor  # pure noise [context, D] at the σ where a block of `diffusionblocks` begins
    rope_cos: Tensor
    rope_sin: Tensor
    frequencies: Tensor

    @property
    def targets(self) -> Tensor:
        """Y, the unit-norm target of each token, [V, D]."""
        return F.normalize(self.embedding, dim=1) if self.literal else self.fixed_targets

    def forward(self, tokens_RN: Tensor, noisy: Noisy | None = None, cache: Cache | None = None, want: int | None = None) -> Tensor:
        """Logits of the next token at the last `want` positions (all by default): [R, want, V], float32.

        Args:
            tokens_RN: int64, N ≥ 1; they continue at position `cache.length`, or begin at 0 without a cache. N + that ≤ context.
            noisy: the positions that carry z; their logits get the exact Bayes evidence of z. Under `diffusionblocks` every position
                reads z, and where none is given it is pure noise, the same at each call.
            cache: is extended by this pass. The caller truncates what must not stay, noisy positions above all.
        """
        positions = tokens_RN.shape[1]
        begin = cache.length if cache is not None else 0
        end = begin + positions
        if end > (cache.capacity if cache is not None else self.context):
            raise ValueError(f"{end} positions do not fit a context of {self.context}")
        if self.literal:
            noisy = self._everywhere(noisy, tokens_RN.shape[0], begin, end)
        h_RND = self.embed(tokens_RN, noisy, cache.said(tokens_RN) if cache is not None and self.grams is not None else None)
        cos, sin = self.rope_cos[begin:end], self.rope_sin[begin:end]
        if cache is None:
            h_RND = self._trunk(h_RND, cos, sin)
        else:
            mask = None
            if begin and positions > 1:
                mask = torch.ones(positions, end, dtype=torch.bool, device=h_RND.device).tril(begin)
            for layer, (keys, values) in zip(self.layers, cache.layers, strict=True):
                h_RND = layer(h_RND, cos, sin, (keys[:, :, :end], values[:, :, :end]), mask)
            cache.length = end
        return self._logits(h_RND, noisy, positions if want is None else want)

    def embed(self, tokens_RN: Tensor, noisy: Noisy | None, said_RS: Tensor | None = None) -> Tensor:
        """What the first layer reads, [R, N, D]: the token and its n-grams, or the last known ones instead of them, and z.

        `said_RS`: where texts do not begin here, the tokens with those that they follow (`Cache.said`), for n-grams.
        """
        rows, positions = tokens_RN.shape
        known_M = None
        if noisy is not None:
            known_M = torch.arange(rows * positions, device=tokens_RN.device).index_copy(0, noisy.at_M, noisy.at_M - noisy.offset_M)
        read = tokens_RN.reshape(-1)
        h = F.embedding(read if known_M is None else read[known_M], self.embedding)
        if self.grams is not None:
            rows_MO = self.grams.rows_of(self.grams.said(tokens_RN) if said_RS is None else said_RS).flatten(0, 1)
            h = h + self.grams(rows_MO if known_M is None else rows_MO[known_M])
        if noisy is not None:
            h = h.index_add(0, noisy.at_M, self._noise(noisy))
        return h.view(rows, positions, self.width)

    def _noise(self, noisy: Noisy) -> Tensor:
        """What z and its σ, and the distance of an unknown position, add: [M, D]."""
        angle = (noisy.sigma_M[:, None].log() / 4) * self.frequencies
        time = F.silu(F.linear(torch.cat((angle.cos(), angle.sin()), dim=1), self.time_in, self.time_in_bias))
        added = F.linear(time, self.time_out, self.time_out_bias)
        data_variance = SIGMA_DATA**2 if self.literal else 1 / self.width
        added = added + F.linear(noisy.z_MD * (noisy.sigma_M[:, None].square() + data_variance).rsqrt(), self.noise_in)
        unknown = (noisy.offset_M > 0)[:, None]
        return added + unknown * F.embedding((noisy.offset_M - 1).clamp(min=0), self.offset)

    def use_compile(self) -> None:
        """Use torch.compile for passes without a cache. Takes tens of seconds at the first pass, then saves a third."""
        self._trunk = torch.compile(self._layers)

    def _layers(self, h_RND: Tensor, cos_NK: Tensor, sin_NK: Tensor) -> Tensor:
        for layer in self.layers:
            if self.recompute and h_RND.requires_grad:
                h_RND = checkpoint(layer, h_RND, cos_NK, sin_NK, use_reentrant=False)
            else:
                h_RND = layer(h_RND, cos_NK, sin_NK)
        return h_RND

    def _logits(self, h_RND: Tensor, noisy: Noisy | None, want: int) -> Tensor:
        rows, positions, _ = h_RND.shape
        skipped = positions - want
        with torch.autocast(h_RND.device.type, enabled=False):
            logits = F.linear(_norm(h_RND[:, skipped:].float(), self.norm_out), self.head)
            if self.literal:
                assert noisy is not None
                return self._denoised(logits, noisy, rows, positions)
            if noisy is None:
                return logits
            evidence_MV = F.linear(noisy.z_MD, self.targets) / noisy.sigma_M.square()[:, None]
        row, place = noisy.at_M // positions, noisy.at_M % positions
        if skipped:
            kept = place >= skipped
            row, place, evidence_MV = row[kept], place[kept], evidence_MV[kept]
        flat = logits.reshape(rows * want, self.vocabulary)
        return flat.index_add(0, row * want + place - skipped, evidence_MV).view(rows, want, self.vocabulary)

    def _everywhere(self, noisy: Noisy | None, rows: int, begin: int, end: int) -> Noisy:
        """z at every position: as given, and pure noise at this block's largest σ elsewhere."""
        count = rows * (end - begin)
        if noisy is not None and len(noisy.at_M) == count:
            return noisy
        z = self.start[begin:end].repeat(rows, 1)
        sigma = torch.full((count,), self.start_sigma, device=z.device)
        offset = torch.zeros(count, dtype=torch.int64, device=z.device)
        if noisy is not None:
            z = z.index_copy(0, noisy.at_M, noisy.z_MD)
            sigma = sigma.index_copy(0, noisy.at_M, noisy.sigma_M)
            offset = offset.index_copy(0, noisy.at_M, noisy.offset_M)
        return Noisy(torch.arange(count, device=z.device), z, sigma, offset)

    def _denoised(self, feature_RWD: Tensor, noisy: Noisy, rows: int, positions: int) -> Tensor:
        """Logits (c_out F + c_skip z) Ȳᵀ, [R, W, V] (recipe §2, EDM table 1). `noisy` is at every position, in order."""
        want, width = feature_RWD.shape[1:]
        z = noisy.z_MD.view(rows, positions, width)[:, positions - want :]
        sigma = noisy.sigma_M.view(rows, positions, 1)[:, positions - want :]
        total = sigma.square() + SIGMA_DATA**2
        estimate = feature_RWD * (sigma * SIGMA_DATA * total.rsqrt()) + z * (SIGMA_DATA**2 / total)
        return F.linear(estimate, self.targets)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Matrices: variance 1/inputs, residual outputs 1/√(2 L) smaller; norms 1; what reads noise, and n-grams, starts silent."""
        residual = 1 / math.sqrt(2 * len(self.layers))
        embedding = min(1.0, len(self.layers) / FULL_EMBEDDING_LAYERS)
        for name, parameter in self.named_parameters():
            last = name.rsplit(".", 1)[-1]
            if last.startswith("norm"):
                parameter.fill_(1)
            elif last in ("noise_in", "offset", "time_in_bias", "time_out", "time_out_bias", "table"):
                parameter.zero_()
            else:
                scale = embedding if last == "embedding" else 1 / math.sqrt(parameter.shape[1])
                if last in ("out", "down"):
                    scale *= residual
                if last == "project" and self.grams is not None:
                    scale = PROJECTION_GAIN * embedding / math.sqrt(self.grams.table.shape[1])
                owner = "shared" if self.literal and last == "embedding" else self.block
                values = normal(f"{seed}/{owner}/{name}", parameter.numel())
                parameter.copy_(torch.from_numpy((values * scale).astype(np.float32)).view_as(parameter))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, _EPS)


def _rotate(x_RHNK: Tensor, cos_NK: Tensor, sin_NK: Tensor) -> Tensor:
    """RoPE on halves. `sin_NK` carries the sign of the first half."""
    half = x_RHNK.shape[-1] // 2
    swapped = torch.cat((x_RHNK[..., half:], x_RHNK[..., :half]), dim=-1)
    return x_RHNK * cos_NK + swapped * sin_NK


def _lattice(stream: str, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """`count` whole numbers, nearly normal (sums of four 16-bit ones, centred): the same on every machine and in every version."""
    key = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=16).digest(), "little")
    raw = np.random.Philox(key=key).random_raw(count).astype("<u8", copy=False)
    lanes = raw.view("<u2").reshape(count, 4).astype(np.int64)
    centred: np.ndarray[tuple[int], np.dtype[np.int64]] = lanes.sum(axis=1) * 2 - 4 * 65535  # doubled, so that the centre is whole
    return centred


def normal(stream: str, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """`count` values of mean 0 and variance 1, nearly normal, exact to the last bit on every machine. `stream` names the sequence."""
    deviation = 2 * math.sqrt(4 * (65536.0**2 - 1) / 12)
    return _lattice(stream, count) / deviation


def unit_rows(stream: str, rows: int, width: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Random directions, [rows, width] float32, each of norm 1; exact on every machine."""
    whole = _lattice(stream, rows * width).reshape(rows, width)
    norms = np.sqrt((whole * whole).sum(axis=1).astype(np.float64))
    unit: np.ndarray[tuple[int, int], np.dtype[np.float32]] = (whole / norms[:, None]).astype(np.float32)
    return unit
