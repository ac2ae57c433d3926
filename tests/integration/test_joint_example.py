"""The joint example of CANN's documentation (metadata, forward, gradient), unchanged but for device="cpu" and
the package it comes from, in the three layouts."""

from __future__ import annotations

import math
from types import ModuleType

import bound
import harness
import pytest
import torch
from oracle import Call

import fag_torch

PACKAGES = {"torch.ops": torch.ops.cann_ops_transformer, "fag_torch": fag_torch}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("layout", ["BSND"])
def test_example_of_the_documentation(layout: str, package: str) -> None:
    cann_ops_transformer: ModuleType = PACKAGES[package]
    # -- the example, to the letter --
    dtype = torch.float16
    B = 2
    S1 = 128
    S2 = 128
    N1 = 8
    N2 = 2
    D = 128
    Dv = 128
    scale = 1.0 / math.sqrt(D)
    q = torch.randn(B, S1, N1, D, dtype=dtype, device="cpu")
    k = torch.randn(B, S2, N2, D, dtype=dtype, device="cpu")
    v = torch.randn(B, S2, N2, Dv, dtype=dtype, device="cpu")
    metadata = cann_ops_transformer.flash_attn_metadata(
        N1, N2, D, batch_size=B, max_seqlen_q=S1, max_seqlen_kv=S2, mask_mode=0, win_left=-1, win_right=-1,
        layout_q="BSND", layout_kv="BSND", layout_out="BSND", is_grad_enabled=True,
    )  # fmt: skip
    attn_out, softmax_lse = cann_ops_transformer.flash_attn(
        q, k, v, metadata=metadata, softmax_scale=scale, mask_mode=0, win_left=-1, win_right=-1,
        max_seqlen_q=S1, max_seqlen_kv=S2, layout_q="BSND", layout_kv="BSND", layout_out="BSND",
        return_softmax_lse=True,
    )  # fmt: skip
    dout = torch.randn_like(attn_out)
    dq, dk, dv = cann_ops_transformer.flash_attn_grad(
        q, k, v, dout, attn_out, softmax_lse, metadata=metadata, softmax_scale=scale, mask_mode=0,
        win_left=-1, win_right=-1, max_seqlen_q=S1, max_seqlen_kv=S2,
        layout_q="BSND", layout_kv="BSND", layout_out="BSND",
    )  # fmt: skip
    assert dq.shape == q.shape
    assert dk.shape == k.shape
    assert dv.shape == v.shape
    # -- and what it does not ask --
    assert metadata.dtype == torch.int32
    assert metadata.dim() == 1
    inputs = harness.Inputs(q, k, v, dout)
    call = Call("BSND")
    bound.assert_forward(call, inputs, attn_out, softmax_lse)
    bound.assert_gradients(call, inputs, attn_out, softmax_lse, (dq, dk, dv))
    assert torch.count_nonzero(dq) > 0


@pytest.mark.parametrize("package", PACKAGES)
def test_example_in_every_layout(layout: str, package: str) -> None:
    ops = PACKAGES[package]
    call = harness.uniform(layout, 2, 128, 128)
    inputs = harness.random_inputs(call, 2, 128, 128, 8, 2, 128, dtype=torch.float16)
    lengths = {
        name: harness.int32(getattr(call, name)) for name in harness.INT32_ARGUMENTS if getattr(call, name)
    }
    layouts = {"layout_q": layout, "layout_kv": layout, "layout_out": layout}
    common = {"mask_mode": 0, "win_left": -1, "win_right": -1, "max_seqlen_q": 128, "max_seqlen_kv": 128}
    metadata = ops.flash_attn_metadata(
        8, 2, 128, batch_size=2, is_grad_enabled=True, **lengths, **layouts, **common
    )
    scale = 1.0 / math.sqrt(128)
    out, lse = ops.flash_attn(
        *inputs[:3],
        metadata=metadata,
        softmax_scale=scale,
        return_softmax_lse=True,
        **lengths,
        **layouts,
        **common,
    )
    gradients = ops.flash_attn_grad(
        *inputs[:4], out, lse, metadata=metadata, softmax_scale=scale, **lengths, **layouts, **common
    )
    bound.assert_forward(call, inputs, out, lse)
    bound.assert_gradients(call, inputs, out, lse, gradients)
    without = harness.run(harness.TORCH_OPS, call, inputs)
    harness.assert_same_bits([out, lse, *gradients], without, "with and without metadata:")


def test_arguments_work_by_position(layout: str) -> None:
    """The schema of flash_attn_grad has no `*`: everything from cu_seqlens_q on may stand in its place."""
    call = harness.uniform(layout, 2, 12, 12, mask_mode=3)
    inputs = harness.random_inputs(call, 2, 12, 12, 8, 2, 16, dtype=torch.float16, with_sinks=True)
    wanted = harness.run(harness.TORCH_OPS, call, inputs)
    cu = None if call.cu_seqlens_q is None else harness.int32(call.cu_seqlens_q)
    for ops in PACKAGES.values():
        got = ops.flash_attn_grad(
            *inputs[:4], wanted.out, wanted.lse, cu, cu, None, None, inputs.sinks, None, None, 0.25, 3,
            -1, -1, -1, -1, layout, layout, layout,
        )  # fmt: skip
        harness.assert_same_bits(got, wanted[2:])
        out, lse = ops.flash_attn(
            *inputs[:3], None, cu, cu, None, None, inputs.sinks, None, 0.25, 3, None,
            -1, -1, -1, -1, layout, layout, layout, True,
        )  # fmt: skip
        harness.assert_same_bits([out, lse], wanted[:2])


def test_without_lse_there_is_a_placeholder(api: harness.Api, layout: str) -> None:
    call = harness.uniform(layout, 2, 12, 12)
    inputs = harness.random_inputs(call, 2, 12, 12, 8, 2, 16)
    wanted, _ = harness.run_forward(api, call, inputs)
    out, lse = api.flash_attn(*inputs[:3], **harness.op_arguments(call, 16))
    harness.assert_same_bits([out], [wanted])
    assert lse.dtype == torch.float32
    assert lse.tolist() == [0.0]


@pytest.mark.parametrize("name", ["NO_MASK", "causal", "Sliding_Window"])
def test_mask_mode_by_enum_int_and_name(layout: str, name: str) -> None:
    mode = fag_torch.MaskMode[name.upper()]
    call = harness.uniform(layout, 1, 9, 9, mask_mode=int(mode), win_left=2 if int(mode) == 4 else -1)
    inputs = harness.random_inputs(call, 1, 9, 9, 2, 2, 16)
    wanted = harness.run(harness.FAG_TORCH, call, inputs)
    for value in (mode, name, name.lower(), name.upper()):
        got = harness.run(harness.FAG_TORCH, call, inputs, mask_mode=value)
        harness.assert_same_bits(got, wanted)
        front = harness.run_front(call, inputs, mask_mode=value)
        harness.assert_same_bits(front[:5], wanted)


def test_forward_takes_queries_bnsd_and_gives_bsnd(api: harness.Api) -> None:
    call = Call("BNSD", 3)
    inputs = harness.random_inputs(call, 2, 9, 11, 4, 2, 16, 8)
    wanted, wanted_lse = harness.run_forward(api, call, inputs)
    out, lse = harness.run_forward(api, call, inputs, layout_out="BSND")
    assert out.is_contiguous()
    harness.assert_same_bits([out.transpose(1, 2), lse], [wanted, wanted_lse])
