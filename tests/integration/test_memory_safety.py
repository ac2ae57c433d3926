"""Nothing outside the tensors is read or written, offsets are 64-bit, and callers may come from many
threads."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import harness
import pytest
import torch
from oracle import CAUSAL, Call


@pytest.mark.parametrize("side", ["end", "start"])
def test_arrays_between_forbidden_pages(layout: str, side: str) -> None:
    """A quarter of the grid at every instruction-set level: one byte too far would end the process."""
    script = Path(__file__).with_name("guard_pages.py")
    done = subprocess.run(
        [sys.executable, str(script), layout, side], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr[-3000:]}"
    assert int(done.stdout) >= 80


@pytest.mark.parametrize("side", ["end", "start"])
def test_the_pages_are_forbidden(side: str) -> None:
    script = Path(__file__).with_name("guard_pages.py")
    done = subprocess.run([sys.executable, str(script), "touch", side], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGSEGV


def far_apart(x: torch.Tensor, buffer: torch.Tensor, axis: int) -> torch.Tensor:
    """The same values, with the rows of an axis spread over more than 2^31 elements of an untouched
    buffer."""
    strides = list(x.contiguous().stride())
    strides[axis] = buffer.numel() // x.shape[axis]
    view = buffer.as_strided(x.shape, strides)
    return view.copy_(x)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_offsets_beyond_2_to_the_31_elements(layout: str, name: str) -> None:
    """Only the pages of the rows are ever touched: the buffer costs address space, not memory."""
    s = 5
    call = harness.uniform(layout, 1, s, s, mask_mode=CAUSAL)
    inputs = harness.random_inputs(call, 1, s, s, 2, 2, 64)
    wanted = harness.run(harness.TORCH_OPS, call, inputs)
    buffer = torch.empty(2**31 + 2**30, dtype=torch.bfloat16)
    axis = {"BSND": 1, "BNSD": 2, "TND": 0}[layout]
    far = far_apart(getattr(inputs, name), buffer, axis)
    assert (s - 1) * far.stride(axis) > 2**31
    for api in harness.APIS:
        harness.assert_same_bits(harness.run(api, call, inputs._replace(**{name: far})), wanted, api.name)


def test_calls_from_many_threads_at_once(layout: str) -> None:
    """The GIL is released while a call works; calls that overlap do not disturb each other."""
    call = harness.uniform(layout, 2, 130, 150, mask_mode=CAUSAL)
    problems = [harness.random_inputs(call, 2, 130, 150, 4, 2, 64, seed=seed) for seed in range(4)]
    wanted = [harness.run(harness.TORCH_OPS, call, inputs) for inputs in problems]

    def work(turn: int) -> tuple[int, harness.Result]:
        api = harness.APIS[turn % 3]
        return turn % 4, harness.run(api, call, problems[turn % 4])

    with ThreadPoolExecutor(8) as pool:
        for which, got in pool.map(work, range(48)):
            harness.assert_same_bits(got, wanted[which])


def test_backward_of_several_graphs_at_once() -> None:
    """Autograd calls the backward from threads of its own."""
    call = Call("BSND", CAUSAL)
    inputs = harness.random_inputs(call, 2, 130, 130, 4, 2, 64)
    wanted = harness.run_front(call, inputs)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: harness.run_front(call, inputs), range(16)):
            harness.assert_same_bits(got[:5], wanted[:5])
