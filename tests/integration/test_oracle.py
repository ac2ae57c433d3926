"""The reference itself: finite differences, numbers worked out by hand, and the layout conversions."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
from oracle import Call

MASKS = {
    "full": {},
    "causal": {"mask_mode": oracle.CAUSAL},
    "window": {"mask_mode": oracle.SLIDING_WINDOW, "win_left": 1, "win_right": 0},
}


def problem(layout: str, mask: str, ragged: bool) -> tuple[Call, dict[str, oracle.Array]]:
    """Two sequences, 4 query and 2 kv heads, D 3, Dv 2; with `ragged` one has unused rows and one has more
    queries than keys."""
    rng = np.random.default_rng(1)
    n1, n2, d, dv, s1, s2 = 4, 2, 3, 2, 4, 5
    kwargs: dict[str, object] = {"layout": layout, **MASKS[mask]}
    if ragged:
        kwargs |= {"seqused_q": (4, 2), "seqused_kv": (2, 5)}
    if layout == "TND":
        kwargs |= {"cu_seqlens_q": (0, s1, 2 * s1), "cu_seqlens_kv": (0, s2, 2 * s2)}
    arrays = {
        "q": rng.standard_normal((2, s1, n1, d)),
        "k": rng.standard_normal((2, s2, n2, d)),
        "v": rng.standard_normal((2, s2, n2, dv)),
        "dout": rng.standard_normal((2, s1, n1, dv)),
    }
    arrays = {name: oracle.convert(x, "BSND", layout) for name, x in arrays.items()}
    arrays["dlse"] = rng.standard_normal(oracle.lse_shape(arrays["q"], layout))
    arrays["sinks"] = rng.standard_normal(n1)
    return Call(**kwargs), arrays


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("ragged", [False, True], ids=["equal", "ragged"])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_match_finite_differences(layout: str, mask: str, ragged: bool, with_sinks: bool) -> None:
    call, x = problem(layout, mask, ragged)
    sinks = x["sinks"] if with_sinks else None

    def loss() -> float:
        out, lse = oracle.forward(x["q"], x["k"], x["v"], call, sinks)
        return float((out * x["dout"]).sum() + np.where(np.isfinite(lse), lse * x["dlse"], 0.0).sum())

    out, lse = oracle.forward(x["q"], x["k"], x["v"], call, sinks)
    got = oracle.backward(x["q"], x["k"], x["v"], x["dout"], out, lse, call, sinks, x["dlse"])
    for name, gradient in zip(("q", "k", "v"), got[:3], strict=True):
        numeric = oracle.numeric_gradient(loss, x[name])
        assert np.abs(numeric).max() > 0.01
        np.testing.assert_allclose(gradient, numeric, atol=2e-8)
    if with_sinks:
        assert got.dsinks is not None
        np.testing.assert_allclose(got.dsinks, oracle.numeric_gradient(loss, x["sinks"]), atol=2e-8)


def test_all_layouts_give_the_same_numbers() -> None:
    results = {}
    for layout in oracle.LAYOUTS:
        call, x = problem(layout, "causal", ragged=True)
        out, lse = oracle.forward(x["q"], x["k"], x["v"], call)
        gradients = oracle.backward(x["q"], x["k"], x["v"], x["dout"], out, lse, call)
        q_cu, kv_cu = (0, 4, 8), (0, 5, 10)
        results[layout] = [oracle.convert(y, layout, "BSND", q_cu) for y in (out, gradients.dq)]
        results[layout] += [oracle.convert(y, layout, "BSND", kv_cu) for y in (gradients.dk, gradients.dv)]
        results[layout].append(oracle.convert_lse(lse, layout, "BSND", q_cu))
    for layout in ("BNSD", "TND"):
        for a, b in zip(results["BSND"], results[layout], strict=True):
            np.testing.assert_array_equal(a, b)


def test_converts_to_and_from_packed_rows_of_unequal_length() -> None:
    packed = np.arange(7 * 2 * 3, dtype=np.float64).reshape(7, 2, 3)
    cu = (0, 2, 2, 7)
    dense = oracle.convert(packed, "TND", "BNSD", cu)
    assert dense.shape == (3, 2, 5, 3)
    np.testing.assert_array_equal(dense[2, 1], packed[2:7, 1])
    np.testing.assert_array_equal(dense[0, :, 2:], 0)
    np.testing.assert_array_equal(oracle.convert(dense, "BNSD", "TND", cu), packed)


def hand_made(s1: int, s2: int, **kwargs: object) -> oracle.Array:
    """The first column of dv for q = 0, k = v = dout = 1."""
    call = Call(**kwargs)
    q, k = np.zeros((1, s1, 1, 8)), np.ones((1, s2, 1, 8))
    out, lse = oracle.forward(q, k, k, call)
    return oracle.backward(q, k, k, np.ones_like(q), out, lse, call).dv[0, :, 0, 0]


@pytest.mark.parametrize(
    ("s1", "s2", "mask", "wanted"),
    [
        (4, 2, (3, -1, -1), (1.5, 0.5)),
        (5, 5, (3, -1, -1), (2.28333, 1.28333, 0.78333, 0.45, 0.2)),
        (2, 4, (3, -1, -1), (0.58333, 0.58333, 0.58333, 0.25)),
        (6, 6, (4, 1, 0), (1.5, 1, 1, 1, 1, 0.5)),
        (6, 6, (4, 0, 0), (1, 1, 1, 1, 1, 1)),
        (6, 6, (4, -1, -1), (1, 1, 1, 1, 1, 1)),
    ],
    ids=str,
)
def test_mask_gives_the_numbers_worked_out_by_hand(
    s1: int, s2: int, mask: tuple[int, int, int], wanted: tuple[float, ...]
) -> None:
    got = hand_made(s1, s2, mask_mode=mask[0], win_left=mask[1], win_right=mask[2])
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_sink_is_inside_the_lse() -> None:
    x = np.ones((1, 1, 1, 8))
    call = Call()
    out, lse = oracle.forward(0 * x, x, x, call, [0.0])
    got = oracle.backward(0 * x, x, x, x, out, lse, call, [0.0])
    assert lse[0, 0, 0] == pytest.approx(math.log(2))
    np.testing.assert_allclose(out, 0.5)
    np.testing.assert_allclose(got.dq, 0.70711, atol=1e-5)
    np.testing.assert_allclose(got.dk, 0)
    np.testing.assert_allclose(got.dv, 0.5)


def test_row_without_keys_contributes_nothing_whatever_its_lse() -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, s, 1, 4)) for s in (4, 2, 2, 4))
    call = Call(mask_mode=oracle.CAUSAL)
    out, lse = oracle.forward(q, k, v, call)
    assert np.array_equal(lse[0, 0, :2], [-np.inf, -np.inf])
    wanted = oracle.backward(q, k, v, dout, out, lse, call)
    for value in (np.inf, 0.0, np.nan):
        lse[0, 0, :2] = value
        for a, b in zip(oracle.backward(q, k, v, dout, out, lse, call)[:3], wanted[:3], strict=True):
            np.testing.assert_array_equal(a, b)
