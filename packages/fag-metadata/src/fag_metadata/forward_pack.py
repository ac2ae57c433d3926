"""From cuts to words: the FA rows of the cube cores and the FD rows of the vector cores (F7.7 to F10).

Both forward splits end here. All cores of all sections are handled at once; nothing loops.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .forward_blocks import ForwardBlocks, Int64Array, Positions
from .layout import ROW_WORDS, ForwardSplit

BoolArray: TypeAlias = npt.NDArray[np.bool_]


class Cuts(NamedTuple):
    """Where the used cores stop, section after section.

    Attributes:
        section_ends: Head at which every section ends, int64 (sections,).
        num_used: Used cores of every section, at least 1, int64 (sections,).
        done: Blocks of the whole problem done when a used core stops, int64 (sum of num_used,). The last used
            core of a section does all its blocks.
        stays: Whether a core that stops in front of a head does not step over row blocks without blocks. The
            blocks are the same either way, but CANN writes another place.
    """

    section_ends: Int64Array
    num_used: Int64Array
    done: Int64Array
    stays: BoolArray


class _Merges(NamedTuple):
    """Row blocks whose partial results must be merged, in order; int64 arrays.

    Attributes:
        section: Their sections.
        head: Their heads.
        row: Their row blocks.
        first_slot: Workspace slot of the first partial result.
        num_parts: Partial results, in consecutive slots.
        num_rows: Rows of the row block.
    """

    section: Int64Array
    head: Int64Array
    row: Int64Array
    first_slot: Int64Array
    num_parts: Int64Array
    num_rows: Int64Array


def pack_forward(
    blocks: ForwardBlocks, cuts: Cuts, cube_cores: int, vector_cores: int, num_vectors: int
) -> ForwardSplit:
    """Writes the rows of all sections.

    Args:
        blocks: Blocks that were cut.
        cuts: Where the cores stop.
        cube_cores: Rows of a section in `fa`.
        vector_cores: Rows of a section in `fd`.
        num_vectors: Vector cores that may get merge work.

    Returns:
        The split. Positions order as head, row block, key block; a core starts where the one before stopped.
    """
    num_sections, num_ends = len(cuts.section_ends), len(cuts.done)
    last = cuts.num_used.cumsum() - 1  # the last used core of every section
    section, lines = _lines(cuts.num_used, cube_cores)
    ends = np.zeros((num_ends, 3), np.int64)
    if not blocks.num_blocks:
        places = Positions(*ends.T, *np.zeros((2, num_ends), np.bool_))
    else:
        # The very last end is behind all blocks; it is set below.
        places = blocks.positions(np.minimum(cuts.done, blocks.num_blocks - 1))
    ends[:, 0] = places.head
    ends[:, 1] = places.row
    ends[:, 2] = places.key
    stays = cuts.stays & places.is_head_begin & (places.row > 0)
    if stays.any():
        ends[stays, 1:] = 0
    is_inside = places.is_inside_row
    ends[last] = 0
    ends[last, 0] = cuts.section_ends
    is_inside[last] = False

    fa = np.zeros((num_sections * cube_cores, ROW_WORDS), np.int32)
    fd = np.zeros((num_sections * vector_cores, ROW_WORDS), np.int32)
    starts = np.zeros((num_ends, 3), np.int64)
    starts[1:] = ends[:-1]
    fa[lines, 0:3] = starts
    fa[lines, 3:6] = ends
    has_merges = bool(is_inside.any())
    if has_merges:
        slots, merges = _find_merges(blocks, is_inside, ends, section, last)
        fa[lines, 6] = slots
        _write_merges(fd, merges, num_sections, vector_cores, num_vectors)
    return ForwardSplit(
        num_sections,
        has_merges,
        blocks.size.rows,
        blocks.size.keys,
        fa.reshape(num_sections, cube_cores, ROW_WORDS),
        fd.reshape(num_sections, vector_cores, ROW_WORDS),
    )


def _lines(num_used: Int64Array, per_section: int) -> tuple[Int64Array, Int64Array | slice]:
    """Section of every used core, and its line among those of all sections, used or not."""
    if len(num_used) == 1:
        count = int(num_used[0])
        return np.zeros(count, np.int64), slice(count)
    section = np.arange(len(num_used)).repeat(num_used)
    first = num_used.cumsum() - num_used
    return section, np.arange(len(section)) + (section * per_section - first[section])


def _find_merges(
    blocks: ForwardBlocks, is_inside: BoolArray, ends: Int64Array, section: Int64Array, last: Int64Array
) -> tuple[Int64Array, _Merges]:
    """Numbers the partial results: one slot for every core that does part of a row block (F7.1, F7.7, F7.8).

    Args:
        blocks: Blocks that were cut.
        is_inside: Whether each used core stops inside a row block.
        ends: Where it stops: head, row block, key block.
        section: Its section.
        last: Last used core of every section; slots count from 0 again behind it.

    Returns:
        Slot word of every used core, and the row blocks to merge.
    """
    is_closing = np.zeros(len(is_inside), np.bool_)
    is_closing[1:] = is_inside[:-1] & ((ends[1:, 0] != ends[:-1, 0]) | (ends[1:, 1] != ends[:-1, 1]))
    cut_before = is_inside.cumsum() - is_inside
    slots = cut_before + is_closing.cumsum() - is_closing
    if len(last) > 1:
        first = np.zeros_like(last)
        first[1:] = last[:-1] + 1
        slots -= slots[first][section]
    closing = is_closing.nonzero()[0]
    num_parts = cut_before[closing] + 1
    num_parts[1:] -= cut_before[closing[:-1]]
    head, row = ends[closing - 1, 0], ends[closing - 1, 1]
    s1 = blocks.lengths_q[head // blocks.heads_per_entry if blocks.num_entries > 1 else 0]
    num_rows = np.minimum(s1 * blocks.g - row * blocks.size.rows, blocks.size.rows)
    return slots, _Merges(section[closing], head, row, slots[closing] - num_parts + 1, num_parts, num_rows)


def _write_merges(
    fd: npt.NDArray[np.int32], merges: _Merges, num_sections: int, vector_cores: int, num_vectors: int
) -> None:
    """Gives every merge task vector cores in proportion to its partial results times rows (step F9).

    Cores beyond the first of a task are handed out in order until none is free; that is a running minimum.
    """
    section, _, _, _, num_parts, num_rows = merges
    load = num_parts * num_rows
    if num_sections == 1:
        mean: Int64Array | int = -(-int(load.sum()) // num_vectors)
        free: Int64Array | int = num_vectors - len(load)
        task_before: Int64Array | int = 0
    else:
        # float64 sums of small integers are exact
        mean = -(-np.bincount(section, load, num_sections).astype(np.int64) // num_vectors)[section]
        num_tasks = np.bincount(section, minlength=num_sections)
        free = (num_vectors - num_tasks)[section]
        task_before = (num_tasks.cumsum() - num_tasks)[section]
    per = -(-num_rows // np.maximum(1, load // mean))  # rows of a piece
    extra = (num_rows - 1) // per
    wanted = extra.cumsum()
    wanted -= (wanted - extra)[task_before]  # within the section
    taken = np.minimum(wanted, free)
    extra = taken - np.maximum(0, np.minimum(wanted - extra, free))
    first_core = np.arange(len(load)) - task_before + taken - extra + section * vector_cores

    task = np.arange(len(load)).repeat(extra + 1)
    piece = np.arange(len(task))
    piece -= ((extra + 1).cumsum() - extra - 1)[task]
    per, rows = per[task], num_rows[task]
    begin = piece * per
    words = np.zeros((len(task), 6), np.int64)
    for column, values in enumerate((merges.head, merges.row, merges.first_slot, num_parts)):
        words[:, column] = values[task]
    words[:, 4] = begin
    words[:, 5] = np.where(piece < extra[task], per, rows - begin)
    fd[first_core[task] + piece, :6] = words
