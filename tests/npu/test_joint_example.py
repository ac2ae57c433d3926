"""The joint example of CANN's documentation on device "npu", by both routes."""

from __future__ import annotations

import math

import attention
import bound
import harness
import pytest
import torch
import torch_npu
from oracle import Call
from stub import Stub

import fag_torch


@pytest.mark.parametrize("package", ["torch.ops", "fag_torch"])
@pytest.mark.parametrize("route", attention.ROUTES)
@pytest.mark.usefixtures("shortcut")
def test_example_of_the_documentation(
    route: str, package: str, monkeypatch: pytest.MonkeyPatch, stub: Stub
) -> None:
    monkeypatch.setenv("FAG_NPU_ROUTE", route)
    cann_ops_transformer = {"torch.ops": torch.ops.cann_ops_transformer, "fag_torch": fag_torch}[package]
    torch.manual_seed(0)
    # -- the example, to the letter but for its random numbers, which are made on the host --
    torch_npu.npu.set_device(0)
    dtype = torch.float16
    B = 2
    S1 = 128
    S2 = 128
    N1 = 8
    N2 = 2
    D = 128
    Dv = 128
    scale = 1.0 / math.sqrt(D)
    q = torch.randn(B, S1, N1, D, dtype=dtype).to("npu")
    k = torch.randn(B, S2, N2, D, dtype=dtype).to("npu")
    v = torch.randn(B, S2, N2, Dv, dtype=dtype).to("npu")
    metadata = cann_ops_transformer.flash_attn_metadata(
        N1, N2, D, batch_size=B, max_seqlen_q=S1, max_seqlen_kv=S2, mask_mode=0, win_left=-1, win_right=-1,
        layout_q="BSND", layout_kv="BSND", layout_out="BSND", is_grad_enabled=True,
    )  # fmt: skip
    attn_out, softmax_lse = cann_ops_transformer.flash_attn(
        q, k, v, metadata=metadata, softmax_scale=scale, mask_mode=0, win_left=-1, win_right=-1,
        max_seqlen_q=S1, max_seqlen_kv=S2, layout_q="BSND", layout_kv="BSND", layout_out="BSND",
        return_softmax_lse=True,
    )  # fmt: skip
    dout = torch.randn(attn_out.shape, dtype=dtype).to("npu")
    dq, dk, dv = cann_ops_transformer.flash_attn_grad(
        q, k, v, dout, attn_out, softmax_lse, metadata=metadata, softmax_scale=scale, mask_mode=0,
        win_left=-1, win_right=-1, max_seqlen_q=S1, max_seqlen_kv=S2,
        layout_q="BSND", layout_kv="BSND", layout_out="BSND",
    )  # fmt: skip
    torch_npu.npu.synchronize()
    assert dq.shape == q.shape
    assert dk.shape == k.shape
    assert dv.shape == v.shape
    # -- and what it does not ask --
    assert metadata.device == q.device
    called = {call.symbol for call in stub.calls()}
    assert ("aclnnInnerFlashAttnGrad" in called) == (route == "aclnn")
    assert ("rtKernelLaunch" in called) == (route == "ascend950")
    inputs = harness.Inputs(q.cpu(), k.cpu(), v.cpu(), dout.cpu())
    bound.assert_forward(Call("BSND"), inputs, attn_out.cpu(), softmax_lse.cpu())
    gradients = (dq.cpu(), dk.cpu(), dv.cpu())
    bound.assert_gradients(Call("BSND"), inputs, attn_out.cpu(), softmax_lse.cpu(), gradients)
    assert torch.count_nonzero(gradients[0]) > 0
