"""From cuts to words: the FA rows of the cube cores and the FD rows of the vector cores (F7.7 to F10).

All cores of many sections are handled at once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .forward_blocks import ForwardBlocks, Positions
from .layout import ROW_WORDS, ForwardSplit, Int32Array, cube_slots, new_tensor
from .ranges import Int64Array, running_sums

BoolArray: TypeAlias = npt.NDArray[np.bool_]

_SECTIONS_AT_A_TIME = 192  # keeps intermediate arrays in the cache, and small beside the tensor


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


_NOTHING = np.zeros(0, np.int64)
_NOWHERE = Positions(_NOTHING, _NOTHING, _NOTHING, np.zeros(0, np.bool_), _NOTHING)


class _Merges(NamedTuple):
    """Row blocks to merge, in order: how many lie in front of every section and in all, and of each its head,
    row block, slot of the first partial result, partial results, rows.
    """

    before: Int64Array
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
    places = _places_of(blocks, cuts)
    blocks.drop_index()
    tensor, fa, fd = new_tensor(num_sections, cube_cores, vector_cores, cube_slots(cube_cores))
    has_merges = num_sections == 1 and _pack_sections(blocks, cuts, places, fa, fd, num_vectors)
    first = 0
    size = -(-num_sections // -(-num_sections // _SECTIONS_AT_A_TIME))  # of equal parts
    for begin in range(0, num_sections if num_sections > 1 else 0, size):
        part = slice(begin, begin + size)
        ends, used = cuts.section_ends[part], cuts.num_used[part]
        cores = slice(first, first + int(used.sum()))
        stays = None if cuts.stays is None else cuts.stays[cores]
        some = Cuts(ends, used, cuts.done[cores], stays)
        some_places = Positions(*(column[cores] for column in places))  # type: ignore[arg-type]
        has_merges |= _pack_sections(blocks, some, some_places, fa[part], fd[part], num_vectors)
        if begin:
            fa[begin, 0, 0] = cuts.section_ends[begin - 1]
        first = cores.stop
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
    has_merges = _pack_sections(blocks, first, _places_of(blocks, first), fa[:1], fd[:1], num_vectors)
    fa[1:-1], fd[1:-1] = fa[0], fd[0]
    if first is last:
        fa[-1], fd[-1] = fa[0], fd[0]
    else:
        has_merges |= _pack_sections(blocks, last, _places_of(blocks, last), fa[-1:], fd[-1:], num_vectors)
    heads = np.arange(0, num_sections * int(first.section_ends[0]), int(first.section_ends[0]))[:, None]
    for sections, cuts in ((slice(1, -1), first), (slice(-1, None), last)):
        fa[sections, : len(cuts.done), 0] += heads[sections]
        fa[sections, : len(cuts.done), 3] += heads[sections]
        fd[sections, :, 0] += heads[sections] * (fd[sections, :, 5] > 0)
    return ForwardSplit(num_sections, has_merges, blocks.size.rows, blocks.size.keys, fa, fd, tensor)


def _places_of(blocks: ForwardBlocks, cuts: Cuts) -> Positions:
    """Where the used cores stop, if there are blocks; _pack_sections corrects the end of every section."""
    if not blocks.num_blocks:
        return _NOWHERE
    if blocks.equal_lengths is not None:  # the end of all blocks is the beginning of one more head
        return blocks.positions(cuts.done)
    places = blocks.positions(np.minimum(cuts.done, blocks.num_blocks - 1))
    places.is_inside_row[cuts.done.searchsorted(blocks.num_blocks) :] = False
    return places


def _pack_sections(
    blocks: ForwardBlocks, cuts: Cuts, places: Positions, fa: Int32Array, fd: Int32Array, num_vectors: int
) -> bool:
    """The same for some sections, the first of which starts at head 0. Returns whether there are merges."""
    is_one = len(fa) == 1
    # The last used core of each section.
    last: slice | Int64Array = slice(-1, None) if is_one else cuts.num_used.cumsum() - 1
    rows = fa.reshape(-1, ROW_WORDS)
    is_dense = is_one or len(cuts.done) == len(rows)
    words = rows[: len(cuts.done)] if is_dense else np.zeros((len(cuts.done), ROW_WORDS), np.int32)
    has_merges = False
    if blocks.num_blocks:
        words[:, 3], words[:, 4], words[:, 5] = places.head, places.row, places.key
        if cuts.stays is not None:
            words[cuts.stays & (places.done == 0) & (places.row > 0), 4:6] = 0
        inner = places.is_inside_row.nonzero()[0]
        has_merges = len(inner) > 0
    if has_merges and not (is_one and _write_pairs(fd, words, blocks, cuts, places, inner, num_vectors)):
        words[:, 6], merges = _find_merges(blocks, places, cuts.num_used)
        _write_merges(fd, merges, num_vectors)
    words[last, 3:6] = 0
    words[last, 3] = cuts.section_ends
    for column in range(3):
        words[1:, column] = words[:-1, column + 3]
    if not is_dense:
        fa[np.arange(fa.shape[1]) < cuts.num_used[:, None]] = words
    return has_merges


def _write_pairs(
    fd: Int32Array,
    words: Int32Array,
    blocks: ForwardBlocks,
    cuts: Cuts,
    places: Positions,
    inner: Int64Array,
    num_vectors: int,
) -> bool:
    """Writes the merges of the common dense case: every shared row block is full and shared by two cores.

    `inner` are the cores that stop inside a row block. A third of the time of _find_merges and _write_merges.
    Returns False, and writes nothing, in other cases.
    """
    if blocks.equal_lengths is None:
        return False
    s1, s2 = blocks.equal_lengths
    rows, full_rows = blocks.size.rows, s1 * blocks.g
    head, row = places.head[inner], places.row[inner]
    num_tasks = len(inner)
    if full_rows % rows and np.count_nonzero(row == full_rows // rows):
        return False  # the last row block of a head is lower
    # Ranges of at least the widest row block cannot share one with two others.
    if cuts.done.item(-1) // len(places.row) < -(-s2 // blocks.size.keys) and (
        np.count_nonzero((row[1:] == row[:-1]) & (head[1:] == head[:-1]))
    ):
        return False
    mean = -(-2 * rows * num_tasks // num_vectors)
    per = -(-rows // max(1, 2 * rows // mean))
    pieces = -(-rows // per)
    if pieces * num_tasks > num_vectors:
        return False
    cut_before = inner.searchsorted(np.arange(len(words)))
    words[1:, 6] = cut_before[1:] + cut_before[:-1]  # the core behind a cut finishes the row block
    lines = fd[0, : num_tasks * pieces]
    lines[:, 2:6] = _pairs(num_tasks, rows, per)
    lines[:, 0].reshape(-1, pieces)[:] = head[:, None]
    lines[:, 1].reshape(-1, pieces)[:] = row[:, None]
    return True


@lru_cache(maxsize=64)
def _pairs(num_tasks: int, rows: int, per: int) -> Int32Array:
    """Words 2 to 5 of the FD rows of so many row blocks, each with two partial results."""
    pieces = [(2, begin, min(per, rows - begin)) for begin in range(0, rows, per)]
    return np.array([(2 * task, *piece) for task in range(num_tasks) for piece in pieces], np.int32)


def _find_merges(
    blocks: ForwardBlocks, places: Positions, num_used: Int64Array
) -> tuple[Int64Array, _Merges]:
    """Numbers the partial results: one slot for every core that does part of a row block (F7.1, F7.7, F7.8).

    Returns the slot word of every used core, and the row blocks to merge.
    """
    head, row, is_inside = places.head, places.row, places.is_inside_row
    cores_before = running_sums(num_used)
    # The core behind the last one that stops inside a row block finishes it.
    is_closing = np.zeros(len(is_inside), np.bool_)
    is_closing[1:] = (head[1:] != head[:-1]) | (row[1:] != row[:-1])
    is_closing[cores_before[1:] - 1] = True
    is_closing[1:] &= is_inside[:-1]
    is_closing[0] = False
    # Every inner cut and every finished row block moves the next result by one slot.
    slots = running_sums(is_inside.view(np.int8) + is_closing.view(np.int8))[:-1]
    closing = is_closing.nonzero()[0]
    num_parts = slots[closing] - np.arange(len(closing))  # inner cuts in front, of all row blocks
    num_parts[1:] -= num_parts[:-1].copy()
    num_parts += 1
    slots -= slots[cores_before[:-1]].repeat(num_used)
    head, row = head[closing - 1], row[closing - 1]
    s1 = blocks.lengths_q[head // blocks.heads_per_entry] if blocks.num_entries > 1 else blocks.lengths_q
    num_rows = np.minimum(s1 * blocks.g - row * blocks.size.rows, blocks.size.rows)
    first_slot = slots[closing] - num_parts + 1
    return slots, _Merges(closing.searchsorted(cores_before), head, row, first_slot, num_parts, num_rows)


def _write_merges(fd: Int32Array, merges: _Merges, num_vectors: int) -> None:
    """Gives every merge task vector cores in proportion to its partial results times rows (step F9)."""
    num_parts, num_rows = merges.num_parts, merges.num_rows
    tasks_before, num_lines = merges.before, fd.shape[1]
    num_tasks = tasks_before[1:] - tasks_before[:-1]  # of every section
    load = num_parts * num_rows
    load_before = running_sums(load)[tasks_before]
    mean = (-((load_before[:-1] - load_before[1:]) // num_vectors)).repeat(num_tasks)
    per = -(-num_rows // np.maximum(1, load // mean))  # rows of a piece
    # Vector cores beyond the first of a task are handed out in order until none is free.
    wanted = running_sums((num_rows - 1) // per)
    before = wanted[tasks_before[:-1]]
    free = num_vectors - num_tasks
    num_busy = num_tasks + np.minimum(wanted[tasks_before[1:]] - before, free)
    before, free = before.repeat(num_tasks), free.repeat(num_tasks)
    taken = np.minimum(wanted[:-1] - before, free)
    extra = np.minimum(wanted[1:] - before, free) - taken
    task = np.arange(len(load))
    first = (np.arange(len(fd)) * num_lines - tasks_before[:-1]).repeat(num_tasks) + task + taken  # line
    # Lines of 64 bytes are copied faster than words, so that of an idle core is copied too.
    lines = fd.reshape(-1, ROW_WORDS)
    tasks = np.zeros((len(load) + 1, ROW_WORDS), np.int32)
    words = (merges.head, merges.row, merges.first_slot, num_parts, -first * per, per)
    for column, values in enumerate(words):
        tasks[:-1, column] = values
    which = np.full(len(lines), len(load))
    which[(np.arange(num_lines) < num_busy[:, None]).ravel()] = task.repeat(extra + 1)
    tasks.take(which, axis=0, out=lines, mode="clip")
    lines[:, 4] += np.arange(len(lines), dtype=np.int32) * lines[:, 5]
    # The last piece holds what remains: less than the others, or more where no more vector cores were free.
    lines[first + extra, 5] = num_rows - extra * per
