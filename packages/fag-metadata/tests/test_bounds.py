"""The lower bound of a perfect split: never above the best assignment, found by trying them all."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fag_metadata.bounds import perfect_split_bound


def best_load(tiles: list[int], cores: int) -> int:
    """The heaviest core of the best assignment, by trying every one."""
    reached = {(0,) * cores}
    for tile in tiles:
        reached = {
            tuple(sorted((*loads[:i], loads[i] + tile, *loads[i + 1 :])))
            for loads in reached
            for i in range(cores)
        }
    return min(max(loads) for loads in reached)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 4))
def test_bound_is_below_the_best_assignment_and_above_the_mean(tiles: list[int], cores: int) -> None:
    bound = perfect_split_bound(np.array(tiles), np.ones(len(tiles), np.int64), cores)
    assert bound >= max(sum(tiles) / cores, *tiles)
    assert bound <= best_load(tiles, cores)


def test_bound_is_reached_by_equal_tiles() -> None:
    assert perfect_split_bound(np.array([16384]), np.array([37]), 36) == 2 * 16384
    assert perfect_split_bound(np.array([16384]), np.array([36]), 36) == 16384


def test_bound_counts_large_tiles_that_share_no_core() -> None:
    # 30 full and 15 half tiles on 36 cores: a full one with a half one, or three halves
    assert perfect_split_bound(np.array([16384, 8256]), np.array([30, 15]), 36) == 16384 + 8256


def test_bound_without_tiles_is_zero() -> None:
    assert perfect_split_bound(np.zeros(0, np.int64), np.zeros(0, np.int64), 36) == 0
    assert perfect_split_bound(np.array([5]), np.array([0]), 36) == 0
