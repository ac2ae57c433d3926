"""`flash_attn_func` and `flash_attn_varlen_func` with the names and the meaning of the flash-attn package.

Arguments that have no counterpart here are refused by name, never ignored. Two differences are gains: the lse
that return_attn_probs gives is differentiable, and results do not depend on `deterministic`, since they
always are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fag_metadata import MaskMode
from fag_metadata.errors import problem_error
from fag_torch.functional import flash_attention

if TYPE_CHECKING:
    from torch import Tensor


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention on (B, S, N, D) tensors, as flash_attn.flash_attn_func computes it.

    Args:
        q: (B, S1, N1, D).
        k: (B, S2, N2, D); N1 is a multiple of N2.
        v: (B, S2, N2, Dv).
        dropout_p: Must be 0.
        softmax_scale: Factor of the scores; None is 1/sqrt(D).
        causal: Whether a query sees no later key, aligned bottom-right.
        window_size: (left, right) keys visible beside the diagonal; -1 is all.
        softcap: Must be 0.
        alibi_slopes: Must be None.
        deterministic: Either; results always are.
        return_attn_probs: Whether to return (out, lse, S_dmask) as flash-attn does; S_dmask is empty without
            dropout.

    Returns:
        out (B, S1, N1, Dv), or the three of return_attn_probs with lse (B, N1, S1).

    Raises:
        ValueError: An argument is not supported, or breaks a rule of the operator.
        TypeError: A dtype does.

    Example:
        >>> import torch
        >>> q = torch.randn(2, 16, 4, 32, requires_grad=True)
        >>> k, v = torch.randn(2, 2, 24, 2, 32)
        >>> flash_attn_func(q, k, v, causal=True, window_size=(8, -1)).shape
        torch.Size([2, 16, 4, 32])
    """
    op = "flash_attn_func"
    _refuse(op, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    mask_mode, win_left, win_right = _mask(op, causal, window_size)
    out, lse = flash_attention(
        q, k, v, layout="BSND", mask_mode=mask_mode, win_left=win_left, win_right=win_right,
        softmax_scale=softmax_scale, return_lse=True,
    )  # fmt: skip
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention on packed sequences (T, N, D), as flash_attn.flash_attn_varlen_func computes it.

    Args:
        q: (T1, N1, D).
        k: (T2, N2, D); N1 is a multiple of N2.
        v: (T2, N2, Dv).
        cu_seqlens_q: int32 (B+1,): first token of each query sequence, and T1.
        cu_seqlens_k: The same for keys.
        max_seqlen_q: At least the longest query sequence.
        max_seqlen_k: At least the longest key sequence.
        dropout_p: Must be 0.
        softmax_scale: Factor of the scores; None is 1/sqrt(D).
        causal: Whether a query sees no later key, aligned bottom-right in each sequence.
        window_size: (left, right) keys visible beside the diagonal; -1 is all.
        softcap: Must be 0.
        alibi_slopes: Must be None.
        deterministic: Either; results always are.
        return_attn_probs: Whether to return (out, lse, S_dmask) as flash-attn does; S_dmask is empty without
            dropout.
        block_table: Must be None: paged keys are not supported.

    Returns:
        out (T1, N1, Dv), or the three of return_attn_probs with lse (N1, T1).

    Raises:
        ValueError: An argument is not supported, or breaks a rule of the operator.
        TypeError: A dtype does.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 9, 4, 32)
        >>> cu = torch.tensor([0, 5, 9], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, causal=True).shape
        torch.Size([9, 4, 32])
    """
    op = "flash_attn_varlen_func"
    _refuse(op, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, block_table=block_table)
    mask_mode, win_left, win_right = _mask(op, causal, window_size)
    out, lse = flash_attention(
        q, k, v, layout="TND", mask_mode=mask_mode, win_left=win_left, win_right=win_right,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_k, softmax_scale=softmax_scale, return_lse=True,
    )  # fmt: skip
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def _refuse(
    op: str,
    *,
    dropout_p: float,
    softcap: float,
    alibi_slopes: Tensor | None,
    block_table: Tensor | None = None,
) -> None:
    for name, value in (("dropout_p", dropout_p), ("softcap", softcap)):
        if value:
            raise problem_error(op, name, "must be 0", value, remedy="It is not supported")
    for name, tensor in (("alibi_slopes", alibi_slopes), ("block_table", block_table)):
        if tensor is not None:
            raise problem_error(op, name, "must be None", type(tensor).__name__, remedy="It is not supported")


def _mask(op: str, causal: bool, window_size: tuple[int, int]) -> tuple[MaskMode, int, int]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise problem_error(op, "window_size", "must be a pair (left, right)", repr(window_size))
    left, right = window_size
    if causal:  # flash-attn: no later key, whatever the right window says
        return (MaskMode.CAUSAL, -1, -1) if left == -1 else (MaskMode.SLIDING_WINDOW, left, 0)
    if left == -1 and right == -1:
        return MaskMode.NO_MASK, -1, -1
    return MaskMode.SLIDING_WINDOW, left, right
