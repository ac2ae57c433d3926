"""The balanced forward split: ranges whose heaviest core has as little visible area as possible.

Cuts are between row blocks where that is even enough, else inside them. Ascend targets get a second section
where one range a core is uneven. For target "cpu" row blocks are cut only where the online softmax starts
afresh anyway, at multiples of FWD_UNIT_KEYS keys, so that the split never changes a bit of the result.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .areas import AreaCuts, ForwardAreas, area_of_rows
from .forward_blocks import BlockSize, ForwardBlocks
from .forward_pack import Cuts, pack_forward
from .forward_split import cann_block_size, split_forward
from .layout import FWD_STEP_KEYS, FWD_UNIT_KEYS, ROW_WORDS, ForwardSplit, cube_slots, new_tensor
from .problem import AttentionProblem
from .ranges import Int64Array, can_cut_equal_rows, cut_equal_rows, even_cuts, min_max_cuts
from .terms import CPU_TARGET, MaskMode, Target

Float64Array = npt.NDArray[np.float64]

_GOOD_ENOUGH = 1.02  # max/mean up to which nothing better is searched for
_MAX_LOSS = 1.02  # whole row blocks may be heavier than cut ones by this factor: merging costs about as much,
_MAX_LOADED = 1.04  # if their max/mean is at most this
_UNEVEN = 1.05  # max/mean above which two sections are tried
_MIN_SECTION_GAIN = 0.99  # a second section must lower the heaviest core to this part of it
_CPU_GOOD_ENOUGH = 1.1  # threads pull the ranges of the CPU's cores and even out the rest
_CPU_MIN_GAIN = 0.9  # there, cut row blocks must lower the heaviest core to this part of it
_CPU_BLOCK_ROWS = (128, 64, 32)
_MOST_EQUAL_ROWS = 1 << 14  # row blocks of equal heads up to which one head stands for all
_FLAT_ITEMS = 1 << 15  # up to here one running sum is faster than finding each cut in stages
_SEARCH_ITEMS = 1 << 18  # up to here the exact search is made; beyond, a piece is a small part of a share
_MOST_BLOCKS = 1 << 15  # the same for two sections
_HEADS_TRIED = 4  # cuts between the sections, on either side of the middle
_REACH = 12  # places of the first section on either side of the wanted one
_PAIRS = 40  # pairs of places kept for every core


def split_forward_balanced(problem: AttentionProblem, target: Target) -> ForwardSplit:
    """Splits the forward's base blocks over the cores by visible area.

    For Ascend targets the heaviest core is never heavier than in CANN's split of the same blocks.
    """
    if target.name == CPU_TARGET:
        return _split_for_cpu(problem, target)
    blocks = ForwardBlocks(problem, cann_block_size(problem, target.vectors_per_cube))
    areas = ForwardAreas(blocks)
    if not areas.total:
        return _pack(blocks, np.zeros(1, np.int64), target)
    cores = target.cube_cores
    cut = _cuts(areas, cores)
    cann = split_forward(problem, target)
    limit = int(core_areas(areas, cann).max())
    if cut.heaviest * cores > _UNEVEN * areas.total:
        two = _cut_two_sections(areas, cores)
        if two is not None and two.heaviest <= min(limit, _MIN_SECTION_GAIN * cut.heaviest):
            return pack_forward(blocks, two.cuts, cores, target.vector_cores, target.vector_cores)
    if cut.heaviest > limit and _count_items(areas, 1) <= _SEARCH_ITEMS:
        cut = _search(areas.items(1), cores)
    # Still heavier only where CANN's sections let a core take several ranges, or by a fraction of a block.
    return _pack(blocks, cut.done, target) if cut.heaviest <= limit else cann


def core_areas(areas: ForwardAreas, split: ForwardSplit) -> Int64Array:
    """Visible pairs of every cube core of a split, over all its sections, int64 (cube_cores,)."""
    words = split.fa.astype(np.int64)
    start = areas.before(*np.moveaxis(words[..., 0:3], -1, 0))
    end = areas.before(*np.moveaxis(words[..., 3:6], -1, 0))
    is_used = words[..., 3:6].any(axis=-1)
    result: Int64Array = np.where(is_used, end - start, 0).sum(axis=0)
    return result


def _pack(blocks: ForwardBlocks, done: Int64Array, target: Target) -> ForwardSplit:
    """One section whose ranges begin, or end, behind these blocks, ascending from 0; those without blocks are
    left out.
    """
    done = np.append(done[1:], blocks.num_blocks)
    is_new = np.append(done[:-1] < done[1:], True)
    is_new[:-1] &= done[:-1] > 0
    done = done[is_new]
    cuts = Cuts(np.array([blocks.num_heads]), np.array([len(done)]), done, None)
    return pack_forward(blocks, cuts, target.cube_cores, target.vector_cores, target.vector_cores)


def _cuts(areas: ForwardAreas, cores: int) -> AreaCuts:
    """Whole row blocks if they are even enough, else cuts at any block."""
    whole = _find(areas, cores, None, _GOOD_ENOUGH)
    if whole.heaviest * cores <= _GOOD_ENOUGH * areas.total:
        return whole
    parts = _find(areas, cores, 1, _GOOD_ENOUGH)
    allowed = min(_MAX_LOSS * parts.heaviest, _MAX_LOADED * areas.total / cores)
    return whole if whole.heaviest <= max(allowed, parts.heaviest) else parts


def _split_for_cpu(problem: AttentionProblem, target: Target) -> ForwardSplit:
    """Tall row blocks read keys least often; lower ones are taken where tall ones load the cores unevenly."""
    cores = target.cube_cores
    tallest = ForwardBlocks(problem, BlockSize(_CPU_BLOCK_ROWS[0], FWD_STEP_KEYS))
    if tallest.num_entries == 1:
        split = _split_equal_heads(problem, tallest, target)
        if split is not None:
            return split
    best: tuple[ForwardAreas, AreaCuts] | None = None
    for height in _CPU_BLOCK_ROWS:
        areas = ForwardAreas(ForwardBlocks(problem, BlockSize(height, FWD_STEP_KEYS)))
        if not areas.total:
            return _pack(areas.blocks, np.zeros(1, np.int64), target)
        cut = _find(areas, cores, None, _CPU_GOOD_ENOUGH)
        if best is None or cut.heaviest < best[1].heaviest:
            best = areas, cut
        if cut.heaviest * cores <= _CPU_GOOD_ENOUGH * areas.total:
            return _pack(areas.blocks, cut.done, target)
    assert best is not None
    areas, cut = best
    parts = _find(areas, cores, FWD_UNIT_KEYS // FWD_STEP_KEYS, _CPU_GOOD_ENOUGH)
    cut = parts if parts.heaviest <= _CPU_MIN_GAIN * cut.heaviest else cut
    return _pack(areas.blocks, cut.done, target)


def _split_equal_heads(
    problem: AttentionProblem, tallest: ForwardBlocks, target: Target
) -> ForwardSplit | None:
    """The same where one head stands for all. None if row blocks must be cut, or if heads are very long."""
    assert tallest.equal_lengths is not None
    s1, s2 = tallest.equal_lengths
    heads, cores = tallest.num_heads, target.cube_cores
    rows, lowest = s1 * tallest.g, _CPU_BLOCK_ROWS[-1]
    if heads * (rows // lowest + 1) > _MOST_EQUAL_ROWS:
        return None
    places = np.arange(0, rows + lowest, lowest)
    places[-1] = rows
    area = area_of_rows(tallest, places).tolist()
    if not area[-1] * heads:
        return _pack(tallest, np.zeros(1, np.int64), target)
    sums = {height: [*area[: -1 : height // lowest], area[-1]] for height in _CPU_BLOCK_ROWS}

    def tallest_within(most: int) -> int:
        fitting = (h for h in _CPU_BLOCK_ROWS[:-1] if can_cut_equal_rows(sums[h], heads, cores, most))
        return next(fitting, lowest)

    good_enough = int(_CPU_GOOD_ENOUGH * area[-1] * heads / cores)
    height = tallest_within(good_enough)
    cut = cut_equal_rows(sums[height], heads, cores)
    if cut.heaviest > good_enough:
        if s2 > FWD_UNIT_KEYS:
            return None
        height = tallest_within(cut.heaviest)
        cut = cut if height == lowest else cut_equal_rows(sums[height], heads, cores)
    size = BlockSize(height, FWD_STEP_KEYS)
    begin = np.array(cut.begin)
    head = begin // (len(sums[height]) - 1)
    row = begin - head * (len(sums[height]) - 1)
    head = np.arange(0, heads, cut.rows)[:, None] + head
    if problem.mask_mode is MaskMode.NO_MASK or (problem.mask_mode is MaskMode.CAUSAL and s1 <= s2):
        return _pack_rows(size, heads, head, row, target)
    blocks = ForwardBlocks(problem, size)
    return _pack(blocks, (head * blocks.head_blocks[0] + blocks.all_rows().before[row]).ravel(), target)


def _pack_rows(
    size: BlockSize, heads: int, head: Int64Array, row: Int64Array, target: Target
) -> ForwardSplit:
    """`_pack` of ranges from these heads (periods, n) and row blocks (n,) on, if every row sees key 0."""
    tensor, fa, fd = new_tensor(1, target.cube_cores, target.vector_cores, cube_slots(target.cube_cores))
    ranges = fa[0, : head.size]
    begin = ranges.reshape(*head.shape, ROW_WORDS)
    begin[..., 0], begin[..., 1] = head, row
    ranges[:-1, 3:5] = ranges[1:, 0:2]
    ranges[-1, 3] = heads
    return ForwardSplit(1, False, size.rows, size.keys, fa, fd, tensor)


def _find(areas: ForwardAreas, cores: int, step: int | None, good_enough: float) -> AreaCuts:
    """Cuts nearest to equal areas, or searched for where those are not good enough (max/mean)."""
    cut = _nearest(areas, cores, step)
    if cut.heaviest * cores <= good_enough * areas.total or _count_items(areas, step) > _SEARCH_ITEMS:
        return cut
    return _search(areas.items(step), cores)


def _nearest(areas: ForwardAreas, cores: int, step: int | None) -> AreaCuts:
    if _count_items(areas, step) > _FLAT_ITEMS:
        return areas.nearest(np.arange(cores) * areas.total // cores, step)
    return _at(areas.items(step), even_cuts(areas.items(step).area, cores))


def _search(items: AreaCuts, cores: int) -> AreaCuts:
    return _at(items, min_max_cuts(items.area, cores))


def _at(items: AreaCuts, where: Int64Array) -> AreaCuts:
    return AreaCuts(items.done[where], items.area[where])


def _count_items(areas: ForwardAreas, step: int | None) -> int:
    blocks = areas.blocks
    if step is not None:
        return blocks.num_blocks // step
    num_rows = -(-blocks.lengths_q * blocks.g // blocks.size.rows)
    return int(num_rows.sum()) * blocks.heads_per_entry


class _TwoSections(NamedTuple):
    """Cuts of two sections and the visible pairs of the heaviest core."""

    cuts: Cuts
    heaviest: int


def _cut_two_sections(areas: ForwardAreas, cores: int) -> _TwoSections | None:
    """Two ranges a core, one in either section: only their sum must be right, and of the places near the
    wanted ones there are many pairs. None if there are too few heads or too many blocks to try.
    """
    blocks = areas.blocks
    if blocks.num_heads < 2 or blocks.num_blocks > _MOST_BLOCKS or cores < 2:
        return None
    items = areas.items(1)
    middle = _head_at(areas, items.area[-1] // 2)
    heads = np.unique(
        np.clip(np.arange(middle - _HEADS_TRIED, middle + _HEADS_TRIED + 1), 1, blocks.num_heads - 1)
    )
    best: _TwoSections | None = None
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


def _cut_at(areas: ForwardAreas, items: AreaCuts, head: int, cores: int) -> _TwoSections | None:
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
    return _TwoSections(cuts, heaviest)


def _pairs(
    first: Int64Array, second: Int64Array, wanted: Float64Array, part: float
) -> tuple[Int64Array, Int64Array]:
    """Pairs of places whose areas together are nearest to the wanted ones, (cuts, pairs) each."""
    near = first.searchsorted(wanted * part)[:, None] + np.arange(-_REACH, _REACH)
    near = np.clip(near, 1, len(first) - 2)
    partner = second.searchsorted(wanted[:, None] - first[near])
    x = np.concatenate((near, near), axis=1)
    y = np.clip(np.concatenate((partner, partner - 1), axis=1), 1, len(second) - 2)
    order = abs(first[x] + second[y] - wanted[:, None]).argsort(axis=1, kind="stable")[:, :_PAIRS]
    return np.take_along_axis(x, order, 1), np.take_along_axis(y, order, 1)


def _chain(x: Int64Array, y: Int64Array, area: Int64Array, total: int) -> tuple[Int64Array, int] | None:
    """One pair for every cut so that the heaviest core is lightest and no range is empty, and its area."""
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
