"""Same bits for any number of threads, any repeat, any split, any bound, and alone as in a batch."""

import sys
from pathlib import Path

import numpy as np
import pytest

from fag_kernel import abi
from fag_metadata import TARGETS, Target, metadata_for
from fag_metadata.layout import grad_slices

sys.path.insert(0, str(Path(__file__).parent))
from cpu_cases import CAUSAL, LAYOUTS, WINDOW, Case, assert_same_bits

PACKED = {"cu_seqlens_q": (0, 300, 301, 814, 878), "cu_seqlens_kv": (0, 300, 301, 814, 878)}


def cases():
    yield "packed-causal-gqa", Case("TND", n1=8, n2=2, mask_mode=CAUSAL, has_sinks=True, **PACKED)
    yield "packed-window-gqa", Case("TND", n1=8, n2=2, mask_mode=WINDOW, win_left=64, win_right=0, **PACKED)
    yield "one-head", Case("BSND", n1=1, n2=1, s1=700, s2=900, mask_mode=CAUSAL, has_dlse=True)
    yield "one-group", Case("BNSD", n1=3, n2=1, d=40, dv=24, s1=200, s2=1200, dtype="float32")
    yield "many-small", Case("BSND", n1=5, n2=5, d=16, b=7, s1=33, s2=65, dtype="float16", has_sinks=True)
    yield "long-keys", Case("BSND", n1=2, n2=1, d=32, s1=5, s2=9000, mask_mode=CAUSAL)


CASES = dict(cases())


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.mark.parametrize("level", abi.cpu_levels())
def test_bits_do_not_depend_on_threads_or_repeats(case, level):
    abi.set_cpu_level(level)
    try:
        expected = case.run(threads=1)
        for threads in (2, 3, 8, 1, 64):
            assert_same_bits(case.run(threads=threads), expected)
    finally:
        abi.set_cpu_level(None)


def test_twenty_repeats_give_the_same_bits():
    case = CASES["packed-causal-gqa"]
    expected = case.run(threads=3)
    for _ in range(20):
        assert_same_bits(case.run(threads=3), expected)


def test_zeros_of_masked_pairs_do_not_depend_on_threads():
    """All products underflow: a sum is -0.0 after a negative value, +0.0 after 0 * a hidden positive one."""
    case = Case("BSND", n1=1, n2=1, s1=700, s2=700, mask_mode=CAUSAL, dtype="float32")
    case.v = np.copysign(np.float32(1e-45), case.v)
    expected = case.forward(threads=1)
    assert np.signbit(expected[0]).any()
    for threads in (2, 3, 8):
        assert_same_bits(case.forward(threads=threads), expected)


def with_cuts(metadata, cuts):
    """The metadata with other ends of the cores of the backward; the last end stays."""
    words = metadata.copy()
    slots = int(words[11]) >> 16 & 0xFFFF
    where = grad_slices(slots)
    block = words[words[7] :]
    total = block[where["end"]].max()
    ends = [*sorted(cuts), total]
    block[where["used_cubes"]] = len(ends)
    block[where["start"]] = 0
    block[where["end"]] = 0
    block[where["start"]][: len(ends)] = [0, *ends[:-1]]
    block[where["end"]][: len(ends)] = ends
    return words


def test_bits_do_not_depend_on_the_split(case):
    """Metadata of other targets, of other core counts, and cut at random: within units, columns, anywhere."""
    expected = case.run()
    problem = case.problem()
    targets = [
        TARGETS["Ascend950PR_9589"],
        TARGETS["Ascend950PR_950z"],
        Target("one", 1, 2, 0),
        Target("wide", 50, 100, 0),
    ]
    for target in targets:
        for split in ("cann", "balanced"):
            assert_same_bits(case.run(metadata=metadata_for(problem, target, split)), expected)
    metadata = case.metadata()
    total = int(metadata[metadata[7] :][grad_slices(int(metadata[11]) >> 16 & 0xFFFF)["end"]].max())
    rng = np.random.default_rng(1)
    for count in (0, 1, 7, 35):
        assert_same_bits(case.run(metadata=with_cuts(metadata, rng.integers(0, total + 1, count))), expected)


@pytest.mark.parametrize("name", ["packed-causal-gqa", "packed-window-gqa"])
def test_bits_do_not_depend_on_bounds(name):
    case = CASES[name]
    expected = case.run()
    mask = {"mask_mode": case.mask_mode, "win_left": case.win_left, "win_right": case.win_right}
    bounds = {"max_seqlen_q": 4000, "max_seqlen_kv": 520}
    bounded = Case("TND", n1=8, n2=2, has_sinks=case.has_sinks, **mask, **bounds, **PACKED)
    assert_same_bits(bounded.run(), expected)


@pytest.mark.parametrize(
    "mask", [{"mask_mode": CAUSAL}, {"mask_mode": WINDOW, "win_left": 64, "win_right": 0}, {}]
)
def test_a_sequence_alone_gives_the_bits_it_gives_in_a_batch(mask):
    batch = Case("TND", n1=8, n2=2, **PACKED, **mask)
    out, lse, dq, dk, dv, _ = batch.run()
    for begin, end in zip(PACKED["cu_seqlens_q"], PACKED["cu_seqlens_q"][1:], strict=False):
        rows = slice(begin, end)
        for layout in LAYOUTS:
            lengths = {"cu_seqlens_q": (0, end - begin), "cu_seqlens_kv": (0, end - begin)}
            alone = Case(
                layout,
                n1=8,
                n2=2,
                s1=end - begin,
                s2=end - begin,
                **(lengths if layout == "TND" else {}),
                **mask,
            )

            def to_layout(x, layout=layout, rows=rows):
                x = x[rows]
                return np.ascontiguousarray(
                    {"TND": x, "BSND": x[None], "BNSD": x.transpose(1, 0, 2)[None]}[layout]
                )

            alone.q, alone.k, alone.v, alone.dout = (
                to_layout(x) for x in (batch.q, batch.k, batch.v, batch.dout)
            )
            expected = [
                to_layout(out),
                lse[:, rows].reshape(alone.lse_shape),
                *(to_layout(x) for x in (dq, dk, dv)),
            ]
            assert_same_bits(alone.run()[:5], expected)


def test_scaling_one_sequence_leaves_the_others_alone():
    case = Case("TND", n1=4, n2=2, mask_mode=CAUSAL, **PACKED)
    before = case.run()
    case.k[300:301] *= 1000
    after = case.run()
    keep = np.ones(878, bool)
    keep[300:301] = False
    assert_same_bits([after[i][keep] for i in (0, 2, 3, 4)], [before[i][keep] for i in (0, 2, 3, 4)])


def test_inputs_are_not_written():
    case = CASES["packed-causal-gqa"]
    inputs = [case.q, case.k, case.v, case.dout, case.sinks]
    copies = [x.copy() for x in inputs]
    case.run()
    assert_same_bits(inputs, copies)
