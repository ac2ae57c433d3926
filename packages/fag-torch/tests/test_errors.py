"""Every rule of the contract through both faces: ValueError or TypeError from Python, RuntimeError from
torch.ops.

The rules and their texts are fag_metadata's; here each one is reached from a tensor call.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import fag_torch
from fag_torch.errors import OperatorError

OPS = torch.ops.cann_ops_transformer


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def refuses(name, args, kwargs, kind, message):
    """Both faces refuse with the same text, which starts with the operator and holds `message`."""
    with pytest.raises(kind, match=re.escape(message)) as python:
        getattr(fag_torch, name)(*args, **kwargs)
    assert str(python.value).startswith(f"{name}: ")
    with pytest.raises(RuntimeError) as raw:
        getattr(OPS, name)(*args, **kwargs)
    assert str(raw.value) == str(python.value)
    assert isinstance(raw.value, OperatorError)
    assert type(raw.value.reason) is type(python.value)


def both(make_call, change, kind, message, layout="BSND", **build):
    """The forward and the gradient refuse a changed call."""
    call = make_call(layout, **{"lengths_q": (6, 6), **build})
    tensors = {"q": call.q, "k": call.k, "v": call.v}
    out, lse = OPS.flash_attn(*call.qkv, return_softmax_lse=True, **call.raw)
    grads = {"dout": torch.ones_like(out), "attn_out": out, "softmax_lse": lse}
    kwargs = dict(call.raw)
    for name, value in change.items():
        if name in tensors:
            tensors[name] = value
        elif name not in grads:
            kwargs[name] = value
    if not set(change) <= set(grads):
        refuses("flash_attn", tuple(tensors.values()), kwargs, kind, message)
    else:
        grads |= change
    refuses("flash_attn_grad", (*tensors.values(), *grads.values()), kwargs, kind, message)


F, B = torch.float32, torch.bfloat16
T = torch.zeros


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        # dtypes (pc34)
        (
            {"q": T(2, 6, 4, 16, dtype=torch.float64)},
            TypeError,
            "q must be float16, bfloat16 or float32, got float64",
        ),
        ({"v": T(2, 6, 2, 16, dtype=B)}, TypeError, "v must have the dtype of q, got bfloat16 (q=float32)"),
        (
            {"k": T(2, 6, 2, 16, dtype=torch.float16)},
            TypeError,
            "k must have the dtype of q, got float16 (q=float32)",
        ),
        (
            {"dout": T(2, 6, 4, 16, dtype=B)},
            TypeError,
            "dout must have the dtype of q, got bfloat16 (q=float32)",
        ),
        ({"attn_out": T(2, 6, 4, 16, dtype=B)}, TypeError, "attn_out must have the dtype of q, got bfloat16"),
        ({"softmax_lse": T(2, 4, 6, dtype=B)}, TypeError, "softmax_lse must be float32, got bfloat16"),
        ({"sinks": T(4, dtype=B)}, TypeError, "sinks must be float32, got bfloat16"),
        # shapes
        (
            {"q": T(2, 6, 4, 4, 16)},
            ValueError,
            "q must have shape (B, S, N, D) with layout BSND, got shape (2, 6, 4, 4, 16)",
        ),
        (
            {"k": T(3, 6, 2, 16), "v": T(3, 6, 2, 16)},
            ValueError,
            "k must have the batch of q, got B=3 (q=B=2)",
        ),
        ({"k": T(2, 6, 2, 8)}, ValueError, "k must have the head dim D of q, got D=8 (q=D=16)"),
        (
            {"v": T(2, 5, 2, 16)},
            ValueError,
            "v must have shape (B, S, N, Dv) = (2, 6, 2, 16), got shape (2, 5, 2, 16)",
        ),
        (
            {"k": T(2, 6, 3, 16), "v": T(2, 6, 3, 16)},
            ValueError,
            "N1 must be a multiple of N2, got N1=4, N2=3",
        ),
        ({"q": T(2, 6, 0, 16)}, ValueError, "q must have at least one head, got N1=0"),
        ({"q": T(2, 6, 4, 0), "k": T(2, 6, 2, 0)}, ValueError, "q must have a head dim D in 1..256, got D=0"),
        (
            {"q": T(2, 6, 4, 257), "k": T(2, 6, 2, 257)},
            ValueError,
            "q must have a head dim D in 1..256, got D=257",
        ),
        ({"v": T(2, 6, 2, 24)}, ValueError, "v must have a head dim Dv in 1..D, got Dv=24 (D=16)"),
        ({"sinks": T(2)}, ValueError, "sinks must have shape (N1,) = (4,), got shape (2,)"),
        (
            {"dout": T(2, 6, 4, 8)},
            ValueError,
            "dout must have shape (B, S, N, Dv) = (2, 6, 4, 16), got shape (2, 6, 4, 8)",
        ),
        ({"attn_out": T(2, 6, 2, 16)}, ValueError, "attn_out must have shape (B, S, N, Dv) = (2, 6, 4, 16)"),
        (
            {"softmax_lse": T(2, 6, 4)},
            ValueError,
            "softmax_lse must have shape (B, N1, S1) = (2, 4, 6), got shape (2, 6, 4)",
        ),
        # layouts
        ({"layout_q": "bsnd"}, ValueError, "layout_q must be BSND, BNSD or TND (upper case), got 'bsnd'"),
        ({"layout_kv": "BNSD"}, ValueError, "layout_kv must equal layout_q, got BNSD (layout_q=BSND)"),
        ({"layout_out": "BNSD"}, ValueError, "layout_out must equal layout_q"),
        # masks (pc18)
        (
            {"mask_mode": 1},
            ValueError,
            "mask_mode must be NO_MASK (0) or CAUSAL (3) or SLIDING_WINDOW (4), got 1",
        ),
        ({"win_left": 2}, ValueError, "win_left must be -1 with mask_mode NO_MASK, got 2 (mask_mode=0)"),
        ({"win_right": 0, "mask_mode": 3}, ValueError, "win_right must be -1 with mask_mode CAUSAL, got 0"),
        (
            {"win_left": -2, "mask_mode": 4},
            ValueError,
            "win_left must be -1 (unbounded) or in 0..2147483647, got -2",
        ),
        (
            {"win_right": -5, "mask_mode": 4},
            ValueError,
            "win_right must be -1 (unbounded) or in 0..2147483647, got -5",
        ),
        (
            {"win_right": 2**31, "mask_mode": 4},
            ValueError,
            "win_right must be -1 (unbounded) or in 0..2147483647",
        ),
        # lengths (pc28)
        ({"cu_seqlens_q": i32(0, 6)}, ValueError, "cu_seqlens_q must be None with layout BSND"),
        ({"seqused_q": i32(3)}, ValueError, "seqused_q must have B elements, got 1 elements (B=2)"),
        (
            {"seqused_kv": i32(3, 7)},
            ValueError,
            "seqused_kv must not exceed the length of the slot, got 7 (index=1, slot=6)",
        ),
        ({"seqused_kv": i32(3, -1)}, ValueError, "seqused_kv must not be negative, got -1 (index=1)"),
        ({"seqused_q": T(2, dtype=torch.int64)}, TypeError, "seqused_q must be int32, got int64"),
        ({"seqused_q": T(2, dtype=B)}, TypeError, "seqused_q must be int32, got bfloat16"),
        (
            {"max_seqlen_q": 5},
            ValueError,
            "max_seqlen_q must be -1 or at least the longest sequence, got 5 (longest=6)",
        ),
        (
            {"max_seqlen_kv": -2},
            ValueError,
            "max_seqlen_kv must be -1 or at least the longest sequence, got -2",
        ),
        (
            {"max_seqlen_kv": 0},
            ValueError,
            "max_seqlen_kv must be -1 or at least the longest sequence, got 0",
        ),
        # scale (pc42)
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale must be finite in float32, got nan"),
        ({"softmax_scale": float("inf")}, ValueError, "softmax_scale must be finite in float32, got inf"),
        # metadata (pc49)
        ({"metadata": T(8192, dtype=torch.int64)}, TypeError, "metadata must be int32, got int64"),
        ({"metadata": T(8192, dtype=B)}, TypeError, "metadata must be int32, got bfloat16"),
        ({"metadata": T(8192, dtype=torch.int32)}, ValueError, "metadata must"),
        ({"metadata": T(3, dtype=torch.int32)}, ValueError, "metadata must"),
    ],
)
def test_dense_calls_are_refused(make_call, change, kind, message):
    both(make_call, change, kind, message)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"cu_seqlens_q": None}, ValueError, "cu_seqlens_q must be given with layout TND, got None"),
        ({"cu_seqlens_kv": None}, ValueError, "cu_seqlens_kv must be given with layout TND, got None"),
        ({"cu_seqlens_q": T(3, dtype=torch.int64)}, TypeError, "cu_seqlens_q must be int32, got int64"),
        ({"cu_seqlens_q": T(3)}, TypeError, "cu_seqlens_q must be int32, got float32"),
        (
            {"cu_seqlens_q": i32(0, 12)},
            ValueError,
            "cu_seqlens_kv must describe the batch of cu_seqlens_q, got B=2 (cu_seqlens_q=B=1)",
        ),
        (
            {"cu_seqlens_q": T(3, 1, dtype=torch.int32)},
            ValueError,
            "cu_seqlens_q must have one dimension, got shape (3, 1)",
        ),
        ({"cu_seqlens_q": i32()}, ValueError, "cu_seqlens_q must have B+1 elements, got 0 elements"),
        ({"cu_seqlens_q": i32(1, 6, 12)}, ValueError, "cu_seqlens_q must start with 0, got 1"),
        (
            {"cu_seqlens_kv": i32(0, 13, 12)},
            ValueError,
            "cu_seqlens_kv must not decrease, got 12 after 13 (index=2)",
        ),
        (
            {"cu_seqlens_q": i32(0, 6, 13)},
            ValueError,
            "cu_seqlens_q must end with the number of tokens T, got 13 (T=12)",
        ),
        (
            {"cu_seqlens_q": i32(0, 6, 11)},
            ValueError,
            "cu_seqlens_q must end with the number of tokens T, got 11 (T=12)",
        ),
        (
            {"seqused_q": i32(7, 6)},
            ValueError,
            "seqused_q must not exceed the length of the slot, got 7 (index=0, slot=6)",
        ),
        (
            {"max_seqlen_kv": 5},
            ValueError,
            "max_seqlen_kv must be -1 or at least the longest sequence, got 5 (longest=6)",
        ),
        ({"max_seqlen_q": 0}, ValueError, "max_seqlen_q must be -1 or at least the longest sequence, got 0"),
        (
            {"softmax_lse": T(12, 4)},
            ValueError,
            "softmax_lse must have shape (N1, T1) = (4, 12), got shape (12, 4)",
        ),
        (
            {"q": T(2, 6, 4, 16)},
            ValueError,
            "q must have shape (T, N, D) with layout TND, got shape (2, 6, 4, 16)",
        ),
    ],
)
def test_packed_calls_are_refused(make_call, change, kind, message):
    both(make_call, change, kind, message, layout="TND")


@pytest.mark.parametrize(
    ("mask", "kind", "message"),
    [
        (T(2048, 2048, dtype=torch.int8), ValueError, "got 0 at [0, 1]"),
        (1 - torch.ones(2048, 2048, dtype=torch.int8).triu(1), ValueError, "got 1 at [0, 0]"),
        (
            torch.full((2048, 2048), -torch.inf).triu(1),
            TypeError,
            "attn_mask must be None or CANN's constant",
        ),
        (torch.ones(6, 6, dtype=torch.bool).triu(1), ValueError, "got shape (6, 6)"),
        (torch.ones(1, 1, 1, 6, dtype=torch.bool), ValueError, "got shape (1, 1, 1, 6)"),
        (torch.ones(2, 1, 6, 6, dtype=torch.bool), ValueError, "got shape (2, 1, 6, 6)"),
        (torch.ones((), dtype=torch.int8).expand(2048, 2048), ValueError, "got 1 at [0, 0]"),
    ],
    ids=["all-visible", "inverted", "float", "SxS", "111S", "B1SS", "expanded"],
)
@pytest.mark.parametrize("mode", [3, 4])
def test_pc44_other_masks_are_refused(make_call, mask, kind, message, mode):
    both(make_call, {"attn_mask": mask, "mask_mode": mode}, kind, message)


def test_pc44_mask_without_a_masked_mode_is_refused(make_call):
    constant = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
    both(make_call, {"attn_mask": constant}, ValueError, "attn_mask must be None with mask_mode NO_MASK")


def test_block_table_is_refused(make_call):
    table = {"block_table": T(2, 1, dtype=torch.int32)}
    refuses("flash_attn", make_call().qkv, table, ValueError, "block_table must be None, got shape (2, 1)")


def test_layouts_of_the_gradient_must_be_equal(make_call):
    call = make_call("BNSD", (6, 6))
    layouts = {"layout_q": "BNSD", "layout_kv": "BNSD", "layout_out": "BSND"}
    out, lse = OPS.flash_attn(*call.qkv, return_softmax_lse=True, **layouts)
    refuses(
        "flash_attn_grad",
        (*call.qkv, out, out, lse),
        layouts,
        ValueError,
        "layout_out must equal layout_q, got BSND",
    )


def test_pc49_metadata_of_another_problem_names_the_field(make_call):
    call = make_call()
    out, lse = OPS.flash_attn(*call.qkv, return_softmax_lse=True)
    sizes = {"batch_size": 2, "max_seqlen_q": 5, "max_seqlen_kv": 5, "is_grad_enabled": True}

    def made(n1=4, n2=2, d=16, **change):
        return fag_torch.flash_attn_metadata(n1, n2, d, **{**sizes, **change})

    for words, field in (
        (made(n1=8), "num_heads_q"),
        (made(n2=4), "num_heads_kv"),
        (made(d=32), "head_dim"),
        (made(batch_size=3), "batch_size"),
        (made(max_seqlen_q=6), "max_seqlen_q"),
        (made(max_seqlen_kv=6), "max_seqlen_kv"),
        (made(mask_mode=3), "mask_mode"),
        (made(mask_mode=4, win_left=7), "mask_mode"),
        (made(layout_q="BNSD", layout_kv="BNSD", layout_out="BNSD"), "layout_q"),
        (made(seqused_kv=i32(5, 4), max_seqlen_kv=None), "seqused_kv"),
    ):
        for name, args in (("flash_attn", call.qkv), ("flash_attn_grad", (*call.qkv, out, out, lse))):
            refuses(name, args, {"metadata": words}, ValueError, f"metadata must be made for {field}")
    window = {"mask_mode": 4, "win_left": 3}
    refuses(
        "flash_attn", call.qkv, {"metadata": made(mask_mode=4, win_left=2), **window}, ValueError, "win_left"
    )
    forward_only = made(is_grad_enabled=False)
    OPS.flash_attn(*call.qkv, metadata=forward_only)
    args = (*call.qkv, out, out, lse)
    refuses("flash_attn_grad", args, {"metadata": forward_only}, ValueError, "is_grad_enabled")
    for broken in (made()[:-1], made()[:100], torch.cat([made(), made()])):
        refuses("flash_attn_grad", args, {"metadata": broken}, ValueError, "metadata must")


def test_pc49_corrupt_ranges_are_refused_before_anything_is_written(make_call):
    call = make_call(lengths_q=(300, 300))
    sizes = {"batch_size": 2, "max_seqlen_q": 300, "max_seqlen_kv": 300, "is_grad_enabled": True}
    words = fag_torch.flash_attn_metadata(4, 2, 16, **sizes)
    out, lse = OPS.flash_attn(*call.qkv, return_softmax_lse=True)
    start = int(words[7])
    for word in (start + 8, start + 9):  # first tiles of the first two cores
        broken = words.clone()
        broken[word] += 1
        with pytest.raises(ValueError, match="metadata"):
            fag_torch.flash_attn_grad(*call.qkv, out, out, lse, metadata=broken)


def test_metadata_from_the_previous_batch(make_call):
    call = make_call("TND", (3, 4))
    layouts = {"layout_q": "TND", "layout_kv": "TND", "layout_out": "TND"}
    cu = i32(0, 4, 7)
    words = fag_torch.flash_attn_metadata(4, 2, 16, cu_seqlens_q=cu, cu_seqlens_kv=cu, **layouts)
    refuses("flash_attn", call.qkv, {**call.raw, "metadata": words}, ValueError, "cu_seqlens")


# ---- what only the Python functions see
# -------------------------------------------------------------------------

FUNCTIONS = ("flash_attention", "flash_attn", "flash_attn_grad")


def arguments_of(make_call, name):
    call = make_call()
    if name != "flash_attn_grad":
        return list(call.qkv)
    out, lse = OPS.flash_attn(*call.qkv, return_softmax_lse=True)
    return [*call.qkv, out, out, lse]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("max_seqlen_q", torch.tensor(5), "max_seqlen_q must be an int, got Tensor"),
        ("max_seqlen_kv", torch.tensor([5]), "max_seqlen_kv must be an int, got Tensor"),
        ("max_seqlen_q", 5.0, "max_seqlen_q must be an int, got float 5.0"),
        ("win_left", True, "win_left must be an int, got bool"),
        ("softmax_scale", torch.tensor(0.5), "softmax_scale must be a float, got Tensor"),
        ("softmax_scale", "0.5", "softmax_scale must be a float, got str"),
        ("mask_mode", 3.0, "mask_mode must be a MaskMode, its int or its name, got float"),
        ("sinks", [0.0] * 4, "sinks must be a tensor or None, got list"),
        ("seqused_q", np.array([5, 5], np.int32), "seqused_q must be a tensor or None, got ndarray"),
        ("metadata", np.zeros(8192, np.int32), "metadata must be a tensor or None, got ndarray"),
    ],
)
def test_wrong_kinds_are_type_errors_by_name(make_call, name, argument, value, message):
    with pytest.raises(TypeError, match=re.escape(f"{name}: {message}")):
        getattr(fag_torch, name)(*arguments_of(make_call, name), **{argument: value})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inputs_that_are_no_tensors(make_call, name):
    arguments = arguments_of(make_call, name)
    names = ("q", "k", "v", "dout", "attn_out", "softmax_lse")
    for i in range(len(arguments)):
        changed = [a.numpy() if i == j else a for j, a in enumerate(arguments)]
        with pytest.raises(TypeError, match=f"{name}: {names[i]} must be a tensor, got ndarray"):
            getattr(fag_torch, name)(*changed)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unknown_mask_names(make_call, name):
    with pytest.raises(ValueError, match=f"{name}: mask_mode must be NO_MASK .*, got 'diagonal'"):
        getattr(fag_torch, name)(*arguments_of(make_call, name), mask_mode="diagonal")


def test_front_speaks_of_itself(make_call):
    call = make_call()
    with pytest.raises(ValueError, match="flash_attention: seqused_q must have B elements"):
        fag_torch.flash_attention(*call.qkv, seqused_q=i32(1))
    with pytest.raises(ValueError, match="flash_attention: layout must be BSND, BNSD or TND"):
        fag_torch.flash_attention(*call.qkv, layout="BNDS")
    with pytest.raises(TypeError, match="flash_attention: layout must be a layout name"):
        fag_torch.flash_attention(*call.qkv, layout=3)


def test_metadata_function_refuses_by_name():
    sizes = {"batch_size": 2, "max_seqlen_q": 5, "max_seqlen_kv": 5}
    for change, kind, message in (
        ({"max_seqlen_q": torch.tensor(5)}, TypeError, "max_seqlen_q must be an int"),
        ({"batch_size": 70000}, ValueError, "batch_size must be in -1..65535, got 70000"),
        ({"batch_size": None}, ValueError, "batch_size must be given"),
        ({"mask_mode": "diagonal"}, ValueError, "mask_mode must be"),
        ({"cu_seqlens_q": i32(0, 5)}, ValueError, "cu_seqlens_q must be None with layout BSND"),
        ({"seqused_q": [1, 2]}, TypeError, "seqused_q must be a tensor or None, got list"),
        ({"seqused_q": torch.zeros(2, dtype=torch.int64)}, TypeError, "seqused_q must be int32, got int64"),
        ({"head_dim_v": 32}, ValueError, "head_dim_v must be a head dim Dv in 1..D"),
    ):
        with pytest.raises(kind, match=re.escape(f"flash_attn_metadata: {message}")):
            fag_torch.flash_attn_metadata(4, 2, 16, **{**sizes, **change})
    with pytest.raises(ValueError, match="num_heads_q must be a multiple of num_heads_kv"):
        fag_torch.flash_attn_metadata(6, 4, 16, **sizes)
    with pytest.raises(RuntimeError, match="flash_attn_metadata: num_heads_q must be a multiple"):
        OPS.flash_attn_metadata(6, 4, 16, **sizes)


def test_batch_limit(make_call):
    q = torch.zeros(70000, 1, 1, 1)
    refuses("flash_attn", (q, q, q), {}, ValueError, "q must have a batch B of at most 65535, got B=70000")


def test_refused_calls_allocate_and_write_nothing(make_call, monkeypatch):
    """Errors come before any output is written."""
    from fag_torch import cpu

    monkeypatch.setattr(cpu.abi, "forward", lambda *a, **k: pytest.fail("ran"))
    call = make_call()
    for change in ({"sinks": torch.zeros(3)}, {"softmax_scale": float("nan")}, {"metadata": i32(0)}):
        with pytest.raises(ValueError, match="flash_attn"):
            fag_torch.flash_attn(*call.qkv, **change)


@pytest.mark.parametrize("is_direct", [True, False])
def test_python_functions_refuse_ints_that_the_schema_cannot_hold(is_direct):
    q = torch.zeros(1, 4, 2, 8, requires_grad=not is_direct)
    with pytest.raises(TypeError, match="flash_attn: max_seqlen_q must be an int, got NoneType None"):
        fag_torch.flash_attn(q, q, q, max_seqlen_q=None)
    with pytest.raises(ValueError, match=f"flash_attn: win_left must be in .*, got {2**70}"):
        fag_torch.flash_attn(q, q, q, win_left=2**70)
    with pytest.raises(ValueError, match=f"flash_attn: mask_mode must be NO_MASK .*, got {2**70}"):
        fag_torch.flash_attn(q, q, q, mask_mode=2**70)


@pytest.mark.parametrize("value", ["no", None, [True], torch.tensor([True, False])])
def test_a_flag_is_true_or_false(make_call, value):
    name = type(value).__name__
    with pytest.raises(TypeError, match=f"flash_attn: return_softmax_lse must be a bool, got {name}"):
        fag_torch.flash_attn(*make_call().qkv, return_softmax_lse=value)
