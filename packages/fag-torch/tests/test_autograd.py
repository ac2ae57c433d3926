"""Gradients of the front: right, for what is asked, once; and refusals of every other kind of derivative."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.gradcheck import gradcheck
from torch.utils.checkpoint import checkpoint

import fag_torch
from fag_torch import flash_attention, flash_attn, flash_attn_grad

# float32 finite differences: eps 1e-2 makes the difference quotient right to about 1e-4 of truncation and
# 1e-5 of rounding for inputs of size 1, so 2e-3 leaves an order of magnitude.
GRADCHECK = {"eps": 1e-2, "atol": 2e-3, "rtol": 2e-3, "nondet_tol": 0.0}


@pytest.fixture
def _quiet_gradcheck():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not a double precision.*")
        yield


@pytest.mark.usefixtures("_quiet_gradcheck")
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"mask_mode": 3, "lengths_kv": (6, 6)},
        {"mask_mode": 3, "lengths_kv": (3, 3)},  # rows without keys
        {"mask_mode": 4, "window": (1, 1)},
        {"n1": 4, "n2": 1, "dv": 3},
    ],
    ids=["no-mask", "causal", "causal-rows-without-keys", "window", "gqa4-dv3"],
)
def test_gradcheck_for_q_k_v_and_through_the_lse(make_call, layout, change):
    call = make_call(layout, (4, 4), d=6, **change).requiring_grad()

    def function(q, k, v):
        out, lse = flash_attention(q, k, v, **call.front, return_lse=True)
        return out, lse.nan_to_num(0.0, 0.0, 0.0)  # rows without keys have lse -inf

    assert gradcheck(function, call.qkv, **GRADCHECK)


@pytest.mark.usefixtures("_quiet_gradcheck")
@pytest.mark.parametrize(
    "change", [{}, {"mask_mode": 3, "lengths_kv": (2, 2)}], ids=["no-mask", "sink-only-rows"]
)
def test_gradcheck_for_sinks_and_through_the_lse(make_call, layout, change):
    call = make_call(layout, (4, 4), d=6, sinks=True, **change).requiring_grad()
    front = dict(call.front)
    sinks = front.pop("sinks")

    def function(q, k, v, sinks):
        return flash_attention(q, k, v, sinks=sinks, **front, return_lse=True)

    assert gradcheck(function, (*call.qkv, sinks), **GRADCHECK)


def test_gradients_match_float64_autograd(call, reference):
    leaf = call.requiring_grad()
    out, lse = flash_attention(*leaf.qkv, **leaf.front, return_lse=True)
    other = call.requiring_grad()
    expected, expected_lse = reference(other)
    if not call.q.numel() and not call.k.numel():
        expected = expected + other.q.sum()  # the reference saw no tensor at all
    weight, weight_lse = torch.randn(out.shape), torch.randn(lse.shape)
    for o, l in ((out, lse), (expected, expected_lse)):
        ((o * weight).sum() + (l.masked_fill(l == -torch.inf, 0.0) * weight_lse).sum()).backward()
    tolerance = 3e-2 if call.q.dtype is torch.bfloat16 else 1e-4
    pairs = list(zip(leaf.qkv, other.qkv, strict=True))
    if "sinks" in leaf.front:
        pairs.append((leaf.front["sinks"], other.front["sinks"]))
    for ours, theirs in pairs:
        want = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(ours.grad, want, rtol=tolerance, atol=tolerance)


def test_pc04_expanded_upstream_gradient(make_call, layout):
    """pc04: out.sum().backward() hands the kernel one element with strides 0."""
    call = make_call(layout, (5,), n1=2, n2=2, d=8, dtype=torch.bfloat16, mask_mode=3)
    q, k, v = torch.zeros_like(call.q), torch.ones_like(call.k), torch.ones_like(call.v)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    flash_attention(*leaves, **call.front).sum().backward()
    column = torch.tensor([2.28333, 1.28333, 0.78333, 0.45, 0.2]).to(torch.bfloat16)
    axis = 1 if layout == "BSND" else 2 if layout == "BNSD" else 0
    shape = [1] * v.ndim
    shape[axis] = 5
    assert torch.equal(v.grad, column.view(shape).expand(v.shape))
    assert not q.grad.any()
    assert not k.grad.any()
    raw = call.raw
    with torch.no_grad():
        out, lse = flash_attn(q, k, v, softmax_scale=0.0, return_softmax_lse=True, **raw)
        ones = torch.ones((), dtype=torch.bfloat16).expand(out.shape)
        for got, want in zip(flash_attn_grad(q, k, v, ones, out, lse, **raw), leaves, strict=True):
            assert torch.equal(got, want.grad)
        for got, want in zip(
            flash_attn_grad(q, k, v, ones.contiguous(), out, lse, **raw), leaves, strict=True
        ):
            assert torch.equal(got, want.grad)


def test_pc35_inputs_are_left_alone(make_call, layout):
    """pc35: nothing is written into inputs, and a second backward gives the same bits."""
    call = make_call(layout, (9, 9), mask_mode=3, sinks=True)
    out, lse = flash_attn(*call.qkv, return_softmax_lse=True, **call.raw)
    inputs = [*call.qkv, torch.randn_like(out), out, lse, call.raw["sinks"]]
    copies = [t.clone() for t in inputs]
    versions = [t._version for t in inputs]
    first = flash_attn_grad(*inputs[:6], **call.raw)
    second = flash_attn_grad(*inputs[:6], **call.raw)
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, inputs, copies))
    assert [t._version for t in inputs] == versions
    leaf = call.requiring_grad()
    out = flash_attention(*leaf.qkv, **leaf.front)
    upstream = torch.randn_like(out)
    grads = [torch.autograd.grad(out, leaf.qkv, upstream, retain_graph=True) for _ in range(2)]
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("edited", ["out", "q", "v"])
def test_pc35_edit_between_forward_and_backward_is_noticed(make_call, edited):
    leaf = make_call().requiring_grad()
    q, k, v = (t * 1.0 for t in leaf.qkv)
    out = flash_attention(q, k, v)
    loss = (out * 2).sum()
    {"out": out, "q": q, "v": v}[edited].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "wanted", [w for n in (1, 2, 3, 4) for w in itertools.combinations("qkvs", n)], ids="".join
)
def test_pc37_frozen_inputs(make_call, wanted):
    """pc37: gradients that were not asked for are None, the others the bits of the full run."""
    call = make_call(mask_mode=3, sinks=True)
    full = call.requiring_grad()
    flash_attention(*full.qkv, **full.front).square().sum().backward()
    expected = {"q": full.q, "k": full.k, "v": full.v, "s": full.front["sinks"]}
    part = call.requiring_grad()
    tensors = {"q": part.q, "k": part.k, "v": part.v, "s": part.front["sinks"]}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in wanted)
    flash_attention(*part.qkv, **part.front).square().sum().backward()
    for name, tensor in tensors.items():
        if name in wanted:
            assert torch.equal(tensor.grad, expected[name].grad)
        else:
            assert tensor.grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_pc37_forward_without_grad_gives_a_usable_lse(make_call, mode):
    leaf = make_call(mask_mode=3).requiring_grad()
    out, lse = flash_attention(*leaf.qkv, **leaf.front, return_lse=True)
    upstream = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaf.qkv, upstream)
    with mode():
        same, same_lse = flash_attention(*leaf.qkv, **leaf.front, return_lse=True)
        assert not same.requires_grad
        assert torch.equal(same_lse, lse)
        grads = flash_attn_grad(*leaf.qkv, upstream, same, same_lse, mask_mode=3)
    assert all(map(torch.equal, grads, expected))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_pc37_checkpointed_forward(make_call, use_reentrant):
    call = make_call("TND", (4, 7), mask_mode=3)
    plain, saved = call.requiring_grad(), call.requiring_grad()
    flash_attention(*plain.qkv, **plain.front).square().sum().backward()
    out = checkpoint(
        lambda q, k, v: flash_attention(q, k, v, **saved.front), *saved.qkv, use_reentrant=use_reentrant
    )
    out.square().sum().backward()
    for one, other in zip(plain.qkv, saved.qkv, strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("use_out", [True, False])
def test_pc38_loss_that_uses_the_lse(make_call, reference, use_out):
    """pc38: its gradient arrives, also where it is the only one."""
    call = make_call("BSND", (16,), n1=2, n2=2, d=32)
    leaf, other = call.requiring_grad(), call.requiring_grad()
    out, lse = flash_attention(*leaf.qkv, return_lse=True)
    (out.sum() * use_out + lse.sum() if use_out else lse.sum()).backward()
    expected, expected_lse = reference(other)
    (expected.sum() + expected_lse.sum() if use_out else expected_lse.sum()).backward()
    for ours, theirs in zip(leaf.qkv, other.qkv, strict=True):
        want = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(ours.grad, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pc34_autocast(make_call, dtype):
    """pc34: computes in the autocast dtype; each gradient has the dtype of its input."""
    call = make_call(mask_mode=3)
    q = call.q.clone().requires_grad_()
    k = call.k.to(dtype).requires_grad_()
    v = call.v.clone().requires_grad_()
    with torch.autocast("cpu", dtype):
        normed = torch.nn.functional.rms_norm(q, (q.shape[-1],))
        out, lse = flash_attention(normed, k, v, **call.front, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    (out.float().square().sum() + lse.sum()).backward()
    assert (q.grad.dtype, k.grad.dtype, v.grad.dtype) == (torch.float32, dtype, torch.float32)
    assert all(t.grad.abs().max() > 0 for t in (q, k, v))
    with (
        torch.autocast("cpu", dtype),
        pytest.raises(TypeError, match="q must be float16, bfloat16 or float32"),
    ):
        flash_attention(*(t.double() for t in call.qkv))
    with torch.autocast("cpu", dtype), pytest.raises(TypeError, match="k must have the dtype of q"):
        flash_attn(call.q, k, call.v)  # the raw operators do not take part in autocast


def test_metadata_without_the_backward_split_is_refused_before_the_forward(make_call):
    call = make_call()
    sizes = {"batch_size": 2, "max_seqlen_q": 5, "max_seqlen_kv": 5}
    words = fag_torch.flash_attn_metadata(4, 2, 16, **sizes)
    flash_attention(*call.qkv, metadata=words)
    with pytest.raises(ValueError, match="flash_attention: metadata .*is_grad_enabled"):
        flash_attention(*call.requiring_grad().qkv, metadata=words)


# ---- refusals
# -------------------------------------------------------------------------------------------------


def test_second_derivatives_are_refused(make_call):
    leaf = make_call(sinks=True).requiring_grad()
    out, lse = flash_attention(*leaf.qkv, **leaf.front, return_lse=True)
    for loss in (out.sum(), out.square().sum(), lse.sum()):
        inputs = (*leaf.qkv, leaf.front["sinks"])
        grads = torch.autograd.grad(loss, inputs, create_graph=True, retain_graph=True)
        for grad in grads:
            with pytest.raises(RuntimeError, match="flash_attention: second derivatives are not supported"):
                grad.square().sum().backward(retain_graph=True)


def test_second_derivatives_from_frozen_inputs_are_refused(make_call):
    """Only v is wanted, and dv of out.sum() is constant in v; then the gradient in q is asked for."""
    leaf = make_call().requiring_grad()
    (grad,) = torch.autograd.grad(flash_attention(*leaf.qkv).sum(), leaf.v, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        torch.autograd.grad(grad.sum(), leaf.q)


def test_backward_through_raw_results_is_refused(make_call):
    leaf = make_call().requiring_grad()
    out, lse = flash_attn(*leaf.qkv, return_softmax_lse=True)
    for result in (out, lse):
        with pytest.raises(RuntimeError, match="flash_attn: backward through its outputs.*flash_attention"):
            result.sum().backward(retain_graph=True)


FRONTS = {
    "flash_attention": lambda q, k, v: flash_attention(q, k, v),
    "flash_attn": lambda q, k, v: flash_attn(q, k, v)[0],
    "flash_attn_grad": lambda q, k, v: flash_attn_grad(q, k, v, q, q, q.new_zeros(2, 4, 5))[0],
}


@pytest.mark.parametrize("name", list(FRONTS))
@pytest.mark.parametrize("grad", [False, True])
def test_transforms_are_refused(make_call, name, grad):
    function = FRONTS[name]
    q, k, v = (make_call().requiring_grad() if grad else make_call()).qkv
    with pytest.raises(RuntimeError, match=f"{name}: torch.vmap is not supported"):
        torch.vmap(function, (0, None, None))(q[None], k, v)
    for transform in (
        lambda: torch.func.jvp(lambda x: function(x, k, v), (q,), (q,)),
        lambda: torch.func.vjp(lambda x: function(x, k, v), q),
        lambda: torch.func.grad(lambda x: function(x, k, v).sum())(q),
        lambda: torch.func.jacfwd(lambda x: function(x, k, v))(q),
        lambda: torch.func.jacrev(lambda x: function(x, k, v))(q),
    ):
        with pytest.raises(RuntimeError, match=f"{name}: .*not supported"):
            transform()
    with forward_ad.dual_level():
        for dual in ((forward_ad.make_dual(q, q), k, v), (q, k, forward_ad.make_dual(v, v))):
            with pytest.raises(RuntimeError, match=f"{name}: forward-mode AD .jvp. is not supported"):
                function(*dual)
            with torch.no_grad(), pytest.raises(RuntimeError, match="forward-mode AD"):
                function(*dual)
        function(q, k, v)


def test_batched_gradients_are_refused(make_call):
    leaf = make_call().requiring_grad()
    out = flash_attention(*leaf.qkv)
    with pytest.raises(RuntimeError, match="torch.vmap is not supported"):
        torch.autograd.grad(out, leaf.q, torch.ones(3, *out.shape), is_grads_batched=True)
