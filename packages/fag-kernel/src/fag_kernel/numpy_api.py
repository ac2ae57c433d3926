"""Flash attention and its gradient on NumPy arrays: CANN's signatures, this package's CPU kernels.

Argument rules are those of fag_metadata.AttentionProblem; nothing is checked twice. Outputs are fresh
contiguous arrays.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from fag_kernel import abi
from fag_kernel.arrays import addressable, array_ref, compact, dtype_name, read_array, spec_of
from fag_metadata import AttentionProblem, Layout, MaskMode, check_metadata, metadata_for
from fag_metadata.arguments import check_attn_mask_content, check_block_table, check_softmax_scale
from fag_metadata.errors import naming, problem_error, type_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["flash_attn", "flash_attn_grad"]


def flash_attn(
    q: Any,
    k: Any,
    v: Any,
    block_table: None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    seqused_q: Any = None,
    seqused_kv: Any = None,
    sinks: Any = None,
    metadata: Any = None,
    softmax_scale: float = 1.0,
    mask_mode: MaskMode | int | str = MaskMode.NO_MASK,
    attn_mask: Any = None,
    win_left: int = -1,
    win_right: int = -1,
    max_seqlen_q: int = -1,
    max_seqlen_kv: int = -1,
    layout_q: str = "BSND",
    layout_kv: str = "BSND",
    layout_out: str = "BSND",
    return_softmax_lse: bool = False,
    *,
    num_threads: int | None = None,
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Attention: softmax(softmax_scale * q k^T) v, with masks, packed sequences and sinks.

    Args:
        q: (B,S1,N1,D), (B,N1,S1,D) or (T1,N1,D) by layout_q; float16, bfloat16 (ml_dtypes) or float32. Any
            strides; copied only if the head dim is not contiguous. NumPy array, or any array on the CPU with
            DLPack or `__array__`.
        k: As q with S2 and N2; N1 is a multiple of N2.
        v: As k with Dv <= D.
        block_table: Must be None; keys in pages are not supported.
        cu_seqlens_q: int32 (B+1,), first token of each packed sequence and the end; with TND only, and
            required there.
        cu_seqlens_kv: The same for keys.
        seqused_q: int32 (B,), used length of each query slot; rows beyond are padding.
        seqused_kv: The same for keys.
        sinks: float32 (N1,), an extra logit per query head that takes probability and has no value.
        metadata: int32 tensor of flash_attn_metadata for this problem, or None to make it here (cached by
            problem).
        softmax_scale: Factor of the scores; 0.0 means 1/sqrt(D), as in flash_attn_grad.
        mask_mode: NO_MASK, CAUSAL or SLIDING_WINDOW; bottom-right aligned.
        attn_mask: None, or CANN's constant (2048, 2048) matrix with mask_mode CAUSAL or SLIDING_WINDOW.
        win_left: Keys visible to the left of the diagonal, -1 = all; with SLIDING_WINDOW only.
        win_right: Keys visible to the right of the diagonal, likewise.
        max_seqlen_q: -1, or a bound of the query lengths; never changes the result.
        max_seqlen_kv: -1, or a bound of the key lengths.
        layout_q: "BSND", "BNSD" or "TND".
        layout_kv: Equal to layout_q.
        layout_out: Equal to layout_q, or "BSND" with layout_q "BNSD".
        return_softmax_lse: Whether the second output is the lse; otherwise it is [0.].
        num_threads: Upper bound of the threads used; None = the CPUs this process may use. The result is the
            same bits for every number.

    Returns:
        (attn_out, softmax_lse): attn_out in layout_out with the dtype of q, padding rows zero; softmax_lse
        float32 (B,N1,S1), or (N1,T1) for TND, with the sink inside, -inf in rows without keys and without a
        sink.

    Raises:
        InvalidProblemError: (a ValueError) If a value breaks a rule; names argument, rule and value.
        InvalidTypeError: (a TypeError) If a dtype is wrong or an argument is no array.
        MetadataError: (a ValueError) If metadata is corrupt or belongs to another problem.

    Example:
        >>> import numpy as np
        >>> q = np.zeros((1, 2, 4, 8), np.float32)  # B=1, S1=2, N1=4, D=8
        >>> k = np.zeros((1, 3, 2, 8), np.float32)  # S2=3, N2=2
        >>> v = np.arange(48, dtype=np.float32).reshape(1, 3, 2, 8)
        >>> out, lse = flash_attn(q, k, v, mask_mode="causal", return_softmax_lse=True)
        >>> out[0, :, 0, 0]  # the first row sees 2 keys, the second all 3
        array([ 8., 16.], dtype=float32)
        >>> np.exp(lse[0, 0]).round(4)
        array([2., 3.], dtype=float32)

    Note:
        Deterministic: the same bits in every run, for every number of threads and whatever stands in padding
            rows.
    """
    op = "flash_attn"
    check_block_table(op, block_table)
    q, k, v = (addressable_input(op, *named) for named in (("q", q), ("k", k), ("v", v)))
    sinks = None if sinks is None else compact(read_array(op, "sinks", sinks))
    mask = None if attn_mask is None else read_array(op, "attn_mask", attn_mask)
    problem = AttentionProblem.from_tensors(
        op,
        q=spec_of(q),
        k=spec_of(k),
        v=spec_of(v),
        sinks=None if sinks is None else spec_of(sinks),
        attn_mask=None if mask is None else spec_of(mask),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        seqused_q=seqused_q,
        seqused_kv=seqused_kv,
        mask_mode=mask_mode,
        win_left=win_left,
        win_right=win_right,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        layout_q=layout_q,
        layout_kv=layout_kv,
        layout_out=layout_out,
    )
    if mask is not None:
        check_attn_mask_content(op, mask)
    out_layout = Layout(layout_out)
    out = np.empty(output_shape(problem, out_layout), q.dtype)
    lse = np.empty(lse_shape(problem), np.float32)
    with naming(op):
        abi.forward(
            problem,
            metadata_words(op, metadata, problem, need_grad=False),
            dtype_name(q.dtype),
            array_ref(q, problem.layout),
            array_ref(k, problem.layout),
            array_ref(v, problem.layout),
            0 if sinks is None else sinks.ctypes.data,
            array_ref(out, out_layout),
            lse.ctypes.data,
            softmax_scale=scale_of(op, softmax_scale, problem),
            num_threads=threads(op, num_threads),
        )
    return out, lse if return_softmax_lse else np.zeros(1, np.float32)


def flash_attn_grad(
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    attn_out: Any,
    softmax_lse: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    seqused_q: Any = None,
    seqused_kv: Any = None,
    sinks: Any = None,
    attn_mask: Any = None,
    metadata: Any = None,
    softmax_scale: float = 0.0,
    mask_mode: MaskMode | int | str = MaskMode.NO_MASK,
    win_left: int = -1,
    win_right: int = -1,
    max_seqlen_q: int = -1,
    max_seqlen_kv: int = -1,
    layout_q: str = "BSND",
    layout_kv: str = "BSND",
    layout_out: str = "BSND",
    *,
    num_threads: int | None = None,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The gradient of flash_attn with respect to q, k and v.

    Args:
        q: As in flash_attn.
        k: As in flash_attn.
        v: As in flash_attn.
        dout: Gradient of the output: shape, layout and dtype of attn_out. Any strides, also 0.
        attn_out: Output of the forward, with the dtype of q.
        softmax_lse: lse of the forward, float32 (B,N1,S1), or (N1,T1) for TND, with the sink inside.
        cu_seqlens_q: As in flash_attn.
        cu_seqlens_kv: As in flash_attn.
        seqused_q: As in flash_attn.
        seqused_kv: As in flash_attn.
        sinks: As in flash_attn. The lse holds their effect already, so they change no result here.
        attn_mask: As in flash_attn.
        metadata: As in flash_attn; made with is_grad_enabled=True.
        softmax_scale: Factor of the scores; 0.0 means 1/sqrt(D). Pass what the forward used: its default is
            1.0.
        mask_mode: As in flash_attn.
        win_left: As in flash_attn.
        win_right: As in flash_attn.
        max_seqlen_q: As in flash_attn.
        max_seqlen_kv: As in flash_attn.
        layout_q: "BSND", "BNSD" or "TND".
        layout_kv: Equal to layout_q.
        layout_out: Equal to layout_q.
        num_threads: As in flash_attn.

    Returns:
        (dq, dk, dv) with shapes and dtype of q, k, v; exactly zero in padding rows and for rows without keys.

    Raises:
        InvalidProblemError: (a ValueError) If a value breaks a rule; names argument, rule and value.
        InvalidTypeError: (a TypeError) If a dtype is wrong or an argument is no array.
        MetadataError: (a ValueError) If metadata is corrupt, forward-only or belongs to another problem.

    Example:
        >>> import numpy as np
        >>> q = np.zeros((1, 6, 1, 8), np.float32)
        >>> k = v = dout = np.ones((1, 6, 1, 8), np.float32)
        >>> out, lse = flash_attn(q, k, v, mask_mode="causal", return_softmax_lse=True)
        >>> dq, dk, dv = flash_attn_grad(q, k, v, dout, out, lse, softmax_scale=1.0, mask_mode="causal")
        >>> dv[0, :, 0, 0].round(5)
        array([2.45   , 1.45   , 0.95   , 0.61667, 0.36667, 0.16667], dtype=float32)

    Note:
        Deterministic, as flash_attn.
    """
    op = "flash_attn_grad"
    named = (("q", q), ("k", k), ("v", v), ("dout", dout), ("attn_out", attn_out))
    q, k, v, dout, attn_out = (addressable_input(op, *argument) for argument in named)
    lse = compact(read_array(op, "softmax_lse", softmax_lse))
    sinks = None if sinks is None else compact(read_array(op, "sinks", sinks))
    mask = None if attn_mask is None else read_array(op, "attn_mask", attn_mask)
    problem = AttentionProblem.from_tensors(
        op,
        q=spec_of(q),
        k=spec_of(k),
        v=spec_of(v),
        dout=spec_of(dout),
        attn_out=spec_of(attn_out),
        softmax_lse=spec_of(lse),
        sinks=None if sinks is None else spec_of(sinks),
        attn_mask=None if mask is None else spec_of(mask),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        seqused_q=seqused_q,
        seqused_kv=seqused_kv,
        mask_mode=mask_mode,
        win_left=win_left,
        win_right=win_right,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        layout_q=layout_q,
        layout_kv=layout_kv,
        layout_out=layout_out,
    )
    if mask is not None:
        check_attn_mask_content(op, mask)
    layout = problem.layout
    dq, dk, dv = (np.empty(x.shape, x.dtype) for x in (q, k, v))
    with naming(op):
        abi.backward(
            problem,
            metadata_words(op, metadata, problem, need_grad=True),
            dtype_name(q.dtype),
            array_ref(q, layout),
            array_ref(k, layout),
            array_ref(v, layout),
            array_ref(dout, layout),
            array_ref(attn_out, layout),
            lse.ctypes.data,
            0,
            0 if sinks is None else sinks.ctypes.data,
            array_ref(dq, layout),
            array_ref(dk, layout),
            array_ref(dv, layout),
            0,
            softmax_scale=scale_of(op, softmax_scale, problem),
            num_threads=threads(op, num_threads),
        )
    return dq, dk, dv


def addressable_input(op: str, name: str, value: Any) -> NDArray[Any]:
    """One of q, k, v, dout, attn_out as an array that kernels can read in place."""
    array = read_array(op, name, value)
    return addressable(array) if array.ndim else array  # a scalar has no head dim: the rank rule refuses it


def output_shape(problem: AttentionProblem, layout: Layout) -> tuple[int, ...]:
    """Shape of attn_out in `layout`."""
    b, s1, n1, dv = problem.b, problem.s1, problem.n1, problem.dv
    if layout is Layout.TND:
        return (problem.t1, n1, dv)
    return (b, s1, n1, dv) if layout is Layout.BSND else (b, n1, s1, dv)


def lse_shape(problem: AttentionProblem) -> tuple[int, ...]:
    """Shape of softmax_lse."""
    if problem.layout is Layout.TND:
        return (problem.n1, problem.t1)
    return (problem.b, problem.n1, problem.s1)


def scale_of(op: str, softmax_scale: float, problem: AttentionProblem) -> float:
    """The factor of the scores; 0.0 stands for 1/sqrt(D)."""
    return check_softmax_scale(op, softmax_scale) or 1.0 / math.sqrt(problem.d)


def metadata_words(
    op: str, metadata: Any, problem: AttentionProblem, *, need_grad: bool
) -> NDArray[np.int32]:
    """The given metadata after its check, or that of `problem` for the CPU."""
    if metadata is None:
        return metadata_for(problem, "cpu", is_grad_enabled=need_grad)
    words = read_array(op, "metadata", metadata)
    check_metadata(op, words, problem, need_grad)
    return compact(words)


def threads(op: str, num_threads: int | None) -> int:
    """`num_threads` after its check, or the number of CPUs that this process may use."""
    if num_threads is None:
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1
    if isinstance(num_threads, bool) or not isinstance(num_threads, (int, np.integer)):
        raise type_error(op, "num_threads", "must be an int or None", type(num_threads).__name__)
    if num_threads < 1:
        raise problem_error(op, "num_threads", "must be at least 1", num_threads)
    return int(num_threads)
