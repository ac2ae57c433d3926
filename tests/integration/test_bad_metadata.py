"""Metadata that does not belong to the call, or is broken: refused by the first field that differs, or
executed right; never a crash and never a wrong gradient. Public case 49.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bound
import harness
import numpy as np
import oracle
import pytest
import torch
from harness import Api, Inputs
from oracle import CAUSAL, NO_MASK, SLIDING_WINDOW, Call

import fag_kernel.abi
import fag_metadata

B, S1, S2, N1, N2, D = 2, 130, 140, 4, 2, 64
TARGETS = ("cpu", "Ascend950PR_9589")


def problem(layout: str, **changes: Any) -> tuple[Call, Inputs]:
    call = harness.uniform(
        layout, B, S1, S2, **({"mask_mode": SLIDING_WINDOW, "win_left": 40, "win_right": 9} | changes)
    )
    return call, harness.random_inputs(call, B, S1, S2, N1, N2, D)


def assert_refused(
    api: Api, call: Call, inputs: Inputs, metadata: Any, shows: tuple[str, ...], ops: str = "both"
) -> None:
    """Both operators (or the gradient only) refuse this metadata with these words."""
    out, lse = harness.run_forward(api, call, inputs)
    for op in ("flash_attn", "flash_attn_grad"):
        if ops == "grad" and op == "flash_attn":
            harness.assert_same_bits(harness.run_forward(api, call, inputs, metadata=metadata), [out, lse])
            continue
        attempt: Callable[[], Any] = (
            (lambda: harness.run_forward(api, call, inputs, metadata=metadata))
            if op == "flash_attn"
            else (lambda: harness.run_backward(api, call, inputs, out, lse, metadata=metadata))
        )
        with pytest.raises((api.value_error, api.type_error)) as caught:
            attempt()
        text = str(caught.value)
        assert re.search(rf"\b{op}: metadata\b", text), text
        for shown in shows:
            assert re.search(rf"{shown}", text), f"{shown!r} is not in: {text}"


# What differs -> changed arguments of flash_attn_metadata, and what the message must show: field, call,
# metadata.
FOREIGN: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "n1": ({"num_heads_q": 8}, ("num_heads_q", "4", "8")),
    "n2": ({"num_heads_kv": 4}, ("num_heads_kv", "2", "4")),
    "d": ({"head_dim": 72}, ("head_dim", "64", "72")),
    "dv": ({"head_dim_v": 32}, ("head_dim_v", "64", "32")),
    "b": ({"batch_size": 3}, ("batch_size", "2", "3")),
    "s1": ({"max_seqlen_q": 131}, ("max_seqlen_q", "130", "131")),
    "s2": ({"max_seqlen_kv": 139}, ("max_seqlen_kv", "140", "139")),
    "mask": ({"mask_mode": CAUSAL, "win_left": -1, "win_right": -1}, ("mask_mode", "4", "3")),
    "win_left": ({"win_left": 41}, ("win_left", "40", "41")),
    "win_left-open": ({"win_left": -1}, ("win_left", "40", "-1")),
    "win_right": ({"win_right": 8}, ("win_right", "9", "8")),
    "seqused": ({"seqused_q": np.array([130, 130], np.int32)}, ("(seqused_q|max_seqlen_q)",)),
}


@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
@pytest.mark.parametrize("field", FOREIGN)
@pytest.mark.parametrize("target", TARGETS)
def test_pc49_refuses_metadata_of_another_problem(api: Api, layout: str, target: str, field: str) -> None:
    call, inputs = problem(layout)
    changes, shows = FOREIGN[field]
    metadata = harness.make_metadata(call, inputs.q, inputs.k, inputs.v, target=target, **changes)
    assert_refused(api, call, inputs, metadata, shows)


FOREIGN_TND: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "q-lengths": ((0, 100, 260), (0, 140, 280)),
    "kv-lengths": ((0, 130, 260), (0, 141, 280)),
    "swapped": ((0, 130, 260), (0, 280, 280)),
    "more-tokens": ((0, 130, 261), (0, 140, 280)),
}


@pytest.mark.parametrize("layout", ["TND"])
@pytest.mark.parametrize("which", FOREIGN_TND)
def test_pc49_refuses_metadata_of_the_previous_batch(api: Api, layout: str, which: str) -> None:
    """Same B, other lengths: the commonest way to go wrong with a plan that is made once per step."""
    call, inputs = problem(layout)
    cu_q, cu_kv = FOREIGN_TND[which]
    other = harness.with_changes(call, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
    metadata = harness.make_metadata(other, inputs.q, inputs.k, inputs.v)
    assert_refused(api, call, inputs, metadata, ("cu_seqlens",))


@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
def test_pc49_refuses_metadata_of_other_used_lengths(api: Api, layout: str) -> None:
    call, inputs = problem(layout, seqused_q=(130, 7), seqused_kv=(100, 140))
    for changes in ({"seqused_q": (130, 8)}, {"seqused_kv": (140, 100)}):
        other = harness.with_changes(call, **changes)
        metadata = harness.make_metadata(other, inputs.q, inputs.k, inputs.v)
        assert_refused(api, call, inputs, metadata, ("seqused",))


def test_pc49_refuses_metadata_of_another_layout(api: Api, layout: str) -> None:
    call, inputs = problem(layout)
    other = {"BSND": "BNSD", "BNSD": "BSND", "TND": "BSND"}[layout]
    other_call, other_inputs = problem(other)
    metadata = harness.make_metadata(other_call, other_inputs.q, other_inputs.k, other_inputs.v)
    assert_refused(api, call, inputs, metadata, ("layout", layout, other))


def test_pc49_refuses_forward_only_metadata_in_the_gradient(api: Api, layout: str) -> None:
    call, inputs = problem(layout)
    metadata = harness.make_metadata(call, inputs.q, inputs.k, inputs.v, is_grad_enabled=False)
    assert_refused(api, call, inputs, metadata, ("is_grad_enabled", "True", "False"), ops="grad")


def test_pc49_front_refuses_forward_only_metadata_before_the_forward(layout: str) -> None:
    call, inputs = problem(layout)
    metadata = harness.make_metadata(call, inputs.q, inputs.k, inputs.v, is_grad_enabled=False)
    with pytest.raises(ValueError, match=r"flash_attention: metadata .*is_grad_enabled"):
        harness.run_front(call, inputs, metadata=metadata)


BROKEN: dict[str, tuple[Any, tuple[str, ...]]] = {
    "one-word-short": (lambda m: m[:-1], ("words",)),
    "one-word-long": (lambda m: torch.cat([m, m[:1]]), ("words",)),
    "half": (lambda m: m[: len(m) // 2], ("words",)),
    "head-only": (lambda m: m[:16], ("words",)),
    "shorter-than-the-head": (lambda m: m[:7], ("words", "7")),
    "empty": (lambda m: m[:0], ("0",)),
    "int64": (lambda m: m.long(), ("int32", "int64")),
    "float32": (lambda m: m.float(), ("int32", "float32")),
    "two-axes": (lambda m: m.view(2, -1), ("shape",)),
    "all-zero": (torch.zeros_like, ("flash_attn_metadata",)),
    "all-ones": (lambda m: torch.full_like(m, -1), ("flash_attn_metadata",)),
    "shifted-by-a-word": (lambda m: m.roll(1), ("flash_attn_metadata",)),
    "other-version": (lambda m: with_word(m, 9, int(m[9]) + 1), ("version",)),
}


def with_word(metadata: torch.Tensor, index: int, value: int) -> torch.Tensor:
    changed = metadata.clone()
    changed[index] = value
    return changed


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("target", TARGETS)
def test_pc49_refuses_broken_metadata(api: Api, layout: str, target: str, fault: str) -> None:
    call, inputs = problem(layout)
    metadata = harness.make_metadata(call, inputs.q, inputs.k, inputs.v, target=target)
    breaking, shows = BROKEN[fault]
    assert_refused(api, call, inputs, breaking(metadata), shows)


def test_pc49_same_metadata_serves_both_and_none_works(api: Api, layout: str) -> None:
    call, inputs = problem(layout)
    without = harness.run(api, call, inputs)
    bound.assert_gradients(call, inputs, without.out, without.lse, without[2:])
    metadata = harness.make_metadata(call, inputs.q, inputs.k, inputs.v)
    kept = metadata.clone()
    harness.assert_same_bits(harness.run(api, call, inputs, metadata=metadata), without)
    harness.assert_same_bits([metadata], [kept])


def test_metadata_may_be_a_view(api: Api, layout: str) -> None:
    call, inputs = problem(layout)
    metadata = harness.make_metadata(call, inputs.q, inputs.k, inputs.v)
    wide = torch.full((len(metadata), 2), -7, dtype=torch.int32)
    wide[:, 1] = metadata
    harness.assert_same_bits(
        harness.run(api, call, inputs, metadata=wide[:, 1]), harness.run(api, call, inputs, metadata=metadata)
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mode", [NO_MASK, CAUSAL], ids=["full", "causal"])
def test_metadata_made_with_one_bound_fits_a_call_with_another(layout: str, target: str, mode: int) -> None:
    """max_seqlen is a bound: it is no part of the problem. Lengths are given here, in every layout."""
    slots, used = (100, 30, 71), (100, 3, 70)
    if layout == "TND":
        call = harness.packed(slots, mask_mode=mode)
        used = slots
    else:
        call = Call(layout, mode, seqused_q=used, seqused_kv=used)
    inputs = harness.random_inputs(call, 3, 100, 100, N1, N2, D)
    results = []
    for made_with in (None, 100, 128, 300, 5000):
        bounds = {"max_seqlen_q": made_with, "max_seqlen_kv": made_with}
        metadata = harness.make_metadata(call, inputs.q, inputs.k, inputs.v, target=target, **bounds)
        for called_with in (-1, 100, 200, 4096):
            got = harness.run(
                harness.TORCH_OPS,
                call,
                inputs,
                metadata=metadata,
                max_seqlen_q=called_with,
                max_seqlen_kv=called_with,
            )
            if not results:
                bound.assert_forward(call, inputs, got.out, got.lse)
                bound.assert_gradients(call, inputs, got.out, got.lse, got[2:])
            results.append(got)
            harness.assert_same_bits(
                got, results[0], f"metadata made with {made_with}, called with {called_with}:"
            )


# ---- nothing is written before the error -----------------------------------------------------------------


def reference_of(x: np.ndarray, layout: str) -> tuple[int, tuple[int, int, int]]:
    """(address, element strides of batch, row, head) as the kernel takes a tensor."""
    strides = [s // x.itemsize for s in x.strides]
    b, s, n = {"BSND": (0, 1, 2), "BNSD": (0, 2, 1), "TND": (None, 0, 1)}[layout]
    return x.ctypes.data, (0 if b is None else strides[b], strides[s], strides[n])


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_written_before_metadata_is_refused(layout: str, target: str) -> None:
    """Through the kernel's own interface, where the caller owns the outputs: a hole, an overlap and a range
    past the end in the split are refused with every output byte as it was."""
    call, inputs = problem(layout)
    out, lse = harness.run_forward(harness.TORCH_OPS, call, inputs)
    metadata = harness.make_metadata(call, inputs.q, inputs.k, inputs.v, target=target).numpy()
    arguments = harness.metadata_arguments(call, inputs.q, inputs.k)
    arguments = {name: harness.to_numpy(value) for name, value in arguments.items()}
    spec = fag_metadata.AttentionProblem.from_metadata_args(N1, N2, D, **arguments)
    arrays = {
        name: harness.to_numpy(x)
        for name, x in (*zip("qkv", inputs[:3], strict=True), ("do", inputs.dout), ("o", out))
    }
    lse_array = lse.numpy()
    grad = int(metadata[7])
    slots = int(metadata.view(np.uint32)[11] >> 16)
    starts, ends = grad + 8, grad + 8 + slots
    used = int(metadata[grad + 1])
    broken = {
        "past the end": (ends + used - 1, int(metadata[ends + used - 1]) + 1),
        "negative": (starts, -1),
        "hole": (ends + used - 1, int(metadata[ends + used - 1]) - 1),
        "used": (grad + 1, slots + 1),
        "huge": (ends + used - 1, 2**31 - 1),
    }
    for fault, (word, value) in broken.items():
        wrong = metadata.copy()
        wrong[word] = value
        outputs = [
            np.full(x.shape, 0x7B, np.int8).repeat(2, -1) for x in (arrays["q"], arrays["k"], arrays["v"])
        ]
        views = [x.view(np.int16) for x in outputs]
        copies = [x.copy() for x in outputs]
        with pytest.raises(ValueError, match="metadata"):
            fag_kernel.abi.backward(
                spec,
                wrong,
                "bfloat16",
                *(reference_of(arrays[name], layout) for name in ("q", "k", "v", "do", "o")),
                lse_array.ctypes.data,
                0,
                0,
                *(reference_of(x, layout) for x in views),
                0,
                softmax_scale=0.125,
                num_threads=2,
            )
        for x, kept in zip(outputs, copies, strict=True):
            np.testing.assert_array_equal(x, kept, err_msg=fault)


# ---- fuzz ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_random_corruption_is_refused_or_harmless(layout: str, target: str) -> None:
    """Hundreds of corruptions in a process of its own, which must survive: each is refused, or gives the
    right result."""
    script = Path(__file__).with_name("fuzz_metadata.py")
    done = subprocess.run(
        [sys.executable, str(script), layout, target, "70"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["wrong"] == []
    assert report["refused"] > 60
    assert report["refused"] + report["harmless"] == report["tried"]
    assert report["unnamed"] == []


def test_the_fuzz_compares_with_something(layout: str) -> None:
    """Its reference is the float64 gradient, not a zero."""
    call, inputs = problem(layout)
    got = harness.run(harness.TORCH_OPS, call, inputs)
    reference = bound.assert_gradients(call, inputs, got.out, got.lse, got[2:])
    assert np.abs(reference.dq).max() > 0.01
    assert oracle.relative_error(harness.to_float64(got.dq) * 0.99, reference.dq) > 5e-3
