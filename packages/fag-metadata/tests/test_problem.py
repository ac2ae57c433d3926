"""Every argument rule of the operator contract with its message, and what a problem derives."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fag_metadata import (
    AttentionProblem,
    InvalidProblemError,
    InvalidTypeError,
    Layout,
    Lengths,
    MaskMode,
    TensorSpec,
)
from fag_metadata.arguments import check_attn_mask_content, check_softmax_scale

OP = "flash_attn_grad"


def sizes(**changes: Any) -> AttentionProblem:
    arguments: dict[str, Any] = {
        "num_heads_q": 8, "num_heads_kv": 2, "head_dim": 64, "batch_size": 2, "max_seqlen_q": 10,
        "max_seqlen_kv": 20,
    }  # fmt: skip
    arguments.update(changes)
    return AttentionProblem.from_metadata_args(**arguments)


def packed(**changes: Any) -> AttentionProblem:
    arguments: dict[str, Any] = {
        "layout_q": "TND",
        "batch_size": None,
        "max_seqlen_q": None,
        "max_seqlen_kv": None,
    }
    arguments.update(cu_seqlens_q=[0, 5, 22, 25], cu_seqlens_kv=[0, 5, 22, 25])
    arguments.update(changes)
    return sizes(**arguments)


SPECS: dict[str, Any] = {
    "q": ((2, 10, 8, 64), "bfloat16"),
    "k": ((2, 20, 2, 64), "bfloat16"),
    "v": ((2, 20, 2, 32), "bfloat16"),
    "dout": ((2, 10, 8, 32), "bfloat16"),
    "attn_out": ((2, 10, 8, 32), "bfloat16"),
    "softmax_lse": ((2, 8, 10), "float32"),
    "sinks": ((8,), "float32"),
}
TND_SPECS: dict[str, Any] = {
    "q": ((12, 8, 64), "float16"),
    "k": ((12, 2, 64), "float16"),
    "v": ((12, 2, 64), "float16"),
    "dout": ((12, 8, 64), "float16"),
    "attn_out": ((12, 8, 64), "float16"),
    "softmax_lse": ((8, 12), "float32"),
}


def tensors(specs: dict[str, Any] = SPECS, **changes: Any) -> AttentionProblem:
    """A grad call; a change of a tensor is (shape, dtype), of anything else the value."""
    arguments = {name: TensorSpec(*spec) for name, spec in specs.items()}
    for name, value in changes.items():
        is_spec = name in (*SPECS, "attn_mask") and value is not None
        arguments[name] = TensorSpec(*value) if is_spec else value
    return AttentionProblem.from_tensors(OP, **arguments)


def tnd_tensors(**changes: Any) -> AttentionProblem:
    arguments: dict[str, Any] = {f"layout_{name}": "TND" for name in ("q", "kv", "out")}
    arguments.update(cu_seqlens_q=i32(0, 5, 12), cu_seqlens_kv=i32(0, 5, 12))
    arguments.update(changes)
    return tensors(TND_SPECS, **arguments)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def refuses(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call()


# ---- sizes


def test_sizes_of_a_dense_problem() -> None:
    problem = sizes(mask_mode="Causal")
    assert (problem.b, problem.n1, problem.n2, problem.g, problem.d, problem.dv) == (2, 8, 2, 4, 64, 64)
    assert (problem.s1, problem.s2, problem.t1, problem.t2) == (10, 20, 20, 40)
    assert problem.mask_mode is MaskMode.CAUSAL
    assert problem.lengths_kv.tolist() == [20, 20]
    assert problem.starts_kv.tolist() == [0, 20]
    assert not problem.is_variable


def test_sizes_of_a_packed_problem() -> None:
    problem = packed(max_seqlen_q=64)
    assert problem.layout is Layout.TND
    assert (problem.b, problem.s1, problem.t1, problem.max_seqlen_q) == (3, 17, 25, 64)
    assert problem.lengths_q.tolist() == [5, 17, 3]
    assert problem.starts_q.tolist() == [0, 5, 22]
    assert problem.is_variable


def test_used_lengths_replace_slots() -> None:
    problem = packed(seqused_kv=[0, 17, 1])
    assert problem.lengths_kv.tolist() == [0, 17, 1]
    assert problem.starts_kv.tolist() == [0, 5, 22]
    assert problem.has_empty_sequence
    dense = sizes(seqused_q=[3, 10], max_seqlen_q=-1)
    assert (dense.s1, dense.is_variable) == (10, True)


def test_uniform_packed_problem_is_not_variable() -> None:
    problem = packed(cu_seqlens_q=[0, 4, 8], cu_seqlens_kv=[0, 7, 14])
    assert problem.is_uniform_tnd
    assert not problem.is_variable


@pytest.mark.parametrize("empty", [{"batch_size": 0}, {"max_seqlen_q": 0}, {"max_seqlen_kv": 0}])
def test_empty_sizes_are_valid(empty: dict[str, Any]) -> None:
    assert sizes(**empty).b == empty.get("batch_size", 2)


def test_empty_packed_sizes_are_valid() -> None:
    assert packed(cu_seqlens_q=[0], cu_seqlens_kv=[0]).b == 0
    assert packed(cu_seqlens_q=[0, 0], cu_seqlens_kv=[0, 3]).t1 == 0


def test_problems_are_equal_by_value_and_hash() -> None:
    first, second = packed(), packed(cu_seqlens_q=i32(0, 5, 22, 25))
    assert first == second
    assert hash(first) == hash(second)
    assert first != packed(cu_seqlens_q=[0, 6, 22, 25])
    assert first != packed(mask_mode=3)
    assert first != "problem"
    assert len({first, second, sizes()}) == 2


@pytest.mark.parametrize("made", [sizes, packed])
def test_problems_are_frozen_and_their_copies_equal(made: Callable[[], AttentionProblem]) -> None:
    problem = made()
    key = hash(problem), problem.identity
    for other in (copy.copy(problem), copy.deepcopy(problem), pickle.loads(pickle.dumps(problem))):
        assert other == problem
        assert (hash(other), other.identity) == key
    assert dataclasses.replace(problem, dv=32).identity != problem.identity
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.n1 = 4  # type: ignore[misc]


def test_a_pickled_problem_is_equal_in_another_process(tmp_path: Path) -> None:
    problem, file = packed(), tmp_path / "problem"
    hash(problem)  # kept, and of names: another number under another PYTHONHASHSEED
    file.write_bytes(pickle.dumps(problem))
    script = (
        "import dataclasses, pathlib, pickle, sys\n"
        "problem = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "assert problem in {dataclasses.replace(problem)}\n"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", script, file], check=True, env=environment)


def test_lengths_cannot_be_changed() -> None:
    lengths = Lengths.parse(OP, "seqused_q", [1, 2])
    with pytest.raises(ValueError, match="read-only"):
        lengths.values[0] = 5
    with pytest.raises(ValueError, match="read-only"):
        sizes().lengths_q[0] = 5


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"num_heads_q": 6, "num_heads_kv": 4}, InvalidProblemError,
         "num_heads_q must be a multiple of num_heads_kv, got num_heads_q=6, num_heads_kv=4. Pad heads"),
        ({"num_heads_q": 0}, InvalidProblemError, "num_heads_q must be in 1..2147483647, got 0"),
        ({"num_heads_kv": -1}, InvalidProblemError, "num_heads_kv must be in 1..2147483647, got -1"),
        ({"num_heads_q": 8.0}, InvalidTypeError, "num_heads_q must be an int, got float 8.0"),
        ({"num_heads_q": True}, InvalidTypeError, "num_heads_q must be an int, got bool True"),
        ({"head_dim": 0}, InvalidProblemError, "head_dim must be a head dim D in 1..256, got D=0"),
        ({"head_dim": 257}, InvalidProblemError, "head_dim must be a head dim D in 1..256, got D=257"),
        ({"head_dim_v": 65}, InvalidProblemError,
         "head_dim_v must be a head dim Dv in 1..D, got Dv=65 (D=64)"),
        ({"head_dim_v": 0}, InvalidProblemError, "head_dim_v must be a head dim Dv in 1..D, got Dv=0 (D=64)"),
        ({"batch_size": 70000}, InvalidProblemError, "batch_size must be in -1..65535, got 70000"),
        ({"batch_size": -2}, InvalidProblemError, "batch_size must be in -1..65535, got -2"),
        ({"batch_size": None}, InvalidProblemError,
         "batch_size must be given with layout BSND without lengths"),
        ({"max_seqlen_q": -1}, InvalidProblemError,
         "max_seqlen_q must be given with layout BSND without lengths"),
        ({"max_seqlen_kv": -2}, InvalidProblemError, "max_seqlen_kv must be in -1..2147483647, got -2"),
        ({"max_seqlen_q": np.array([4])}, InvalidTypeError, "max_seqlen_q must be an int, got ndarray"),
        ({"mask_mode": 1}, InvalidProblemError,
         "mask_mode must be NO_MASK (0) or CAUSAL (3) or SLIDING_WINDOW (4), got 1"),
        ({"mask_mode": "diagonal"}, InvalidProblemError, "SLIDING_WINDOW (4), got 'diagonal'"),
        ({"mask_mode": 3.0}, InvalidTypeError,
         "mask_mode must be a MaskMode, its int or its name, got float"),
        ({"mask_mode": False}, InvalidTypeError,
         "mask_mode must be a MaskMode, its int or its name, got bool"),
        ({"mask_mode": 4, "win_left": -2}, InvalidProblemError,
         "win_left must be -1 (unbounded) or in 0..2147483647, got -2"),
        ({"mask_mode": 4, "win_right": 2**31}, InvalidProblemError,
         "win_right must be -1 (unbounded) or in 0..2147483647, got 2147483648"),
        ({"mask_mode": 4, "win_right": 1.0}, InvalidTypeError, "win_right must be an int, got float 1.0"),
        ({"mask_mode": 3, "win_left": 2}, InvalidProblemError,
         "win_left must be -1 with mask_mode CAUSAL, got 2 (mask_mode=3). Use mask_mode SLIDING_WINDOW"),
        ({"win_right": 0}, InvalidProblemError, "win_right must be -1 with mask_mode NO_MASK, got 0"),
        ({"layout_q": "bsnd"}, InvalidProblemError,
         "layout_q must be BSND, BNSD or TND (upper case), got 'bsnd'"),
        ({"layout_q": 1}, InvalidTypeError, "layout_q must be a layout name, got int 1"),
        ({"layout_kv": "BNSD"}, InvalidProblemError,
         "layout_kv must equal layout_q, got BNSD (layout_q=BSND)"),
        ({"layout_out": "BNSD"}, InvalidProblemError,
         "layout_out must equal layout_q (or be BSND with layout_q BNSD), got BNSD (layout_q=BSND)"),
        ({"layout_kv": "PA_BBND", "is_grad_enabled": True}, InvalidProblemError,
         "layout_kv must equal layout_q when is_grad_enabled, got PA_BBND"),
        ({"cu_seqlens_q": [0, 3, 5]}, InvalidProblemError,
         "cu_seqlens_q must be None with layout BSND, got 3 elements. Use layout TND, or seqused"),
        ({"seqused_q": [1, 2, 3]}, InvalidProblemError,
         "seqused_q must have B elements, got 3 elements (B=2)"),
        ({"seqused_q": [1, 11]}, InvalidProblemError,
         "max_seqlen_q must be -1 or at least the longest sequence, got 10 (longest=11)"),
        ({"seqused_kv": [-1, 2]}, InvalidProblemError, "seqused_kv must not be negative, got -1 (index=0)"),
        ({"seqused_kv": np.array([1, 2])}, InvalidTypeError, "seqused_kv must be int32, got int64"),
        ({"seqused_kv": [1.5, 2]}, InvalidTypeError, "seqused_kv must hold ints, got float64"),
        ({"seqused_kv": [[1], [2]]}, InvalidProblemError,
         "seqused_kv must have one dimension, got shape (2, 1)"),
        ({"seqused_kv": [[1], 2]}, InvalidTypeError, "seqused_kv must be a flat list of ints, got [[1], 2]"),
        ({"seqused_kv": [1, 2**31]}, InvalidProblemError,
         "seqused_kv must hold values that fit into int32, got 2147483648"),
        ({"seqused_kv": 5}, InvalidTypeError,
         "seqused_kv must be an int32 array, tensor or list of ints, got int"),
    ],
)  # fmt: skip
def test_sizes_refuse(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    refuses(lambda: sizes(**changes), error, text)
    with pytest.raises(error, match="^flash_attn_metadata: "):
        sizes(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"cu_seqlens_q": None}, InvalidProblemError, "cu_seqlens_q must be given with layout TND, got None"),
        ({"cu_seqlens_kv": None}, InvalidProblemError,
         "cu_seqlens_kv must be given with layout TND, got None"),
        ({"cu_seqlens_q": [1, 5, 22, 25]}, InvalidProblemError, "cu_seqlens_q must start with 0, got 1"),
        ({"cu_seqlens_q": [0, 8, 6, 12]}, InvalidProblemError,
         "cu_seqlens_q must not decrease, got 6 after 8 (index=2)"),
        ({"cu_seqlens_q": []}, InvalidProblemError, "cu_seqlens_q must have B+1 elements, got 0 elements"),
        ({"cu_seqlens_kv": [0, 25]}, InvalidProblemError,
         "cu_seqlens_kv must describe the batch of cu_seqlens_q, got B=1 (cu_seqlens_q=B=3)"),
        ({"cu_seqlens_q": np.zeros(65537, np.int32)}, InvalidProblemError,
         "cu_seqlens_q must describe a batch of at most 65535, got B=65536"),
        ({"cu_seqlens_q": np.array([0.0, 5, 22, 25])}, InvalidTypeError,
         "cu_seqlens_q must be int32, got float64"),
        ({"cu_seqlens_q": i32(0, 25).reshape(2, 1)}, InvalidProblemError,
         "cu_seqlens_q must have one dimension, got shape (2, 1)"),
        ({"batch_size": 2}, InvalidProblemError,
         "batch_size must be that of cu_seqlens_q, got 2 (cu_seqlens_q=B=3). Leave it out"),
        ({"seqused_q": [5, 18, 3]}, InvalidProblemError,
         "seqused_q must not exceed the length of the slot, got 18 (index=1, slot=17)"),
        ({"layout_kv": "PA_BBND"}, InvalidProblemError, "layout_kv must be BSND, BNSD or TND"),
    ],
)  # fmt: skip
def test_packed_sizes_refuse(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    refuses(lambda: packed(**changes), error, text)


@pytest.mark.parametrize("bound", [17, 64, -1, None])
def test_pc27_bounds_at_or_above_the_longest_sequence(bound: int | None) -> None:
    assert packed(max_seqlen_q=bound, max_seqlen_kv=bound).lengths_q.tolist() == [5, 17, 3]


@pytest.mark.parametrize("bound", [16, 1, 0, -2])
def test_pc27_refuses_a_bound_below_the_longest_sequence(bound: int) -> None:
    text = f"max_seqlen_q must be -1 or at least the longest sequence, got {bound} (longest=17)"
    refuses(lambda: packed(max_seqlen_q=bound), InvalidProblemError, text)


# ---- tensors


def test_tensors_of_a_dense_problem() -> None:
    problem = tensors()
    assert (problem.b, problem.n1, problem.n2, problem.d, problem.dv) == (2, 8, 2, 64, 32)
    assert (problem.s1, problem.s2, problem.t1, problem.t2) == (10, 20, 20, 40)
    swapped = {
        name: ((spec[0][0], spec[0][2], spec[0][1], spec[0][3]), spec[1])
        for name, spec in SPECS.items()
        if len(spec[0]) == 4
    }
    layouts = {f"layout_{name}": "BNSD" for name in ("q", "kv", "out")}
    assert tensors(**swapped, **layouts).s2 == 20


def test_tensors_of_a_packed_problem() -> None:
    problem = tnd_tensors(seqused_kv=i32(5, 0), max_seqlen_kv=9)
    assert (problem.b, problem.t1, problem.s1, problem.s2) == (2, 12, 7, 5)
    assert problem.lengths_kv.tolist() == [5, 0]


def test_tensors_and_sizes_have_the_same_identity() -> None:
    made = sizes(head_dim_v=32)
    assert tensors().identity == made.identity
    assert tnd_tensors().identity == sizes(
        layout_q="TND", batch_size=None, cu_seqlens_q=[0, 5, 12], cu_seqlens_kv=[0, 5, 12], max_seqlen_q=50,
        max_seqlen_kv=None,
    ).identity  # fmt: skip


def test_forward_output_may_be_bsnd_with_bnsd_inputs() -> None:
    spec = TensorSpec((1, 2, 5, 8), "float32")
    problem = AttentionProblem.from_tensors(
        "flash_attn", q=spec, k=spec, v=spec, layout_q="BNSD", layout_kv="BNSD", layout_out="BSND"
    )
    assert problem.s1 == 5


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"v": ((2, 20, 2, 32), "float32")}, InvalidTypeError,
         "v must have the dtype of q, got float32 (q=bfloat16)"),
        ({"dout": ((2, 10, 8, 32), "float32")}, InvalidTypeError,
         "dout must have the dtype of q, got float32 (q=bfloat16)"),
        ({"attn_out": ((2, 10, 8, 32), "float16")}, InvalidTypeError,
         "attn_out must have the dtype of q, got float16 (q=bfloat16)"),
        ({"q": ((2, 10, 8, 64), "float64")}, InvalidTypeError,
         "q must be float16, bfloat16 or float32, got float64"),
        ({"softmax_lse": ((2, 8, 10), "bfloat16")}, InvalidTypeError,
         "softmax_lse must be float32, got bfloat16"),
        ({"softmax_lse": ((2, 10, 8), "float32")}, InvalidProblemError,
         "softmax_lse must have shape (B, N1, S1) = (2, 8, 10), got shape (2, 10, 8)"),
        ({"sinks": ((8,), "bfloat16")}, InvalidTypeError, "sinks must be float32, got bfloat16"),
        ({"sinks": ((2,), "float32")}, InvalidProblemError,
         "sinks must have shape (N1,) = (8,), got shape (2,)"),
        ({"dout": ((2, 10, 8, 64), "bfloat16")}, InvalidProblemError,
         "dout must have shape (B, S, N, Dv) = (2, 10, 8, 32), got shape (2, 10, 8, 64)"),
        ({"attn_out": ((2, 8, 10, 32), "bfloat16")}, InvalidProblemError,
         "attn_out must have shape (B, S, N, Dv)"),
        ({"q": ((10, 8, 64), "bfloat16")}, InvalidProblemError,
         "q must have shape (B, S, N, D) with layout BSND, got shape (10, 8, 64)"),
        ({"k": ((3, 20, 2, 64), "bfloat16")}, InvalidProblemError,
         "k must have the batch of q, got B=3 (q=B=2)"),
        ({"k": ((2, 20, 2, 65), "bfloat16")}, InvalidProblemError,
         "k must have the head dim D of q, got D=65 (q=D=64)"),
        ({"v": ((2, 21, 2, 32), "bfloat16")}, InvalidProblemError,
         "v must have shape (B, S, N, Dv) = (2, 20, 2, 32), got shape (2, 21, 2, 32)"),
        ({"v": ((2, 20, 2, 72), "bfloat16")}, InvalidProblemError,
         "v must have a head dim Dv in 1..D, got Dv=72 (D=64)"),
        ({"q": ((2, 10, 0, 64), "bfloat16")}, InvalidProblemError,
         "q must have at least one head, got N1=0, N2=2"),
        ({"k": ((2, 20, 3, 64), "bfloat16"), "v": ((2, 20, 3, 32), "bfloat16")}, InvalidProblemError,
         "N1 must be a multiple of N2, got N1=8, N2=3. Pad heads"),
        ({"layout_q": "bsnd"}, InvalidProblemError, "layout_q must be BSND, BNSD or TND (upper case)"),
        ({"layout_kv": "BNSD"}, InvalidProblemError,
         "layout_kv must equal layout_q, got BNSD (layout_q=BSND)"),
        ({"layout_out": "BNSD"}, InvalidProblemError,
         "layout_out must equal layout_q, got BNSD (layout_q=BSND)"),
        ({"mask_mode": 1}, InvalidProblemError, "mask_mode must be NO_MASK (0)"),
        ({"win_left": 2}, InvalidProblemError, "win_left must be -1 with mask_mode NO_MASK, got 2"),
        ({"cu_seqlens_q": i32(0, 10)}, InvalidProblemError, "cu_seqlens_q must be None with layout BSND"),
        ({"seqused_q": i32(10, 11)}, InvalidProblemError,
         "seqused_q must not exceed the length of the slot, got 11 (index=1, slot=10)"),
        ({"seqused_q": i32(1)}, InvalidProblemError, "seqused_q must have B elements, got 1 elements (B=2)"),
        ({"max_seqlen_q": 9}, InvalidProblemError,
         "max_seqlen_q must be -1 or at least the longest sequence, got 9"),
    ],
)  # fmt: skip
def test_tensors_refuse(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    refuses(lambda: tensors(**changes), error, f"{OP}: {text}")


def test_tensors_refuse_a_batch_of_70000() -> None:
    shapes = {"q": (70000, 1, 8, 64), "k": (70000, 1, 2, 64), "v": (70000, 1, 2, 64)}
    specs = {name: TensorSpec(shape, "float16") for name, shape in shapes.items()}
    text = "q must have a batch B of at most 65535, got B=70000"
    refuses(lambda: AttentionProblem.from_tensors(OP, **specs), InvalidProblemError, text)


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        ((257, 257), "q must have a head dim D in 1..256, got D=257 (Dv=257)"),
        ((128, 136), "v must have a head dim Dv in 1..D, got Dv=136 (D=128)"),
        ((0, 0), "q must have a head dim D in 1..256, got D=0 (Dv=0)"),
    ],
)
def test_pc13_refuses_head_dims_by_name(dims: tuple[int, int], text: str) -> None:
    d, dv = dims
    specs = {
        "q": TensorSpec((1, 4, 2, d), "float16"), "k": TensorSpec((1, 4, 2, d), "float16"),
        "v": TensorSpec((1, 4, 2, dv), "float16"),
    }  # fmt: skip
    refuses(lambda: AttentionProblem.from_tensors(OP, **specs), InvalidProblemError, text)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"cu_seqlens_q": np.array([0, 5, 12])}, InvalidTypeError, "cu_seqlens_q must be int32, got int64"),
        ({"cu_seqlens_q": np.array([0.0, 5, 12])}, InvalidTypeError,
         "cu_seqlens_q must be int32, got float64"),
        ({"cu_seqlens_q": i32(5, 12)}, InvalidProblemError, "cu_seqlens_q must start with 0, got 5"),
        ({"cu_seqlens_q": i32(0, 5, 12).reshape(3, 1)}, InvalidProblemError,
         "cu_seqlens_q must have one dimension, got shape (3, 1)"),
        ({"cu_seqlens_q": i32(1, 6, 12)}, InvalidProblemError, "cu_seqlens_q must start with 0, got 1"),
        ({"cu_seqlens_q": i32(0, 8, 6, 12)}, InvalidProblemError,
         "cu_seqlens_q must not decrease, got 6 after 8"),
        ({"cu_seqlens_q": i32(0, 6, 13)}, InvalidProblemError,
         "cu_seqlens_q must end with the number of tokens T, got 13 (T=12)"),
        ({"cu_seqlens_kv": i32(0, 4, 8, 12)}, InvalidProblemError,
         "cu_seqlens_kv must describe the batch of cu_seqlens_q, got B=3 (cu_seqlens_q=B=2)"),
        ({"cu_seqlens_q": None}, InvalidProblemError, "cu_seqlens_q must be given with layout TND, got None"),
        ({"seqused_kv": i32(6, 7)}, InvalidProblemError,
         "seqused_kv must not exceed the length of the slot, got 6 (index=0, slot=5)"),
        ({"seqused_kv": i32(-1, 7)}, InvalidProblemError,
         "seqused_kv must not be negative, got -1 (index=0)"),
        ({"softmax_lse": ((12, 8), "float32")}, InvalidProblemError,
         "softmax_lse must have shape (N1, T1) = (8, 12), got shape (12, 8)"),
        ({"q": ((1, 12, 8, 64), "float16")}, InvalidProblemError,
         "q must have shape (T, N, D) with layout TND"),
    ],
)  # fmt: skip
def test_pc28_refuses_malformed_lengths(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    refuses(lambda: tnd_tensors(**changes), error, f"{OP}: {text}")


def test_pc28_refuses_lengths_without_values() -> None:
    class OnAnotherDevice:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            raise TypeError("no data here")

    text = "cu_seqlens_q must hold its values on the host, got OnAnotherDevice: no data here"
    refuses(lambda: tnd_tensors(cu_seqlens_q=OnAnotherDevice()), InvalidTypeError, text)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"mask_mode": 0, "attn_mask": ((2048, 2048), "int8")}, InvalidProblemError,
         "attn_mask must be None with mask_mode NO_MASK, got shape (2048, 2048)"),
        ({"mask_mode": 3, "attn_mask": ((2048, 2048), "float32")}, InvalidTypeError,
         "attn_mask must be None or CANN's constant: int8, uint8 or bool (2048, 2048)"),
        ({"mask_mode": 3, "attn_mask": ((600, 600), "int8")}, InvalidProblemError,
         "diagonal, got shape (600, 600)"),
        ({"mask_mode": 4, "attn_mask": ((1, 1, 1, 600), "bool")}, InvalidProblemError,
         "got shape (1, 1, 1, 600)"),
    ],
)  # fmt: skip
def test_pc44_refuses_other_masks(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    refuses(lambda: tensors(**changes), error, text)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool"])
def test_pc44_accepts_the_constant(dtype: str) -> None:
    tensors(mask_mode=3, attn_mask=((2048, 2048), dtype))
    check_attn_mask_content(OP, np.triu(np.ones((2048, 2048), dtype), 1))


def test_pc44_refuses_inverted_content() -> None:
    inverted = 1 - np.triu(np.ones((2048, 2048), np.int8), 1)
    refuses(lambda: check_attn_mask_content(OP, inverted), InvalidProblemError, "got 1 at [0, 0]. Pass None")
    one_off = np.triu(np.ones((2048, 2048), np.int8), 1)
    one_off[1000, 7] = 1
    refuses(lambda: check_attn_mask_content(OP, one_off), InvalidProblemError, "got 1 at [1000, 7]")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_pc42_softmax_scale_must_be_finite(value: float) -> None:
    refuses(
        lambda: check_softmax_scale(OP, value), InvalidProblemError, "softmax_scale must be finite in float32"
    )


def test_pc42_softmax_scale_must_be_a_number() -> None:
    assert check_softmax_scale(OP, -1) == -1.0
    for value in ("1", None, True):
        refuses(
            lambda value=value: check_softmax_scale(OP, value),
            InvalidTypeError,
            "softmax_scale must be a float",
        )


@pytest.mark.parametrize("value", [3, "causal", "CAUSAL", "Causal", MaskMode.CAUSAL, np.int32(3)])
def test_mask_mode_by_number_name_or_member(value: Any) -> None:
    assert MaskMode.parse(OP, value) is MaskMode.CAUSAL


def test_lengths_from_a_tensor_like_object() -> None:
    class HostTensor:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return i32(0, 5, 12)

    assert tnd_tensors(cu_seqlens_q=HostTensor()).b == 2
