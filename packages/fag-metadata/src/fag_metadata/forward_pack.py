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
            blocks are the same either way, but CANN writes another place. None = no core does.
    """

    section_ends: Int64Array
    num_used: Int64Array
    done: Int64Array
    stays: BoolArray | None


class _Merges(NamedTuple):
    """Row blocks whose partial results must be merged, in order; int64 arrays.

    Attributes:
        section: Their sections, None if there is one.
        head: Their heads.
        row: Their row blocks.
        first_slot: Workspace slot of the first partial result.
        num_parts: Partial results, in consecutive slots.
        num_rows: Rows of the row block.
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
    section, lines, last = _lines(cuts.num_used, cube_cores)
    ends = np.zeros((num_ends, 3), np.int64)
    has_merges = False
    if blocks.num_blocks:
        # The very last end is behind all blocks; like that of every section it is set below.
        places = blocks.positions(np.minimum(cuts.done, blocks.num_blocks - 1))
        ends[:, 0], ends[:, 1], ends[:, 2] = places.head, places.row, places.key
        if cuts.stays is not None:
            ends[cuts.stays & places.is_head_begin & (places.row > 0), 1:] = 0
        places.is_inside_row[last] = False
        has_merges = bool(places.is_inside_row.any())
    ends[last] = 0
    ends[last, 0] = cuts.section_ends if num_sections > 1 else blocks.num_heads

    fa = np.zeros((num_sections * cube_cores, ROW_WORDS), np.int32)
    fd = np.zeros((num_sections * vector_cores, ROW_WORDS), np.int32)
    both = np.zeros((num_ends, 6), np.int32)
    both[1:, 0:3] = ends[:-1]
    both[:, 3:6] = ends
    fa[lines, 0:6] = both
    if has_merges:
        slots, merges = _find_merges(blocks, places, section, last)
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


def _lines(
    num_used: Int64Array, per_section: int
) -> tuple[Int64Array | None, Int64Array | slice, Int64Array | int]:
    """Section of every used core (None: all the same), its line among all, and the last used core of each."""
    if len(num_used) == 1:
        return None, slice(int(num_used[0])), -1
    section = np.arange(len(num_used)).repeat(num_used)
    behind = num_used.cumsum()
    return (
        section,
        np.arange(len(section)) + (section * per_section - (behind - num_used)[section]),
        behind - 1,
    )


def _find_merges(
    blocks: ForwardBlocks, places: Positions, section: Int64Array | None, last: Int64Array | int
) -> tuple[Int64Array, _Merges]:
    """Numbers the partial results: one slot for every core that does part of a row block (F7.1, F7.7, F7.8).

    Args:
        blocks: Blocks that were cut.
        places: Where every used core stops; is_inside_row is False for the last of a section.
        section: Its section, or None if there is one.
        last: Last used core of every section; slots count from 0 again behind it.

    Returns:
        Slot word of every used core, and the row blocks to merge.
    """
    head, row, is_inside = places.head, places.row, places.is_inside_row
    # The core behind the last one that stops inside a row block finishes it.
    is_closing = np.zeros(len(is_inside), np.bool_)
    is_closing[1:] = (head[1:] != head[:-1]) | (row[1:] != row[:-1])
    is_closing[last] = True
    is_closing[1:] &= is_inside[:-1]
    is_closing[0] = False
    cut_before = is_inside.cumsum() - is_inside
    slots = cut_before + is_closing.cumsum() - is_closing
    closing = is_closing.nonzero()[0]
    if section is not None:
        first = np.zeros_like(last)
        first[1:] = np.asarray(last)[:-1] + 1
        slots -= slots[first][section]
        section = section[closing]
    num_parts = cut_before[closing] + 1
    num_parts[1:] -= cut_before[closing[:-1]]
    head, row = head[closing - 1], row[closing - 1]
    s1 = blocks.lengths_q[head // blocks.heads_per_entry if blocks.num_entries > 1 else 0]
    num_rows = np.minimum(s1 * blocks.g - row * blocks.size.rows, blocks.size.rows)
    return slots, _Merges(section, head, row, slots[closing] - num_parts + 1, num_parts, num_rows)


def _write_merges(
    fd: npt.NDArray[np.int32], merges: _Merges, num_sections: int, vector_cores: int, num_vectors: int
) -> None:
    """Gives every merge task vector cores in proportion to its partial results times rows (step F9)."""
    section, _, _, _, num_parts, num_rows = merges
    load = num_parts * num_rows
    if section is None:
        mean: Int64Array | int = -(-int(load.sum()) // num_vectors)
    else:
        # float64 sums of small integers are exact
        mean = -(-np.bincount(section, load, num_sections).astype(np.int64) // num_vectors)[section]
    per = -(-num_rows // np.maximum(1, load // mean))  # rows of a piece
    extra = _limit_pieces((num_rows - 1) // per, section, num_sections, num_vectors)
    count = extra + 1
    first = count.cumsum() - count
    task = np.arange(len(load)).repeat(count)
    piece = np.arange(len(task))
    where: Int64Array | slice = slice(len(task))
    if section is not None:
        pieces_before = np.bincount(section, count, num_sections).astype(np.int64)
        pieces_before = pieces_before.cumsum() - pieces_before
        where = piece + (section * vector_cores - pieces_before[section])[task]
    piece -= first[task]
    per, num_rows = per[task], num_rows[task]
    begin = piece * per
    words = np.empty((len(task), 6), np.int32)
    for column, values in enumerate((merges.head, merges.row, merges.first_slot, num_parts)):
        words[:, column] = values[task]
    words[:, 4] = begin
    words[:, 5] = np.where(piece < extra[task], per, num_rows - begin)
    fd[where, :6] = words


def _limit_pieces(
    extra: Int64Array, section: Int64Array | None, num_sections: int, num_vectors: int
) -> Int64Array:
    """Vector cores of every task beyond its first: handed out in order until none is free."""
    if section is None:
        free: Int64Array | int = num_vectors - len(extra)
        if int(extra.sum()) <= free:
            return extra
        before: Int64Array | int = 0
    else:
        num_tasks = np.bincount(section, minlength=num_sections)
        free = (num_vectors - num_tasks)[section]
        before = (num_tasks.cumsum() - num_tasks)[section]
    wanted = extra.cumsum()
    wanted -= (wanted - extra)[before]  # within the section
    taken: Int64Array = np.minimum(wanted, free) - np.maximum(0, np.minimum(wanted - extra, free))
    return taken
