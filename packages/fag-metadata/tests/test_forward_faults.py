"""Section 7 of the format page, forward half: what ours does where CANN is wrong or could do better.

The numbers are the page's; docs/metadata-differences.md lists them all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fag_metadata import TARGETS, AttentionProblem, InvalidProblemError, Target, balance, metadata_for, unpack
from fag_metadata.forward_balanced import split_forward_balanced
from fag_metadata.forward_check import find_forward_faults
from fag_metadata.forward_split import split_forward

ASCEND = TARGETS["Ascend950PR_9599"]


def dense(b: int, n1: int, n2: int, s1: int, s2: int, mask: int = 0, **kwargs: Any) -> AttentionProblem:
    return AttentionProblem.from_metadata_args(
        n1, n2, 128, batch_size=b, max_seqlen_q=s1, max_seqlen_kv=s2, mask_mode=mask, **kwargs
    )


def max_over_mean(problem: AttentionProblem, split: str) -> float:
    metadata = metadata_for(problem, ASCEND, split, is_grad_enabled=False)  # type: ignore[arg-type]
    return balance(metadata, problem).forward.max_over_mean


def test_fault_8_merging_uses_more_vector_cores_than_cube_cores() -> None:
    problem = dense(1, 8, 1, 16, 65536)
    split = split_forward(problem, ASCEND)
    assert split.has_fd
    assert int((split.fd[0, :, 5] > 0).sum()) > ASCEND.cube_cores
    assert find_forward_faults(split, problem) == []


def test_fault_11_tail_blocks_count_as_full_ones_in_cann_s_split_only() -> None:
    # 3 x 3 blocks a head: one is full, two hold 8 keys, two hold 8 rows
    problem = dense(2, 20, 20, 136, 136)
    assert max_over_mean(problem, "balanced") < 0.95 * max_over_mean(problem, "cann")


def test_fault_12_few_blocks_leave_cores_idle_in_cann_s_split_only() -> None:
    problem = dense(1, 1, 1, 640, 640, mask=3)
    cann = balance(metadata_for(problem, ASCEND, "cann"), problem).forward
    assert (cann.used_cores, int(cann.tiles.max())) == (5, 5)
    ours = balance(metadata_for(problem, ASCEND, "balanced"), problem).forward
    assert (ours.used_cores, int(ours.tiles.max())) == (15, 1)


def test_fault_13_section_sizes_ignore_grouped_heads_as_in_cann() -> None:
    assert split_forward(dense(1, 64, 1, 8192, 8192), ASCEND).section_num == 1
    assert split_forward(dense(1, 64, 64, 8192, 8192), ASCEND).section_num == 6


def test_fault_14_diagonal_window_counts_as_empty_for_sections_as_in_cann() -> None:
    sections = [
        split_forward(dense(2, 16, 16, 8192, 8192, mask=4, win_left=0, win_right=right), ASCEND).section_num
        for right in (0, 1)
    ]
    assert sections == [1, 3]


def test_fault_16_whole_rows_leave_cores_idle_in_cann_s_split_only() -> None:
    problem = dense(5, 8, 8, 256, 256)
    assert max_over_mean(problem, "cann") == pytest.approx(1.35, abs=0.005)
    assert max_over_mean(problem, "balanced") == pytest.approx(1.125)


@pytest.mark.parametrize("vectors", [8, 16])
def test_block_cost_stays_the_same_for_any_number_of_vector_cores(vectors: int) -> None:
    # CANN's float formula stops being constant there; no target has so many.
    problem = dense(2, 4, 4, 3000, 3000, mask=3)
    target = Target("wide", 6, 6 * vectors)
    for make in (split_forward, split_forward_balanced):
        assert find_forward_faults(make(problem, target), problem) == []


def test_one_length_for_all_batches_is_refused() -> None:
    with pytest.raises(InvalidProblemError, match=r"seqused_q must have B elements, got 1 elements \(B=3\)"):
        dense(3, 8, 8, 100, 100, seqused_q=[50])


def test_more_than_36_cores_and_many_sections_are_packed_whole() -> None:
    problem = dense(8, 8, 8, 8192, 8192)
    view = unpack(metadata_for(problem, Target("big", 128, 256), "cann"))
    assert view.forward.section_num > 1
    assert view.forward.fa.shape == (view.forward.section_num, 128, 16)
    assert find_forward_faults(view.forward, problem) == []


def test_long_rows_do_not_overflow() -> None:
    problem = dense(1, 128, 1, 500_000, 1_000_000, mask=3)
    for make in (split_forward, split_forward_balanced):
        split = make(problem, ASCEND)
        assert (split.fa >= 0).all()
        assert find_forward_faults(split, problem) == []
    figures = balance(metadata_for(problem, ASCEND, "balanced", is_grad_enabled=False), problem)
    assert int(figures.forward.area.astype(object).sum()) == 128 * (
        500_000 * 500_000 + 500_000 * 500_001 // 2
    )
    assert np.isfinite(figures.forward.max_over_mean)
