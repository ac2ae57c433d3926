"""The forward's base blocks: their size, the valid blocks of every row, and how many a head has.

A block is some rows times some keys; the rows of a kv head are the queries of its G query heads merged into
one list (step F3 of the format page). Where all batches have the same lengths they are one "entry" with
b * n2 heads, so that a dense problem costs the same for every batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from .ranges import Int64Array, IntLike, band, divide, running_sums
from .terms import Layout, MaskMode

if TYPE_CHECKING:
    from .problem import AttentionProblem

_ROWS_AT_A_TIME = 1 << 20  # bounds the memory of long ragged lists
_FEW_ROWS = 1 << 14  # which take as long to list as those of each core's entry
_LONG_LIST = 1024  # of more numbers it takes longer to make a list than to search them as they are
_BLOCKS_PER_LOOKUP = 64  # a search takes as long as this many numbers of a table do to write
_ZERO = np.zeros(1, np.int64)
_ZERO.flags.writeable = False


class BlockSize(NamedTuple):
    """Rows (merged over the query heads of a kv head) and keys of a base block."""

    rows: int
    keys: int


class RowBlocks(NamedTuple):
    """Row blocks of a head of some entries, one entry after the other: the first valid key block of every row
    block, the valid blocks in front of it (one number more), and the first row block of every entry.
    """

    first: Int64Array
    before: Int64Array
    begin: Int64Array


class Positions(NamedTuple):
    """Places in the order of all valid blocks: head b * n2 + n2_idx, row block, key block, whether a part of
    the row block lies in front, and the blocks of the head in front.
    """

    head: Int64Array
    row: Int64Array
    key: Int64Array
    is_inside_row: npt.NDArray[np.bool_]
    done: Int64Array


class ForwardBlocks:
    """Valid base blocks of a problem, entry by entry; heads_per_entry is n2, or b * n2 where there is one.

    equal_lengths are the two lengths where there is one entry, else None.
    """

    def __init__(self, problem: AttentionProblem, size: BlockSize) -> None:
        b = problem.b
        self.equal_lengths: tuple[int, int] | None = None
        if b and not problem.has_lengths_q and not problem.has_lengths_kv:
            self.equal_lengths = problem.s1, problem.s2
        elif b and _all_equal(problem.lengths_q) and _all_equal(problem.lengths_kv):
            self.equal_lengths = int(problem.lengths_q[0]), int(problem.lengths_kv[0])
        self._problem = problem
        self.size = size
        self.g = problem.g
        self.num_entries = b if self.equal_lengths is None else 1
        self.num_heads = b * problem.n2
        self.heads_per_entry = problem.n2 if self.equal_lengths is None else self.num_heads
        self.mask_mode = problem.mask_mode
        self.is_bnsd = self.g > 1 and problem.layout is Layout.BNSD
        self.windows = (problem.win_left, problem.win_right)
        self._all_rows: RowBlocks | None = None
        self._row_table: Any = None  # see index_rows
        self._entry_table: Any = None
        self._rows_before: dict[int, Sequence[int]] = {}

    @cached_property
    def lengths_q(self) -> Int64Array:
        """Query length of every entry."""
        return self._problem.lengths_q[: self.num_entries]

    @cached_property
    def lengths_kv(self) -> Int64Array:
        """Key length of every entry."""
        return self._problem.lengths_kv[: self.num_entries]

    @cached_property
    def head_blocks(self) -> Int64Array:
        """Blocks of a head of every entry."""
        return self._count_head_blocks() if self.equal_lengths is None else self.all_rows().before[-1:]

    @cached_property
    def blocks_before(self) -> Int64Array:
        """Blocks in front of every entry, one number more."""
        return running_sums(self.head_blocks * self.heads_per_entry)

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of all heads."""
        if self.equal_lengths is None:
            return int(self.blocks_before[-1])
        return self.head_blocks.item() * self.heads_per_entry

    @cached_property
    def _band(self) -> tuple[Int64Array, Int64Array]:
        return band(self.mask_mode, *self.windows, self.lengths_q, self.lengths_kv)

    @property
    def first_diagonal(self) -> Int64Array:
        """Lowest visible diagonal of the entries, see ranges.band."""
        return self._band[0]

    @property
    def last_diagonal(self) -> Int64Array:
        """Highest visible diagonal of the entries, see ranges.band."""
        return self._band[1]

    @cached_property
    def has_empty_first_rows(self) -> bool:
        """Whether the first row block of a head with blocks may have none; False is certain."""
        if self.num_entries == 1:
            return self.num_blocks > 0 and self.rows_before(0)[1] == 0
        # The first query sees key 0 unless the mask begins behind it.
        rows = -(-self.size.rows // self.g) if not self.is_bnsd else 1
        return bool((self.last_diagonal + rows <= 0).any())

    @property
    def longest_and_total(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Longest length and sum of the lengths of all entries, for queries and for keys."""
        if self.equal_lengths is not None:
            s1, s2 = self.equal_lengths
            return (s1, s1), (s2, s2)
        q, kv = self.lengths_q, self.lengths_kv
        return (int(q.max()), int(q.sum())), (int(kv.max()), int(kv.sum()))

    def before_head(self, heads: Int64Array) -> Int64Array:
        """Valid blocks in front of heads, 0 <= head <= num_heads."""
        entries = heads // self.heads_per_entry
        inside = heads - entries * self.heads_per_entry
        each = self.head_blocks[np.minimum(entries, self.num_entries - 1)] if self.num_entries else 0
        result: Int64Array = self.blocks_before[entries] + inside * each
        return result

    def positions(self, blocks: Int64Array) -> Positions:
        """Places of block numbers, 0 <= block < num_blocks, ascending: each is where that block stands."""
        if self.num_entries == 1:
            rows = self.all_rows()
            of_head = self.head_blocks.item()
            heads = blocks // of_head  # with what follows in two thirds of the time of np.divmod
            inside = blocks - heads * of_head
            row = flat = rows.before[1:].searchsorted(inside, "right")
            offset = inside - rows.before[flat]
        else:
            entries = self.entries_of(blocks)
            inside = blocks - self.blocks_before[entries]
            each = self.head_blocks[entries]
            heads = inside // each
            inside -= heads * each
            heads += entries * self.heads_per_entry
            rows, begin = self._rows_around(entries)
            offset = inside + rows.before[begin]
            flat = self.flat_rows(rows, offset)
            offset -= rows.before[flat]
            row = flat - begin
        key = rows.first[flat] + offset if self.windows[0] >= 0 else offset
        return Positions(heads, row, key, offset > 0, inside)

    def index_rows(self, lookups: int) -> Int64Array:
        """Makes a table of the row block that every block of one head of each entry lies in, if it pays for
        that many lookups in `entries_of` and `flat_rows`.

        Returns the blocks of all row blocks, and of one without blocks behind them.
        """
        rows = self.all_rows()
        width = np.empty(len(rows.before), np.int64)
        np.subtract(rows.before[1:], rows.before[:-1], out=width[:-1])
        if int(rows.before[-1]) <= _BLOCKS_PER_LOOKUP * lookups:
            width[-1] = 1  # what is behind all blocks lies in a row behind all
            which = np.arange(len(width), dtype=np.uint16 if len(width) <= 1 << 16 else np.int32)
            entry = np.arange(self.num_entries + 1, dtype=np.int32)
            self._row_table = which.repeat(width)
            self._entry_table = entry.repeat(np.diff(rows.begin, append=(len(width) - 1, len(width))))
        width[-1] = 0
        return width

    def drop_index(self) -> None:
        """Gives the memory of the table back, before the tensor takes as much."""
        self._row_table = self._entry_table = None

    def entries_of(self, blocks: Int64Array) -> Int64Array:
        """Entries of ascending block numbers, num_entries of num_blocks."""
        if self._row_table is not None:
            found: Int64Array = self._entry_table[self._row_table[divide(blocks, self.heads_per_entry)]]
            return found
        if len(blocks) < self.num_entries:
            return self.blocks_before[1:].searchsorted(blocks, "right")
        count = np.diff(blocks.searchsorted(self.blocks_before[1:]), prepend=0, append=len(blocks))
        return np.arange(self.num_entries + 1).repeat(count)

    def flat_rows(self, rows: RowBlocks, blocks: Int64Array) -> Int64Array:
        """Row blocks that blocks of one head of each entry lie in."""
        has_table = self._row_table is not None and rows is self._all_rows
        flat: Int64Array = (
            self._row_table[blocks] if has_table else rows.before[1:].searchsorted(blocks, "right")
        )
        return flat

    def _rows_around(self, entries: Int64Array) -> tuple[RowBlocks, Int64Array]:
        """Row blocks of at least these entries (ascending), and the first one of each."""
        if self._all_rows is not None:
            return self._all_rows, self._all_rows.begin[entries]
        is_new = np.ones(len(entries), np.bool_)
        is_new[1:] = entries[1:] != entries[:-1]
        rows = self.rows_of(entries[is_new])
        return rows, rows.begin[is_new.cumsum() - 1]

    def blocks_at(self, head: Int64Array, row: Int64Array, key: Int64Array) -> Int64Array:
        """Blocks in front of places; the inverse of `positions`. head <= num_heads, row and key inside."""
        before = self.before_head(head)
        inner = np.flatnonzero((head < self.num_heads) & ((row > 0) | (key > 0)))
        if inner.size:
            needed, which = np.unique(head[inner] // self.heads_per_entry, return_inverse=True)
            rows = self.all_rows() if self.num_entries == 1 else self.rows_of(needed)
            begin = rows.begin[which.reshape(-1)]
            flat = begin + row[inner]
            width = rows.before[flat + 1] - rows.before[flat]
            before = before + 0  # a copy that may be changed
            before[inner] += rows.before[flat] - rows.before[begin]
            before[inner] += np.minimum(np.maximum(key[inner] - rows.first[flat], 0), width)
        return before

    def all_rows(self) -> RowBlocks:
        """The row blocks of the heads of all entries (kept)."""
        if self._all_rows is None:
            if self.equal_lengths is None:
                self._all_rows = self.rows_of(np.arange(self.num_entries))
            else:
                self._all_rows = self._rows_of_one(*self.equal_lengths)
        return self._all_rows

    def rows_before(self, entry: int) -> Sequence[int]:
        """RowBlocks.before of one entry for scalar searches (kept)."""
        found = self._rows_before.get(entry)
        if found is None:
            if self.num_entries == 1:
                before = self.all_rows().before
            elif self._rows_are_few:
                rows = self.all_rows()
                begin = int(rows.begin[entry])
                end = int(rows.begin[entry + 1]) if entry + 1 < self.num_entries else len(rows.first)
                before = rows.before[begin : end + 1]
                before = before - before[0] if begin else before
            else:
                before = self.rows_of(np.array([entry])).before
            found = before.tolist() if len(before) < _LONG_LIST else cast("Sequence[int]", before.data)
            self._rows_before[entry] = found
        return found

    @cached_property
    def _rows_are_few(self) -> bool:
        """Whether all row blocks are listed at once, and kept."""
        num_rows = int((-(-self.lengths_q * self.g // self.size.rows)).sum())
        return num_rows <= _FEW_ROWS

    def rows_of(self, entries: Int64Array) -> RowBlocks:
        """The row blocks of a head of every one of these entries."""
        if len(entries) == 1:
            return self._rows_of_one(int(self.lengths_q[entries[0]]), int(self.lengths_kv[entries[0]]))
        rows = self.size.rows
        s1, s2 = self.lengths_q[entries], self.lengths_kv[entries]
        num_rows = divide(s1 * self.g + (rows - 1), rows)
        begin = num_rows.cumsum() - num_rows
        low = np.arange(0, int(num_rows.sum()) * rows, rows)
        bands = self.first_diagonal[entries], self.last_diagonal[entries]
        key_blocks = self._key_blocks(low, begin * rows, s1, s2, *bands, lambda x: x.repeat(num_rows))
        return RowBlocks(*key_blocks, begin)

    def _rows_of_one(self, s1: int, s2: int) -> RowBlocks:
        diagonals = band(self.mask_mode, *self.windows, s1, s2)
        low = np.arange(0, s1 * self.g, self.size.rows)
        return RowBlocks(*self._key_blocks(low, 0, s1, s2, *diagonals, lambda x: x), _ZERO)

    def _key_blocks(
        self,
        low: Int64Array,
        before_entry: IntLike,
        s1: IntLike,
        s2: IntLike,
        first_diagonal: IntLike,
        last_diagonal: IntLike,
        each_row: Callable[[Any], Any],
    ) -> tuple[Int64Array, Int64Array]:
        """First valid key block of row blocks, and the valid blocks in front of each (step F3): with as few
        array operations as there can be.

        They begin at the rows `low` of all entries, less the rows before their entry. `each_row` turns a
        number of every entry into one of every row block.
        """
        rows, keys = self.size
        is_short = len(low) < _LONG_LIST  # and then made faster than a list of zeros in no memory
        first = np.zeros(len(low), np.int64) if is_short else np.ndarray(len(low), np.int64, _ZERO, strides=0)
        width = divide(s2 + (keys - 1), keys)
        if self.mask_mode is MaskMode.NO_MASK:
            return first, running_sums(first + each_row(width))
        has_left = self.windows[0] >= 0
        if has_left or self.is_bnsd:
            low, before_entry = low - each_row(before_entry), 0
        # The block behind the last key that the last query of every row block sees.
        if self.is_bnsd:
            s1, last = each_row(s1), each_row(last_diagonal)
            high = np.minimum(low + (rows - 1), s1 * self.g - 1)
            head = low // s1
            inside = head == high // s1
            low = np.where(inside, low - head * s1, 0)
            high = np.where(inside, high - head * s1, s1)  # one too many, as in CANN; clipped below
            stop = divide(high + (last + keys), keys)
        else:
            offset = self.g * (last_diagonal + keys) + (rows - 1) - before_entry
            stop = divide(low + each_row(offset), self.g * keys)
        # Of a low last row block the last query sees the last key, so that no other limit is needed.
        np.minimum(stop, each_row(width), out=stop)
        if not isinstance(last_diagonal, int) or last_diagonal < 0:
            np.maximum(stop, 0, out=stop)
        if has_left:
            if self.g > 1 and not self.is_bnsd:
                low = divide(low, self.g)
            low = low + each_row(first_diagonal)
            is_hidden = (low >= each_row(s2)) | (stop == 0)
            first = np.maximum(low, 0) // keys
            first[is_hidden] = stop[is_hidden] = 0
            stop -= first
        return first, running_sums(stop)

    def _count_head_blocks(self) -> Int64Array:
        """Valid blocks of a head of every entry; of very many row blocks some are listed at a time."""
        height, keys = self.size
        num_rows = divide(self.lengths_q * self.g + (height - 1), height)
        width = divide(self.lengths_kv + (keys - 1), keys)
        if self.mask_mode is MaskMode.NO_MASK or not self.num_entries:
            return num_rows * width
        if self._rows_are_few:
            rows = self.all_rows()
            return np.diff(rows.before[rows.begin], append=rows.before[-1])
        step = self.g * keys // height  # row blocks after which one more key block is visible
        if self.mask_mode is MaskMode.CAUSAL and step * height == self.g * keys and not self.is_bnsd:
            # All but the last row block, which sees all keys: r has floor((r + before) / step) + 1, if any.
            before = divide(self.g * self.last_diagonal + (height - 1), height)
            counts: Int64Array = _sum_steps(num_rows - 1 + before, step) - _sum_steps(before, step) + width
            counts[num_rows == 0] = 0
            return counts
        pairs = self.lengths_q << 32 | self.lengths_kv
        _, index, inverse = np.unique(pairs, return_index=True, return_inverse=True)
        ends = np.cumsum(-(-self.lengths_q[index] * self.g // self.size.rows))
        counts = np.zeros(len(index), np.int64)
        begin = 0
        while begin < len(index):
            done = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, done + _ROWS_AT_A_TIME, "right")))
            rows = self.rows_of(index[begin:end])
            counts[begin:end] = np.diff(rows.before[rows.begin], append=rows.before[-1])
            begin = end
        result: Int64Array = counts[inverse.reshape(-1)]
        return result


def _all_equal(values: Int64Array) -> bool:
    return bool((values == values[0]).all())


def _sum_steps(n: Int64Array, step: int) -> Int64Array:
    """The sum of floor(i / step) + 1 over 0 <= i < n; 0 for a negative n."""
    n = np.maximum(n, 0)
    whole = divide(n, step)
    # step * (1 + ... + whole), and whole + 1 of each i behind
    sums: Int64Array = (whole + 1) * (n - whole * step) + step * (whole * (whole + 1) >> 1)
    return sums
