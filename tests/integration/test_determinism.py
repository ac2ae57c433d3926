"""Bits do not depend on repeats, on the number of threads, on the batch, or on padding; levels and targets
agree within the bound.

Public case 20, and points 5 and 7 of the issue.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import bound
import harness
import oracle
import pytest
import torch
from harness import Inputs
from oracle import CAUSAL, SLIDING_WINDOW, Call

import fag_kernel
import fag_metadata

THREADS = (1, 2, 3, 8)
REPEATS = 20
LENGTHS = (300, 1, 513, 64)
MASKS = {
    "full": {},
    "causal": {"mask_mode": CAUSAL},
    "window": {"mask_mode": SLIDING_WINDOW, "win_left": 64, "win_right": 0},
}


def problem(layout: str, mask: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Call, Inputs]:
    """The four lengths of public case 20: packed, or padded to the longest with NaN behind."""
    if layout == "TND":
        call = harness.packed(LENGTHS, **MASKS[mask])
    else:
        call = Call(layout, seqused_q=LENGTHS, seqused_kv=LENGTHS, **MASKS[mask])
    inputs = harness.random_inputs(call, 4, 513, 513, 8, 2, 64, dtype=dtype, with_sinks=True)
    return call, harness.fill_padding(call, inputs, float("nan"))


def everything(call: Call, inputs: Inputs, **extra: object) -> list[torch.Tensor]:
    """All results of the raw operators and of the front, with a gradient through the lse."""
    dlse = torch.linspace(-1, 1, inputs.q[..., 0].numel()).view(oracle.lse_shape(inputs.q, call.layout))
    front = harness.run_front(call, inputs, dlse, **extra)
    return [*harness.run(harness.TORCH_OPS, call, inputs, **extra), *front]


@pytest.mark.parametrize("mask", MASKS)
def test_pc20_same_bits_for_every_number_of_threads(layout: str, mask: str) -> None:
    call, inputs = problem(layout, mask)
    results = {}
    for count in THREADS:
        with harness.threads(count):
            results[count] = everything(call, inputs)
    assert all(torch.count_nonzero(x) > 0 for x in results[1])
    for count in THREADS[1:]:
        harness.assert_same_bits(results[count], results[1], f"{count} threads and 1:")


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_pc20_same_bits_in_every_repeat(layout: str, mask: str) -> None:
    call, inputs = problem(layout, mask)
    wanted = harness.run(harness.TORCH_OPS, call, inputs)
    for repeat in range(REPEATS):
        harness.assert_same_bits(harness.run(harness.TORCH_OPS, call, inputs), wanted, f"repeat {repeat}:")


@pytest.mark.parametrize("threads", THREADS)
def test_num_threads_of_the_numpy_functions(threads: int) -> None:
    call, inputs = problem("BSND", "causal")
    wanted = harness.run(harness.NUMPY, call, inputs, num_threads=1)
    harness.assert_same_bits(harness.run(harness.NUMPY, call, inputs, num_threads=threads), wanted)
    harness.assert_same_bits(harness.run(harness.TORCH_OPS, call, inputs), wanted, "torch and NumPy:")


@pytest.mark.parametrize("threads", [0, -1])
def test_refuses_a_number_of_threads_below_1(threads: int) -> None:
    call = Call("BSND")
    inputs = harness.random_inputs(call, 1, 3, 3)
    with pytest.raises(ValueError, match=harness.refusal("flash_attn", "num_threads", threads)):
        harness.run_forward(harness.NUMPY, call, inputs, num_threads=threads)


@pytest.mark.parametrize("mask", MASKS)
def test_pc20_a_sequence_alone_has_the_bits_it_has_in_a_batch(layout: str, mask: str) -> None:
    call, inputs = problem(layout, mask)
    got = harness.run(harness.TORCH_OPS, call, inputs)
    for i, length in enumerate(LENGTHS):
        alone_call = harness.uniform(layout, 1, length, length, **MASKS[mask])
        alone = harness.run(harness.TORCH_OPS, alone_call, take(call, inputs, i, length))
        for name, x, wanted in zip(got._fields, got, alone, strict=True):
            entry = take_one(call, x, i, length, is_lse=name == "lse")
            assert torch.count_nonzero(wanted) > 0 or length == 1  # one key: dq and dk are 0 up to rounding
            harness.assert_same_bits(
                [entry], [wanted], f"sequence of {length}, {name}, in the batch and alone:"
            )


def take_one(call: Call, x: torch.Tensor, i: int, length: int, is_lse: bool = False) -> torch.Tensor:
    """Batch entry i of a tensor, used rows only."""
    if call.layout == "TND":
        assert call.cu_seqlens_q is not None
        rows = slice(call.cu_seqlens_q[i], call.cu_seqlens_q[i + 1])
        return x[:, rows] if is_lse else x[rows]
    if is_lse or call.layout == "BNSD":
        return x[i : i + 1, :, :length]
    return x[i : i + 1, :length]


def take(call: Call, inputs: Inputs, i: int, length: int) -> Inputs:
    return Inputs(*(take_one(call, x, i, length).contiguous() for x in inputs[:4]), sinks=inputs.sinks)


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_pc20_deterministic_mode_changes_nothing_and_warns_of_nothing(layout: str, mask: str) -> None:
    call, inputs = problem(layout, mask)
    wanted = everything(call, inputs)
    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = everything(call, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    harness.assert_same_bits(got, wanted)


# ---- metadata of other targets ---------------------------------------------------------------------------

OTHER_TARGETS = {
    "ascend-default": {"target": "Ascend950PR_9589"},
    "ascend-default-balanced": {"target": "Ascend950PR_9589", "split": "balanced"},
    "ascend-largest": {"target": "Ascend950PR_9599"},
    "ascend-smallest": {"target": "Ascend950PR_950z"},
    "cpu-cann": {"split": "cann"},
    "one-core": {"target": fag_metadata.Target(name="one", cube_cores=1, vector_cores=2, l2_bytes=0)},
    "seven-cores": {"target": fag_metadata.Target(name="seven", cube_cores=7, vector_cores=14, l2_bytes=0)},
    "many-cores": {"target": fag_metadata.Target(name="many", cube_cores=50, vector_cores=100, l2_bytes=0)},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("target", OTHER_TARGETS)
def test_metadata_of_any_target_is_executed_right_and_reproducibly(
    layout: str, target: str, mask: str
) -> None:
    call, inputs = problem(layout, mask)
    metadata = harness.make_metadata(call, inputs.q, inputs.k, inputs.v, **OTHER_TARGETS[target])
    results = []
    for count in THREADS:
        with harness.threads(count):
            results.append(everything(call, inputs, metadata=metadata))
    for count, result in zip(THREADS[1:], results[1:], strict=True):
        harness.assert_same_bits(result, results[0], f"{count} threads and 1:")
    got = harness.Result(*results[0][:5])
    # The bound's peer is slow at this size, and its business is test_grid.py's: here the ceiling will do.
    bound.assert_forward(call, inputs, got.out, got.lse, tol_only=True)
    bound.assert_gradients(call, inputs, got.out, got.lse, got[2:], tol_only=True)


@pytest.mark.parametrize("mask", MASKS)
def test_metadata_for_cpu_given_or_not_is_the_same(layout: str, mask: str) -> None:
    call, inputs = problem(layout, mask)
    metadata = harness.make_metadata(call, inputs.q, inputs.k, inputs.v)
    harness.assert_same_bits(everything(call, inputs, metadata=metadata), everything(call, inputs))


# ---- instruction-set levels ------------------------------------------------------------------------------

LEVELS = fag_kernel.abi.cpu_levels()
ORDER = ("portable", "avx2", "avx512", "avx512_bf16", "amx_bf16", "neon", "neon_bf16")


def test_levels_are_known_and_in_order() -> None:
    assert LEVELS[0] == "portable"
    assert list(LEVELS) == [level for level in ORDER if level in LEVELS]
    assert fag_kernel.abi.cpu_level() in LEVELS


def run_capped(cap: str | None, path: Path) -> dict[str, object]:
    """Runs run_level.py in a process of its own with FAG_CPU_LEVEL = cap."""
    import os

    environment = {name: value for name, value in os.environ.items() if name != "FAG_CPU_LEVEL"}
    if cap is not None:
        environment["FAG_CPU_LEVEL"] = cap
    script = Path(__file__).with_name("run_level.py")
    done = subprocess.run(
        [sys.executable, str(script), str(path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("cap", LEVELS)
def test_every_level_is_dispatched_and_within_bound(cap: str, tmp_path: Path) -> None:
    """The process says which level it runs; its results are within the bound and free of its threads."""
    report = run_capped(cap, tmp_path / "results.pt")
    assert report["level"] == cap
    assert report["same_for_all_threads"]
    results = torch.load(tmp_path / "results.pt", weights_only=False)
    assert len(results) == 18
    for key, (call, inputs, got) in results.items():
        inputs, got = Inputs(*inputs), harness.Result(*got)
        try:
            bound.assert_forward(call, inputs, got.out, got.lse)
            bound.assert_gradients(call, inputs, got.out, got.lse, got[2:])
        except AssertionError as error:
            raise AssertionError(f"{key} at level {cap}: {error}") from None


def test_without_a_cap_the_best_level_runs(tmp_path: Path) -> None:
    """amx_bf16, which has never run on hardware, runs only where it is named."""
    assert run_capped(None, tmp_path / "results.pt")["level"] == [x for x in LEVELS if x != "amx_bf16"][-1]


def test_levels_run_different_code(tmp_path: Path) -> None:
    """The same program with another cap gives other bits somewhere: the cap is not just a name."""
    if len(LEVELS) == 1:
        pytest.skip("this machine has the portable level only")
    seen = {}
    for cap in (LEVELS[0], LEVELS[-1]):
        run_capped(cap, tmp_path / f"{cap}.pt")
        seen[cap] = torch.load(tmp_path / f"{cap}.pt", weights_only=False)
    first, last = seen.values()
    different = [key for key in first if not all(map(harness.same_bits, first[key][2], last[key][2]))]
    assert different


def test_unknown_level_is_refused_by_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import fag_kernel.abi as a; print(a.cpu_level())"],
        env={**__import__("os").environ, "FAG_CPU_LEVEL": "sse9"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "FAG_CPU_LEVEL" in done.stderr
    assert "sse9" in done.stderr
    assert "portable" in done.stderr
