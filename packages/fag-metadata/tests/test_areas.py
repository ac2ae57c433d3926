"""Tiles and their visible areas, against counting every pair."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from problems import problems

from fag_metadata import AttentionProblem, MaskMode
from fag_metadata.areas import TileGrid, TileRow


def count_tiles(problem: AttentionProblem, o1: int | None = None, o2: int | None = None) -> list[int]:
    """Visible pairs of every tile of every head in tile order, counted pair by pair."""
    areas: list[int] = []
    for s1, s2 in zip(problem.lengths_q.tolist(), problem.lengths_kv.tolist(), strict=True):
        i, j = np.arange(s1)[:, None], np.arange(s2)[None, :]
        offset = s2 - s1
        visible = np.ones((s1, s2), bool)
        if problem.mask_mode == MaskMode.CAUSAL:
            visible &= j <= i + offset
        if problem.mask_mode == MaskMode.SLIDING_WINDOW:
            if problem.win_left >= 0:
                visible &= j >= i + offset - problem.win_left
            if problem.win_right >= 0:
                visible &= j <= i + offset + problem.win_right
        rows = -(-s1 // 128) if o1 is None else o1
        cols = -(-s2 // 128) if o2 is None else o2
        head = [
            int(visible[r * 128 : r * 128 + 128, c * 128 : c * 128 + 128].sum())
            for c in range(cols)
            for r in range(rows)
        ]
        areas += head * problem.n1
    return areas


@settings(max_examples=80, deadline=None)
@given(problems(longest=500))
def test_tile_grid_counts_every_pair(problem: AttentionProblem) -> None:
    grid = TileGrid(problem)
    areas = count_tiles(problem)
    assert grid.total_tiles == len(areas)
    assert grid.total_area == sum(areas)
    numbers = np.arange(len(areas) + 1)
    np.testing.assert_array_equal(grid.area_before(numbers), np.cumsum([0, *areas]))
    row = TileRow(grid)
    visible = [number for number, area in enumerate(areas) if area]
    np.testing.assert_array_equal(row.sums, np.cumsum([0, *(areas[number] for number in visible)]))
    if visible:
        found = row.tile_numbers(np.arange(len(visible) + 1)).tolist()
        assert found == [0, *visible[1:], len(areas)]


@settings(max_examples=40, deadline=None)
@given(problems(longest=300).filter(lambda problem: not problem.is_variable))
def test_tile_grid_with_a_larger_rectangle_counts_the_same_pairs(problem: AttentionProblem) -> None:
    grid = TileGrid(problem, 4, 5)
    areas = count_tiles(problem, 4, 5)
    assert grid.total_tiles == len(areas)
    np.testing.assert_array_equal(grid.area_before(np.arange(len(areas) + 1)), np.cumsum([0, *areas]))
