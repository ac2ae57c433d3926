"""The forward task split, equal to CANN's word for word (steps F4 to F10 of the format page).

Cuts the base blocks of forward_blocks.py into sections that fit the L2 cache and gives every cube core of a
section one range of blocks. A cut is a number of blocks; forward_pack.py turns cuts into words. The page's
greedy loops (heads, rows, blocks) are searches in running sums; loops run over cores or sections only.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from .forward_blocks import BlockSize, ForwardBlocks, Int64Array
from .forward_pack import BoolArray, Cuts, pack_forward
from .layout import ForwardSplit
from .ranges import IntLike
from .terms import INT32_MAX, MaskMode

if TYPE_CHECKING:
    from .problem import AttentionProblem
    from .targets import Target

_OPEN_WINDOW = 2**32 - 1  # CANN keeps windows unsigned: its -1 is this number
_L2_BUDGET_BYTES = 96 * 2**20  # CANN's number, whatever the target's real cache is
_MIN_MERGE_GAIN_BLOCKS = 10  # CANN merges partial results only if the worst core saves more than this
_FEW_SECTIONS = 6  # up to here one section at a time is faster than all of them core by core


def split_forward(problem: AttentionProblem, target: Target) -> ForwardSplit:
    """Returns the forward split that CANN's op makes for this problem and these core counts.

    Its blocks cover every valid block exactly once, in order. max_seqlen bounds change it (block size, core
    cap) as they do in CANN.
    """
    ratio = target.vectors_per_cube
    size = cann_block_size(problem, ratio)
    blocks = ForwardBlocks(problem, size)
    num_cores = cap_cores(problem, size, target.cube_cores)
    ends = split_sections(blocks, problem.d, problem.dv, num_cores)
    cuts = cut_sections(blocks, ends, num_cores)
    return pack_forward(blocks, cuts, target.cube_cores, target.vector_cores, num_cores * ratio)


def cann_block_size(problem: AttentionProblem, ratio: int) -> BlockSize:
    """Rows and keys of a base block as CANN chooses them (step F1), for `ratio` vector cores per cube core.

    Bounds count here, never real lengths.
    """
    q = INT32_MAX if problem.given_s1 == -1 else problem.given_s1
    kv = INT32_MAX if problem.given_s2 == -1 else problem.given_s2
    left = _OPEN_WINDOW if problem.win_left == -1 else problem.win_left
    right = _OPEN_WINDOW if problem.win_right == -1 else problem.win_right
    if problem.mask_mode == MaskMode.NO_MASK:
        left = 0
    elif problem.mask_mode == MaskMode.SLIDING_WINDOW:
        right = 0
    is_wide = problem.dv <= 128 and q <= 64 and kv > 128 and left + right > 128
    if is_wide or (problem.dv == 256 and problem.g * q < 64):
        return BlockSize(32 * ratio, 256)
    return BlockSize(64 * ratio, 128)


def cap_cores(problem: AttentionProblem, size: BlockSize, cube_cores: int) -> int:
    """Cube cores that may get work (step F2): few blocks use few cores."""
    s1, s2, g = problem.given_s1, problem.given_s2, problem.g
    if s1 <= 0 or s2 <= 0 or s1 > cube_cores * size.rows // g:
        return cube_cores
    return min(cube_cores, problem.b * problem.n2 * -(-s1 * g // size.rows) * -(-s2 // size.keys))


def split_sections(blocks: ForwardBlocks, d: int, dv: int, num_cores: int) -> list[int]:
    """Ends of the sections as head numbers (step F4): as many heads as fit the cache, estimated as CANN does.

    The estimate counts q and the output of one query head only, whatever g is, and D for the output (fault 13
    of the format page), and a window of the diagonal alone as empty (fault 14). It decides the use of the
    cache, never the result, and stays as it is for equality.
    """
    one = [blocks.num_heads]
    if not blocks.num_blocks:
        return one
    (longest_q, total_q), (longest_kv, total_kv) = blocks.longest_and_total
    largest_kept = _L2_BUDGET_BYTES // num_cores
    if (
        longest_q * blocks.g <= blocks.size.rows
        or 4 * longest_q * d + 2 * longest_kv * (d + dv) <= largest_kept
        or (4 * total_q * d + 2 * total_kv * (d + dv)) * blocks.heads_per_entry <= _L2_BUDGET_BYTES
    ):
        return one  # a mask can only make the estimate smaller
    s1, s2 = blocks.lengths_q, blocks.lengths_kv
    first, last = blocks.first_diagonal, blocks.last_diagonal
    rows = np.minimum(s1, s2 - first) - np.maximum(0, -last)
    keys = np.minimum(s2, s1 + last) - np.maximum(0, first)
    is_hidden = (last <= first) | (first >= s2) | (last <= -s1)
    head_bytes = np.where(is_hidden, 0, 4 * d * rows + 2 * (d + dv) * keys)
    if int(head_bytes.max()) <= largest_kept:
        return one
    return _cut_heads(blocks, head_bytes)


def _cut_heads(blocks: ForwardBlocks, head_bytes: Int64Array) -> list[int]:
    """Cuts in front of the head with which the bytes since the last cut pass the budget, if any."""
    per = blocks.heads_per_entry
    before = np.zeros(blocks.num_entries + 1, np.int64)
    np.cumsum(head_bytes * per, out=before[1:])
    ends = []
    done = 0
    while True:
        limit = done + _L2_BUDGET_BYTES  # the head that ends behind it does not fit any more
        entry = bisect_right(before, limit) - 1
        if entry == blocks.num_entries:
            break
        each = int(head_bytes[entry])
        inside = (limit - int(before[entry])) // each
        begins_at = int(before[entry]) + inside * each
        head = entry * per + inside
        if begins_at == done:  # it alone is larger than the budget: cut behind it
            head, begins_at = head + 1, begins_at + each
            if head == blocks.num_heads:
                break
        ends.append(head)
        done = begins_at
    return [*ends, blocks.num_heads]


def cut_sections(blocks: ForwardBlocks, ends: list[int], num_cores: int) -> Cuts:
    """Cuts the blocks of every section, with merging where CANN would merge (steps F5, F7, F8)."""
    if len(ends) == 1:
        return _cut_one_section(blocks, ends, num_cores)
    section_ends = np.array(ends, np.int64)
    stop = blocks.before_head(section_ends)
    start = np.zeros_like(stop)
    start[1:] = stop[:-1]
    total = stop - start
    used = np.minimum(total, num_cores)
    heads = np.zeros_like(stop)
    heads[1:] = section_ends[:-1]
    # With merging the worst core always gets the mean rounded up.
    heaviest = -(-total // np.maximum(used, 1)) + _MIN_MERGE_GAIN_BLOCKS
    one_by_one = blocks.num_entries == 1 or len(ends) <= _FEW_SECTIONS
    cut = _cut_rows_one_by_one if one_by_one else _cut_rows_together
    done, stays, count, gains = cut(blocks, heads, start, stop, used, heaviest, num_cores)
    core = np.arange(num_cores)
    is_used = core < count[:, None]
    merged = np.flatnonzero(gains)
    if merged.size:
        count[merged] = used[merged]
        is_used[merged] = core < used[merged, None]
        cores = used[merged, None]
        left = _left_with_merging(total[merged, None], cores, cores - np.arange(num_cores + 1))
        done[merged] = stop[merged, None] - left[:, 1:]
        stays[merged] = _stays_with_merging(left, cores)
    return Cuts(section_ends, count, done[is_used], stays[is_used])


def _cut_one_section(blocks: ForwardBlocks, ends: list[int], num_cores: int) -> Cuts:
    """The same for the common case, without the cost of one more dimension."""
    total = blocks.num_blocks
    used = min(num_cores, total)
    if not used:  # one core steps over all heads
        return Cuts(np.array(ends), np.ones(1, np.int64), np.zeros(1, np.int64), None)
    # With merging the worst core always gets the mean rounded up.
    heaviest = -(-total // used) + _MIN_MERGE_GAIN_BLOCKS
    cuts, stuck, worst = _cut_rows(blocks, 0, 0, total, used, heaviest)
    if worst > heaviest:
        left = _left_with_merging(total, used, np.arange(used, -1, -1))
        stays = _stays_with_merging(left, used) if blocks.has_empty_first_rows else None
        return Cuts(np.array(ends), np.array([used]), total - left[1:], stays)
    stays = None
    if stuck:
        stays = np.zeros(len(cuts), np.bool_)
        stays[stuck] = True
    return Cuts(np.array(ends), np.array([len(cuts)]), np.array(cuts), stays)


def _left_with_merging(total: IntLike, used: IntLike, to_come: Int64Array) -> Int64Array:
    """Blocks that are left before every core when rows may be cut between blocks (step F7 with merging).

    A core takes floor(left / cores + 1/3) blocks. With total = quotient * used + rest that leaves, for m
    cores to come, quotient * m + min(rest, max(rest - (used - m), (2 * m + 1) // 3)) blocks: no loop.
    """
    quotient = total // used
    rest = total - quotient * used
    left: Int64Array = quotient * to_come
    left += np.minimum(rest, np.maximum(to_come + (rest - used), (2 * to_come + 1) // 3))
    return left


def _stays_with_merging(left: Int64Array, used: IntLike) -> BoolArray:
    """Whether only the tolerance let a core come as far as it did: see Cuts.stays."""
    to_come = np.maximum(used - np.arange(left.shape[-1] - 1), 1)
    stays: BoolArray = 3 * left[..., :-1] // to_come % 3 == 2
    return stays


def _cut_rows(
    blocks: ForwardBlocks, head: int, begin: int, stop: int, num_used: int, heaviest: int
) -> tuple[list[int], list[int], int]:
    """Cuts whole rows off one section (step F7 without merging), core by core, since one decides for the
    next.

    A core takes floor(left / cores + 1/3) blocks, but at least the row it stands at. Ends with the first core
    that has more than `heaviest` blocks, since the cuts are dropped then.

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
            if worst > heaviest:
                break
        done = end
        cuts.append(done)
    return cuts, stays, worst


def _cut_rows_one_by_one(
    blocks: ForwardBlocks,
    heads: Int64Array,
    start: Int64Array,
    stop: Int64Array,
    used: Int64Array,
    heaviest: Int64Array,
    num_cores: int,
) -> tuple[Int64Array, BoolArray, Int64Array, BoolArray]:
    """The same for several sections: done and stays, (sections, num_cores) each, the used cores of each, and
    whether one has more than `heaviest` blocks: then the others mean nothing.
    """
    done = np.zeros((len(start), num_cores), np.int64)
    stays = np.zeros(done.shape, np.bool_)
    count = np.ones_like(start)
    is_heavy = np.zeros(len(start), np.bool_)
    done[:, 0] = stop  # where a section has no blocks, one core steps over its heads
    known: dict[int, tuple[list[int], list[int], int]] = {}
    for idx in np.flatnonzero(used).tolist():
        begin, num_blocks, limit = int(start[idx]), int(stop[idx] - start[idx]), int(heaviest[idx])
        # With one entry, sections of as many heads are all alike.
        found = known.get(num_blocks) if blocks.num_entries == 1 else None
        if found is None:
            found = _cut_rows(blocks, int(heads[idx]), begin, begin + num_blocks, int(used[idx]), limit)
            if blocks.num_entries == 1:
                found = known[num_blocks] = ([cut - begin for cut in found[0]], found[1], found[2])
        count[idx] = len(found[0])
        is_heavy[idx] = found[2] > limit
        done[idx, : len(found[0])] = found[0]
        if blocks.num_entries == 1:
            done[idx, : len(found[0])] += begin
        stays[idx, found[1]] = True
    return done, stays, count, is_heavy


def _cut_rows_together(
    blocks: ForwardBlocks,
    heads: Int64Array,
    start: Int64Array,
    stop: Int64Array,
    used: Int64Array,
    heaviest: Int64Array,
    num_cores: int,
) -> tuple[Int64Array, BoolArray, Int64Array, BoolArray]:
    """The same, all sections at once: for the many sections of a long ragged batch."""
    cuts = np.zeros((len(start), num_cores), np.int64)
    stays = np.zeros(cuts.shape, np.bool_)
    count = np.zeros_like(start)
    worst = np.zeros_like(start)
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
        end = np.where(is_last, stop, np.where(is_stuck, here, here + rows.before[row] - base))
        width = np.where(is_stuck, width, row_width[row])
        worst = np.maximum(worst, end - done)
        cuts[:, i] = done = end
        stays[:, i] = is_stuck
        count += is_active
        is_active &= ~is_last
        if not is_active.any():
            break
    return cuts, stays, count, worst > heaviest
