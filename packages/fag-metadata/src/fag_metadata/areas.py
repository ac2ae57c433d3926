"""Visible areas: (query, key) pairs that the mask leaves of base blocks and of backward tiles.

Tiles are numbered as in GradSplit. Equal heads share one rectangle, so that nothing here grows with the
number of heads.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .forward_blocks import ForwardBlocks
from .layout import TILE
from .problem import AttentionProblem
from .ranges import Int64Array, IntLike, band, masked_area, running_sums, visible_rows
from .terms import MaskMode


class Pieces(NamedTuple):
    """Row blocks, or parts of them, with visible pairs, of one head of some entries, in order.

    Entry, row block, first key block, number of key blocks, blocks of the head in front, visible pairs.
    """

    entry: Int64Array
    row: Int64Array
    key: Int64Array
    width: Int64Array
    done: Int64Array
    area: Int64Array

    def take(self, where: npt.NDArray[Any]) -> Pieces:
        """Some of the pieces, by index or by mask."""
        return Pieces(*(column[where] for column in self))


class AreaCuts(NamedTuple):
    """Places between pieces: blocks and visible pairs of all heads in front of each, from 0 to all, int64."""

    done: Int64Array
    area: Int64Array

    @property
    def heaviest(self) -> int:
        """Visible pairs of the heaviest range between two of them."""
        return int((self.area[1:] - self.area[:-1]).max())


class ForwardAreas:
    """Visible areas of a problem's base blocks; a head is a kv head with all its query heads."""

    def __init__(self, blocks: ForwardBlocks) -> None:
        self.blocks = blocks
        self._items: dict[int | None, AreaCuts] = {}

    @cached_property
    def head_area(self) -> Int64Array:
        """Visible pairs of a head of every entry."""
        blocks = self.blocks
        return self._rows_before(slice(None), blocks.lengths_q * blocks.g, 0, blocks.lengths_kv)

    @cached_property
    def area_before(self) -> Int64Array:
        """Visible pairs in front of every entry, one number more than entries."""
        return running_sums(self.head_area * self.blocks.heads_per_entry)

    @property
    def total(self) -> int:
        """Visible pairs of all heads."""
        return int(self.area_before[-1])

    def _rows_before(
        self, entries: Int64Array | slice, rows: Int64Array, key_start: IntLike, key_stop: IntLike
    ) -> Int64Array:
        """Visible pairs of the merged rows before `rows` (of one head) with keys [key_start, key_stop)."""
        blocks = self.blocks
        diagonals = blocks.first_diagonal[entries], blocks.last_diagonal[entries]
        return _area_before(blocks, rows, key_start, key_stop, *diagonals, blocks.lengths_q[entries])

    def before(self, heads: Int64Array, rows: Int64Array, keys: Int64Array) -> Int64Array:
        """Visible pairs in front of places (head, row block, key block), head <= num_heads."""
        blocks, size = self.blocks, self.blocks.size
        if not blocks.num_heads:
            return np.zeros_like(heads)
        inner = np.minimum(heads, blocks.num_heads - 1)
        entries = inner // blocks.heads_per_entry
        s1, s2 = blocks.lengths_q[entries], blocks.lengths_kv[entries]
        begin = np.minimum(rows * size.rows, s1 * blocks.g)
        end = np.minimum(begin + size.rows, s1 * blocks.g)
        key = np.minimum(keys * size.keys, s2)
        zero = np.zeros_like(key)
        area = self._rows_before(entries, begin, zero, s2)
        area = (
            area + self._rows_before(entries, end, zero, key) - self._rows_before(entries, begin, zero, key)
        )
        area = (
            area
            + self.area_before[entries]
            + (inner - entries * blocks.heads_per_entry) * self.head_area[entries]
        )
        return np.where(heads < blocks.num_heads, area, self.total)

    def rows_of(self, entries: Int64Array) -> Pieces:
        """The row blocks of one head of each of these entries."""
        blocks = self.blocks
        rows = blocks.all_rows() if len(entries) == blocks.num_entries else blocks.rows_of(entries)
        num_rows = np.diff(rows.begin, append=len(rows.first))
        entry, begin = entries.repeat(num_rows), rows.begin.repeat(num_rows)
        row = np.arange(len(rows.first)) - begin
        done = rows.before[:-1] - rows.before[begin]
        pieces = Pieces(entry, row, rows.first, np.diff(rows.before), done, done)
        return self._with_areas(pieces, np.zeros_like(row), blocks.lengths_kv[entry])

    def parts_of(self, pieces: Pieces, step: int) -> Pieces:
        """The parts of row blocks when they are cut at every `step`-th key block."""
        keys = self.blocks.size.keys
        units = (pieces.key + pieces.width - 1) // step - pieces.key // step + 1
        of = np.arange(len(units)).repeat(units)
        unit = pieces.key[of] // step + np.arange(len(of)) - (np.cumsum(units) - units)[of]
        key = np.maximum(unit * step, pieces.key[of])
        stop = np.minimum((unit + 1) * step, (pieces.key + pieces.width)[of])
        done = pieces.done[of] + key - pieces.key[of]
        parts = Pieces(pieces.entry[of], pieces.row[of], key, stop - key, done, done)
        s2 = self.blocks.lengths_kv[parts.entry]
        return self._with_areas(parts, np.minimum(key * keys, s2), np.minimum(stop * keys, s2))

    def _with_areas(self, pieces: Pieces, key_start: Int64Array, key_stop: Int64Array) -> Pieces:
        size, entry = self.blocks.size, pieces.entry
        begin = pieces.row * size.rows
        end = np.minimum(begin + size.rows, self.blocks.lengths_q[entry] * self.blocks.g)
        area = self._rows_before(entry, end, key_start, key_stop)
        area = area - self._rows_before(entry, begin, key_start, key_stop)
        return pieces._replace(area=area).take(area > 0)

    def items(self, step: int | None) -> AreaCuts:
        """All pieces of all heads: whole row blocks, or parts cut at every `step`-th key block (kept)."""
        found = self._items.get(step)
        if found is None:
            found = self._items[step] = self._list_items(step)
        return found

    def _list_items(self, step: int | None) -> AreaCuts:
        blocks = self.blocks
        entries = np.arange(blocks.num_entries)
        pieces = self.rows_of(entries)
        if step is not None:
            pieces = self.parts_of(pieces, step)
        count = np.bincount(pieces.entry, minlength=blocks.num_entries)  # of one head
        copies = count * blocks.heads_per_entry
        entry = entries.repeat(copies)
        place = np.arange(len(entry)) - (np.cumsum(copies) - copies)[entry]
        head = place // count[entry]
        place += (np.cumsum(count) - count)[entry] - head * count[entry]
        done = np.full(len(entry) + 1, blocks.num_blocks, np.int64)
        done[:-1] = blocks.blocks_before[entry] + head * blocks.head_blocks[entry] + pieces.done[place]
        done[0] = 0  # blocks without a visible pair go with the piece behind or in front of them
        return AreaCuts(done, running_sums(pieces.area[place]))

    def nearest(self, wanted: Int64Array, step: int | None) -> AreaCuts:
        """Cuts between pieces next to the wanted areas (ascending), found in stages without a list of all."""
        blocks = self.blocks
        entry = self.area_before.searchsorted(wanted, "right") - 1
        rest = wanted - self.area_before[entry]
        head = rest // self.head_area[entry]
        rest -= head * self.head_area[entry]
        needed, which = np.unique(entry, return_inverse=True)
        pieces = self.rows_of(needed)
        before = np.cumsum(pieces.area) - pieces.area
        place = before.searchsorted(before[pieces.entry.searchsorted(entry)] + rest, "right") - 1
        rest -= before[place] - before[pieces.entry.searchsorted(entry)]
        if step is not None:
            touched, which = np.unique(place, return_inverse=True)
            pieces = self.parts_of(pieces.take(touched), step)
            before = np.cumsum(pieces.area) - pieces.area
            row_begin = np.flatnonzero(np.diff(pieces.row, prepend=-1) | np.diff(pieces.entry, prepend=-1))
            row_begin = before[row_begin[which.reshape(-1)]]
            place = before.searchsorted(row_begin + rest, "right") - 1
            rest -= before[place] - row_begin
        is_next = 2 * rest > pieces.area[place]
        done = blocks.blocks_before[entry] + head * blocks.head_blocks[entry] + pieces.done[place]
        done += is_next * pieces.width[place]
        area = wanted - rest + is_next * pieces.area[place]
        return AreaCuts(np.append(done, blocks.num_blocks), np.append(area, self.total))


def area_of_rows(blocks: ForwardBlocks, rows: Int64Array) -> Int64Array:
    """Visible pairs of the merged rows before `rows`, of a head where all are equal."""
    assert blocks.equal_lengths is not None
    s1, s2 = blocks.equal_lengths
    return _area_before(blocks, rows, 0, s2, *band(blocks.mask_mode, *blocks.windows, s1, s2), s1)


def _area_before(
    blocks: ForwardBlocks,
    rows: Int64Array,
    key_start: IntLike,
    key_stop: IntLike,
    first: IntLike,
    last: IntLike,
    s1: IntLike,
) -> Int64Array:
    """The same with keys [key_start, key_stop) of heads of s1 queries with these diagonals."""

    def area(start: IntLike, stop: IntLike) -> Int64Array:
        return masked_area(blocks.mask_mode, first, last, start, stop, key_start, key_stop)

    if blocks.g == 1 or blocks.mask_mode is MaskMode.NO_MASK:
        return area(0, rows)
    if blocks.is_bnsd:
        s1 = np.maximum(s1, 1)
        heads: Int64Array = rows // s1
        return heads * area(0, s1) + area(0, rows - heads * s1)
    queries = rows // blocks.g
    return blocks.g * area(0, queries) + (rows - queries * blocks.g) * area(queries, queries + 1)


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
        self.tile_start = running_sums(self.rows * self.cols * self.heads)
        self.area_start = running_sums(self.head_area * self.heads)

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
        return group, col, running_sums(self.area(group, 0, self.len_q[group], key, key_stop))

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
        self._start = running_sums(self._per_head * grid.heads)
        if len(grid.heads) == 1:
            area = np.tile(self._tiles.area, int(grid.heads[0]))
        else:
            group, number = _expand(np.arange(len(grid.heads), dtype=np.int64), self._per_head * grid.heads)
            number %= self._per_head[group]
            number += running_sums(self._per_head)[group]
            area = self._tiles.area[number]
        self.sums = running_sums(area)

    def tile_numbers(self, index: Int64Array) -> Int64Array:
        """Returns the tile number of each visible tile; 0 for the first, the total for the end."""
        grid = self._grid
        inner = (index > 0) & (index < len(self.sums) - 1)
        number = np.where(index > 0, grid.total_tiles, 0)
        cut = index[inner]
        group = np.searchsorted(self._start, cut, side="right") - 1
        head, visible = np.divmod(cut - self._start[group], self._per_head[group])
        in_head = self._tiles.tile[running_sums(self._per_head)[group] + visible]
        number[inner] = grid.tile_start[group] + head * grid.rows[group] * grid.cols[group] + in_head
        return number


def _expand(items: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Repeats each item, and numbers the repetitions of each from 0."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    numbers = np.arange(total, dtype=np.int64)
    numbers -= np.repeat(ends - counts, counts)
    return np.repeat(items, counts), numbers
