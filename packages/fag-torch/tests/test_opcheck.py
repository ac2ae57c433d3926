"""Public case 24: torch.library.opcheck over layouts, masks, sinks and lengths; nothing aliases."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.library import opcheck

import fag_torch  # noqa: F401

RAW = torch.ops.cann_ops_transformer
FAG = torch.ops.fag


@pytest.fixture(autouse=True)
def _warnings_are_errors(monkeypatch):
    monkeypatch.setenv("CI", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch's own: opcheck looks at .grad of clones, and hides that warning only where it is no error
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.|.*pytest")
        yield


def test_pc24_attention_forward(call):
    tensors, scalars = call.internal()
    opcheck(FAG.attention_forward.default, tensors, scalars)
    leaf, scalars = call.requiring_grad().internal()
    opcheck(FAG.attention_forward.default, leaf, scalars)


def test_pc24_attention_backward(call):
    tensors, scalars = call.internal()
    out, lse = FAG.attention_forward(*tensors, **scalars)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    opcheck(FAG.attention_backward.default, (*call.qkv, dout, out, lse, dlse, *tensors[3:]), scalars)
    opcheck(FAG.attention_backward.default, (*call.qkv, dout, out, lse, None, *tensors[3:]), scalars)


@pytest.mark.parametrize("return_lse", [False, True])
def test_pc24_flash_attn(call, return_lse):
    kwargs = {**call.raw, "return_softmax_lse": return_lse}
    opcheck(RAW.flash_attn.default, call.qkv, kwargs)
    opcheck(
        RAW.flash_attn.default, call.requiring_grad().qkv, kwargs, test_utils="test_autograd_registration"
    )


def test_pc24_flash_attn_grad(call):
    out, lse = RAW.flash_attn(*call.qkv, **call.raw, return_softmax_lse=True)
    args = (*call.qkv, torch.ones_like(out), out, lse)
    opcheck(RAW.flash_attn_grad.default, args, call.raw)
    leaves = (*call.requiring_grad().qkv, *args[3:])
    opcheck(RAW.flash_attn_grad.default, leaves, call.raw, test_utils="test_autograd_registration")


def test_pc24_flash_attn_metadata():
    sizes = {"batch_size": 2, "max_seqlen_q": 300, "max_seqlen_kv": 300, "is_grad_enabled": True}
    opcheck(RAW.flash_attn_metadata.default, (8, 2, 64), sizes)
    cu = torch.tensor([0, 7, 7, 300], dtype=torch.int32)
    lists = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "mask_mode": 3, "layout_q": "TND", "layout_kv": "TND"}
    opcheck(RAW.flash_attn_metadata.default, (8, 2, 64), {**lists, "layout_out": "TND"})


def test_pc24_requires_grad_inputs_of_the_grad_give_a_defined_answer(make_call):
    """No fallthrough warning, the same numbers, and a backward through them says what to use instead."""
    call = make_call()
    out, lse = RAW.flash_attn(*call.qkv, return_softmax_lse=True)
    expected = RAW.flash_attn_grad(*call.qkv, out, out, lse)
    leaves = call.requiring_grad().qkv
    grads = RAW.flash_attn_grad(*leaves, out, out, lse)
    for got, want in zip(grads, expected, strict=True):
        assert torch.equal(got, want)
        with pytest.raises(
            RuntimeError, match="flash_attn_grad: backward through its outputs.*flash_attention"
        ):
            got.sum().backward(retain_graph=True)


def test_pc24_no_result_shares_storage(call):
    out, lse = RAW.flash_attn(*call.qkv, **call.raw, return_softmax_lse=True)
    grads = RAW.flash_attn_grad(*call.qkv, out, out, lse, **call.raw)
    placeholder = RAW.flash_attn(*call.qkv, **call.raw)[1]
    everything = [*call.qkv, out, lse, placeholder, *grads]
    storages = [t.untyped_storage().data_ptr() for t in everything if t.numel()]
    assert len(set(storages)) == len(storages)
