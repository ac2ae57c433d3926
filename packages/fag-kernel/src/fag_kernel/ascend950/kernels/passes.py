"""The passes around the main kernels, on vector cores only: clear, and scale-and-cast.

Each program takes an equal, contiguous share of the elements, by its number: the row ranges of the metadata
(words 124 on) are not used, because for a packed batch CANN counts b * longest sequence rows there, more
than the tensors have, and because their 32-bit counts overflow (spec/metadata-format.md, bugs 7 and 9).
Grid: the vector cores of the metadata.
"""

import triton
import triton.language as tl

from .tiles import TD_D, TD_DV, TD_N1, TD_N2, TD_S1, TD_S2, read_scale, total_rows


@triton.jit
def share(total, CHUNK: tl.constexpr):
    """(first element, end element) of this program, in whole chunks but for the last."""
    chunks = (total + CHUNK - 1) // CHUNK
    per = (chunks + tl.num_programs(0) - 1) // tl.num_programs(0) * CHUNK
    first = tl.program_id(0) * per
    return first, tl.minimum(first + per, total)


@triton.jit
def element_counts(tiling, cu_q, cu_kv, IS_TND: tl.constexpr):
    """Elements (int64) of dq, dk and dv."""
    rows_kv = total_rows(tiling, cu_kv, TD_S2, IS_TND) * tl.load(tiling + TD_N2)
    count_q = total_rows(tiling, cu_q, TD_S1, IS_TND) * tl.load(tiling + TD_N1) * tl.load(tiling + TD_D)
    return count_q, rows_kv * tl.load(tiling + TD_D), rows_kv * tl.load(tiling + TD_DV)


@triton.jit
def clear(base, total, CHUNK: tl.constexpr):
    """Zero `total` elements from `base` on, shared by all programs."""
    first, end = share(total, CHUNK)
    for at in range(first, end, CHUNK):
        offs = tl.arange(0, CHUNK)
        tl.store(base + at + offs, tl.zeros((CHUNK,), base.dtype.element_ty), mask=offs < end - at)


@triton.jit
def convert(source, target, total, scale, CHUNK: tl.constexpr):
    """Set target = scale * source in the type of the target, shared by all programs."""
    first, end = share(total, CHUNK)
    for at in range(first, end, CHUNK):
        offs = tl.arange(0, CHUNK)
        value = tl.load(source + at + offs, mask=offs < end - at, other=0.0)
        tl.store(target + at + offs, (value * scale).to(target.dtype.element_ty), mask=offs < end - at)


@triton.jit
def zero_accumulators_kernel(cu_q, cu_kv, workspace, tiling, IS_TND: tl.constexpr, CHUNK: tl.constexpr):
    """Zero the float32 accumulators of dq, dk, dv, which follow each other in the workspace."""
    count_q, count_k, count_v = element_counts(tiling, cu_q, cu_kv, IS_TND)
    clear(workspace, count_q + count_k + count_v, CHUNK)


@triton.jit
def zero_outputs_kernel(cu_q, cu_kv, dq, dk, dv, tiling, IS_TND: tl.constexpr, CHUNK: tl.constexpr):
    """Zero dq, dk, dv themselves."""
    count_q, count_k, count_v = element_counts(tiling, cu_q, cu_kv, IS_TND)
    clear(dq, count_q, CHUNK)
    clear(dk, count_k, CHUNK)
    clear(dv, count_v, CHUNK)


@triton.jit
def cast_outputs_kernel(
    cu_q, cu_kv, workspace, dq, dk, dv, tiling, IS_TND: tl.constexpr, CHUNK: tl.constexpr
):
    """Make dq, dk (scaled) and dv from their accumulators, rounded once."""
    count_q, count_k, count_v = element_counts(tiling, cu_q, cu_kv, IS_TND)
    scale = read_scale(tiling)
    convert(workspace, dq, count_q, scale, CHUNK)
    convert(workspace + count_q, dk, count_k, scale, CHUNK)
    convert(workspace + count_q + count_k, dv, count_v, 1.0, CHUNK)
