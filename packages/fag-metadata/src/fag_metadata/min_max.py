"""Cuts a row of items into contiguous parts so that the heaviest part is as light as possible.

`sums` are the running sums of the weights, from 0 to the total.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import gcd
from operator import sub
from typing import NamedTuple

import numpy as np

from .ranges import Int64Array


def even_cuts(sums: Int64Array, parts: int) -> Int64Array:
    """Cuts where the sums (n + 1,) are nearest to equal shares: (parts + 1,) item numbers from 0 to n."""
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
