"""Contiguous parts with the lightest heaviest part, against brute force."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fag_metadata.ranges import can_cut_equal_rows, cut_equal_rows, even_cuts, min_max_cuts

weights = st.lists(st.one_of(st.integers(1, 9), st.just(100)), min_size=1, max_size=14)


def heaviest(sums: np.ndarray, cuts: np.ndarray) -> int:
    return int((sums[cuts[1:]] - sums[cuts[:-1]]).max())


def brute_force(items: list[int], parts: int) -> int:
    @lru_cache(None)
    def best(start: int, left: int) -> int:
        if left == 1:
            return sum(items[start:])
        return min(max(sum(items[start:k]), best(k, left - 1)) for k in range(start, len(items) + 1))

    return best(0, parts)


@settings(max_examples=200, deadline=None)
@given(weights, st.integers(1, 6))
def test_min_max_cuts_is_the_optimum(items: list[int], parts: int) -> None:
    sums = np.cumsum([0, *items])
    cuts = min_max_cuts(sums, parts)
    assert len(cuts) == parts + 1
    assert (cuts[0], cuts[-1]) == (0, len(items))
    assert (np.diff(cuts) >= 0).all()
    assert heaviest(sums, cuts) == brute_force(items, parts)


@given(weights, st.integers(1, 6))
def test_even_cuts_exceed_a_share_by_less_than_an_item(items: list[int], parts: int) -> None:
    sums = np.cumsum([0, *items])
    cuts = even_cuts(sums, parts)
    assert (cuts[0], cuts[-1]) == (0, len(items))
    assert (np.diff(cuts) >= 0).all()
    assert heaviest(sums, cuts) <= sums[-1] / parts + max(items)


def test_min_max_cuts_spreads_what_the_limit_leaves_open() -> None:
    cuts = min_max_cuts(np.arange(38), 36)  # 37 equal items: one part must hold two, no other needs to
    assert sorted(np.diff(cuts).tolist()) == [1] * 35 + [2]


def test_min_max_cuts_gives_each_of_few_items_a_part() -> None:
    cuts = min_max_cuts(np.array([0, 5, 9]), 4)
    assert heaviest(np.array([0, 5, 9]), cuts) == 5


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), st.integers(1, 4), st.integers(1, 8))
def test_equal_rows_are_cut_as_well_as_all_of_them_listed(items: list[int], rows: int, parts: int) -> None:
    sums = np.cumsum([0, *items]).tolist()
    found = cut_equal_rows(sums, rows, parts)
    listed = np.cumsum([0, *items * rows])
    assert rows % found.rows == 0
    begin = np.arange(0, rows, found.rows)[:, None] * len(items) + found.begin
    cuts = np.append(begin, len(items) * rows)
    assert len(cuts) <= parts + 1
    assert cuts[0] == 0
    assert (np.diff(cuts) > 0).all()
    assert heaviest(listed, cuts) == found.heaviest == brute_force(items * rows, parts)
    assert can_cut_equal_rows(sums, rows, parts, found.heaviest)
    assert not can_cut_equal_rows(sums, rows, parts, found.heaviest - 1)
