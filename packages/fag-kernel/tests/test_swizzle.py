"""Swizzle: the published timings, every reason for a rejection, and the arithmetic behind the decision."""

import pytest

from fag_kernel.ascend950.model import PUBLISHED
from fag_kernel.plan import plan
from fag_metadata import AttentionProblem, Target

KNOWN_MISS = (16, 8192, 512)


def dense(n1, s1, s2, *, n2=None, b=1, d=128, **options):
    return AttentionProblem.from_metadata_args(
        n1, n2 or n1, d, batch_size=b, max_seqlen_q=s1, max_seqlen_kv=s2, **options
    )


def swizzle_row(problem, target="Ascend950PR_9599"):
    tiling = plan(problem, target)
    row = next(row for row in tiling.trace if row.stage == "swizzle")
    assert tiling.is_swizzle == (row.verdict == "chosen") == tiling.key.is_swizzle
    return row


@pytest.mark.parametrize(
    ("heads", "s1", "s2", "linear", "swizzle"), PUBLISHED, ids=[f"n{n}-s{a}x{b}" for n, a, b, *_ in PUBLISHED]
)
def test_decision_follows_the_published_timings(heads, s1, s2, linear, swizzle):
    row = swizzle_row(dense(heads, s1, s2))
    wanted = swizzle < linear and (heads, s1, s2) != KNOWN_MISS
    assert (row.verdict == "chosen") == wanted, row.reason


def test_known_miss_has_too_few_columns():
    assert swizzle_row(dense(*KNOWN_MISS)).reason == "too few columns: 64 < 72"


CORE = {"cube_cores": 2, "vector_cores": 4}
SMALL_L2 = Target(name="small", l2_bytes=1, **CORE)


@pytest.mark.parametrize(
    ("problem", "target", "verdict", "reason"),
    [
        (dense(4, 100, 100), SMALL_L2, "capability", "template BN2 has no swizzle"),
        (
            AttentionProblem.from_metadata_args(
                4, 4, 64, cu_seqlens_q=[0, 900], cu_seqlens_kv=[0, 900], layout_q="TND"
            ),
            SMALL_L2,
            "capability",
            "layout TND has no swizzle",
        ),
        (
            dense(4, 900, 900, d=192, mask_mode="causal"),
            SMALL_L2,
            "capability",
            "head dims above 128 with a mask have no swizzle",
        ),
        (dense(4, 900, 0), SMALL_L2, "capability", "there is no tile"),
        (
            dense(1, 129, 1, d=192),
            Target(name="wide", cube_cores=3, vector_cores=6, l2_bytes=1),
            "capability",
            "not all cores are used: 2 < 3",
        ),
        (
            dense(4, 900, 900),
            Target(name="unknown", l2_bytes=0, **CORE),
            "preference",
            "the size of L2 is not known",
        ),
        (dense(4, 900, 1100), SMALL_L2, "preference", "columns outnumber rows of tiles: 9 > 8"),
        (dense(1, 900, 128), SMALL_L2, "preference", "too few columns: 1 < 4"),
        (
            dense(4, 900, 900),
            Target(name="large", l2_bytes=1 << 62, **CORE),
            "preference",
            "live heads fit L2",
        ),
    ],
)
def test_each_rejection_has_its_reason(problem, target, verdict, reason):
    row = swizzle_row(problem, target)
    assert row.verdict == verdict
    assert reason in row.reason


def head_bytes(s1, s2, d, g):
    return 3 * s1 * d * 2 + s1 * d * 4 + (2 * s2 * d * 2 + 2 * s2 * d * 4) // g


@pytest.mark.parametrize(
    ("s1", "s2", "factor"),
    [(1024, 512, 1.25), (1024, 640, 2.0), (1024, 1024, 2.0), (1100, 512, 1.25)],
    ids=["tall", "not-tall", "square", "tall-odd"],
)
def test_threshold_is_exact_in_l2(s1, s2, factor):
    """T = 1.25 x L2 if s1_outer >= 2 s2_outer, else 2 x L2; live bytes <= T are linear."""
    live = 4 * head_bytes(s1, s2, 128, 2)  # 4 cores start in 4 heads
    l2 = int(-(-live // factor))  # the smallest L2 with live <= T
    for size, verdict in ((l2, "preference"), (l2 - 1, "chosen")):
        target = Target(name="exact", cube_cores=4, vector_cores=8, l2_bytes=size)
        row = swizzle_row(dense(4, s1, s2, n2=2), target)
        assert row.verdict == verdict
        assert str(live) in row.reason


def test_live_heads_are_those_at_the_starts_of_the_cores():
    # 3 heads of 9 tiles on 4 cores: cores start at tiles 0, 7, 14, 21, that is in heads 0, 0, 1, 2.
    target = Target(name="four", cube_cores=4, vector_cores=8, l2_bytes=1)
    row = swizzle_row(dense(3, 384, 384, n2=1), target)
    assert f"{3 * head_bytes(384, 384, 128, 3)} >" in row.reason
    # One head of 64 tiles: all cores start in it.
    row = swizzle_row(dense(1, 1024, 1024), target)
    assert f"{head_bytes(1024, 1024, 128, 1)} >" in row.reason


def test_masks_and_seqused_launch_all_cores_and_may_swizzle():
    target = Target(name="wide", cube_cores=7, vector_cores=14, l2_bytes=1)
    for options in ({"mask_mode": "causal"}, {"seqused_q": [3]}):
        problem = dense(2, 1200, 1200, n2=1, **options)
        assert plan(problem, target).block_dim == 7
        assert swizzle_row(problem, target).verdict == "chosen"


def test_the_longest_sequences_do_not_overflow():
    side = (1 << 31) - 1
    row = swizzle_row(dense(4096, side, side, n2=1), "Ascend950PR_9599")
    assert row.verdict == "chosen"
    assert f"{36 * head_bytes(side, side, 128, 4096)} >" in row.reason
