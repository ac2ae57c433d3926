"""The Python functions: CANN's three signatures on any device, and `flash_attention`, which is
differentiable.

They add to the operators what a schema cannot: mask modes by name, ValueError and TypeError instead of
RuntimeError, and an error by name for a tensor where an int is wanted.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from fag_metadata import MaskMode
from fag_metadata.arguments import parse_layout
from fag_metadata.errors import UnsupportedError, type_error
from fag_torch import direct, npu_host, scalars
from fag_torch import metadata as _metadata
from fag_torch.cpu import FRONT
from fag_torch.errors import OperatorError
from fag_torch.prepare import LENGTH_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

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
    batch_size: int | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    mask_mode: MaskMode | int | str | None = None,
    win_left: int | None = None,
    win_right: int | None = None,
    layout_q: str | None = None,
    layout_kv: str | None = None,
    layout_out: str | None = None,
    is_grad_enabled: bool = False,
    head_dim_v: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Makes the int32 tensor that says which core computes which tiles of one problem.

    Worth calling when one problem is computed many times with lengths on a device; otherwise leave
    metadata=None.

    Args:
        num_heads_q: Query heads N1, a multiple of num_heads_kv.
        num_heads_kv: Key-value heads N2.
        head_dim: Head dim D of q and k, at most 256.
        cu_seqlens_q: int32 (B+1,), with layout TND only.
        cu_seqlens_kv: int32 (B+1,), with layout TND only.
        seqused_q: int32 (B,), used length of each query slot.
        seqused_kv: int32 (B,), used length of each key slot.
        batch_size: B; not needed with lengths.
        max_seqlen_q: S1, or with lengths a bound.
        max_seqlen_kv: S2, or with lengths a bound.
        mask_mode: MaskMode, its int, or its name in any case; None is NO_MASK.
        win_left: Keys visible to the left of the diagonal; -1 or None is all.
        win_right: Keys visible to the right of the diagonal; -1 or None is all.
        layout_q: "BSND" (also None), "BNSD" or "TND".
        layout_kv: Equal to layout_q.
        layout_out: Equal to layout_q, or BSND with layout_q BNSD.
        is_grad_enabled: Whether the backward split is in it too; then one tensor serves both operators.
        head_dim_v: Head dim Dv of v, for a split that counts its cost; None fits every Dv. Not in CANN's
            signature.
        device: Where the tensor is for; None is the device of the lengths, else the NPU if there is one, else
            the CPU. Not in CANN's signature.

    Returns:
        int32 tensor, 1-D, on that device.

    Raises:
        ValueError: A value breaks a rule of the operator; the message names it.
        TypeError: A dtype does.
        NotImplementedError: There is no such device.

    Example:
        >>> flash_attn_metadata(
        ...     8, 2, 128, batch_size=2, max_seqlen_q=128, max_seqlen_kv=128, is_grad_enabled=True
        ... ).dtype
        torch.int32
    """
    op = "flash_attn_metadata"
    lengths = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv)
    _check_tensors(
        op, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, seqused_q=seqused_q, seqused_kv=seqused_kv
    )
    sizes: dict[str, Any] = {
        "batch_size": scalars.optional_int(op, "batch_size", batch_size),
        "max_seqlen_q": scalars.optional_int(op, "max_seqlen_q", max_seqlen_q),
        "max_seqlen_kv": scalars.optional_int(op, "max_seqlen_kv", max_seqlen_kv),
        "mask_mode": None if mask_mode is None else scalars.mask_mode(op, mask_mode),
        "win_left": scalars.optional_int(op, "win_left", win_left),
        "win_right": scalars.optional_int(op, "win_right", win_right),
        "layout_q": None if layout_q is None else scalars.layout(op, "layout_q", layout_q),
        "layout_kv": None if layout_kv is None else scalars.layout(op, "layout_kv", layout_kv),
        "layout_out": None if layout_out is None else scalars.layout(op, "layout_out", layout_out),
        "is_grad_enabled": is_grad_enabled,
    }
    if device is None and head_dim_v is None:
        return _call(  # type: ignore[no-any-return]
            torch.ops.cann_ops_transformer.flash_attn_metadata,
            scalars.an_int(op, "num_heads_q", num_heads_q),
            scalars.an_int(op, "num_heads_kv", num_heads_kv),
            scalars.an_int(op, "head_dim", head_dim),
            **dict(zip(LENGTH_NAMES, lengths, strict=True)),
            **sizes,
        )
    where = None if device is None else _device(op, device)
    return _metadata.make(num_heads_q, num_heads_kv, head_dim, lengths, where, head_dim_v=head_dim_v, **sizes)


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
    mask_mode: MaskMode | int | str = 0,
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
    """Attention with CANN's signature. Not differentiable: `flash_attention` is.

    Its default scale is 1.0 where that of `flash_attn_grad` is 1/sqrt(D); the difference is CANN's. Pass the
    same number to both.

    Args:
        q: Query, (B, S1, N1, D), (B, N1, S1, D) or (T1, N1, D) by layout_q; float16, bfloat16, or float32 on
            the CPU.
        k: Key with S2 and N2; N1 is a multiple of N2.
        v: Value, as k with Dv <= D.
        block_table: Must be None: paged keys are not supported.
        cu_seqlens_q: int32 (B+1,): first token of each packed sequence, and T1. With TND, and only there.
        cu_seqlens_kv: The same for keys.
        seqused_q: int32 (B,): used length of each query slot; rows beyond are padding and come out as zero.
        seqused_kv: The same for keys.
        sinks: float32 (N1,): an extra logit per query head that takes probability and has no value.
        metadata: From `flash_attn_metadata` for this very problem; None makes it.
        softmax_scale: Factor of the scores; 0.0 is 1/sqrt(D).
        mask_mode: MaskMode, its int, or its name in any case.
        attn_mask: None, or CANN's constant matrix with mask modes 3 and 4; anything else is refused.
        win_left: Keys visible to the left of the diagonal with SLIDING_WINDOW; -1 is all.
        win_right: Keys visible to the right of the diagonal with SLIDING_WINDOW; -1 is all.
        max_seqlen_q: -1, or a bound of the query lengths; never changes a result.
        max_seqlen_kv: The same for keys.
        layout_q: "BSND", "BNSD" or "TND".
        layout_kv: Equal to layout_q.
        layout_out: Equal to layout_q, or BSND with layout_q BNSD.
        return_softmax_lse: Whether the second result is the lse.

    Returns:
        (attn_out, softmax_lse): attn_out with Dv in place of D, contiguous, dtype of q; lse float32, (B, N1,
            S1) or
        (N1, T1), with the sink in it; or [0.] if it was not asked for. A row that sees no key is 0 with lse
        -inf (or the sink).

    Raises:
        ValueError: A value breaks a rule of the operator; the message names it.
        TypeError: A dtype does.

    Example:
        >>> q = torch.randn(2, 5, 8, 64, dtype=torch.bfloat16)
        >>> k = v = torch.randn(2, 7, 2, 64, dtype=torch.bfloat16)
        >>> out, lse = flash_attn(q, k, v, softmax_scale=0.125, mask_mode="causal", return_softmax_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 5, 8, 64]), torch.Size([2, 8, 5]))
    """
    op = "flash_attn"
    softmax_scale = scalars.scale(op, softmax_scale)
    return_softmax_lse = scalars.flag(op, "return_softmax_lse", return_softmax_lse)
    run = None
    if block_table is None:  # else the operator refuses it
        optional = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, sinks, metadata, attn_mask)
        run = direct.instead_of("cann_ops_transformer::flash_attn", (q, k, v), optional)
    if run is None:
        _check_tensors(
            op, required={"q": q, "k": k, "v": v}, block_table=block_table, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv, seqused_q=seqused_q, seqused_kv=seqused_kv, sinks=sinks,
            metadata=metadata, attn_mask=attn_mask,
        )  # fmt: skip
        mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv, layout_q, layout_kv, layout_out = (
            scalars.mask_and_layouts(
                op, mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv,
                layout_q, layout_kv, layout_out,
            )
        )  # fmt: skip
        run = partial(_call, torch.ops.cann_ops_transformer.flash_attn)
    return run(  # type: ignore[no-any-return]
        q, k, v, block_table, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, sinks, metadata,
        softmax_scale, mask_mode, attn_mask, win_left, win_right, max_seqlen_q, max_seqlen_kv,
        layout_q, layout_kv, layout_out, return_softmax_lse,
    )  # fmt: skip


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
    mask_mode: MaskMode | int | str = 0,
    win_left: int = -1,
    win_right: int = -1,
    max_seqlen_q: int = -1,
    max_seqlen_kv: int = -1,
    layout_q: str = "BSND",
    layout_kv: str = "BSND",
    layout_out: str = "BSND",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention with CANN's signature.

    Bitwise the same for every repeat and number of threads. `flash_attention` also gives the gradient of the
    sinks, and takes one of the lse.

    Args:
        q: Query, see `flash_attn`.
        k: Key.
        v: Value.
        dout: Upstream gradient of attn_out, shape and dtype of it.
        attn_out: Result of the forward with the same arguments.
        softmax_lse: Result of the forward, float32.
        cu_seqlens_q: See `flash_attn`, like all that follow.
        cu_seqlens_kv: See there.
        seqused_q: See there.
        seqused_kv: See there.
        sinks: The sinks of the forward.
        attn_mask: See there.
        metadata: From `flash_attn_metadata` with is_grad_enabled=True; None makes it.
        softmax_scale: The scale of the forward; 0.0 is 1/sqrt(D).
        mask_mode: See there.
        win_left: See there.
        win_right: See there.
        max_seqlen_q: See there.
        max_seqlen_kv: See there.
        layout_q: "BSND", "BNSD" or "TND".
        layout_kv: Equal to layout_q.
        layout_out: Equal to layout_q.

    Returns:
        (dq, dk, dv) with shapes and dtype of q, k, v, contiguous; exactly zero in padding rows.

    Raises:
        ValueError: A value breaks a rule of the operator; the message names it.
        TypeError: A dtype does.

    Example:
        >>> q = k = v = torch.randn(1, 5, 2, 16)
        >>> out, lse = flash_attn(q, k, v, softmax_scale=0.25, return_softmax_lse=True)
        >>> dq, dk, dv = flash_attn_grad(q, k, v, torch.ones_like(out), out, lse, softmax_scale=0.25)
        >>> dq.shape
        torch.Size([1, 5, 2, 16])
    """
    op = "flash_attn_grad"
    required = (q, k, v, dout, attn_out, softmax_lse)
    optional = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, sinks, attn_mask, metadata)
    softmax_scale = scalars.scale(op, softmax_scale)
    run = direct.instead_of("cann_ops_transformer::flash_attn_grad", required, optional)
    if run is None:
        _check_tensors(
            op,
            required={"q": q, "k": k, "v": v, "dout": dout, "attn_out": attn_out, "softmax_lse": softmax_lse},
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, seqused_q=seqused_q,
            seqused_kv=seqused_kv, sinks=sinks, attn_mask=attn_mask, metadata=metadata,
        )  # fmt: skip
        mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv, layout_q, layout_kv, layout_out = (
            scalars.mask_and_layouts(
                op, mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv,
                layout_q, layout_kv, layout_out,
            )
        )  # fmt: skip
        run = partial(_call, torch.ops.cann_ops_transformer.flash_attn_grad)
    return run(  # type: ignore[no-any-return]
        q, k, v, dout, attn_out, softmax_lse, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, sinks,
        attn_mask, metadata, softmax_scale, mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv,
        layout_q, layout_kv, layout_out,
    )  # fmt: skip


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str = ...,
    mask_mode: MaskMode | int | str = ...,
    win_left: int = ...,
    win_right: int = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_kv: Tensor | None = ...,
    seqused_q: Tensor | None = ...,
    seqused_kv: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_kv: int | None = ...,
    sinks: Tensor | None = ...,
    softmax_scale: float | None = ...,
    metadata: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str = ...,
    mask_mode: MaskMode | int | str = ...,
    win_left: int = ...,
    win_right: int = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_kv: Tensor | None = ...,
    seqused_q: Tensor | None = ...,
    seqused_kv: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_kv: int | None = ...,
    sinks: Tensor | None = ...,
    softmax_scale: float | None = ...,
    metadata: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str = "BSND",
    mask_mode: MaskMode | int | str = MaskMode.NO_MASK,
    win_left: int = -1,
    win_right: int = -1,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_kv: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    metadata: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention that autograd can go back through: in q, k, v and sinks, and from the lse too.

    Under torch.autocast q, k and v are taken in the autocast dtype, and each gradient comes back in its
    input's own. Second derivatives, vmap and jvp raise RuntimeError.

    Args:
        q: Query, (B, S1, N1, D), (B, N1, S1, D) or (T1, N1, D) by layout; float16, bfloat16, or float32 on
            the CPU.
        k: Key with S2 and N2; N1 is a multiple of N2: query head h uses kv head h // (N1/N2).
        v: Value, as k with Dv <= D.
        layout: "BSND", "BNSD" or "TND", of q, k, v and the output.
        mask_mode: MaskMode, its int, or its name in any case. Masks are aligned bottom-right: the last query
            sees as far as the last key.
        win_left: Keys visible to the left of the diagonal with SLIDING_WINDOW; -1 is all.
        win_right: Keys visible to the right of the diagonal with SLIDING_WINDOW; -1 is all.
        cu_seqlens_q: int32 (B+1,): first token of each packed sequence, and T1. With TND, and only there.
        cu_seqlens_kv: The same for keys.
        seqused_q: int32 (B,): used length of each query slot; rows beyond are padding, zero in outputs and
            gradients.
        seqused_kv: The same for keys.
        max_seqlen_q: A bound of the query lengths, or None; never changes a result.
        max_seqlen_kv: The same for keys.
        sinks: float32 (N1,): an extra logit per query head that takes probability and has no value.
        softmax_scale: Factor of the scores; None is 1/sqrt(D).
        metadata: From `flash_attn_metadata` for this very problem (with is_grad_enabled=True for a backward);
            None makes it.
        return_lse: Whether to return the logarithm of the softmax denominator as well.

    Returns:
        out, with Dv in place of D, contiguous; or (out, lse) with lse float32, (B, N1, S1) or (N1, T1), sink
        included.

    Raises:
        ValueError: A value breaks a rule of the operator; the message names it.
        TypeError: A dtype does.

    Example:
        >>> q = torch.randn(2, 128, 8, 64, requires_grad=True)
        >>> k = torch.randn(2, 128, 2, 64)
        >>> v = torch.randn(2, 128, 2, 64)
        >>> flash_attention(q, k, v, mask_mode="causal").sum().backward()
        >>> q.grad.shape
        torch.Size([2, 128, 8, 64])
    """
    optional = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, sinks, metadata)
    if softmax_scale is not None:
        softmax_scale = scalars.scale(FRONT, softmax_scale)
    if max_seqlen_q is None:
        max_seqlen_q = -1
    if max_seqlen_kv is None:
        max_seqlen_kv = -1
    layout = parse_layout(FRONT, "layout", layout).value
    run = direct.instead_of("fag::attention_forward", (q, k, v), optional)
    if run is None:
        _check_tensors(
            FRONT, required={"q": q, "k": k, "v": v}, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
            seqused_q=seqused_q, seqused_kv=seqused_kv, sinks=sinks, metadata=metadata,
        )  # fmt: skip
        q, k, v = _autocast(q), _autocast(k), _autocast(v)
        mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv, layout, _, _ = scalars.mask_and_layouts(
            FRONT, mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv, layout, layout, layout
        )
        run = partial(_call, torch.ops.fag.attention_forward)
    out, lse = run(
        q, k, v, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, sinks, metadata,
        softmax_scale=softmax_scale, mask_mode=mask_mode, win_left=win_left, win_right=win_right,
        max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv, layout=layout,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls an operator; a broken rule is raised as what it is. Compiled code keeps the RuntimeError."""
    if torch.compiler.is_compiling():
        return op(*args, **kwargs)
    try:
        return op(*args, **kwargs)
    except OperatorError as error:
        raise error.reason from None


def _check_tensors(op: str, required: dict[str, Any] | None = None, **optional: Any) -> None:
    for name, value in (required or {}).items():
        if not isinstance(value, torch.Tensor):
            raise type_error(op, name, "must be a tensor", type(value).__name__)
    for name, value in optional.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise type_error(op, name, "must be a tensor or None", type(value).__name__)


def _device(op: str, device: torch.device | str) -> torch.device:
    if isinstance(device, str) and device.partition(":")[0] == "npu" and not npu_host.is_present():
        reason = npu_host.missing_torch_npu() or "torch_npu sees no device"
        raise UnsupportedError(
            f"{op}: device must be cpu or an NPU that torch_npu sees, got {device} ({reason})."
        )
    return torch.device(device)


def _autocast(tensor: Tensor) -> Tensor:
    kind = tensor.device.type
    if kind not in ("cpu", "npu", "privateuseone") or not torch.is_autocast_enabled(kind):
        return tensor
    if not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor  # refused by the operator, with its name and dtype
    return tensor.to(torch.get_autocast_dtype(kind))
