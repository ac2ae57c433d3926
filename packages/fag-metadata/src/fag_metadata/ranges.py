"""Which keys a query row may see: visible ranges and visible areas, vectorised.

A mask is turned into a band of diagonals once; everything after that is clipping and closed-form sums. All
functions broadcast like NumPy ufuncs, work in int64 and never loop over rows or tiles.
"""

from __future__ import annotations

from typing import Any, TypeAlias, overload

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
