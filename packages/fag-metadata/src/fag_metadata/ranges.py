"""Which keys a query row may see: visible ranges and visible areas, vectorised.

Here lives the arithmetic of masks (spec: causal and window masks aligned bottom-right) and nothing else. A
mask is turned into a band of diagonals once; everything after that is clipping and closed-form sums. All
functions broadcast like NumPy ufuncs, work in int64 and never loop over rows or tiles. Imports nothing from
this package, so that both splits, the balance figures and the checks can share it.
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

    Args:
        mask_mode: 0 none, 3 causal, 4 sliding window (see MaskMode).
        win_left: Keys to the left of the diagonal, -1 = unbounded; read in mode 4 only.
        win_right: Keys to the right of the diagonal, -1 = unbounded; read in mode 4 only.
        lengths_q: Real query lengths s1, int64, any shape.
        lengths_kv: Real key lengths s2, broadcastable with lengths_q.

    Returns:
        (first, last), int64, of the broadcast shape (may share memory with the inputs). Both are clipped to
        [-s1, s2], which changes no visible pair (j - i never leaves [1 - s1, s2 - 1]) and keeps all later
        sums small, whatever the windows are.

    Example:
        >>> [int(diagonal) for diagonal in band(3, -1, -1, 3, 5)]
        [-3, 2]
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


def visible_keys(
    row_start: IntLike, row_stop: IntLike, first: IntLike, last: IntLike, lengths_kv: IntLike
) -> tuple[Int64Array, Int64Array]:
    """The smallest key range [start, stop) that holds every key some row of [row_start, row_stop) may see.

    Args:
        row_start: First query position (inside the sequence, >= 0).
        row_stop: End query position (exclusive).
        first: Lowest visible diagonal, from `band`.
        last: Highest visible diagonal, from `band`.
        lengths_kv: Real key lengths s2.

    Returns:
        (start, stop), int64; ``stop == start`` where no row sees a key.

    Example:
        >>> first, last = band(3, -1, -1, 4, 6)
        >>> [int(end) for end in visible_keys(0, 2, first, last, 6)]
        [0, 4]
    """
    begin = np.asarray(row_start, dtype=np.int64)
    end = np.asarray(row_stop, dtype=np.int64)
    start = np.clip(begin + first, 0, lengths_kv)
    stop = np.clip(end + last, 0, lengths_kv)
    return start, np.where(end > begin, np.maximum(start, stop), start)


def visible_rows(
    key_start: IntLike, key_stop: IntLike, first: IntLike, last: IntLike, lengths_q: IntLike
) -> tuple[Int64Array, Int64Array]:
    """The smallest query range [start, stop) that holds every row seeing some key of [key_start, key_stop).

    The mirror image of `visible_keys`: row i sees key j if ``j - last <= i <= j - first``.

    Args:
        key_start: First key position (inside the sequence, >= 0).
        key_stop: End key position (exclusive).
        first: Lowest visible diagonal, from `band`.
        last: Highest visible diagonal, from `band`.
        lengths_q: Real query lengths s1.

    Returns:
        (start, stop), int64; ``stop == start`` where no row sees one of the keys.

    Example:
        >>> first, last = band(3, -1, -1, 4, 6)
        >>> [int(end) for end in visible_rows(4, 6, first, last, 4)]
        [2, 4]
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

    Args:
        diagonal: Highest diagonal that counts.
        row_start: First query position.
        row_stop: End query position (exclusive, >= row_start).
        key_start: First key position.
        key_stop: End key position (exclusive, >= key_start).

    Returns:
        Pair counts, int64, of the broadcast shape; exact for positions and diagonals within +-2**31.

    Example:
        >>> int(pairs_up_to(0, 0, 4, 0, 4))
        10
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

    Args:
        row_start: First query position (inside the sequence, >= 0).
        row_stop: End query position (exclusive, >= row_start).
        key_start: First key position (inside the sequence, >= 0).
        key_stop: End key position (exclusive, >= key_start).
        first: Lowest visible diagonal, from `band`.
        last: Highest visible diagonal, from `band`.

    Returns:
        Pair counts, int64, of the broadcast shape; exact for lengths below 2**31.

    Example:
        >>> first, last = band(3, -1, -1, 4, 4)
        >>> int(visible_area(0, 4, 0, 4, first, last))
        10
    """
    low = np.asarray(first, dtype=np.int64)
    high = np.asarray(last, dtype=np.int64)
    area = pairs_up_to(high, row_start, row_stop, key_start, key_stop)
    area = area - pairs_up_to(low - 1, row_start, row_stop, key_start, key_stop)
    return np.where(high >= low, area, 0)
