"""CANN's backward split, word for word (steps G1 to G11 of the format page).

docs/metadata-differences.md says what is returned where CANN crashes or overflows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .arguments import check_int32_count
from .layout import TILE, GradSplit, LayoutWord, cube_slots, grad_slices, put_8_words
from .problem import AttentionProblem
from .ranges import Int64Array, IntLike, ramp, running_sums
from .routes import BN2_MAX_HEAD_DIM, MULTI_BLOCK_MAX, SINGLE_TILE_MAX
from .terms import INT32_MAX, Layout, MaskMode, Target

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
    """How far a query sees: left and right tokens of the band, before or after the shift by s1 - s2; whether
    the mask hides tiles, and whether it hides none to the left.
    """

    left: IntLike
    right: IntLike
    is_sparse: bool
    is_open: bool


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
    left = INT32_MAX if problem.win_left < 0 else problem.win_left
    right = INT32_MAX if problem.win_right < 0 else problem.win_right
    is_open = problem.win_left < 0
    if problem.mask_mode is MaskMode.NO_MASK:
        return Tokens(left, right, False, is_open)
    # Unshifted windows, as in CANN: with S1 != S2 a window that hides tiles can count as dense.
    is_sparse = counts.s1 > left or counts.s2 > right
    if problem.mask_mode is MaskMode.CAUSAL:
        right, is_sparse = 0, True
    if not problem.is_variable:
        left += counts.s1 - counts.s2
        right += counts.s2 - counts.s1
    return Tokens(left, right, is_sparse, is_open)


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
    used = ranges.used
    tiles = int(ranges.end[used - 1]) if used else 0
    if tiles > INT32_MAX or max(rows) > INT32_MAX:
        b, n1 = problem.b, problem.n1
        check_int32_count(_OP, "the number of backward tiles", tiles, B=b, N1=n1)
        check_int32_count(_OP, "the number of dQ rows", rows[0], B=b, S1=counts.s1, N1=n1)
        check_int32_count(_OP, "the number of dK/dV rows", rows[1], B=b, S2=counts.s2, N2=problem.n2)
    split = GradSplit(cube_slots(target.cube_cores))
    words, where = split.words, grad_slices(split.slots)
    words[where["start"]][:used], words[where["end"]][:used] = ranges.start, ranges.end
    if problem.is_variable:
        words[where["batch"]][:used] = ranges.batch
    vectors = min(2 * used, 2 * split.slots)
    if vectors:
        pieces = words[where["dq_start"].start : where["dkv_end"].stop].reshape(2, 2, -1)
        pieces[:, 0, :vectors], pieces[:, 1, :vectors] = _deal_rows(rows[0], vectors)
        if rows[0] != rows[1]:
            pieces[1, 0, :vectors], pieces[1, 1, :vectors] = _deal_rows(rows[1], vectors)
    is_tnd = problem.layout is Layout.TND and problem.is_variable
    mode, layout = problem.mask_mode, LayoutWord.TND if is_tnd else _UNIFORM_WORDS[problem.layout]
    # The single words, in the order of GRAD: those before the ranges, and those behind them.
    data, behind = words.data, words.itemsize * where["mask_mode"].start
    per_core = min(ranges.tiles_per_core, INT32_MAX)
    put_8_words(data, 0, axis, used, per_core, counts.o1, counts.o2, layout, is_sparse, mode)
    windows = problem.win_left, problem.win_right
    put_8_words(data, behind, mode, *windows, counts.s1, counts.s2, vectors, *rows)
    return split


_UNIFORM_WORDS = {Layout.BSND: LayoutWord.BSND, Layout.BNSD: LayoutWord.BNSD, Layout.TND: LayoutWord.BSND}


@lru_cache(maxsize=8)
def _counting(n: int) -> Int64Array:
    numbers = np.arange(n, dtype=np.int64)
    numbers.flags.writeable = False
    return numbers


def _deal_rows(rows: int, vectors: int) -> tuple[Int64Array, Int64Array]:
    """First and end rows of the vector cores: as many for all, the first ones getting one more where they do
    not divide.
    """
    share, rest = divmod(rows, vectors)
    cuts = _counting(vectors + 1) * share
    if rest:
        cuts += np.minimum(_counting(vectors + 1), rest)
    return cuts[:-1], cuts[1:]


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


def _columns(column: Int64Array, s1: IntLike, s2: IntLike, tokens: Tokens, counts: Counts) -> Columns:
    """Finds the query tiles that key tile columns with these numbers cover (step G8.1).

    `tokens` are shifted; s1, s2 and they are ints, or have a number for every column.
    """
    t1, t2 = counts.t1, counts.t2
    left, right = tokens.left, tokens.right
    # A key of the sequence is at most s2 - 1, and right at least s2 - s1: no column begins behind the last
    # query, so that the page's other case cannot occur.
    first = column + -right // t1 if t1 == t2 else (column * t2 - right) // t1
    if not isinstance(right, int) or right > 0:
        np.maximum(first, 0, out=first)
    rows = -(-s1 // t1)
    if tokens.is_open:  # every column reaches the last query
        return Columns(first, running_sums(rows - first))
    high = np.minimum(s1, np.maximum(np.minimum((column + 1) * t2, s2) + left, 0))
    return Columns(first, running_sums(np.maximum(-(-high // t1) - first, 0)))


def _split_sparse(heads: int, counts: Counts, tokens: Tokens, cores: int) -> CoreRanges:
    """Deals the covered tiles of equal heads in equal numbers (step G8)."""
    o1, o2 = counts.o1, counts.o2
    first, before = _columns(np.arange(o2), counts.s1, counts.s2, tokens, counts)
    per_head = int(before[-1])
    n = heads * per_head
    if n == 0:
        return NO_RANGES
    per_core = -(-n // cores)
    used = -(-n // per_core)
    wanted = _counting(used + 1) * per_core
    head = wanted // per_head
    inside = wanted - head * per_head
    column = before[1:].searchsorted(inside, "right")
    cuts = head * (o1 * o2)
    cuts += column * o1
    cuts += inside
    cuts += (first - before[:-1])[column]
    cuts[0], cuts[used] = 0, heads * o1 * o2
    return CoreRanges(used, per_core, cuts[:-1], cuts[1:], _NO_TILES)


def _count_covered(
    problem: AttentionProblem, rows: Int64Array, cols: Int64Array, tokens: Tokens, counts: Counts
) -> Int64Array:
    """Covered tiles of a head of every entry, in closed form."""
    shift = problem.lengths_q - problem.lengths_kv
    # Column j covers the rows max(0, j + above) to min(rows, rows - below + j), the last one to the last row.
    # Where tiles are not square there is one row, which every column begins with, or one column.
    above = (shift - tokens.right) // max(counts.t1, counts.t2)
    covered: Int64Array = rows * cols - ramp(cols - 1 + above) + ramp(above - 1)
    if not tokens.is_open:
        below = rows - 1 + (-tokens.left - shift) // counts.t2
        others = np.maximum(cols - 1, 0)
        covered -= ramp(below) - ramp(below - others) - ramp(below - rows) + ramp(below - rows - others)
    return covered


def _split_variable(problem: AttentionProblem, counts: Counts, tokens: Tokens, cores: int) -> CoreRanges:
    """Deals the covered tiles of entries with their own lengths in equal numbers (step G9)."""
    if counts.o2 == 0 or problem.b == 0:
        return NO_RANGES
    p, w, heads = problem.lengths_q, problem.lengths_kv, problem.n1
    rows, cols = -(-p // counts.t1), -(-w // counts.t2)
    rectangle = covered = rows * cols
    if problem.mask_mode is not MaskMode.NO_MASK:
        covered = _count_covered(problem, rows, cols, tokens, counts)
    covered_end = np.cumsum(covered) * heads
    n = int(covered_end[-1])
    if n == 0:
        return NO_RANGES
    per_core = -(-n // cores)
    used = -(-n // per_core)
    wanted = _counting(used) * per_core
    entry = np.searchsorted(covered_end, wanted, side="right")
    head, tile = np.divmod(wanted - covered_end[entry] + covered[entry] * heads, covered[entry])
    if problem.mask_mode is not MaskMode.NO_MASK:
        # The columns of the entries that a core starts in, one entry after the other.
        is_new = np.ones(used, np.bool_)
        is_new[1:] = entry[1:] != entry[:-1]
        touched, which = entry[is_new], is_new.cumsum() - 1
        p, w, cols = p[touched], w[touched], cols[touched]
        start = np.cumsum(cols) - cols
        number = np.arange(int(cols.sum())) - start.repeat(cols)
        left, right = (tokens.left + p - w).repeat(cols), (tokens.right - p + w).repeat(cols)
        shifted = tokens._replace(left=left, right=right)
        first, before = _columns(number, p.repeat(cols), w.repeat(cols), shifted, counts)
        tile += before[start[which]]
        column = np.searchsorted(before, tile, side="right") - 1
        tile += number[column] * rows[entry] + first[column] - before[column]
    rectangle_end = np.cumsum(rectangle) * heads
    cuts = np.empty(used + 1, np.int64)
    cuts[:-1] = rectangle_end[entry] + (head - heads) * rectangle[entry] + tile
    cuts[0] = 0
    cuts[used] = rectangle_end[-1]
    entry[0] = 0
    return CoreRanges(used, per_core, cuts[:-1], cuts[1:], entry)
