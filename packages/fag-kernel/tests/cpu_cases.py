"""Problems for the CPU kernels, run through fag_kernel.abi, and the operator in float64 to compare with.

The reference gradient is made from the same rounded inputs and the same attn_out and lse as the kernel's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from fag_kernel import abi
from fag_metadata import TARGETS, AttentionProblem, TensorSpec, metadata_for

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
# Relative L2 error of an output: rounding of the type, and of P and dS as operands of products in that type.
BOUND = {"float16": 1e-3, "bfloat16": 5e-3, "float32": 2e-6}
LAYOUTS = ("BSND", "BNSD", "TND")
# Instruction-set levels of all architectures; those of one architecture are in ascending order.
LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx_bf16", "neon", "neon_bf16")
CAUSAL, WINDOW = 3, 4


def array_ref(array, layout):
    """The ABI's (address, strides of batch, sequence, head) of an array whose last axis is contiguous."""
    strides = [stride // array.itemsize for stride in array.strides]
    if layout == "TND":
        return array.ctypes.data, (0, strides[0], strides[1])
    return array.ctypes.data, tuple(strides[i] for i in ((0, 1, 2) if layout == "BSND" else (0, 2, 1)))


@dataclass
class Case:
    """One problem with random inputs. Lengths: s1, s2 for the dense layouts, cu_seqlens for TND."""

    layout: str = "BSND"
    dtype: str = "bfloat16"
    n1: int = 2
    n2: int = 2
    d: int = 64
    dv: int | None = None
    b: int = 1
    s1: int = 0
    s2: int = 0
    mask_mode: int = 0
    win_left: int = -1
    win_right: int = -1
    cu_seqlens_q: tuple[int, ...] | None = None
    cu_seqlens_kv: tuple[int, ...] | None = None
    seqused_q: tuple[int, ...] | None = None
    seqused_kv: tuple[int, ...] | None = None
    max_seqlen_q: int = -1
    max_seqlen_kv: int = -1
    has_sinks: bool = False
    has_dlse: bool = False
    scale: float | None = None
    seed: int = 0
    target: str = "cpu"
    q: np.ndarray = field(init=False)

    def __post_init__(self):
        self.dv = self.d if self.dv is None else self.dv
        self.scale = self.d**-0.5 if self.scale is None else self.scale
        rng = np.random.default_rng(self.seed)

        def random(n, width, s, cu):
            shape = {"BSND": (self.b, s, n, width), "BNSD": (self.b, n, s, width)}
            shape = (cu[-1], n, width) if self.layout == "TND" else shape[self.layout]
            return rng.standard_normal(shape).astype(DTYPES[self.dtype])

        self.q = random(self.n1, self.d, self.s1, self.cu_seqlens_q)
        self.k = random(self.n2, self.d, self.s2, self.cu_seqlens_kv)
        self.v = random(self.n2, self.dv, self.s2, self.cu_seqlens_kv)
        self.dout = random(self.n1, self.dv, self.s1, self.cu_seqlens_q)
        if self.layout == "TND":
            self.lse_shape = (self.n1, self.cu_seqlens_q[-1])
        else:
            self.lse_shape = (self.b, self.n1, self.s1)
        self.sinks = rng.standard_normal(self.n1).astype(np.float32) if self.has_sinks else None
        self.dlse = rng.standard_normal(self.lse_shape).astype(np.float32) if self.has_dlse else None

    def problem(self):
        def spec(array):
            return TensorSpec(array.shape, self.dtype)

        def lengths(values):
            return None if values is None else np.asarray(values, np.int32)

        return AttentionProblem.from_tensors(
            "flash_attn_grad",
            q=spec(self.q),
            k=spec(self.k),
            v=spec(self.v),
            dout=spec(self.dout),
            cu_seqlens_q=lengths(self.cu_seqlens_q),
            cu_seqlens_kv=lengths(self.cu_seqlens_kv),
            seqused_q=lengths(self.seqused_q),
            seqused_kv=lengths(self.seqused_kv),
            mask_mode=self.mask_mode,
            win_left=self.win_left,
            win_right=self.win_right,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_kv=self.max_seqlen_kv,
            layout_q=self.layout,
            layout_kv=self.layout,
            layout_out=self.layout,
        )

    def metadata(self, target=None):
        return metadata_for(self.problem(), TARGETS[self.target] if target is None else target)

    def forward(self, *, threads=2, metadata=None):
        """(out, lse); both are filled with 7 before, so that what nobody wrote shows."""
        out = np.full(self.dout.shape, 7, self.dout.dtype)
        lse = np.full(self.lse_shape, 7, np.float32)
        abi.forward(
            self.problem(), self.metadata() if metadata is None else metadata, self.dtype,
            array_ref(self.q, self.layout), array_ref(self.k, self.layout), array_ref(self.v, self.layout),
            address(self.sinks), array_ref(out, self.layout), lse.ctypes.data,
            softmax_scale=self.scale, num_threads=threads,
        )  # fmt: skip
        return out, lse

    def backward(self, out, lse, *, threads=2, metadata=None):
        """(dq, dk, dv, dsinks or None), all filled with 7 before."""
        dq, dk, dv = (np.full(x.shape, 7, x.dtype) for x in (self.q, self.k, self.v))
        dsinks = None if self.sinks is None else np.full(self.sinks.shape, 7, np.float32)
        abi.backward(
            self.problem(), self.metadata() if metadata is None else metadata, self.dtype,
            *(array_ref(x, self.layout) for x in (self.q, self.k, self.v, self.dout, out)),
            lse.ctypes.data, address(self.dlse), address(self.sinks),
            *(array_ref(x, self.layout) for x in (dq, dk, dv)), address(dsinks),
            softmax_scale=self.scale, num_threads=threads,
        )  # fmt: skip
        return dq, dk, dv, dsinks

    def run(self, *, threads=2, metadata=None):
        """Everything a call computes: (out, lse, dq, dk, dv, dsinks or None)."""
        out, lse = self.forward(threads=threads, metadata=metadata)
        return out, lse, *self.backward(out, lse, threads=threads, metadata=metadata)

    # ---- reference ---------------------------------------------------------------------------------------

    def entries(self):
        """(index, first query token, query rows, first key token, keys) of each batch entry, used lengths."""
        for i in range(self.b if self.layout != "TND" else len(self.cu_seqlens_q) - 1):
            start_q = start_kv = 0
            s1, s2 = self.s1, self.s2
            if self.layout == "TND":
                start_q, start_kv = self.cu_seqlens_q[i], self.cu_seqlens_kv[i]
                s1, s2 = self.cu_seqlens_q[i + 1] - start_q, self.cu_seqlens_kv[i + 1] - start_kv
            s1 = s1 if self.seqused_q is None else self.seqused_q[i]
            s2 = s2 if self.seqused_kv is None else self.seqused_kv[i]
            yield i, start_q, s1, start_kv, s2

    def rows(self, array, i, start, count, head):
        """View of some rows of a head."""
        if self.layout == "TND":
            return array[start : start + count, head]
        return array[i, :count, head] if self.layout == "BSND" else array[i, head, :count]

    def lse_rows(self, array, i, start, count, head):
        return array[head, start : start + count] if self.layout == "TND" else array[i, head, :count]

    def visible(self, s1, s2):
        i, j = np.arange(s1)[:, None], np.arange(s2)[None, :]
        diagonal = j - i - (s2 - s1)
        seen = np.ones((s1, s2), bool)
        if self.mask_mode == CAUSAL:
            seen &= diagonal <= 0
        if self.mask_mode == WINDOW and self.win_left >= 0:
            seen &= diagonal >= -self.win_left
        if self.mask_mode == WINDOW and self.win_right >= 0:
            seen &= diagonal <= self.win_right
        return seen

    def takes_part(self):
        """Which rows of q and of k see or are seen, broadcastable to their arrays; others get zeros."""
        in_q, in_kv = np.zeros((*self.q.shape[:-1], 1), bool), np.zeros((*self.k.shape[:-1], 1), bool)
        for i, start_q, s1, start_kv, s2 in self.entries():
            seen = self.visible(s1, s2)
            for head in range(self.n1):
                self.rows(in_q, i, start_q, s1, head)[...] = seen.any(axis=1)[:, None]
            for head in range(self.n2):
                self.rows(in_kv, i, start_kv, s2, head)[...] = seen.any(axis=0)[:, None]
        return in_q, in_kv

    def reference_forward(self):
        q, k, v = (x.astype(np.float64) for x in (self.q, self.k, self.v))
        out, lse = np.zeros(self.dout.shape), np.full(self.lse_shape, -np.inf)
        for i, start_q, s1, start_kv, s2 in self.entries():
            seen = self.visible(s1, s2)
            for head in range(self.n1):
                kv_head = head // (self.n1 // self.n2)
                scores = self.scale * (
                    self.rows(q, i, start_q, s1, head) @ self.rows(k, i, start_kv, s2, kv_head).T
                )
                scores = np.where(seen, scores, -np.inf)
                if self.sinks is not None:
                    scores = np.concatenate([scores, np.full((s1, 1), self.sinks[head])], axis=1)
                top = scores.max(axis=1, initial=-np.inf)
                shift = np.where(np.isfinite(top), top, 0.0)
                with np.errstate(divide="ignore"):
                    row_lse = shift + np.log(np.exp(scores - shift[:, None]).sum(axis=1))
                finite_lse = np.where(np.isfinite(row_lse), row_lse, 0.0)
                p = np.exp(scores - finite_lse[:, None])[:, :s2]
                self.rows(out, i, start_q, s1, head)[...] = p @ self.rows(v, i, start_kv, s2, kv_head)
                self.lse_rows(lse, i, start_q, s1, head)[...] = row_lse
        return out, lse

    def reference_backward(self, out, lse):
        """(dq, dk, dv, dsinks, norms of the terms that dq, dk, dv are differences of)."""
        q, k, v, dout, out = (x.astype(np.float64) for x in (self.q, self.k, self.v, self.dout, out))
        dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
        dlse_all = np.zeros(self.lse_shape) if self.dlse is None else self.dlse
        dsinks = None if self.sinks is None else np.zeros(self.n1)
        noise = np.zeros(2)
        for i, start_q, s1, start_kv, s2 in self.entries():
            seen = self.visible(s1, s2)
            for head in range(self.n1):
                kv_head = head // (self.n1 // self.n2)
                q_h, dout_h, out_h = (self.rows(x, i, start_q, s1, head) for x in (q, dout, out))
                k_h, v_h = (self.rows(x, i, start_kv, s2, kv_head) for x in (k, v))
                row_lse = self.lse_rows(lse, i, start_q, s1, head)[:, None].astype(np.float64)
                dlse = self.lse_rows(dlse_all, i, start_q, s1, head)[:, None]
                sfmg = (dout_h * out_h).sum(axis=1)[:, None]
                with np.errstate(invalid="ignore"):
                    exponent = np.minimum(self.scale * (q_h @ k_h.T) - row_lse, 0.0)
                p = np.where(seen, np.exp(exponent), 0.0)
                ds = np.where(seen, p * (dout_h @ v_h.T - sfmg + dlse), 0.0)
                terms = np.where(
                    seen, p * (np.abs(dout_h) @ np.abs(v_h.T) + np.abs(sfmg) + np.abs(dlse)), 0.0
                )
                noise[0] += np.square(terms @ np.abs(k_h)).sum() * self.scale**2
                noise[1] += np.square(terms.T @ np.abs(q_h)).sum() * self.scale**2
                self.rows(dq, i, start_q, s1, head)[...] = self.scale * ds @ k_h
                self.rows(dk, i, start_kv, s2, kv_head)[...] += self.scale * ds.T @ q_h
                self.rows(dv, i, start_kv, s2, kv_head)[...] += p.T @ dout_h
                if dsinks is not None:
                    dsinks[head] += (
                        np.exp(np.minimum(self.sinks[head] - row_lse, 0.0)) * (dlse - sfmg)
                    ).sum()
        return dq, dk, dv, dsinks, np.sqrt([*noise, 0.0])

    def assert_right(self, *, threads=2, factor=1.0):
        """Forward and backward against float64; padding must be exactly 0, lse -inf where nothing is seen."""
        out, lse = self.forward(threads=threads)
        reference_out, reference_lse = self.reference_forward()
        bound = factor * BOUND[self.dtype]
        assert relative_error(out, reference_out) < bound
        is_finite = np.isfinite(reference_lse)
        np.testing.assert_array_equal(np.isfinite(lse), is_finite)
        np.testing.assert_allclose(lse[is_finite], reference_lse[is_finite], rtol=3e-6, atol=3e-6)
        gradients = self.backward(out, lse, threads=threads)
        *references, noise = self.reference_backward(out, lse)
        for name, gradient, reference, terms in zip(
            ("dq", "dk", "dv"), gradients, references, noise, strict=False
        ):
            error = np.linalg.norm(gradient.astype(np.float64) - reference)
            assert error <= bound * np.linalg.norm(reference) + 2e-7 * terms, name
        if self.sinks is not None:
            np.testing.assert_allclose(
                gradients[3], references[3], rtol=1e-5, atol=1e-5 * np.abs(references[3]).max()
            )
        in_q, in_kv = self.takes_part()
        for gradient, takes_part in zip(gradients[:3], (in_q, in_kv, in_kv), strict=True):
            assert not np.any(gradient.astype(np.float32) * ~takes_part)
        assert not np.any(out.astype(np.float32) * ~in_q)


def address(array):
    return 0 if array is None else array.ctypes.data


def relative_error(x, reference):
    """||x - reference|| / ||reference||; the norm of x where the reference is zero."""
    norm = np.linalg.norm(reference)
    return np.linalg.norm(x.astype(np.float64) - reference) / (norm if norm > 0 else 1.0)


def assert_same_bits(actual, expected):
    """Bitwise equality of tuples of arrays; None matches None."""
    for a, b in zip(actual, expected, strict=True):
        if b is None:
            assert a is None
        else:
            np.testing.assert_array_equal(bits(a), bits(b))


def bits(array):
    return np.ascontiguousarray(array).view(np.uint32 if array.itemsize == 4 else np.uint16)
