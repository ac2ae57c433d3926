"""Template BN2GS1S2: the general backward, persistent over the metadata's tile ranges (split.py).

- `accumulate_kernel`: walks the tiles of its range column by column. dK and dV of a column are summed on
  chip over the rows and added to the float32 accumulators once; dQ is added block by block. Runs between
  the zero and the cast pass (passes.py). Grid: the used cores.
- `columns_kernel`, `rows_kernel`: the deterministic form. A core owns key columns (all query heads of the
  group), then query rows; each is summed in a fixed order and written once. No atomics, and the bits do not
  depend on the number of cores. Runs after the zero pass on the outputs, which serves the padding.

With SWIZZLE (dense layouts, all cores busy) whole columns or rows are dealt to the cores in turn, so that
the cores work on the same head at the same time and find its tensors in L2; the ranges are not read then.
"""

import triton
import triton.language as tl

from .split import has_own_tiles, range_of_core, tile_grid
from .sums import column_sums, row_sum
from .tiles import (
    TD_B,
    TD_D,
    TD_DV,
    TD_G,
    TD_N1,
    TD_N2,
    TD_S1,
    TD_S2,
    TILE,
    add_tile,
    batch_lengths,
    key_view,
    query_view,
    read_int,
    read_scale,
    store_tile,
    total_rows,
)


@triton.jit
def add_column(
    q, k, v, dout, attn_out, lse, dlse, workspace, b, head, column, row_lo, row_hi,
    tiling, metadata, cu_q, cu_kv, used_q, used_kv,
    IS_TND: tl.constexpr, MASK: tl.constexpr, DA: tl.constexpr, DVA: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Add the rows [row_lo, row_hi) of one column of tiles of one query head to the accumulators."""
    s1, s2, _, _, token_q, token_kv = batch_lengths(b, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND)
    d = read_int(tiling, TD_D)
    dv = read_int(tiling, TD_DV)
    n2 = read_int(tiling, TD_N2)
    head_kv = head // read_int(tiling, TD_G)
    acc_dk = workspace + total_rows(tiling, cu_q, TD_S1, IS_TND) * read_int(tiling, TD_N1) * d
    acc_dv = acc_dk + total_rows(tiling, cu_kv, TD_S2, IS_TND) * n2 * d
    k_first, k_heads = key_view(b, head_kv, token_kv, tiling, IS_TND)
    for part in range(TILE // BN):
        first = column + part * BN
        sum_k = tl.zeros((BN, DA), tl.float32)
        sum_v = tl.zeros((BN, DVA), tl.float32)
        sum_k, sum_v = column_sums(
            q, k, v, dout, attn_out, lse, dlse, workspace, b, head, head_kv, first, row_lo, row_hi,
            sum_k, sum_v, s1, s2, token_q, token_kv, tiling, cu_q, IS_TND, MASK, DA, DVA, BM, BN, True,
        )  # fmt: skip
        add_tile(acc_dk, k_first, k_heads, first, s2, d, sum_k, BN, DA)
        add_tile(acc_dv, k_first, k_heads, first, s2, dv, sum_v, BN, DVA)


@triton.jit
def accumulate_kernel(
    q, k, v, dout, attn_out, lse, dlse, cu_q, cu_kv, used_q, used_kv, metadata, workspace, tiling,
    IS_TND: tl.constexpr, MASK: tl.constexpr, SWIZZLE: tl.constexpr,
    DA: tl.constexpr, DVA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add dQ, dK, dV to the float32 accumulators in `workspace`: dq (t1, n1, d), dk (t2, n2, d), dv (t2,
    n2, dv), each in the layout of its output, dq and dk without the scale.
    """
    core = tl.program_id(0)
    n1 = read_int(tiling, TD_N1)
    own = has_own_tiles(metadata, IS_TND)
    if SWIZZLE:
        o1, o2 = tile_grid(0, own, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND)
        for dealt in range(core, read_int(tiling, TD_B) * n1 * o2, tl.num_programs(0)):
            b = dealt // (n1 * o2)
            unit = dealt % (n1 * o2)
            add_column(
                q, k, v, dout, attn_out, lse, dlse, workspace, b, unit // o2, unit % o2 * TILE,
                0, o1 * TILE, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND, MASK, DA, DVA, BM, BN,
            )  # fmt: skip
    else:
        start, end, first, last, base = range_of_core(
            core, own, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND
        )
        for b in range(first, last):
            o1, o2 = tile_grid(b, own, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND)
            lo = tl.maximum(start - base, 0)
            hi = tl.minimum(end - base, n1 * o1 * o2)
            rows = tl.maximum(o1, 1)
            for unit in range(lo // rows, tl.cdiv(hi, rows)):
                row_lo = tl.maximum(lo - unit * rows, 0) * TILE
                row_hi = tl.minimum(hi - unit * rows, rows) * TILE
                add_column(
                    q, k, v, dout, attn_out, lse, dlse, workspace, b, unit // o2, unit % o2 * TILE,
                    row_lo, row_hi, tiling, metadata, cu_q, cu_kv, used_q, used_kv,
                    IS_TND, MASK, DA, DVA, BM, BN,
                )  # fmt: skip
            base += n1 * o1 * o2


@triton.jit
def write_column(
    q, k, v, dout, attn_out, lse, dlse, dk, dv, b, head_kv, column,
    tiling, metadata, cu_q, cu_kv, used_q, used_kv,
    IS_TND: tl.constexpr, MASK: tl.constexpr, DA: tl.constexpr, DVA: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write dK and dV of one column of tiles of one kv head, summed over its query heads in order."""
    s1, s2, _, _, token_q, token_kv = batch_lengths(b, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND)
    group = read_int(tiling, TD_G)
    k_first, k_heads = key_view(b, head_kv, token_kv, tiling, IS_TND)
    for part in range(TILE // BN):
        first = column + part * BN
        sum_k = tl.zeros((BN, DA), tl.float32)
        sum_v = tl.zeros((BN, DVA), tl.float32)
        for member in range(group):
            sum_k, sum_v = column_sums(
                q, k, v, dout, attn_out, lse, dlse, dk, b, head_kv * group + member, head_kv, first, 0, s1,
                sum_k, sum_v, s1, s2, token_q, token_kv, tiling, cu_q, IS_TND, MASK, DA, DVA, BM, BN, False,
            )  # fmt: skip
        store_tile(
            dk, k_first, k_heads, first, s2, read_int(tiling, TD_D), sum_k * read_scale(tiling), BN, DA
        )
        store_tile(dv, k_first, k_heads, first, s2, read_int(tiling, TD_DV), sum_v, BN, DVA)


@triton.jit
def columns_kernel(
    q, k, v, dout, attn_out, lse, dlse, cu_q, cu_kv, used_q, used_kv, metadata, dk, dv, tiling,
    IS_TND: tl.constexpr, MASK: tl.constexpr, SWIZZLE: tl.constexpr,
    DA: tl.constexpr, DVA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write dK and dV, deterministic: one core writes a column of tiles of one kv head."""
    core = tl.program_id(0)
    n1 = read_int(tiling, TD_N1)
    n2 = read_int(tiling, TD_N2)
    own = has_own_tiles(metadata, IS_TND)
    if SWIZZLE:
        _, o2 = tile_grid(0, own, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND)
        for dealt in range(core, read_int(tiling, TD_B) * n2 * o2, tl.num_programs(0)):
            b = dealt // (n2 * o2)
            unit = dealt % (n2 * o2)
            write_column(
                q, k, v, dout, attn_out, lse, dlse, dk, dv, b, unit // o2, unit % o2 * TILE,
                tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND, MASK, DA, DVA, BM, BN,
            )  # fmt: skip
    else:
        start, end, first, last, base = range_of_core(
            core, own, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND
        )
        for b in range(first, last):
            o1, o2 = tile_grid(b, own, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND)
            lo = tl.maximum(start - base, 0)
            hi = tl.minimum(end - base, n1 * o1 * o2)
            worth = tl.maximum(n1 // n2 * o1, 1)
            for unit in range(tl.cdiv(lo, worth), tl.cdiv(hi, worth)):
                write_column(
                    q, k, v, dout, attn_out, lse, dlse, dk, dv, b, unit // o2, unit % o2 * TILE,
                    tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND, MASK, DA, DVA, BM, BN,
                )  # fmt: skip
            base += n1 * o1 * o2


@triton.jit
def write_row(
    q, k, v, dout, attn_out, lse, dlse, dq, b, head, first_row,
    tiling, metadata, cu_q, cu_kv, used_q, used_kv,
    IS_TND: tl.constexpr, MASK: tl.constexpr, DA: tl.constexpr, DVA: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write dQ of one row of tiles of one query head."""
    s1, s2, _, slot_kv, token_q, token_kv = batch_lengths(
        b, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND
    )
    head_kv = head // read_int(tiling, TD_G)
    q_first, q_heads = query_view(b, head, token_q, tiling, IS_TND)
    for part in range(TILE // BM):
        row = first_row + part * BM
        total = row_sum(
            q, k, v, dout, attn_out, lse, dlse, q, q, b, head, head_kv, row, s1, s2, slot_kv,
            token_q, token_kv, tiling, cu_q, IS_TND, MASK, DA, DVA, BM, BN, False,
        )  # fmt: skip
        store_tile(dq, q_first, q_heads, row, s1, read_int(tiling, TD_D), total, BM, DA)


@triton.jit
def rows_kernel(
    q, k, v, dout, attn_out, lse, dlse, cu_q, cu_kv, used_q, used_kv, metadata, dq, tiling,
    IS_TND: tl.constexpr, MASK: tl.constexpr, SWIZZLE: tl.constexpr,
    DA: tl.constexpr, DVA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write dQ, deterministic: one core writes a row of tiles of one query head."""
    core = tl.program_id(0)
    n1 = read_int(tiling, TD_N1)
    own = has_own_tiles(metadata, IS_TND)
    if SWIZZLE:
        o1, _ = tile_grid(0, own, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND)
        for dealt in range(core, read_int(tiling, TD_B) * n1 * o1, tl.num_programs(0)):
            b = dealt // (n1 * o1)
            unit = dealt % (n1 * o1)
            write_row(
                q, k, v, dout, attn_out, lse, dlse, dq, b, unit // o1, unit % o1 * TILE,
                tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND, MASK, DA, DVA, BM, BN,
            )  # fmt: skip
    else:
        start, end, first, last, base = range_of_core(
            core, own, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND
        )
        for b in range(first, last):
            o1, o2 = tile_grid(b, own, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND)
            lo = tl.maximum(start - base, 0)
            hi = tl.minimum(end - base, n1 * o1 * o2)
            worth = tl.maximum(o2, 1)
            for unit in range(tl.cdiv(lo, worth), tl.cdiv(hi, worth)):
                write_row(
                    q, k, v, dout, attn_out, lse, dlse, dq, b, unit // o1, (o1 - 1 - unit % o1) * TILE,
                    tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND, MASK, DA, DVA, BM, BN,
                )  # fmt: skip
            base += n1 * o1 * o2
