"""Ranges: of the keys that a query row may see, and of the items that a part of a row of them gets.

A mask is turned into a band of diagonals once; everything after that is clipping and closed-form sums, which
broadcast like NumPy ufuncs, work in int64 and never loop over rows or tiles.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import gcd
from operator import sub
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

Int64Array: TypeAlias = npt.NDArray[np.int64]
IntLike: TypeAlias = "int | npt.NDArray[np.int64]"

_CAUSAL = 3
_SLIDING_WINDOW = 4


def running_sums(numbers: npt.NDArray[Any]) -> Int64Array:
    """The sums of the numbers before each place, and of all: one more than numbers."""
    sums = np.zeros(len(numbers) + 1, np.int64)
    np.add.accumulate(numbers, out=sums[1:])
    return sums


@overload
def divide(values: int, divisor: int) -> int: ...
@overload
def divide(values: Int64Array, divisor: int) -> Int64Array: ...
def divide(values: IntLike, divisor: int) -> IntLike:
    """The floor of values / divisor; of arrays in a third of the time where the divisor is a power of two."""
    if divisor & (divisor - 1):
        return values // divisor
    return values >> (divisor.bit_length() - 1)


@overload
def band(mode: int, left: int, right: int, s1: int, s2: int) -> tuple[int, int]: ...
@overload
def band(
    mode: int, left: int, right: int, s1: Int64Array, s2: Int64Array
) -> tuple[Int64Array, Int64Array]: ...
def band(mode: int, left: int, right: int, s1: IntLike, s2: IntLike) -> tuple[IntLike, IntLike]:
    """The diagonals a mask leaves visible: row i sees key j if ``first <= j - i <= last``.

    Modes and windows are those of AttentionProblem; s1, s2 are real lengths, ints or int64 arrays of one
    shape.

    Returns:
        (first, last) of the same kind, which may share memory with the lengths. Both are clipped to
        [-s1, s2], which changes no visible pair and keeps all later sums small, whatever the windows are.
    """
    offset = s2 - s1
    first, last = -s1, s2
    if mode == _CAUSAL:
        last = offset
    elif mode == _SLIDING_WINDOW:
        is_int = isinstance(offset, int)
        if left >= 0:
            first = max(offset - left, first) if is_int else np.maximum(offset - left, first)
        if right >= 0:
            last = min(offset + right, last) if is_int else np.minimum(offset + right, last)
    return first, last


def visible_rows(
    key_start: IntLike, key_stop: IntLike, first: IntLike, last: IntLike, lengths_q: IntLike
) -> tuple[Int64Array, Int64Array]:
    """The smallest range [start, stop) of queries that holds every one seeing a key of [key_start, key_stop).

    `first` and `last` are the diagonals of `band`: query i sees key j if ``j - last <= i <= j - first``.

    Returns:
        (start, stop), int64; ``stop == start`` where no query sees one of the keys.
    """
    begin = np.asarray(key_start, dtype=np.int64)
    end = np.asarray(key_stop, dtype=np.int64)
    start = np.clip(begin - last, 0, lengths_q)
    stop = np.clip(end - first, 0, lengths_q)
    return start, np.where(end > begin, np.maximum(start, stop), start)


def pairs_up_to(
    diagonal: IntLike, row_start: IntLike, row_stop: IntLike, key_start: IntLike, key_stop: IntLike
) -> Int64Array:
    """Number of pairs (i, j) of a rectangle with ``j - i <= diagonal``: a sum of a clipped linear ramp.

    Of the broadcast shape, an int of ints; exact for positions and diagonals within +-2**31.
    """
    shift = diagonal - key_start
    behind, before = row_stop + shift, row_start + shift
    width = key_stop - key_start
    pairs: Int64Array = ramp(behind) - ramp(behind - width)
    if not isinstance(before, int) or before > 0:  # else no row before row_start sees a key from key_start on
        pairs = pairs - ramp(before) + ramp(before - width)
    return pairs


def ramp(n: IntLike) -> Any:
    """0 + 1 + ... + n, and 0 for a negative n."""
    if isinstance(n, int):
        return n * (n + 1) // 2 if n > 0 else 0
    n = np.maximum(n, 0)
    half = n + 1
    half >>= 1  # of n and n + 1 the even one is halved, so that nothing overflows; n | 1 is the odd one
    half *= n | 1
    return half


def visible_area(
    row_start: IntLike,
    row_stop: IntLike,
    key_start: IntLike,
    key_stop: IntLike,
    first: IntLike,
    last: IntLike,
) -> Int64Array:
    """Number of visible (query, key) pairs in the rectangle [row_start, row_stop) x [key_start, key_stop).

    Both lie inside the sequence; `first` and `last` are the diagonals of `band`. Exact as pairs_up_to.
    """
    low = np.asarray(first, dtype=np.int64)
    high = np.asarray(last, dtype=np.int64)
    area = pairs_up_to(high, row_start, row_stop, key_start, key_stop)
    area = area - pairs_up_to(low - 1, row_start, row_stop, key_start, key_stop)
    return np.where(high >= low, area, 0)


def masked_area(
    mode: int,
    first: IntLike,
    last: IntLike,
    row_start: IntLike,
    row_stop: IntLike,
    key_start: IntLike,
    key_stop: IntLike,
) -> Int64Array:
    """visible_area with no more work than the mask asks for."""
    if mode == _CAUSAL:
        return pairs_up_to(last, row_start, row_stop, key_start, key_stop)
    if mode == _SLIDING_WINDOW:
        return visible_area(row_start, row_stop, key_start, key_stop, first, last)
    full: Int64Array = np.multiply(row_stop - row_start, key_stop - key_start, dtype=np.int64)
    return full


def even_cuts(sums: Int64Array, parts: int) -> Int64Array:
    """Cuts a row of items into contiguous parts near to equal shares.

    `sums` (n + 1,) are the running sums of the weights, from 0 to the total, here and below.

    Returns:
        (parts + 1,) item numbers from 0 to n.
    """
    total = int(sums[-1])
    wanted = np.arange(parts + 1, dtype=np.int64) * total / parts
    above = np.searchsorted(sums, wanted)
    above[-1] = len(sums) - 1
    below = np.maximum(above - 1, 0)
    cuts = np.where(wanted - sums[below] < sums[above] - wanted, below, above)
    cuts[0], cuts[-1] = 0, len(sums) - 1
    return cuts


def min_max_cuts(sums: Int64Array, parts: int) -> Int64Array:
    """The same with the lightest heaviest part, the others as even as that allows; items weigh at least 1."""
    cuts = even_cuts(sums, parts)
    upper = int((sums[cuts[1:]] - sums[cuts[:-1]]).max())
    lower = max(-(-int(sums[-1]) // parts), int((sums[1:] - sums[:-1]).max(initial=0)))
    if lower >= upper:
        return cuts
    rows: Sequence[int] = sums.tolist()
    return np.array(_spread(rows, parts, _lightest(rows, parts, lower, upper)), np.int64)


class EqualRowsCuts(NamedTuple):
    """Where the parts of the first `rows` rows begin, in items, ascending and all different; those behind are
    cut alike, `rows` at a time. And the heaviest part.
    """

    begin: list[int]
    rows: int
    heaviest: int


def cut_equal_rows(sums: Sequence[int], rows: int, parts: int) -> EqualRowsCuts:
    """The lightest heaviest part of `rows` equal rows, one after the other, in at most that many parts.

    `sums` are those of one row; not all items weigh nothing. Rows repeat, and so do the cuts if no others are
    better: then only the rows of one period are searched.
    """
    total, items = sums[-1], len(sums) - 1
    parts = min(parts, rows * items)
    periods = gcd(rows, parts)
    widest = max(map(sub, sums[1:], sums))
    mean = -(-total * rows // parts)
    cuts = _cut_rows(sums, rows // periods, parts // periods, widest)
    may_improve = periods > 1 and cuts.heaviest > max(mean, widest)
    if may_improve and _can_cut_rows(sums, rows, parts, cuts.heaviest - 1):
        return _cut_rows(sums, rows, parts, widest)
    return cuts


def _cut_rows(sums: Sequence[int], rows: int, parts: int, widest: int) -> EqualRowsCuts:
    total = sums[-1]
    if rows > 1:
        sums = [row * total + each for row in range(rows) for each in sums[:-1]] + [rows * total]
    lower = max(-(-rows * total // parts), widest)
    heaviest = _lightest(sums, parts, lower, lower + widest)
    begin = [*dict.fromkeys(_spread(sums, parts, heaviest))]
    return EqualRowsCuts(begin[:-1], rows, heaviest)


def can_cut_equal_rows(sums: Sequence[int], rows: int, parts: int, limit: int) -> bool:
    """Whether `cut_equal_rows` keeps every part within a limit, for a quarter of its time."""
    return limit >= max(map(sub, sums[1:], sums)) and _can_cut_rows(sums, rows, parts, limit)


def _can_cut_rows(sums: Sequence[int], rows: int, parts: int, limit: int) -> bool:
    """Whether equal rows can be cut so that the heaviest part is within a limit, at least any item."""
    total, before = sums[-1], 0  # in front of the next part in its row
    room = limit * parts - total * rows
    left = parts - 1
    seen: dict[int, tuple[int, int]] = {}
    while left and room >= 0:
        inside = (before + limit) % total
        before = sums[bisect_right(sums, inside) - 1]
        room -= inside - before
        left -= 1
        if before in seen:  # from here on parts repeat: soon, since there are few places in a row
            left_then, room_then = seen[before]
            repeats, left = divmod(left, left_then - left)
            room -= repeats * (room_then - room)
        seen[before] = left, room
    return room >= 0


def _lightest(sums: Sequence[int], parts: int, lower: int, upper: int) -> int:
    """The lightest heaviest part; `upper` can be kept, less than `lower` cannot."""
    probe = lower
    while lower < upper:
        feasible, limit = _probe(sums, parts, probe)
        if feasible:
            upper = limit
        else:
            lower = limit
        probe = (lower + upper) // 2
    return upper


def _probe(sums: Sequence[int], parts: int, limit: int) -> tuple[bool, int]:
    """Fills parts up to a limit.

    Returns (True, heaviest part) if that suffices, else (False, next larger limit that changes anything).
    """
    last = len(sums) - 1
    start, heaviest, next_limit = 0, 0, sums[-1]
    for left in range(parts, 0, -1):
        before = sums[start]
        if sums[last] - before > limit * left:
            return False, min(next_limit, -((before - sums[last]) // left))
        stop = bisect_right(sums, before + limit, start) - 1
        if stop >= last:
            return True, max(heaviest, sums[last] - before)
        weight, next_weight = sums[stop] - before, sums[stop + 1] - before
        if weight > heaviest:
            heaviest = weight
        if next_weight < next_limit:
            next_limit = next_weight
        start = stop
    return False, next_limit


def _spread(sums: Sequence[int], parts: int, limit: int) -> list[int]:
    """Cuts nearest to equal shares of what remains, among all cuts whose parts stay within the limit."""
    last = len(sums) - 1
    # a part may not start before `earliest`, or the parts behind it cannot take the rest
    earliest = [last] * (parts + 1)
    for part in range(parts - 1, -1, -1):
        earliest[part] = bisect_left(sums, sums[earliest[part + 1]] - limit)
    cuts = [0]
    start = 0
    for part in range(1, parts):
        before = sums[start]
        wanted = before + (sums[last] - before) / (parts - part + 1)
        stop = bisect_left(sums, wanted, start)
        if stop > start and wanted - sums[stop - 1] < sums[stop] - wanted:
            stop -= 1
        if stop < earliest[part]:
            stop = earliest[part]
        if sums[stop] - before > limit:
            stop = bisect_right(sums, before + limit, start) - 1
        cuts.append(stop)
        start = stop
    cuts.append(last)
    return cuts
