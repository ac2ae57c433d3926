"""The forward half of check: right splits pass, and every kind of damage is named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fag_metadata import TARGETS, AttentionProblem, ForwardSplit
from fag_metadata.forward_balanced import split_forward_balanced
from fag_metadata.forward_split import split_forward
from fag_metadata.split_check import find_forward_faults

ASCEND = TARGETS["Ascend950PR_9599"]
PROBLEM = AttentionProblem.from_metadata_args(
    2, 2, 64, batch_size=1, max_seqlen_q=640, max_seqlen_kv=640, mask_mode=3
)


def damaged(change: Callable[[np.ndarray, np.ndarray], None]) -> ForwardSplit:
    split = split_forward_balanced(PROBLEM, ASCEND)
    assert split.has_fd
    change(split.fa[0], split.fd[0])
    return split


def test_right_splits_have_no_findings() -> None:
    for target in (ASCEND, TARGETS["cpu"]):
        for make in (split_forward, split_forward_balanced):
            assert find_forward_faults(make(PROBLEM, target), PROBLEM) == []


def leave_out_a_block(fa: np.ndarray, fd: np.ndarray) -> None:
    fa[3, 5] -= 1


def do_a_block_twice(fa: np.ndarray, fd: np.ndarray) -> None:
    fa[4, 2] -= 1


def stop_before_the_start(fa: np.ndarray, fd: np.ndarray) -> None:
    fa[5, 3:6] = 0, 0, 1
    fa[6, 0:3] = 0, 0, 1


def leave_the_problem(fa: np.ndarray, fd: np.ndarray) -> None:
    fa[5, 4] = 99


def skip_a_core(fa: np.ndarray, fd: np.ndarray) -> None:
    fa[5] = 0


def write_beside_the_ranges(fa: np.ndarray, fd: np.ndarray) -> None:
    fa[35, 6] = 4


def share_a_slot(fa: np.ndarray, fd: np.ndarray) -> None:
    fa[4, 6] -= 1


def forget_a_merge(fa: np.ndarray, fd: np.ndarray) -> None:
    fd[: (fd[:, 1] == fd[0, 1]).sum()][fd[: (fd[:, 1] == fd[0, 1]).sum(), 0] == fd[0, 0]] = 0


def merge_too_few(fa: np.ndarray, fd: np.ndarray) -> None:
    fd[0, 3] -= 1


def merge_the_wrong_slot(fa: np.ndarray, fd: np.ndarray) -> None:
    fd[0, 2] += 1


def leave_out_merge_rows(fa: np.ndarray, fd: np.ndarray) -> None:
    fd[0, 5] -= 1


def merge_rows_twice(fa: np.ndarray, fd: np.ndarray) -> None:
    fd[0, 5] = 128  # all rows, and the next cores a part of them again


def merge_a_whole_row(fa: np.ndarray, fd: np.ndarray) -> None:
    last = int(np.flatnonzero(fd[:, 5])[-1])
    fd[last + 1, :6] = 0, 0, 0, 2, 0, 128


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        (leave_out_a_block, "start_bn", "are in no range"),
        (do_a_block_twice, "start_bn", "are in two ranges"),
        (stop_before_the_start, "end_bn", "must end behind its start"),
        (leave_the_problem, "start_bn", "must be places of the problem"),
        (skip_a_core, "end_bn", "core 5 has no range but core 6 has"),
        (write_beside_the_ranges, "start_bn", "no range, so all zero"),
        (share_a_slot, "first_slot", "must write its first result to slot"),
        (forget_a_merge, "num_partials", "has no merge task"),
        (merge_too_few, "first_slot", "must merge"),
        (merge_the_wrong_slot, "first_slot", "must merge"),
        (leave_out_merge_rows, "row_start", "must hold rows 0 to"),
        (merge_rows_twice, "row_start", "must hold rows 0 to"),
        (merge_a_whole_row, "num_partials", "one core does all of it"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damage_is_named(change: Callable[[np.ndarray, np.ndarray], None], field: str, text: str) -> None:
    findings = find_forward_faults(damaged(change), PROBLEM)
    assert any(finding.field == field and text in finding.text for finding in findings), findings


def test_wrong_has_fd_is_named() -> None:
    split = split_forward_balanced(PROBLEM, ASCEND)
    wrong = ForwardSplit(split.section_num, False, split.m, split.k, split.fa, split.fd)
    assert [finding.field for finding in find_forward_faults(wrong, PROBLEM)] == ["has_fd"]


def test_empty_blocks_are_refused() -> None:
    split = split_forward(PROBLEM, ASCEND)
    wrong = ForwardSplit(split.section_num, split.has_fd, 0, split.k, split.fa, split.fd)
    assert find_forward_faults(wrong, PROBLEM)[0].field == "m"


def test_split_of_another_problem_is_refused() -> None:
    other = AttentionProblem.from_metadata_args(
        4, 4, 64, batch_size=1, max_seqlen_q=640, max_seqlen_kv=640, mask_mode=3
    )
    findings = find_forward_faults(split_forward(PROBLEM, ASCEND), other)
    assert "behind the last core are in no range" in findings[0].text
