"""Visible area of the forward's base blocks: how many (query, key) pairs of a block the mask leaves.

Areas are what the balanced split evens out and what balance figures count.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .forward_blocks import ForwardBlocks, Int64Array
from .ranges import IntLike, masked_area
from .terms import MaskMode


class Pieces(NamedTuple):
    """Row blocks, or parts of them, with visible pairs, of one head of some entries, in order.

    Entry, row block, first key block, number of key blocks, blocks of the head in front, visible pairs.
    """

    entry: Int64Array
    row: Int64Array
    key: Int64Array
    width: Int64Array
    done: Int64Array
    area: Int64Array

    def take(self, where: npt.NDArray[Any]) -> Pieces:
        """Some of the pieces, by index or by mask."""
        return Pieces(*(column[where] for column in self))


class Items(NamedTuple):
    """The pieces of all heads: blocks, and visible pairs, in front of every one, and their number."""

    done: Int64Array
    area: Int64Array


class ForwardAreas:
    """Visible areas of a problem's base blocks; a head is a kv head with all its query heads."""

    def __init__(self, blocks: ForwardBlocks) -> None:
        self.blocks = blocks
        self._items: dict[int | None, Items] = {}

    @cached_property
    def head_area(self) -> Int64Array:
        """Visible pairs of a head of every entry."""
        blocks = self.blocks
        return self._rows_before(slice(None), blocks.lengths_q * blocks.g, 0, blocks.lengths_kv)

    @cached_property
    def area_before(self) -> Int64Array:
        """Visible pairs in front of every entry, one number more than entries."""
        before = np.zeros(self.blocks.num_entries + 1, np.int64)
        np.cumsum(self.head_area * self.blocks.heads_per_entry, out=before[1:])
        return before

    @property
    def total(self) -> int:
        """Visible pairs of all heads."""
        return int(self.area_before[-1])

    def _rows_before(
        self, entries: Int64Array | slice | int, rows: Int64Array, key_start: IntLike, key_stop: IntLike
    ) -> Int64Array:
        """Visible pairs of the merged rows before `rows` (of one head) with keys [key_start, key_stop)."""
        blocks = self.blocks
        if blocks.mask_mode is MaskMode.NO_MASK:
            result: Int64Array = rows * (key_stop - key_start)
            return result
        first: IntLike = blocks.first_diagonal[entries]
        last: IntLike = blocks.last_diagonal[entries]
        if isinstance(entries, int):
            first, last = int(first), int(last)

        def area(start: IntLike, stop: IntLike) -> Int64Array:
            return masked_area(blocks.mask_mode, first, last, start, stop, key_start, key_stop)

        if blocks.g == 1:
            return area(0, rows)
        if blocks.is_bnsd:
            s1 = np.maximum(blocks.lengths_q[entries], 1)
            heads: Int64Array = rows // s1
            return heads * area(0, s1) + area(0, rows - heads * s1)
        queries = rows // blocks.g
        return blocks.g * area(0, queries) + (rows - queries * blocks.g) * area(queries, queries + 1)

    def before_rows(self, rows: Int64Array) -> Int64Array:
        """Visible pairs of the merged rows before `rows`, of a head of the first entry."""
        return self._rows_before(0, rows, 0, int(self.blocks.lengths_kv[0]))

    def before(self, heads: Int64Array, rows: Int64Array, keys: Int64Array) -> Int64Array:
        """Visible pairs in front of places (head, row block, key block), head <= num_heads."""
        blocks, size = self.blocks, self.blocks.size
        if not blocks.num_heads:
            return np.zeros_like(heads)
        inner = np.minimum(heads, blocks.num_heads - 1)
        entries = inner // blocks.heads_per_entry
        s1, s2 = blocks.lengths_q[entries], blocks.lengths_kv[entries]
        begin = np.minimum(rows * size.rows, s1 * blocks.g)
        end = np.minimum(begin + size.rows, s1 * blocks.g)
        key = np.minimum(keys * size.keys, s2)
        zero = np.zeros_like(key)
        area = self._rows_before(entries, begin, zero, s2)
        area = (
            area + self._rows_before(entries, end, zero, key) - self._rows_before(entries, begin, zero, key)
        )
        area = (
            area
            + self.area_before[entries]
            + (inner - entries * blocks.heads_per_entry) * self.head_area[entries]
        )
        return np.where(heads < blocks.num_heads, area, self.total)

    def rows_of(self, entries: Int64Array) -> Pieces:
        """The row blocks of one head of each of these entries."""
        blocks = self.blocks
        rows = blocks.all_rows() if len(entries) == blocks.num_entries else blocks.rows_of(entries)
        num_rows = np.diff(rows.begin, append=len(rows.first))
        entry, begin = entries.repeat(num_rows), rows.begin.repeat(num_rows)
        row = np.arange(len(rows.first)) - begin
        done = rows.before[:-1] - rows.before[begin]
        pieces = Pieces(entry, row, rows.first, np.diff(rows.before), done, done)
        return self._with_areas(pieces, np.zeros_like(row), blocks.lengths_kv[entry])

    def parts_of(self, pieces: Pieces, step: int) -> Pieces:
        """The parts of row blocks when they are cut at every `step`-th key block."""
        keys = self.blocks.size.keys
        units = (pieces.key + pieces.width - 1) // step - pieces.key // step + 1
        of = np.arange(len(units)).repeat(units)
        unit = pieces.key[of] // step + np.arange(len(of)) - (np.cumsum(units) - units)[of]
        key = np.maximum(unit * step, pieces.key[of])
        stop = np.minimum((unit + 1) * step, (pieces.key + pieces.width)[of])
        done = pieces.done[of] + key - pieces.key[of]
        parts = Pieces(pieces.entry[of], pieces.row[of], key, stop - key, done, done)
        s2 = self.blocks.lengths_kv[parts.entry]
        return self._with_areas(parts, np.minimum(key * keys, s2), np.minimum(stop * keys, s2))

    def _with_areas(self, pieces: Pieces, key_start: Int64Array, key_stop: Int64Array) -> Pieces:
        size, entry = self.blocks.size, pieces.entry
        begin = pieces.row * size.rows
        end = np.minimum(begin + size.rows, self.blocks.lengths_q[entry] * self.blocks.g)
        area = self._rows_before(entry, end, key_start, key_stop)
        area = area - self._rows_before(entry, begin, key_start, key_stop)
        return pieces._replace(area=area).take(area > 0)

    def items(self, step: int | None) -> Items:
        """All pieces of all heads: whole row blocks, or parts cut at every `step`-th key block (kept)."""
        found = self._items.get(step)
        if found is None:
            found = self._items[step] = self._list_items(step)
        return found

    def _list_items(self, step: int | None) -> Items:
        blocks = self.blocks
        entries = np.arange(blocks.num_entries)
        pieces = self.rows_of(entries)
        if step is not None:
            pieces = self.parts_of(pieces, step)
        count = np.bincount(pieces.entry, minlength=blocks.num_entries)  # of one head
        copies = count * blocks.heads_per_entry
        entry = entries.repeat(copies)
        place = np.arange(len(entry)) - (np.cumsum(copies) - copies)[entry]
        head = place // count[entry]
        place += (np.cumsum(count) - count)[entry] - head * count[entry]
        done = np.full(len(entry) + 1, blocks.num_blocks, np.int64)
        done[:-1] = blocks.blocks_before[entry] + head * blocks.head_blocks[entry] + pieces.done[place]
        done[0] = 0  # blocks without a visible pair go with the piece behind or in front of them
        area = np.zeros(len(entry) + 1, np.int64)
        np.cumsum(pieces.area[place], out=area[1:])
        return Items(done, area)

    def nearest(self, wanted: Int64Array, step: int | None) -> Items:
        """Cuts between pieces next to the wanted areas (ascending), found in stages without a list of all."""
        blocks = self.blocks
        entry = self.area_before.searchsorted(wanted, "right") - 1
        rest = wanted - self.area_before[entry]
        head = rest // self.head_area[entry]
        rest -= head * self.head_area[entry]
        needed, which = np.unique(entry, return_inverse=True)
        pieces = self.rows_of(needed)
        before = np.cumsum(pieces.area) - pieces.area
        place = before.searchsorted(before[pieces.entry.searchsorted(entry)] + rest, "right") - 1
        rest -= before[place] - before[pieces.entry.searchsorted(entry)]
        if step is not None:
            touched, which = np.unique(place, return_inverse=True)
            pieces = self.parts_of(pieces.take(touched), step)
            before = np.cumsum(pieces.area) - pieces.area
            row_begin = np.flatnonzero(np.diff(pieces.row, prepend=-1) | np.diff(pieces.entry, prepend=-1))
            row_begin = before[row_begin[which.reshape(-1)]]
            place = before.searchsorted(row_begin + rest, "right") - 1
            rest -= before[place] - row_begin
        is_next = 2 * rest > pieces.area[place]
        done = blocks.blocks_before[entry] + head * blocks.head_blocks[entry] + pieces.done[place]
        done += is_next * pieces.width[place]
        area = wanted - rest + is_next * pieces.area[place]
        return Items(np.append(done, blocks.num_blocks), np.append(area, self.total))
