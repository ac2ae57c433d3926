"""What a call costs around its kernel, and what it costs to describe, split and plan a problem."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from cases import Case
from contenders import Inputs, fag_arguments
from measure import OURS, Record
from timing import Spread, differences, take_turns

import fag_torch
from fag_kernel import abi
from fag_kernel.plan import plan
from fag_metadata import AttentionProblem, TensorSpec, metadata_for

TARGETS = ("cpu", "Ascend950PR_9599")
SMALLEST = Case("overhead", "bfloat16", 1, 1, 1, 16, 64)

_RAGGED_SEQUENCES = 2048
_CALLS_IN_A_TURN = 20


def measure_overhead(seconds: float, rounds: int) -> list[Record]:
    """Quartiles in microseconds: a backward call beyond its kernel; metadata and plan for each target.

    Problems that are new are new in every repetition, and describing them counts.
    """
    share = seconds / (2 + 3 * len(TARGETS))
    records = [_call(2 * share, rounds)]
    for target in TARGETS:
        problems = {
            "cached": _same_problem(),
            "new dense": _dense_problems(),
            "new ragged": _ragged_problems(),
        }
        for what, describe in problems.items():
            times = _times_of(describe, target, share, rounds)
            records.append(_record(what, target, Spread.of(times), len(times)))
    return records


def _record(what: str, target: str, seconds: Spread, rounds: int) -> Record:
    return {
        "what": what,
        "target": target,
        "rounds": rounds,
        "microseconds": [round(1e6 * value, 2) for value in seconds],
    }


def _call(seconds: float, rounds: int) -> Record:
    """The operator minus the kernel alone with the arguments that the operator would find."""
    case, x = SMALLEST, Inputs.of(SMALLEST)
    arguments = fag_arguments(case)
    out, lse = fag_torch.flash_attn(x.q, x.k, x.v, return_softmax_lse=True, **arguments)
    sizes = {name: TensorSpec(tuple(t.shape), case.dtype) for name, t in (("q", x.q), ("k", x.k), ("v", x.v))}
    layouts = {name: arguments[name] for name in ("layout_q", "layout_kv", "layout_out")}
    problem = AttentionProblem.from_tensors("benchmark", **sizes, mask_mode=0, **layouts)
    metadata = metadata_for(problem, "cpu")
    grads = tuple(map(torch.empty_like, (x.q, x.k, x.v)))
    arrays = (x.q, x.k, x.v, x.dout, out)
    addresses, grad_addresses = ([t.data_ptr() for t in some] for some in (arrays, grads))
    kernel = abi.prepare_backward(problem, metadata, case.dtype, *map(_strides, (*arrays, *grads)))
    scale, threads = arguments["softmax_scale"], torch.get_num_threads()
    call = torch.ops.cann_ops_transformer.flash_attn_grad

    jobs: dict[str, Callable[[], Any]] = {
        "operator": lambda: call(
            x.q, x.k, x.v, x.dout, out, lse, softmax_scale=scale,
            layout_q="BNSD", layout_kv="BNSD", layout_out="BNSD",
        ),
        "kernel": lambda: kernel(*addresses, lse.data_ptr(), 0, 0, *grad_addresses, 0, scale, threads),
    }  # fmt: skip
    expected = OURS.jobs(case, x).backward()
    jobs["kernel"]()
    assert all(map(torch.equal, expected, grads))
    assert all(map(torch.equal, expected, jobs["operator"]()))
    times = take_turns(jobs, seconds, rounds, _CALLS_IN_A_TURN)
    beyond = differences(times["operator"], times["kernel"])
    alone = Spread.of(times["kernel"])
    return _record("call", "cpu", beyond, len(times["kernel"])) | {
        "kernel_microseconds": [round(1e6 * value, 2) for value in alone]
    }


def _strides(tensor: torch.Tensor) -> abi.Strides:
    b, n, s, _ = tensor.stride()
    return b, s, n


Describe = Callable[[], AttentionProblem]


def _times_of(describe: Iterator[Describe], target: str, seconds: float, rounds: int) -> list[float]:
    """Processor times of describing (where it is new), splitting and planning one problem after the other."""

    def once() -> float:
        make = next(describe)
        start = time.thread_time()
        problem = make()
        metadata_for(problem, target)
        plan(problem, target)
        abi.native_problem(problem)
        return time.thread_time() - start

    once()
    begin, times = time.perf_counter(), []
    while len(times) < rounds or time.perf_counter() - begin < seconds:
        times.append(once())
    return times


def _same_problem() -> Iterator[Describe]:
    problem = next(_dense_problems())()
    while True:
        yield lambda: problem


def _dense_problems() -> Iterator[Describe]:
    s = 1024
    while True:
        s += 1
        yield lambda s=s: AttentionProblem.from_metadata_args(
            8, 8, 64, batch_size=1, max_seqlen_q=s, max_seqlen_kv=s, mask_mode=3
        )


def _ragged_problems() -> Iterator[Describe]:
    generator = np.random.default_rng(0)
    while True:
        starts = np.cumsum([0, *generator.integers(1, 513, _RAGGED_SEQUENCES)]).astype(np.int32)
        yield lambda starts=starts: AttentionProblem.from_metadata_args(
            8, 8, 64, cu_seqlens_q=starts, cu_seqlens_kv=starts, layout_q="TND", mask_mode=3
        )
