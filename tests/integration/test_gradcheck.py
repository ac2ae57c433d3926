"""torch.autograd.gradcheck of the front in float32: q, k, v, sinks, and through the lse.

eps 1e-2, atol 3e-3, rtol 2e-2. A central difference of a float32 function with step eps carries the rounding
of the loss over 2*eps, about 6e-8 * 10 / 2e-2 = 3e-5 per element, and eps^2 times a third derivative, about
1e-4 * a few: with the values near 1 used here both stay well below atol. (The right gradients are of order
0.1 to 1; a lost factor, row or mask shows as 1e-1.) The kernels' own accuracy is the business of
test_grid.py.
"""

from __future__ import annotations

import harness
import oracle
import pytest
import torch
from oracle import CAUSAL, NO_MASK, SLIDING_WINDOW
from torch import Tensor

import fag_torch

EPS, ATOL, RTOL = 1e-2, 3e-3, 2e-2
MASKS = {
    "full": {"mask_mode": NO_MASK},
    "causal": {"mask_mode": CAUSAL},
    "window": {"mask_mode": SLIDING_WINDOW, "win_left": 2, "win_right": 1},
}


@pytest.mark.parametrize("extra", ["plain", "seqused"])
@pytest.mark.parametrize("mask", MASKS)
def test_gradcheck(layout: str, mask: str, extra: str) -> None:
    lengths = {"seqused_q": (5, 3), "seqused_kv": (4, 6)} if extra == "seqused" else {}
    call = harness.uniform(layout, 2, 5, 6, **MASKS[mask], **lengths)
    inputs = harness.random_inputs(call, 2, 5, 6, 4, 2, 6, 4, torch.float32, factor=0.7, with_sinks=True)
    # The lse of unused rows is -inf: no difference quotient there, and no gradient either.
    used = harness.used_lse(call, inputs)
    weight = torch.randn(oracle.lse_shape(inputs.q, layout))

    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = fag_torch.flash_attention(
            q, k, v, sinks=sinks, return_lse=True, **harness.front_arguments(call)
        )
        return out, torch.where(used, lse, 0.0) * weight

    leaves = [x.clone().requires_grad_() for x in (*inputs[:3], inputs.sinks)]
    # The front works in float32 by design; gradcheck's warning about it is what the tolerances answer.
    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradcheck(function, leaves, eps=EPS, atol=ATOL, rtol=RTOL, fast_mode=False)


def test_gradcheck_can_fail(layout: str) -> None:
    """The tolerances above do notice a gradient that is 5 % off."""
    call = harness.uniform(layout, 1, 5, 6)
    inputs = harness.random_inputs(call, 1, 5, 6, 2, 2, 6, 6, torch.float32, factor=0.7)

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient * 1.05

    def function(v: Tensor) -> Tensor:
        return fag_torch.flash_attention(inputs.q, inputs.k, Wrong.apply(v), **harness.front_arguments(call))

    with pytest.warns(UserWarning, match="double precision"):
        assert not torch.autograd.gradcheck(
            function,
            [inputs.v.clone().requires_grad_()],
            eps=EPS,
            atol=ATOL,
            rtol=RTOL,
            raise_exception=False,
        )
