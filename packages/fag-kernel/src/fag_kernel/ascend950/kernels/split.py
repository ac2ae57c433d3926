"""Which tiles a core owns: the ranges of the metadata's FAG block, in tiles, key columns and query rows.

The tiles of a batch entry are numbered (query head * o2 + column) * o1 + row, entry after entry, and core i
owns the numbers [start, end). For the deterministic kernels the same range, scaled, gives whole key columns
(kv head * o2 + column, each worth g * o1 numbers) or whole query rows (query head * o1 + row, each worth o2
numbers): the ranges follow each other without holes, so each column and each row has exactly one owner.
Rows are counted from the last to the first within a head: the tiles of the rows of a causal mask then grow
in the same direction as those of the columns, for which the ranges were balanced.
"""

import triton
import triton.language as tl

from .tiles import (
    FLAG_USED_KV,
    FLAG_USED_Q,
    MD_FLAGS,
    MD_GRAD_OFFSET,
    TD_B,
    TD_N1,
    TILE,
    batch_lengths,
    read_int,
)

MD_BATCH_SLOTS = tl.constexpr(11)
FAG_O1 = tl.constexpr(3)
FAG_O2 = tl.constexpr(4)
FAG_LAYOUT = tl.constexpr(5)
FAG_RANGES = tl.constexpr(8)
LAYOUT_WORD_TND = tl.constexpr(4)


@triton.jit
def core_range(metadata, core):
    """(first tile, end tile, batch entry of the first tile) of a core."""
    fag = metadata + tl.load(metadata + MD_GRAD_OFFSET)
    slots = tl.load(metadata + MD_BATCH_SLOTS) >> 16
    start = tl.load(fag + FAG_RANGES + core)
    end = tl.load(fag + FAG_RANGES + slots + core)
    batch = tl.load(fag + FAG_RANGES + 2 * slots + core)
    return start, end, batch


@triton.jit
def has_own_tiles(metadata, IS_TND: tl.constexpr):
    """True if each batch entry has the tiles of its own lengths, False if all have those of the maxima.

    A packed batch of equal lengths is numbered like a dense one; the layout word tells.
    """
    if IS_TND:
        fag = metadata + tl.load(metadata + MD_GRAD_OFFSET)
        own = tl.load(fag + FAG_LAYOUT) == LAYOUT_WORD_TND
    else:
        own = (tl.load(metadata + MD_FLAGS) & (FLAG_USED_Q | FLAG_USED_KV)) != 0
    return own


@triton.jit
def tile_grid(b, own, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND: tl.constexpr):
    """(o1, o2): rows and columns of tiles that the numbering gives batch entry `b`."""
    fag = metadata + tl.load(metadata + MD_GRAD_OFFSET)
    o1 = tl.load(fag + FAG_O1)
    o2 = tl.load(fag + FAG_O2)
    if own:
        s1, s2, _, _, _, _ = batch_lengths(b, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND)
        o1 = tl.cdiv(s1, TILE)
        o2 = tl.cdiv(s2, TILE)
    return o1, o2


@triton.jit
def range_of_core(
    core, own, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND: tl.constexpr
):  # fmt: skip
    """(first tile, end tile, first batch entry, end entry, number of the first entry's first tile) of a
    core; the entries are those that its tiles can lie in.
    """
    start, end, batch = core_range(metadata, core)
    n1 = read_int(tiling, TD_N1)
    last = read_int(tiling, TD_B)
    o1, o2 = tile_grid(0, own, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND)
    per_entry = tl.maximum(n1 * o1 * o2, 1)
    first = start // per_entry
    base = first * per_entry
    if own:
        first = batch
        base = 0
        for b in range(batch):
            o1, o2 = tile_grid(b, own, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND)
            base += n1 * o1 * o2
    else:
        last = tl.minimum(last, tl.cdiv(end, per_entry))
    return start, end, first, last, base
