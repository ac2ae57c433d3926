"""The balanced backward split: coverage, bounds of imbalance, and the places where target "cpu" may cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problems

from fag_metadata import TARGETS, AttentionProblem, GradSplit, Target
from fag_metadata.areas import TileGrid, TileRow
from fag_metadata.grad_balanced import split_grad_balanced
from fag_metadata.grad_split import split_grad
from fag_metadata.layout import BWD_UNIT_KEYS, TILE
from fag_metadata.split_check import find_grad_faults

T36 = TARGETS["Ascend950PR_9599"]
CPU = TARGETS["cpu"]


def core_areas(problem: AttentionProblem, split: GradSplit) -> np.ndarray:
    grid = TileGrid(problem) if problem.is_variable else TileGrid(problem, split.o1, split.o2)
    used = split.used_cubes
    return grid.area_before(split.end[:used].astype(np.int64)) - grid.area_before(
        split.start[:used].astype(np.int64)
    )


def max_over_mean(problem: AttentionProblem, split: GradSplit, cores: int = 36) -> float:
    areas = core_areas(problem, split)
    return float(areas.max() * cores / areas.sum())


def perfect_contiguous(problem: AttentionProblem, cores: int = 36) -> float:
    """Max/mean that no split of whole tiles into contiguous ranges can beat, by bisection."""
    sums = TileRow(TileGrid(problem)).sums
    low, high = -(-int(sums[-1]) // cores), int(sums[-1])
    while low < high:
        limit, at, used = (low + high) // 2, 0, 0
        while at < len(sums) - 1 and used <= cores:
            stop = int(np.searchsorted(sums, sums[at] + limit, side="right")) - 1
            if stop == at:
                used = cores
            at, used = stop, used + 1
        low, high = (low, limit) if used <= cores else (limit + 1, high)
    return low * cores / int(sums[-1])


@settings(max_examples=150, deadline=None)
@given(problems(), st.sampled_from([36, 36, 8, 1, 50]))
def test_balanced_covers_every_tile_once_and_is_never_worse_than_cann(
    problem: AttentionProblem, cores: int
) -> None:
    target = Target("mine", cores, 2 * cores)
    split = split_grad_balanced(problem, target)
    assert find_grad_faults(split, problem) == []
    areas = core_areas(problem, split)
    assert areas.sum() == TileGrid(problem).total_area
    if len(areas):
        assert areas.min() > 0
        assert areas.max() <= core_areas(problem, split_grad(problem, target)).max()


@settings(max_examples=60, deadline=None)
@given(problems(longest=4000))
def test_balanced_reaches_the_optimum_or_is_close_to_even(problem: AttentionProblem) -> None:
    split = split_grad_balanced(problem, T36)
    if split.used_cubes and split.split_axis == 0:
        ratio = max_over_mean(problem, split)
        assert ratio <= max(1.02, perfect_contiguous(problem) * (1 + 1e-9))


@settings(max_examples=100, deadline=None)
@given(problems())
def test_balanced_ignores_bounds(problem: AttentionProblem) -> None:
    padded = dataclasses.replace(
        problem,
        max_seqlen_q=problem.max_seqlen_q + 1000 if problem.has_lengths_q else problem.max_seqlen_q,
        max_seqlen_kv=-1 if problem.has_lengths_kv else problem.max_seqlen_kv,
    )
    for target in (T36, CPU):
        first, second = split_grad_balanced(problem, target), split_grad_balanced(padded, target)
        assert all(np.array_equal(value, second.__dict__[name]) for name, value in first.__dict__.items())


CASES: list[tuple[str, dict[str, Any], float]] = [
    ("causal S640 B1 N1", {"n": (1, 1), "b": 1, "s": 640, "mask": 3}, 2.88),
    ("no mask B1 N37 S128", {"n": (37, 37), "b": 1, "s": 128, "mask": 0}, 1.95),
    ("no mask B5 N8 S256", {"n": (8, 8), "b": 5, "s": 256, "mask": 0}, 1.13),
    ("multi-tile BN2 B4 N37 S512 causal", {"n": (37, 37), "b": 4, "s": 512, "mask": 3}, 1.05),
    ("causal S4096 B1 N8", {"n": (8, 8), "b": 1, "s": 4096, "mask": 3}, 1.02),
    ("causal S1000 B2 N8", {"n": (8, 8), "b": 2, "s": 1000, "mask": 3}, 1.05),
    ("window 512,0 S4096 B1 N8", {"n": (8, 8), "b": 1, "s": 4096, "mask": 4, "win": (512, 0)}, 1.05),
]


@pytest.mark.parametrize(("case", "bound"), [(c[1], c[2]) for c in CASES], ids=[c[0] for c in CASES])
def test_balanced_max_over_mean_of_known_cases(case: dict[str, Any], bound: float) -> None:
    left, right = case.get("win", (-1, -1))
    problem = AttentionProblem.from_metadata_args(
        *case["n"], 128, batch_size=case["b"], max_seqlen_q=case["s"], max_seqlen_kv=case["s"],
        mask_mode=case["mask"], win_left=left, win_right=right,
    )  # fmt: skip
    ratio = max_over_mean(problem, split_grad_balanced(problem, T36))
    assert ratio <= bound
    # where the bound is above issue 3's it is the lower bound of whole tiles
    assert ratio <= max(1.05, 1.05 * perfect_contiguous(problem))


def test_balanced_ragged_short_sequences_reach_the_optimum() -> None:
    lengths = np.random.default_rng(0).integers(1, 201, 32)
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    problem = AttentionProblem.from_metadata_args(
        2, 2, 128, cu_seqlens_q=cu, cu_seqlens_kv=cu, layout_q="TND"
    )
    ratio = max_over_mean(problem, split_grad_balanced(problem, T36))
    assert ratio < 0.9 * max_over_mean(problem, split_grad(problem, T36))
    assert ratio == pytest.approx(perfect_contiguous(problem))


@settings(max_examples=150, deadline=None)
@given(problems())
def test_cpu_ranges_hold_whole_kv_heads_or_units_of_one_query_head(problem: AttentionProblem) -> None:
    split = split_grad_balanced(problem, CPU)
    assert find_grad_faults(split, problem) == []
    grid = TileGrid(problem)
    g = problem.g
    # tile number -> the (query head, unit) that begin there; empty heads share it with their successor
    edges: dict[int, set[tuple[int, int]]] = {}
    query_head = 0
    for group, heads in enumerate(grid.heads.tolist()):
        rows, cols = int(grid.rows[group]), int(grid.cols[group])
        for head in range(heads):
            start = int(grid.tile_start[group]) + head * rows * cols
            for unit in range(-(-cols // (BWD_UNIT_KEYS // TILE)) or 1):
                number = start + unit * rows * (BWD_UNIT_KEYS // TILE)
                edges.setdefault(number, set()).add((query_head, unit))
            query_head += 1
    edges.setdefault(grid.total_tiles, set()).add((query_head, 0))
    for core in range(split.used_cubes):
        begin, end = edges[int(split.start[core])], edges[int(split.end[core])]
        whole = any(unit == 0 and head % g == 0 for head, unit in begin)
        whole = whole and any(unit == 0 and head % g == 0 for head, unit in end)
        one = any(
            head == end_head or (head + 1 == end_head and end_unit == 0)
            for head, _ in begin
            for end_head, end_unit in end
        )
        assert whole or one


def test_cpu_split_ends_in_a_unit_of_one_column() -> None:
    problem = AttentionProblem.from_metadata_args(
        7, 1, 64, batch_size=1, max_seqlen_q=6, max_seqlen_kv=1290, mask_mode=4, win_left=5, win_right=0
    )
    split = split_grad_balanced(problem, CPU)
    assert find_grad_faults(split, problem) == []
    assert split.end[split.used_cubes - 1] == 7 * 11


def test_cpu_split_divides_query_heads_down_to_the_heaviest_unit() -> None:
    problem = AttentionProblem.from_metadata_args(
        8, 2, 128, batch_size=1, max_seqlen_q=2048, max_seqlen_kv=2048, mask_mode="causal"
    )
    split = split_grad_balanced(problem, CPU)
    grid = TileGrid(problem)
    assert core_areas(problem, split).max() == grid.area(0, 0, 2048, 0, BWD_UNIT_KEYS)
    assert 40 < split.used_cubes <= 64


def test_cpu_split_divides_a_long_sequence_among_short_ones() -> None:
    cu = np.cumsum([0, 16384, *([100] * 50)]).astype(np.int32)
    problem = AttentionProblem.from_metadata_args(
        4, 4, 128, cu_seqlens_q=cu, cu_seqlens_kv=cu, layout_q="TND"
    )
    split = split_grad_balanced(problem, CPU)
    # 64 units of a head on 15 or 16 cores: some take five
    assert max_over_mean(problem, split, 64) < 1.3
