"""What fag-kernel offers to fag-torch, and to anyone with raw pointers; KERNEL_ABI is its version.

Arrays come as pointers with element strides, so that no framework is needed here. Callers have validated
shapes and dtypes (`fag_metadata.AttentionProblem.from_tensors`) and the metadata
(`fag_metadata.check_metadata`); native code validates the ranges in the metadata again before it writes
anything, since a wrong range would be a wild write.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from fag_kernel import _native

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from fag_metadata import AttentionProblem

__all__ = [
    "ArrayRef",
    "Strides",
    "backward",
    "cpu_level",
    "cpu_levels",
    "forward",
    "native_problem",
    "prepare_backward",
    "prepare_forward",
    "set_cpu_level",
]

#: Element strides of batch, sequence and head. The head-dim stride is 1. TND: the batch stride is not used,
#: token t lies at t * sequence stride.
Strides: TypeAlias = tuple[int, int, int]

#: (address of element 0, element strides).
ArrayRef: TypeAlias = tuple[int, Strides]


@lru_cache(maxsize=256)
def native_problem(problem: AttentionProblem) -> _native.Problem:
    """The native mirror of `problem`, cached by problem.

    Args:
        problem: What is computed.

    Returns:
        Read-only object for the functions of the native module.

    Raises:
        ValueError: Sizes that native code could not index without overflow.
    """
    return _native.Problem(
        layout=_LAYOUT_CODES[problem.layout.value],
        b=problem.b,
        n1=problem.n1,
        n2=problem.n2,
        d=problem.d,
        dv=problem.dv,
        s1=problem.s1,
        s2=problem.s2,
        t1=problem.t1,
        t2=problem.t2,
        mask_mode=int(problem.mask_mode),
        win_left=problem.win_left,
        win_right=problem.win_right,
        has_cu_seqlens_q=problem.cu_seqlens_q is not None,
        has_cu_seqlens_kv=problem.cu_seqlens_kv is not None,
        has_seqused_q=problem.seqused_q is not None,
        has_seqused_kv=problem.seqused_kv is not None,
        is_variable=problem.is_variable,
        max_seqlen_q=problem.max_seqlen_q,
        max_seqlen_kv=problem.max_seqlen_kv,
        lengths_q=problem.lengths_q,
        lengths_kv=problem.lengths_kv,
        starts_q=problem.starts_q,
        starts_kv=problem.starts_kv,
    )


_LAYOUT_CODES = {"BSND": 0, "BNSD": 1, "TND": 2}


def forward(
    problem: AttentionProblem,
    metadata: NDArray[np.int32],
    dtype: str,
    q: ArrayRef,
    k: ArrayRef,
    v: ArrayRef,
    sinks_ptr: int,
    out: ArrayRef,
    lse_ptr: int,
    *,
    softmax_scale: float,
    num_threads: int,
) -> None:
    """Attention on the CPU: writes all of out and lse, and nothing else.

    Args:
        problem: What is computed.
        metadata: int32 tensor of fag_metadata for this problem; read only.
        dtype: Type of q, k, v and out: "float16", "bfloat16" or "float32".
        q: Query, see ArrayRef; heads n1, width d.
        k: Key, heads n2, width d.
        v: Value, heads n2, width dv.
        sinks_ptr: Address of float32 (n1,), or 0.
        out: Output, heads n1, width dv; padding rows are written as zero.
        lse_ptr: Address of contiguous float32 (b, n1, s1), or (n1, t1) for TND; -inf in padding rows.
        softmax_scale: Factor of the scores; finite.
        num_threads: Upper bound of the threads used, >= 1. Results do not depend on it.

    Raises:
        ValueError: A range in the metadata does not fit the problem; nothing was written.
    """
    run = prepare_forward(problem, metadata, dtype, q[1], k[1], v[1], out[1])
    run(q[0], k[0], v[0], sinks_ptr, out[0], lse_ptr, softmax_scale, num_threads)


def backward(
    problem: AttentionProblem,
    metadata: NDArray[np.int32],
    dtype: str,
    q: ArrayRef,
    k: ArrayRef,
    v: ArrayRef,
    dout: ArrayRef,
    attn_out: ArrayRef,
    lse_ptr: int,
    dlse_ptr: int,
    sinks_ptr: int,
    dq: ArrayRef,
    dk: ArrayRef,
    dv: ArrayRef,
    dsinks_ptr: int,
    *,
    softmax_scale: float,
    num_threads: int,
) -> None:
    """The gradient on the CPU: writes all of dq, dk, dv (and dsinks), and nothing else.

    Args:
        problem: What is computed.
        metadata: int32 tensor of fag_metadata for this problem, made with is_grad_enabled; read only.
        dtype: Type of all ArrayRef arguments: "float16", "bfloat16" or "float32".
        q: Query, see ArrayRef.
        k: Key.
        v: Value.
        dout: Upstream gradient of the output.
        attn_out: Output of the forward.
        lse_ptr: Address of the forward's lse, contiguous float32 (b, n1, s1), or (n1, t1) for TND.
        dlse_ptr: Address of the upstream gradient of lse, same shape, or 0.
        sinks_ptr: Address of float32 (n1,), or 0.
        dq: Gradient of q; padding rows are written as zero.
        dk: Gradient of k, likewise.
        dv: Gradient of v, likewise.
        dsinks_ptr: Address of float32 (n1,) for the gradient of the sinks, or 0.
        softmax_scale: Factor of the scores; finite.
        num_threads: Upper bound of the threads used, >= 1. Results do not depend on it.

    Raises:
        ValueError: A range in the metadata does not fit the problem; nothing was written.
    """
    run = prepare_backward(
        problem, metadata, dtype, q[1], k[1], v[1], dout[1], attn_out[1], dq[1], dk[1], dv[1]
    )
    run(
        q[0], k[0], v[0], dout[0], attn_out[0], lse_ptr, dlse_ptr, sinks_ptr, dq[0], dk[0], dv[0], dsinks_ptr,
        softmax_scale, num_threads,
    )  # fmt: skip


def prepare_forward(
    problem: AttentionProblem,
    metadata: NDArray[np.int32],
    dtype: str,
    q: Strides,
    k: Strides,
    v: Strides,
    out: Strides,
) -> Callable[[int, int, int, int, int, int, float, int], None]:
    """`forward` for many calls on arrays that lie alike: they save some 3 us each.

    Args:
        problem: See `forward`, like all that follow.
        metadata: Checked here, not read by the calls.
        dtype: See there.
        q: Strides of the query.
        k: Of the key.
        v: Of the value.
        out: Of the output.

    Returns:
        run(q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, lse_ptr, softmax_scale, num_threads), which does what
        `forward` does with these arguments.

    Raises:
        ValueError: A range in the metadata does not fit the problem.
    """
    return _native.PreparedForward(native_problem(problem), metadata, dtype, q, k, v, out).run


def prepare_backward(
    problem: AttentionProblem,
    metadata: NDArray[np.int32],
    dtype: str,
    q: Strides,
    k: Strides,
    v: Strides,
    dout: Strides,
    attn_out: Strides,
    dq: Strides,
    dk: Strides,
    dv: Strides,
) -> Callable[[int, int, int, int, int, int, int, int, int, int, int, int, float, int], None]:
    """`backward` for many calls on arrays that lie alike.

    Args:
        problem: See `backward`, like all that follow.
        metadata: Checked here, not read by the calls.
        dtype: See there.
        q: Strides of the query.
        k: Of the key.
        v: Of the value.
        dout: Of the upstream gradient.
        attn_out: Of the forward's output.
        dq: Of the gradient of q.
        dk: Of k.
        dv: Of v.

    Returns:
        run(q_ptr, k_ptr, v_ptr, dout_ptr, attn_out_ptr, lse_ptr, dlse_ptr, sinks_ptr, dq_ptr, dk_ptr, dv_ptr,
        dsinks_ptr, softmax_scale, num_threads), which does what `backward` does with these arguments.

    Raises:
        ValueError: A range in the metadata does not fit the problem.
    """
    return _native.PreparedBackward(
        native_problem(problem), metadata, dtype, q, k, v, dout, attn_out, dq, dk, dv
    ).run


def cpu_level() -> str:
    """The instruction-set level in use.

    "portable"; on x86-64 "avx2", "avx512", "avx512_bf16" or "amx_bf16"; on aarch64 "neon" or "neon_bf16". The
    best one of this CPU, capped by the environment variable FAG_CPU_LEVEL and by `set_cpu_level`. "amx_bf16",
    which has never run on hardware, runs only where one of these names it.
    """
    return _native.cpu_level()


def cpu_levels() -> tuple[str, ...]:
    """The instruction-set levels that this CPU and build can run, weakest first.

    On Linux this asks for the use of AMX tiles where the CPU has them; if refused, "amx_bf16" is left out.
    """
    return tuple(_native.cpu_levels())


def set_cpu_level(name: str | None) -> None:
    """Use another level than the best one, for tests; None goes back to the default.

    Args:
        name: One of `cpu_levels()`, or None.

    Raises:
        ValueError: This CPU or build cannot run that level.
    """
    _native.set_cpu_level(name)
