"""Attention on an NPU for tests: calls are described, measured and bounded as in tests/integration.

Inputs are made on the host and copied; results come back before they are compared.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parent.parent / "integration"))

import bound
import harness
import torch
import torch_npu  # noqa: F401
from harness import INT32_ARGUMENTS, Inputs
from oracle import Call
from torch import Tensor

import fag_torch

OPS = torch.ops.cann_ops_transformer
ROUTES = ("aclnn", "ascend950")


class Result(NamedTuple):
    """Results on the device; dsinks from the front only."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None


def carry(inputs: Inputs, device: str = "npu") -> Inputs:
    """The inputs on a device."""
    return Inputs(*(None if x is None else x.to(device) for x in inputs))


def lengths(call: Call, device: str = "npu") -> dict[str, Tensor]:
    """The length tensors of a call on a device."""
    return {
        name: harness.int32(getattr(call, name)).to(device)
        for name in INT32_ARGUMENTS
        if getattr(call, name) is not None
    }


def arguments(call: Call, d: int, device: str = "npu") -> dict[str, Any]:
    """Keyword arguments of both raw operators."""
    return harness.op_arguments(call, d) | lengths(call, device)


def run(call: Call, inputs: Inputs, given: dict[str, Any] | None = None, **extra: Any) -> Result:
    """Both raw operators on inputs that lie on a device; `given` are their arguments(), if made already."""
    given = (arguments(call, inputs.q.shape[-1], str(inputs.q.device)) if given is None else given) | extra
    out, lse = OPS.flash_attn(*inputs[:3], sinks=inputs.sinks, return_softmax_lse=True, **given)
    gradients = OPS.flash_attn_grad(*inputs[:4], out, lse, sinks=inputs.sinks, **given)
    return Result(out, lse, *gradients)


def run_front(call: Call, inputs: Inputs, dlse: Tensor | None = None, **extra: Any) -> Result:
    """flash_attention and its backward on inputs that lie on a device."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in (*inputs[:3], inputs.sinks)]
    given = harness.front_arguments(call) | lengths(call, str(inputs.q.device)) | extra
    out, lse = fag_torch.flash_attention(*leaves[:3], sinks=leaves[3], return_lse=True, **given)
    heads, upstream = ([out], [inputs.dout]) if dlse is None else ([out, lse], [inputs.dout, dlse])
    torch.autograd.backward(heads, upstream)
    return Result(out.detach(), lse.detach(), *(None if leaf is None else leaf.grad for leaf in leaves))


def assert_right(call: Call, inputs: Inputs, result: Result, dlse: Tensor | None = None) -> Result:
    """Results are within the bound of the float64 reference; gives them on the host.

    The wait is the only one: nothing before it may rely on another.
    """
    torch.npu.synchronize(result.out.device)
    host = Result(*(None if x is None else x.cpu() for x in result))
    inputs = Inputs(*(None if x is None else x.cpu() for x in inputs))
    bound.assert_forward(call, inputs, host.out, host.lse)
    bound.assert_gradients(
        call, inputs, host.out, host.lse, (host.dq, host.dk, host.dv), host.dsinks,
        None if dlse is None else dlse.cpu(),
    )  # fmt: skip
    return host


def assert_same(a: Result, b: Result, what: str = "") -> None:
    """Two results agree bit for bit."""
    torch.npu.synchronize()
    harness.assert_same_bits(*([None if x is None else x.cpu() for x in r] for r in (a, b)), what)
