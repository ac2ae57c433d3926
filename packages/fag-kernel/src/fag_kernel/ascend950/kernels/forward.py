"""The forward: attn_out and lse by the online softmax, rows of tiles dealt to the cores in turn.

A unit is 128 query rows of one query head, padding rows included (out 0, lse -inf): every output element
has one owner, so the result does not depend on the number of cores. The units of a head go from the last
row to the first: under a causal mask the long ones come first. The forward ranges of the metadata are not
used: they merge the query heads of a group into the rows and cut rows across cores, which pays at decode,
not in training; only the words that say which lengths exist are read.
"""

import triton
import triton.language as tl

from .tiles import (
    TD_B,
    TD_D,
    TD_DV,
    TD_G,
    TD_N1,
    TILE,
    batch_lengths,
    columns_of_rows,
    key_view,
    load_tile,
    lse_row,
    mask_shifts,
    query_view,
    read_int,
    read_scale,
    seen_keys,
    store_tile,
)


@triton.jit
def write_rows(
    q, k, v, sinks, out, lse, b, head, row, tiling, metadata, cu_q, cu_kv, used_q, used_kv,
    IS_TND: tl.constexpr, MASK: tl.constexpr, HAS_SINKS: tl.constexpr,
    DA: tl.constexpr, DVA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """attn_out and lse of the BM query rows from `row` on of one head."""
    s1, s2, slot_q, _, token_q, token_kv = batch_lengths(
        b, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND
    )
    d = read_int(tiling, TD_D)
    dv = read_int(tiling, TD_DV)
    scale = read_scale(tiling)
    head_kv = head // read_int(tiling, TD_G)
    shift_lo, shift_hi = mask_shifts(s1, s2, tiling, MASK)
    begin, end, inner_begin, inner_end = columns_of_rows(row, BM, s1, s2, shift_lo, shift_hi)
    key_begin, key_end = seen_keys(s1, s2, shift_lo, shift_hi)
    q_first, q_heads = query_view(b, head, token_q, tiling, IS_TND)
    k_first, k_heads = key_view(b, head_kv, token_kv, tiling, IS_TND)
    offs_m = row + tl.arange(0, BM)
    q_tile = load_tile(q, q_first, q_heads, row, 0, s1, d, BM, DA)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DVA), tl.float32)
    for block in range(begin // BN, tl.cdiv(end, BN)):
        column = block * BN
        offs_n = column + tl.arange(0, BN)
        k_tile = load_tile(k, k_first, k_heads, column, key_begin, key_end, d, BN, DA)
        v_tile = load_tile(v, k_first, k_heads, column, key_begin, key_end, dv, BN, DVA)
        s = tl.dot(q_tile, tl.trans(k_tile)) * scale
        is_inner = ((column >= inner_begin) & (column + BN <= inner_end)).to(tl.int32)
        if is_inner == 0:
            shift = offs_n[None, :] - offs_m[:, None]
            keep = (shift >= shift_lo) & (shift <= shift_hi) & (offs_m[:, None] < s1) & (offs_n[None, :] < s2)
            s = tl.where(keep, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        # A row that has seen nothing yet has top = -inf; exp(-inf - 0) = 0 where exp(-inf + inf) would be
        # NaN.
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep_part = tl.exp(top - pivot)
        p = tl.exp(s - pivot[:, None])
        total = total * keep_part + tl.sum(p, 1)
        acc = acc * keep_part[:, None] + tl.dot(p.to(v_tile.dtype), v_tile)
        top = new_top
    live = total
    if HAS_SINKS:
        # The sink is one more logit of every row, without a value. At +inf it takes all the probability.
        sink = tl.load(sinks + head)
        all_taken = sink == float("inf")
        sink_finite = tl.where(all_taken, 0.0, sink)
        new_top = tl.maximum(top, sink_finite)
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep_part = tl.exp(top - pivot)
        total = total * keep_part + tl.exp(sink_finite - pivot)
        acc = acc * keep_part[:, None]
        top = new_top
        live = tl.where(all_taken, 0.0, total)
    empty = (live <= 0.0) | (offs_m >= s1)
    acc = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
    lse_rows = tl.where(empty, float("-inf"), top + tl.log(tl.where(empty, 1.0, total)))
    if HAS_SINKS:
        taken_rows = tl.where(tl.load(sinks + head) == float("inf"), float("inf"), lse_rows)
        lse_rows = tl.where(offs_m < s1, taken_rows, lse_rows)
    store_tile(out, q_first, q_heads, row, slot_q, dv, acc, BM, DVA)
    tl.store(lse + lse_row(b, head, token_q, tiling, cu_q, IS_TND) + offs_m, lse_rows, mask=offs_m < slot_q)


@triton.jit
def forward_kernel(
    q, k, v, cu_q, cu_kv, used_q, used_kv, sinks, metadata, out, lse, tiling,
    IS_TND: tl.constexpr, MASK: tl.constexpr, HAS_SINKS: tl.constexpr,
    DA: tl.constexpr, DVA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """attn_out in the layout of q, lse (b, n1, s1) or (n1, t1). Grid: the cube cores."""
    core = tl.program_id(0)
    cores = tl.num_programs(0)
    n1 = read_int(tiling, TD_N1)
    before = 0
    for b in range(read_int(tiling, TD_B)):
        _, _, slot_q, _, _, _ = batch_lengths(b, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND)
        o1 = tl.cdiv(slot_q, TILE)
        for unit in range((core + cores - before % cores) % cores, n1 * o1, cores):
            for part in range(TILE // BM):
                write_rows(
                    q, k, v, sinks, out, lse, b, unit // o1, (o1 - 1 - unit % o1) * TILE + part * BM,
                    tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND, MASK, HAS_SINKS, DA, DVA, BM, BN,
                )  # fmt: skip
        before += n1 * o1
