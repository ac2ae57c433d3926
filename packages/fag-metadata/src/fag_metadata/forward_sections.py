"""Two ranges a core instead of one, where one contiguous range a core is uneven.

Blocks are few and large, so that the place where a core should stop is seldom between two of them. With two
sections a core does one range of each, and only the sum of the two must be right: of the places near the
wanted ones there are many pairs, and the best pair is nearly always a small fraction of a block off.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .forward_areas import ForwardAreas, Items
from .forward_blocks import Int64Array
from .forward_pack import Cuts

Float64Array = npt.NDArray[np.float64]

_MOST_BLOCKS = 1 << 15
"""With more blocks one of them is a small part of a core's share."""
_HEADS_TRIED = 4
"""Places tried for the cut between the sections, on either side of the middle."""
_REACH = 12
"""Places of the first section tried on either side of the wanted one."""
_GOOD_ENOUGH = 1.02
"""Max/mean at which the search ends."""
_PAIRS = 40
"""Pairs of places kept for every core, those with the best sums."""


class TwoSections(NamedTuple):
    """Cuts of two sections and the visible pairs of the heaviest core."""

    cuts: Cuts
    heaviest: int


def cut_two_sections(areas: ForwardAreas, cores: int) -> TwoSections | None:
    """Cuts the blocks into two sections whose ranges together are as even as can be found.

    Args:
        areas: Blocks with at least one visible pair.
        cores: Cores, each with one range in either section.

    Returns:
        The cuts, or None if there are too few heads or too many blocks to try.
    """
    blocks = areas.blocks
    if blocks.num_heads < 2 or blocks.num_blocks > _MOST_BLOCKS or cores < 2:
        return None
    items = areas.items(1)
    middle = _head_at(areas, items.area[-1] // 2)
    heads = np.unique(
        np.clip(np.arange(middle - _HEADS_TRIED, middle + _HEADS_TRIED + 1), 1, blocks.num_heads - 1)
    )
    best: TwoSections | None = None
    for head in heads.tolist():
        found = _cut_at(areas, items, head, cores)
        if found is not None and (best is None or found.heaviest < best.heaviest):
            best = found
            if best.heaviest * cores <= _GOOD_ENOUGH * areas.total:
                break
    return best


def _head_at(areas: ForwardAreas, area: int) -> int:
    """The head that holds that visible pair."""
    entry = int(areas.area_before.searchsorted(area, "right")) - 1
    inside = (area - int(areas.area_before[entry])) // int(areas.head_area[entry])
    return entry * areas.blocks.heads_per_entry + inside


def _cut_at(areas: ForwardAreas, items: Items, head: int, cores: int) -> TwoSections | None:
    """The best cuts with the second section beginning at `head`."""
    blocks = areas.blocks
    between = int(blocks.before_head(np.array([head]))[0])
    place = int(items.done.searchsorted(between))
    first, second = items.area[: place + 1], items.area[place:] - items.area[place]
    if min(len(first), len(second)) <= cores:
        return None
    total = int(items.area[-1])
    wanted = np.arange(1, cores, dtype=np.float64) * total / cores
    x, y = _pairs(first, second, wanted, int(first[-1]) / total)
    found = _chain(x, y, first[x] + second[y], total)
    if found is None:
        return None
    choice, heaviest = found
    which = np.arange(cores - 1)
    done_first = np.append(items.done[x[which, choice]], between)
    done_second = np.append(items.done[place + y[which, choice]], blocks.num_blocks)
    done = np.concatenate((done_first, done_second))
    cuts = Cuts(np.array([head, blocks.num_heads]), np.array([cores, cores]), done, None)
    return TwoSections(cuts, heaviest)


def _pairs(
    first: Int64Array, second: Int64Array, wanted: Float64Array, part: float
) -> tuple[Int64Array, Int64Array]:
    """The pairs of places whose areas together are nearest to the wanted ones, (cuts, pairs) each.

    Each is a place of the first section near its part of the wanted area, and one of the two best partners in
    the second section.
    """
    near = first.searchsorted(wanted * part)[:, None] + np.arange(-_REACH, _REACH)
    near = np.clip(near, 1, len(first) - 2)
    partner = second.searchsorted(wanted[:, None] - first[near])
    x = np.concatenate((near, near), axis=1)
    y = np.clip(np.concatenate((partner, partner - 1), axis=1), 1, len(second) - 2)
    order = abs(first[x] + second[y] - wanted[:, None]).argsort(axis=1, kind="stable")[:, :_PAIRS]
    return np.take_along_axis(x, order, 1), np.take_along_axis(y, order, 1)


def _chain(x: Int64Array, y: Int64Array, area: Int64Array, total: int) -> tuple[Int64Array, int] | None:
    """Chooses one pair for every cut so that the heaviest core is lightest and no range is empty.

    Returns:
        The chosen pairs and the area of the heaviest core, or None if no choice keeps the order.
    """
    never = np.iinfo(np.int64).max
    heaviest = area[0].copy()
    came_from = np.zeros(x.shape, np.int64)
    for i in range(1, len(x)):
        load = np.maximum(heaviest[:, None], area[i] - area[i - 1][:, None])
        load[(x[i - 1][:, None] >= x[i]) | (y[i - 1][:, None] >= y[i])] = never
        came_from[i] = load.argmin(axis=0)
        heaviest = load.min(axis=0)
    heaviest = np.maximum(heaviest, total - area[-1])
    last = int(heaviest.argmin())
    result = int(heaviest[last])
    if result == never:
        return None
    choice = np.empty(len(x), np.int64)
    for i in range(len(x) - 1, -1, -1):
        choice[i] = last
        last = int(came_from[i, last])
    return choice, result
