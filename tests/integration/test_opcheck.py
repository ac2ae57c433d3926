"""torch.library.opcheck on every operator, the internal ones too. Public case 24.

With warnings as errors, and with CI=1 as the case asks (torch turns the aliasing warning into an error
there).
"""

from __future__ import annotations

import warnings
from typing import Any

import harness
import oracle
import pytest
import torch
from harness import Inputs
from oracle import CAUSAL, NO_MASK, SLIDING_WINDOW, Call
from torch import Tensor

MASKS = {"full": (NO_MASK, -1, -1), "causal": (CAUSAL, -1, -1), "window": (SLIDING_WINDOW, 3, -1)}
SIZES = {"ordinary": (2, 9, 13), "s1-0": (2, 0, 13), "s2-0": (2, 9, 0), "empty-sequence": (3, 9, 13)}
EXTRAS = ("plain", "sinks", "seqused")
# Every mask at the ordinary size; the sizes that leave early do so before a mask is looked at.
PROBLEMS = [("ordinary", mask, extra) for mask in MASKS for extra in EXTRAS]
PROBLEMS += [(size, "causal", extra) for size in SIZES if size != "ordinary" for extra in EXTRAS]


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CI", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch's own tracing warns of itself; nothing of ours is excused by these two.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\..*")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\..*")
        yield


def problem(layout: str, mask: str, size: str, extra: str) -> tuple[Call, Inputs]:
    mode, left, right = MASKS[mask]
    b, s1, s2 = SIZES[size]
    window = {"mask_mode": mode, "win_left": left, "win_right": right}
    if size == "empty-sequence" and layout == "TND":
        call = harness.packed((4, 0, 5), (6, 7, 0), **window)
    else:
        used = (
            {"seqused_q": (min(4, s1),) * b, "seqused_kv": (0, *(min(7, s2),) * (b - 1))}
            if extra == "seqused"
            else {}
        )
        call = harness.uniform(layout, b, s1, s2, **window, **used)
    return call, harness.random_inputs(call, b, s1, s2, 4, 2, 8, 6, with_sinks=extra == "sinks")


def requiring_grad(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize(("size", "mask", "extra"), PROBLEMS, ids="-".join)
def test_pc24_opcheck_raw_operators(layout: str, mask: str, size: str, extra: str) -> None:
    call, inputs = problem(layout, mask, size, extra)
    arguments = harness.op_arguments(call, 8)
    torch.library.opcheck(
        harness.OPS.flash_attn.default,
        tuple(inputs[:3]),
        {**arguments, "sinks": inputs.sinks, "return_softmax_lse": True},
    )
    out, lse = harness.run_forward(harness.TORCH_OPS, call, inputs)
    torch.library.opcheck(
        harness.OPS.flash_attn_grad.default, (*inputs[:4], out, lse), {**arguments, "sinks": inputs.sinks}
    )


@pytest.mark.parametrize("is_grad_enabled", [False, True], ids=["forward", "grad"])
def test_pc24_opcheck_metadata(layout: str, is_grad_enabled: bool) -> None:
    call, inputs = problem(layout, "causal", "ordinary", "seqused")
    arguments = harness.metadata_arguments(call, inputs.q, inputs.k) | {"is_grad_enabled": is_grad_enabled}
    # The number of words depends on the lengths' values, which fake tensors do not have: a dynamic output.
    torch.library.opcheck(harness.OPS.flash_attn_metadata.default, (4, 2, 8), arguments)


def internal_arguments(call: Call) -> tuple[list[Tensor | None], dict[str, Any]]:
    """Length tensors and scalars of the internal operators."""
    lengths = [
        None if getattr(call, name) is None else harness.int32(getattr(call, name))
        for name in harness.INT32_ARGUMENTS
    ]
    scalars = {
        "softmax_scale": None,
        "mask_mode": call.mask_mode,
        "win_left": call.win_left,
        "win_right": call.win_right,
        "max_seqlen_q": -1,
        "max_seqlen_kv": -1,
        "layout": call.layout,
    }
    return lengths, scalars


@pytest.mark.parametrize(("size", "mask", "extra"), PROBLEMS, ids="-".join)
def test_pc24_opcheck_internal_operators(layout: str, mask: str, size: str, extra: str) -> None:
    """With inputs that require a gradient, so that the autograd registration is traced as well."""
    call, inputs = problem(layout, mask, size, extra)
    lengths, scalars = internal_arguments(call)
    q, k, v, sinks = requiring_grad(*inputs[:3], inputs.sinks)
    torch.library.opcheck(torch.ops.fag.attention_forward.default, (q, k, v, *lengths, sinks, None), scalars)
    out, lse = torch.ops.fag.attention_forward(*inputs[:3], *lengths, inputs.sinks, None, **scalars)
    for dlse in (None, torch.randn(lse.shape)):
        torch.library.opcheck(
            torch.ops.fag.attention_backward.default,
            (*inputs[:4], out, lse, dlse, *lengths, inputs.sinks, None),
            scalars,
        )


def test_pc24_no_output_shares_storage(layout: str) -> None:
    """Also on the early ways out: nothing to do, rows without keys, no lse wanted."""
    for size in SIZES:
        for extra in EXTRAS:
            call, inputs = problem(layout, "causal", size, extra)
            got = harness.run(harness.TORCH_OPS, call, inputs)
            front = harness.run_front(call, inputs)
            held = [x for x in (*inputs, *got, *front) if x is not None and x.numel() > 0]
            pointers = [x.untyped_storage().data_ptr() for x in held]
            assert len(set(pointers)) == len(pointers), (size, extra)


def test_pc24_grad_of_inputs_that_require_grad_is_defined(layout: str) -> None:
    """No fall-through warning, and the values of the run without."""
    call, inputs = problem(layout, "causal", "ordinary", "plain")
    out, lse = harness.run_forward(harness.TORCH_OPS, call, inputs)
    wanted = harness.run_backward(harness.TORCH_OPS, call, inputs, out, lse)
    leaves = Inputs(*requiring_grad(*inputs[:4]))
    got = harness.run_backward(harness.TORCH_OPS, call, leaves, out, lse)
    assert torch.count_nonzero(wanted[0]) > 0
    harness.assert_same_bits([x.detach() for x in got], wanted)


def test_lse_shapes_are_those_of_the_contract(layout: str) -> None:
    call, inputs = problem(layout, "full", "ordinary", "plain")
    _, lse = harness.run_forward(harness.TORCH_OPS, call, inputs)
    assert tuple(lse.shape) == oracle.lse_shape(inputs.q, layout)
