"""Shapes of the results without data: the implementations for meta tensors and for tracing.

Outputs are contiguous whatever the strides of the inputs, as those of the real kernels are. Rules that need
no values are checked here too, so that a call which the CPU refuses for its shapes is refused while it is
traced. With symbolic sizes nothing can be compared without specialising the graph; the real kernel does it
when it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fag_metadata import TARGETS, AttentionProblem
from fag_metadata.arguments import check_block_table, check_max_seqlen, check_softmax_scale
from fag_metadata.errors import problem_error, type_error
from fag_metadata.layout import cube_slots, total_words
from fag_torch import npu_host
from fag_torch.cpu import FRONT
from fag_torch.prepare import LENGTH_NAMES, LengthTensors, dtype_name, spec_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def flash_attn_metadata(
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_kv: Tensor | None = None,
    is_grad_enabled: bool = False,
    **sizes: Any,
) -> Tensor:
    """Length of `cann_ops_transformer::flash_attn_metadata`; for the CPU the same for every problem."""
    given = [t for t in (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv) if t is not None]
    device = given[0].device if given else npu_host.default_device()
    words: int | torch.SymInt
    if device.type in ("cpu", "meta"):
        cpu = TARGETS["cpu"]
        words = total_words(1, cpu.cube_cores, cpu.vector_cores, cube_slots(cpu.cube_cores), is_grad_enabled)
    else:  # the number of sections depends on the lengths, which only the device knows
        words = torch.library.get_ctx().new_dynamic_size()
    return torch.empty(words, dtype=torch.int32, device=device)


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
    """Shapes of `cann_ops_transformer::flash_attn`."""
    op = "flash_attn"
    check_block_table(op, block_table)
    _check(
        op, q, k, v, None, sinks, attn_mask, metadata, softmax_scale,
        (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv),
        mask_mode=mask_mode, win_left=win_left, win_right=win_right, max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv, layout_q=layout_q, layout_kv=layout_kv, layout_out=layout_out,
    )  # fmt: skip
    out, lse = _outputs(q, v, layout_q, layout_out)
    return out, lse if return_softmax_lse else q.new_empty(1, dtype=torch.float32)


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
    """Shapes of `cann_ops_transformer::flash_attn_grad`."""
    _check(
        "flash_attn_grad", q, k, v, (dout, attn_out, softmax_lse), sinks, attn_mask, metadata, softmax_scale,
        (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv),
        mask_mode=mask_mode, win_left=win_left, win_right=win_right, max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv, layout_q=layout_q, layout_kv=layout_kv, layout_out=layout_out,
    )  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


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
    layout: str,
    is_grad_enabled: bool = False,
    **scalars: int,
) -> tuple[Tensor, Tensor]:
    """Shapes of `fag::attention_forward`."""
    _check(
        FRONT, q, k, v, None, sinks, None, metadata, softmax_scale,
        (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv),
        layout_q=layout, layout_kv=layout, layout_out=layout, **scalars,
    )  # fmt: skip
    return _outputs(q, v, layout, layout)


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
    layout: str,
    **scalars: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shapes of `fag::attention_backward`."""
    _check(
        FRONT, q, k, v, (dout, out, lse), sinks, None, metadata, softmax_scale,
        (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv),
        layout_q=layout, layout_kv=layout, layout_out=layout, **scalars,
    )  # fmt: skip
    dsinks = q.new_empty(0 if sinks is None else sinks.shape[0], dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _outputs(q: Tensor, v: Tensor, layout_q: str, layout_out: str) -> tuple[Tensor, Tensor]:
    dv = v.shape[-1]
    if layout_q == "TND":
        t1, n1 = q.shape[0], q.shape[1]
        return q.new_empty((t1, n1, dv)), q.new_empty((n1, t1), dtype=torch.float32)
    b, s1, n1 = q.shape[0], q.shape[1], q.shape[2]
    if layout_q == "BNSD":
        s1, n1 = n1, s1
    shape = (b, n1, s1, dv) if layout_out == "BNSD" else (b, s1, n1, dv)
    return q.new_empty(shape), q.new_empty((b, n1, s1), dtype=torch.float32)


def _check(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_inputs: tuple[Tensor, Tensor, Tensor] | None,
    sinks: Tensor | None,
    attn_mask: Tensor | None,
    metadata: Tensor | None,
    softmax_scale: float | None,
    lengths: LengthTensors,
    **scalars: Any,
) -> None:
    """Applies the rules that need no values; with a symbolic size only those about devices and dtypes."""
    names = ("dout", "attn_out", "softmax_lse") if op != FRONT else ("dout", "out", "lse")
    tensors: dict[str, Tensor | None] = {"q": q, "k": k, "v": v}
    if grad_inputs is not None:
        tensors.update(zip(names, grad_inputs, strict=True))
    tensors.update(sinks=sinks, attn_mask=attn_mask, metadata=metadata)
    tensors.update(zip(LENGTH_NAMES, lengths, strict=True))
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != q.device:
            raise problem_error(op, name, "must be on the device of q", tensor.device, q=q.device)
    if metadata is not None and metadata.dtype is not torch.int32:
        raise type_error(op, "metadata", "must be int32", dtype_name(metadata.dtype))
    if isinstance(softmax_scale, float):
        check_softmax_scale(op, softmax_scale)
    if any(_is_symbolic(tensor) for tensor in tensors.values()) or not all(map(_is_plain, scalars.values())):
        return
    for side, cu, used in (("q", lengths[0], lengths[2]), ("kv", lengths[1], lengths[3])):
        if cu is not None or used is not None:  # the longest sequence is not known here
            name = f"max_seqlen_{side}"
            check_max_seqlen(op, name, scalars[name], 0)
            scalars[name] = -1
    is_packed = scalars["layout_q"] == "TND"
    dout, attn_out, softmax_lse = map(spec_of, grad_inputs) if grad_inputs else (None, None, None)
    AttentionProblem.from_tensors(
        op,
        q=spec_of(q),
        k=spec_of(k),
        v=spec_of(v),
        dout=dout,
        attn_out=attn_out,
        softmax_lse=softmax_lse,
        sinks=None if sinks is None else spec_of(sinks),
        attn_mask=None if attn_mask is None else spec_of(attn_mask),
        cu_seqlens_q=_stand_in(op, "cu_seqlens_q", lengths[0], q.shape[0] if is_packed and q.dim() else 0),
        cu_seqlens_kv=_stand_in(op, "cu_seqlens_kv", lengths[1], k.shape[0] if is_packed and k.dim() else 0),
        seqused_q=_stand_in(op, "seqused_q", lengths[2], 0),
        seqused_kv=_stand_in(op, "seqused_kv", lengths[3], 0),
        **scalars,
    )


def _stand_in(op: str, name: str, tensor: Tensor | None, last: int) -> NDArray[np.int32] | None:
    """Values that break no rule, for a length tensor of which only shape and dtype are known."""
    if tensor is None:
        return None
    if tensor.dtype is not torch.int32:
        raise type_error(op, name, "must be int32", dtype_name(tensor.dtype))
    values = np.zeros(tuple(tensor.shape), np.int32)
    if values.size > 1:
        values.flat[-1] = last
    return values


def _is_symbolic(tensor: Tensor | None) -> bool:
    return tensor is not None and not all(map(_is_plain, tensor.shape))


def _is_plain(size: object) -> bool:
    return not isinstance(size, torch.SymInt)
