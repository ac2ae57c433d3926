"""Public cases about numbers: 8, 12, 13, 26, 42, 47."""

from __future__ import annotations

import math

import bound
import harness
import numpy as np
import oracle
import pytest
import torch
from harness import Api, Inputs
from oracle import CAUSAL, NO_MASK, SLIDING_WINDOW, Call

INF = float("inf")
THREADS = (1, 2, 3, 8)


def check(api: Api, call: Call, inputs: Inputs) -> harness.Result:
    """Forward and gradient within the bound."""
    got = harness.run(api, call, inputs)
    bound.assert_forward(call, inputs, got.out, got.lse)
    bound.assert_gradients(call, inputs, got.out, got.lse, got[2:])
    return got


# ---- PC-08: a sink in the denominator --------------------------------------------------------------------


def test_pc08_sink_by_hand(api: Api, layout: str, dtype: torch.dtype) -> None:
    call = harness.uniform(layout, 1, 1, 1)
    inputs = harness.ones_inputs(call, 1, 1, 1, 1, 1, 8, dtype)._replace(sinks=torch.zeros(1))
    got = harness.run(api, call, inputs)
    close = {"rtol": 4e-3 if dtype == torch.bfloat16 else 5e-4}
    np.testing.assert_allclose(
        harness.to_float64(got.lse), math.log(2), rtol=1e-6
    )  # the sink is inside the lse
    np.testing.assert_allclose(harness.to_float64(got.out), 0.5)
    np.testing.assert_allclose(harness.to_float64(got.dq), 0.70711, **close)
    assert torch.count_nonzero(got.dk) == 0
    np.testing.assert_allclose(harness.to_float64(got.dv), 0.5)
    # dP - sfmg = 8 - 4 and P = psink = 1/2: dsink = 1/2 * (0 - 4).
    front = harness.run_front(call, inputs)
    assert front.dsinks is not None
    np.testing.assert_allclose(harness.to_float64(front.dsinks), -2.0, rtol=1e-6)


def sink_problem(layout: str, sinks: list[float] | None, mode: int = CAUSAL) -> tuple[Call, Inputs]:
    call = harness.uniform(layout, 2, 33, 65, mask_mode=mode)
    inputs = harness.random_inputs(call, 2, 33, 65, 2, 1, 64)
    return call, inputs._replace(sinks=None if sinks is None else torch.tensor(sinks))


def test_pc08_sink_of_minus_infinity_is_no_sink(api: Api, layout: str) -> None:
    call, inputs = sink_problem(layout, [-INF, -INF])
    wanted = harness.run(api, call, inputs._replace(sinks=None))
    assert torch.count_nonzero(wanted.dq) > 0
    harness.assert_same_bits(harness.run(api, call, inputs), wanted)
    front = harness.run_front(call, inputs)
    assert front.dsinks is not None
    assert torch.count_nonzero(front.dsinks) == 0


@pytest.mark.parametrize("sink", [INF, 3e38], ids=str)
def test_pc08_boundless_sink_takes_everything(api: Api, layout: str, sink: float) -> None:
    call, inputs = sink_problem(layout, [sink, sink])
    got = harness.run(api, call, inputs)
    for x in (got.out, *got[2:]):
        assert torch.count_nonzero(x) == 0
    assert torch.all(got.lse == torch.tensor(sink))
    front = harness.run_front(call, inputs)
    assert front.dsinks is not None
    assert torch.count_nonzero(front.dsinks) == 0


@pytest.mark.parametrize("sink", [INF, 3e38], ids=str)
def test_pc08_boundless_sink_in_one_head_leaves_the_other(api: Api, layout: str, sink: float) -> None:
    call, inputs = sink_problem(layout, [sink, 0.25])
    got = harness.run(api, call, inputs)
    # PyTorch's kernel, the peer of the bound, gives NaN here.
    bound.assert_forward(call, inputs, got.out, got.lse, tol_only=True)
    bound.assert_gradients(call, inputs, got.out, got.lse, got[2:], tol_only=True)
    front = harness.run_front(call, inputs)
    assert front.dsinks is not None
    assert front.dsinks[0] == 0
    assert front.dsinks[1] != 0
    assert torch.count_nonzero(got.dq) > 0


def test_pc08_large_sink_leaves_next_to_nothing(api: Api, layout: str) -> None:
    call, inputs = sink_problem(layout, [100.0, 100.0])
    got = harness.run(api, call, inputs)
    assert torch.allclose(got.lse, torch.tensor(100.0))
    for x in (got.out, *got[2:]):
        assert torch.isfinite(x).all()
        assert x.abs().max() < 1e-38  # exp(-100 + an ordinary score) times ordinary numbers


def test_pc08_sink_is_all_a_row_without_keys_has(api: Api, layout: str) -> None:
    call = harness.uniform(layout, 2, 4, 2, mask_mode=CAUSAL)
    inputs = harness.random_inputs(call, 2, 4, 2, 1, 1, 8)._replace(sinks=torch.tensor([0.5]))
    got = check(api, call, inputs)
    assert np.all(harness.lse_as_bns(call, got.lse)[:, :, :2] == 0.5)
    assert np.all(harness.as_bsnd(call, got.out, "q")[:, :2] == 0)
    assert np.all(harness.as_bsnd(call, got.dq, "q")[:, :2] == 0)
    assert torch.count_nonzero(got.dv) > 0


@pytest.mark.parametrize("n2", [1, 7])
def test_pc08_every_head_has_its_own_sink(api: Api, layout: str, n2: int) -> None:
    call = harness.uniform(layout, 2, 33, 65)
    inputs = harness.random_inputs(call, 2, 33, 65, 7, n2, 64)
    inputs = inputs._replace(sinks=torch.tensor([-3.0, 0.0, 0.5, 2.0, 5.0, -INF, 8.0]))
    check(api, call, inputs)
    front = harness.run_front(call, inputs)
    assert front.dsinks is not None
    bound.assert_gradients(call, inputs, front.out, front.lse, front[2:5], front.dsinks)
    assert front.dsinks[5] == 0
    assert torch.count_nonzero(front.dsinks) == 6


# ---- PC-12: grouped heads --------------------------------------------------------------------------------


def dv_of_sums(api: Api, n1: int, n2: int, dout_of_head: list[float], dtype: torch.dtype) -> list[float]:
    """dv per kv head for one token: P is 1, so dv is the sum of dout over the group."""
    call = harness.packed((1,))
    inputs = harness.ones_inputs(call, 1, 1, 1, n1, n2, 16, dtype)
    dout = torch.tensor(dout_of_head, dtype=dtype).view(1, n1, 1).expand(1, n1, 16).contiguous()
    got = harness.run(api, call, inputs._replace(dout=dout))
    assert torch.all(got.dv == got.dv[..., :1])
    return got.dv[0, :, 0].tolist()


@pytest.mark.parametrize("layout", ["TND"])
def test_pc12_query_heads_share_by_blocks(api: Api, layout: str, dtype: torch.dtype) -> None:
    assert dv_of_sums(api, 14, 2, list(range(14)), dtype) == [21, 70]


@pytest.mark.parametrize("layout", ["TND"])
def test_pc12_heads_add_up_in_float32(api: Api, layout: str) -> None:
    assert dv_of_sums(api, 7, 1, [256, 1, 1, 1, 1, 1, 1], torch.bfloat16) == [262]


def test_pc12_rows_add_up_in_float32(api: Api, layout: str) -> None:
    call = harness.uniform(layout, 1, 4096, 1)
    got = harness.run(api, call, harness.ones_inputs(call, 1, 4096, 1, 1, 1, 8))
    assert torch.all(got.dv == 4096)


# ---- PC-13: value width different from key width ---------------------------------------------------------


@pytest.mark.parametrize(
    ("d", "dv"),
    [
        (192, 128),
        (128, 96),
        (128, 8),
        (128, 40),
        (72, 40),
        (192, 191),
        (8, 1),
        (193, 193),
        (256, 1),
        (255, 254),
        (1, 1),
    ],
)
def test_pc13_value_width(api: Api, layout: str, dtype: torch.dtype, d: int, dv: int) -> None:
    call = harness.uniform(layout, 1, 37, 51, mask_mode=CAUSAL)
    inputs = harness.random_inputs(call, 1, 37, 51, 4, 2, d, dv, dtype)
    out, lse = harness.run_forward(api, call, inputs)
    bound.assert_forward(call, inputs, out, lse)
    got = harness.run_backward(api, call, inputs, out, lse, softmax_scale=0.0)  # 1/sqrt(D), not of Dv
    bound.assert_gradients(call, inputs, out, lse, got)


@pytest.mark.parametrize(("d", "dv"), [(64, 72), (257, 257), (257, 64), (16, 17)])
def test_pc13_refuses_widths(api: Api, layout: str, d: int, dv: int) -> None:
    call = harness.uniform(layout, 1, 3, 5)
    inputs = harness.random_inputs(call, 1, 3, 5, 4, 2, d, dv)
    lse = torch.zeros(oracle.lse_shape(inputs.q, layout))
    pattern = rf"(?=.*\b{d}\b)(?=.*\b{dv}\b)"
    with pytest.raises(api.value_error, match="(?s)^flash_attn: " + pattern):
        harness.run_forward(api, call, inputs)
    with pytest.raises(api.value_error, match="(?s)^flash_attn_grad: " + pattern):
        harness.run_backward(api, call, inputs, inputs.dout, lse)


# ---- PC-26: one query, one key ---------------------------------------------------------------------------

ONE_MASKS = {"full": (NO_MASK, -1, -1), "causal": (CAUSAL, -1, -1), "window": (SLIDING_WINDOW, 0, 0)}


@pytest.mark.parametrize("mask", ONE_MASKS)
@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize(("s1", "s2"), [(1, 1), (1, 5), (5, 1)])
def test_pc26_smallest_problems(
    layout: str, dtype: torch.dtype, s1: int, s2: int, n: int, b: int, mask: str
) -> None:
    mode, left, right = ONE_MASKS[mask]
    call = harness.uniform(layout, b, s1, s2, mask_mode=mode, win_left=left, win_right=right)
    random = harness.random_inputs(call, b, s1, s2, n, n, 16, dtype=dtype, factor=3.0)
    inputs = random._replace(dout=torch.ones_like(random.dout))
    zero = bound.zero_bound(call, inputs)
    for api in harness.APIS:
        got = check(api, call, inputs)
        if s2 == 1:
            readers = s1 if mode == NO_MASK else 1  # under both masks only the last query sees the only key
            assert torch.all(got.dv == readers)
            assert got.dq.abs().max() <= zero
            assert got.dk.abs().max() <= zero
        else:
            assert torch.count_nonzero(got.dv) > 0


# ---- PC-42: softmax_scale --------------------------------------------------------------------------------


def scale_problem() -> tuple[Call, Inputs]:
    call = Call("BSND")
    inputs = harness.ones_inputs(call, 1, 1, 2, 1, 1, 64, torch.float32)
    q, k = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k)
    q[..., 0] = 8
    k[:, 0, :, 0] = 1
    return call, inputs._replace(q=q, k=k)


def test_pc42_front_uses_one_default_for_both() -> None:
    call, inputs = scale_problem()
    got = harness.run_front(call, inputs)
    np.testing.assert_allclose(harness.to_float64(got.dv)[0, :, 0, 0], (0.73106, 0.26894), atol=1e-5)


def test_pc42_raw_defaults_are_those_of_cann(api: Api) -> None:
    """flash_attn 1.0 and flash_attn_grad 1/sqrt(D): a trap, but the schema's; each default is what it
    says."""
    _, inputs = scale_problem()
    q, k, v, dout, _ = inputs
    out, lse = api.flash_attn(q, k, v, return_softmax_lse=True)
    assert lse.item() == pytest.approx(math.log(math.exp(8) + 1), rel=1e-6)
    out, lse = api.flash_attn(q, k, v, softmax_scale=0.125, return_softmax_lse=True)
    _, _, dv = api.flash_attn_grad(q, k, v, dout, out, lse)
    np.testing.assert_allclose(harness.to_float64(dv)[0, :, 0, 0], (0.73106, 0.26894), atol=1e-5)
    same = api.flash_attn_grad(q, k, v, dout, out, lse, softmax_scale=0.125)
    harness.assert_same_bits([dv], [same[2]])


@pytest.mark.parametrize("scale", [-0.125, 1e-8, 30.0], ids=str)
@pytest.mark.parametrize("mode", [NO_MASK, CAUSAL], ids=["full", "causal"])
def test_pc42_scale_of_any_sign_and_size(
    api: Api, layout: str, dtype: torch.dtype, scale: float, mode: int
) -> None:
    if abs(scale) < 1e-5 and dtype == torch.float16:
        pytest.skip("dq and dk are smaller than the smallest float16")
    call = harness.uniform(layout, 2, 33, 65, mask_mode=mode, softmax_scale=scale)
    inputs = harness.random_inputs(call, 2, 33, 65, 2, 1, 64, dtype=dtype)
    got = check(api, call, inputs)
    assert torch.count_nonzero(got.dv) > 0


@pytest.mark.parametrize("scale", [float("nan"), INF, -INF], ids=str)
def test_pc42_refuses_a_scale_that_is_no_number(api: Api, scale: float) -> None:
    call, inputs = scale_problem()
    out, lse = harness.run_forward(api, call, inputs)
    with pytest.raises(api.value_error, match=harness.refusal("flash_attn", "softmax_scale", scale)):
        harness.run_forward(api, call, inputs, softmax_scale=scale)
    with pytest.raises(api.value_error, match=harness.refusal("flash_attn_grad", "softmax_scale", scale)):
        harness.run_backward(api, call, inputs, out, lse, softmax_scale=scale)


# ---- PC-47: where parallel work is cut -------------------------------------------------------------------

EDGE_LENGTHS = (31, 32, 33, 63, 64, 65, 127, 129)


@pytest.mark.parametrize("layout", ["BSND"])
@pytest.mark.parametrize("d", [40, 64])
@pytest.mark.parametrize("s1", EDGE_LENGTHS)
def test_pc47_edges_of_the_split_on_any_number_of_threads(layout: str, s1: int, d: int) -> None:
    for s2 in EDGE_LENGTHS:
        call = Call(layout)
        inputs = harness.random_inputs(call, 1, s1, s2, 3, 1, d)
        with harness.threads(1):
            wanted = harness.run(harness.TORCH_OPS, call, inputs)
        assert all(torch.count_nonzero(x) > 0 for x in wanted[2:])
        bound.assert_gradients(call, inputs, wanted.out, wanted.lse, wanted[2:])
        for count in THREADS[1:]:
            with harness.threads(count):
                harness.assert_same_bits(
                    harness.run(harness.TORCH_OPS, call, inputs), wanted, f"{count} threads, S2={s2}:"
                )
