"""Which keys a query row may see: visible ranges and visible areas, vectorised.

A mask is turned into a band of diagonals once; everything after that is clipping and closed-form sums. All
functions broadcast like NumPy ufuncs, work in int64 and never loop over rows or tiles.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64Array: TypeAlias = npt.NDArray[np.int64]
IntLike: TypeAlias = "int | npt.NDArray[np.int64]"

_CAUSAL = 3
_SLIDING_WINDOW = 4


def band(
    mask_mode: int, win_left: int, win_right: int, lengths_q: IntLike, lengths_kv: IntLike
) -> tuple[Int64Array, Int64Array]:
    """The diagonals a mask leaves visible: row i sees key j if ``first <= j - i <= last``.

    Modes and windows are those of AttentionProblem; lengths are real ones, of one shape or broadcastable.

    Returns:
        (first, last), int64, which may share memory with the lengths. Both are clipped to [-s1, s2], which
        changes no visible pair and keeps all later sums small, whatever the windows are.
    """
    s1 = np.asarray(lengths_q, dtype=np.int64)
    s2 = np.asarray(lengths_kv, dtype=np.int64)
    if s1.shape != s2.shape:
        s1, s2 = np.broadcast_arrays(s1, s2)
    offset = s2 - s1
    first, last = -s1, s2
    if mask_mode == _CAUSAL:
        last = offset
    elif mask_mode == _SLIDING_WINDOW:
        if win_left >= 0:
            first = np.maximum(offset - win_left, first)
        if win_right >= 0:
            last = np.minimum(offset + win_right, last)
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

    int64, of the broadcast shape; exact for positions and diagonals within +-2**31.
    """
    shift = np.subtract(diagonal, key_start, dtype=np.int64)
    behind, before = row_stop + shift, row_start + shift
    width = np.subtract(key_stop, key_start, dtype=np.int64)
    # 0 + 1 + ... + n of four n at once; unsigned, because n * (n + 1) may reach 2**64
    n = np.empty((4, *np.broadcast(behind, before, width).shape), np.int64)
    n[0], n[1], n[2], n[3] = behind, before, behind - width, before - width
    np.maximum(n, 0, out=n)
    sums = n.view(np.uint64)
    sums *= sums + np.uint64(1)
    sums >>= np.uint64(1)
    pairs: Int64Array = n[0] - n[1] - n[2] + n[3]
    return pairs


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
