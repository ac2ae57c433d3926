"""The forward task split, equal to CANN's word for word (steps F4 to F10 of the format page).

Cuts the base blocks into sections that fit the L2 cache, and every section into a range for each cube core.
A cut is a number of blocks; forward_pack.py turns cuts into words. The page's greedy loops are searches in
running sums; loops run over cores or sections only.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .forward_blocks import BlockSize, ForwardBlocks
from .forward_pack import BoolArray, Cuts, pack_alike, pack_forward
from .layout import ForwardSplit
from .ranges import Int64Array, IntLike, band
from .terms import INT32_MAX, MaskMode

if TYPE_CHECKING:
    from .problem import AttentionProblem
    from .terms import Target

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
    rows = target.cube_cores, target.vector_cores, num_cores * ratio
    if blocks.num_entries > 1 and len(ends) > 1:
        return pack_forward(blocks, cut_sections(blocks, ends, num_cores), *rows)
    first = _cut_one_section(blocks, ends[0], num_cores)
    if len(ends) == 1:
        return pack_forward(blocks, first, *rows)
    # Sections of equal heads are all alike, but for what remains at the end.
    rest = ends[-1] - ends[-2]
    last = first if rest == ends[0] else _cut_one_section(blocks, rest, num_cores)
    return pack_alike(blocks, len(ends), first, last, *rows)


def cann_block_size(problem: AttentionProblem, ratio: int) -> BlockSize:
    """Rows and keys of a base block as CANN chooses them (step F1), for `ratio` vector cores per cube core.

    Bounds count here, never real lengths.
    """
    q, kv = problem.given_s1, problem.given_s2
    q, kv = INT32_MAX if q == -1 else q, INT32_MAX if kv == -1 else kv
    left = _OPEN_WINDOW if problem.win_left == -1 else problem.win_left
    right = _OPEN_WINDOW if problem.win_right == -1 else problem.win_right
    if problem.mask_mode is MaskMode.NO_MASK:
        left = 0
    elif problem.mask_mode is MaskMode.SLIDING_WINDOW:
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
    if blocks.num_entries == 1:
        band_of_all = band(blocks.mask_mode, *blocks.windows, longest_q, longest_kv)
        each = _head_bytes(longest_q, longest_kv, *band_of_all, d, dv)
        heads = max(1, _L2_BUDGET_BYTES // max(each, 1))
        return one if each <= largest_kept else [*range(heads, blocks.num_heads, heads), *one]
    bands = blocks.first_diagonal, blocks.last_diagonal
    head_bytes = _head_bytes(blocks.lengths_q, blocks.lengths_kv, *bands, d, dv)
    return one if int(head_bytes.max()) <= largest_kept else _cut_heads(blocks, head_bytes)


def _head_bytes(s1: IntLike, s2: IntLike, first: IntLike, last: IntLike, d: int, dv: int) -> Any:
    """Bytes of a head's queries, keys, values and results, as far as they lie in the band of the mask."""
    lower, upper = (min, max) if isinstance(s1, int) else (np.minimum, np.maximum)
    queries = lower(s1, s2 - first) - upper(0, -last)
    keys = lower(s2, s1 + last) - upper(0, first)
    is_seen = (last > first) & (first < s2) & (last > -s1)
    return is_seen * (4 * d * queries + 2 * (d + dv) * keys)


def _cut_heads(blocks: ForwardBlocks, head_bytes: Int64Array) -> list[int]:
    """Cuts in front of the head with which the bytes since the last cut pass the budget, if any."""
    per, num_entries = blocks.heads_per_entry, blocks.num_entries
    before_entry = [0, *np.add.accumulate(head_bytes * per).tolist()]  # lists are searched faster
    each_of: list[int] = head_bytes.tolist()
    ends = []
    done = entry = 0
    while True:
        limit = done + _L2_BUDGET_BYTES  # the head that ends behind it does not fit any more
        entry = bisect_right(before_entry, limit, entry) - 1
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


def _cut_one_section(blocks: ForwardBlocks, num_heads: int, num_cores: int) -> Cuts:
    """Cuts the blocks of the first heads, with merging where CANN would merge (steps F5, F7, F8)."""
    total = blocks.num_blocks
    if num_heads < blocks.num_heads:  # all heads are equal
        total = total // blocks.num_heads * num_heads
    used = min(num_cores, total)
    if not used:  # one core steps over all heads
        return Cuts(np.array([num_heads]), np.ones(1, np.int64), np.zeros(1, np.int64), None)
    cuts, stuck, is_heavy = _cut_rows(blocks, 0, 0, total, used, _heaviest(total, used))
    stays = None
    if is_heavy:
        before = _done_with_merging(total, used)
        done = before[1:]
        if blocks.has_empty_first_rows:
            stays = _stays_with_merging(total - before, used)
    else:
        done = np.array(cuts)
        if stuck:
            stays = np.zeros(len(cuts), np.bool_)
            stays[stuck] = True
    return Cuts(np.array([num_heads]), np.array([len(done)]), done, stays)


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
    """The same for the sections of a ragged batch that end behind these heads."""
    section_ends = np.array(ends, np.int64)
    stop = blocks.before_head(section_ends)
    total = np.diff(stop, prepend=0)
    used = np.minimum(total, num_cores)
    sections = _Sections(
        np.append(0, section_ends[:-1]), stop, total, used, _heaviest(total, np.maximum(used, 1))
    )
    is_busy = int(used.min()) == num_cores
    is_many = len(ends) > _FEW_SECTIONS and is_busy
    cut = _cut_rows_together if is_many else _cut_rows_one_by_one
    done, stays, is_heavy = cut(blocks, sections, num_cores)
    if is_heavy.any():
        # A slice is indexed in half the time.
        merged: Any = slice(None) if is_heavy.all() else is_heavy.nonzero()[0]
        cores: IntLike = num_cores if is_busy else used[merged, None]
        size = total[merged, None]
        before = _done_with_merging(size, cores)
        done[merged] = (stop[merged, None] - size) + before[:, 1:]
        stays[merged] = _stays_with_merging(size - before, cores) if blocks.has_empty_first_rows else False
    count = 1 + np.count_nonzero(done < stop[:, None], axis=1)
    if int(count.min()) == num_cores:
        return Cuts(section_ends, count, done.ravel(), stays.ravel())
    is_used = np.arange(num_cores) < count[:, None]
    return Cuts(section_ends, count, done[is_used], stays[is_used])


def _heaviest(total: IntLike, used: IntLike) -> Any:
    """The blocks of the worst core up to which whole rows are good enough."""
    return -(-total // used) + _MIN_MERGE_GAIN_BLOCKS


def _done_with_merging(total: IntLike, used: IntLike) -> Int64Array:
    """Blocks done before every core, and behind the last, when rows may be cut between blocks (step F7 with
    merging).

    A core takes floor(left / cores + 1/3) blocks, so the worst one gets the mean rounded up. With total =
    quotient * used + rest the first i cores have done quotient * i + min(i, max(0, rest - (2 * m + 1) // 3))
    blocks, where m = used - i: no loop.
    """
    quotient = total // used
    cores, third = _cores_before(used) if isinstance(used, int) else _count_cores(used, int(used.max()))
    more = (total - quotient * used) - third
    np.maximum(more, 0, out=more)
    np.minimum(more, cores, out=more)
    more += quotient * cores
    return more


@lru_cache(maxsize=16)
def _cores_before(used: int) -> tuple[Int64Array, Int64Array]:
    return _count_cores(used, used)


def _count_cores(used: IntLike, most: int) -> tuple[Int64Array, Int64Array]:
    """The cores i before each of `most` cores, and behind them; (2 * m + 1) // 3 of the m = used - i left."""
    cores = np.minimum(np.arange(most + 1), used)
    return cores, (2 * (used - cores) + 1) // 3


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
    entry = head // blocks.heads_per_entry
    before, behind_entry, each = (
        int(before_entry[entry]),
        int(before_entry[entry + 1]),
        int(head_blocks[entry]),
    )
    rows = blocks.rows_before(entry)
    width = rows[1] if each else 0  # a head without blocks is left at once
    cuts: list[int] = []
    stays: list[int] = []
    done = begin
    for cores in range(num_used, 0, -1):
        left = stop - done
        take = (left + cores // 3) // cores
        if take < width:
            take = width
        if take > heaviest:  # this core or, if only the mean is too much, one of those behind
            return cuts, stays, True
        if take >= left:
            cuts.append(stop)
            break
        reach = done + take
        if reach >= behind_entry:
            entry = bisect_right(before_entry, reach) - 1
            before, behind_entry = int(before_entry[entry]), int(before_entry[entry + 1])
            each, rows = int(head_blocks[entry]), blocks.rows_before(entry)
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
) -> tuple[Int64Array, BoolArray, BoolArray]:
    """The same for several sections: done, which is the section's end for a core that is not used, and stays,
    (sections, num_cores) each; whether a core is heavier than allowed: then the others mean nothing.
    """
    heads, stop, total, used, heaviest = sections
    done = stop.repeat(num_cores).reshape(-1, num_cores)
    stays = np.zeros(done.shape, np.bool_)
    is_heavy = np.zeros(len(stop), np.bool_)
    for idx in used.nonzero()[0].tolist():
        end = int(stop[idx])
        cuts, stuck, is_heavy[idx] = _cut_rows(
            blocks, int(heads[idx]), end - int(total[idx]), end, int(used[idx]), int(heaviest[idx])
        )
        done[idx, : len(cuts)] = cuts
        stays[idx, stuck] = True
    return done, stays, is_heavy


def _cut_rows_together(
    blocks: ForwardBlocks, sections: _Sections, num_cores: int
) -> tuple[Int64Array, BoolArray, BoolArray]:
    """The same, all sections at once: for the many sections of a long ragged batch, all of which use all
    cores.
    """
    heads, stop, total, _, heaviest = sections
    row_width = blocks.index_rows(2 * num_cores * len(stop))
    rows = blocks.all_rows()
    # Of every entry, and of one behind all: blocks in front, in a head, and in rows of one head in front.
    before = blocks.blocks_before
    each = np.append(np.maximum(blocks.head_blocks, 1), 1)
    base = np.append(rows.before[rows.begin], rows.before[-1])
    first_width = row_width[np.append(rows.begin, -1)]
    may_stick = blocks.has_empty_first_rows
    done = np.empty((num_cores, len(stop)), np.int64)
    stays = np.zeros(done.shape, np.bool_)
    most = np.zeros_like(stop)
    now = stop - total
    entry = heads // blocks.heads_per_entry
    width = np.where(blocks.head_blocks[entry] > 0, first_width[entry], 0)
    for i in range(num_cores):
        cores = num_cores - i
        left = stop - now
        take = np.minimum(np.maximum((left + cores // 3) // cores, width), left)
        np.maximum(most, take, out=most)
        reach = now + take  # where the section ends this is where the next begins
        entry = blocks.entries_of(reach)
        inside = (reach - before[entry]) % each[entry]
        place = inside + base[entry]
        row = blocks.flat_rows(rows, place)
        now = np.subtract(reach, place - rows.before[row], out=done[i])
        if may_stick:
            limit = np.maximum(3 * left // cores, 3 * width)
            stays[i] = (first_width[entry] == 0) & (3 * (take - inside) > limit) & (take < left)
            now[stays[i]] = (reach - inside)[stays[i]]
        width = row_width[row]
        if may_stick:
            width[stays[i]] = 0
    return np.ascontiguousarray(done.T), np.ascontiguousarray(stays.T), most > heaviest
