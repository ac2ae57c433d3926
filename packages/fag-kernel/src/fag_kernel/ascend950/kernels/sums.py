"""The gradient of one block of scores, and its sums along a key column and along a query row.

    S = scale * Q K^T    P = exp(S - lse)    dP = dO V^T    dS = P * (dP - sfmg + dlse)
    dV = P^T dO          dQ = scale * dS K   dK = scale * dS^T Q

P and dS are rounded to the type of the operands for the matrix products; every sum is float32. Blocks
outside the mask are not visited, blocks inside it are not masked. Rows that see no key and keys that no row
sees are read as zeros, so whatever stands there (and whatever the lse and dlse of such a row are)
contributes nothing.
"""

import triton
import triton.language as tl

from .tiles import (
    FLAG_DLSE,
    TD_D,
    TD_DV,
    TD_LAUNCH_FLAGS,
    add_tile,
    columns_of_rows,
    key_view,
    load_tile,
    lse_row,
    mask_shifts,
    query_view,
    read_int,
    read_scale,
    rows_of_columns,
    seen_keys,
    seen_rows,
    store_tile,
)


@triton.jit
def load_dlse(dlse, lse_first, row, row_lo, row_hi, tiling, BM: tl.constexpr):
    """The upstream gradient of lse of BM rows from `row` on; zero outside [row_lo, row_hi), and everywhere,
    without a read, if the call has none.

    The flag empties the range of rows instead of entering the mask: the compiler keeps one block move. The
    rows before row_lo exist and are read: triton-ascend 3.2.0 crashes on this load with the mask of lse's.
    """
    has_dlse = (read_int(tiling, TD_LAUNCH_FLAGS) & FLAG_DLSE) != 0
    offs = row + tl.arange(0, BM)
    dlse_rows = tl.load(dlse + lse_first + offs, mask=offs < tl.where(has_dlse, row_hi, 0), other=0.0)
    return tl.where(offs >= row_lo, dlse_rows, 0.0)


@triton.jit
def row_products(do_tile, out_tile):
    """The row sums of dout * attn_out, float32: sfmg."""
    return tl.sum(do_tile.to(tl.float32) * out_tile.to(tl.float32), 1)


@triton.jit
def load_query_block(
    q, dout, attn_out, lse, dlse, q_first, q_heads, lse_first, row, row_lo, row_hi, d, dv, tiling,
    BM: tl.constexpr, DA: tl.constexpr, DVA: tl.constexpr,
):  # fmt: skip
    """(q, dout, lse, sfmg - dlse) of BM rows from `row` on; rows outside [row_lo, row_hi) are zero.

    sfmg is made here each time a query block is read: the workspace has no room for it.
    """
    q_tile = load_tile(q, q_first, q_heads, row, row_lo, row_hi, d, BM, DA)
    do_tile = load_tile(dout, q_first, q_heads, row, row_lo, row_hi, dv, BM, DVA)
    out_tile = load_tile(attn_out, q_first, q_heads, row, row_lo, row_hi, dv, BM, DVA)
    offs = row + tl.arange(0, BM)
    keep = (offs >= row_lo) & (offs < row_hi)
    lse_rows = tl.load(lse + lse_first + offs, mask=keep, other=0.0)
    row_term = row_products(do_tile, out_tile) - load_dlse(dlse, lse_first, row, row_lo, row_hi, tiling, BM)
    return q_tile, do_tile, lse_rows, row_term


@triton.jit
def probabilities(
    q_tile, k_tile, do_tile, v_tile, lse_rows, row_term, offs_m, offs_n, s1, s2, shift_lo, shift_hi, scale,
    is_inner
):  # fmt: skip
    """(P, dS) of one block in the type of the operands; exactly zero where a row does not see a column.

    The exponent is clamped at 0 (P never exceeds 1). The mask is applied only where the block is not inner:
    a branch on a scalar, so inner blocks pay nothing.
    """
    p = tl.exp(tl.minimum(tl.dot(q_tile, tl.trans(k_tile)) * scale - lse_rows[:, None], 0.0))
    ds = p * (tl.dot(do_tile, tl.trans(v_tile)) - row_term[:, None])
    if is_inner == 0:
        shift = offs_n[None, :] - offs_m[:, None]
        keep = (shift >= shift_lo) & (shift <= shift_hi) & (offs_m[:, None] < s1) & (offs_n[None, :] < s2)
        p = tl.where(keep, p, 0.0)
        ds = tl.where(keep, ds, 0.0)
    return p.to(k_tile.dtype), ds.to(k_tile.dtype)


@triton.jit
def column_sums(
    q, k, v, dout, attn_out, lse, dlse, dq, b, head, head_kv, column, row_lo, row_hi, acc_k, acc_v, s1, s2,
    token_q, token_kv, tiling, cu_q,
    IS_TND: tl.constexpr, MASK: tl.constexpr, DA: tl.constexpr, DVA: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, ADD_DQ: tl.constexpr,
):  # fmt: skip
    """(acc_k, acc_v) plus query head `head`'s part of dK (without the scale) and dV of the BN keys from
    `column` on.

    Only the rows [row_lo, row_hi) take part; both are multiples of BM or beyond s1. With ADD_DQ their part of
    dQ (without the scale) is added to the float32 accumulator `dq`.
    """
    d = read_int(tiling, TD_D)
    dv = read_int(tiling, TD_DV)
    scale = read_scale(tiling)
    shift_lo, shift_hi = mask_shifts(s1, s2, tiling, MASK)
    begin, end, inner_begin, inner_end = rows_of_columns(column, BN, s1, s2, shift_lo, shift_hi)
    begin = tl.maximum(begin, row_lo)
    end = tl.minimum(end, row_hi)
    seen_begin, seen_end = seen_rows(s1, s2, shift_lo, shift_hi)
    key_begin, key_end = seen_keys(s1, s2, shift_lo, shift_hi)
    q_first, q_heads = query_view(b, head, token_q, tiling, IS_TND)
    k_first, k_heads = key_view(b, head_kv, token_kv, tiling, IS_TND)
    lse_first = lse_row(b, head, token_q, tiling, cu_q, IS_TND)
    offs_n = column + tl.arange(0, BN)
    k_tile = load_tile(k, k_first, k_heads, column, key_begin, key_end, d, BN, DA)
    v_tile = load_tile(v, k_first, k_heads, column, key_begin, key_end, dv, BN, DVA)
    for block in range(begin // BM, tl.cdiv(end, BM)):
        row = block * BM
        offs_m = row + tl.arange(0, BM)
        q_tile, do_tile, lse_rows, row_term = load_query_block(
            q, dout, attn_out, lse, dlse, q_first, q_heads, lse_first, row, seen_begin, seen_end, d, dv,
            tiling, BM, DA, DVA,
        )  # fmt: skip
        is_inner = ((row >= inner_begin) & (row + BM <= inner_end)).to(tl.int32)
        p, ds = probabilities(
            q_tile, k_tile, do_tile, v_tile, lse_rows, row_term, offs_m, offs_n, s1, s2, shift_lo, shift_hi,
            scale, is_inner,
        )  # fmt: skip
        acc_v = tl.dot(tl.trans(p), do_tile, acc_v)
        acc_k = tl.dot(tl.trans(ds), q_tile, acc_k)
        if ADD_DQ:
            add_tile(dq, q_first, q_heads, row, s1, d, tl.dot(ds, k_tile), BM, DA)
    return acc_k, acc_v


@triton.jit
def row_sum(
    q, k, v, dout, attn_out, lse, dlse, dk, dv, b, head, head_kv, row, s1, s2, slot_kv, token_q, token_kv,
    tiling, cu_q,
    IS_TND: tl.constexpr, MASK: tl.constexpr, DA: tl.constexpr, DVA: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, STORE_KV: tl.constexpr,
):  # fmt: skip
    """Sum dQ (scaled, float32) of the BM query rows from `row` on, summed over their keys in ascending order.

    With STORE_KV the caller knows that these are all rows of the only query head: dK and dV of every key of
    the slot are written on the way, so each product is made once.
    """
    d = read_int(tiling, TD_D)
    dv_width = read_int(tiling, TD_DV)
    scale = read_scale(tiling)
    shift_lo, shift_hi = mask_shifts(s1, s2, tiling, MASK)
    begin, end, inner_begin, inner_end = columns_of_rows(row, BM, s1, s2, shift_lo, shift_hi)
    if STORE_KV:
        begin = s1 * 0
        end = slot_kv
    seen_begin, seen_end = seen_rows(s1, s2, shift_lo, shift_hi)
    key_begin, key_end = seen_keys(s1, s2, shift_lo, shift_hi)
    q_first, q_heads = query_view(b, head, token_q, tiling, IS_TND)
    k_first, k_heads = key_view(b, head_kv, token_kv, tiling, IS_TND)
    lse_first = lse_row(b, head, token_q, tiling, cu_q, IS_TND)
    offs_m = row + tl.arange(0, BM)
    q_tile, do_tile, lse_rows, row_term = load_query_block(
        q, dout, attn_out, lse, dlse, q_first, q_heads, lse_first, row, seen_begin, seen_end, d, dv_width,
        tiling, BM, DA, DVA,
    )  # fmt: skip
    acc = tl.zeros((BM, DA), tl.float32)
    for block in range(begin // BN, tl.cdiv(end, BN)):
        column = block * BN
        offs_n = column + tl.arange(0, BN)
        k_tile = load_tile(k, k_first, k_heads, column, key_begin, key_end, d, BN, DA)
        v_tile = load_tile(v, k_first, k_heads, column, key_begin, key_end, dv_width, BN, DVA)
        is_inner = ((column >= inner_begin) & (column + BN <= inner_end)).to(tl.int32)
        p, ds = probabilities(
            q_tile, k_tile, do_tile, v_tile, lse_rows, row_term, offs_m, offs_n, s1, s2, shift_lo, shift_hi,
            scale, is_inner,
        )  # fmt: skip
        acc = tl.dot(ds, k_tile, acc)
        if STORE_KV:
            store_tile(dv, k_first, k_heads, column, slot_kv, dv_width, tl.dot(tl.trans(p), do_tile), BN, DVA)
            store_tile(dk, k_first, k_heads, column, slot_kv, d, tl.dot(tl.trans(ds), q_tile) * scale, BN, DA)
    return acc * scale
