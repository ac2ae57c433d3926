"""A small byte-level GPT; its attention is given from outside, so that two of them can run the same weights.

Pre-norm blocks, rotary positions that start anew in every document, grouped-query attention, and one
learned sink per query head: a logit that takes probability and has no value. Odd blocks look at all earlier
bytes of the document, even ones at the last `window` only. Everything outside attention works on packed
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fag_torch import MaskMode, flash_attention
from fag_torch.demo.data import VOCABULARY, Batch


@dataclass(frozen=True)
class Config:
    """Sizes of the model; n1 query heads share n2 key-value heads, each head is d wide."""

    layers: int = 4
    n1: int = 4
    n2: int = 2
    d: int = 64
    window: int = 128

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.n1 * self.d


# q (T, n1, d), k and v (T, n2, d), sinks (n1,), the window (None: unbounded), the batch -> (T, n1, d)
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, "int | None", Batch], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None, batch: Batch) -> Tensor:
    """Attention by fag_torch: packed documents as they are."""
    return flash_attention(
        q,
        k,
        v,
        layout="TND",
        mask_mode=MaskMode.CAUSAL if window is None else MaskMode.SLIDING_WINDOW,
        win_left=-1 if window is None else window - 1,
        win_right=-1 if window is None else 0,
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        sinks=sinks,
    )


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None, batch: Batch) -> Tensor:
    """The same function by PyTorch's scaled_dot_product_attention, as fast as we could make it.

    SDPA knows neither packed documents nor sinks. So documents are padded to the longest, and a token 0 is
    put before each: its key meets every query with the logit `sink` (through eight more elements of the
    head, where queries hold one and only this key is not zero) and its value is zero. That keeps the causal
    mask square, so causal blocks run without a mask tensor; padding stands at the end, where causal rows of
    real tokens cannot see it.
    """
    b, s = len(batch.lengths), max(batch.lengths) + 1
    (_, n1, d), n2 = q.shape, k.shape[1]
    scale = 1 / math.sqrt(d)
    rows, columns = batch.rows, batch.positions + 1

    def pad(x: Tensor, extra: Tensor | None) -> Tensor:
        wide = F.pad(x, (0, 8)) if extra is None else torch.cat([x, extra.expand(*x.shape[:2], 8)], dim=-1)
        return wide.new_zeros(b, s, x.shape[1], d + 8).index_put((rows, columns), wide).transpose(1, 2)

    one = F.one_hot(torch.tensor(0), 8).to(q.dtype)
    padded_q = pad(q, one)
    padded_k = pad(k, None).repeat_interleave(n1 // n2, dim=1)
    padded_v = pad(v, None).repeat_interleave(n1 // n2, dim=1)
    sink_key = F.pad((sinks / scale).to(k.dtype)[:, None], (d, 7))
    padded_k = torch.cat([sink_key[None, :, None].expand(b, -1, -1, -1), padded_k[:, :, 1:]], dim=2)
    if window is None:
        out = F.scaled_dot_product_attention(padded_q, padded_k, padded_v, is_causal=True, scale=scale)
    else:
        i, j = torch.arange(s)[:, None], torch.arange(s)[None]
        seen = (j <= i) & ((j > i - window) | (j == 0))
        out = F.scaled_dot_product_attention(padded_q, padded_k, padded_v, attn_mask=seen, scale=scale)
    return out.transpose(1, 2)[rows, columns][..., :d]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Block(nn.Module):
    """Attention and feed-forward layer, each added to the residual stream."""

    def __init__(self, config: Config, window: int | None) -> None:
        super().__init__()
        width = config.width
        self.config, self.window = config, window
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (config.n1 + 2 * config.n2) * config.d, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.shrink = nn.Linear(4 * width, width, bias=False)
        self.sinks = nn.Parameter(torch.zeros(config.n1))

    def forward(self, x: Tensor, batch: Batch, rotary: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        """One block on packed tokens, (T, width) to (T, width)."""
        config = self.config
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, config.d))
        q, k, v = qkv.split([config.n1, config.n2, config.n2], dim=1)
        q, k = _rotate(q, *rotary).bfloat16(), _rotate(k, *rotary).bfloat16()
        x = x + self.project(
            attention(q, k, v.bfloat16(), self.sinks, self.window, batch).flatten(1).to(x.dtype)
        )
        deep: Tensor = self.shrink(F.gelu(self.expand(self.norm2(x)), approximate="tanh"))
        return x + deep


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCABULARY, config.width)
        windows = [config.window if i % 2 == 0 else None for i in range(config.layers)]
        self.blocks = nn.ModuleList(Block(config, window) for window in windows)
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                deep = name.endswith(("project.weight", "shrink.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * config.layers) if deep else 1))

    def forward(self, batch: Batch, attention: Attention = attend) -> Tensor:
        """Mean cross entropy of the batch, in nats per byte."""
        half = self.config.d // 2
        frequencies = 10_000.0 ** (-torch.arange(half) / half)
        angles = (batch.positions[:, None] * frequencies)[:, None]
        rotary = angles.cos(), angles.sin()
        x = self.embed(batch.tokens)
        for block in self.blocks:
            x = block(x, batch, rotary, attention)
        return F.cross_entropy(self.head(self.norm(x)).float(), batch.targets)
