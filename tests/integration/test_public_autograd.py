"""Public cases about what autograd and the caller's tensors see: 4, 10, 34, 35, 37, 38."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import bound
import harness
import numpy as np
import oracle
import pytest
import torch
from harness import Api, Inputs
from oracle import CAUSAL, Call
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fag_torch

# ---- PC-04: an upstream gradient with strides of 0 -------------------------------------------------------

PC04_DV = (2.28333, 1.28333, 0.78333, 0.45, 0.2)


def pc04(layout: str) -> tuple[Call, Inputs]:
    call = harness.uniform(layout, 1, 5, 5, mask_mode=CAUSAL)
    return call, harness.ones_inputs(call, 1, 5, 5, 2, 2, 8)


def test_pc04_expanded_dout_is_a_dout_of_ones(api: Api, layout: str) -> None:
    call, inputs = pc04(layout)
    wanted = harness.run(api, call, inputs)
    expanded = torch.ones((), dtype=torch.bfloat16).expand(inputs.dout.shape)
    assert set(expanded.stride()) == {0}
    got = harness.run(api, call, inputs._replace(dout=expanded))
    harness.assert_same_bits(got, wanted)
    dv = harness.as_bsnd(call, got.dv, "kv")
    rounded = torch.tensor(PC04_DV, dtype=torch.bfloat16).double().numpy()
    np.testing.assert_array_equal(dv, np.broadcast_to(rounded[None, :, None, None], dv.shape))
    assert torch.count_nonzero(got.dq) == 0
    assert torch.count_nonzero(got.dk) == 0


def test_pc04_backward_of_a_sum(layout: str) -> None:
    call, inputs = pc04(layout)
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    fag_torch.flash_attention(q, k, v, **harness.front_arguments(call)).sum().backward()
    wanted = harness.run_front(call, inputs)
    harness.assert_same_bits([q.grad, k.grad, v.grad], wanted[2:5])
    assert torch.count_nonzero(v.grad) == v.grad.numel()


def test_expanded_inputs_of_any_kind_equal_their_copies(api: Api, layout: str) -> None:
    call = harness.uniform(layout, 2, 9, 11, mask_mode=CAUSAL)
    inputs = harness.random_inputs(call, 2, 9, 11, 4, 2, 16)
    for name in ("q", "k", "v", "dout"):
        x = getattr(inputs, name)
        for axis in range(x.dim()):
            view = x.narrow(axis, 0, 1).expand(x.shape)
            got = harness.run(api, call, inputs._replace(**{name: view}))
            wanted = harness.run(api, call, inputs._replace(**{name: view.contiguous()}))
            harness.assert_same_bits(got, wanted, f"{name} expanded along axis {axis}:")


# ---- PC-10: views ----------------------------------------------------------------------------------------


def view_wide_rows(x: Tensor) -> Tensor:
    """A slice of a buffer whose rows are 96 elements longer."""
    n, d = x.shape[-2:]
    buffer = torch.full((*x.shape[:-2], n * d + 96), float("nan"), dtype=x.dtype)
    buffer[..., 32 : 32 + n * d] = x.flatten(-2)
    return buffer[..., 32 : 32 + n * d].unflatten(-1, (n, d))


def view_swapped(x: Tensor) -> Tensor:
    """Storage in the order of the other axes: heads and rows swapped."""
    a, b = (-3, -2) if x.dim() > 2 else (-2, -1)
    return x.transpose(a, b).contiguous().transpose(a, b)


def view_step_2(x: Tensor) -> Tensor:
    """Last axis with stride 2."""
    buffer = torch.full((*x.shape, 2), float("nan"), dtype=x.dtype)
    buffer[..., 0] = x
    return buffer[..., 0]


def view_offset_1(x: Tensor) -> Tensor:
    """Contiguous, but starting at element 1 of its storage."""
    buffer = torch.full((x.numel() + 1,), float("nan"), dtype=x.dtype)
    buffer[1:] = x.flatten()
    return buffer[1:].view(x.shape)


def view_reversed_storage(x: Tensor) -> Tensor:
    """All axes of the storage in reverse order."""
    axes = tuple(reversed(range(x.dim())))
    return x.permute(axes).contiguous().permute(axes)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice-of-wide-rows": view_wide_rows,
    "heads-and-rows-swapped": view_swapped,
    "last-stride-2": view_step_2,
    "odd-offset": view_offset_1,
    "reversed-storage": view_reversed_storage,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "attn_out", "softmax_lse", "all"])
def test_pc10_views_give_the_bits_of_their_copies(api: Api, layout: str, name: str, view: str) -> None:
    call = harness.uniform(layout, 2, 33, 49, mask_mode=CAUSAL)
    inputs = harness.random_inputs(call, 2, 33, 49, 4, 2, 64)
    wanted = harness.run(api, call, inputs)
    assert all(torch.count_nonzero(x) > 0 for x in wanted[2:])
    tensors = {**inputs._asdict(), "attn_out": wanted.out, "softmax_lse": wanted.lse}
    chosen = ["q", "k", "v", "dout", "attn_out", "softmax_lse"] if name == "all" else [name]
    for each in chosen:
        tensors[each] = VIEWS[view](tensors[each])
        assert torch.equal(
            tensors[each], {**inputs._asdict(), "attn_out": wanted.out, "softmax_lse": wanted.lse}[each]
        )
    before = {each: tensors[each].clone() for each in chosen}
    viewed = Inputs(tensors["q"], tensors["k"], tensors["v"], tensors["dout"])
    harness.assert_same_bits(harness.run_forward(api, call, viewed), wanted[:2], "forward:")
    got = harness.run_backward(api, call, viewed, tensors["attn_out"], tensors["softmax_lse"])
    harness.assert_same_bits(got, wanted[2:], "backward:")
    assert all(x.is_contiguous() for x in got)
    for each in chosen:
        harness.assert_same_bits([tensors[each]], [before[each]], f"input {each} changed:")


def test_pc10_slices_of_one_packed_tensor(api: Api, layout: str) -> None:
    call = harness.uniform(layout, 2, 33, 33, mask_mode=CAUSAL)
    shape = harness.shapes(call, 2, 33, 33, 4, 4, 64, 64)["q"]
    qkv = torch.randn(*shape[:-1], 3, 64).bfloat16()
    q, k, v = qkv.unbind(-2)
    dout = torch.randn(shape).bfloat16()
    inputs = Inputs(q, k, v, dout)
    wanted = harness.run(api, call, Inputs(*(x.contiguous() for x in inputs[:4])))
    harness.assert_same_bits(harness.run(api, call, inputs), wanted)


def test_pc10_lengths_and_sinks_may_be_views(api: Api) -> None:
    call = harness.packed((5, 17, 3))
    inputs = harness.random_inputs(call, n1=4, n2=2, d=16, with_sinks=True)
    wanted = harness.run(api, call, inputs)
    assert inputs.sinks is not None
    cu = torch.tensor([[c, -7] for c in (0, 5, 22, 25)], dtype=torch.int32)[:, 0]
    sinks = view_step_2(inputs.sinks)
    got = harness.run(api, call, inputs._replace(sinks=sinks), cu_seqlens_q=cu, cu_seqlens_kv=cu)
    harness.assert_same_bits(got, wanted)


# ---- PC-34: mixed types ----------------------------------------------------------------------------------

MIXED = {
    "v": ("v", torch.float16, "float16", "bfloat16"),
    "k": ("k", torch.float32, "float32", "bfloat16"),
    "dout": ("dout", torch.float32, "float32", "bfloat16"),
    "attn_out": ("attn_out", torch.float16, "float16", "bfloat16"),
    "softmax_lse": ("softmax_lse", torch.bfloat16, "bfloat16", "float32"),
    "sinks": ("sinks", torch.bfloat16, "bfloat16", "float32"),
    "q-float64": ("q", torch.float64, "float64", "float16"),
    "q-int": ("q", torch.int32, "int32", "float16"),
    "q-fp8": ("q", torch.float8_e4m3fn, "float8_e4m3fn", "float16"),
}


@pytest.mark.parametrize("which", MIXED)
def test_pc34_refuses_mixed_types(api: Api, layout: str, which: str) -> None:
    name, dtype, got, other = MIXED[which]
    if api is harness.NUMPY and which == "q-fp8":
        pytest.skip("torch has no NumPy view of float8")
    call = harness.uniform(layout, 1, 3, 5)
    inputs = harness.random_inputs(call, 1, 3, 5, 2, 1, with_sinks=True)
    out, lse = harness.run_forward(api, call, inputs)
    tensors = {**inputs._asdict(), "attn_out": out, "softmax_lse": lse}
    tensors[name] = tensors[name].to(dtype)
    wrong = Inputs(*(tensors[each] for each in ("q", "k", "v", "dout", "sinks")))
    pattern = rf"(?s)\b{{op}}: {name}\b(?=.*got {got})(?=.*{other})"
    with pytest.raises(api.type_error, match=pattern.format(op="flash_attn_grad")):
        harness.run_backward(api, call, wrong, tensors["attn_out"], tensors["softmax_lse"])
    if name in ("q", "k", "v", "sinks"):
        with pytest.raises(api.type_error, match=pattern.format(op="flash_attn")):
            harness.run_forward(api, call, wrong)


def test_pc34_all_float64_is_refused(api: Api, layout: str) -> None:
    call = harness.uniform(layout, 1, 3, 5)
    inputs = harness.random_inputs(call, 1, 3, 5, 2, 1, dtype=torch.float64)
    with pytest.raises(api.type_error, match=harness.refusal("flash_attn", "q", "float64")):
        harness.run_forward(api, call, inputs)


def test_pc34_front_follows_autocast(layout: str) -> None:
    """Under autocast norms give float32 and products bfloat16: the front works in bfloat16, and every input
    gets a gradient of its own type."""
    call = harness.uniform(layout, 2, 33, 33, mask_mode=CAUSAL)
    inputs = harness.random_inputs(call, 2, 33, 33, 2, 2, 64, dtype=torch.float32)
    q, k = (x.clone().requires_grad_() for x in inputs[:2])
    v = inputs.v.bfloat16().requires_grad_()
    norm = torch.nn.RMSNorm(64)
    with torch.autocast("cpu", torch.bfloat16):
        out = fag_torch.flash_attention(norm(q), norm(k), v, **harness.front_arguments(call))
    assert out.dtype == torch.bfloat16
    (out.float() * inputs.dout).sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.dtype == x.dtype
        assert torch.count_nonzero(x.grad) > 0
    with torch.no_grad():
        rounded = Inputs(norm(q).bfloat16(), norm(k).bfloat16(), v.detach(), inputs.dout.bfloat16())
    wanted = harness.run_front(call, rounded)
    harness.assert_same_bits([out.detach(), v.grad], [wanted.out, wanted.dv])


def test_pc34_raw_operators_do_not_cast(layout: str) -> None:
    call = harness.uniform(layout, 1, 3, 5)
    inputs = harness.random_inputs(call, 1, 3, 5, 2, 1)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(RuntimeError, match=r"flash_attn: v .*got float32"),
    ):
        harness.run_forward(harness.TORCH_OPS, call, inputs._replace(v=inputs.v.float()))


# ---- PC-35: inputs stay as they are ----------------------------------------------------------------------


def test_pc35_operators_leave_their_inputs_alone(api: Api, layout: str) -> None:
    call = harness.uniform(layout, 2, 33, 49, mask_mode=CAUSAL)
    inputs = harness.random_inputs(call, 2, 33, 49, 4, 2, 64, with_sinks=True)
    out, lse = harness.run_forward(api, call, inputs)
    held = [*inputs, out, lse]
    copies, versions = [x.clone() for x in held], [x._version for x in held]
    first = harness.run_backward(api, call, inputs, out, lse)
    second = harness.run_backward(api, call, inputs, out, lse)
    harness.assert_same_bits(second, first)
    assert torch.count_nonzero(first[0]) > 0
    harness.assert_same_bits(held, copies)
    assert [x._version for x in held] == versions
    pointers = [x.untyped_storage().data_ptr() for x in (*held, *first, *second)]
    assert len(set(pointers)) == len(pointers), "outputs share storage with inputs or with each other"


def test_pc35_second_backward_over_a_kept_graph(layout: str) -> None:
    call = harness.uniform(layout, 2, 33, 49, mask_mode=CAUSAL)
    inputs = harness.random_inputs(call, 2, 33, 49, 4, 2, 64)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = fag_torch.flash_attention(*leaves, **harness.front_arguments(call))
    first = torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
    second = torch.autograd.grad(out, leaves, inputs.dout)
    assert torch.count_nonzero(first[0]) > 0
    harness.assert_same_bits(second, first)


@pytest.mark.parametrize("changed", ["out", "lse", "q", "k", "v", "sinks"])
def test_pc35_refuses_tensors_changed_before_the_backward(layout: str, changed: str) -> None:
    call = harness.uniform(layout, 1, 5, 7)
    inputs = harness.random_inputs(call, 1, 5, 7, 2, 1, with_sinks=True)
    held: dict[str, Tensor] = {}
    for name in ("q", "k", "v", "sinks"):
        held[name] = getattr(inputs, name).clone().requires_grad_() * 1  # not a leaf, so that it may change
    held["out"], held["lse"] = fag_torch.flash_attention(
        held["q"], held["k"], held["v"], sinks=held["sinks"], return_lse=True, **harness.front_arguments(call)
    )
    loss = (held["out"].float() * inputs.dout).sum()
    with torch.no_grad():
        held[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- PC-37: what asks for no gradient gets none ----------------------------------------------------------


@pytest.mark.parametrize("needs", ["".join(c) for n in (1, 2, 3) for c in itertools.combinations("qkvs", n)])
def test_pc37_every_subset_of_inputs(layout: str, needs: str) -> None:
    call = harness.uniform(layout, 2, 33, 49, mask_mode=CAUSAL)
    inputs = harness.random_inputs(call, 2, 33, 49, 4, 2, 64, with_sinks=True)
    full = harness.run_front(call, inputs)
    got = harness.run_front(call, inputs, needs=needs)
    for letter, x, wanted in zip("qkvs", got[2:], full[2:], strict=True):
        if letter in needs:
            assert torch.count_nonzero(wanted) > 0
            harness.assert_same_bits([x], [wanted], letter)
        else:
            assert x is None, f"{letter} asked for no gradient and got one"


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=lambda c: c.__name__)
def test_pc37_forward_without_grad_gives_a_usable_lse(layout: str, context: Callable[[], object]) -> None:
    call = harness.uniform(layout, 2, 33, 49, mask_mode=CAUSAL)
    inputs = harness.random_inputs(call, 2, 33, 49, 4, 2, 64)
    wanted = harness.run_front(call, inputs)
    with context():
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        out, lse = fag_torch.flash_attention(*leaves, return_lse=True, **harness.front_arguments(call))
        assert not out.requires_grad
        got = harness.run_backward(harness.TORCH_OPS, call, inputs, out, lse)
        harness.assert_same_bits([out, lse, *got], wanted[:5])


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensors", "reentrant"])
def test_pc37_checkpointed_gradients_have_the_same_bits(layout: str, reentrant: bool) -> None:
    call = harness.uniform(layout, 2, 33, 49, mask_mode=CAUSAL)
    inputs = harness.random_inputs(call, 2, 33, 49, 4, 2, 64)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fag_torch.flash_attention(q, k, v, **harness.front_arguments(call))

    checkpoint(layer, *leaves, use_reentrant=reentrant).backward(inputs.dout)
    harness.assert_same_bits([x.grad for x in leaves], harness.run_front(call, inputs)[2:5])


# ---- PC-38: a loss that uses the lse ---------------------------------------------------------------------


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("s2", [16, 12], ids=["all-rows-see-keys", "four-rows-see-none"])
@pytest.mark.parametrize("uses", ["lse", "out-and-lse"])
def test_pc38_gradient_through_the_lse(
    layout: str, dtype: torch.dtype, uses: str, s2: int, with_sinks: bool
) -> None:
    call = harness.uniform(layout, 2, 16, s2, mask_mode=CAUSAL)
    inputs = harness.random_inputs(call, 2, 16, s2, 4, 2, 32, dtype=dtype, with_sinks=with_sinks)
    if uses == "lse":
        inputs = inputs._replace(dout=torch.zeros_like(inputs.dout))
    dlse = torch.randn(oracle.lse_shape(inputs.q, layout))
    got = harness.run_front(call, inputs, dlse)
    reference = bound.assert_gradients(call, inputs, got.out, got.lse, got[2:5], got.dsinks, dlse)
    assert np.abs(reference.dq).max() > 0.01
    if uses == "lse":
        assert torch.count_nonzero(got.dv) == 0  # the lse does not know v


def test_pc38_loss_of_the_lse_alone(layout: str) -> None:
    """The other output is never used: autograd hands the backward no gradient for it at all."""
    call = harness.uniform(layout, 1, 16, 16)
    inputs = harness.random_inputs(call, 1, 16, 16, 2, 2, 32)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    _, lse = fag_torch.flash_attention(*leaves, return_lse=True, **harness.front_arguments(call))
    lse.sum().backward()
    zeros = inputs._replace(dout=torch.zeros_like(inputs.dout))
    wanted = harness.run_front(call, zeros, torch.ones_like(lse.detach()))
    assert torch.count_nonzero(leaves[0].grad) > 0
    harness.assert_same_bits([leaves[0].grad, leaves[1].grad], wanted[2:4])
    assert leaves[2].grad is None or torch.count_nonzero(leaves[2].grad) == 0


def test_pc38_partial_attentions_merge(layout: str) -> None:
    """Two halves of the keys, merged by their lse, have the output and the gradient of the whole."""
    call = harness.uniform(layout, 1, 16, 24)
    inputs = harness.random_inputs(call, 1, 16, 24, 2, 2, 32, dtype=torch.float32)
    whole = harness.run_front(call, inputs)
    half = harness.uniform(layout, 1, 16, 12)
    axis = 2 if layout == "BNSD" else (1 if layout == "BSND" else 0)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    parts = []
    for start in (0, 12):
        k, v = (x.narrow(axis, start, 12) for x in leaves[1:])
        parts.append(
            fag_torch.flash_attention(leaves[0], k, v, return_lse=True, **harness.front_arguments(half))
        )
    weights = torch.softmax(torch.stack([lse for _, lse in parts]), dim=0)
    aligned = weights.unsqueeze(-1) if layout == "BNSD" else weights.transpose(-1, -2).unsqueeze(-1)
    out = sum(weight * part for weight, (part, _) in zip(aligned, parts, strict=True))
    out.backward(inputs.dout)
    for x, wanted in zip([out, *(leaf.grad for leaf in leaves)], [whole.out, *whole[2:5]], strict=True):
        assert oracle.relative_error(harness.to_float64(x), harness.to_float64(wanted)) < 2e-6


def test_lse_of_rows_without_keys_gives_no_gradient(layout: str) -> None:
    """lse = -inf there: an upstream gradient of any size, and NaN, changes nothing."""
    call = harness.uniform(layout, 1, 16, 12, mask_mode=CAUSAL)
    inputs = harness.random_inputs(call, 1, 16, 12, 2, 2, 32)
    dlse = torch.randn(oracle.lse_shape(inputs.q, layout))
    wanted = harness.run_front(call, inputs, dlse)
    keyless = wanted.lse == -math.inf
    assert keyless.any()
    for value in (1e30, math.inf, math.nan):
        harness.assert_same_bits(harness.run_front(call, inputs, dlse.masked_fill(keyless, value)), wanted)


# ---- refused derivatives ---------------------------------------------------------------------------------


def test_refuses_second_derivatives(layout: str) -> None:
    call = harness.uniform(layout, 1, 5, 5)
    inputs = harness.random_inputs(call, 1, 5, 5, 2, 2, dtype=torch.float32)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = fag_torch.flash_attention(*leaves, **harness.front_arguments(call))
    for loss in (out.sum(), (out * inputs.dout).sum(), (out**2).sum()):
        gradients = torch.autograd.grad(loss, leaves, create_graph=True, retain_graph=True)
        for gradient in gradients:
            with pytest.raises(RuntimeError, match="flash_attention.*second derivative"):
                torch.autograd.grad(gradient.sum(), leaves, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("op", ["flash_attn", "flash_attn_grad"])
@pytest.mark.parametrize("api", harness.TORCH_APIS, ids=lambda api: api.name)
def test_refuses_backward_through_raw_operators(api: Api, layout: str, op: str) -> None:
    call = harness.uniform(layout, 1, 5, 5)
    inputs = harness.random_inputs(call, 1, 5, 5, 2, 2)
    leaves = [x.clone().requires_grad_() for x in inputs[:4]]
    out, lse = harness.run_forward(api, call, Inputs(*leaves))
    results = (
        [out, lse]
        if op == "flash_attn"
        else harness.run_backward(api, call, Inputs(*leaves), out.detach(), lse.detach())
    )
    for result in results:
        with pytest.raises(RuntimeError, match="flash_attention"):
            result.sum().backward(retain_graph=True)
    assert all(x.grad is None for x in leaves)


def front_of(call: Call) -> Callable[..., Tensor]:
    return lambda q, k, v: fag_torch.flash_attention(q, k, v, **harness.front_arguments(call))


def raw_of(call: Call) -> Callable[..., Tensor]:
    return lambda q, k, v: harness.OPS.flash_attn(q, k, v, **harness.op_arguments(call, q.shape[-1]))[0]


@pytest.mark.parametrize("way", [front_of, raw_of], ids=["front", "raw"])
def test_refuses_vmap_and_jvp(layout: str, way: Callable[[Call], Callable[..., Tensor]]) -> None:
    call = harness.uniform(layout, 1, 5, 5)
    inputs = harness.random_inputs(call, 1, 5, 5, 2, 2, dtype=torch.float32)[:3]
    function = way(call)
    with pytest.raises(RuntimeError, match="flash_att.*vmap"):
        torch.vmap(function)(*(x[None] for x in inputs))
    with pytest.raises(RuntimeError, match="flash_att.*jvp"):
        torch.func.jvp(function, tuple(inputs), tuple(torch.ones_like(x) for x in inputs))
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)) for x in inputs]
        with pytest.raises(RuntimeError, match="flash_att.*jvp"):
            function(*duals)
