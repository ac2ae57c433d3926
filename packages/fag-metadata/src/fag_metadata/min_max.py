"""Cuts a row of items into contiguous parts so that the heaviest part is as light as possible.

Exact, on running sums; knows nothing of tiles. Items weigh at least 1.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


def even_cuts(sums: Int64Array, parts: int) -> Int64Array:
    """Cuts where the running sum is nearest to equal shares.

    `sums` (n + 1,) ascends from 0 to the total; returned are (parts + 1,) item numbers from 0 to n.
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
    """The same, but so that the heaviest part is the lightest possible, and the others as even as that
    allows.

    `sums` must ascend strictly.
    """
    cuts = even_cuts(sums, parts)
    upper = int((sums[cuts[1:]] - sums[cuts[:-1]]).max())
    lower = max(-(-int(sums[-1]) // parts), int((sums[1:] - sums[:-1]).max(initial=0)))
    if lower >= upper:
        return cuts
    rows: Sequence[int] = sums.tolist()
    probe = lower
    while lower < upper:
        feasible, limit = _probe(rows, parts, probe)
        if feasible:
            upper = limit
        else:
            lower = limit
        probe = (lower + upper) // 2
    return _spread(rows, parts, upper)


def can_cut(sums: Int64Array, parts: int, limit: int) -> bool:
    """Whether the heaviest part can be kept within a limit."""
    return int((sums[1:] - sums[:-1]).max(initial=0)) <= limit and _probe(sums.tolist(), parts, limit)[0]


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


def _spread(sums: Sequence[int], parts: int, limit: int) -> Int64Array:
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
    return np.array(cuts, np.int64)
