"""The balanced backward split: contiguous tile ranges whose heaviest core has as little visible area as
possible.

For most targets a range may begin at any tile. Target "cpu" is different: its ranges begin only where the
kernels' sums start afresh anyway (see grad_units.py), so that results do not depend on the split.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .arguments import check_int32_count
from .grad_split import NO_RANGES, CoreRanges, band_tokens, count_tiles, make_grad_split, split_grad
from .grad_units import unit_cuts
from .layout import GradSplit, Route, Split
from .min_max import even_cuts, min_max_cuts
from .problem import AttentionProblem
from .routes import select_route
from .targets import CPU_TARGET, Target
from .tile_areas import TileGrid, TileRow

Int64Array = NDArray[np.int64]

_GOOD_ENOUGH = 1.02
"""Max/mean below which nearest cuts are taken without a search, if CANN's are not better."""
_FLAT_TILES = 1 << 15
"""Tiles up to which one running sum over all of them is faster than finding each cut in two stages."""
_SEARCH_TILES = 1 << 21
"""Tiles up to which the exact search is made; beyond, one tile is a vanishing part of a core's share."""


def split_grad_balanced(problem: AttentionProblem, target: Target) -> GradSplit:
    """Splits the backward tiles over the cores by visible area.

    Depends on real lengths only, never on max_seqlen bounds. Its heaviest core is never heavier than CANN's.

    Args:
        problem: What is computed.
        target: Machine; at most one range per cube core.

    Returns:
        Ranges that cover every tile once, in order.

    Raises:
        InvalidProblemError: If a tile or row number does not fit into int32.

    Example:
        >>> from fag_metadata import TARGETS
        >>> sizes = dict(batch_size=1, max_seqlen_q=128, max_seqlen_kv=128)
        >>> problem = AttentionProblem.from_metadata_args(37, 37, 64, **sizes)
        >>> split = split_grad_balanced(problem, TARGETS["Ascend950PR_9599"])
        >>> split.used_cubes, split.end[:3].tolist()
        (36, [1, 2, 3])
    """
    grid = TileGrid(problem)
    # before any area is summed: fewer tiles than that keep all sums far below 2^63
    tiles = grid.total_tiles
    check_int32_count(
        "flash_attn_metadata", "the number of backward tiles", tiles, B=problem.b, N1=problem.n1
    )
    route = select_route(problem, target, Split.BALANCED).route
    counts = count_tiles(int(grid.len_q.max(initial=0)), int(grid.len_kv.max(initial=0)))
    is_sparse = band_tokens(problem, counts).is_sparse
    rows = (problem.t1 * problem.n1, problem.t2 * problem.n2)
    if grid.total_area == 0:
        cuts = np.zeros(1, np.int64)
    elif target.name == CPU_TARGET:
        cuts = unit_cuts(grid, problem.g, target.cube_cores)
    elif route is Route.BN2_MULTIBLK:
        shares = np.arange(target.cube_cores + 1, dtype=np.int64) * grid.heads // target.cube_cores
        cuts = shares * grid.rows * grid.cols
    else:
        cuts = _tile_cuts(problem, grid, target)
    ranges = _ranges_of_cuts(grid, cuts, problem.is_variable)
    return make_grad_split(problem, target, counts, is_sparse, int(route is not Route.BN2GS1S2), ranges, rows)


def _ranges_of_cuts(grid: TileGrid, cuts: Int64Array, is_variable: bool) -> CoreRanges:
    cuts = np.unique(cuts)
    used = len(cuts) - 1
    if used <= 0:
        return NO_RANGES
    entry = np.zeros(used, np.int64)
    if is_variable:
        entry[1:] = np.searchsorted(grid.tile_start, cuts[1:-1], side="right") - 1
    return CoreRanges(used, -(-int(cuts[-1]) // used), cuts[:-1], cuts[1:], entry)


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
    """Finds the cuts nearest to equal areas in two stages, columns and then tiles, without listing all tiles.

    Returns:
        Tile numbers (cores + 1,), and the visible area before each.
    """
    wanted = np.arange(1, cores, dtype=np.int64) * grid.total_area // cores
    group = np.searchsorted(grid.area_start, wanted, side="right") - 1
    head, rest = np.divmod(wanted - grid.area_start[group], grid.head_area[group])
    column_group, column, start = grid.columns(group)
    where = np.searchsorted(start, start[np.searchsorted(column_group, group)] + rest, side="right") - 1
    rest -= start[where] - start[np.searchsorted(column_group, group)]
    touched, which = np.unique(where, return_inverse=True)
    tiles = grid.tiles_of_columns(column_group[touched], column[touched])
    begin = np.zeros(len(tiles.area) + 1, np.int64)
    np.cumsum(tiles.area, out=begin[1:])
    # the running sum of the touched columns, at the first tile of each
    column_start = np.zeros(len(touched) + 1, np.int64)
    np.cumsum(start[touched + 1] - start[touched], out=column_start[1:])
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
