"""The operators on NPU tensors (PrivateUse1): validation as on the CPU, allocation, a launch on the stream.

Nothing waits for the device on the way, but for contents that only the device knows (`npu_memory.py`). Inputs
are made contiguous where they are not; outputs and workspace come from torch_npu's allocator, which ties
their memory to the current stream. torch_npu is never imported here: whoever has a tensor on an NPU has
imported it.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch

from fag_kernel import cann
from fag_metadata.arguments import check_block_table
from fag_metadata.errors import problem_error
from fag_torch import mask_tensor, npu_calls
from fag_torch.cpu import FRONT, check_dlse
from fag_torch.npu_memory import backend, host_lengths, words_of
from fag_torch.prepare import Prepared, prepare

if TYPE_CHECKING:
    from torch import Tensor

    from fag_torch.npu_memory import Words
    from fag_torch.prepare import LengthTensors

_HERE: Final = nullcontext()

#: As in fag_kernel.ascend950.catalog.PARAMETERS, in the order of LengthTensors.
_LENGTH_PARAMETERS: Final = ("cu_q", "cu_kv", "used_q", "used_kv")


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
    """`cann_ops_transformer::flash_attn` on an NPU."""
    op = "flash_attn"
    check_block_table(op, block_table)
    device = _device(
        op, q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, seqused_q=seqused_q,
        seqused_kv=seqused_kv, sinks=sinks, metadata=metadata, attn_mask=attn_mask,
    )  # fmt: skip
    lengths: LengthTensors = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv)
    with _current(device):
        call = prepare(
            op, q, k, v, None, sinks, attn_mask,
            host_lengths(op, lengths),
            mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv, layout_q, layout_kv, layout_out,
        )  # fmt: skip
        if attn_mask is not None:
            mask_tensor.check_content(op, attn_mask)
        out, lse = _forward(op, call, device, q, k, v, sinks, lengths, metadata, softmax_scale, is_grad=False)
        if not return_softmax_lse:
            lse = torch.empty(1, dtype=torch.float32, device=device)
            cann.memset_async(lse.data_ptr(), lse.nbytes, npu_calls.raw_stream(device.index))
        return out, lse


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
    """`cann_ops_transformer::flash_attn_grad` on an NPU."""
    op = "flash_attn_grad"
    device = _device(
        op, q, k=k, v=v, dout=dout, attn_out=attn_out, softmax_lse=softmax_lse, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv, seqused_q=seqused_q, seqused_kv=seqused_kv, sinks=sinks,
        attn_mask=attn_mask, metadata=metadata,
    )  # fmt: skip
    lengths: LengthTensors = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv)
    with _current(device):
        call = prepare(
            op, q, k, v, (dout, attn_out, softmax_lse), sinks, attn_mask,
            host_lengths(op, lengths),
            mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv, layout_q, layout_kv, layout_out,
        )  # fmt: skip
        if attn_mask is not None:
            mask_tensor.check_content(op, attn_mask)
        return _backward(
            op, call, device, q, k, v, dout, attn_out, softmax_lse, None, sinks, None, lengths, metadata,
            softmax_scale,
        )  # fmt: skip


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
    """`fag::attention_forward` on an NPU."""
    device = _device(
        FRONT, q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, seqused_q=seqused_q,
        seqused_kv=seqused_kv, sinks=sinks, metadata=metadata,
    )  # fmt: skip
    lengths: LengthTensors = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv)
    with _current(device):
        call = prepare(
            FRONT, q, k, v, None, sinks, None,
            host_lengths(FRONT, lengths),
            mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv, layout, layout, layout,
        )  # fmt: skip
        return _forward(
            FRONT, call, device, q, k, v, sinks, lengths, metadata, softmax_scale, is_grad=is_grad_enabled
        )


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
    """`fag::attention_backward` on an NPU."""
    device = _device(
        FRONT, q, k=k, v=v, dout=dout, out=out, lse=lse, dlse=dlse, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv, seqused_q=seqused_q, seqused_kv=seqused_kv, sinks=sinks,
        metadata=metadata,
    )  # fmt: skip
    lengths: LengthTensors = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv)
    with _current(device):
        call = prepare(
            FRONT, q, k, v, (dout, out, lse), sinks, None,
            host_lengths(FRONT, lengths),
            mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv, layout, layout, layout,
        )  # fmt: skip
        check_dlse(dlse, lse)
        dsinks = torch.empty(0 if sinks is None else sinks.shape[0], dtype=torch.float32, device=device)
        dq, dk, dv = _backward(
            FRONT, call, device, q, k, v, dout, out, lse, dlse, sinks, None if sinks is None else dsinks,
            lengths, metadata, softmax_scale,
        )  # fmt: skip
        return dq, dk, dv, dsinks


def _forward(
    op: str,
    call: Prepared,
    device: torch.device,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    lengths: LengthTensors,
    metadata: Tensor | None,
    softmax_scale: float | None,
    *,
    is_grad: bool,
) -> tuple[Tensor, Tensor]:
    words = _words(op, call, metadata, is_grad=is_grad)
    routed = npu_calls.route(
        op, call, device, "forward", call.scale(op, softmax_scale),
        has_sinks=sinks is not None, has_dlse=False, has_dsinks=False, is_grad=is_grad, words=words,
    )  # fmt: skip
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=device)
    lse = torch.empty(call.lse_shape, dtype=torch.float32, device=device)
    inputs = _contiguous({"q": q, "k": k, "v": v, "sinks": sinks, "metadata": metadata, **_named(lengths)})
    routed.run(device, {**inputs, "out": out, "lse": lse})
    if call.axes_out != call.axes:  # queries BNSD, output BSND: the routes know one layout per call
        out = out.transpose(1, 2).contiguous()
    return out, lse


def _backward(
    op: str,
    call: Prepared,
    device: torch.device,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    attn_out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    sinks: Tensor | None,
    dsinks: Tensor | None,
    lengths: LengthTensors,
    metadata: Tensor | None,
    softmax_scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    words = _words(op, call, metadata, is_grad=True)
    routed = npu_calls.route(
        op, call, device, "backward", call.scale(op, softmax_scale),
        has_sinks=sinks is not None, has_dlse=dlse is not None, has_dsinks=dsinks is not None, is_grad=True,
        words=words,
    )  # fmt: skip
    tensors = {
        "q": q, "k": k, "v": v, "dout": dout, "attn_out": attn_out, "lse": lse, "dlse": dlse, "sinks": sinks,
        "metadata": metadata, **_named(lengths),
    }  # fmt: skip
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=device) for t in (q, k, v))
    routed.run(device, {**_contiguous(tensors), "dq": dq, "dk": dk, "dv": dv, "dsinks": dsinks})
    return dq, dk, dv


def _device(op: str, q: Tensor, **others: Tensor | None) -> torch.device:
    """The device of a call, all of whose tensors lie there."""
    device = q.device
    for name, tensor in others.items():
        if tensor is not None and tensor.device != device:
            raise problem_error(op, name, "must be on the device of q", tensor.device, q=device)
    if "torch_npu" not in sys.modules:
        npu_calls.refuse(op)
    return device


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes it the current device, where it is not."""
    npu = backend()
    return _HERE if npu.current_device() == device.index else npu.device(device)


def _words(op: str, call: Prepared, metadata: Tensor | None, *, is_grad: bool) -> Words | None:
    """What stands in the caller's metadata, checked against the call."""
    if metadata is None:
        return None
    words = words_of(op, metadata)
    words.check(op, call.problem, is_grad=is_grad)
    return words


def _named(lengths: LengthTensors) -> dict[str, Tensor | None]:
    """The lengths by their names as parameters of a kernel."""
    return dict(zip(_LENGTH_PARAMETERS, lengths, strict=True))


def _contiguous(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {
        name: tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()
        for name, tensor in tensors.items()
    }
