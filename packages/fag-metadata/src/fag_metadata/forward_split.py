"""The forward task split, equal to CANN's word for word (steps F4 to F10 of the format page).

Cuts the base blocks of forward_blocks.py into sections that fit the L2 cache and gives every cube core of a
section one range of blocks. A cut is a number of blocks; forward_pack.py turns cuts into words. The page's
greedy loops (heads, rows, blocks) are searches in running sums; loops run over cores or sections only.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

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
    q, kv = problem.given_s1, problem.given_s2
    q, kv = INT32_MAX if q == -1 else q, INT32_MAX if kv == -1 else kv
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

    The estimate keeps faults 13 and 14 of the format page for equality: it decides the use of the cache,
    never the result.
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
    per, num_entries = blocks.heads_per_entry, blocks.num_entries
    before_entry = [0, *np.add.accumulate(head_bytes * per).tolist()]  # lists are searched faster
    each_of: list[int] = head_bytes.tolist()
    ends = []
    done = 0
    while True:
        limit = done + _L2_BUDGET_BYTES  # the head that ends behind it does not fit any more
        entry = bisect_right(before_entry, limit) - 1
        if entry == num_entries:
            break
        before, each = before_entry[entry], each_of[entry]
        inside = (limit - before) // each
        begins_at = before + inside * each
        head = entry * per + inside
        if begins_at == done:  # it alone is larger than the budget: cut behind it
            head, begins_at = head + 1, begins_at + each
            if head == blocks.num_heads:
                break
        ends.append(head)
        done = begins_at
    return [*ends, blocks.num_heads]


class _Sections(NamedTuple):
    """Of every section: first head, blocks of the problem up to its end, its blocks, the cores that get some,
    and the blocks of a core from which on rows are cut and merged.
    """

    head: Int64Array
    stop: Int64Array
    total: Int64Array
    used: Int64Array
    heaviest: Int64Array


def cut_sections(blocks: ForwardBlocks, ends: list[int], num_cores: int) -> Cuts:
    """Cuts the blocks of every section, with merging where CANN would merge (steps F5, F7, F8)."""
    if len(ends) == 1:
        return _cut_one_section(blocks, ends, num_cores)
    section_ends = np.array(ends, np.int64)
    stop = blocks.before_head(section_ends)
    total = np.diff(stop, prepend=0)
    used = np.minimum(total, num_cores)
    heaviest = -(-total // np.maximum(used, 1)) + _MIN_MERGE_GAIN_BLOCKS
    sections = _Sections(np.append(0, section_ends[:-1]), stop, total, used, heaviest)
    is_many = len(ends) > _FEW_SECTIONS and blocks.num_entries > 1 and int(used.min()) == num_cores
    cut = _cut_rows_together if is_many else _cut_rows_one_by_one
    done, stays, count, is_heavy = cut(blocks, sections, num_cores)
    merged = is_heavy.nonzero()[0]
    if merged.size:
        count[merged] = used[merged]
        cores = used[merged, None]
        left = _left_with_merging(total[merged, None], cores, cores - np.arange(num_cores + 1))
        done[merged] = stop[merged, None] - left[:, 1:]
        stays[merged] = _stays_with_merging(left, cores) if blocks.has_empty_first_rows else False
    if int(count.min()) == num_cores:
        return Cuts(section_ends, count, done.ravel(), stays.ravel())
    is_used = np.arange(num_cores) < count[:, None]
    return Cuts(section_ends, count, done[is_used], stays[is_used])


def _cut_one_section(blocks: ForwardBlocks, ends: list[int], num_cores: int) -> Cuts:
    """The same for the common case, without the cost of one more dimension."""
    total = blocks.num_blocks
    used = min(num_cores, total)
    if not used:  # one core steps over all heads
        return Cuts(np.array(ends), np.ones(1, np.int64), np.zeros(1, np.int64), None)
    heaviest = -(-total // used) + _MIN_MERGE_GAIN_BLOCKS
    cuts, stuck, is_heavy = _cut_rows(blocks, 0, 0, total, used, heaviest)
    if is_heavy:
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

    A core takes floor(left / cores + 1/3) blocks, so the worst one gets the mean rounded up. With total =
    quotient * used + rest that leaves, for m cores to come, quotient * m + min(rest, max(rest - (used - m),
    (2 * m + 1) // 3)) blocks: no loop.
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
) -> tuple[list[int], list[int], bool]:
    """Cuts whole rows off one section (step F7 without merging), core by core, since one decides for the
    next.

    A core takes floor(left / cores + 1/3) blocks, but at least the row it stands at. Ends as soon as some
    core must get more than `heaviest` blocks, since the cuts are dropped then.

    Returns:
        Blocks of the problem done at the end of every used core; the cores that stay in front of a head whose
        first row block has no blocks (that one has no tolerance); whether it ended early.
    """
    before_entry, head_blocks = blocks.blocks_before, blocks.head_blocks
    is_uniform = blocks.num_entries == 1
    entry = head // blocks.heads_per_entry
    before, each = int(before_entry[entry]), int(head_blocks[entry])
    rows = blocks.rows_before(entry)
    width = rows[1] if each else 0  # a head without blocks is left at once
    cuts: list[int] = []
    stays: list[int] = []
    done = begin
    for cores in range(num_used, 0, -1):
        left = stop - done
        take = (3 * left + cores) // (3 * cores)
        if take < width:
            take = width
        if take > heaviest:  # this core or, if only the mean is too much, one of those behind
            return cuts, stays, True
        if take >= left:
            cuts.append(stop)
            break
        reach = done + take
        if not is_uniform:
            found = bisect_right(before_entry, reach) - 1
            if found != entry:
                entry, before = found, int(before_entry[found])
                each, rows = int(head_blocks[found]), blocks.rows_before(found)
        inside = (reach - before) % each
        row = bisect_right(rows, inside)
        behind = rows[row - 1]
        if not rows[1] and 3 * (take - inside) > max(3 * left // cores, 3 * width):
            stays.append(len(cuts))
            behind = width = 0
        else:
            width = rows[row] - behind
        done = reach - inside + behind
        cuts.append(done)
    return cuts, stays, False


def _cut_rows_one_by_one(
    blocks: ForwardBlocks, sections: _Sections, num_cores: int
) -> tuple[Int64Array, BoolArray, Int64Array, BoolArray]:
    """The same for several sections: done and stays, (sections, num_cores) each, the used cores of each, and
    whether one is heavier than allowed: then the others mean nothing.
    """
    heads, stop, total, used, heaviest = sections
    done = np.zeros((len(stop), num_cores), np.int64)
    stays = np.zeros(done.shape, np.bool_)
    count = np.ones_like(stop)
    is_heavy = np.zeros(len(stop), np.bool_)
    done[:, 0] = stop  # where a section has no blocks, one core steps over its heads
    known: dict[int, tuple[list[int], list[int], bool]] = {}
    for idx in used.nonzero()[0].tolist():
        num_blocks, end = int(total[idx]), int(stop[idx])
        begin = end - num_blocks
        # With one entry, sections of as many heads are all alike.
        found = known.get(num_blocks) if blocks.num_entries == 1 else None
        if found is None:
            found = _cut_rows(blocks, int(heads[idx]), begin, end, int(used[idx]), int(heaviest[idx]))
            if blocks.num_entries == 1:
                found = known[num_blocks] = ([cut - begin for cut in found[0]], found[1], found[2])
        cuts, stuck, is_heavy[idx] = found
        count[idx] = len(cuts)
        done[idx, : len(cuts)] = cuts
        if blocks.num_entries == 1:
            done[idx, : len(cuts)] += begin
        stays[idx, stuck] = True
    return done, stays, count, is_heavy


def _cut_rows_together(
    blocks: ForwardBlocks, sections: _Sections, num_cores: int
) -> tuple[Int64Array, BoolArray, Int64Array, BoolArray]:
    """The same, all sections at once: for the many sections of a long ragged batch, all of which use all
    cores.
    """
    heads, stop, total, _, heaviest = sections
    rows = blocks.all_rows()
    row_width = np.diff(rows.before, append=rows.before[-1])  # with one of no blocks behind all
    # Of every entry, and of one behind all: blocks in front, in a head, and in rows of one head in front.
    before = blocks.blocks_before
    each = np.append(np.maximum(blocks.head_blocks, 1), 1)
    base = np.append(rows.before[rows.begin], rows.before[-1])
    first_width = row_width[np.append(rows.begin, -1)]
    may_stick = blocks.has_empty_first_rows
    done = np.empty((num_cores, len(stop)), np.int64)
    stays = np.zeros(done.shape, np.bool_)
    now = begin = stop - total
    entry = heads // blocks.heads_per_entry
    width = np.where(blocks.head_blocks[entry] > 0, first_width[entry], 0)
    for i in range(num_cores):
        cores = num_cores - i
        left = stop - now
        take = np.minimum(np.maximum((left + cores // 3) // cores, width), left)
        reach = now + take  # where the section ends this is where the next begins
        entry = before[1:].searchsorted(reach, "right")
        inside = (reach - before[entry]) % each[entry]
        place = inside + base[entry]
        row = rows.before[1:].searchsorted(place, "right")
        now = np.subtract(reach, place - rows.before[row], out=done[i])
        if may_stick:
            limit = np.maximum(3 * left // cores, 3 * width)
            stays[i] = (first_width[entry] == 0) & (3 * (take - inside) > limit) & (take < left)
            now[stays[i]] = (reach - inside)[stays[i]]
        width = row_width[row]
        if may_stick:
            width[stays[i]] = 0
    heavy = np.diff(done, axis=0, prepend=begin[None]).max(axis=0) > heaviest
    count = num_cores + 1 - (done == stop).sum(axis=0)
    return np.ascontiguousarray(done.T), np.ascontiguousarray(stays.T), count, heavy
