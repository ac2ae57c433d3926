"""Public case 22: compiled forward and backward, with lengths that change and are no multiple of a tile."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch

import fag_torch
from fag_torch import flash_attention

LENGTHS = (128, 196, 256, 257, 1, 1025)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations while it traces
        yield
    torch._dynamo.reset()


def rope(x, positions):
    half = x.shape[-1] // 2
    frequency = 1.0 / 1000 ** (torch.arange(half) / half)
    angle = (positions[:, None] * frequency)[:, None, :]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def step(q, k, v, weight, cu_seqlens, layout):
    positions = torch.arange(q.shape[-3])
    out, lse = flash_attention(
        rope(q, positions), rope(k, positions), v, layout=layout, mask_mode="causal",
        cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, return_lse=True,
    )  # fmt: skip
    return (out.flatten(-2) @ weight).mean() + lse.mean()


def run(function, length, layout, dtype):
    generator = torch.Generator().manual_seed(length)
    shape = (length,) if layout == "TND" else (2, length)
    q, k, v = (
        torch.randn((*shape, heads, 16), generator=generator).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    )
    weight = torch.randn(64, 8, generator=generator).to(dtype).requires_grad_()
    cu = torch.tensor([0, length // 3, length], dtype=torch.int32) if layout == "TND" else None
    loss = function(q, k, v, weight, cu, layout)
    loss.backward()
    return loss.detach(), q.grad, k.grad, v.grad, weight.grad


@pytest.mark.slow
@pytest.mark.parametrize("layout_name", ["TND", "BSND"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_pc22_lengths_that_change(layout_name, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor compiles C++ at run time and there is no g++ here")
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    # inductor calls a C++ compiler for each new kind of length: all of them once, the rest for the other
    # layout
    lengths = LENGTHS[::3] if backend == "inductor" and layout_name == "BSND" else LENGTHS
    for length in lengths:
        eager = run(step, length, layout_name, torch.bfloat16)
        got = run(compiled, length, layout_name, torch.bfloat16)
        for one, other in zip(got, eager, strict=True):
            if backend == "aot_eager":
                assert torch.equal(one, other)
            else:  # fuses the element-wise part around the operator, with fewer roundings
                error = (one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-12)
                assert error < 3e-2


def test_partly_frozen_inputs(make_call):
    """pc37: compiled with a frozen k."""
    call = make_call(mask_mode=3)
    compiled = torch.compile(
        lambda q, k, v: flash_attention(q, k, v, mask_mode=3).sum(), fullgraph=True, backend="aot_eager"
    )
    full = call.requiring_grad()
    flash_attention(*full.qkv, mask_mode=3).sum().backward()
    partly = call.requiring_grad()
    partly.k.requires_grad_(False)
    compiled(*partly.qkv).backward()
    assert partly.k.grad is None
    assert torch.equal(partly.q.grad, full.q.grad)
    assert torch.equal(partly.v.grad, full.v.grad)


def test_raw_operators_and_metadata_in_one_graph(make_call, layout):
    call = make_call(layout, (6, 6), mask_mode=3)
    cu = call.front.get("cu_seqlens_q")

    def whole(q, k, v):
        s = -1 if layout == "TND" else 6
        sizes = {"batch_size": 2, "max_seqlen_q": s, "max_seqlen_kv": s, "mask_mode": "causal"}
        layouts = {"layout_q": layout, "layout_kv": layout, "layout_out": layout}
        lists = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        words = fag_torch.flash_attn_metadata(4, 2, 16, is_grad_enabled=True, **sizes, **layouts, **lists)
        common = {"metadata": words, "softmax_scale": 0.25, "mask_mode": "causal", **layouts, **lists}
        out, lse = fag_torch.flash_attn(q, k, v, return_softmax_lse=True, **common)
        return fag_torch.flash_attn_grad(q, k, v, out, out, lse, **common)

    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*call.qkv), whole(*call.qkv), strict=True):
        assert torch.equal(got, want)


def test_symbolic_max_seqlen(make_call):
    def whole(q, k, v, cu):
        longest = q.shape[0]
        return flash_attention(
            q,
            k,
            v,
            layout="TND",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ((3, 4), (9, 11), (2, 2)):
        call = make_call("TND", lengths)
        cu = call.front["cu_seqlens_q"]
        assert torch.equal(compiled(*call.qkv, cu), whole(*call.qkv, cu))


def test_broken_rule_in_a_compiled_call_keeps_its_message(make_call):
    call = make_call()
    compiled = torch.compile(lambda q, k, v: flash_attention(q, k, v, win_left=3), backend="aot_eager")
    with pytest.raises(Exception, match="flash_attention: win_left must be -1 with mask_mode NO_MASK, got 3"):
        compiled(*call.qkv)


def test_autocast_in_a_compiled_call(make_call):
    call = make_call()

    def whole(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return flash_attention(q, k, v)

    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    eager, got = call.requiring_grad(), call.requiring_grad()
    out, same = whole(*eager.qkv), compiled(*got.qkv)
    assert same.dtype == torch.bfloat16
    assert torch.equal(out, same)
    out.sum().backward()
    same.sum().backward()
    assert torch.equal(eager.q.grad, got.q.grad)
