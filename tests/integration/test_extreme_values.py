"""Numbers at the ends of their types: late-training logits, subnormals, overflow of the type."""

from __future__ import annotations

import harness
import numpy as np
import oracle
import pytest
import torch
from harness import Api
from oracle import CAUSAL, NO_MASK

INF = float("inf")


@pytest.mark.parametrize("mode", [NO_MASK, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("size", [1e3, 1e9], ids=str)
def test_probabilities_never_exceed_1(api: Api, layout: str, mode: int, size: float) -> None:
    """At logits of 1e9 one float32 step of a score is 64: without a clamp P would be e^64. A row's P sums to
    about 1, so no column of dv exceeds the sum of its readers' |dout|."""
    call = harness.uniform(layout, 1, 64, 96, mask_mode=mode)
    inputs = harness.random_inputs(call, 1, 64, 96, 2, 1, 64)
    root = (size / 8) ** 0.5
    inputs = inputs._replace(q=inputs.q * root, k=inputs.k * root)
    got = harness.run(api, call, inputs)
    for x in got:
        assert torch.isfinite(x).all()
    limit = inputs.dout.double().abs().sum().item()
    assert 0 < got.dv.double().abs().max().item() <= limit
    # P is nearly one-hot: the output is a row of v, or a mixture of few.
    assert got.out.abs().max() <= 1.01 * inputs.v.abs().max()


@pytest.mark.parametrize("shift", [-64.0, -1.0, -1e9], ids=str)
def test_an_lse_that_is_too_small_is_clamped(api: Api, layout: str, shift: float) -> None:
    """lse below every score: exp(S - lse) would be above 1 and is taken as 1. The reference clamps too."""
    call = harness.uniform(layout, 1, 33, 40)
    inputs = harness.random_inputs(call, 1, 33, 40, 1, 1, 16, factor=0.3)
    out, lse = harness.run_forward(api, call, inputs)
    low = lse + shift - 10
    got = harness.run_backward(api, call, inputs, out, low)
    reference = oracle.backward(*(harness.to_float64(x) for x in (*inputs[:4], out, low)), call)
    for x, wanted in zip(got, reference[:3], strict=True):
        assert oracle.relative_error(harness.to_float64(x), wanted) < 1e-2
    assert oracle.relative_error(harness.to_float64(got[2][..., :1]), reference.dv[..., :1]) < 1e-2


def test_subnormal_inputs_count(api: Api, layout: str) -> None:
    """float16 numbers below 6e-5 are subnormal, and just as real."""
    call = harness.uniform(layout, 1, 9, 17)
    inputs = harness.random_inputs(call, 1, 9, 17, 2, 2, 16, dtype=torch.float16)
    inputs = inputs._replace(v=inputs.v * 2e-5, dout=inputs.dout)
    assert 0 < inputs.v.abs().max() < 1e-4
    got = harness.run(api, call, inputs)
    reference, _ = oracle.forward(*(harness.to_float64(x) for x in inputs[:3]), call)
    # Half of the last place of a subnormal float16 is 3e-8.
    np.testing.assert_allclose(harness.to_float64(got.out), reference, atol=7e-8)
    assert torch.count_nonzero(got.out) > 0


def test_gradients_beyond_float16_are_infinite_not_wrong(api: Api, layout: str) -> None:
    call = harness.uniform(layout, 1, 600, 1)
    inputs = harness.ones_inputs(call, 1, 600, 1, 1, 1, 8, torch.float16)
    got = harness.run(api, call, inputs._replace(dout=inputs.dout * 200))
    assert torch.all(got.dv == INF)  # 120000 > 65504
    got = harness.run(api, call, inputs._replace(dout=inputs.dout * 100))
    assert torch.all(got.dv == 60000)


def test_signed_zeros_and_scale_of_one(api: Api, layout: str) -> None:
    call = harness.uniform(layout, 1, 5, 7, softmax_scale=1.0)
    inputs = harness.random_inputs(call, 1, 5, 7, 1, 1, 8)
    got = harness.run(api, call, inputs._replace(q=-torch.zeros_like(inputs.q)))
    wanted = harness.run(api, call, inputs._replace(q=torch.zeros_like(inputs.q)))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_infinite_inputs_do_not_hang_or_crash(api: Api, layout: str, name: str) -> None:
    """Non-finite where they are visible: some NaN is right, and the rows that do not see them stay clean."""
    call = harness.uniform(layout, 2, 40, 40, mask_mode=CAUSAL)
    inputs = harness.random_inputs(call, 2, 40, 40, 2, 1, 16)
    x = getattr(inputs, name).clone()
    flat = x.view(-1)
    flat[flat.numel() // 2 :: 97] = INF
    got = harness.run(api, call, inputs._replace(**{name: x}))
    assert any(not torch.isfinite(y).all() for y in got)
    axis_first = {"BSND": lambda y: y[0], "BNSD": lambda y: y[0], "TND": lambda y: y[:40]}[layout]
    for y in got[2:]:
        assert torch.isfinite(axis_first(y)).all()
