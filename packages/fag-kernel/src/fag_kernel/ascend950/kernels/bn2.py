"""Template BN2: a core owns whole (b, n2) heads, so nothing is summed across cores: no atomics, no
accumulators in memory.

The same kernels serve the accumulate and the deterministic form. Dense layouts, n1 = n2.

- `bn2_kernel`, one tile a head (s1 and s2 up to 128): BM = 128 query rows stay on chip while the keys
  stream by; dK and dV of a block of keys are complete after one step, dQ after the last. Five matrix
  products per block, each made once.
- `bn2_columns_kernel`, `bn2_rows_kernel`, several tiles a head (s1 or s2 up to 640): dK and dV column by
  column, then dQ row by row. The scores are made twice, seven products per block: dQ of a head in float32
  (320 KiB) does not fit on chip. Two kernels, because one needs more than the 512 KiB of L1 for the buffers
  of both.

NEED_ZERO: some row or column of tiles has no visible tile. The outputs were cleared by the zero pass, and
such lines are left alone.
"""

import triton
import triton.language as tl

from .split import FAG_O1, FAG_O2, core_range
from .sums import column_sums, row_sum
from .tiles import (
    MD_GRAD_OFFSET,
    TD_D,
    TD_DV,
    TD_N1,
    batch_lengths,
    columns_of_rows,
    key_view,
    mask_shifts,
    query_view,
    read_int,
    read_scale,
    rows_of_columns,
    store_tile,
)


@triton.jit
def write_head_columns(
    q, k, v, dout, attn_out, lse, dlse, dk, dv, b, head, s1, s2, tiling,
    MASK: tl.constexpr, NEED_ZERO: tl.constexpr, DA: tl.constexpr, DVA: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write dK and dV of a head, BN keys at a time."""
    shift_lo, shift_hi = mask_shifts(s1, s2, tiling, MASK)
    k_first, k_heads = key_view(b, head, 0, tiling, False)
    for block in range(tl.cdiv(s2, BN)):
        column = block * BN
        begin, end, _, _ = rows_of_columns(column, BN, s1, s2, shift_lo, shift_hi)
        sum_k = tl.zeros((BN, DA), tl.float32)
        sum_v = tl.zeros((BN, DVA), tl.float32)
        sum_k, sum_v = column_sums(
            q, k, v, dout, attn_out, lse, dlse, dk, b, head, head, column, 0, s1, sum_k, sum_v, s1, s2,
            0, 0, tiling, tiling, False, MASK, DA, DVA, BM, BN, False,
        )  # fmt: skip
        limit = s2
        if NEED_ZERO:
            limit = tl.where(begin < end, s2, 0)
        store_tile(
            dk, k_first, k_heads, column, limit, read_int(tiling, TD_D), sum_k * read_scale(tiling), BN, DA
        )
        store_tile(dv, k_first, k_heads, column, limit, read_int(tiling, TD_DV), sum_v, BN, DVA)


@triton.jit
def write_head_rows(
    q, k, v, dout, attn_out, lse, dlse, dq, b, head, s1, s2, tiling,
    MASK: tl.constexpr, NEED_ZERO: tl.constexpr, DA: tl.constexpr, DVA: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write dQ of a head, BM rows at a time."""
    shift_lo, shift_hi = mask_shifts(s1, s2, tiling, MASK)
    q_first, q_heads = query_view(b, head, 0, tiling, False)
    for block in range(tl.cdiv(s1, BM)):
        row = block * BM
        begin, end, _, _ = columns_of_rows(row, BM, s1, s2, shift_lo, shift_hi)
        total = row_sum(
            q, k, v, dout, attn_out, lse, dlse, q, q, b, head, head, row, s1, s2, s2, 0, 0,
            tiling, tiling, False, MASK, DA, DVA, BM, BN, False,
        )  # fmt: skip
        limit = s1
        if NEED_ZERO:
            limit = tl.where(begin < end, s1, 0)
        store_tile(dq, q_first, q_heads, row, limit, read_int(tiling, TD_D), total, BM, DA)


@triton.jit
def heads_of_core(metadata, MULTI_BLOCK: tl.constexpr):
    """Heads b * n1 + head [begin, end) of this core: its tile range, which holds whole heads, over the
    tiles of a head.
    """
    start, end, _ = core_range(metadata, tl.program_id(0))
    if MULTI_BLOCK:
        fag = metadata + tl.load(metadata + MD_GRAD_OFFSET)
        tiles = tl.maximum(tl.load(fag + FAG_O1) * tl.load(fag + FAG_O2), 1)
        start = start // tiles
        end = end // tiles
    return start, end


@triton.jit
def bn2_kernel(
    q, k, v, dout, attn_out, lse, dlse, used_q, used_kv, metadata, dq, dk, dv, tiling,
    MASK: tl.constexpr, DA: tl.constexpr, DVA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write dQ, dK, dV of the core's heads, all rows of their slots. Grid: the used cores."""
    n1 = read_int(tiling, TD_N1)
    first, last = heads_of_core(metadata, False)
    for unit in range(first, last):
        b = unit // n1
        head = unit % n1
        s1, s2, slot_q, slot_kv, _, _ = batch_lengths(
            b, tiling, metadata, used_q, used_kv, used_q, used_kv, False
        )
        q_first, q_heads = query_view(b, head, 0, tiling, False)
        total = row_sum(
            q, k, v, dout, attn_out, lse, dlse, dk, dv, b, head, head, 0, s1, s2, slot_kv, 0, 0,
            tiling, tiling, False, MASK, DA, DVA, BM, BN, True,
        )  # fmt: skip
        store_tile(dq, q_first, q_heads, 0, slot_q, read_int(tiling, TD_D), total, BM, DA)


@triton.jit
def bn2_columns_kernel(
    q, k, v, dout, attn_out, lse, dlse, used_q, used_kv, metadata, dk, dv, tiling,
    MASK: tl.constexpr, NEED_ZERO: tl.constexpr, DA: tl.constexpr, DVA: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write dK, dV of the core's heads. Grid: the used cores."""
    n1 = read_int(tiling, TD_N1)
    first, last = heads_of_core(metadata, True)
    for unit in range(first, last):
        b = unit // n1
        s1, s2, _, _, _, _ = batch_lengths(b, tiling, metadata, used_q, used_kv, used_q, used_kv, False)
        write_head_columns(
            q, k, v, dout, attn_out, lse, dlse, dk, dv, b, unit % n1, s1, s2, tiling,
            MASK, NEED_ZERO, DA, DVA, BM, BN,
        )  # fmt: skip


@triton.jit
def bn2_rows_kernel(
    q, k, v, dout, attn_out, lse, dlse, used_q, used_kv, metadata, dq, tiling,
    MASK: tl.constexpr, NEED_ZERO: tl.constexpr, DA: tl.constexpr, DVA: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write dQ of the core's heads. Grid: the used cores."""
    n1 = read_int(tiling, TD_N1)
    first, last = heads_of_core(metadata, True)
    for unit in range(first, last):
        b = unit // n1
        s1, s2, _, _, _, _ = batch_lengths(b, tiling, metadata, used_q, used_kv, used_q, used_kv, False)
        write_head_rows(
            q, k, v, dout, attn_out, lse, dlse, dq, b, unit % n1, s1, s2, tiling,
            MASK, NEED_ZERO, DA, DVA, BM, BN,
        )  # fmt: skip
