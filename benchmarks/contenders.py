"""Who is measured: one class per implementation, all on the same (B, N, S, D) tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from cases import Case
from torch import Tensor

import fag_torch


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case, (B, N, S, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> Inputs:
        """Draws standard normal tensors."""
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int) -> Tensor:
            return torch.randn(case.b, heads, case.s, case.d, generator=generator).to(
                getattr(torch, case.dtype)
            )

        return cls(draw(case.n1), draw(case.n2), draw(case.n2), draw(case.n1))


class Contender(Protocol):
    """An implementation of attention and its gradient."""

    name: str

    def forward(self, case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
        """Returns the output and the log-sum-exp that `backward` takes."""

    def backward(self, case: Case, x: Inputs, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq, dk, dv."""


class Fag:
    """fag_torch's operators, validation and all; the metadata of a problem is cached after its first call."""

    name = "fag"

    def _arguments(self, case: Case) -> dict[str, Any]:
        return {
            "softmax_scale": 1 / math.sqrt(case.d),
            "mask_mode": fag_torch.MaskMode.CAUSAL if case.is_causal else fag_torch.MaskMode.NO_MASK,
            "layout_q": "BNSD",
            "layout_kv": "BNSD",
            "layout_out": "BNSD",
        }

    def forward(self, case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
        return fag_torch.flash_attn(x.q, x.k, x.v, return_softmax_lse=True, **self._arguments(case))

    def backward(self, case: Case, x: Inputs, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return fag_torch.flash_attn_grad(x.q, x.k, x.v, x.dout, out, lse, **self._arguments(case))


class TorchFlash:
    """PyTorch's CPU flash attention: the kernels behind scaled_dot_product_attention, called directly.

    They take grouped heads as they are.
    """

    name = "torch"

    def forward(self, case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return run(x.q, x.k, x.v, 0.0, case.is_causal)

    def backward(self, case: Case, x: Inputs, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return run(x.dout, x.q, x.k, x.v, out, lse, 0.0, case.is_causal)


CONTENDERS: tuple[Contender, ...] = (Fag(), TorchFlash())


class Gemm:
    """A square matrix product of PyTorch: what this machine can do at most, measured in the same rounds."""

    size = 2048
    flops = 2 * size**3

    def __init__(self, dtype: str) -> None:
        # Without native half-precision instructions PyTorch's float16 product is far below the float32 one.
        self.dtype = "float32" if dtype == "float16" else dtype
        self._a, self._b = torch.randn(2, self.size, self.size).to(getattr(torch, self.dtype))

    def __call__(self) -> Tensor:
        """Runs it once."""
        return self._a @ self._b
