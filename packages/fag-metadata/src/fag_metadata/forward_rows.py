"""Cutting whole rows off (step F7 of the format page without merging): the one part of CANN's split that must
go core by core, because what a core leaves decides what the next may take.

The greedy loops of the page (heads, then rows) are searches in running sums here. A block costs 3 and half a
block may be overrun: a core takes floor(left / cores + 1/3) blocks, but at least the row it stands at.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from .forward_blocks import ForwardBlocks, Int64Array
from .forward_pack import BoolArray


def cut_rows(
    blocks: ForwardBlocks, head: int, begin: int, stop: int, num_used: int
) -> tuple[list[int], list[int], int]:
    """Cuts one section.

    Args:
        blocks: Blocks of the problem.
        head: First head of the section.
        begin: Blocks in front of it.
        stop: Blocks up to the section's end, > begin.
        num_used: Cores that may be used.

    Returns:
        Blocks of the problem done at the end of every used core; the cores that stay in front of a head whose
        first row block has no blocks (that one has no tolerance); blocks of the worst core.
    """
    is_uniform = blocks.num_entries == 1
    per, before_entry, head_blocks = blocks.heads_per_entry, blocks.blocks_before, blocks.head_blocks
    entry = 0 if is_uniform else head // per
    each = int(head_blocks[entry])
    rows = blocks.rows_before(entry)
    width = rows[1] if len(rows) > 1 else 0
    head_begin = begin if each else -1  # a head without blocks is left at once
    cuts: list[int] = []
    stays: list[int] = []
    done = begin
    worst = 0
    for cores in range(num_used, 0, -1):
        limit = 3 * (stop - done) // cores
        if limit < 3 * width:
            limit = 3 * width
        reach = done + (limit + 1) // 3
        if reach >= stop:
            cuts.append(stop)
            worst = max(worst, stop - done)
            break
        if is_uniform:
            inside = reach % each
        else:
            found = bisect_right(before_entry, reach) - 1
            if found != entry:
                entry, each, rows = found, int(head_blocks[found]), blocks.rows_before(found)
            inside = (reach - int(before_entry[entry])) % each
        if head_begin != reach - inside:
            head_begin = reach - inside
            width = rows[1]
        if not width and 3 * (head_begin - done) > limit:
            stays.append(len(cuts))
            end = head_begin
        else:
            row = bisect_right(rows, inside)
            behind = rows[row - 1]
            width = rows[row] - behind
            end = head_begin + behind
        if end - done > worst:
            worst = end - done
        done = end
        cuts.append(done)
    return cuts, stays, worst


def cut_rows_one_by_one(
    blocks: ForwardBlocks,
    heads: Int64Array,
    start: Int64Array,
    stop: Int64Array,
    used: Int64Array,
    num_cores: int,
) -> tuple[Int64Array, BoolArray, Int64Array]:
    """Cuts several sections, one after the other.

    Args:
        blocks: Blocks of the problem.
        heads: First heads of the sections, int64 (sections,).
        start: Blocks in front of them.
        stop: Blocks up to their ends.
        used: Cores that may be used; 0 where a section has no blocks.
        num_cores: Columns of the result.

    Returns:
        As from cut_rows, as arrays (sections, num_cores), and the number of used cores of every section.
    """
    done = np.zeros((len(start), num_cores), np.int64)
    stays = np.zeros(done.shape, np.bool_)
    count = np.ones_like(start)
    done[:, 0] = stop  # where a section has no blocks, one core steps over its heads
    known: dict[int, tuple[list[int], list[int], int]] = {}
    for idx in np.flatnonzero(used).tolist():
        begin, num_blocks = int(start[idx]), int(stop[idx] - start[idx])
        # With one entry, sections of as many heads are all alike.
        found = known.get(num_blocks) if blocks.num_entries == 1 else None
        if found is None:
            found = cut_rows(blocks, int(heads[idx]), begin, begin + num_blocks, int(used[idx]))
            if blocks.num_entries == 1:
                found = known[num_blocks] = ([cut - begin for cut in found[0]], found[1], 0)
        count[idx] = len(found[0])
        done[idx, : len(found[0])] = found[0]
        if blocks.num_entries == 1:
            done[idx, : len(found[0])] += begin
        stays[idx, found[1]] = True
    return done, stays, count


def cut_rows_together(
    blocks: ForwardBlocks,
    heads: Int64Array,
    start: Int64Array,
    stop: Int64Array,
    used: Int64Array,
    num_cores: int,
) -> tuple[Int64Array, BoolArray, Int64Array]:
    """The same for all sections at once, core by core: for the many sections of a long ragged batch."""
    cuts = np.zeros((len(start), num_cores), np.int64)
    stays = np.zeros(cuts.shape, np.bool_)
    count = np.zeros_like(start)
    rows = blocks.all_rows()
    row_width = np.diff(rows.before, append=rows.before[-1])
    entry = heads // blocks.heads_per_entry
    has_blocks = blocks.head_blocks[entry] > 0
    width = np.where(has_blocks, row_width[np.minimum(rows.begin[entry], len(row_width) - 1)], 0)
    head_begin = np.where(has_blocks, start, -1)
    done = start
    is_active = np.ones(len(start), np.bool_)
    for i in range(num_cores):
        limit = np.maximum(3 * (stop - done) // np.maximum(used - i, 1), 3 * width)
        reach = done + (limit + 1) // 3
        is_last = reach >= stop
        entry, _, inside = blocks.heads_at(np.minimum(reach, blocks.num_blocks - 1))
        here = reach - inside
        first_row = rows.begin[entry]
        width = np.where(here != head_begin, row_width[first_row], width)
        head_begin = here
        is_stuck = (width == 0) & (3 * (here - done) > limit) & ~is_last
        base = rows.before[first_row]
        row = rows.before.searchsorted(base + inside, "right") - 1
        done = np.where(is_last, stop, np.where(is_stuck, here, here + rows.before[row] - base))
        width = np.where(is_stuck, width, row_width[row])
        cuts[:, i] = done
        stays[:, i] = is_stuck
        count += is_active
        is_active &= ~is_last
        if not is_active.any():
            break
    return cuts, stays, count
