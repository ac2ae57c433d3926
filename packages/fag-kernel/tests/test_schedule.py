"""How many cores are launched."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fag_kernel.plan import plan
from fag_metadata import AttentionProblem, Target


def dense(n1, n2, d, b, s1, s2, **options):
    return AttentionProblem.from_metadata_args(
        n1, n2, d, batch_size=b, max_seqlen_q=s1, max_seqlen_kv=s2, **options
    )


@pytest.mark.parametrize(
    ("problem", "route", "block_dim"),
    [
        # 2*8*8*8 = 1024 tiles, 29 per core, 1024/29 rounded up
        (dense(8, 2, 128, 2, 1000, 1000), "BN2GS1S2", 36),
        # 37 heads of one tile, 2 per core
        (dense(37, 37, 128, 1, 128, 128), "BN2_SINGLE", 19),
        # 148 heads of 16 tiles: BN2 counts heads, 5 per core
        (dense(37, 37, 128, 4, 512, 512), "BN2_MULTIBLK", 30),
        # 3 tiles
        (dense(1, 1, 192, 1, 300, 100), "BN2GS1S2", 3),
    ],
)
def test_dense_problems_launch_the_cores_that_get_work(problem, route, block_dim):
    tiling = plan(problem, "Ascend950PR_9599")
    assert (tiling.route.name, tiling.block_dim) == (route, block_dim)


@pytest.mark.parametrize(
    "problem",
    [
        dense(1, 1, 64, 1, 10, 10, mask_mode="causal"),
        dense(1, 1, 64, 1, 10, 10, mask_mode="sliding_window", win_left=1),
        dense(1, 1, 64, 1, 10, 10, seqused_q=[3]),
        dense(1, 1, 64, 1, 10, 10, seqused_kv=[3]),
        AttentionProblem.from_metadata_args(
            1, 1, 64, cu_seqlens_q=[0, 10], cu_seqlens_kv=[0, 10], layout_q="TND"
        ),
    ],
    ids=["causal", "window", "seqused_q", "seqused_kv", "tnd"],
)
def test_all_others_launch_every_core(problem):
    assert plan(problem, "Ascend950PR_9599").block_dim == 36


@pytest.mark.parametrize(
    "problem",
    [dense(2, 1, 64, 0, 10, 10), dense(2, 1, 64, 1, 0, 10), dense(2, 1, 64, 1, 10, 0)],
    ids=["b0", "s1-0", "s2-0"],
)
def test_empty_problems_launch_one_core_to_clear_the_outputs(problem):
    assert plan(problem, "Ascend950PR_9599").block_dim == 1


@given(
    heads=st.integers(1, 200),
    s1=st.integers(1, 5000),
    s2=st.integers(1, 5000),
    cores=st.integers(1, 64),
)
def test_used_cores_hold_all_tiles_and_none_is_idle(heads, s1, s2, cores):
    tiling = plan(dense(heads, 1, 192, 1, s1, s2), Target("any", cores, 2 * cores))
    tiles = heads * -(-s1 // 128) * -(-s2 // 128)
    per_core = -(-tiles // cores)
    starts = np.arange(tiling.block_dim) * per_core
    assert tiling.block_dim <= cores
    assert starts[-1] < tiles <= tiling.block_dim * per_core
