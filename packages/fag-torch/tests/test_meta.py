"""Meta results agree with the real ones in shape, stride, dtype and number, and refuse what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fag_torch

OPS = torch.ops.cann_ops_transformer


def to_meta(value):
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def describe(results, device="meta"):
    results = results if isinstance(results, (tuple, list)) else (results,)
    for result in results:
        assert result.device.type == device
    return [(tuple(r.shape), r.stride(), r.dtype) for r in results]


def on_meta(op, *args, **kwargs):
    return op(*map(to_meta, args), **{name: to_meta(value) for name, value in kwargs.items()})


def check(op, *args, **kwargs):
    real = op(*args, **kwargs)
    assert describe(on_meta(op, *args, **kwargs)) == describe(real, "cpu")
    with FakeTensorMode() as mode:

        def convert(value):
            return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

        fake = op(*map(convert, args), **{name: convert(value) for name, value in kwargs.items()})
        assert describe(fake, "cpu") == describe(real, "cpu")
    return real


def test_pc21_raw_operators(call):
    """pc21: with and without the lse, for the gradient, over layouts and lengths."""
    check(OPS.flash_attn, *call.qkv, **call.raw)
    out, lse = check(OPS.flash_attn, *call.qkv, return_softmax_lse=True, **call.raw)
    check(OPS.flash_attn_grad, *call.qkv, torch.zeros_like(out), out, lse, **call.raw)


def test_pc21_internal_operators(call):
    tensors, scalars = call.internal()
    out, lse = check(torch.ops.fag.attention_forward, *tensors, **scalars)
    lengths = tensors[3:]
    check(torch.ops.fag.attention_backward, *call.qkv, out, out, lse, lse, *lengths, **scalars)
    check(torch.ops.fag.attention_backward, *call.qkv, out, out, lse, None, *lengths, **scalars)


def test_pc21_strides_of_inputs_do_not_matter(make_call, layout):
    """pc21: q and v are transposed views, k is contiguous; Dv != D, N1 != N2, S1 != S2."""
    call = make_call(layout, (5, 5), (7, 7), dv=8)
    q, k, v = (t.transpose(-2, -3).contiguous().transpose(-2, -3) for t in call.qkv)
    k = k.contiguous()
    out, lse = check(OPS.flash_attn, q, k, v, return_softmax_lse=True, **call.raw)
    dout = out.transpose(-2, -3).contiguous().transpose(-2, -3)
    check(OPS.flash_attn_grad, q, k, v, dout, out, lse, **call.raw)


@pytest.mark.parametrize("is_grad", [False, True])
def test_pc21_metadata(is_grad):
    lists = {"cu_seqlens_q": torch.tensor([0, 3, 9], dtype=torch.int32)}
    lists["cu_seqlens_kv"] = lists["cu_seqlens_q"]
    check(OPS.flash_attn_metadata, 4, 2, 16, layout_q="TND", layout_kv="TND", layout_out="TND",
          is_grad_enabled=is_grad, **lists)  # fmt: skip
    used = torch.tensor([3, 1000], dtype=torch.int32)
    check(OPS.flash_attn_metadata, 64, 1, 128, seqused_kv=used, max_seqlen_q=5000, is_grad_enabled=is_grad)


@pytest.mark.parametrize("is_grad", [False, True])
def test_length_of_metadata_is_known_before_the_problem(is_grad):
    for b, s in ((1, 1), (3, 300), (200, 5000)):
        words = OPS.flash_attn_metadata(
            16, 4, 64, batch_size=b, max_seqlen_q=s, max_seqlen_kv=2 * s, mask_mode=3, is_grad_enabled=is_grad
        )
        with FakeTensorMode():
            fake = OPS.flash_attn_metadata(
                16, 4, 64, batch_size=b, max_seqlen_q=s, max_seqlen_kv=2 * s, is_grad_enabled=is_grad
            )
        assert fake.shape == words.shape


def test_meta_refuses_what_needs_no_values(make_call):
    call = make_call("TND", (3, 4))
    for change, message in (
        ({"mask_mode": 1}, "mask_mode must be"),
        ({"win_left": 3}, "win_left must be -1 with mask_mode NO_MASK"),
        ({"layout_kv": "BSND"}, "layout_kv must equal layout_q"),
        ({"cu_seqlens_q": None}, "cu_seqlens_q must be given with layout TND"),
        ({"cu_seqlens_q": torch.zeros(5, dtype=torch.int32)}, "cu_seqlens_kv must describe the batch"),
        ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int64)}, "cu_seqlens_q must be int32, got int64"),
        ({"max_seqlen_q": -2}, "max_seqlen_q must be -1 or at least"),
        ({"sinks": torch.zeros(3)}, "sinks must have shape"),
        ({"softmax_scale": float("nan")}, "softmax_scale must be finite"),
        ({"metadata": torch.zeros(8192, dtype=torch.int64)}, "metadata must be int32, got int64"),
    ):
        for run in (OPS.flash_attn, lambda *a, **k: on_meta(OPS.flash_attn, *a, **k)):
            with pytest.raises(RuntimeError, match=f"flash_attn: {message}"):
                run(*call.qkv, **{**call.raw, **change})


def test_pc28_lengths_on_another_device_are_refused(make_call):
    call = make_call("TND", (3, 4))
    raw = {**call.raw, "cu_seqlens_kv": call.raw["cu_seqlens_kv"].to("meta")}
    with pytest.raises(RuntimeError, match="cu_seqlens_kv must be on the device of q, got meta .q=cpu."):
        OPS.flash_attn(*call.qkv, **raw)
    with pytest.raises(ValueError, match="cu_seqlens_kv must be on the device of q, got meta"):
        fag_torch.flash_attn(*call.qkv, **raw)
