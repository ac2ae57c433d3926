"""From the arguments of a call to a validated problem and its metadata, both cached.

Every call of an operator passes here before anything is allocated. What a call needs is found again by
shapes, dtypes, scalars and the bytes of the length tensors, so a repeated call costs a dictionary lookup.
Scalars count with their types: what is found was checked, and a True or a 1.0 never finds what a 1 has left.
The rules and their messages are those of `fag_metadata`; nothing is computed here but shapes.
"""

from __future__ import annotations

import math
import os
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch

from fag_metadata import AttentionProblem, Layout, TensorSpec, check_metadata, metadata_for
from fag_metadata.arguments import FLOAT32_MAX, check_softmax_scale
from fag_metadata.errors import type_error
from fag_torch.scalars import mask_and_layouts

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from numpy.typing import NDArray
    from torch import Tensor

#: (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv)
LengthTensors: TypeAlias = "tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]"

LENGTH_NAMES: Final = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv")

#: Layout -> axes of a tensor that hold (batch, sequence, head). TND has no batch axis; the kernel ignores
#: that stride.
AXES: Final = {Layout.BSND: (0, 1, 2), Layout.BNSD: (0, 2, 1), Layout.TND: (0, 0, 1)}

#: A training loop on ragged batches has a new problem at every step; old ones make way.
_CACHE_ENTRIES: Final = 512
_CACHE_LENGTH_BYTES: Final = 16 << 20

_cache: dict[Hashable, Prepared] = {}
_problems: dict[AttentionProblem, AttentionProblem] = {}
_cache_lock = RLock()  # a signal handler or a finalizer may attend, too
_cached_length_bytes = 0


class Prepared:
    """A validated call: what to compute, where the axes are, what shape the results have.

    Attributes:
        problem: The validated problem.
        dtype: Name of the dtype of q, as fag_kernel.abi wants it.
        axes: Axes (b, s, n) of q, k and v; see AXES.
        axes_out: Axes (b, s, n) of the output and of its gradient.
        out_shape: Shape of the output.
        lse_shape: (b, n1, s1), or (n1, t1) for TND.
        default_scale: 1/sqrt(D).
        forward: What `fag_kernel.abi.prepare_forward` gives for contiguous tensors and our own metadata, once
            it was wanted.
        backward: Likewise, of `prepare_backward`.
        routed: On an NPU, what `npu_calls.py` has worked out for this call, by what else decides about it.
    """

    __slots__ = (
        "_metadata",
        "axes",
        "axes_out",
        "backward",
        "default_scale",
        "dtype",
        "forward",
        "lse_shape",
        "out_shape",
        "problem",
        "routed",
    )

    def __init__(self, problem: AttentionProblem, dtype: str, layout_out: str) -> None:
        out_layout = Layout(layout_out)
        self.problem = problem
        self.dtype = dtype
        self.axes = AXES[problem.layout]
        self.axes_out = AXES[out_layout]
        self.out_shape, self.lse_shape = output_shapes(problem, out_layout)
        self.default_scale = 1.0 / math.sqrt(problem.d)
        self.forward: Callable[..., None] | None = None
        self.backward: Callable[..., None] | None = None
        self.routed: dict[Hashable, Any] = {}
        self._metadata: dict[bool, NDArray[np.int32]] = {}

    def metadata(self, op: str, given: Tensor | None, *, is_grad: bool) -> NDArray[np.int32]:
        """The caller's metadata, checked against this call, or our own for the CPU.

        Args:
            op: Operator the user called, for the messages.
            given: int32, 1-D, on the host; or None.
            is_grad: Whether the backward split must be there.

        Returns:
            The metadata as an array; read only by intent.

        Raises:
            ValueError: It was made for another problem, or is corrupt.
            TypeError: It is not int32.
        """
        if given is not None:
            array = np.ascontiguousarray(host_array(op, "metadata", given))
            check_metadata(op, array, self.problem, is_grad)
            return array
        found = self._metadata.get(is_grad)
        if found is None:
            found = self._metadata[is_grad] = metadata_for(self.problem, "cpu", is_grad_enabled=is_grad)
        return found

    def scale(self, op: str, value: float | None) -> float:
        """softmax_scale as a number: None and 0.0 mean 1/sqrt(D); NaN and infinities are refused."""
        if type(value) is float and 0.0 < value <= FLOAT32_MAX:
            return value
        if value is None:
            return self.default_scale
        scale: float = check_softmax_scale(op, value)
        return scale or self.default_scale


def contiguous_strides(shape: tuple[int, ...], axes: tuple[int, int, int]) -> tuple[int, int, int]:
    """Element strides (b, s, n) of a contiguous tensor."""
    b, s, n = (math.prod(shape[axis + 1 :]) for axis in axes)
    return b, s, n


def output_shapes(problem: AttentionProblem, layout_out: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the output in `layout_out` and of the lse."""
    p = problem
    if layout_out is Layout.TND:
        return (p.t1, p.n1, p.dv), (p.n1, p.t1)
    out = (p.b, p.s1, p.n1, p.dv) if layout_out is Layout.BSND else (p.b, p.n1, p.s1, p.dv)
    return out, (p.b, p.n1, p.s1)


def prepare(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_inputs: tuple[Tensor, Tensor, Tensor] | None,
    sinks: Tensor | None,
    attn_mask: Tensor | None,
    lengths: LengthTensors,
    mask_mode: Any,
    win_left: Any,
    win_right: Any,
    max_seqlen_q: Any,
    max_seqlen_kv: Any,
    layout_q: Any,
    layout_kv: Any,
    layout_out: Any,
) -> Prepared:
    """Validates a call, or finds it in the cache. The lengths are on the host, the other tensors anywhere.

    Args:
        op: Operator the user called, for the messages.
        q: Query.
        k: Key.
        v: Value.
        grad_inputs: (dout, attn_out, softmax_lse) for a gradient.
        sinks: float32 (N1,), or None.
        attn_mask: CANN's constant, or None; only its shape and dtype are looked at.
        lengths: See LengthTensors.
        mask_mode: As in the schema or as a user may write it, like all that follow.
        win_left: Keys visible to the left.
        win_right: Keys visible to the right.
        max_seqlen_q: Bound of the query lengths, or -1.
        max_seqlen_kv: Bound of the key lengths, or -1.
        layout_q: BSND, BNSD or TND.
        layout_kv: Likewise.
        layout_out: Likewise.

    Returns:
        The validated call.

    Raises:
        ValueError: A value breaks a rule.
        TypeError: A dtype does.
    """
    cu_q, cu_kv, used_q, used_kv = lengths
    key = (
        op, q.shape, q.dtype, k.shape, k.dtype, v.shape, v.dtype,
        None if grad_inputs is None else tuple((t.shape, t.dtype) for t in grad_inputs),
        None if sinks is None else (sinks.shape, sinks.dtype),
        None if attn_mask is None else (attn_mask.shape, attn_mask.dtype),
        None if cu_q is None else _fingerprint(cu_q),
        None if cu_kv is None else _fingerprint(cu_kv),
        None if used_q is None else _fingerprint(used_q),
        None if used_kv is None else _fingerprint(used_kv),
        type(mask_mode), type(win_left), type(win_right), type(max_seqlen_q), type(max_seqlen_kv),
        mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv, layout_q, layout_kv, layout_out,
    )  # fmt: skip
    try:
        found = _cache.get(key)
    except TypeError:  # not hashable: no scalar
        found = None
    if found is not None:
        return found
    mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv, layout_q, layout_kv, layout_out = (
        mask_and_layouts(
            op, mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv, layout_q, layout_kv, layout_out
        )
    )
    dout, attn_out, softmax_lse = grad_inputs or (None, None, None)
    problem = AttentionProblem.from_tensors(
        op,
        q=spec_of(q),
        k=spec_of(k),
        v=spec_of(v),
        dout=_optional_spec(dout),
        attn_out=_optional_spec(attn_out),
        softmax_lse=_optional_spec(softmax_lse),
        sinks=_optional_spec(sinks),
        attn_mask=_optional_spec(attn_mask),
        cu_seqlens_q=None if cu_q is None else host_array(op, "cu_seqlens_q", cu_q),
        cu_seqlens_kv=None if cu_kv is None else host_array(op, "cu_seqlens_kv", cu_kv),
        seqused_q=None if used_q is None else host_array(op, "seqused_q", used_q),
        seqused_kv=None if used_kv is None else host_array(op, "seqused_kv", used_kv),
        mask_mode=mask_mode,
        win_left=win_left,
        win_right=win_right,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        layout_q=layout_q,
        layout_kv=layout_kv,
        layout_out=layout_out,
    )
    length_bytes = sum(t.nbytes for t in lengths if t is not None)
    return _remember(key, problem, dtype_name(q.dtype), layout_out, length_bytes)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as fag_metadata and fag_kernel spell it: "float16", "bfloat16", "int32", ..."""
    return str(dtype).removeprefix("torch.")


def spec_of(tensor: Tensor) -> TensorSpec:
    """Shape and dtype of a tensor, as the rules of fag_metadata read them."""
    return TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype))


def host_array(op: str, name: str, tensor: Tensor) -> NDArray[Any]:
    """The values of an index tensor on the host as an array that shares its memory.

    Raises:
        TypeError: It is not int32. Asked here since NumPy has no name for some dtypes of torch.
    """
    if tensor.dtype is not torch.int32:
        raise type_error(op, name, "must be int32", dtype_name(tensor.dtype))
    return tensor.numpy()


def _optional_spec(tensor: Tensor | None) -> TensorSpec | None:
    return None if tensor is None else spec_of(tensor)


def _fingerprint(tensor: Tensor) -> tuple[Any, ...]:
    """What a length tensor says. One of another dtype is refused in the end, and NumPy may not know it."""
    if tensor.dtype is not torch.int32:
        return tensor.shape, tensor.dtype
    return tensor.shape, tensor.numpy().tobytes()


def _remember(
    key: Hashable, problem: AttentionProblem, dtype: str, layout_out: str, length_bytes: int
) -> Prepared:
    global _cached_length_bytes
    with _cache_lock:
        if len(_cache) >= _CACHE_ENTRIES or _cached_length_bytes + length_bytes > _CACHE_LENGTH_BYTES:
            _cache.clear()  # the calls of one training step are few: they are all back after one step
            _problems.clear()
            _cached_length_bytes = 0
        _cached_length_bytes += length_bytes
        # Operators share a problem: what is cached by it is found by identity, and comparing takes 1.4 us.
        problem = _problems.setdefault(problem, problem)
        prepared = _cache[key] = Prepared(problem, dtype, layout_out)
    return prepared


def _replace_lock() -> None:
    """In a forked child, where the thread that held the lock does not exist and never releases it."""
    global _cache_lock
    _cache_lock = RLock()


os.register_at_fork(after_in_child=_replace_lock)
