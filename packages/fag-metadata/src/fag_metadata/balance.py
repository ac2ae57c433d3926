"""How even a metadata tensor is: `balance`, for tensors of any origin. The cost model is in loads.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import InvalidProblemError, message
from .problem import AttentionProblem

if TYPE_CHECKING:
    from .loads import Balance
    from .view import Metadata


def balance(metadata: Any, problem: AttentionProblem | None = None) -> Balance:
    """Measures how even a metadata tensor is, over all cores of its target.

    Args:
        metadata: int32 array (n,) on the host, made by flash_attn_metadata or by CANN's operator, or what
            `unpack` makes of it.
        problem: What it is for. None = as the head says, which is enough for dense layouts without seqused.

    Returns:
        Loads of both passes.

    Raises:
        InvalidProblemError: If the head does not say enough and no problem is given.
        MetadataError: If the tensor is truncated or not one of this format.

    Example:
        >>> from fag_metadata import flash_attn_metadata
        >>> sizes = dict(batch_size=1, max_seqlen_q=128, max_seqlen_kv=128, is_grad_enabled=True)
        >>> figures = balance(flash_attn_metadata(37, 37, 128, **sizes, target="Ascend950PR_9599"))
        >>> figures.grad.idle_cores, round(figures.grad.max_over_mean, 2)
        (17, 1.95)
    """
    # Imported here, so that `import fag_metadata` stays quick.
    from .loads import Balance, forward_load, grad_load
    from .view import Metadata, unpack

    view = metadata if isinstance(metadata, Metadata) else unpack(metadata)
    if problem is None:
        problem = problem_of(view)
    merge_rows = view.forward.fd[:, :, 3].astype(np.int64) * view.forward.fd[:, :, 5]
    grad = None if view.grad is None else grad_load(view.grad, problem, view.aic)
    return Balance(forward_load(view.forward, problem), merge_rows.sum(axis=0), grad)


def problem_of(view: Metadata) -> AttentionProblem:
    """The problem as the head tells it; the numbers that are only folded there stand in the FAG block, if
    any.
    """
    head, grad = view.identity, view.grad
    if head is None:
        raise _missing("made by flash_attn_metadata of fag", "one without identity words")
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv"):
        if getattr(head, f"has_{name}"):
            raise _missing("of a dense problem", f"one made with {name}")
    numbers = {
        "N1": head.n1,
        "N2": head.n2,
        "S1": head.s1 if grad is None else grad.s1,
        "S2": head.s2 if grad is None else grad.s2,
        "win_left": head.win_left if grad is None else grad.win_left,
        "win_right": head.win_right if grad is None else grad.win_right,
    }
    known = [number for number in numbers.values() if number is not None]
    if len(known) < len(numbers):
        unknown = next(name for name, number in numbers.items() if number is None)
        raise _missing("of a problem with numbers below 32768", f"one with a larger {unknown}")
    n1, n2, s1, s2, left, right = known
    return AttentionProblem.from_metadata_args(
        n1,
        n2,
        head.d,
        head_dim_v=head.dv,
        batch_size=head.b,
        max_seqlen_q=s1,
        max_seqlen_kv=s2,
        mask_mode=head.mask_mode,
        win_left=left,
        win_right=right,
        layout_q=head.layout,
        op="balance",
    )


def _missing(rule: str, got: str) -> InvalidProblemError:
    text = message("balance", "metadata", f"must be {rule} when problem is None", got, remedy="Pass problem=")
    return InvalidProblemError(text)
