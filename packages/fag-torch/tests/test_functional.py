"""The Python functions: arguments they add to the schemas, the names of flash-attn, and what comes out."""

from __future__ import annotations

import math

import pytest
import torch

import fag_metadata
import fag_torch
from fag_torch import (
    MaskMode,
    flash_attention,
    flash_attn,
    flash_attn_func,
    flash_attn_grad,
    flash_attn_metadata,
    flash_attn_varlen_func,
)

METADATA = {"batch_size": 2, "max_seqlen_q": 5, "max_seqlen_kv": 5}


def test_mask_mode_is_one_class():
    assert MaskMode is fag_metadata.MaskMode


@pytest.mark.parametrize("mode", [MaskMode.CAUSAL, 3, "causal", "CAUSAL", "Causal"])
def test_mask_mode_by_enum_int_or_name(make_call, mode):
    call = make_call(mask_mode=3)
    expected = flash_attention(*call.qkv, **call.front)
    assert torch.equal(flash_attention(*call.qkv, mask_mode=mode), expected)
    raw = flash_attn(*call.qkv, mask_mode=mode, softmax_scale=0.0)[0]
    assert torch.equal(raw, expected)
    words = flash_attn_metadata(4, 2, 16, mask_mode=mode, **METADATA)
    assert torch.equal(words, flash_attn_metadata(4, 2, 16, mask_mode=3, **METADATA))


def test_results_match_the_float64_reference(call, reference):
    out, lse = flash_attention(*call.qkv, **call.front, return_lse=True)
    expected, expected_lse = reference(call)
    assert out.dtype == call.q.dtype
    assert lse.dtype == torch.float32
    tolerance = 2e-2 if call.q.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_flash_attention_is_the_raw_pair(call):
    """Front and raw operators give the same bits when they are given the same scale."""
    leaf = call.requiring_grad()
    out, lse = flash_attention(*leaf.qkv, **leaf.front, return_lse=True)
    raw_out, raw_lse = flash_attn(*call.qkv, **call.raw, softmax_scale=0.0, return_softmax_lse=True)
    assert torch.equal(out, raw_out)
    assert torch.equal(lse, raw_lse)
    dout = torch.randn(out.shape).to(out.dtype)
    out.backward(dout)
    grads = flash_attn_grad(*call.qkv, dout, raw_out, raw_lse, **call.raw)
    for leaf_tensor, grad in zip(leaf.qkv, grads, strict=True):
        assert torch.equal(leaf_tensor.grad, grad)


def test_pc42_default_scales_and_zero():
    """softmax_scale: CANN's defaults 1.0 and 0.0; 0.0 and None are 1/sqrt(D)."""
    q = torch.zeros(1, 1, 1, 64)
    q[..., 0] = 8
    k = torch.zeros(1, 2, 1, 64)
    k[0, 0, 0, 0] = 1
    v = torch.randn(1, 2, 1, 64)
    share = math.exp(8) / (1 + math.exp(8))
    torch.testing.assert_close(flash_attn(q, k, v)[0][0, 0, 0], share * v[0, 0, 0] + (1 - share) * v[0, 1, 0])
    share = math.exp(1) / (1 + math.exp(1))
    expected = share * v[0, 0, 0] + (1 - share) * v[0, 1, 0]
    for out in (flash_attention(q, k, v), flash_attention(q, k, v, softmax_scale=0.0),
                flash_attn(q, k, v, softmax_scale=0.0)[0]):  # fmt: skip
        torch.testing.assert_close(out[0, 0, 0], expected)
    out, lse = flash_attn(q, k, v, softmax_scale=0.125, return_softmax_lse=True)
    dv = flash_attn_grad(q, k, v, torch.ones_like(out), out, lse)[2]
    torch.testing.assert_close(dv[0, :, 0, 0], torch.tensor([0.73106, 0.26894]), rtol=1e-4, atol=1e-4)
    leaf = v.clone().requires_grad_()
    flash_attention(q, k, leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, dv)


def test_lse_placeholder_without_return_softmax_lse(make_call):
    call = make_call()
    out, lse = flash_attn(*call.qkv)
    assert torch.equal(lse, torch.zeros(1))
    assert torch.equal(out, flash_attn(*call.qkv, return_softmax_lse=True)[0])


def test_output_layout_bsnd_of_bnsd_queries(make_call):
    call = make_call("BNSD", (6, 6), mask_mode=3)
    layouts = {"layout_q": "BNSD", "layout_kv": "BNSD"}
    straight, lse = flash_attn(*call.qkv, mask_mode=3, layout_out="BNSD", return_softmax_lse=True, **layouts)
    turned, same = flash_attn(*call.qkv, mask_mode=3, layout_out="BSND", return_softmax_lse=True, **layouts)
    assert turned.is_contiguous()
    assert torch.equal(turned.transpose(1, 2), straight)
    assert torch.equal(lse, same)


@pytest.mark.parametrize(
    ("causal", "window", "mode", "bounds"),
    [
        (False, (-1, -1), 0, (-1, -1)),
        (True, (-1, -1), 3, (-1, -1)),
        (True, (2, -1), 4, (2, 0)),
        (True, (2, 5), 4, (2, 0)),
        (True, (-1, 0), 3, (-1, -1)),
        (False, (2, -1), 4, (2, -1)),
        (False, (0, 0), 4, (0, 0)),
    ],
)
def test_flash_attn_names_mean_what_they_mean_there(make_call, causal, window, mode, bounds):
    call = make_call(lengths_kv=(8, 8))
    expected, expected_lse = flash_attention(
        *call.qkv, mask_mode=mode, win_left=bounds[0], win_right=bounds[1], softmax_scale=0.2, return_lse=True
    )
    got, lse, s_dmask = flash_attn_func(
        *call.qkv, causal=causal, window_size=window, softmax_scale=0.2, return_attn_probs=True
    )
    assert torch.equal(got, expected)
    assert torch.equal(lse, expected_lse)
    assert s_dmask.numel() == 0
    packed = make_call("TND", (3, 4), (5, 4))
    cu_q, cu_kv = packed.front["cu_seqlens_q"], packed.front["cu_seqlens_kv"]
    expected = flash_attention(
        *packed.qkv, layout="TND", cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv,
        mask_mode=mode, win_left=bounds[0], win_right=bounds[1],
    )  # fmt: skip
    got = flash_attn_varlen_func(*packed.qkv, cu_q, cu_kv, 4, 5, causal=causal, window_size=window)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [("dropout_p", 0.1), ("softcap", 20.0), ("alibi_slopes", torch.ones(4)), ("window_size", (1, 2, 3))],
)
def test_arguments_without_counterpart_are_refused_by_name(make_call, name, value):
    call = make_call()
    with pytest.raises(ValueError, match=f"flash_attn_func: {name} must be"):
        flash_attn_func(*call.qkv, **{name: value})


def test_block_table_is_refused_by_name(make_call):
    call = make_call("TND")
    cu = call.front["cu_seqlens_q"]
    table = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="flash_attn_varlen_func: block_table must be None"):
        flash_attn_varlen_func(*call.qkv, cu, cu, 5, 5, block_table=table)
    with pytest.raises(ValueError, match=r"flash_attn: block_table must be None, got shape \(2, 1\)"):
        flash_attn(*call.qkv, block_table=table)


def test_metadata_without_tensors_is_on_the_cpu():
    for ops in (torch.ops.cann_ops_transformer, fag_torch):
        words = ops.flash_attn_metadata(4, 2, 16, is_grad_enabled=True, **METADATA)
        assert words.device.type == "cpu"
        assert words.dtype == torch.int32
        assert words.ndim == 1
    assert torch.equal(flash_attn_metadata(4, 2, 16, device="cpu", **METADATA),
                       flash_attn_metadata(4, 2, 16, **METADATA))  # fmt: skip


def test_metadata_is_the_callers_own():
    first = flash_attn_metadata(4, 2, 16, **METADATA)
    first.zero_()
    assert flash_attn_metadata(4, 2, 16, **METADATA).any()


def test_given_metadata_serves_both_operators(call):
    n1, n2 = (call.q.shape[-3], call.k.shape[-3]) if call.raw["layout_q"] == "BNSD" else (
        call.q.shape[-2], call.k.shape[-2])  # fmt: skip
    raw = {name: value for name, value in call.raw.items() if name != "sinks"}
    if call.raw["layout_q"] != "TND":
        axis = 2 if call.raw["layout_q"] == "BNSD" else 1
        raw |= {"batch_size": call.q.shape[0], "max_seqlen_q": call.q.shape[axis]}
        raw["max_seqlen_kv"] = call.k.shape[axis]
    words = flash_attn_metadata(
        n1, n2, call.q.shape[-1], head_dim_v=call.v.shape[-1], is_grad_enabled=True, **raw
    )
    plain = call.requiring_grad()
    given = call.requiring_grad()
    out, lse = flash_attention(*plain.qkv, **plain.front, return_lse=True)
    other, other_lse = flash_attention(*given.qkv, **given.front, metadata=words, return_lse=True)
    assert torch.equal(out, other)
    assert torch.equal(lse, other_lse)
    (out.sum() + lse.nan_to_num(0, 0, 0).sum()).backward()
    (other.sum() + other_lse.nan_to_num(0, 0, 0).sum()).backward()
    for one, two in zip(plain.qkv, given.qkv, strict=True):
        assert torch.equal(one.grad, two.grad)


def test_metadata_with_cann_s_signature_serves_a_narrower_value(make_call, layout):
    """CANN's flash_attn_metadata cannot say Dv; what it makes fits every Dv <= D, with the same bits."""
    call = make_call(layout, (300, 300), d=64, dv=40, mask_mode=3)
    ops = torch.ops.cann_ops_transformer
    sizes = {} if layout == "TND" else {"batch_size": 2, "max_seqlen_q": 300, "max_seqlen_kv": 300}
    words = ops.flash_attn_metadata(4, 2, 64, is_grad_enabled=True, **sizes, **call.raw)
    out, lse = ops.flash_attn(*call.qkv, return_softmax_lse=True, **call.raw)
    same, same_lse = ops.flash_attn(*call.qkv, return_softmax_lse=True, metadata=words, **call.raw)
    assert torch.equal(out, same)
    assert torch.equal(lse, same_lse)
    dout = torch.randn_like(out)
    grads = ops.flash_attn_grad(*call.qkv, dout, out, lse, **call.raw)
    others = ops.flash_attn_grad(*call.qkv, dout, out, lse, metadata=words, **call.raw)
    assert all(map(torch.equal, grads, others))


def test_max_seqlen_is_only_a_bound(make_call):
    """pc27: any sufficient bound gives the same bits."""
    call = make_call("TND", (5, 17, 3), mask_mode=3)
    expected = flash_attention(*call.qkv, **call.front)
    for bound in (17, 64, None, -1):
        got = flash_attention(*call.qkv, **call.front, max_seqlen_q=bound, max_seqlen_kv=bound)
        assert torch.equal(got, expected)


def test_attn_mask_constant_changes_nothing_and_is_read_once(make_call, monkeypatch):
    """pc44: CANN's constant gives the bits of None; its content is compared once per tensor and version."""
    from fag_torch import mask_tensor

    call = make_call(mask_mode=3)
    constant = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
    reads = []
    checked = mask_tensor.check_attn_mask_content
    monkeypatch.setattr(mask_tensor, "check_attn_mask_content", lambda *a: reads.append(1) or checked(*a))
    expected = flash_attn(*call.qkv, mask_mode=3)[0]
    for _ in range(3):
        assert torch.equal(flash_attn(*call.qkv, mask_mode=3, attn_mask=constant)[0], expected)
    assert len(reads) == 1
    constant[5, 5] = 1
    with pytest.raises(ValueError, match=r"attn_mask must be CANN's constant.*1 at \[5, 5\]"):
        flash_attn(*call.qkv, mask_mode=3, attn_mask=constant)
    constant[5, 5] = 0
    flash_attn(*call.qkv, mask_mode=3, attn_mask=constant)
    assert len(reads) == 3
    for same in (constant.bool(), constant.to(torch.uint8)):
        assert torch.equal(flash_attn(*call.qkv, mask_mode=3, attn_mask=same)[0], expected)


def test_pc10_any_strides(make_call):
    """pc10: views give the bits of contiguous copies, and results are contiguous."""
    call = make_call("BSND", (33, 33), (49, 49), d=64, dtype=torch.bfloat16)
    dout = torch.randn(2, 33, 4, 64).to(torch.bfloat16)

    def run(q, k, v, dout):
        out, lse = flash_attn(q, k, v, softmax_scale=0.125, mask_mode=3, return_softmax_lse=True)
        return out, lse, *flash_attn_grad(q, k, v, dout, out, lse, softmax_scale=0.125, mask_mode=3)

    def transposed(t):
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def sliced(t):
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 8), torch.nan, dtype=t.dtype)
        wide[..., 3 : 3 + t.shape[-1]] = t
        return wide[..., 3 : 3 + t.shape[-1]]

    def stepped(t):
        wide = torch.full((*t.shape, 2), torch.nan, dtype=t.dtype)
        wide[..., 0] = t
        return wide[..., 0]

    def shifted(t):
        flat = torch.full((t.numel() + 1,), torch.nan, dtype=t.dtype)
        flat[1:] = t.flatten()
        return flat[1:].view(t.shape)

    inputs = (*call.qkv, dout)
    expected = run(*inputs)
    for view in (transposed, sliced, stepped, shifted):
        for i in range(4):
            changed = [view(t) if i == j else t for j, t in enumerate(inputs)]
            before = [t.clone() for t in changed]
            for got, want in zip(run(*changed), expected, strict=True):
                assert got.is_contiguous()
                assert torch.equal(got, want)
            assert all(map(torch.equal, changed, before))
