"""The emulated intrinsics against NumPy and ml_dtypes, lane by lane.

What they must do is in Intel's manual (Software Developer's Manual, volume 2). These tests know no kernels.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from rounding import flushed, fused

pytestmark = [
    pytest.mark.skipif(
        "FAG_SIMDE" not in os.environ, reason="tests the emulation of AVX-512: tox run -e avx512-emulated"
    ),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning"),
]

HERE = Path(__file__).parent
TURNS = 2000
LANES = 16


@pytest.fixture(scope="module")
def intrinsics(tmp_path_factory):
    """Calls an intrinsic: `intrinsics(name, type of the result, its lanes, *operands)`."""
    built = tmp_path_factory.mktemp("intrinsics") / "intrinsics.so"
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    flags = ["-std=c++20", "-O2", "-mavx2", "-mfma", "-mf16c", "-Wno-psabi", "-shared", "-fPIC"]
    headers = ["-isystem", os.environ["FAG_SIMDE"], "-include", str(HERE / "avx512_emulated.hpp")]
    command = [compiler, *flags, *headers, str(HERE / "intrinsics.cpp"), "-o", str(built)]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(built))

    def call(name, dtype, lanes, *operands):
        out = np.zeros(lanes, dtype)
        held = [np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x for x in operands]
        words = [
            x.ctypes.data_as(ctypes.c_void_p) if isinstance(x, np.ndarray) else ctypes.c_uint(x) for x in held
        ]
        getattr(library, name)(out.ctypes.data_as(ctypes.c_void_p), *words)
        return out

    return call


def any_bits(rng, dtype, lanes):
    """Every kind of number: bits at random, or special ones."""
    x = rng.integers(0, 256, lanes * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0], dtype)
    chosen = rng.random(lanes) < 0.2
    return np.where(chosen, special[rng.integers(0, len(special), lanes)], x)


def floats(rng, lanes=LANES):
    """Numbers whose sums round: exponents that are close to each other."""
    return (rng.standard_normal(lanes) * 2.0 ** rng.integers(-6, 6, lanes)).astype(np.float32)


def assert_same(actual, expected):
    """The same bits, or both NaN."""
    is_nan = np.isnan(expected.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float64)), is_nan)
    word = {2: np.uint16, 4: np.uint32}[actual.itemsize]
    np.testing.assert_array_equal(actual[~is_nan].view(word), expected[~is_nan].view(word))


@pytest.mark.parametrize("numbers", ["all", "close"])
def test_dpbf16_ps(intrinsics, numbers):
    """Two fused multiply-adds, the upper values first; subnormals are zeros before and after each."""
    rng = np.random.default_rng(1)
    for _ in range(TURNS):
        if numbers == "all":
            a, b = (any_bits(rng, ml_dtypes.bfloat16, 2 * LANES) for _ in range(2))
            total = any_bits(rng, np.float32, LANES)
        else:
            a, b = (floats(rng, 2 * LANES).astype(ml_dtypes.bfloat16) for _ in range(2))
            total = floats(rng)
        got = intrinsics("dpbf16_ps", np.float32, LANES, total, a, b)
        wide_a, wide_b = (flushed(x.astype(np.float32)) for x in (a, b))
        expected = flushed(fused(wide_a[1::2], wide_b[1::2], flushed(total)))
        assert_same(got, flushed(fused(wide_a[0::2], wide_b[0::2], expected)))


def test_dpbf16_ps_by_hand(intrinsics):
    """Sums that would differ in another order, with a rounding less, or with subnormals."""
    word = np.zeros((LANES, 2), ml_dtypes.bfloat16)
    one = np.ones((LANES, 2), ml_dtypes.bfloat16)
    total = np.zeros(LANES, np.float32)
    word[0], total[0] = (-(2.0**24), 2.0**24), 1.0  # upper first: 1 is lost in 2^24
    word[1], one[1], total[1] = (2.0**-70, 0), (2.0**-70, 0), 0.0  # a subnormal product
    word[2], total[2] = (2.0**-130, 1.0), 0.0  # a subnormal operand
    word[3], total[3] = (2.0**-24, 1.0), 2.0**-24  # 1 + 2^-24 ties to even, twice
    got = intrinsics("dpbf16_ps", np.float32, LANES, total, word, one)
    np.testing.assert_array_equal(got[:4], [0.0, 0.0, 1.0, 1.0])


def test_rounding_to_bfloat16(intrinsics):
    rng = np.random.default_rng(2)
    for _ in range(TURNS):
        a, b = (any_bits(rng, np.float32, LANES) for _ in range(2))
        rounded = [flushed(x).astype(ml_dtypes.bfloat16) for x in (a, b)]
        assert_same(intrinsics("cvtneps_pbh", ml_dtypes.bfloat16, LANES, a), rounded[0])
        both = intrinsics("cvtne2ps_pbh", ml_dtypes.bfloat16, 2 * LANES, b, a)
        assert_same(both, np.concatenate(rounded))
    signalling = np.full(LANES, 0xFF800001, np.uint32).view(np.float32)
    assert (intrinsics("cvtneps_pbh", np.uint16, LANES, signalling) == 0xFFC0).all()


def test_float16(intrinsics):
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    for half in every.reshape(-1, LANES):
        assert_same(intrinsics("cvtph_ps", np.float32, LANES, half), half.astype(np.float32))
    rng = np.random.default_rng(3)
    for _ in range(TURNS):
        x = any_bits(rng, np.float32, LANES) if rng.random() < 0.5 else floats(rng) * np.float32(2.0**-14)
        assert_same(intrinsics("cvtps_ph", np.float16, LANES, x), x.astype(np.float16))


def test_scalef_ps(intrinsics):
    """Rounded once, also where the result is subnormal."""
    rng = np.random.default_rng(4)
    for _ in range(TURNS):
        x, n = floats(rng), rng.uniform(-155, 130, LANES).astype(np.float32)
        expected = np.ldexp(x.astype(np.float64), np.floor(n).astype(int)).astype(np.float32)
        assert_same(intrinsics("scalef_ps", np.float32, LANES, x, n), expected)
    x = np.resize(np.float32([1.0, 1.0, np.nan, 1.4, 1.0, -0.0]), LANES)
    n = np.resize(np.float32([np.nan, 1e9, 1.0, -150.0, -1e9, 3.0]), LANES)
    expected = np.resize(np.float32([np.nan, np.inf, np.nan, 2.0**-149, 0.0, -0.0]), LANES)
    assert_same(intrinsics("scalef_ps", np.float32, LANES, x, n), expected)


def test_sums_and_maxima_of_lanes(intrinsics):
    powers = np.float32(2.0) ** np.arange(LANES, dtype=np.float32)
    assert intrinsics("reduce_add_ps", np.float32, 1, powers)[0] == 2**LANES - 1
    for lane in range(LANES):
        x = np.full(LANES, -np.inf, np.float32)
        x[lane] = -3.0
        assert intrinsics("reduce_max_ps", np.float32, 1, x)[0] == -3.0


@pytest.mark.parametrize(
    ("name", "dtype", "lanes"),
    [
        ("maskz_loadu_ps", np.float32, LANES),
        ("maskz_loadu_epi16", np.uint16, 2 * LANES),
        ("maskz_loadu_epi16_256", np.uint16, LANES),
    ],
)
def test_masked_loads(intrinsics, name, dtype, lanes):
    x = np.arange(1, lanes + 1, dtype=dtype)
    for mask in (0, 1, 0b1011, (1 << lanes) - 1, 1 << (lanes - 1)):
        chosen = mask >> np.arange(lanes) & 1
        np.testing.assert_array_equal(intrinsics(name, dtype, lanes, x, mask), (x * chosen).astype(dtype))


@pytest.mark.parametrize(
    ("name", "dtype"), [("mask_storeu_ps", np.float32), ("mask_storeu_epi16_256", np.uint16)]
)
def test_masked_stores(intrinsics, name, dtype):
    """The others stay: zero, as the caller made them."""
    x = np.arange(1, LANES + 1, dtype=dtype)
    for mask in (0, 1, 0b1011, (1 << LANES) - 1, 1 << (LANES - 1)):
        chosen = mask >> np.arange(LANES) & 1
        np.testing.assert_array_equal(intrinsics(name, dtype, LANES, x, mask), (x * chosen).astype(dtype))


def test_integers(intrinsics):
    rng = np.random.default_rng(5)
    for _ in range(TURNS // 10):
        a, b = (rng.integers(0, 1 << 32, LANES, dtype=np.uint32) for _ in range(2))
        low = a.view(np.uint16)[::2]
        np.testing.assert_array_equal(intrinsics("cvtepi32_epi16", np.uint16, LANES, a), low)
        np.testing.assert_array_equal(intrinsics("cvtepu16_epi32", np.uint32, LANES, low), low)
        np.testing.assert_array_equal(intrinsics("andnot_si512", np.uint32, LANES, a, b), ~a & b)
        words = a.view(np.uint16) % 3, b.view(np.uint16) % 3
        mask = int(intrinsics("cmpeq_epi16_mask", np.uint32, 1, *words)[0])
        np.testing.assert_array_equal(mask >> np.arange(2 * LANES) & 1, words[0] == words[1])


def test_shuffles(intrinsics):
    """Which word goes where: a holds 0 to 15, b 16 to 31."""
    a, b = np.arange(LANES, dtype=np.uint32), np.arange(LANES, 2 * LANES, dtype=np.uint32)
    quarters = np.arange(2 * LANES).reshape(8, 4)

    def picked(name, *operands):
        return intrinsics(name, np.uint32, LANES, *operands).tolist()

    def interleaved(*columns):
        return [int(quarters[q + 4 * side, c]) for q in range(4) for c, side in columns]

    assert picked("unpacklo_epi32", a, b) == interleaved((0, 0), (0, 1), (1, 0), (1, 1))
    assert picked("unpackhi_epi32", a, b) == interleaved((2, 0), (2, 1), (3, 0), (3, 1))
    assert picked("unpacklo_epi64", a, b) == interleaved((0, 0), (1, 0), (0, 1), (1, 1))
    assert picked("unpackhi_epi64", a, b) == interleaved((2, 0), (3, 0), (2, 1), (3, 1))
    assert picked("shuffle_i32x4", a, b) == quarters[[0, 2, 5, 7]].ravel().tolist()
    assert picked("inserti64x4", a, b[:8]) == [*range(8), *range(16, 24)]
    assert intrinsics("extracti64x4", np.uint32, 8, a).tolist() == list(range(8, 16))
    rng = np.random.default_rng(6)
    order, values = rng.integers(0, 32, 32).astype(np.uint16), rng.integers(0, 1 << 16, 32).astype(np.uint16)
    np.testing.assert_array_equal(
        intrinsics("permutexvar_epi16", np.uint16, 32, order, values), values[order]
    )


def test_float_operations(intrinsics):
    """min and max give the second operand where either is NaN."""
    rng = np.random.default_rng(7)
    for _ in range(TURNS):
        a, b = (any_bits(rng, np.float32, LANES) for _ in range(2))
        is_nan = np.isnan(a) | np.isnan(b)
        smaller, larger = np.where(a < b, a, b), np.where(a > b, a, b)
        assert_same(intrinsics("min_ps", np.float32, LANES, a, b), np.where(is_nan, b, smaller))
        assert_same(intrinsics("max_ps", np.float32, LANES, a, b), np.where(is_nan, b, larger))
        unordered = int(intrinsics("cmp_unordered", np.uint16, 1, a, b)[0])
        np.testing.assert_array_equal(unordered >> np.arange(LANES) & 1, is_nan)
        mask = int(rng.integers(0, 1 << 16))
        chosen = (mask >> np.arange(LANES) & 1).astype(bool)
        assert_same(intrinsics("mask_blend_ps", np.float32, LANES, a, b, mask), np.where(chosen, b, a))
        x, y, z = floats(rng), floats(rng), floats(rng)
        assert_same(intrinsics("fmadd_ps", np.float32, LANES, x, y, z), fused(x, y, z))
        halves = (rng.integers(-400, 400, LANES) / 2).astype(np.float32)
        assert_same(intrinsics("roundscale_ps", np.float32, LANES, halves), np.rint(halves))
