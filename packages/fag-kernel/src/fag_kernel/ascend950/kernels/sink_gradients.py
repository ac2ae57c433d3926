"""The gradient of the sinks: dsink_h = sum over the rows of psink_i * (dlse_i - sfmg_i).

psink_i = exp(sink_h - lse_i) is what the sink takes of row i: 0 at sink = -inf, 1 at sink = +inf and in a row
without keys, which is recognised by the mask; sfmg is 0 there. Padding rows are not read.
"""

import triton
import triton.language as tl

from .sums import load_dlse, row_products
from .tiles import (
    MASK_CAUSAL,
    MASK_NONE,
    MASK_WINDOW,
    TD_B,
    TD_DV,
    TD_MASK_MODE,
    TD_N1,
    batch_lengths,
    load_tile,
    lse_row,
    mask_shifts,
    query_view,
    read_int,
    seen_rows,
)


@triton.jit
def seen_rows_of_call(s1, s2, tiling):
    """seen_rows by the mask mode of the tiling data: here a mask is two scalars, not worth another kernel."""
    mode = read_int(tiling, TD_MASK_MODE)
    shift_lo, shift_hi = mask_shifts(s1, s2, tiling, MASK_NONE)
    if mode == MASK_CAUSAL:
        shift_lo, shift_hi = mask_shifts(s1, s2, tiling, MASK_CAUSAL)
    if mode == MASK_WINDOW:
        shift_lo, shift_hi = mask_shifts(s1, s2, tiling, MASK_WINDOW)
    return seen_rows(s1, s2, shift_lo, shift_hi)


@triton.jit
def sink_gradients_kernel(
    dout, attn_out, lse, dlse, cu_q, cu_kv, used_q, used_kv, sinks, metadata, dsinks, tiling,
    IS_TND: tl.constexpr, DVA: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write dsinks (n1,) float32. A program owns whole heads and adds their rows in a fixed order, so the
    bits do not depend on the number of cores. Grid: the vector cores.

    Lane m of BM sums the rows m, m + BM, ... with a compensation for what float32 rounds away (Kahan), so
    that the error does not grow with the length of the batch.
    """
    dv = read_int(tiling, TD_DV)
    for head in range(tl.program_id(0), read_int(tiling, TD_N1), tl.num_programs(0)):
        sink = tl.load(sinks + head)
        total = tl.zeros((BM,), tl.float32)
        lost = tl.zeros((BM,), tl.float32)
        for b in range(read_int(tiling, TD_B)):
            s1, s2, _, _, token_q, _ = batch_lengths(
                b, tiling, metadata, cu_q, cu_kv, used_q, used_kv, IS_TND
            )
            seen_begin, seen_end = seen_rows_of_call(s1, s2, tiling)
            q_first, q_heads = query_view(b, head, token_q, tiling, IS_TND)
            lse_first = lse_row(b, head, token_q, tiling, cu_q, IS_TND)
            for row in range(0, s1, BM):
                offs = row + tl.arange(0, BM)
                seen = (offs >= seen_begin) & (offs < seen_end)
                lse_rows = tl.load(lse + lse_first + offs, mask=seen, other=0.0)
                do_tile = load_tile(dout, q_first, q_heads, row, seen_begin, seen_end, dv, BM, DVA)
                out_tile = load_tile(attn_out, q_first, q_heads, row, seen_begin, seen_end, dv, BM, DVA)
                change = load_dlse(dlse, lse_first, row, 0, s1, tiling, BM) - row_products(do_tile, out_tile)
                taken = tl.exp(tl.minimum(sink - lse_rows, 0.0))
                taken = tl.where(sink == float("inf"), 1.0, taken)
                taken = tl.where(seen, taken, 1.0)
                taken = tl.where(sink == float("-inf"), 0.0, taken)
                taken = tl.where(offs < s1, taken, 0.0)
                # 0 wins over whatever stands in the row: no 0 * inf.
                part = tl.where(taken == 0.0, 0.0, taken * change) - lost
                sum_now = total + part
                lost = (sum_now - total) - part
                total = sum_now
        # A vector of one element: the block move writes its 4 bytes, a scalar store would go through the
        # core's cache line, which other heads' owners write too.
        at = dsinks + head + tl.arange(0, 1)
        tl.store(at, tl.sum(tl.reshape(total - lost, (1, BM)), 1))
