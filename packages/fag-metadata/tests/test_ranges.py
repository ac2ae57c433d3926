"""Visible ranges and areas against a mask matrix written out pair by pair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fag_metadata.ranges import band, visible_area, visible_rows

MASKS = st.one_of(
    st.just((0, -1, -1)),
    st.just((3, -1, -1)),
    st.tuples(
        st.just(4),
        st.sampled_from([-1, 0, 1, 3, 7, 40, 2**31 - 1]),
        st.sampled_from([-1, 0, 2, 9, 2**31 - 1]),
    ),
)


def mask_matrix(mode: int, left: int, right: int, s1: int, s2: int) -> np.ndarray:
    """Section 3 of the operator page, pair by pair."""
    seen = np.zeros((s1, s2), dtype=bool)
    for i in range(s1):
        for j in range(s2):
            diagonal = i + s2 - s1
            if mode == 0:
                seen[i, j] = True
            elif mode == 3:
                seen[i, j] = j <= diagonal
            else:
                seen[i, j] = (left < 0 or j >= diagonal - left) and (right < 0 or j <= diagonal + right)
    return seen


@given(MASKS, st.integers(0, 14), st.integers(0, 14), st.data())
def test_ranges_and_area_equal_mask_matrix(
    mask: tuple[int, int, int], s1: int, s2: int, data: st.DataObject
) -> None:
    seen = mask_matrix(*mask, s1, s2)
    first, last = band(*mask, s1, s2)
    r0 = data.draw(st.integers(0, s1))
    r1 = data.draw(st.integers(r0, s1))
    c0 = data.draw(st.integers(0, s2))
    c1 = data.draw(st.integers(c0, s2))
    assert int(visible_area(r0, r1, c0, c1, first, last)) == int(seen[r0:r1, c0:c1].sum())
    rows = np.flatnonzero(seen[:, c0:c1].any(axis=1))
    begin, end = visible_rows(c0, c1, first, last, s1)
    if rows.size:
        assert (int(begin), int(end)) == (int(rows[0]), int(rows[-1]) + 1)
    else:
        assert seen[int(begin) : int(end), c0:c1].sum() == 0


def test_ranges_broadcast_over_batches_and_tiles() -> None:
    s1 = np.array([[5], [300]])
    s2 = np.array([[7], [200]])
    first, last = band(3, -1, -1, s1, s2)
    rows = np.minimum(np.arange(4) * 128, s1)
    area = visible_area(rows[:, :-1], rows[:, 1:], 0, s2, first, last)
    assert area.shape == (2, 3)
    assert area[0].tolist() == [3 + 4 + 5 + 6 + 7, 0, 0]
    assert area.sum() == 25 + 200 * 201 // 2


@pytest.mark.parametrize(("left", "right"), [(2**31 - 1, 2**31 - 1), (0, 2**31 - 1), (2**31 - 1, 0)])
def test_area_is_exact_for_long_sequences_and_huge_windows(left: int, right: int) -> None:
    s = 2**31 - 1
    first, last = band(4, left, right, s, s)
    expected = s * s if left and right else s * (s + 1) // 2
    assert int(visible_area(0, s, 0, s, first, last)) == expected
