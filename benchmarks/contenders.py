"""Who is measured on one rectangle of sequences: we, and PyTorch's kernels. Ragged batches: ragged.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor

import fag_torch

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case: (B, N, S, D), or (T, N, D) of a packed batch."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> Inputs:
        """Draws standard normal tensors."""
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int, width: int) -> Tensor:
            shape = (case.tokens, heads, width) if case.lengths else (case.b, heads, case.s, width)
            return torch.randn(shape, generator=generator).to(getattr(torch, case.dtype))

        return cls(
            draw(case.n1, case.d), draw(case.n2, case.d), draw(case.n2, case.dv), draw(case.n1, case.dv)
        )


def _unchanged(result: Tensor) -> Tensor:
    return result


@dataclass(frozen=True)
class Jobs:
    """What one contender does for one case; all that can be prepared has been.

    Attributes:
        forward: Gives the output.
        backward: Gives dq, dk, dv.
        shown: Brings a result to the shape that ours has; not part of what is timed.
    """

    forward: Callable[[], Tensor]
    backward: Callable[[], Gradients]
    shown: Callable[[Tensor], Tensor] = _unchanged


class Contender(Protocol):
    """An implementation of attention and its gradient."""

    name: str

    def why_not(self, case: Case) -> str:
        """Returns why it does not take part in a case; empty if it does."""

    def jobs(self, case: Case, x: Inputs) -> Jobs:
        """Prepares a case."""


class Fag:
    """fag_torch's operators, validation and all; the metadata of a problem is cached after its first call."""

    name = "fag"

    def why_not(self, case: Case) -> str:
        return ""

    def jobs(self, case: Case, x: Inputs) -> Jobs:
        arguments = fag_arguments(case)
        out, lse = fag_torch.flash_attn(x.q, x.k, x.v, return_softmax_lse=True, **arguments)
        return Jobs(
            lambda: fag_torch.flash_attn(x.q, x.k, x.v, return_softmax_lse=True, **arguments)[0],
            lambda: fag_torch.flash_attn_grad(x.q, x.k, x.v, x.dout, out, lse, **arguments),
        )


def fag_arguments(case: Case) -> dict[str, Any]:
    """The arguments of fag_torch's operators for a case, apart from its tensors."""
    layout = "TND" if case.lengths else "BNSD"
    arguments: dict[str, Any] = {
        "softmax_scale": 1 / math.sqrt(case.d),
        "mask_mode": fag_torch.MaskMode.CAUSAL if case.is_causal else fag_torch.MaskMode.NO_MASK,
        "layout_q": layout,
        "layout_kv": layout,
        "layout_out": layout,
    }
    if case.window is not None:
        arguments |= {
            "mask_mode": fag_torch.MaskMode.SLIDING_WINDOW,
            "win_left": case.window,
            "win_right": 0,
        }
    if case.lengths:
        starts = torch.tensor([0, *case.lengths]).cumsum(0).to(torch.int32)
        arguments |= {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    return arguments


class TorchFlash:
    """PyTorch's CPU flash attention: the kernels behind scaled_dot_product_attention, called directly.

    They take grouped heads as they are. What they have no argument for is prepared outside what is timed: a
    window is a mask of the full square, narrow values are padded with zeros.
    """

    name = "flash"

    def why_not(self, case: Case) -> str:
        return "rectangular batches only" if case.lengths else ""

    def jobs(self, case: Case, x: Inputs) -> Jobs:
        padding = case.d - case.dv
        if padding:
            x = Inputs(x.q, x.k, F.pad(x.v, (0, padding)), F.pad(x.dout, (0, padding)))
        mask = None if case.window is None else window_mask(case, x.q.dtype)
        run = flash_jobs(x, is_causal=case.is_causal and mask is None, mask=mask)
        if not padding:
            return run

        def backward() -> Gradients:
            dq, dk, dv = run.backward()
            return dq, dk, dv[..., : case.dv]

        return Jobs(lambda: run.forward()[..., : case.dv], backward)


def flash_jobs(x: Inputs, *, is_causal: bool, mask: Tensor | None = None) -> Jobs:
    """PyTorch's CPU flash attention on (B, N, S, D) tensors; the mask is added to the scores."""
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    run_back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, lse = run(x.q, x.k, x.v, 0.0, is_causal, attn_mask=mask)
    return Jobs(
        lambda: run(x.q, x.k, x.v, 0.0, is_causal, attn_mask=mask)[0],
        lambda: run_back(x.dout, x.q, x.k, x.v, out, lse, 0.0, is_causal, attn_mask=mask),
    )


def window_mask(case: Case, dtype: torch.dtype) -> Tensor:
    """What a window adds to the scores: 0 or -inf, (1, 1, S, S)."""
    assert case.window is not None
    place = torch.arange(case.s)
    distance = place[:, None] - place[None, :]
    is_hidden = (distance < 0) | (distance > case.window)
    return torch.zeros(case.s, case.s, dtype=dtype).masked_fill_(is_hidden, -math.inf)[None, None]


class TorchMath:
    """PyTorch's unfused attention, which stores the scores, and autograd's backward of it."""

    name = "math"
    most_score_bytes = 128 << 20

    def why_not(self, case: Case) -> str:
        if case.lengths or case.window is not None:
            return "rectangular batches without a window only"
        if 4 * case.b * case.n1 * case.s**2 > self.most_score_bytes:
            return "scores of more than 128 MiB"
        return ""

    def jobs(self, case: Case, x: Inputs) -> Jobs:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            attention = torch.ops.aten._scaled_dot_product_attention_math
            return attention(q, k, v, is_causal=case.is_causal, enable_gqa=case.n1 != case.n2)[0]

        leaves = tuple(tensor.detach().requires_grad_() for tensor in (x.q, x.k, x.v))
        out = run(*leaves)
        return Jobs(
            lambda: run(x.q, x.k, x.v),
            lambda: torch.autograd.grad(out, leaves, x.dout, retain_graph=True),
        )
