"""Tile mathematics shared by every Ascend 950 kernel: what a core reads from the host, where a tile lies,
what it sees.

One place for the words of the tiling data and of the metadata, the view parameters, the lengths of a batch
entry, the visible range of the mask, and the loads and stores of a tile. sums.py adds the mathematics of
the gradient, split.py the ranges of the cores; the kernels proper (bn2gs1s2.py, bn2.py, forward.py,
passes.py) say who owns what and where it goes.

Conventions of every function here:
- `s1`, `s2` are the real (effective) lengths of the batch entry, int32; `slot_q`, `slot_kv` the rows that
  the tensor holds for it. Rows between the two are padding: never read, written as zero.
- A query row i sees the keys [i + shift_lo, i + shift_hi], both ends included and clipped to [0, s2).
- Element offsets of a tensor's base are int64, offsets inside a tile int32.
- An optional tensor that the call lacks is passed as any valid address: the flags in metadata word 9 say
  that it must not be read.
"""

import triton
import triton.language as tl

# Tiling data: the plan's 24 words of 8 bytes, in the order of spec/host-tiling.md, then those of the launch.
TD_B = tl.constexpr(0)
TD_S1 = tl.constexpr(1)
TD_S2 = tl.constexpr(2)
TD_N1 = tl.constexpr(3)
TD_N2 = tl.constexpr(4)
TD_D = tl.constexpr(5)
TD_DV = tl.constexpr(6)
TD_SCALE = tl.constexpr(7)  # float32 in the low half, padding above
TD_G = tl.constexpr(8)
TD_D2_Q = tl.constexpr(10)
TD_B0_Q = tl.constexpr(11)
TD_D2_KV = tl.constexpr(13)
TD_B0_KV = tl.constexpr(14)
TD_N0 = tl.constexpr(15)
TD_N2_COEF = tl.constexpr(16)
TD_MASK_MODE = tl.constexpr(17)
TD_WIN_LEFT = tl.constexpr(18)
TD_WIN_RIGHT = tl.constexpr(19)
TD_LAUNCH_FLAGS = tl.constexpr(24)  # catalog.launch_tiling writes it
FLAG_DLSE = tl.constexpr(1)  # there is a gradient through lse

# Metadata head (spec/metadata-format.md; words 8..15 are this project's). The words of the FAG block are in
# split.py.
MD_GRAD_OFFSET = tl.constexpr(7)
MD_FLAGS = tl.constexpr(9)
FLAG_USED_Q = tl.constexpr(1 << 20)
FLAG_USED_KV = tl.constexpr(1 << 21)

TILE = tl.constexpr(128)  # rows and columns of a tile of the metadata
MASK_NONE = tl.constexpr(0)
MASK_CAUSAL = tl.constexpr(3)
MASK_WINDOW = tl.constexpr(4)
FAR = tl.constexpr(1 << 30)  # beyond every sequence; sums of two stay inside int32


@triton.jit
def read_int(tiling, word):
    """Tiling data word as int32: every count but an element count fits."""
    return tl.load(tiling + word).to(tl.int32)


@triton.jit
def read_scale(tiling):
    """The softmax scale: the low half of its word, whose high half is padding."""
    return tl.load(tiling + TD_SCALE).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def batch_lengths(b, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND: tl.constexpr):
    """(s1, s2, slot_q, slot_kv, first query token, first key token) of batch entry `b`; tokens only for
    TND.
    """
    if IS_TND:
        token_q = tl.load(cu_q + b)
        token_kv = tl.load(cu_kv + b)
        slot_q = tl.load(cu_q + b + 1) - token_q
        slot_kv = tl.load(cu_kv + b + 1) - token_kv
    else:
        token_q = 0
        token_kv = 0
        slot_q = read_int(tiling, TD_S1)
        slot_kv = read_int(tiling, TD_S2)
    flags = tl.load(metadata + MD_FLAGS)
    s1 = slot_q
    s2 = slot_kv
    if (flags & FLAG_USED_Q) != 0:
        s1 = tl.load(used_q + b)
    if (flags & FLAG_USED_KV) != 0:
        s2 = tl.load(used_kv + b)
    return s1, s2, slot_q, slot_kv, token_q, token_kv


@triton.jit
def head_view(
    b, head, token, tiling,
    HEADS: tl.constexpr, ROWS: tl.constexpr, D2: tl.constexpr, B0: tl.constexpr, IS_TND: tl.constexpr,
):  # fmt: skip
    """(first row as int64, heads per row) of a head: element (row, e) of a tensor of width w lies at (first +
    row * heads) * w + e. The constants are the words of the tiling data that say so.
    """
    if IS_TND:
        heads = read_int(tiling, HEADS)
        first = token.to(tl.int64) * heads + head
    else:
        heads = read_int(tiling, D2)
        outer = b * tl.load(tiling + B0) + head * tl.load(tiling + TD_N0)
        first = outer * tl.load(tiling + ROWS) * heads + head * tl.load(tiling + TD_N2_COEF)
    return first, heads


@triton.jit
def query_view(b, head, token, tiling, IS_TND: tl.constexpr):
    """head_view of query head `head`: q, dout, attn_out, dq and the float32 accumulator of dq."""
    return head_view(b, head, token, tiling, TD_N1, TD_S1, TD_D2_Q, TD_B0_Q, IS_TND)


@triton.jit
def key_view(b, head, token, tiling, IS_TND: tl.constexpr):
    """head_view of key-value head `head`: k, v, dk, dv and their accumulators."""
    return head_view(b, head, token, tiling, TD_N2, TD_S2, TD_D2_KV, TD_B0_KV, IS_TND)


@triton.jit
def lse_row(b, head, token, tiling, cu_q, IS_TND: tl.constexpr):
    """First element (int64) of the lse of one query head: (b, n1, s1), or (n1, t1) for TND."""
    if IS_TND:
        first = head * tl.load(cu_q + read_int(tiling, TD_B)).to(tl.int64) + token
    else:
        first = (b * tl.load(tiling + TD_N1) + head) * tl.load(tiling + TD_S1)
    return first


@triton.jit
def total_rows(tiling, cu, ROWS: tl.constexpr, IS_TND: tl.constexpr):
    """Rows per head (int64) of q with cu_q and TD_S1: b * s1, or t1; of k with cu_kv and TD_S2."""
    if IS_TND:
        rows = tl.load(cu + read_int(tiling, TD_B)).to(tl.int64)
    else:
        rows = tl.load(tiling + TD_B) * tl.load(tiling + ROWS)
    return rows


@triton.jit
def mask_shifts(s1, s2, tiling, MASK: tl.constexpr):
    """(shift_lo, shift_hi) of the mask, aligned bottom-right, int32 within +-FAR.

    Windows go to 2^31 - 1 and -1 means unbounded: the sums are made in int64 and cut to +-FAR, which lies
    beyond every row and column.
    """
    if MASK == MASK_NONE:
        shift_lo = s1 * 0 - FAR
        shift_hi = s1 * 0 + FAR
    elif MASK == MASK_CAUSAL:
        shift_lo = s1 * 0 - FAR
        shift_hi = s2 - s1
    else:
        offset = (s2 - s1).to(tl.int64)
        left = tl.load(tiling + TD_WIN_LEFT)
        right = tl.load(tiling + TD_WIN_RIGHT)
        low = tl.where(left < 0, -FAR, tl.maximum(offset - left, -FAR))
        high = tl.where(right < 0, FAR, tl.minimum(offset + right, FAR))
        shift_lo = low.to(tl.int32)
        shift_hi = high.to(tl.int32)
    return shift_lo, shift_hi


@triton.jit
def columns_of_rows(first, width, s1, s2, shift_lo, shift_hi):
    """Columns that meet the rows [first, first + width): (begin, end, inner_begin, inner_end).

    [begin, end) are seen by at least one of the rows that exist, [inner_begin, inner_end) by all `width` of
    them; the inner range is empty where a row lies beyond s1.
    """
    last = tl.minimum(first + width, s1) - 1
    begin = tl.maximum(first + shift_lo, 0)
    end = tl.minimum(last + shift_hi + 1, s2)
    inner_begin = tl.maximum(last + shift_lo, 0)
    inner_end = tl.minimum(first + shift_hi + 1, s2)
    inner_end = tl.where(first + width <= s1, inner_end, 0)
    end = tl.where(last >= first, end, 0)
    return begin, end, inner_begin, inner_end


@triton.jit
def rows_of_columns(first, width, s1, s2, shift_lo, shift_hi):
    """Rows that meet the columns [first, first + width): column j meets the rows [j - hi, j - lo]."""
    return columns_of_rows(first, width, s2, s1, -shift_hi, -shift_lo)


@triton.jit
def seen_rows(s1, s2, shift_lo, shift_hi):
    """Rows [begin, end) that see a key; begin <= end, for a block move has the difference as its size."""
    begin = tl.maximum(-shift_hi, 0)
    end = tl.minimum(s1, tl.maximum(s2 - shift_lo, 0))
    return begin, tl.where(s2 > 0, end, begin)


@triton.jit
def seen_keys(s1, s2, shift_lo, shift_hi):
    """Keys [begin, end) that a row sees."""
    return seen_rows(s2, s1, -shift_hi, -shift_lo)


@triton.jit
def tile_address(base, first, heads, row, width, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Addresses (SIZE, PAD) of the rows from `row` on.

    int64 up to the first element: a sequence may have more elements than int32 counts, a block has not.
    """
    start = (first + heads.to(tl.int64) * row) * width
    return base + start + tl.arange(0, SIZE)[:, None] * (heads * width) + tl.arange(0, PAD)[None, :]


@triton.jit
def load_tile(
    base, first, heads, row, limit_lo, limit_hi, width, SIZE: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    """SIZE rows from `row` on, zero outside [limit_lo, limit_hi), of a tensor of `width` columns, padded with
    zeros to PAD columns.
    """
    offs = row + tl.arange(0, SIZE)
    keep = (offs[:, None] >= limit_lo) & (offs[:, None] < limit_hi) & (tl.arange(0, PAD)[None, :] < width)
    return tl.load(tile_address(base, first, heads, row, width, SIZE, PAD), mask=keep, other=0.0)


@triton.jit
def store_tile(base, first, heads, row, limit, width, value, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Write those of SIZE rows from `row` on that lie below `limit`, rounded to the type of the tensor."""
    keep = ((row + tl.arange(0, SIZE))[:, None] < limit) & (tl.arange(0, PAD)[None, :] < width)
    at = tile_address(base, first, heads, row, width, SIZE, PAD)
    tl.store(at, value.to(base.dtype.element_ty), mask=keep)


@triton.jit
def add_tile(base, first, heads, row, limit, width, value, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Add those of SIZE rows from `row` on that lie below `limit` to a float32 accumulator, atomically."""
    keep = ((row + tl.arange(0, SIZE))[:, None] < limit) & (tl.arange(0, PAD)[None, :] < width)
    tl.atomic_add(tile_address(base, first, heads, row, width, SIZE, PAD), value, mask=keep)
