"""Forward and backward of every instruction-set level against float64."""

import sys
from pathlib import Path

import numpy as np
import pytest

from fag_kernel import abi

sys.path.insert(0, str(Path(__file__).parent))
from cpu_cases import CAUSAL, DTYPES, LAYOUTS, WINDOW, Case, relative_error

MASKS = {
    "none": {},
    "causal": {"mask_mode": CAUSAL},
    "window": {"mask_mode": WINDOW, "win_left": 20, "win_right": 3},
    "left": {"mask_mode": WINDOW, "win_left": 150, "win_right": -1},
    "diagonal": {"mask_mode": WINDOW, "win_left": 0, "win_right": 0},
}
# Two kinds of lengths per layout: several tiles with odd ends; short, empty and partly used entries.
DENSE = (
    {"s1": 131, "s2": 260},
    {"b": 3, "s1": 140, "s2": 77, "seqused_q": (140, 13, 0), "seqused_kv": (77, 1, 5)},
)
PACKED = (
    {"cu_seqlens_q": (0, 5, 5, 140, 141, 300), "cu_seqlens_kv": (0, 7, 20, 20, 21, 250)},
    {"cu_seqlens_q": (0, 150), "cu_seqlens_kv": (0, 301), "seqused_q": (133,), "seqused_kv": (270,)},
)
WIDTHS = ((64, 64), (40, 24), (72, 40), (33, 1), (192, 128), (256, 256), (17, 17))


@pytest.fixture(params=abi.cpu_levels())
def level(request):
    abi.set_cpu_level(request.param)
    yield request.param
    abi.set_cpu_level(None)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_levels_agree_with_float64(level, dtype, layout, mask):
    for index, lengths in enumerate(PACKED if layout == "TND" else DENSE):
        # Widths, head counts, sinks and dlse take turns, so that all meet all masks and layouts somewhere.
        turn = (list(MASKS).index(mask) + 2 * LAYOUTS.index(layout) + 3 * index) % len(WIDTHS)
        d, dv = WIDTHS[turn]
        Case(
            layout, dtype, n1=(2, 6)[turn % 2], n2=2, d=d, dv=dv,
            has_sinks=index == 1, has_dlse=turn % 2 == 0, **lengths, **MASKS[mask],
        ).assert_right()  # fmt: skip


@pytest.mark.parametrize(
    ("d", "dv"), [(8, 1), (16, 16), (96, 96), (128, 128), (129, 65), (192, 191), (256, 8)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_widths(level, dtype, d, dv):
    Case("BNSD", dtype, n1=4, n2=2, d=d, dv=dv, s1=37, s2=51, mask_mode=CAUSAL).assert_right()


@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_around_tiles(level, dtype):
    for s1 in (1, 31, 64, 65, 127, 128, 129, 257):
        for s2 in (1, 33, 63, 128, 129, 256):
            Case(dtype=dtype, n1=1, n2=1, d=16, s1=s1, s2=s2, mask_mode=CAUSAL * (s1 % 2)).assert_right(
                factor=2
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_beyond_one_unit(level, dtype):
    """Rows longer than the 2048 keys after which the online softmax starts afresh."""
    Case("BSND", dtype, n1=2, n2=1, d=32, s1=40, s2=4500, has_sinks=True).assert_right()
    Case("BNSD", dtype, n1=1, n2=1, d=16, s1=9, s2=5000, mask_mode=WINDOW, win_left=2500).assert_right()


@pytest.mark.parametrize("dtype", DTYPES)
def test_window_over_many_tiles(level, dtype):
    """Packed rows and keys, and sums of dQ, give their place to others once the window has moved on."""
    for n1, threads, s1, s2 in ((1, 1, 1100, 1100), (4, 1, 900, 1000), (4, 3, 1000, 900)):
        case = Case(
            "BNSD", dtype, b=1, n1=n1, n2=1, d=16, s1=s1, s2=s2, mask_mode=WINDOW, win_left=150, win_right=30
        )  # fmt: skip
        case.assert_right(threads=threads)


def test_negative_and_extreme_scales(level):
    for scale in (-0.125, 1e-8, 30.0):
        Case(n1=2, n2=1, d=64, s1=70, s2=90, mask_mode=CAUSAL, scale=scale).assert_right(factor=2)


def test_late_training_logits_stay_probabilities(level):
    """Scores of 1e9 have ulps of 64: without the clamp P would reach e^64."""
    case = Case(dtype="float32", n1=1, n2=1, d=16, s1=40, s2=40)
    case.q *= np.float32(1e5)
    case.k *= np.float32(1e5)
    gradients = case.backward(*case.forward())
    assert all(np.all(np.isfinite(x)) for x in gradients[:3])
    assert np.abs(gradients[2]).max() <= np.abs(case.dout).sum(axis=1).max() * 1.001


def test_strided_and_expanded_inputs(level):
    """Any strides but that of the head dim; dout of out.sum() is one element with strides 0."""
    plain = Case("BSND", n1=4, n2=2, d=64, b=2, s1=33, s2=49, mask_mode=CAUSAL)
    plain.dout = np.ones_like(plain.dout)
    out, lse = plain.forward()
    expected = plain.backward(out, lse)
    strided = Case("BSND", n1=4, n2=2, d=64, b=2, s1=33, s2=49, mask_mode=CAUSAL)
    wide = np.full((2, 33, 4, 96), np.nan, plain.q.dtype)
    wide[..., 1:65] = plain.q
    strided.q = wide[..., 1:65]
    strided.k = np.ascontiguousarray(plain.k.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    strided.dout = np.broadcast_to(np.ones(64, plain.q.dtype), plain.dout.shape)
    for a, b in zip(strided.backward(out, lse)[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(a, b)


def test_group_sums_accumulate_in_float32(level):
    """dV of a kv head is 256 + 1 * 6: a bfloat16 running sum would stall at 256."""
    case = Case("TND", n1=7, n2=1, d=8, cu_seqlens_q=(0, 1), cu_seqlens_kv=(0, 1))
    case.dout[...] = 1
    case.dout[0, 0] = 256
    _, _, dv, _ = case.backward(*case.forward())
    np.testing.assert_array_equal(dv.astype(np.float32), 262.0)
    long = Case("BSND", n1=1, n2=1, d=8, s1=4096, s2=1)
    long.dout[...] = 1
    np.testing.assert_array_equal(long.backward(*long.forward())[2].astype(np.float32), 4096.0)


def test_what_rounding_takes_from_the_sum_of_ds_is_given_back(level):
    """Uniform P and a gradient through lse alone: all dS of a row are dlse / n and round alike.

    dq would be off by as much; with the mean of the keys it is given, it has no error but its own rounding.
    """
    case = Case(n1=1, n2=1, d=40, s1=150, s2=150, mask_mode=CAUSAL, has_dlse=True)
    case.q[...], case.dout[...] = 0, 0
    exact = case.reference_backward(*case.forward())[0]
    dq = case.backward(*case.forward())[0].astype(np.float64)
    rounding = np.abs(exact.astype(DTYPES["bfloat16"]).astype(np.float64) - exact)
    assert np.all(np.abs(dq - exact) <= rounding + 1e-5 * np.abs(exact).max(axis=-1, keepdims=True))


def test_bfloat16_error_is_that_of_rounding(level):
    """At most 1.6 times the error of rounding the exact gradient: only P and dS are rounded besides."""
    case = Case(n1=2, n2=2, d=128, s1=256, s2=256)
    out, lse = case.forward()
    for gradient, reference in zip(
        case.backward(out, lse)[:3], case.reference_backward(out, lse)[:3], strict=True
    ):
        rounded = relative_error(reference.astype(DTYPES["bfloat16"]), reference)
        assert relative_error(gradient, reference) < 1.6 * rounded
