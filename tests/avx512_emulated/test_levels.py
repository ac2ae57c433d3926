"""On a CPU without AMX the emulated levels are offered, run, and compute what the instructions do."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from fag_kernel import abi, report

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "fag-kernel" / "tests"))
from cpu_cases import BOUND, CAUSAL, DTYPES, WINDOW, Case, assert_same_bits, relative_error

pytestmark = pytest.mark.skipif(
    "FAG_SIMDE" not in os.environ, reason="tests emulated levels: tox run -e avx512-emulated"
)

SHAPES = (
    {"s1": 200, "s2": 300, "d": 128},
    {"s1": 77, "s2": 131, "d": 72, "dv": 40, "mask_mode": CAUSAL},
    {"s1": 65, "s2": 64, "d": 33, "dv": 17, "mask_mode": WINDOW, "win_left": 20, "win_right": 3},
)


@pytest.fixture
def at_level():
    """Runs a function at a level and makes sure that it did."""

    def run(level, function, *args):
        abi.set_cpu_level(level)
        assert abi.cpu_level() == level
        return function(*args)

    yield run
    abi.set_cpu_level(None)


def test_the_levels_are_those_of_the_emulating_build():
    flags = Path("/proc/cpuinfo").read_text().split()
    assert "avx2" in flags
    assert "amx_bf16" not in flags
    assert abi.cpu_levels() == ("portable", "avx2", "avx512", "avx512_bf16", "amx_bf16")
    assert abi.cpu_level() == "avx512_bf16"


def test_info_says_which_level_runs_only_by_name():
    lines = list(report.info_lines())
    assert "CPU levels       portable, avx2, avx512, avx512_bf16, amx_bf16" in lines
    assert "only by name     amx_bf16: it has never run on hardware" in lines
    assert "level in use     avx512_bf16" in lines


@pytest.mark.parametrize(
    ("q", "k", "wide", "pairs", "tiles"),
    [
        # 1, 0, -2^24, 2^24: in pairs the upper value comes first, and 2^24 + 1 rounds to 2^24.
        pytest.param((1, 0, -(2**12), 2**12), (1, 1, 2**12, 2**12), 1.0, 0.0, 1.0, id="order of pairs"),
        # 2^24, -2^24, 1: in tiles first and second values are summed apart.
        pytest.param((2**12, -(2**12), 1), (2**12, 2**12, 1), 1.0, 1.0, 0.0, id="sums apart"),
        pytest.param((2**-70,), (2**-70,), 2**-140, 0.0, 0.0, id="subnormal product"),
        pytest.param((2**-130,), (2**20,), 2**-110, 0.0, 0.0, id="subnormal operand"),
        pytest.param((2**-60, 1), (2**-60, 2**-100), 2**-100, 2**-100, 2**-100, id="normal"),
    ],
)
def test_a_bfloat16_score_is_summed_as_the_instruction_does(at_level, q, k, wide, pairs, tiles):
    """A row that sees one key has its score as lse."""
    case = Case(dtype="bfloat16", n1=1, n2=1, d=16, s1=1, s2=1, scale=1.0)
    for array, values in ((case.q, q), (case.k, k)):
        array[...] = 0
        array[..., : len(values)] = values
    for level in abi.cpu_levels():
        _, lse = at_level(level, case.forward)
        expected = {"avx512_bf16": pairs, "amx_bf16": tiles}.get(level, wide)
        assert lse.item() == pytest.approx(expected, rel=1e-6, abs=0), level


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_levels_agree(at_level, dtype, shape):
    """Each is within the bound of float64, so two are within twice the bound of each other."""
    case = Case("BSND", dtype, n1=4, n2=2, has_sinks=True, has_dlse=True, **shape)
    out, lse = at_level("portable", case.forward)
    results = {level: at_level(level, case.backward, out, lse) for level in abi.cpu_levels()}
    for level in abi.cpu_levels()[1:]:
        assert relative_error(at_level(level, case.forward)[0], out.astype(np.float64)) < 2 * BOUND[dtype]
        for x, wanted in zip(results[level], results["portable"], strict=True):
            assert relative_error(x, wanted.astype(np.float64)) < 2 * BOUND[dtype], level
    if dtype == "float32":
        # dV sums P in ascending order whatever the width of vectors; dQ and dK depend on sums over lanes.
        assert_same_bits([results["avx512"][2]], [results["avx2"][2]])
        assert_same_bits(results["avx512_bf16"], results["avx512"])
        assert_same_bits(results["amx_bf16"], results["avx512"])
        assert not np.array_equal(results["avx512"][0], results["avx2"][0]), "another level is other code"
