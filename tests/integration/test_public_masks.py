"""Public cases about masks: 7, 16, 18, 29, 44."""

from __future__ import annotations

import bound
import harness
import numpy as np
import oracle
import pytest
import torch
from harness import Api
from oracle import CAUSAL, NO_MASK, SLIDING_WINDOW, Call


def dv_column(
    api: Api, call: Call, b: int, s1: int, s2: int, n1: int = 1, n2: int = 1, **kwargs: object
) -> oracle.Array:
    """dv of q = 0, k = v = dout = 1 as (S2,) of the first batch entry, head and column; the rest must repeat
    it."""
    inputs = harness.ones_inputs(call, b, s1, s2, n1, n2, 8, **kwargs)
    got = harness.run(api, call, inputs)
    dv = harness.as_bsnd(call, got.dv, "kv")
    np.testing.assert_array_equal(dv, np.broadcast_to(dv[:1, :, :1, :1], dv.shape))
    for name, x in (("dq", got.dq), ("dk", got.dk)):
        assert torch.count_nonzero(x) == 0, f"{name} must be exactly 0 when q = 0 and k, v, dout are constant"
    return dv[0, :, 0, 0]


# ---- PC-07: backward and forward anchor the causal mask alike --------------------------------------------


def test_pc07_causal_is_anchored_bottom_right(api: Api, layout: str) -> None:
    call = harness.uniform(layout, 1, 2, 4, mask_mode=CAUSAL)
    inputs = harness.ones_inputs(call, 1, 2, 4, 4, 2, 16, torch.float16)
    got = harness.run(api, call, inputs)
    wanted = 2 * np.array([0.58333, 0.58333, 0.58333, 0.25])
    dv = harness.as_bsnd(call, got.dv, "kv")
    np.testing.assert_allclose(dv, np.broadcast_to(wanted[None, :, None, None], dv.shape), rtol=1e-3)


@pytest.mark.parametrize(("s1", "s2"), [(5, 133), (130, 257)])
def test_pc07_causal_with_more_keys_than_queries(api: Api, layout: str, s1: int, s2: int) -> None:
    call = harness.uniform(layout, 1, s1, s2, mask_mode=CAUSAL)
    inputs = harness.random_inputs(call, 1, s1, s2, 4, 2, 16, dtype=torch.float16)
    got = harness.run(api, call, inputs)
    bound.assert_forward(call, inputs, got.out, got.lse)
    bound.assert_gradients(call, inputs, got.out, got.lse, got[2:])


@pytest.mark.parametrize(("s1", "s2"), [(5, 133), (130, 257)])
def test_pc07_agrees_with_the_derivative_of_the_forward(layout: str, s1: int, s2: int) -> None:
    """End to end: the front's gradient against a float64 forward and backward of its own, with a looser
    bound."""
    call = harness.uniform(layout, 1, s1, s2, mask_mode=CAUSAL)
    inputs = harness.random_inputs(call, 1, s1, s2, 4, 2, 16, dtype=torch.float16)
    got = harness.run_front(call, inputs)
    q, k, v, dout = (harness.to_float64(x) for x in inputs[:4])
    out, lse = oracle.forward(q, k, v, call)
    reference = oracle.backward(q, k, v, dout, out, lse, call)
    for x, wanted in zip(got[2:5], reference[:3], strict=True):
        assert x is not None
        assert oracle.relative_error(harness.to_float64(x), wanted) < 4e-3


# ---- PC-16: window ends are inclusive --------------------------------------------------------------------

CAUSAL_6 = (2.45, 1.45, 0.95, 0.61667, 0.36667, 0.16667)


@pytest.mark.parametrize(
    ("window", "wanted"),
    [
        ((1, 0), (1.5, 1, 1, 1, 1, 0.5)),
        ((5, 0), CAUSAL_6),
        ((100, 0), CAUSAL_6),
        ((-1, 0), CAUSAL_6),
        ((-1, -1), (1, 1, 1, 1, 1, 1)),
        ((2**31 - 1, 2**31 - 1), (1, 1, 1, 1, 1, 1)),
        ((2**31 - 1, 0), CAUSAL_6),
    ],
    ids=str,
)
def test_pc16_window_ends_are_inclusive(
    api: Api, layout: str, window: tuple[int, int], wanted: tuple[float, ...]
) -> None:
    call = harness.uniform(layout, 1, 6, 6, mask_mode=SLIDING_WINDOW, win_left=window[0], win_right=window[1])
    np.testing.assert_allclose(dv_column(api, call, 1, 6, 6, dtype=torch.float16), wanted, rtol=1e-3)


@pytest.mark.parametrize("window", [(299, 0), (300, 0), (-1, 0)], ids=str)
def test_pc16_full_width_window_is_causal(api: Api, layout: str, window: tuple[int, int]) -> None:
    causal = harness.uniform(layout, 1, 300, 300, mask_mode=CAUSAL)
    call = harness.with_changes(causal, mask_mode=SLIDING_WINDOW, win_left=window[0], win_right=window[1])
    inputs = harness.random_inputs(call, 1, 300, 300, 2, 1, 64)
    assert torch.count_nonzero(harness.run(api, call, inputs).dq) > 0
    harness.assert_same_bits(
        harness.run(api, call, inputs), harness.run(api, causal, inputs), "window and causal:"
    )


# ---- PC-18: zero and negative windows --------------------------------------------------------------------


def test_pc18_window_of_zero_sees_itself_only(api: Api, layout: str) -> None:
    call = harness.uniform(layout, 1, 6, 6, mask_mode=SLIDING_WINDOW, win_left=0, win_right=0)
    np.testing.assert_array_equal(dv_column(api, call, 1, 6, 6), np.ones(6))


def test_pc18_open_right_mirrors_open_left(api: Api, layout: str) -> None:
    left = harness.uniform(layout, 1, 6, 6, mask_mode=SLIDING_WINDOW, win_left=-1, win_right=0)
    right = harness.with_changes(left, win_left=0, win_right=-1)
    a, b = (dv_column(api, call, 1, 6, 6, dtype=torch.float32) for call in (left, right))
    np.testing.assert_allclose(b, a[::-1], rtol=1e-6)
    np.testing.assert_allclose(a, CAUSAL_6, rtol=1e-4)


@pytest.mark.parametrize(
    ("mode", "window", "argument", "value"),
    [
        (SLIDING_WINDOW, (-2, 0), "win_left", "-2"),
        (SLIDING_WINDOW, (3, -5), "win_right", "-5"),
        (NO_MASK, (2, -1), "win_left", "2"),
        (CAUSAL, (2, -1), "win_left", "2"),
        (NO_MASK, (-1, 0), "win_right", "0"),
        (CAUSAL, (-1, 0), "win_right", "0"),
    ],
    ids=str,
)
def test_pc18_refuses_window(
    api: Api, layout: str, mode: int, window: tuple[int, int], argument: str, value: str
) -> None:
    good = harness.uniform(layout, 1, 6, 6)
    inputs = harness.ones_inputs(good, 1, 6, 6, 1, 1, 8)
    out, lse = harness.run_forward(api, good, inputs)
    call = harness.with_changes(good, mask_mode=mode, win_left=window[0], win_right=window[1])
    with pytest.raises(api.value_error, match=harness.refusal("flash_attn", argument, value)):
        harness.run_forward(api, call, inputs)
    with pytest.raises(api.value_error, match=harness.refusal("flash_attn_grad", argument, value)):
        harness.run_backward(api, call, inputs, out, lse)


# ---- PC-29: the diagonal follows the used lengths --------------------------------------------------------


def test_pc29_causal_follows_used_lengths(api: Api, layout: str) -> None:
    call = harness.uniform(layout, 1, 6, 8, mask_mode=CAUSAL, seqused_q=(4,), seqused_kv=(5,))
    got = harness.run(api, call, harness.ones_inputs(call, 1, 6, 8, 1, 1, 8, torch.float16))
    dv = harness.as_bsnd(call, got.dv, "kv")[0, :, 0, 0]
    np.testing.assert_allclose(dv, (1.28333, 1.28333, 0.78333, 0.45, 0.2, 0, 0, 0), rtol=1e-3)
    assert np.all(harness.as_bsnd(call, got.dq, "q")[0, 4:] == 0)
    assert np.all(dv[5:] == 0)


# ---- PC-44: the mask tensor ------------------------------------------------------------------------------


def documented_mask(dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """CANN's constant: 1 above the diagonal."""
    return torch.ones(2048, 2048, dtype=torch.int8).triu(1).to(dtype)


@pytest.mark.parametrize("mode", [CAUSAL, SLIDING_WINDOW], ids=["causal", "window"])
@pytest.mark.parametrize("s", [600, 2500])
@pytest.mark.parametrize("mask_dtype", [torch.int8, torch.uint8, torch.bool], ids=str)
def test_pc44_documented_mask_changes_nothing(
    layout: str, mode: int, s: int, mask_dtype: torch.dtype
) -> None:
    windows = {"win_left": 70, "win_right": 5} if mode == SLIDING_WINDOW else {}
    call = harness.uniform(layout, 1, s, s, mask_mode=mode, **windows)
    inputs = harness.random_inputs(call, 1, s, s, 1, 1, 16)
    without = harness.run(harness.FAG_TORCH, call, inputs)
    got = harness.run(harness.FAG_TORCH, call, inputs, attn_mask=documented_mask(mask_dtype))
    assert torch.count_nonzero(got.dk) > 0
    harness.assert_same_bits(got, without, "attn_mask given or not:")


REFUSED_MASKS = {
    "inverted": lambda: 1 - documented_mask(),
    "inverted-bool": lambda: documented_mask(torch.bool).logical_not(),
    "all-zero": lambda: torch.zeros(2048, 2048, dtype=torch.int8),
    "lower-triangle-of-ones": lambda: torch.ones(2048, 2048, dtype=torch.int8).tril(-1),
    "float-inf": lambda: torch.zeros(2048, 2048).masked_fill(documented_mask(torch.bool), -torch.inf),
    "int32": lambda: documented_mask(torch.int32),
    "s-by-s": lambda: torch.ones(600, 600, dtype=torch.int8).triu(1),
    "one-one-one-s": lambda: torch.zeros(1, 1, 1, 600, dtype=torch.int8),
    "batch-one-s-s": lambda: torch.ones(1, 1, 600, 600, dtype=torch.int8).triu(1),
    "expanded-row": lambda: torch.zeros(1, 2048, dtype=torch.int8).expand(2048, 2048),
}


@pytest.mark.parametrize("mode", [CAUSAL, SLIDING_WINDOW], ids=["causal", "window"])
@pytest.mark.parametrize("mask", REFUSED_MASKS)
def test_pc44_refuses_any_other_mask(api: Api, mask: str, mode: int) -> None:
    call = Call(mask_mode=mode, win_left=3 if mode == SLIDING_WINDOW else -1)
    inputs = harness.ones_inputs(call, 1, 600, 600, 1, 1, 8)
    error = api.type_error if mask in ("float-inf", "int32") else api.value_error
    with pytest.raises(error, match=r"flash_attn: attn_mask .*diagonal"):
        harness.run_forward(api, call, inputs, attn_mask=REFUSED_MASKS[mask]())


def test_pc44_refuses_a_mask_without_a_masking_mode(api: Api, layout: str) -> None:
    call = harness.uniform(layout, 1, 6, 6)
    inputs = harness.ones_inputs(call, 1, 6, 6, 1, 1, 8)
    out, lse = harness.run_forward(api, call, inputs)
    with pytest.raises(api.value_error, match=r"flash_attn_grad: attn_mask .*mask_mode"):
        harness.run_backward(api, call, inputs, out, lse, attn_mask=documented_mask())
