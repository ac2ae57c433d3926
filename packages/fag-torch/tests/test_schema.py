"""The schemas are CANN's, word for word, and every argument works by position and by keyword as there."""

from __future__ import annotations

import pytest
import torch

import fag_torch

OPS = torch.ops.cann_ops_transformer


def arguments(op):
    return [(a.name, a.has_default_value(), a.default_value if a.has_default_value() else None, a.kwarg_only)
            for a in op.default._schema.arguments]  # fmt: skip


def test_flash_attn_grad_has_no_keyword_only_argument():
    assert arguments(OPS.flash_attn_grad) == [
        *[(n, False, None, False) for n in ("q", "k", "v", "dout", "attn_out", "softmax_lse")],
        *[
            (n, True, None, False)
            for n in ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv", "sinks")
        ],
        ("attn_mask", True, None, False),
        ("metadata", True, None, False),
        ("softmax_scale", True, 0.0, False),
        ("mask_mode", True, 0, False),
        *[(n, True, -1, False) for n in ("win_left", "win_right", "max_seqlen_q", "max_seqlen_kv")],
        *[(n, True, "BSND", False) for n in ("layout_q", "layout_kv", "layout_out")],
    ]


def test_flash_attn_arguments():
    assert arguments(OPS.flash_attn) == [
        *[(n, False, None, False) for n in ("q", "k", "v")],
        *[(n, True, None, False) for n in ("block_table", "cu_seqlens_q", "cu_seqlens_kv", "seqused_q")],
        *[(n, True, None, False) for n in ("seqused_kv", "sinks", "metadata")],
        ("softmax_scale", True, 1.0, False),
        ("mask_mode", True, 0, False),
        ("attn_mask", True, None, False),
        *[(n, True, -1, False) for n in ("win_left", "win_right", "max_seqlen_q", "max_seqlen_kv")],
        *[(n, True, "BSND", False) for n in ("layout_q", "layout_kv", "layout_out")],
        ("return_softmax_lse", True, False, False),
    ]


def test_flash_attn_metadata_arguments():
    lists = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv")
    sizes = ("batch_size", "max_seqlen_q", "max_seqlen_kv", "mask_mode", "win_left", "win_right")
    layouts = ("layout_q", "layout_kv", "layout_out")
    assert arguments(OPS.flash_attn_metadata) == [
        *[(n, False, None, False) for n in ("num_heads_q", "num_heads_kv", "head_dim")],
        *[(n, True, None, True) for n in (*lists, *sizes, *layouts)],
        ("is_grad_enabled", True, False, True),
    ]


@pytest.mark.parametrize("op", ["attention_forward", "attention_backward"])
def test_internal_operators_have_positional_tensors_and_keyword_scalars(op):
    schema = getattr(torch.ops.fag, op).default._schema
    for argument in schema.arguments:
        assert argument.kwarg_only == ("Tensor" not in str(argument.type)), argument.name
    assert not schema.is_mutable


def test_optional_arguments_of_the_grad_work_by_position_and_by_keyword(make_call, layout):
    call = make_call(layout, mask_mode=3, sinks=True)
    scale = 0.3
    out, lse = OPS.flash_attn(*call.qkv, softmax_scale=scale, return_softmax_lse=True, **call.raw)
    dout = torch.randn_like(out)
    by_name = OPS.flash_attn_grad(*call.qkv, dout, out, lse, softmax_scale=scale, **call.raw)
    raw = call.raw
    by_place = OPS.flash_attn_grad(
        *call.qkv, dout, out, lse, raw.get("cu_seqlens_q"), raw.get("cu_seqlens_kv"), None, None,
        raw["sinks"], None, None, scale, 3, -1, -1, -1, -1, layout, layout, layout,
    )  # fmt: skip
    for one, other in zip(by_name, by_place, strict=True):
        assert torch.equal(one, other)


def test_seed_example_runs_unchanged_on_the_cpu(layout):
    """The joint example of the seed document, section 4.8, in each layout."""
    b, s, n1, n2, d = 2, 128, 8, 2, 128
    scale = d**-0.5

    def random(heads):
        shape = {"BSND": (b, s, heads, d), "BNSD": (b, heads, s, d), "TND": (b * s, heads, d)}[layout]
        return torch.randn(shape, dtype=torch.float16, device="cpu")

    q, k, v = random(n1), random(n2), random(n2)
    cu = torch.arange(b + 1, dtype=torch.int32) * s if layout == "TND" else None
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    shared = {"mask_mode": 0, "win_left": -1, "win_right": -1, "max_seqlen_q": s, "max_seqlen_kv": s}
    layouts = {"layout_q": layout, "layout_kv": layout, "layout_out": layout}
    for ops in (OPS, fag_torch):
        metadata = ops.flash_attn_metadata(
            n1, n2, d, batch_size=b, is_grad_enabled=True, **lengths, **shared, **layouts
        )
        common = {"metadata": metadata, "softmax_scale": scale, **lengths, **shared, **layouts}
        out, lse = ops.flash_attn(q, k, v, return_softmax_lse=True, **common)
        dq, dk, dv = ops.flash_attn_grad(q, k, v, torch.randn_like(out), out, lse, **common)
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
        assert (dq.dtype, dk.dtype, dv.dtype) == (q.dtype,) * 3
        assert dq.abs().max() > 0
