"""The balanced backward split: contiguous tile ranges whose heaviest core has as little visible area as
possible.

For target "cpu" ranges begin only where the kernels' sums start afresh anyway, so that results do not depend
on the split: dQ is summed within units of 256 keys, dK and dV within one query head. So a kv head stays
whole, or each of its query heads is cut on its own, between units.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .areas import TileGrid, TileRow
from .arguments import check_int32_count
from .grad_split import NO_RANGES, CoreRanges, band_tokens, count_tiles, make_grad_split, split_grad
from .layout import BWD_UNIT_KEYS, TILE, GradSplit, Route, Split
from .problem import AttentionProblem
from .ranges import Int64Array, band, cut_equal_rows, even_cuts, masked_area, min_max_cuts, running_sums
from .routes import select_route
from .terms import CPU_TARGET, Target

_GOOD_ENOUGH = 1.02
"""Max/mean below which nearest cuts are taken without a search, if CANN's are not better."""
_FLAT_TILES = 1 << 15
"""Tiles up to which one running sum over all of them is faster than finding each cut in two stages."""
_SEARCH_TILES = 1 << 21
"""Tiles up to which the exact search is made; beyond, one tile is a vanishing part of a core's share."""
_NO_CUTS = np.zeros(1, np.int64)
_UNIT_COLS = BWD_UNIT_KEYS // TILE
_TOLERANCE = 256
"""The search for the smallest heaviest range stops at this fraction of it: 0.4 %."""


def split_grad_balanced(problem: AttentionProblem, target: Target) -> GradSplit:
    """Splits the backward tiles over the cores by visible area, at most one range a core.

    Depends on real lengths only, never on max_seqlen bounds. Its heaviest core is never heavier than CANN's.

    Raises:
        InvalidProblemError: If a tile or row number does not fit into int32.
    """
    cores = target.cube_cores
    if target.name == CPU_TARGET and not problem.is_variable:
        len_q, len_kv = problem.s1, problem.s2
        _check_tiles(problem, problem.b * problem.n1 * -(-len_q // TILE) * -(-len_kv // TILE))
        cuts = _equal_cuts(problem, cores)
        route = select_route(problem, target, Split.BALANCED).route
    else:
        grid = TileGrid(problem)
        len_q, len_kv = int(grid.len_q.max(initial=0)), int(grid.len_kv.max(initial=0))
        _check_tiles(problem, grid.total_tiles)
        route = select_route(problem, target, Split.BALANCED).route
        if grid.total_area == 0:
            cuts = _NO_CUTS
        elif target.name == CPU_TARGET:
            cuts = _ragged_cuts(grid, problem.g, cores)
        elif route is Route.BN2_MULTIBLK:
            cuts = np.arange(cores + 1) * grid.heads // cores * (grid.rows * grid.cols)
        else:
            cuts = _tile_cuts(problem, grid, target)
        cuts = cuts[np.diff(cuts, prepend=-1) > 0]
    used = len(cuts) - 1
    ranges = NO_RANGES
    if used:
        entry = start = cuts[:-1]
        if problem.is_variable:
            entry = grid.tile_start.searchsorted(start, side="right") - 1
            entry[0] = 0
        ranges = CoreRanges(used, -(-int(cuts[-1]) // used), start, cuts[1:], entry)
    counts = count_tiles(len_q, len_kv)
    is_sparse = band_tokens(problem, counts).is_sparse
    rows = (problem.t1 * problem.n1, problem.t2 * problem.n2)
    return make_grad_split(problem, target, counts, is_sparse, int(route is not Route.BN2GS1S2), ranges, rows)


def _check_tiles(problem: AttentionProblem, tiles: int) -> None:
    """Before any area is summed: fewer tiles than that keep all sums far below 2^63."""
    check_int32_count(
        "flash_attn_metadata", "the number of backward tiles", tiles, B=problem.b, N1=problem.n1
    )


def _tile_cuts(problem: AttentionProblem, grid: TileGrid, target: Target) -> Int64Array:
    """Returns tile numbers at which ranges begin, and the total: nearest to equal areas, or searched for."""
    cores = target.cube_cores
    row = TileRow(grid) if grid.total_tiles <= _FLAT_TILES else None
    if row is not None:
        index = even_cuts(row.sums, cores)
        tile, area = row.tile_numbers(index), row.sums[index]
    else:
        tile, area = _nearest_cuts(grid, cores)
    heaviest = _heaviest(area)
    if heaviest * cores > _GOOD_ENOUGH * grid.total_area and grid.total_tiles <= _SEARCH_TILES:
        return _searched(row, grid, cores)
    cann, cann_area = _cann_cuts(problem, grid, target)
    if heaviest <= _heaviest(cann_area):
        return tile
    return _searched(row, grid, cores) if grid.total_tiles <= _SEARCH_TILES else cann


def _searched(row: TileRow | None, grid: TileGrid, cores: int) -> Int64Array:
    row = TileRow(grid) if row is None else row
    return row.tile_numbers(min_max_cuts(row.sums, cores))


def _heaviest(area: Int64Array) -> int:
    return int((area[1:] - area[:-1]).max())


def _cann_cuts(problem: AttentionProblem, grid: TileGrid, target: Target) -> tuple[Int64Array, Int64Array]:
    """Returns CANN's cuts as tile numbers and the visible area before each."""
    split = split_grad(problem, target)
    tile = np.zeros(split.used_cubes + 1, np.int64)
    tile[:-1] = split.start[: split.used_cubes]
    tile[-1] = split.end[split.used_cubes - 1]
    if not problem.is_variable and (split.o1, split.o2) != (int(grid.rows[0]), int(grid.cols[0])):
        # a bound above the real lengths of a uniform TND: the same tiles in a larger rectangle
        grid = TileGrid(problem, split.o1, split.o2)
    return tile, grid.area_before(tile)


def _nearest_cuts(grid: TileGrid, cores: int) -> tuple[Int64Array, Int64Array]:
    """Finds the cuts nearest to equal areas, and the area before each: columns first, then their tiles."""
    wanted = np.arange(1, cores, dtype=np.int64) * grid.total_area // cores
    group = np.searchsorted(grid.area_start, wanted, side="right") - 1
    head, rest = np.divmod(wanted - grid.area_start[group], grid.head_area[group])
    column_group, column, start = grid.columns(group)
    where = np.searchsorted(start, start[np.searchsorted(column_group, group)] + rest, side="right") - 1
    rest -= start[where] - start[np.searchsorted(column_group, group)]
    touched, which = np.unique(where, return_inverse=True)
    tiles = grid.tiles_of_columns(column_group[touched], column[touched])
    begin = running_sums(tiles.area)
    # the running sum of the touched columns, at the first tile of each
    column_start = running_sums(start[touched + 1] - start[touched])
    in_touched = column_start[which] + rest
    tile = np.searchsorted(begin, in_touched, side="right") - 1
    rest = in_touched - begin[tile]
    is_next = 2 * rest > tiles.area[tile]
    number = grid.tile_start[group] + head * grid.rows[group] * grid.cols[group] + tiles.tile[tile] + is_next
    area = wanted - rest + is_next * tiles.area[tile]
    return (
        np.concatenate(([0], number, [grid.total_tiles])),
        np.concatenate(([0], area, [grid.total_area])),
    )


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


def _equal_cuts(problem: AttentionProblem, cores: int) -> Int64Array:
    """Returns tile numbers at which ranges begin, and the total, all different, for equal heads: all kv heads
    whole, or all query heads in the same number of parts.

    A mixture cannot be better: with fewer kv heads than cores the heaviest range is a whole kv head as long
    as one is left whole, and with more kv heads no core is left to cut one.
    """
    s1, s2, g = problem.s1, problem.s2, problem.g
    heads, rows, cols = problem.b * problem.n1, -(-s1 // TILE), -(-s2 // TILE)
    mode = problem.mask_mode
    key = np.arange(0, s2 + BWD_UNIT_KEYS, BWD_UNIT_KEYS)
    key[-1] = s2
    first, last = band(mode, problem.win_left, problem.win_right, s1, s2)
    sums: list[int] = masked_area(mode, first, last, 0, s1, 0, key).tolist()
    if not sums[-1] * heads:
        return _NO_CUTS
    kv_heads, parts = heads // g, cores // heads
    if parts:
        found = cut_equal_rows(sums, 1, parts)
        if found.heaviest < -(-kv_heads // cores) * g * sums[-1]:
            inner = [unit * _UNIT_COLS * rows for unit in found.begin]
            head_starts = range(0, heads * rows * cols, rows * cols)
            return np.array([*(start + tile for start in head_starts for tile in inner), head_starts.stop])
    ranges = min(cores, kv_heads)
    shares: Int64Array = np.arange(ranges + 1) * kv_heads // ranges
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
    head_start = running_sums(kv_heads)
    kv_area = grid.head_area * g
    sums = running_sums(np.repeat(kv_area, kv_heads))

    def tile_numbers(head: Int64Array) -> Int64Array:
        group = np.minimum(np.searchsorted(head_start, head, side="right") - 1, len(kv_heads) - 1)
        in_group = (head - head_start[group]) * g * grid.rows[group] * grid.cols[group]
        number: Int64Array = grid.tile_start[group] + in_group
        return number

    whole = min_max_cuts(sums, min(cores, len(sums) - 1))
    upper = _heaviest(sums[whole])
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
    """Ranges that keep a limit: their number, groups to divide and the parts of each of their query heads,
    and runs of whole kv heads between them (first, end, ranges).
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
