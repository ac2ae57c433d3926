"""Prepared calls: what is looked at once holds for every call after it."""

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

from fag_kernel import abi

sys.path.insert(0, str(Path(__file__).parent))
from cpu_cases import CAUSAL, Case, address, array_ref, assert_same_bits

PACKED = {"cu_seqlens_q": (0, 130, 135, 395), "cu_seqlens_kv": (0, 140, 147, 347)}
CASES = [
    Case("BSND", n1=1, n2=1, d=64, dtype="bfloat16", s1=64, s2=64),
    Case("TND", n1=4, n2=2, d=16, mask_mode=CAUSAL, has_sinks=True, has_dlse=True, **PACKED),
    Case("BNSD", n1=8, n2=8, d=16, b=9, s1=70, s2=80),  # more spans than are kept
]


def strides(case, *arrays):
    return [array_ref(array, case.layout)[1] for array in arrays]


def pointers(*arrays):
    return [array.ctypes.data for array in arrays]


def prepare(case, metadata=None):
    """The two calls; nothing of the case but its strides is used."""
    words = case.metadata() if metadata is None else metadata
    common = (case.problem(), words, case.dtype, *strides(case, case.q, case.k, case.v))
    rows = strides(case, case.dout)[0]
    forward = abi.prepare_forward(*common, rows)
    return forward, abi.prepare_backward(*common, rows, rows, *strides(case, case.q, case.k, case.v))


def run(case, calls, threads):
    """Everything the calls compute, in arrays that hold 7 before."""
    forward, backward = calls
    out, lse = np.full(case.dout.shape, 7, case.dout.dtype), np.full(case.lse_shape, 7, np.float32)
    qkv, sinks = pointers(case.q, case.k, case.v), address(case.sinks)
    forward(*qkv, sinks, *pointers(out, lse), case.scale, threads)
    grads = [np.full(x.shape, 7, x.dtype) for x in (case.q, case.k, case.v)]
    dsinks = None if case.sinks is None else np.full(case.sinks.shape, 7, np.float32)
    backward(
        *qkv, *pointers(case.dout, out, lse), address(case.dlse), sinks, *pointers(*grads), address(dsinks),
        case.scale, threads,
    )  # fmt: skip
    return out, lse, *grads, dsinks


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.layout)
def test_same_bits_as_calls_on_their_own(case):
    """Any number of threads in any order: the schedule of the call before is not that of the next."""
    calls = prepare(case)
    expected = case.run()
    for threads in (1, 2, 2, 8, 1, 3):
        assert_same_bits(run(case, calls, threads), expected)


def test_call_keeps_what_it_was_prepared_from():
    case = CASES[1]
    metadata = case.metadata().copy()
    calls = prepare(case, metadata)
    metadata[:] = -1  # checked, and not read again
    abi.native_problem.cache_clear()
    gc.collect()
    assert_same_bits(run(case, calls, 2), case.run())


def test_addresses_and_scale_are_those_of_each_call():
    case, other = CASES[0], Case("BSND", n1=1, n2=1, d=64, dtype="bfloat16", s1=64, s2=64, seed=9, scale=0.3)
    calls = prepare(case)
    assert_same_bits(run(other, calls, 2), other.run())
    assert_same_bits(run(case, calls, 2), case.run())


def test_damaged_metadata_is_refused_before_any_call():
    case = CASES[1]
    words = case.metadata().copy()
    words[19] = -1
    with pytest.raises(ValueError, match="metadata: .*FA end"):
        prepare(case, words)
    words = case.metadata().copy()
    words[7] = 0
    with pytest.raises(ValueError, match="is_grad_enabled must be True"):
        prepare(case, words)


@pytest.mark.parametrize(
    ("scale", "threads", "message"),
    [
        (float("nan"), 1, "softmax_scale must be finite"),
        (1e39, 1, "softmax_scale must"),
        (1.0, 0, "num_threads must"),
    ],
)
def test_numbers_of_a_call_are_checked(scale, threads, message):
    case = CASES[0]
    forward, backward = prepare(case)
    with pytest.raises(ValueError, match=message):
        forward(0, 0, 0, 0, 0, 0, scale, threads)
    with pytest.raises(ValueError, match=message):
        backward(*[0] * 12, scale, threads)
