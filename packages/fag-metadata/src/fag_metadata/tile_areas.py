"""The backward tiles of a problem with their visible areas: what a balanced split, a balance figure or a
check counts.

A tile is 128 queries x 128 keys of one query head (less at the end of a sequence). Tiles are numbered as in
GradSplit, masked ones too. Equal heads share one rectangle, so that nothing here grows with the number of
heads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .layout import TILE
from .problem import AttentionProblem
from .ranges import band, masked_area, visible_rows

Int64Array = NDArray[np.int64]


class VisibleTiles(NamedTuple):
    """Tiles with at least one visible pair, in tile order, one entry per tile of one head of each group.

    Group, tile number inside the head, and visible (query, key) pairs of each, (n,).
    """

    group: Int64Array
    tile: Int64Array
    area: Int64Array


class TileGrid:
    """All backward tiles of a problem, as groups of equal heads: one per batch entry, or one of all.

    Attributes of each group: len_q, len_kv, heads (query heads), first and last (visible diagonals), rows and
    cols (tiles along q and kv), head_area (visible pairs of a head); tile_start and area_start (tiles and
    visible pairs before each group, and the total).
    """

    def __init__(self, problem: AttentionProblem, o1: int | None = None, o2: int | None = None) -> None:
        """Counts the tiles; o1, o2 are those that every head is numbered with, None = of the real length."""
        if problem.is_variable:
            self.len_q, self.len_kv = problem.lengths_q, problem.lengths_kv
            self.heads = np.full(problem.b, problem.n1, np.int64)
        else:
            self.len_q = np.array([problem.s1], np.int64)
            self.len_kv = np.array([problem.s2], np.int64)
            self.heads = np.array([problem.b * problem.n1], np.int64)
        self._mask_mode = problem.mask_mode
        self.first, self.last = band(
            problem.mask_mode, problem.win_left, problem.win_right, self.len_q, self.len_kv
        )
        self.rows = -(-self.len_q // TILE) if o1 is None else np.full(len(self.len_q), o1, np.int64)
        self.cols = -(-self.len_kv // TILE) if o2 is None else np.full(len(self.len_q), o2, np.int64)
        self.head_area = self.area(slice(None), 0, self.len_q, 0, self.len_kv)
        self.tile_start = _running(self.rows * self.cols * self.heads)
        self.area_start = _running(self.head_area * self.heads)

    @property
    def total_tiles(self) -> int:
        """Number of tiles, masked ones included."""
        return int(self.tile_start[-1])

    @property
    def total_area(self) -> int:
        """Number of visible (query, key) pairs over all heads."""
        return int(self.area_start[-1])

    def area(
        self,
        group: Int64Array | slice | int,
        row_start: int | Int64Array,
        row_stop: int | Int64Array,
        key_start: int | Int64Array,
        key_stop: int | Int64Array,
    ) -> Int64Array:
        """Returns the visible pairs of rectangles of one head of each group; see ranges.masked_area."""
        return masked_area(
            self._mask_mode, self.first[group], self.last[group], row_start, row_stop, key_start, key_stop
        )

    def area_before(self, tile: Int64Array) -> Int64Array:
        """Returns the visible pairs in front of each tile number, any shape; total_tiles is valid."""
        if self.total_tiles == 0:
            return np.zeros_like(tile)
        group = np.searchsorted(self.tile_start, tile, side="right") - 1
        group = np.minimum(group, len(self.heads) - 1)
        rows, cols = self.rows[group], self.cols[group]
        in_group: Int64Array = tile - self.tile_start[group]
        head = in_group // np.maximum(rows * cols, 1)
        in_head = in_group - head * rows * cols
        col = in_head // np.maximum(rows, 1)
        row = in_head - col * rows
        len_q, len_kv = self.len_q[group], self.len_kv[group]
        key = np.minimum(col * TILE, len_kv)
        key_stop = np.minimum(key + TILE, len_kv)
        query = np.minimum(row * TILE, len_q)
        area: Int64Array = self.area_start[group] + head * self.head_area[group]
        # columns before this one over all queries, then this column down to the tile
        area += self.area(group, 0, len_q, 0, key)
        area += self.area(group, 0, query, key, key_stop)
        return area

    def columns(self, groups: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Lists the columns of one head of each of these groups (ascending, repetitions are dropped).

        Returns:
            (group, column number, visible pairs before each column and the total); the last is one longer.
        """
        group, col = _expand(np.unique(groups), self.cols[np.unique(groups)])
        key = np.minimum(col * TILE, self.len_kv[group])
        key_stop = np.minimum(key + TILE, self.len_kv[group])
        return group, col, _running(self.area(group, 0, self.len_q[group], key, key_stop))

    def visible_tiles(self, groups: Int64Array | None = None) -> VisibleTiles:
        """Lists the visible tiles of one head of each group (or of the given groups, ascending)."""
        if groups is None:
            groups = np.arange(len(self.heads), dtype=np.int64)
        group, col = _expand(groups, self.cols[groups])
        return self.tiles_of_columns(group, col)

    def tiles_of_columns(self, group: Int64Array, col: Int64Array) -> VisibleTiles:
        """Lists the visible tiles of columns, given as group and column number."""
        key = np.minimum(col * TILE, self.len_kv[group])
        key_stop = np.minimum(key + TILE, self.len_kv[group])
        start, stop = visible_rows(key, key_stop, self.first[group], self.last[group], self.len_q[group])
        row_start = start // TILE
        count = np.where(stop > start, -(-stop // TILE) - row_start, 0)
        column, offset = _expand(np.arange(len(group), dtype=np.int64), count)
        group, row = group[column], row_start[column] + offset
        query = row * TILE
        query_stop = np.minimum(query + TILE, self.len_q[group])
        area = self.area(group, query, query_stop, key[column], key_stop[column])
        return VisibleTiles(group, col[column] * self.rows[group] + row, area)


class TileRow:
    """All visible tiles of all heads in tile order, as one running sum of their areas.

    Attributes:
        sums: Visible pairs before each visible tile and the total, (n + 1,), strictly ascending.
    """

    def __init__(self, grid: TileGrid) -> None:
        self._grid = grid
        self._tiles = grid.visible_tiles()
        self._per_head = np.bincount(self._tiles.group, minlength=len(grid.heads)).astype(np.int64)
        self._start = _running(self._per_head * grid.heads)
        if len(grid.heads) == 1:
            area = np.tile(self._tiles.area, int(grid.heads[0]))
        else:
            group, number = _expand(np.arange(len(grid.heads), dtype=np.int64), self._per_head * grid.heads)
            number %= self._per_head[group]
            number += _running(self._per_head)[group]
            area = self._tiles.area[number]
        self.sums = _running(area)

    def tile_numbers(self, index: Int64Array) -> Int64Array:
        """Returns the tile number of each visible tile; 0 for the first, the total for the end."""
        grid = self._grid
        inner = (index > 0) & (index < len(self.sums) - 1)
        number = np.where(index > 0, grid.total_tiles, 0)
        cut = index[inner]
        group = np.searchsorted(self._start, cut, side="right") - 1
        head, visible = np.divmod(cut - self._start[group], self._per_head[group])
        in_head = self._tiles.tile[_running(self._per_head)[group] + visible]
        number[inner] = grid.tile_start[group] + head * grid.rows[group] * grid.cols[group] + in_head
        return number


def _running(counts: Int64Array) -> Int64Array:
    """Returns the sums of the numbers before each place, and the total."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def _expand(items: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Repeats each item, and numbers the repetitions of each from 0."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    numbers = np.arange(total, dtype=np.int64)
    numbers -= np.repeat(ends - counts, counts)
    return np.repeat(items, counts), numbers
