"""The balanced backward split for target "cpu": ranges begin only where the kernels' sums start afresh.

dQ of a query is summed within units of 256 keys, and dK, dV of a key within one query head; the sums are then
added up in a fixed order. A range that holds whole kv heads, or whole units of one query head, therefore
gives the same bits as any other such range. So a kv head stays whole, or each of its query heads is cut on
its own, between units.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .layout import BWD_UNIT_KEYS, TILE
from .min_max import min_max_cuts
from .tile_areas import TileGrid

Int64Array = NDArray[np.int64]

_UNIT_COLS = BWD_UNIT_KEYS // TILE
_GOOD_ENOUGH = 1.02
"""Max/mean below which kv heads are left whole without a search."""
_TOLERANCE = 256
"""The search for the smallest heaviest range stops at this fraction of it: 0.4 %."""


def unit_cuts(grid: TileGrid, g: int, cores: int) -> Int64Array:
    """Returns tile numbers at which ranges begin, and the total.

    Args:
        grid: The tiles, with at least one visible pair.
        g: Query heads per kv head.
        cores: Ranges at most.

    Returns:
        Tile numbers, ascending, from 0 to the total.
    """
    return _equal_cuts(grid, g, cores) if len(grid.heads) == 1 else _ragged_cuts(grid, g, cores)


def _heaviest(sums: Int64Array, cuts: Int64Array) -> int:
    return int((sums[cuts[1:]] - sums[cuts[:-1]]).max())


def _unit_sums(grid: TileGrid, group: int) -> Int64Array:
    """Returns the visible pairs before each unit of one query head, and the total."""
    len_kv = int(grid.len_kv[group])
    # units of the whole rectangle, which may be wider than the real keys
    units = -(-int(grid.cols[group]) // _UNIT_COLS)
    key = np.minimum(np.arange(units + 1, dtype=np.int64) * BWD_UNIT_KEYS, len_kv)
    return grid.area(group, 0, int(grid.len_q[group]), 0, key)


def _tiles_before_units(unit: Int64Array, rows: int, cols: int) -> Int64Array:
    """Returns the tiles of a head in front of each unit; the last unit may have one column only."""
    return np.minimum(unit * _UNIT_COLS, cols) * rows


def _equal_cuts(grid: TileGrid, g: int, cores: int) -> Int64Array:
    """Cuts equal heads: all kv heads whole, or all query heads in the same number of parts.

    A mixture cannot be better: with fewer kv heads than cores the heaviest range is a whole kv head as long
    as one is left whole, and with more kv heads no core is left to cut one.
    """
    heads, rows, cols = int(grid.heads[0]), int(grid.rows[0]), int(grid.cols[0])
    kv_heads = heads // g
    parts = cores // heads
    if parts:
        sums = _unit_sums(grid, 0)
        inner = min_max_cuts(sums, min(parts, len(sums) - 1))
        if _heaviest(sums, inner) < -(-kv_heads // cores) * g * int(grid.head_area[0]):
            starts = np.arange(heads, dtype=np.int64)[:, None] * (rows * cols)
            starts = starts + _tiles_before_units(inner[:-1], rows, cols)
            return np.append(starts.ravel(), grid.total_tiles)
    ranges = min(cores, kv_heads)
    shares: Int64Array = np.arange(ranges + 1, dtype=np.int64) * kv_heads // ranges
    return shares * (g * rows * cols)


class _Divided(NamedTuple):
    """A group whose kv heads may be divided: its number, query heads, and running sum over units."""

    group: int
    heads: int
    sums: Int64Array
    rows: list[int]


def _ragged_cuts(grid: TileGrid, g: int, cores: int) -> Int64Array:
    """Cuts entries of different lengths: heavy kv heads in parts, runs of light ones into whole heads."""
    kv_heads = grid.heads // g
    head_start = np.zeros(len(kv_heads) + 1, np.int64)
    np.cumsum(kv_heads, out=head_start[1:])
    kv_area = grid.head_area * g
    sums = np.zeros(int(head_start[-1]) + 1, np.int64)
    np.cumsum(np.repeat(kv_area, kv_heads), out=sums[1:])

    def tile_numbers(head: Int64Array) -> Int64Array:
        group = np.minimum(np.searchsorted(head_start, head, side="right") - 1, len(kv_heads) - 1)
        in_group = (head - head_start[group]) * g * grid.rows[group] * grid.cols[group]
        number: Int64Array = grid.tile_start[group] + in_group
        return number

    whole = min_max_cuts(sums, min(cores, len(sums) - 1))
    upper = _heaviest(sums, whole)
    lower = -(-grid.total_area // cores)
    if upper <= _GOOD_ENOUGH * lower:
        return tile_numbers(whole)
    # fewer than `cores` heads weigh more than a fair share, so there are few of these
    heavy = []
    for group in np.flatnonzero(kv_area > lower).tolist():
        units = _unit_sums(grid, group)
        heavy.append(_Divided(group, int(grid.heads[group]), units, units.tolist()))
    if not heavy:
        return tile_numbers(whole)
    lower = max([lower, *(int((unit.sums[1:] - unit.sums[:-1]).max()) for unit in heavy)])
    lists: list[int] = sums.tolist()
    starts: list[int] = head_start.tolist()
    best: _Plan | None = None
    limit = lower
    while limit < upper:
        plan = _plan(limit, heavy, kv_area, starts, lists, cores)
        if plan is None:
            lower = limit + 1
        else:
            best, upper = plan, limit
        if upper - lower <= lower // _TOLERANCE:
            break
        limit = (lower + upper) // 2
    if best is None:
        return tile_numbers(whole)

    spare = cores - best.ranges
    light_area = sum(lists[stop] - lists[start] for start, stop, _ in best.runs)
    cuts = [np.array([0, grid.total_tiles], np.int64)]
    for start, stop, count in best.runs:
        more = spare * (lists[stop] - lists[start]) // light_area if light_area else 0
        run = sums[start : stop + 1] - sums[start]
        cuts.append(tile_numbers(start + min_max_cuts(run, min(count + more, stop - start))))
    for unit, parts in best.divided:
        rows, cols = int(grid.rows[unit.group]), int(grid.cols[unit.group])
        inner = _tiles_before_units(min_max_cuts(unit.sums, parts)[:-1], rows, cols)
        heads = np.arange(unit.heads, dtype=np.int64) * (rows * cols)
        cuts.append((heads[:, None] + inner).ravel() + int(grid.tile_start[unit.group]))
    return np.unique(np.concatenate(cuts))


class _Plan(NamedTuple):
    """How many ranges keep a limit.

    Attributes:
        ranges: Number of ranges.
        divided: Groups to divide, and the parts of each of their query heads.
        runs: Runs of whole kv heads between them: first, end, ranges.
    """

    ranges: int
    divided: list[tuple[_Divided, int]]
    runs: list[tuple[int, int, int]]


def _plan(
    limit: int,
    heavy: list[_Divided],
    kv_area: Int64Array,
    head_start: list[int],
    sums: Sequence[int],
    cores: int,
) -> _Plan | None:
    """Divides groups whose kv heads exceed the limit, packs the others; None if the cores do not suffice."""
    divided, runs = [], []
    ranges, position = 0, 0
    for unit in heavy:
        if kv_area[unit.group] <= limit:
            continue
        parts = _count_parts(unit.rows, 0, len(unit.rows) - 1, limit, cores)
        ranges += parts * unit.heads
        divided.append((unit, parts))
        start = head_start[unit.group]
        if position < start:
            runs.append((position, start))
        position = head_start[unit.group + 1]
    if position < head_start[-1]:
        runs.append((position, head_start[-1]))
    counted = []
    for start, stop in runs:
        if ranges > cores:
            return None
        count = _count_parts(sums, start, stop, limit, cores - ranges)
        counted.append((start, stop, count))
        ranges += count
    return _Plan(ranges, divided, counted) if ranges <= cores else None


def _count_parts(sums: Sequence[int], start: int, stop: int, limit: int, at_most: int) -> int:
    """Counts the parts within a limit that [start, stop) needs; at_most + 1 if it needs more than at_most."""
    parts = 0
    while start < stop:
        parts += 1
        if parts > at_most:
            break
        start = bisect_right(sums, sums[start] + limit, start, stop + 1) - 1
    return parts
