"""Shape functions: what Meta promises is what the CPU gives. Public case 21."""

from __future__ import annotations

from typing import Any

import harness
import oracle
import pytest
import torch
from harness import Inputs
from oracle import CAUSAL, Call
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fag_torch


def to_meta(x: Any) -> Any:
    """A tensor without data, of the same strides; anything else as it is."""
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def assert_promise_kept(promised: Any, got: Any, device: str = "meta") -> None:
    """Same number of outputs, and each of the same shape, dtype and strides."""
    promised, got = ((x,) if isinstance(x, Tensor) else x for x in (promised, got))
    assert len(promised) == len(got)
    for i, (a, b) in enumerate(zip(promised, got, strict=True)):
        assert a.shape == b.shape, f"output {i}"
        assert a.dtype == b.dtype, f"output {i}"
        assert a.stride() == b.stride(), f"output {i}"
        assert a.device.type == device, f"output {i}"


def swapped(x: Tensor) -> Tensor:
    """The same values on storage in the order of the other layout."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


VIEWS = {
    "contiguous": lambda inputs: inputs,
    "q-and-v-swapped": lambda inputs: inputs._replace(q=swapped(inputs.q), v=swapped(inputs.v)),
    "dout-expanded": lambda inputs: inputs._replace(
        dout=torch.ones((), dtype=inputs.q.dtype).expand(inputs.dout.shape)
    ),
    "all-swapped": lambda inputs: Inputs(*(swapped(x) for x in inputs[:4]), sinks=inputs.sinks),
}
SIZES = {"ordinary": (2, 9, 13), "b0": (0, 9, 13), "s1-0": (2, 0, 13), "s2-0": (2, 9, 0)}


def problem(layout: str, size: str, view: str, dtype: torch.dtype) -> tuple[Call, Inputs]:
    b, s1, s2 = SIZES[size]
    call = harness.uniform(layout, b, s1, s2, mask_mode=CAUSAL)
    return call, VIEWS[view](harness.random_inputs(call, b, s1, s2, 4, 2, 24, 16, dtype, with_sinks=True))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("view", VIEWS)
def test_pc21_meta_agrees_with_cpu(layout: str, dtype: torch.dtype, view: str, size: str) -> None:
    call, inputs = problem(layout, size, view, dtype)
    arguments = harness.op_arguments(call, 24) | {"sinks": inputs.sinks}
    on_meta = {name: to_meta(value) for name, value in arguments.items()}
    q, k, v, dout = (to_meta(x) for x in inputs[:4])
    for wants_lse in (False, True):
        got = harness.OPS.flash_attn(*inputs[:3], return_softmax_lse=wants_lse, **arguments)
        promised = harness.OPS.flash_attn(q, k, v, return_softmax_lse=wants_lse, **on_meta)
        assert_promise_kept(promised, got)
    out, lse = got
    assert lse.shape == oracle.lse_shape(inputs.q, layout)
    promised = harness.OPS.flash_attn_grad(q, k, v, dout, to_meta(out), to_meta(lse), **on_meta)
    got = harness.OPS.flash_attn_grad(*inputs[:4], out, lse, **arguments)
    assert_promise_kept(promised, got)
    assert all(x.is_contiguous() for x in got)


@pytest.mark.parametrize("view", VIEWS)
def test_pc21_fake_tensors_agree_with_cpu(layout: str, view: str) -> None:
    """As torch.compile sees it: fake CPU tensors, with the values of the lengths unknown."""
    call, inputs = problem(layout, "ordinary", view, torch.bfloat16)
    arguments = harness.op_arguments(call, 24) | {"sinks": inputs.sinks}
    got = harness.OPS.flash_attn(*inputs[:3], return_softmax_lse=True, **arguments)
    gradients = harness.OPS.flash_attn_grad(*inputs[:4], *got, **arguments)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in inputs[:4]]
        lengths = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        promised = harness.OPS.flash_attn(*fake[:3], return_softmax_lse=True, **lengths)
        assert_promise_kept(promised, got, "cpu")
        assert_promise_kept(harness.OPS.flash_attn_grad(*fake, *promised, **lengths), gradients, "cpu")


@pytest.mark.parametrize("wants_grad", [False, True], ids=["forward", "grad"])
def test_pc21_metadata_on_meta(layout: str, wants_grad: bool) -> None:
    call, inputs = problem(layout, "ordinary", "contiguous", torch.bfloat16)
    arguments = harness.metadata_arguments(call, inputs.q, inputs.k) | {"is_grad_enabled": wants_grad}
    arguments |= {"seqused_q": harness.int32((4, 9))}
    got = harness.OPS.flash_attn_metadata(4, 2, 24, **arguments)
    on_meta = {name: to_meta(value) for name, value in arguments.items()}
    promised = harness.OPS.flash_attn_metadata(4, 2, 24, **on_meta)
    assert promised.device.type == "meta"
    assert promised.dtype == got.dtype == torch.int32
    assert promised.dim() == got.dim() == 1
    assert promised.stride() == got.stride()


def test_pc21_front_on_meta(layout: str) -> None:
    call, inputs = problem(layout, "ordinary", "q-and-v-swapped", torch.bfloat16)
    wanted = harness.run_front(call, inputs)
    leaves = [to_meta(x).requires_grad_() for x in (*inputs[:3], inputs.sinks)]
    arguments = {name: to_meta(value) for name, value in harness.front_arguments(call).items()}
    out, lse = fag_torch.flash_attention(*leaves[:3], sinks=leaves[3], return_lse=True, **arguments)
    out.backward(to_meta(inputs.dout))
    assert_promise_kept([out.detach(), lse.detach()], wanted[:2])
    for leaf, gradient in zip(leaves, wanted[2:], strict=True):
        assert leaf.grad.shape == gradient.shape
        assert leaf.grad.dtype == gradient.dtype


def test_meta_refuses_what_cpu_refuses(layout: str) -> None:
    """Rules on shapes and scalars hold without data too, with the same words."""
    call, inputs = problem(layout, "ordinary", "contiguous", torch.bfloat16)
    arguments = harness.op_arguments(call, 24)
    wrong = {
        "win_left": ({"win_left": 5}, inputs),
        "mask_mode": ({"mask_mode": 1}, inputs),
        "v": ({}, inputs._replace(v=inputs.v.half())),
    }
    for name, (changes, tensors) in wrong.items():
        messages = []
        for move in (lambda x: x, to_meta):
            moved = {key: move(value) for key, value in (arguments | changes).items()}
            with pytest.raises(RuntimeError, match=f"flash_attn: {name}") as caught:
                harness.OPS.flash_attn(*(move(x) for x in tensors[:3]), **moved)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
