"""The operator in float64, written to be read: one dense softmax matrix per batch entry and query head.

NumPy only, and nothing of the packages under test, so that an agreement means something. The conventions are
those of the operator contract: the reference gradient is computed from the same rounded inputs, *including
the same attn_out and lse*, because a gradient kernel must not be blamed for the rounding of the forward
output it was given.

test_oracle.py proves this file by finite differences and by hand-made numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

NO_MASK, CAUSAL, SLIDING_WINDOW = 0, 3, 4
LAYOUTS = ("BSND", "BNSD", "TND")


class Sequence(NamedTuple):
    """Where one batch entry lies, and how many of its rows are real."""

    index: int
    start_q: int  # first row inside the slot axis (always 0 for dense layouts)
    start_kv: int
    used_q: int  # rows that take part; the rest of the slot is padding
    used_kv: int


@dataclass(frozen=True)
class Call:
    """The arguments of a call that are not tensors of numbers.

    softmax_scale None means 1/sqrt(D). Length lists are plain ints; win_* of -1 means unbounded.
    """

    layout: str = "BSND"
    mask_mode: int = NO_MASK
    win_left: int = -1
    win_right: int = -1
    cu_seqlens_q: tuple[int, ...] | None = None
    cu_seqlens_kv: tuple[int, ...] | None = None
    seqused_q: tuple[int, ...] | None = None
    seqused_kv: tuple[int, ...] | None = None
    softmax_scale: float | None = None

    def scale(self, d: int) -> float:
        return 1.0 / math.sqrt(d) if self.softmax_scale is None else self.softmax_scale

    def sequences(self, q: Array, k: Array) -> Iterator[Sequence]:
        """One Sequence per batch entry."""
        if self.layout == "TND":
            assert self.cu_seqlens_q is not None
            assert self.cu_seqlens_kv is not None
            for i in range(len(self.cu_seqlens_q) - 1):
                start_q, stop_q = self.cu_seqlens_q[i], self.cu_seqlens_q[i + 1]
                start_kv, stop_kv = self.cu_seqlens_kv[i], self.cu_seqlens_kv[i + 1]
                used_q = stop_q - start_q if self.seqused_q is None else self.seqused_q[i]
                used_kv = stop_kv - start_kv if self.seqused_kv is None else self.seqused_kv[i]
                yield Sequence(i, start_q, start_kv, used_q, used_kv)
        else:
            axis = 1 if self.layout == "BSND" else 2
            for i in range(q.shape[0]):
                used_q = q.shape[axis] if self.seqused_q is None else self.seqused_q[i]
                used_kv = k.shape[axis] if self.seqused_kv is None else self.seqused_kv[i]
                yield Sequence(i, 0, 0, used_q, used_kv)


def num_heads(x: Array, layout: str) -> int:
    """Number of heads of a tensor in `layout`."""
    return x.shape[1] if layout in ("BNSD", "TND") else x.shape[2]


def rows(x: Array, layout: str, sequence: Sequence, head: int, side: str) -> Array:
    """The used rows of one head of one batch entry, as a view of shape (used, D): writing to it writes to
    x."""
    start = sequence.start_q if side == "q" else sequence.start_kv
    used = sequence.used_q if side == "q" else sequence.used_kv
    if layout == "TND":
        return x[start : start + used, head]
    if layout == "BSND":
        return x[sequence.index, :used, head]
    return x[sequence.index, head, :used]


def lse_rows(x: Array, layout: str, sequence: Sequence, head: int) -> Array:
    """The used rows of one head of an lse-shaped array, as a view of shape (used,)."""
    if layout == "TND":
        return x[head, sequence.start_q : sequence.start_q + sequence.used_q]
    return x[sequence.index, head, : sequence.used_q]


def visible(call: Call, s1: int, s2: int) -> NDArray[np.bool_]:
    """Which query sees which key, (s1, s2), for a batch entry with these effective lengths."""
    i = np.arange(s1)[:, None]
    j = np.arange(s2)[None, :]
    offset = s2 - s1
    seen = np.ones((s1, s2), dtype=bool)
    if call.mask_mode == CAUSAL:
        seen &= j <= i + offset
    if call.mask_mode == SLIDING_WINDOW:
        if call.win_left != -1:
            seen &= j >= i + offset - call.win_left
        if call.win_right != -1:
            seen &= j <= i + offset + call.win_right
    return seen


def lse_shape(q: Array, layout: str) -> tuple[int, ...]:
    """Shape of the lse: (B, N1, S1), or (N1, T1) for TND."""
    if layout == "TND":
        return (q.shape[1], q.shape[0])
    if layout == "BSND":
        return (q.shape[0], q.shape[2], q.shape[1])
    return (q.shape[0], q.shape[1], q.shape[2])


def forward(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, call: Call, sinks: ArrayLike | None = None
) -> tuple[Array, Array]:
    """attn_out (layout of q, last axis Dv) and lse of the call. Padding: attn_out 0, lse -inf."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    sink = None if sinks is None else np.asarray(sinks, dtype=np.float64)
    n1, n2 = num_heads(q, call.layout), num_heads(k, call.layout)
    scale = call.scale(q.shape[-1])
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    lse = np.full(lse_shape(q, call.layout), -np.inf)
    for sequence in call.sequences(q, k):
        seen = visible(call, sequence.used_q, sequence.used_kv)
        for head in range(n1):
            kv_head = head // (n1 // n2)
            q_h = rows(q, call.layout, sequence, head, "q")
            k_h = rows(k, call.layout, sequence, kv_head, "kv")
            v_h = rows(v, call.layout, sequence, kv_head, "kv")
            s = np.where(seen, scale * (q_h @ k_h.T), -np.inf)
            row_lse = log_sum_exp(s)
            if sink is not None:
                row_lse = np.logaddexp(row_lse, sink[head])
            p = probabilities(s, row_lse, seen)
            rows(out, call.layout, sequence, head, "q")[...] = p @ v_h
            lse_rows(lse, call.layout, sequence, head)[...] = row_lse
    return out, lse


def log_sum_exp(s: Array) -> Array:
    """log(sum(exp(s))) over the last axis; -inf for a row of -inf and for a row without columns."""
    if s.shape[1] == 0:
        return np.full(s.shape[0], -np.inf)
    top = s.max(axis=1)
    shift = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return shift + np.log(np.exp(s - shift[:, None]).sum(axis=1))


def probabilities(s: Array, row_lse: Array, seen: NDArray[np.bool_]) -> Array:
    """exp(s - lse), never above 1, on the visible pairs; exactly 0 elsewhere, whatever stands in lse."""
    with np.errstate(invalid="ignore"):
        return np.where(seen, np.exp(np.minimum(s - row_lse[:, None], 0.0)), 0.0)


class Gradients(NamedTuple):
    """Gradients in the layout of their tensors; dsinks is None without sinks."""

    dq: Array
    dk: Array
    dv: Array
    dsinks: Array | None


def backward(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dout: ArrayLike,
    attn_out: ArrayLike,
    lse: ArrayLike,
    call: Call,
    sinks: ArrayLike | None = None,
    dlse: ArrayLike | None = None,
) -> Gradients:
    """The gradients from the attn_out and lse that are given (not recomputed). Padding gradients are 0."""
    q, k, v, dout, attn_out, lse = (np.asarray(x, dtype=np.float64) for x in (q, k, v, dout, attn_out, lse))
    upstream_lse = np.zeros_like(lse) if dlse is None else np.asarray(dlse, dtype=np.float64)
    sink = None if sinks is None else np.asarray(sinks, dtype=np.float64)
    n1, n2 = num_heads(q, call.layout), num_heads(k, call.layout)
    scale = call.scale(q.shape[-1])
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    dsinks = None if sink is None else np.zeros(n1)
    for sequence in call.sequences(q, k):
        seen = visible(call, sequence.used_q, sequence.used_kv)
        for head in range(n1):
            kv_head = head // (n1 // n2)
            q_h = rows(q, call.layout, sequence, head, "q")
            k_h = rows(k, call.layout, sequence, kv_head, "kv")
            v_h = rows(v, call.layout, sequence, kv_head, "kv")
            dout_h = rows(dout, call.layout, sequence, head, "q")
            sfmg = (dout_h * rows(attn_out, call.layout, sequence, head, "q")).sum(axis=1)
            row_lse = lse_rows(lse, call.layout, sequence, head)
            row_dlse = lse_rows(upstream_lse, call.layout, sequence, head)

            p = probabilities(scale * (q_h @ k_h.T), row_lse, seen)
            # Where nothing is visible p is 0, and 0 must win over whatever sfmg and dlse hold.
            ds = np.where(seen, p * (dout_h @ v_h.T - sfmg[:, None] + row_dlse[:, None]), 0.0)
            rows(dq, call.layout, sequence, head, "q")[...] = scale * (ds @ k_h)
            rows(dk, call.layout, sequence, kv_head, "kv")[...] += scale * (ds.T @ q_h)
            rows(dv, call.layout, sequence, kv_head, "kv")[...] += p.T @ dout_h
            if sink is not None and dsinks is not None:
                dsinks[head] += (sink_probability(sink[head], row_lse) * (row_dlse - sfmg)).sum()
    return Gradients(dq, dk, dv, dsinks)


def sink_probability(sink: float, row_lse: Array) -> Array:
    """What the sink takes of each row: exp(sink - lse), 0 for sink = -inf and 1 for sink = +inf."""
    if np.isinf(sink):
        return np.full(row_lse.shape, 1.0 if sink > 0 else 0.0)
    return np.exp(np.minimum(sink - row_lse, 0.0))


def zero_bound(q: ArrayLike, k: ArrayLike, v: ArrayLike, dout: ArrayLike, scale: float) -> float:
    """What a gradient whose reference is identically zero may hold: 1e-5 * scale * max|dP| * max|operand|.

    max|dP| is bounded from the operands by |dout row| * |v row|, which needs no pairing of heads.
    """
    q, k, v, dout = (np.asarray(x, dtype=np.float64) for x in (q, k, v, dout))
    if min(q.size, k.size, v.size, dout.size) == 0:
        return 0.0
    largest_dp = np.nanmax(np.sqrt(np.nansum(dout**2, axis=-1))) * np.nanmax(
        np.sqrt(np.nansum(v**2, axis=-1))
    )
    operand = max(np.nanmax(np.abs(q)), np.nanmax(np.abs(k)))
    return float(1e-5 * abs(scale) * largest_dp * operand)


def relative_error(x: ArrayLike, reference: ArrayLike) -> float:
    """||x - reference|| / ||reference||, in float64; the plain norm of x where the reference is all zero."""
    wanted = np.asarray(reference, dtype=np.float64)
    # Plain sums: np.linalg.norm asks BLAS, whose threads cost more than they save at this size.
    norm, gap = (math.sqrt(float((y * y).sum())) for y in (wanted, np.asarray(x, dtype=np.float64) - wanted))
    return gap / norm if norm > 0 else gap


# ---- layouts ---------------------------------------------------------------------------------------------


def convert(
    x: Array, source: str, target: str, cu_seqlens: tuple[int, ...] | None = None, slot: int | None = None
) -> Array:
    """A q, k, v, out or gradient array in another layout.

    To and from TND each batch entry fills cu_seqlens[i+1]-cu_seqlens[i] rows of a slot; the slot length is
    `slot`, or the longest entry, and what lies behind the entry is 0.
    """
    if source == target:
        return x.copy()
    if source == "TND":
        assert cu_seqlens is not None
        lengths = np.diff(cu_seqlens)
        longest = int(max(lengths, default=0)) if slot is None else slot
        dense = np.zeros((len(lengths), longest, *x.shape[1:]), dtype=x.dtype)
        for i, length in enumerate(lengths):
            dense[i, :length] = x[cu_seqlens[i] : cu_seqlens[i + 1]]
        return convert(dense, "BSND", target)
    bsnd = x if source == "BSND" else np.swapaxes(x, 1, 2)
    if target == "TND":
        lengths = [bsnd.shape[1]] * bsnd.shape[0] if cu_seqlens is None else np.diff(cu_seqlens)
        parts = [bsnd[i, :length] for i, length in enumerate(lengths)]
        return np.concatenate(parts) if parts else np.zeros((0, *bsnd.shape[2:]), dtype=x.dtype)
    return np.ascontiguousarray(bsnd if target == "BSND" else np.swapaxes(bsnd, 1, 2))


def convert_lse(
    x: Array, source: str, target: str, cu_seqlens: tuple[int, ...] | None = None, slot: int | None = None
) -> Array:
    """An lse array in another layout: (N1, T1) for TND, else (B, N1, S1). Behind an entry stands -inf."""
    if (source == "TND") == (target == "TND"):
        return x.copy()
    if target == "TND":
        lengths = [x.shape[2]] * x.shape[0] if cu_seqlens is None else np.diff(cu_seqlens)
        parts = [x[i, :, :length] for i, length in enumerate(lengths)]
        return np.concatenate(parts, axis=1) if parts else np.zeros((x.shape[1], 0), dtype=x.dtype)
    assert cu_seqlens is not None
    lengths = np.diff(cu_seqlens)
    longest = int(max(lengths, default=0)) if slot is None else slot
    dense = np.full((len(lengths), x.shape[0], longest), -np.inf, dtype=x.dtype)
    for i, length in enumerate(lengths):
        dense[i, :, :length] = x[:, cu_seqlens[i] : cu_seqlens[i + 1]]
    return dense


# ---- finite differences ----------------------------------------------------------------------------------


def numeric_gradient(loss, x: Array, eps: float = 1e-6) -> Array:
    """Central differences of the scalar function `loss` in every element of x (x is restored)."""
    gradient = np.zeros(x.shape)
    for position in np.ndindex(x.shape):
        kept = x[position]
        x[position] = kept + eps
        above = loss()
        x[position] = kept - eps
        below = loss()
        x[position] = kept
        gradient[position] = (above - below) / (2 * eps)
    return gradient
