"""How light the heaviest core can be at all: a lower bound for any assignment of whole tiles to cores.

Pure arithmetic on tile sizes. A split into ranges of tiles in order may have to stay above it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_FEW_SIZES = 3
_MOST_TILES = 1000
"""Tiles of a core up to which a sum of tiles is noticeably more than any number."""


def perfect_split_bound(sizes: Int64Array, counts: Int64Array, cores: int) -> int:
    """Returns a load that some core reaches however the tiles are dealt out, in whatever order.

    It is the largest of the mean rounded up (to a sum of tiles, where they have few sizes), the largest tile,
    and what counting proves. Counting asks for a load L: tiles above L - a need a core without any tile of
    size a or more, tiles above L / 2 one without each other, and a core holds at most L // a tiles of size a
    or more. If that needs more cores than there are, L is too small.

    Args:
        sizes: Sizes of the tiles, positive, int64 (n,); repetitions are allowed.
        counts: How many tiles of each size, int64 (n,).
        cores: Cores, at least 1.

    Returns:
        The bound, 0 without tiles.

    Example:
        >>> perfect_split_bound(np.array([3, 2]), np.array([2, 3]), 2)
        6
        >>> perfect_split_bound(np.array([10]), np.array([37]), 36)  # no sum between 10 and 20
        20
    """
    sizes, counts = sizes[counts > 0], counts[counts > 0]
    if not len(sizes):
        return 0
    sizes, inverse = np.unique(sizes, return_inverse=True)
    counts = np.bincount(inverse.reshape(-1), counts, len(sizes)).astype(np.int64)
    low = max(_next_sum(sizes, -(-int(sizes @ counts) // cores)), int(sizes[-1]))
    if _fits(sizes, counts, cores, low):
        return low
    high = 2 * low  # the largest tile and the mean together always fit
    while low < high:
        middle = (low + high) // 2
        if _fits(sizes, counts, cores, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(sizes: Int64Array, counts: Int64Array, cores: int, load: int) -> bool:
    """Whether counting leaves it open that the tiles fit into the cores with that load each."""
    small = sizes[: int(sizes.searchsorted(load // 2, "right"))]
    num_large = int(counts[len(small) :].sum())
    if num_large > cores:
        return False
    if not len(small):
        return True
    above = sizes.searchsorted(load - small, "right")  # first tile size that shares no core with a small one
    tiles = np.append(0, counts.cumsum())
    num_small = tiles[len(small)] - tiles[: len(small)]
    num_shared = tiles[above] - tiles[len(small)]
    # Beside a large tile that shares there are at most (load - size) // small ones, and size > load // 2.
    room = num_shared * ((load - load // 2 - 1) // small)
    needed = num_large - (-np.maximum(num_small - room, 0) // (load // small))
    return bool((needed <= cores).all())


def _next_sum(sizes: Int64Array, load: int) -> int:
    """The smallest sum of tiles that is at least `load`, if they have few sizes; else `load` itself."""
    if len(sizes) > _FEW_SIZES or load // int(sizes[0]) > _MOST_TILES:
        return load
    others = np.zeros(1, np.int64)
    for size in sizes[1:].tolist():
        others = np.unique((others[:, None] + np.arange(-(-load // size) + 1) * size).ravel())
    missing = np.maximum(load - others, 0)
    return int((others - (-missing // int(sizes[0])) * int(sizes[0])).min())
