"""The time model counts blocks exactly; its times are a model and only their order is tested."""

from __future__ import annotations

import numpy as np
import pytest

from fag_kernel.ascend950.model import Assumptions, compare_with_published, estimate
from fag_kernel.ascend950.tile_table import tile_sizes
from fag_kernel.plan import plan
from fag_metadata import AttentionProblem, metadata_for

TARGET = "Ascend950PR_9599"


def make(heads: int = 4, s1: int = 1024, s2: int = 1024, **options: object) -> AttentionProblem:
    sizes = {"batch_size": 1, "max_seqlen_q": s1, "max_seqlen_kv": s2}
    return AttentionProblem.from_metadata_args(heads, heads, 128, **sizes, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mask", "win"), [(0, (-1, -1)), (3, (-1, -1)), (4, (200, 50))])
@pytest.mark.parametrize(("s1", "s2"), [(1024, 1024), (700, 900), (1000, 300)])
def test_counted_work_is_that_of_the_visible_blocks(
    mask: int, win: tuple[int, int], s1: int, s2: int
) -> None:
    problem = make(s1=s1, s2=s2, mask_mode=mask, win_left=win[0], win_right=win[1])
    answer = estimate(plan(problem, TARGET), metadata_for(problem, TARGET))
    bm, bn = tile_sizes("accumulate", 128, 128)
    shift = np.arange(s2)[None, :] - np.arange(s1)[:, None] - (s2 - s1)
    seen = np.ones((s1, s2), bool)
    if mask == 3:
        seen = shift <= 0
    if mask == 4:
        seen = (shift >= -win[0]) & (shift <= win[1])
    padded = np.zeros((-(-s1 // bm) * bm, -(-s2 // bn) * bn), bool)
    padded[:s1, :s2] = seen
    blocks = padded.reshape(padded.shape[0] // bm, bm, padded.shape[1] // bn, bn).any((1, 3)).sum()
    assert answer.total.macs == 4 * blocks * bm * bn * 5 * 128


def test_masked_and_parallel_work_is_faster() -> None:
    def seconds(problem: AttentionProblem, target: str = TARGET, form: str = "accumulate") -> float:
        return estimate(plan(problem, target), metadata_for(problem, target), form=form).overlapped_s  # type: ignore[arg-type]

    dense = seconds(make(8, 4096, 4096))
    assert seconds(make(8, 4096, 4096, mask_mode=3)) < 0.7 * dense
    assert dense < 0.5 * seconds(make(8, 4096, 4096), "Ascend950DT_950x")
    assert dense < seconds(make(8, 4096, 4096), form="deterministic")


def test_serial_time_bounds_the_overlapped_one() -> None:
    problem = make(8, 2048, 2048)
    answer = estimate(
        plan(problem, TARGET), metadata_for(problem, TARGET), assumptions=Assumptions(launch_s=0.0)
    )
    assert answer.overlapped_s < answer.serial_s
    assert answer.slowest.macs <= answer.total.macs


def test_comparison_has_a_row_per_published_timing() -> None:
    lines = compare_with_published()
    assert len(lines) == 2 + 14
    assert "MODEL" in lines[0]
