"""The product on AMX tiles against float64 and, bit by bit, against what Intel's manual says of TDPBF16PS.

Once with tiles emulated by a header, once with the compiler's own instructions, which the handler of a
signal executes.
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

pytestmark = pytest.mark.skipif(
    "FAG_SIMDE" not in os.environ, reason="tests emulated tiles: tox run -e avx512-emulated"
)

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "packages" / "fag-kernel" / "csrc" / "cpu"
BF16 = ml_dtypes.bfloat16
GROUP = 16  # words that TDPBF16PS takes at once
REPLACE, CONTINUE, ADD = range(3)
#: Merge, and whether the sums start from an array of their own.
MERGES = ((REPLACE, False), (REPLACE, True), (CONTINUE, False), (ADD, False), (ADD, True))
TILES = {"emulated": [], "trapped": ["-DFAG_TRAP_AMX", "-mamx-tile", "-mamx-bf16"]}


@pytest.fixture(scope="module", params=TILES)
def built(request, tmp_path_factory):
    """The library of gemm.cpp, with either kind of tiles."""
    library = tmp_path_factory.mktemp("gemm") / "gemm.so"
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    flags = ["-std=c++20", "-O3", "-mavx2", "-mfma", "-mf16c", "-Wno-psabi", *TILES[request.param]]
    headers = ["-isystem", os.environ["FAG_SIMDE"], "-include", str(HERE / "avx512_emulated.hpp")]
    source = ["-I", str(KERNELS), str(HERE / "gemm.cpp"), "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([compiler, *flags, *headers, *source], check=True)
    return library


@pytest.fixture(scope="module")
def gemm(built):
    """Calls the product: `gemm(a, b, merge, c, start)`, a [m][2 k] and b [2 k][n] in bfloat16; returns c.

    Around A and below B lie NaNs. What lies around C must stay, and no tile may stay configured.
    """
    library = ctypes.CDLL(str(built))
    library.gemm.restype = ctypes.c_bool

    def call(a, b, merge=REPLACE, c=None, start=None):
        m, (depth, n) = len(a), b.shape
        k = depth // 2
        around_a = np.full((m + 1, 2 * (k + 3)), np.nan, BF16)
        around_a[:m, : 2 * k] = a
        words = np.full((k + 1, n, 2), np.nan, BF16)
        words[:k] = b.reshape(k, 2, n).transpose(0, 2, 1)
        around_c = np.full((m + 1, n + 16), np.nan, np.float32)
        around_c[:m, :n] = np.nan if c is None else c
        starts = None if start is None else np.pad(start, ((0, 0), (0, 16)))
        arrays = (around_a, words, around_c, starts)
        a, b, c, start = (None if x is None else x.ctypes.data_as(ctypes.c_void_p) for x in arrays)
        lda, ldc = ctypes.c_int64(k + 3), ctypes.c_int64(n + 16)
        is_configured = library.gemm(a, lda, b, c, ldc, m, n, k, merge, start)
        assert not is_configured
        assert np.isnan(around_c[m:]).all()
        assert np.isnan(around_c[:, n:]).all()
        return around_c[:m, :n]

    return call


def as_in_the_manual(a, b, c):
    """c + a b, the first and the second values of each group apart."""
    a, b = flushed(a.astype(np.float32)), flushed(b.astype(np.float32))
    for group in range(0, len(b), 2 * GROUP):
        sums = [np.zeros(c.shape, np.float32) for _ in range(2)]
        for at in range(group, min(group + 2 * GROUP, len(b))):
            sums[at % 2] = flushed(fused(a[:, at : at + 1], b[at : at + 1], sums[at % 2]))
        c = flushed(flushed(c) + flushed(sums[0] + sums[1]))
    return c


def whole_numbers(rng, *shape):
    """Small enough that every sum is exact."""
    return rng.integers(-8, 9, shape).astype(np.float32)


def close_numbers(rng, *shape):
    """Numbers whose sums round."""
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)).astype(np.float32)


def assert_same_bits(actual, expected):
    np.testing.assert_array_equal(actual.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


@pytest.mark.parametrize("n", [16, 32, 48, 64])
def test_every_shape(gemm, n):
    rng = np.random.default_rng(n)
    for m in (*range(41), 63, 64, 65, 128):
        for k in (*range(41), 64):
            a, b = whole_numbers(rng, m, 2 * k).astype(BF16), whole_numbers(rng, 2 * k, n).astype(BF16)
            c, start = whole_numbers(rng, m, n), whole_numbers(rng, m, n)
            product = a.astype(np.float64) @ b.astype(np.float64)
            for merge, has_start in MERGES:
                expected = product + (start if has_start else 0) + (0 if merge == REPLACE else c)
                got = gemm(a, b, merge, None if merge == REPLACE else c, start if has_start else None)
                assert (got == expected).all(), (m, k, merge, has_start)


@pytest.mark.parametrize("k", [1, 15, 16, 17, 36, 64])
@pytest.mark.parametrize(("m", "n"), [(3, 16), (24, 64), (37, 48)])
def test_rounding(gemm, m, n, k):
    rng = np.random.default_rng(k)
    for _ in range(10):
        a, b = close_numbers(rng, m, 2 * k).astype(BF16), close_numbers(rng, 2 * k, n).astype(BF16)
        c, start = close_numbers(rng, m, n), close_numbers(rng, m, n)
        zero = np.zeros_like(c)
        assert_same_bits(gemm(a, b), as_in_the_manual(a, b, zero))
        assert_same_bits(gemm(a, b, start=start), as_in_the_manual(a, b, start))
        assert_same_bits(gemm(a, b, CONTINUE, c), as_in_the_manual(a, b, c))
        assert_same_bits(gemm(a, b, ADD, c), c + as_in_the_manual(a, b, zero))
        assert_same_bits(gemm(a, b, ADD, c, start), c + as_in_the_manual(a, b, start))


def test_subnormal_numbers_are_zero(gemm):
    a, b = np.zeros((3, 2), BF16), np.ones((2, 16), BF16)
    a[0], a[1], a[2] = (2.0**-130, 1), (2.0**-70, 0), (2.0**-60, 0)
    b[0, 1:3] = 2.0**-70, 2.0**-60
    got = gemm(a, b)
    assert got[0, 0] == 1.0
    assert got[1, 1] == 0.0
    assert got[2, 2] == 2.0**-120
    kept = np.full((3, 16), 2.0**-130, np.float32)
    assert gemm(a, b, CONTINUE, kept)[1, 1] == 0.0


def test_bits_depend_on_the_reduction_alone(gemm):
    """Not on how rows and columns are blocked, nor on cuts at multiples of 16 words; other cuts may show."""
    rng = np.random.default_rng(9)
    a, b = close_numbers(rng, 71, 2 * 56).astype(BF16), close_numbers(rng, 2 * 56, 64).astype(BF16)
    whole = gemm(a, b)
    for row, end in ((0, 8), (8, 24), (24, 71)):
        for col, col_end in ((0, 16), (16, 64)):
            assert_same_bits(gemm(a[row:end], b[:, col:col_end]), whole[row:end, col:col_end])
    for cut in (16, 32, 48):
        first = gemm(a[:, : 2 * cut], b[: 2 * cut])
        assert_same_bits(gemm(a[:, 2 * cut :], b[2 * cut :], CONTINUE, first), whole)
    first = gemm(a[:, :14], b[:14])
    assert not np.array_equal(gemm(a[:, 14:], b[14:], CONTINUE, first), whole)


def test_what_is_not_finite_stays_in_its_row_and_column(gemm):
    rng = np.random.default_rng(10)
    a, b = close_numbers(rng, 40, 40).astype(BF16), close_numbers(rng, 40, 64).astype(BF16)
    expected = gemm(a, b)
    a[17, 3], b[39, 50] = np.nan, np.inf
    got = gemm(a, b)
    assert np.isnan(got[17]).all()
    is_finite = np.ones_like(got, bool)
    is_finite[17] = is_finite[:, 50] = False
    assert not np.isfinite(got[:, 50]).any()
    assert_same_bits(got[is_finite], expected[is_finite])


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ("use(0, 4, 6)", "a tile is used without a configuration"),
        ("configure(32, 17)", "LDTILECFG: a tile has 16 rows of 64 bytes at most"),
        ("configure(16, 0)", "LDTILECFG: a tile has both rows and columns or neither"),
        ("configure(16, 8); library.use(2, 5, 6)", "a tile is used that the configuration leaves out"),
        ("configure(24, 16); library.use(0, 5, 6)", "TDPBF16PS: C and A must have the same rows"),
        ("configure(32, 8); library.use(0, 6, 4)", "TDPBF16PS: C and A must have the same rows"),
        ("configure(16, 16)", "a thread ends with its tiles configured"),
    ],
)
def test_mistakes_end_the_process(built, mistake, sentence):
    code = f"import ctypes; library = ctypes.CDLL({str(built)!r}); library.{mistake}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert f"emulated AMX: {sentence}" in done.stderr
