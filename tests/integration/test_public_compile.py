"""Public case 22 and the compiled part of 37: torch.compile with odd and changing lengths."""

from __future__ import annotations

from collections.abc import Iterator

import harness
import oracle
import pytest
import torch
from oracle import CAUSAL
from torch import Tensor

import fag_torch

LENGTHS = (128, 196, 256, 257, 1, 1025)
N1, N2, D = 4, 2, 32


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model(layout: str) -> object:
    """Something rope-like, attention, a linear layer, a mean."""
    weight = torch.randn(N1 * D, 16, dtype=torch.bfloat16) * 0.1

    def forward(q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None) -> Tensor:
        q, k = (x * 0.9 + x.flip(-1) * 0.1 for x in (q, k))
        packed = {} if cu is None else {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        out = fag_torch.flash_attention(q, k, v, layout=layout, mask_mode=CAUSAL, **packed)
        out = out.transpose(1, 2) if layout == "BNSD" else out
        return (out.flatten(-2) @ weight).float().pow(2).mean()

    return forward


def leaves_for(layout: str, s: int) -> tuple[list[Tensor], Tensor | None]:
    if layout == "TND":
        call = harness.packed((s // 3, s - s // 3))
        cu = harness.int32(call.cu_seqlens_q)
    else:
        call, cu = harness.uniform(layout, 2, s, s), None
    inputs = harness.random_inputs(call, 2, s, s, N1, N2, D)
    return [x.clone().requires_grad_() for x in inputs[:3]], cu


def gradients(function: object, layout: str, s: int) -> list[Tensor]:
    leaves, cu = leaves_for(layout, s)
    loss = function(*leaves, cu)
    loss.backward()
    return [loss.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_pc22_aot_eager_gives_the_bits_of_eager(layout: str, dynamic: bool | None) -> None:
    function = model(layout)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for s in LENGTHS:
        wanted = gradients(function, layout, s)
        assert s == 1 or torch.count_nonzero(wanted[1]) > 0
        harness.assert_same_bits(gradients(compiled, layout, s), wanted, f"S={s}:")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_pc22_inductor_agrees_with_eager(layout: str) -> None:
    function = model(layout)
    compiled = torch.compile(function, fullgraph=True)
    for s in LENGTHS:
        wanted = gradients(function, layout, s)
        got = gradients(compiled, layout, s)
        for a, b in zip(got, wanted, strict=True):
            assert torch.isfinite(a).all()
            # The elementwise parts around the operator are fused and round less often than in eager mode.
            assert s == 1 or oracle.relative_error(harness.to_float64(a), harness.to_float64(b)) < 1e-2


@pytest.mark.parametrize("needs", ["q", "kv", "v"])
def test_pc37_compiled_with_frozen_inputs(layout: str, needs: str) -> None:
    function = model(layout)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for f in (function, compiled):
        leaves, cu = leaves_for(layout, 65)
        for letter, x in zip("qkv", leaves, strict=True):
            x.requires_grad_(letter in needs)
        f(*leaves, cu).backward()
        results.append([x.grad for x in leaves])
    assert [x is None for x in results[0]] == [letter not in needs for letter in "qkv"]
    harness.assert_same_bits(results[1], results[0])


def test_raw_operators_compile_in_one_graph(layout: str) -> None:
    call = harness.uniform(layout, 2, 33, 49, mask_mode=CAUSAL)
    inputs = harness.random_inputs(call, 2, 33, 49, 4, 2, 16)
    arguments = harness.op_arguments(call, 16)

    def step(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        out, lse = harness.OPS.flash_attn(q, k, v, return_softmax_lse=True, **arguments)
        return (out, lse, *harness.OPS.flash_attn_grad(q, k, v, dout, out, lse, **arguments))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    harness.assert_same_bits(compiled(*inputs[:4]), step(*inputs[:4]))
