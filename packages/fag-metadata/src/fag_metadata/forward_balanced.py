"""The balanced forward split: ranges whose heaviest core has as little visible area as possible.

Cuts are between row blocks where that is even enough, else between the parts of row blocks, whose partial
results are then merged. Ascend targets may cut a row block at any key block, and get a second section where
one range a core is uneven (forward_sections.py). Target "cpu" has one section and cuts row blocks only where
the online softmax starts afresh anyway, at multiples of FWD_UNIT_KEYS keys, so that the split never changes a
bit of the result; its cuts depend on real lengths only, never on max_seqlen bounds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .forward_areas import ForwardAreas, Items
from .forward_blocks import BlockSize, ForwardBlocks, Int64Array
from .forward_pack import Cuts, pack_forward
from .forward_sections import cut_two_sections
from .forward_split import cann_block_size, split_forward
from .layout import FWD_STEP_KEYS, FWD_UNIT_KEYS, ForwardSplit
from .min_max import even_cuts, min_max_cuts
from .problem import AttentionProblem
from .targets import CPU_TARGET, Target

_GOOD_ENOUGH = 1.02
"""Max/mean up to which nearest cuts are taken without a search, and whole row blocks without parts."""
_MAX_LOSS = 1.02
"""Whole row blocks may be heavier than cut ones by this factor: merging costs about as much."""
_MAX_LOADED = 1.04
"""Max/mean up to which that is allowed."""
_UNEVEN = 1.05
"""Max/mean above which two sections are tried, whose ranges together may be more even than one range a core.
"""
_MIN_SECTION_GAIN = 0.99
"""A second section must lower the heaviest core to this part of it."""
_CPU_GOOD_ENOUGH = 1.1
"""The same as _GOOD_ENOUGH for the CPU, where threads pull the cores' ranges and even out the rest."""
_CPU_MIN_GAIN = 0.9
"""On the CPU cut row blocks must lower the heaviest core to this part of it."""
_CPU_BLOCK_ROWS = (128, 64, 32)
"""Row blocks of the CPU, tallest first."""
_FLAT_ITEMS = 1 << 15
"""Pieces up to which one running sum over all of them is faster than finding each cut in stages."""
_SEARCH_ITEMS = 1 << 18
"""Pieces up to which the exact search is made; beyond, one piece is a vanishing part of a core's share."""


class _Cut(NamedTuple):
    """Cuts between pieces: blocks and visible pairs in front of each, from 0 to all, int64."""

    done: Int64Array
    area: Int64Array

    @property
    def heaviest(self) -> int:
        """Visible pairs of the heaviest core."""
        return int((self.area[1:] - self.area[:-1]).max())


def split_forward_balanced(problem: AttentionProblem, target: Target) -> ForwardSplit:
    """Splits the forward's base blocks over the cores by visible area.

    For Ascend targets the heaviest core is never heavier than in CANN's split of the same blocks.

    Args:
        problem: What is computed.
        target: Machine; at most one range per cube core.

    Returns:
        The split; its blocks cover every valid block exactly once, in order.

    Example:
        >>> from fag_metadata import TARGETS, AttentionProblem
        >>> problem = AttentionProblem.from_metadata_args(
        ...     8, 8, 128, batch_size=2, max_seqlen_q=1000, max_seqlen_kv=1000, mask_mode="causal"
        ... )
        >>> split = split_forward_balanced(problem, TARGETS["Ascend950PR_9599"])
        >>> split.section_num, int((split.fa[0, :, 3:6].any(axis=1)).sum())
        (1, 36)
    """
    if target.name == CPU_TARGET:
        return _split_for_cpu(problem, target)
    blocks = ForwardBlocks(problem, cann_block_size(problem, target.vectors_per_cube))
    areas = ForwardAreas(blocks)
    if not areas.total:
        return _pack(blocks, None, target)
    cores = target.cube_cores
    cut = _cuts(areas, cores)
    if cut.heaviest * cores > _UNEVEN * areas.total:
        two = cut_two_sections(areas, cores)
        if two is not None and two.heaviest < _MIN_SECTION_GAIN * cut.heaviest:
            return pack_forward(blocks, two.cuts, cores, target.vector_cores, target.vector_cores)
    cann = split_forward(problem, target)
    limit = heaviest_core(areas, cann)
    if cut.heaviest > limit and _count_items(areas, 1) <= _SEARCH_ITEMS:
        cut = _search(areas.items(1), cores)
    # Still heavier only where CANN's sections let a core take several ranges, or by a fraction of a block.
    return _pack(blocks, cut, target) if cut.heaviest <= limit else cann


def heaviest_core(areas: ForwardAreas, split: ForwardSplit) -> int:
    """Visible pairs of the heaviest core of a split, over all its sections."""
    return int(core_areas(areas, split).max(initial=0))


def core_areas(areas: ForwardAreas, split: ForwardSplit) -> Int64Array:
    """Visible pairs of every cube core of a split, over all its sections, int64 (cube_cores,)."""
    words = split.fa.astype(np.int64)
    start = areas.before(*np.moveaxis(words[..., 0:3], -1, 0))
    end = areas.before(*np.moveaxis(words[..., 3:6], -1, 0))
    is_used = words[..., 3:6].any(axis=-1)
    result: Int64Array = np.where(is_used, end - start, 0).sum(axis=0)
    return result


def _pack(blocks: ForwardBlocks, cut: _Cut | None, target: Target) -> ForwardSplit:
    done = np.array([blocks.num_blocks]) if cut is None else np.unique(cut.done)[1:]
    cuts = Cuts(np.array([blocks.num_heads]), np.array([len(done)]), done, None)
    return pack_forward(blocks, cuts, target.cube_cores, target.vector_cores, target.vector_cores)


def _cuts(areas: ForwardAreas, cores: int) -> _Cut:
    """Whole row blocks if they are even enough, else cuts at any block."""
    whole = _find(areas, cores, None, _GOOD_ENOUGH)
    if whole.heaviest * cores <= _GOOD_ENOUGH * areas.total:
        return whole
    parts = _find(areas, cores, 1, _GOOD_ENOUGH)
    allowed = min(_MAX_LOSS * parts.heaviest, _MAX_LOADED * areas.total / cores)
    return whole if whole.heaviest <= max(allowed, parts.heaviest) else parts


def _split_for_cpu(problem: AttentionProblem, target: Target) -> ForwardSplit:
    """Tall row blocks read keys least often; lower ones are taken where tall ones load the cores unevenly."""
    best: tuple[int, ForwardAreas, _Cut] | None = None
    cores = target.cube_cores
    for height in _CPU_BLOCK_ROWS:
        areas = ForwardAreas(ForwardBlocks(problem, BlockSize(height, FWD_STEP_KEYS)))
        if not areas.total:
            return _pack(areas.blocks, None, target)
        whole = _find(areas, cores, None, _CPU_GOOD_ENOUGH)
        if best is None or whole.heaviest < best[0]:
            best = whole.heaviest, areas, whole
        if whole.heaviest * cores <= _CPU_GOOD_ENOUGH * areas.total:
            break
    else:
        assert best is not None
        parts = _find(best[1], cores, FWD_UNIT_KEYS // FWD_STEP_KEYS, _CPU_GOOD_ENOUGH)
        if parts.heaviest <= _CPU_MIN_GAIN * best[0]:
            best = parts.heaviest, best[1], parts
    return _pack(best[1].blocks, best[2], target)


def _find(areas: ForwardAreas, cores: int, step: int | None, good_enough: float) -> _Cut:
    """Cuts nearest to equal areas, or searched for where those are not good enough (max/mean)."""
    num_items = _count_items(areas, step)
    if num_items > _FLAT_ITEMS:
        cut = _Cut(*areas.nearest(np.arange(cores) * areas.total // cores, step))
    else:
        cut = _at(areas.items(step), even_cuts(areas.items(step).area, cores))
    if cut.heaviest * cores <= good_enough * areas.total or num_items > _SEARCH_ITEMS:
        return cut
    return _search(areas.items(step), cores)


def _search(items: Items, cores: int) -> _Cut:
    return _at(items, min_max_cuts(items.area, cores))


def _at(items: Items, where: Int64Array) -> _Cut:
    return _Cut(items.done[where], items.area[where])


def _count_items(areas: ForwardAreas, step: int | None) -> int:
    blocks = areas.blocks
    if step is not None:
        return blocks.num_blocks // step
    num_rows = -(-blocks.lengths_q * blocks.g // blocks.size.rows)
    return int(num_rows.sum()) * blocks.heads_per_entry
