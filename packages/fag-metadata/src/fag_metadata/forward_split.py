"""The forward task split, equal to CANN's word for word (steps F4 to F10 of the format page).

Cuts the base blocks of forward_blocks.py into sections that fit the L2 cache and gives every cube core of a
section one range of blocks. A cut is a number of blocks; forward_pack.py turns cuts into words. Loops run
over cores or sections, never over blocks, rows or heads.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from .forward_blocks import BlockSize, ForwardBlocks, Int64Array, select_block_size
from .forward_pack import BoolArray, Cuts, pack_forward
from .forward_rows import cut_rows, cut_rows_one_by_one, cut_rows_together
from .layout import ForwardSplit
from .ranges import IntLike

if TYPE_CHECKING:
    from .problem import AttentionProblem
    from .targets import Target

_L2_BUDGET_BYTES = 96 * 2**20  # CANN's number, whatever the target's real cache is
_MIN_MERGE_GAIN_BLOCKS = 10  # CANN merges partial results only if the worst core saves more than this
_FEW_SECTIONS = 6  # up to here one section at a time is faster than all of them core by core


def split_forward(problem: AttentionProblem, target: Target) -> ForwardSplit:
    """Returns the forward split that CANN's op makes for this problem and these core counts.

    Args:
        problem: What is computed.
        target: For whom; only its core counts matter here.

    Returns:
        The split; its blocks cover every valid block exactly once, in order.

    Example:
        >>> from fag_metadata import TARGETS, AttentionProblem
        >>> problem = AttentionProblem.from_metadata_args(
        ...     1, 1, 128, batch_size=1, max_seqlen_q=640, max_seqlen_kv=640, mask_mode=3
        ... )
        >>> split_forward(problem, TARGETS["Ascend950PR_9599"]).fa[0, :6, :6].tolist()[0]
        [0, 0, 0, 0, 1, 0]

    Note:
        max_seqlen bounds change this split (block size, core cap) as they do in CANN. What differs from CANN
        is in docs/metadata-differences.md.
    """
    ratio = target.vectors_per_cube
    size = cann_block_size(problem, ratio)
    blocks = ForwardBlocks(problem, size)
    num_cores = cap_cores(problem, size, target.cube_cores)
    ends = split_sections(blocks, problem.d, problem.dv, num_cores)
    cuts = cut_sections(blocks, ends, num_cores)
    return pack_forward(blocks, cuts, target.cube_cores, target.vector_cores, num_cores * ratio)


def cann_block_size(problem: AttentionProblem, ratio: int) -> BlockSize:
    """Rows and keys of a base block as CANN chooses them for this problem (step F1)."""
    return select_block_size(
        g=problem.g,
        dv=problem.dv,
        mask_mode=problem.mask_mode,
        win_left=problem.win_left,
        win_right=problem.win_right,
        bound_q=problem.given_s1,
        bound_kv=problem.given_s2,
        ratio=ratio,
    )


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
    one_by_one = blocks.num_entries == 1 or len(ends) <= _FEW_SECTIONS
    cut = cut_rows_one_by_one if one_by_one else cut_rows_together
    done, stays, count = cut(blocks, heads, start, stop, used, num_cores)
    core = np.arange(num_cores)
    is_used = core < count[:, None]
    worst = np.where(is_used, np.diff(done, axis=1, prepend=start[:, None]), 0).max(axis=1)
    gains = (worst > 3) & (worst - _MIN_MERGE_GAIN_BLOCKS > -(-total // np.maximum(used, 1)))
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
    cuts, stuck, worst = cut_rows(blocks, 0, 0, total, used)
    # With merging the worst core always gets the mean rounded up.
    if worst > 3 and worst - _MIN_MERGE_GAIN_BLOCKS > -(-total // used):
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

    Args:
        total: Blocks of the section, or int64 (sections, 1).
        used: Cores with work, of the same shape.
        to_come: Cores that have not had their turn: used, used - 1, ..., 0.
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
