"""CANN's backward split, word for word (steps G1 to G11 of the format page), and right answers where CANN has
none.

Integers only, vectorised over batch entries and key tiles. Where CANN crashes, overruns or overflows (no
visible tile, a missing bound, more than 36 cores, numbers beyond int32) docs/metadata-differences.md says
what is returned instead.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arguments import check_int32_count
from .layout import TILE, GradSplit, Int32Array, LayoutWord, cube_slots
from .problem import AttentionProblem
from .routes import BN2_MAX_HEAD_DIM, MULTI_BLOCK_MAX, SINGLE_TILE_MAX
from .targets import Target
from .terms import INT32_MAX, Layout, MaskMode

Int64Array = NDArray[np.int64]

_OP = "flash_attn_metadata"


class CoreRanges(NamedTuple):
    """Tile ranges of the cores that have one: used cubes, tiles per core, and (used,) starts, ends, and
    batch entries (with variable lengths only).
    """

    used: int
    tiles_per_core: int
    start: Int64Array
    end: Int64Array
    batch: Int64Array


class Counts(NamedTuple):
    """Lengths and bounds that tiles are counted with: s1, s2 as written, tile sizes t1, t2, tiles o1, o2."""

    s1: int
    s2: int
    t1: int
    t2: int
    o1: int
    o2: int


class Tokens(NamedTuple):
    """How far a query sees: left and right tokens of the band, before or after the shift by s1 - s2."""

    left: int
    right: int
    is_sparse: bool


def split_grad(problem: AttentionProblem, target: Target) -> GradSplit:
    """Splits the backward tiles over the cores as CANN does; every visible tile once, in order.

    Raises:
        InvalidProblemError: If a tile or row number does not fit into int32.
    """
    s1, s2 = problem.given_s1, problem.given_s2
    counts = count_tiles(problem.s1 if s1 < 0 else s1, problem.s2 if s2 < 0 else s2)
    is_variable = problem.is_variable
    heads = problem.b * problem.n1
    if not is_variable and heads * counts.o1 * counts.o2 > INT32_MAX:
        # only a bound far above the real lengths of a uniform TND gets here without an error below
        counts = count_tiles(problem.s1, problem.s2)
    tokens = band_tokens(problem, counts)
    axis = split_axis(problem, counts)
    cores = target.cube_cores
    if axis and not is_variable and max(counts.s1, counts.s2) > SINGLE_TILE_MAX:
        ranges = _split_uniform(heads, counts.o1 * counts.o2, cores)
    elif is_variable:
        ranges = _split_variable(problem, counts, tokens, cores)
    elif tokens.is_sparse:
        ranges = _split_sparse(heads, counts, tokens, cores)
    else:
        ranges = _split_uniform(heads * counts.o1 * counts.o2, 1, cores)
    return make_grad_split(
        problem, target, counts, tokens.is_sparse, axis, ranges, row_counts(problem, counts)
    )


def count_tiles(s1: int, s2: int) -> Counts:
    """Counts the tiles of one head (step G1): tile sizes min(128, S), 1 if empty."""
    t1, t2 = min(TILE, s1) or 1, min(TILE, s2) or 1
    return Counts(s1, s2, t1, t2, -(-s1 // t1), -(-s2 // t2))


def band_tokens(problem: AttentionProblem, counts: Counts) -> Tokens:
    """Turns the mask into a band (steps G2, G4); shifted by s1 - s2 already unless lengths are variable."""
    mode = problem.mask_mode
    left = INT32_MAX if problem.win_left < 0 else problem.win_left
    right = INT32_MAX if problem.win_right < 0 else problem.win_right
    if mode is MaskMode.NO_MASK:
        return Tokens(left, right, False)
    if mode is MaskMode.CAUSAL:
        left, right, is_sparse = INT32_MAX, 0, True
    else:
        # unshifted windows, as in CANN: with S1 != S2 a window that hides tiles can count as dense
        is_sparse = counts.s1 > left or counts.s2 > right
    if not problem.is_variable:
        left += counts.s1 - counts.s2
        right += counts.s2 - counts.s1
    return Tokens(left, right, is_sparse)


def split_axis(problem: AttentionProblem, counts: Counts) -> int:
    """Returns CANN's split-axis word (step G5): 1 where its splitter picks a BN2 template, else 0.

    It is not our route: for TND and seqused CANN's splitter and host disagree (see routes.py).
    """
    if problem.n1 != problem.n2 or problem.d > BN2_MAX_HEAD_DIM:
        return 0
    longest = max(counts.s1, counts.s2)
    if longest > MULTI_BLOCK_MAX:
        return 0
    has_lists = problem.has_lengths_q or problem.has_lengths_kv
    if has_lists and problem.has_empty_sequence:
        return 0
    if longest <= SINGLE_TILE_MAX:
        return 1
    heads = problem.b * problem.n1
    if problem.is_variable or heads < 128:
        return 0
    return int(heads >= 256 or (counts.s1 % TILE == 0 and counts.s2 % TILE == 0))


def row_counts(problem: AttentionProblem, counts: Counts) -> tuple[int, int]:
    """Returns the dQ and dK/dV rows: CANN's batch * bound * heads, or the real rows where that overflows."""
    dq_rows = problem.b * counts.s1 * problem.n1
    dkv_rows = problem.b * counts.s2 * problem.n2
    return (
        dq_rows if dq_rows <= INT32_MAX else problem.t1 * problem.n1,
        dkv_rows if dkv_rows <= INT32_MAX else problem.t2 * problem.n2,
    )


def make_grad_split(
    problem: AttentionProblem,
    target: Target,
    counts: Counts,
    is_sparse: bool,
    axis: int,
    ranges: CoreRanges,
    rows: tuple[int, int],
) -> GradSplit:
    """Fills a GradSplit from the ranges of the used cores (step G11)."""
    slots = cube_slots(target.cube_cores)
    used = ranges.used
    tiles = int(ranges.end[used - 1]) if used else 0
    check_int32_count(_OP, "the number of backward tiles", tiles, B=problem.b, N1=problem.n1)
    check_int32_count(_OP, "the number of dQ rows", rows[0], B=problem.b, S1=counts.s1, N1=problem.n1)
    check_int32_count(_OP, "the number of dK/dV rows", rows[1], B=problem.b, S2=counts.s2, N2=problem.n2)
    start, end, batch = np.zeros((3, slots), np.int32)
    start[:used], end[:used] = ranges.start, ranges.end
    if problem.is_variable:
        batch[:used] = ranges.batch
    vectors = min(2 * used, 2 * slots)
    dq_start, dq_end = _row_ranges(rows[0], vectors, 2 * slots)
    dkv_start, dkv_end = (
        (dq_start, dq_end) if rows[0] == rows[1] else _row_ranges(rows[1], vectors, 2 * slots)
    )
    is_tnd = problem.layout is Layout.TND and problem.is_variable
    return GradSplit(
        split_axis=axis,
        used_cubes=used,
        tiles_per_core=min(ranges.tiles_per_core, INT32_MAX),
        o1=counts.o1,
        o2=counts.o2,
        layout=LayoutWord.TND if is_tnd else _UNIFORM_WORDS[problem.layout],
        is_sparse=int(is_sparse),
        sparse_mode=int(problem.mask_mode),
        start=start,
        end=end,
        batch=batch,
        mask_mode=int(problem.mask_mode),
        win_left=problem.win_left,
        win_right=problem.win_right,
        s1=counts.s1,
        s2=counts.s2,
        used_vectors=vectors,
        dq_rows=rows[0],
        dkv_rows=rows[1],
        dq_start=dq_start,
        dq_end=dq_end,
        dkv_start=dkv_start,
        dkv_end=dkv_end,
    )


_UNIFORM_WORDS = {Layout.BSND: LayoutWord.BSND, Layout.BNSD: LayoutWord.BNSD, Layout.TND: LayoutWord.BSND}


@lru_cache(maxsize=8)
def _counting(n: int) -> Int64Array:
    numbers = np.arange(n, dtype=np.int64)
    numbers.flags.writeable = False
    return numbers


def _row_ranges(rows: int, vectors: int, slots: int) -> tuple[Int32Array, Int32Array]:
    """Deals rows to the vector cores, the first ones getting one more where they do not divide."""
    bounds = np.zeros((2, slots), np.int32)
    if vectors and rows:
        share, rest = divmod(rows, vectors)
        cuts = _counting(vectors + 1) * share + np.minimum(_counting(vectors + 1), rest)
        bounds[0, :vectors], bounds[1, :vectors] = cuts[:-1], cuts[1:]
    return bounds[0], bounds[1]


_NO_TILES = np.zeros(0, np.int64)
NO_RANGES = CoreRanges(0, 0, _NO_TILES, _NO_TILES, _NO_TILES)


def _split_uniform(n: int, unit: int, cores: int) -> CoreRanges:
    """Deals n items of `unit` tiles in equal numbers (steps G6, G7)."""
    if n * unit == 0:
        return NO_RANGES
    per_core = -(-n // cores)
    used = -(-n // per_core)
    cuts = np.minimum(_counting(used + 1) * per_core, n) * unit
    return CoreRanges(used, per_core * unit, cuts[:-1], cuts[1:], _NO_TILES)


class Columns(NamedTuple):
    """Covered query tiles of key tile columns: the first one, and the running count before each column."""

    first: Int64Array
    before: Int64Array


def _columns(
    j: Int64Array,
    lengths_q: int | Int64Array,
    lengths_kv: int | Int64Array,
    left: int | Int64Array,
    right: int | Int64Array,
    t1: int,
    t2: int,
) -> Columns:
    """Finds the query tiles that each key tile column j covers (step G8.1)."""
    key = j * t2
    low = np.maximum(key - right, 0)
    first = low // t1
    rows = -(-lengths_q // t1)
    is_beyond = low > lengths_q
    if np.count_nonzero(is_beyond):
        first = np.where(is_beyond, rows, first)
    if isinstance(left, int) and isinstance(lengths_q, int) and left >= lengths_q:
        stop: int | Int64Array = rows  # every column reaches the last query
    else:
        high = np.minimum(lengths_q, np.maximum(np.minimum(key + t2, lengths_kv) + left, 0))
        stop = -(-high // t1)
    count = np.maximum(stop - first, 0)
    before = np.zeros(len(count) + 1, np.int64)
    np.add.accumulate(count, out=before[1:])
    return Columns(first, before)


def _split_sparse(heads: int, counts: Counts, tokens: Tokens, cores: int) -> CoreRanges:
    """Deals the covered tiles of equal heads in equal numbers (step G8)."""
    columns = _columns(
        _counting(counts.o2) if counts.o2 <= 4096 else np.arange(counts.o2, dtype=np.int64),
        counts.s1, counts.s2, tokens.left, tokens.right, counts.t1, counts.t2,
    )  # fmt: skip
    per_head = int(columns.before[-1])
    n = heads * per_head
    if n == 0:
        return NO_RANGES
    per_core = -(-n // cores)
    used = -(-n // per_core)
    head, tile = np.divmod(_counting(used) * per_core, per_head)
    column = columns.before.searchsorted(tile, "right") - 1
    cuts = np.empty(used + 1, np.int64)
    in_column = columns.first[column] + tile - columns.before[column]
    cuts[:-1] = (head * counts.o2 + column) * counts.o1 + in_column
    cuts[0] = 0
    cuts[used] = heads * counts.o1 * counts.o2
    return CoreRanges(used, per_core, cuts[:-1], cuts[1:], _NO_TILES)


def _split_variable(problem: AttentionProblem, counts: Counts, tokens: Tokens, cores: int) -> CoreRanges:
    """Deals the covered tiles of entries with their own lengths in equal numbers (step G9)."""
    if counts.o2 == 0 or problem.b == 0:
        return NO_RANGES
    p, w = problem.lengths_q, problem.lengths_kv
    t1, t2, heads = counts.t1, counts.t2, problem.n1
    rows, cols = -(-p // t1), -(-w // t2)
    rectangle = rows * cols
    if problem.mask_mode is MaskMode.NO_MASK:
        covered = rectangle
    else:
        column_end = np.cumsum(cols)
        column_start = column_end - cols
        j = np.arange(int(column_end[-1]), dtype=np.int64) - np.repeat(column_start, cols)
        shift = p - w
        columns = _columns(
            j,
            np.repeat(p, cols),
            np.repeat(w, cols),
            np.repeat(tokens.left + shift, cols),
            np.repeat(tokens.right - shift, cols),
            t1,
            t2,
        )
        covered = columns.before[column_end] - columns.before[column_start]
    covered_end = np.cumsum(covered) * heads
    n = int(covered_end[-1])
    if n == 0:
        return NO_RANGES
    per_core = -(-n // cores)
    used = -(-n // per_core)
    wanted = _counting(used) * per_core
    entry = np.searchsorted(covered_end, wanted, side="right")
    head, tile = np.divmod(wanted - covered_end[entry] + covered[entry] * heads, covered[entry])
    if problem.mask_mode is MaskMode.NO_MASK:
        in_head = tile
    else:
        target = columns.before[column_start[entry]] + tile
        column = np.searchsorted(columns.before, target, side="right") - 1
        in_head = j[column] * rows[entry] + columns.first[column] + target - columns.before[column]
    rectangle_end = np.cumsum(rectangle) * heads
    cuts = np.empty(used + 1, np.int64)
    cuts[:-1] = rectangle_end[entry] + (head - heads) * rectangle[entry] + in_head
    cuts[0] = 0
    cuts[used] = rectangle_end[-1]
    entry[0] = 0
    return CoreRanges(used, per_core, cuts[:-1], cuts[1:], entry)
