"""fag_kernel's functions on the kinds of arrays that NumPy users have, and torch tensors with lazy bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import oracle
import pytest
import torch
from oracle import CAUSAL, Call

import fag_kernel
import fag_metadata


def arrays(dtype: torch.dtype = torch.float32) -> tuple[Call, list[np.ndarray]]:
    call = Call("BSND", CAUSAL)
    inputs = harness.random_inputs(call, 2, 9, 13, 4, 2, 16, 8, dtype)
    return call, [harness.to_numpy(x) for x in inputs[:4]]


def run(call: Call, q: Any, k: Any, v: Any, dout: Any, **extra: Any) -> tuple[np.ndarray, ...]:
    common = {"softmax_scale": 0.25, "mask_mode": call.mask_mode, **extra}
    out, lse = fag_kernel.flash_attn(q, k, v, return_softmax_lse=True, **common)
    return (out, lse, *fag_kernel.flash_attn_grad(q, k, v, dout, out, lse, **common))


def reversed_twice(x: np.ndarray) -> np.ndarray:
    """Negative strides on all axes."""
    return np.ascontiguousarray(x[::-1, ::-1, ::-1, ::-1])[::-1, ::-1, ::-1, ::-1]


def misaligned(x: np.ndarray) -> np.ndarray:
    """Starting one byte behind an aligned address."""
    room = np.zeros(x.nbytes + 1, np.uint8)
    room[1:] = np.frombuffer(x.tobytes(), np.uint8)
    made = np.frombuffer(room, x.dtype, offset=1).reshape(x.shape)
    assert not made.flags.aligned
    return made


def read_only(x: np.ndarray) -> np.ndarray:
    made = x.copy()
    made.flags.writeable = False
    return made


KINDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "negative-strides": reversed_twice,
    "misaligned": misaligned,
    "read-only": read_only,
    "fortran-order": np.asfortranarray,
    "every-other": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "last-axis-reversed": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "broadcast": lambda x: np.broadcast_to(x, x.shape),
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_of_array_gives_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    call, given = arrays(dtype)
    wanted = run(call, *given)
    assert np.count_nonzero(wanted[2].astype(np.float32)) > 0
    before = [x.copy() for x in given]
    got = run(call, *(KINDS[kind](x) for x in given))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
        assert a.flags.c_contiguous
        assert a.flags.writeable
    for a, b in zip(given, before, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def test_foreign_byte_order_is_refused_or_right() -> None:
    call, given = arrays()
    wanted = run(call, *given)
    swapped = [x.astype(x.dtype.newbyteorder()) for x in given]
    try:
        got = run(call, *swapped)
    except TypeError as error:
        assert "flash_attn: q" in str(error)  # noqa: PT017 - either way out is right
    else:
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


def test_torch_tensors_are_arrays_too() -> None:
    """Anything on the CPU with DLPack."""
    call, given = arrays()
    wanted = run(call, *given)
    got = run(call, *(torch.from_numpy(x) for x in given))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


def test_lengths_as_lists_arrays_or_tensors() -> None:
    q = np.random.default_rng(0).standard_normal((9, 2, 8)).astype(np.float32)
    cu = [0, 4, 9]
    results = []
    for lengths in (cu, tuple(cu), np.array(cu, np.int32), torch.tensor(cu, dtype=torch.int32)):
        out, _ = fag_kernel.flash_attn(
            q,
            q,
            q,
            cu_seqlens_q=lengths,
            cu_seqlens_kv=lengths,
            layout_q="TND",
            layout_kv="TND",
            layout_out="TND",
        )
        results.append(out)
        metadata = fag_metadata.flash_attn_metadata(
            2, 2, 8, cu_seqlens_q=lengths, cu_seqlens_kv=lengths, layout_q="TND", target="cpu"
        )
        results.append(metadata)
    for out, metadata in zip(results[2::2], results[3::2], strict=True):
        np.testing.assert_array_equal(out, results[0])
        np.testing.assert_array_equal(metadata, results[1])


def test_metadata_is_a_fresh_writable_copy() -> None:
    sizes = {"batch_size": 1, "max_seqlen_q": 9, "max_seqlen_kv": 9}
    first = fag_metadata.flash_attn_metadata(2, 2, 8, **sizes)
    kept = first.copy()
    first[:] = -1
    np.testing.assert_array_equal(fag_metadata.flash_attn_metadata(2, 2, 8, **sizes), kept)


def test_lazily_negated_tensors_are_read_right() -> None:
    """The imaginary part of a conjugate is a view whose minus sign is a flag, not a number in memory."""
    call = Call("BSND")
    inputs = harness.random_inputs(call, 2, 9, 13, 2, 2, 16, dtype=torch.float32)

    def lazy(x: torch.Tensor) -> torch.Tensor:
        view = torch.complex(torch.zeros_like(x), -x).conj().imag
        assert view.is_neg()
        return view

    wanted = harness.run(harness.TORCH_OPS, call, inputs)
    for api in harness.TORCH_APIS:
        lazily = harness.Inputs(*(lazy(x) for x in inputs[:4]))
        harness.assert_same_bits(harness.run(api, call, lazily), wanted, api.name)
    leaves = [lazy(x) for x in inputs[:3]]
    front = harness.run_front(call, harness.Inputs(*leaves, inputs.dout))
    harness.assert_same_bits(front[:5], wanted)


def test_oracle_and_numpy_functions_agree() -> None:
    call, given = arrays()
    out, lse, dq, dk, dv = run(call, *given)
    scaled = harness.with_changes(call, softmax_scale=0.25)
    reference = oracle.backward(*given, out, lse, scaled)
    for x, wanted in zip((dq, dk, dv), reference[:3], strict=True):
        assert oracle.relative_error(x, wanted) < 2e-6
