"""The workspace: sections, offsets, and that sizes cannot overflow."""

import pytest

from fag_kernel.plan import DEFAULT_LIBAPI_RESERVE_BYTES, plan
from fag_metadata import AttentionProblem

TARGET = "Ascend950PR_9599"


def dense(n1, n2, d, dv, b, s1, s2, layout="BSND", **options):
    return AttentionProblem.from_metadata_args(
        n1,
        n2,
        d,
        head_dim_v=dv,
        batch_size=b,
        max_seqlen_q=s1,
        max_seqlen_kv=s2,
        layout_q=layout,
        **options,
    )


@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
@pytest.mark.parametrize("reserve", [0, 16 << 20])
def test_sections_follow_each_other(layout, reserve):
    tiling = plan(dense(8, 2, 128, 64, 3, 200, 500, layout), TARGET, libapi_reserve_bytes=reserve)
    dq, dk, dv = 3 * 200 * 8 * 128 * 4, 3 * 500 * 2 * 128 * 4, 3 * 500 * 2 * 64 * 4
    assert tiling.dq_offset == reserve
    assert tiling.dk_offset == reserve + dq
    assert tiling.dv_offset == reserve + dq + dk
    assert tiling.workspace_bytes == reserve + dq + dk + dv + 128 * 128 * 4


def test_packed_batches_need_their_tokens_only():
    """One sequence of 4096 and 4096 of length 1: b * s1 rows would be 4 GiB."""
    cu = [0, 4096, *range(4097, 4097 + 4096)]
    problem = AttentionProblem.from_metadata_args(1, 1, 64, cu_seqlens_q=cu, cu_seqlens_kv=cu, layout_q="TND")
    tiling = plan(problem, TARGET)
    assert tiling.workspace_bytes == (3 * 8192 * 64 + 128 * 64) * 4


@pytest.mark.parametrize(("s", "route"), [(128, "BN2_SINGLE"), (512, "BN2_MULTIBLK")])
@pytest.mark.parametrize("reserve", [0, 4096])
def test_bn2_needs_the_reserve_only(s, route, reserve):
    tiling = plan(dense(64, 64, 64, 64, 4, s, s), TARGET, libapi_reserve_bytes=reserve)
    assert tiling.route.name == route
    assert (tiling.workspace_bytes, tiling.dq_offset, tiling.dv_offset) == (reserve, reserve, reserve)


def test_reserve_is_zero_by_default():
    assert DEFAULT_LIBAPI_RESERVE_BYTES == 0
    assert plan(dense(2, 1, 64, 64, 1, 10, 10), TARGET).dq_offset == 0


def test_sizes_above_int32_are_exact():
    side = (1 << 31) - 1
    tiling = plan(dense(2, 1, 128, 128, 1, side, side), TARGET)
    assert tiling.workspace_bytes == (side * 2 * 128 + 2 * side * 128 + 128 * 128) * 4


def test_negative_reserve_is_an_error():
    with pytest.raises(ValueError, match="libapi_reserve_bytes must be between 0 and 2\\^62, got -1"):
        plan(dense(2, 1, 64, 64, 1, 10, 10), TARGET, libapi_reserve_bytes=-1)


def test_overflow_is_an_error_by_name():
    side = (1 << 31) - 1
    with pytest.raises(OverflowError, match="elements of a tensor must fit int64"):
        plan(dense(side, side, 128, 128, 65535, side, side), TARGET)
    with pytest.raises(ValueError, match="elements_q must be at most 2\\^55, got 72057594037927936"):
        plan(dense(2**20, 2**20, 128, 128, 2, 2**28, 1), TARGET)
