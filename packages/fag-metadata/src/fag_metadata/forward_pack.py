"""From cuts to words: the FA rows of the cube cores and the FD rows of the vector cores (F7.7 to F10).

Both forward splits end here. All cores of many sections are handled at once.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .forward_blocks import ForwardBlocks, Int64Array, Positions
from .layout import ROW_WORDS, ForwardSplit, Int32Array, cube_slots, new_tensor

BoolArray: TypeAlias = npt.NDArray[np.bool_]

_SECTIONS_AT_A_TIME = 128  # keeps intermediate arrays in the cache, and small beside the tensor


class Cuts(NamedTuple):
    """Where the used cores stop, section after section.

    Head at which every section ends; its used cores, at least 1; blocks of the whole problem done when each
    of these stops; and whether it stops in front of a head without stepping over row blocks that have no
    blocks: the same blocks, but another place in CANN's words (None = none does).
    """

    section_ends: Int64Array
    num_used: Int64Array
    done: Int64Array
    stays: BoolArray | None


class _Merges(NamedTuple):
    """Row blocks to merge, in order: section (None if there is one), head, row block, slot of the first
    partial result, partial results, rows.
    """

    section: Int64Array | None
    head: Int64Array
    row: Int64Array
    first_slot: Int64Array
    num_parts: Int64Array
    num_rows: Int64Array


def pack_forward(
    blocks: ForwardBlocks, cuts: Cuts, cube_cores: int, vector_cores: int, num_vectors: int
) -> ForwardSplit:
    """Writes the rows of all sections; a core starts where the one before stopped.

    `cube_cores` and `vector_cores` are the rows of a section; up to `num_vectors` cores may get merge work.
    """
    num_sections = len(cuts.section_ends)
    tensor, fa, fd = new_tensor(num_sections, cube_cores, vector_cores, cube_slots(cube_cores))
    has_merges = False
    if num_sections == 1:
        has_merges = _pack_sections(blocks, cuts, None, fa, fd, num_vectors)
    else:
        behind = cuts.num_used.cumsum()
        for begin in range(0, num_sections, _SECTIONS_AT_A_TIME):
            part = slice(begin, begin + _SECTIONS_AT_A_TIME)
            ends, used = cuts.section_ends[part], cuts.num_used[part]
            cores = slice(int(behind[begin] - used[0]), int(behind[begin + len(used) - 1]))
            stays = None if cuts.stays is None else cuts.stays[cores]
            section = np.arange(len(used)).repeat(used)
            some = Cuts(ends, used, cuts.done[cores], stays)
            has_merges |= _pack_sections(blocks, some, section, fa[part], fd[part], num_vectors)
            if begin:
                fa[begin, 0, 0] = cuts.section_ends[begin - 1]
    return ForwardSplit(num_sections, has_merges, blocks.size.rows, blocks.size.keys, fa, fd, tensor)


def pack_alike(
    blocks: ForwardBlocks,
    num_sections: int,
    first: Cuts,
    last: Cuts,
    cube_cores: int,
    vector_cores: int,
    num_vectors: int,
) -> ForwardSplit:
    """The same for sections of equal heads, all of which are cut like the first one, except the last one."""
    tensor, fa, fd = new_tensor(num_sections, cube_cores, vector_cores, cube_slots(cube_cores))
    has_merges = _pack_sections(blocks, first, None, fa[:1], fd[:1], num_vectors)
    fa[1:-1], fd[1:-1] = fa[0], fd[0]
    if first is last:
        fa[-1], fd[-1] = fa[0], fd[0]
    else:
        has_merges |= _pack_sections(blocks, last, None, fa[-1:], fd[-1:], num_vectors)
    heads = np.arange(0, num_sections * int(first.section_ends[0]), int(first.section_ends[0]))[:, None]
    for sections, cuts in ((slice(1, -1), first), (slice(-1, None), last)):
        fa[sections, : len(cuts.done), 0] += heads[sections]
        fa[sections, : len(cuts.done), 3] += heads[sections]
        fd[sections, :, 0] += heads[sections] * (fd[sections, :, 5] > 0)
    return ForwardSplit(num_sections, has_merges, blocks.size.rows, blocks.size.keys, fa, fd, tensor)


def _pack_sections(
    blocks: ForwardBlocks,
    cuts: Cuts,
    section: Int64Array | None,
    fa: Int32Array,
    fd: Int32Array,
    num_vectors: int,
) -> bool:
    """The same for some sections, the first of which starts at head 0; `section` is that of every used core
    (None: there is one). Returns whether there are merges.
    """
    # The last used core of each section.
    last: slice | Int64Array = slice(-1, None) if section is None else cuts.num_used.cumsum() - 1
    rows = fa.reshape(-1, ROW_WORDS)
    is_dense = section is None or len(section) == len(rows)
    words = rows[: len(cuts.done)] if is_dense else np.zeros((len(cuts.done), ROW_WORDS), np.int32)
    has_merges = False
    if blocks.num_blocks:
        # The very last end is behind all blocks; like that of every section it is set below.
        places = blocks.positions(np.minimum(cuts.done, blocks.num_blocks - 1))
        words[:, 3], words[:, 4], words[:, 5] = places.head, places.row, places.key
        if cuts.stays is not None:
            words[cuts.stays & (places.done == 0) & (places.row > 0), 4:6] = 0
        places.is_inside_row[last] = False
        has_merges = bool(np.count_nonzero(places.is_inside_row))
    if has_merges and not (section is None and _write_pairs(fd, words, blocks, cuts, places, num_vectors)):
        words[:, 6], merges = _find_merges(blocks, places, section, last)
        _write_merges(fd, merges, num_vectors)
    words[last, 3:6] = 0
    words[last, 3] = cuts.section_ends
    words[1:, 0:3] = words[:-1, 3:6]
    if not is_dense:
        fa[np.arange(fa.shape[1]) < cuts.num_used[:, None]] = words
    return has_merges


def _write_pairs(
    fd: Int32Array,
    words: Int32Array,
    blocks: ForwardBlocks,
    cuts: Cuts,
    places: Positions,
    num_vectors: int,
) -> bool:
    """Writes the merges of the common dense case: every shared row block is full and shared by two cores.

    A third of the time of _find_merges and _write_merges. Returns False, and writes nothing, in other cases.
    """
    if blocks.num_entries > 1:
        return False
    rows, full_rows = blocks.size.rows, int(blocks.lengths_q[0]) * blocks.g
    inner = places.is_inside_row.nonzero()[0]
    head, row = places.head[inner], places.row[inner]
    num_tasks = len(inner)
    if full_rows % rows and int(row.max()) == full_rows // rows:
        return False  # the last row block of a head is lower
    # Ranges of at least the widest row block cannot share one with two others.
    if int(cuts.done[-1]) // len(places.row) < -(-int(blocks.lengths_kv[0]) // blocks.size.keys) and (
        np.count_nonzero((row[1:] == row[:-1]) & (head[1:] == head[:-1]))
    ):
        return False
    mean = -(-2 * rows * num_tasks // num_vectors)
    per = -(-rows // max(1, 2 * rows // mean))
    pieces = -(-rows // per)
    if pieces * num_tasks > num_vectors:
        return False
    cut_before = places.is_inside_row.cumsum()
    words[1:, 6] = cut_before[:-1]
    words[2:, 6] += cut_before[:-2]  # the core behind finishes the row block
    tasks = fd[0, : num_tasks * pieces].reshape(num_tasks, pieces, ROW_WORDS)
    tasks[:, :, 0], tasks[:, :, 1] = head[:, None], row[:, None]
    tasks[:, :, 2] = np.arange(0, 2 * num_tasks, 2)[:, None]
    piece = [(2, begin, min(per, rows - begin)) for begin in range(0, rows, per)]
    tasks[:, :, 3:6] = piece
    return True


def _find_merges(
    blocks: ForwardBlocks, places: Positions, section: Int64Array | None, last: Int64Array | slice
) -> tuple[Int64Array, _Merges]:
    """Numbers the partial results: one slot for every core that does part of a row block (F7.1, F7.7, F7.8).

    Returns the slot word of every used core, and the row blocks to merge.
    """
    head, row, is_inside = places.head, places.row, places.is_inside_row
    # The core behind the last one that stops inside a row block finishes it.
    is_closing = np.zeros(len(is_inside), np.bool_)
    is_closing[1:] = (head[1:] != head[:-1]) | (row[1:] != row[:-1])
    is_closing[last] = True
    is_closing[1:] &= is_inside[:-1]
    is_closing[0] = False
    # Every inner cut and every finished row block moves the next result by one slot.
    slots = np.zeros(len(is_inside), np.int64)
    np.add.accumulate((is_inside.view(np.int8) + is_closing.view(np.int8))[:-1], out=slots[1:])
    closing = is_closing.nonzero()[0]
    num_parts = slots[closing] - np.arange(len(closing))  # inner cuts in front, of all row blocks
    num_parts[1:] -= num_parts[:-1].copy()
    num_parts += 1
    if section is not None:
        assert not isinstance(last, slice)
        first = np.zeros_like(last)
        first[1:] = last[:-1] + 1
        slots -= slots[first][section]
        section = section[closing]
    head, row = head[closing - 1], row[closing - 1]
    s1 = (
        blocks.lengths_q[head // blocks.heads_per_entry]
        if blocks.num_entries > 1
        else int(blocks.lengths_q[0])
    )
    num_rows = np.minimum(s1 * blocks.g - row * blocks.size.rows, blocks.size.rows)
    return slots, _Merges(section, head, row, slots[closing] - num_parts + 1, num_parts, num_rows)


def _write_merges(fd: Int32Array, merges: _Merges, num_vectors: int) -> None:
    """Gives every merge task vector cores in proportion to its partial results times rows (step F9)."""
    section, _, _, _, num_parts, num_rows = merges
    num_sections = len(fd)
    load = num_parts * num_rows
    if section is None:
        mean: Int64Array | int = -(-int(load.sum()) // num_vectors)
    else:
        # float64 sums of small integers are exact
        mean = -(-np.bincount(section, load, num_sections).astype(np.int64) // num_vectors)[section]
    per = -(-num_rows // np.maximum(1, load // mean))  # rows of a piece
    extra = (num_rows - 1) // per
    behind = extra.cumsum()
    if section is not None or int(behind[-1]) > num_vectors - len(load):
        extra = _limit_pieces(extra, behind, section, num_sections, num_vectors)
        behind = extra.cumsum()
    count = extra + 1
    first = count.cumsum() - count  # line of the first piece
    lines = fd.reshape(-1, ROW_WORDS)
    busy: slice | BoolArray = slice(int(first[-1] + count[-1]))
    if section is not None:
        pieces = np.bincount(section, count, num_sections).astype(np.int64)
        first += (np.arange(num_sections) * fd.shape[1] - (pieces.cumsum() - pieces))[section]
        busy = (np.arange(fd.shape[1]) < pieces[:, None]).ravel()
    # Lines of 64 bytes are copied faster than words, so that of an idle core is copied too.
    tasks = np.zeros((len(load) + 1, ROW_WORDS), np.int32)
    words = (merges.head, merges.row, merges.first_slot, num_parts, -first * per, per)
    for column, values in enumerate(words):
        tasks[:-1, column] = values
    which = np.full(len(lines), len(load))
    which[busy] = np.arange(len(load)).repeat(count)
    tasks.take(which, axis=0, out=lines, mode="clip")
    lines[:, 4] += np.arange(len(lines), dtype=np.int32) * lines[:, 5]
    # The last piece holds what remains: less than the others, or more where no more vector cores were free.
    lines[first + extra, 5] = num_rows - extra * per


def _limit_pieces(
    extra: Int64Array, wanted: Int64Array, section: Int64Array | None, num_sections: int, num_vectors: int
) -> Int64Array:
    """Vector cores of every task beyond its first: handed out in order until none is free."""
    free: Int64Array | int = num_vectors - len(extra)
    before: Int64Array | int = 0
    if section is not None:
        num_tasks = np.bincount(section, minlength=num_sections)
        free = (num_vectors - num_tasks)[section]
        before = (num_tasks.cumsum() - num_tasks)[section]
    wanted = wanted - (wanted - extra)[before]  # within the section
    taken: Int64Array = np.minimum(wanted, free) - np.maximum(0, np.minimum(wanted - extra, free))
    return taken
