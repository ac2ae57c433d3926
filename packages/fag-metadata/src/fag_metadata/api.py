"""flash_attn_metadata and metadata_for: from a problem to the int32 tensor, cached.

Orchestration only: problem -> route and splits -> pack.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .arguments import check_pairs
from .errors import problem_error
from .identity import identity_words
from .layout import Int32Array, Split, cube_slots, pack
from .problem import AttentionProblem
from .terms import DEFAULT_TARGET, Lengths, MaskMode, Target, find_target

if TYPE_CHECKING:
    from .layout import ForwardSplit, GradSplit
    from .routes import RouteChoice

SplitName = Literal["cann", "balanced"]
_Stages: TypeAlias = """tuple[
    Callable[[AttentionProblem, Target, Split], RouteChoice],
    Callable[[AttentionProblem, Target], ForwardSplit],
    Callable[[AttentionProblem, Target], GradSplit],
]"""

_OP = "flash_attn_metadata"
_SPLITS = {"cann": Split.CANN, "balanced": Split.BALANCED}
_CACHED_TENSORS = 256
"""Mostly 32 KiB each; enough for the layers of a model times a few batches."""
_MOST_COPIED_BYTES = 1 << 20
"""flash_attn_metadata keeps no larger tensor: the memory of a copy takes as long as the split."""


def flash_attn_metadata(
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    seqused_q: Any = None,
    seqused_kv: Any = None,
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
    target: str | Target = DEFAULT_TARGET,
    split: SplitName | None = None,
) -> Int32Array:
    """Returns the metadata tensor of CANN's operator of that name: who computes which tiles, forward and
    backward.

    Args:
        num_heads_q: Query heads N1, a multiple of num_heads_kv.
        num_heads_kv: Key-value heads N2.
        head_dim: Head dim D of q and k, 1..256.
        cu_seqlens_q: int32 (B+1,): first token of each packed sequence, and T. Required with layout TND,
            forbidden otherwise. NumPy array, list, or tensor on the host.
        cu_seqlens_kv: The same for keys.
        seqused_q: int32 (B,): used length of each query slot.
        seqused_kv: The same for keys.
        batch_size: B; None or -1 = the length of the lists.
        max_seqlen_q: S1. With lengths it is only a bound; None or -1 = none.
        max_seqlen_kv: S2; the same.
        mask_mode: MaskMode, its int or its name in any case; None = NO_MASK.
        win_left: Window to the left of the diagonal with SLIDING_WINDOW; None or -1 = unbounded.
        win_right: The same to the right.
        layout_q: BSND, BNSD or TND; None = BSND.
        layout_kv: None = layout_q.
        layout_out: None = layout_q.
        is_grad_enabled: Whether to include the backward split. With it one tensor serves both operators.
        head_dim_v: Head dim Dv of v, 1..D; None = D.
        target: SoC name of TARGETS, "cpu", or a Target.
        split: "cann" = CANN's words; "balanced" = even visible areas; None = "cann" for Ascend targets, else
            "balanced".

    Returns:
        int32 (n,), n a multiple of 4096 and at least 8192; a fresh array that may be changed.

    Raises:
        InvalidProblemError: If a value breaks a rule; the message names argument, rule and value.
        InvalidTypeError: If an argument has the wrong type.

    Example:
        >>> metadata = flash_attn_metadata(
        ...     8, 2, 128, batch_size=2, max_seqlen_q=128, max_seqlen_kv=128, is_grad_enabled=True
        ... )
        >>> metadata.shape, metadata.dtype, metadata[:6].tolist()
        ((8192,), dtype('int32'), [1, 0, 128, 128, 32, 64])

    Note:
        Differences from CANN where its own operator fails: docs/metadata-differences.md. Deterministic; the
        result for equal arguments is cached up to 1 MiB (metadata_for caches all).
    """
    args = (
        num_heads_q, num_heads_kv, head_dim, _lengths("cu_seqlens_q", cu_seqlens_q),
        _lengths("cu_seqlens_kv", cu_seqlens_kv), _lengths("seqused_q", seqused_q),
        _lengths("seqused_kv", seqused_kv), batch_size, max_seqlen_q, max_seqlen_kv, mask_mode, win_left,
        win_right, layout_q, layout_kv, layout_out, is_grad_enabled, head_dim_v, target, split,
    )  # fmt: skip
    try:
        made = _make_of_args(*args)
    except TypeError as error:
        if not str(error).startswith("unhashable"):
            raise
        # an argument that cannot be hashed is no number or name: let its rule say so
        made = _make_of_args.__wrapped__(*args)
    try:
        metadata = made[0]
        return metadata.copy() if metadata.nbytes <= _MOST_COPIED_BYTES else made.pop()
    except IndexError:  # an earlier call has taken it
        return _make_of_args.__wrapped__(*args).pop()


def metadata_for(
    problem: AttentionProblem,
    target: str | Target,
    split: SplitName | None = None,
    is_grad_enabled: bool = True,
) -> Int32Array:
    """Returns the metadata tensor of a problem, cached.

    Args:
        problem: What is computed.
        target: SoC name of TARGETS, "cpu", or a Target.
        split: "cann", "balanced", or None = the target's default.
        is_grad_enabled: Whether to include the backward split.

    Returns:
        int32 (n,), read-only, shared by all callers.

    Raises:
        InvalidProblemError: If the target or split is unknown, or a number does not fit into int32.
    """
    return _cached_metadata(problem, target, split, bool(is_grad_enabled))


def _lengths(name: str, value: Any) -> Lengths | None:
    return None if value is None else Lengths.parse(_OP, name, value)


@lru_cache(maxsize=_CACHED_TENSORS, typed=True)  # typed: 8.0 and True must not find the results of 8 and 1
def _make_of_args(
    n1: Any, n2: Any, d: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any, seqused_q: Any, seqused_kv: Any, b: Any,
    s1: Any, s2: Any, mask_mode: Any, win_left: Any, win_right: Any, layout_q: Any, layout_kv: Any,
    layout_out: Any, is_grad: Any, dv: Any, target: Any, split: Any,
) -> list[Int32Array]:  # fmt: skip
    """A list of the tensor, from which a caller may take it."""
    problem = AttentionProblem.from_metadata_args(
        n1, n2, d, head_dim_v=dv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, seqused_q=seqused_q,
        seqused_kv=seqused_kv, batch_size=b, max_seqlen_q=s1, max_seqlen_kv=s2, mask_mode=mask_mode,
        win_left=win_left, win_right=win_right, layout_q=layout_q, layout_kv=layout_kv, layout_out=layout_out,
        is_grad_enabled=is_grad, op=_OP,
    )  # fmt: skip
    return [_make_metadata(problem, find_target(_OP, target), _parse_split(split), bool(is_grad))]


@lru_cache(maxsize=_CACHED_TENSORS)
def _cached_metadata(
    problem: AttentionProblem, target: str | Target, split: SplitName | None, is_grad: bool
) -> Int32Array:
    words = _make_metadata(problem, find_target(_OP, target), _parse_split(split), is_grad)
    words.flags.writeable = False
    return words


def _parse_split(split: str | None) -> Split | None:
    if split is None:
        return None
    found = _SPLITS.get(split) if isinstance(split, str) else None
    if found is None:
        raise problem_error(_OP, "split", 'must be "cann", "balanced" or None', repr(split))
    return found


def _make_metadata(
    problem: AttentionProblem, target: Target, split: Split | None, is_grad: bool
) -> Int32Array:
    if split is None:
        split = _SPLITS[target.default_split]
    check_pairs(_OP, problem.n1, problem.t1, problem.s2)
    select_route, split_forward, split_backward = _stages(split)
    grad = split_backward(problem, target) if is_grad else None
    forward = split_forward(problem, target)
    route = select_route(problem, target, split).route
    identity = identity_words(problem, target, route, split, is_grad, cube_slots(target.cube_cores))
    return pack(forward, grad, identity)


@lru_cache
def _stages(split: Split) -> _Stages:
    """Imports what makes a split only when one is asked for, so that `import fag_metadata` stays quick."""
    from .routes import select_route

    if split is Split.CANN:
        from .forward_split import split_forward
        from .grad_split import split_grad

        return select_route, split_forward, split_grad
    from .forward_balanced import split_forward_balanced
    from .grad_balanced import split_grad_balanced

    return select_route, split_forward_balanced, split_grad_balanced


def clear_caches() -> None:
    """Forgets all cached metadata, for measurements and tests."""
    _make_of_args.cache_clear()
    _cached_metadata.cache_clear()
