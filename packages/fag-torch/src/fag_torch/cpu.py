"""The operators on CPU tensors: a validated call becomes pointers and strides for fag_kernel.abi.

No arithmetic happens here and no input is ever written. Tensors whose head dim is contiguous are passed as
they lie, any other is copied first; outputs are new and contiguous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fag_kernel import abi
from fag_metadata.arguments import check_block_table
from fag_metadata.errors import naming, problem_error
from fag_torch import mask_tensor
from fag_torch.prepare import LengthTensors, Prepared, contiguous_strides, dtype_name, prepare

if TYPE_CHECKING:
    from torch import Tensor

#: Name that the messages of the internal operators carry: users reach them through this function.
FRONT = "flash_attention"


def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_kv: Tensor | None = None,
    sinks: Tensor | None = None,
    metadata: Tensor | None = None,
    softmax_scale: float = 1.0,
    mask_mode: int = 0,
    attn_mask: Tensor | None = None,
    win_left: int = -1,
    win_right: int = -1,
    max_seqlen_q: int = -1,
    max_seqlen_kv: int = -1,
    layout_q: str = "BSND",
    layout_kv: str = "BSND",
    layout_out: str = "BSND",
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """`cann_ops_transformer::flash_attn` on the CPU."""
    op = "flash_attn"
    check_block_table(op, block_table)
    call = prepare(
        op, q, k, v, None, sinks, attn_mask, (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv),
        mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv, layout_q, layout_kv, layout_out,
    )  # fmt: skip
    if attn_mask is not None:
        mask_tensor.check_content(op, attn_mask)
    out, lse = _forward(op, call, q, k, v, sinks, metadata, softmax_scale, is_grad=False)
    return out, lse if return_softmax_lse else torch.zeros(1, dtype=torch.float32, device=q.device)


def flash_attn_grad(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    attn_out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_kv: Tensor | None = None,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    metadata: Tensor | None = None,
    softmax_scale: float = 0.0,
    mask_mode: int = 0,
    win_left: int = -1,
    win_right: int = -1,
    max_seqlen_q: int = -1,
    max_seqlen_kv: int = -1,
    layout_q: str = "BSND",
    layout_kv: str = "BSND",
    layout_out: str = "BSND",
) -> tuple[Tensor, Tensor, Tensor]:
    """`cann_ops_transformer::flash_attn_grad` on the CPU."""
    op = "flash_attn_grad"
    call = prepare(
        op, q, k, v, (dout, attn_out, softmax_lse), sinks, attn_mask,
        (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv),
        mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv, layout_q, layout_kv, layout_out,
    )  # fmt: skip
    if attn_mask is not None:
        mask_tensor.check_content(op, attn_mask)
    return _backward(
        op, call, q, k, v, dout, attn_out, softmax_lse, None, sinks, None, metadata, softmax_scale
    )


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    seqused_q: Tensor | None,
    seqused_kv: Tensor | None,
    sinks: Tensor | None,
    metadata: Tensor | None,
    *,
    softmax_scale: float | None,
    mask_mode: int,
    win_left: int,
    win_right: int,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    layout: str,
    is_grad_enabled: bool = False,
) -> tuple[Tensor, Tensor]:
    """`fag::attention_forward` on the CPU."""
    lengths: LengthTensors = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv)
    call = prepare(
        FRONT, q, k, v, None, sinks, None, lengths,
        mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv, layout, layout, layout,
    )  # fmt: skip
    return _forward(FRONT, call, q, k, v, sinks, metadata, softmax_scale, is_grad=is_grad_enabled)


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    seqused_q: Tensor | None,
    seqused_kv: Tensor | None,
    sinks: Tensor | None,
    metadata: Tensor | None,
    *,
    softmax_scale: float | None,
    mask_mode: int,
    win_left: int,
    win_right: int,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    layout: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fag::attention_backward` on the CPU."""
    lengths: LengthTensors = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv)
    call = prepare(
        FRONT, q, k, v, (dout, out, lse), sinks, None, lengths,
        mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv, layout, layout, layout,
    )  # fmt: skip
    check_dlse(dlse, lse)
    dsinks = q.new_empty(0 if sinks is None else sinks.shape[0], dtype=torch.float32)
    dq, dk, dv = _backward(FRONT, call, q, k, v, dout, out, lse, dlse, sinks, dsinks, metadata, softmax_scale)
    return dq, dk, dv, dsinks


def check_dlse(dlse: Tensor | None, lse: Tensor) -> None:
    """Refuses a gradient of the lse that does not look like the lse."""
    if dlse is not None and (dlse.shape != lse.shape or dlse.dtype is not torch.float32):
        got = f"{dtype_name(dlse.dtype)} {tuple(dlse.shape)}"
        raise problem_error(FRONT, "dlse", "must be float32 of the shape of lse", got, lse=tuple(lse.shape))


def _forward(
    op: str,
    call: Prepared,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    metadata: Tensor | None,
    softmax_scale: float | None,
    *,
    is_grad: bool,
) -> tuple[Tensor, Tensor]:
    # From one such call to the next nothing changes but addresses.
    is_usual = metadata is None and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    run = call.forward if is_usual else None
    if run is None:
        q, k, v = _with_rows(q), _with_rows(k), _with_rows(v)
        words = call.metadata(op, metadata, is_grad=is_grad)
        strides = [_strides(t, call.axes) for t in (q, k, v)]
        strides.append(contiguous_strides(call.out_shape, call.axes_out))
        with naming(op):
            run = abi.prepare_forward(call.problem, words, call.dtype, *strides)
        if is_usual:
            call.forward = run
    scale = call.scale(op, softmax_scale)
    sinks = None if sinks is None else sinks.contiguous()
    out = q.new_empty(*call.out_shape)  # sizes one by one: half a microsecond less than a tuple
    lse = q.new_empty(*call.lse_shape, dtype=torch.float32)
    run(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), 0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(), lse.data_ptr(), scale, torch.get_num_threads(),
    )  # fmt: skip
    return out, lse


def _backward(
    op: str,
    call: Prepared,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    attn_out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    sinks: Tensor | None,
    dsinks: Tensor | None,
    metadata: Tensor | None,
    softmax_scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    is_usual = (
        metadata is None and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        and dout.is_contiguous() and attn_out.is_contiguous()
    )  # fmt: skip
    run = call.backward if is_usual else None
    if run is None:
        q, k, v, dout, attn_out = map(_with_rows, (q, k, v, dout, attn_out))
        words = call.metadata(op, metadata, is_grad=True)
        strides = [_strides(t, call.axes) for t in (q, k, v)]
        strides += [_strides(t, call.axes_out) for t in (dout, attn_out)]
        strides += [contiguous_strides(t.shape, call.axes) for t in (q, k, v)]
        with naming(op):
            run = abi.prepare_backward(call.problem, words, call.dtype, *strides)
        if is_usual:
            call.backward = run
    scale = call.scale(op, softmax_scale)
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    run(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr(), attn_out.data_ptr(), lse.data_ptr(),
        0 if dlse is None else dlse.data_ptr(), 0 if sinks is None else sinks.data_ptr(),
        dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), 0 if dsinks is None else dsinks.data_ptr(),
        scale, torch.get_num_threads(),
    )  # fmt: skip
    return dq, dk, dv


def _with_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its head dim is not contiguous (an expanded scalar, a slice with a step)."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(tensor: Tensor, axes: tuple[int, int, int]) -> abi.Strides:
    b, s, n = map(tensor.stride, axes)
    return b, s, n
