"""Runs the kernels with every array flush against a page that may not be touched: `guard_pages.py LAYOUT
SIDE`.

test_memory_safety.py starts it as a process, because one byte outside an array ends it with SIGSEGV. SIDE is
"end" (the array ends where the forbidden page begins) or "start". All instruction-set levels run. The bytes
between the array and its other page boundary hold a pattern that must survive. Prints the number of calls
made.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
import numpy as np
import oracle
import torch
from cases import CASES

import fag_kernel
import fag_kernel.abi
import fag_metadata

PATTERN = 0xA5
PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """An array between two forbidden pages, touching one of them."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, side: str) -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.room = -(-max(size, 1) // PAGE) * PAGE
        self.map = mmap.mmap(-1, self.room + 2 * PAGE)
        whole = np.frombuffer(self.map, dtype=np.uint8)
        base = whole.ctypes.data
        whole[PAGE : PAGE + self.room] = PATTERN
        first = PAGE + self.room - size if side == "end" else PAGE
        self.array = whole[first : first + size].view(dtype).reshape(shape)
        self.rest = whole[PAGE:first] if side == "end" else whole[first + size : PAGE + self.room]
        for page in (base, base + PAGE + self.room):
            if LIBC.mprotect(ctypes.c_void_p(page), PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")

    def assert_rest_untouched(self, what: str) -> None:
        assert np.all(self.rest == PATTERN), f"{what}: bytes outside the array were written"


def reference(x: np.ndarray, layout: str) -> tuple[int, tuple[int, int, int]]:
    """Address and element strides (batch, row, head) as the kernels take an array."""
    strides = [s // x.itemsize for s in x.strides]
    b, s, n = {
        "BSND": (strides[0], strides[1], strides[2]),
        "BNSD": (strides[0], strides[2], strides[1]),
    }.get(layout, (0, strides[0], strides[1]))
    return x.ctypes.data, (b, s, n)


def guard(x: torch.Tensor | np.ndarray, side: str) -> Guarded:
    array = harness.to_numpy(x)
    made = Guarded(array.shape, array.dtype, side)
    made.array[...] = array
    return made


def main(layout: str, side: str) -> None:
    calls = 0
    chosen = [case for case in CASES if case.layout == layout][::4]
    for case in chosen:
        call, inputs = case.call, case.inputs
        inputs = harness.fill_padding(call, inputs, float("nan"))
        dlse = torch.randn(oracle.lse_shape(inputs.q, layout))
        target = "cpu" if case.d > 192 or case.plan != "ascend" else "Ascend950PR_9589"
        arguments = harness.metadata_arguments(call, inputs.q, inputs.k)
        arguments = {name: harness.to_numpy(value) for name, value in arguments.items()}
        sizes = (case.n1, case.n2, case.d)
        problem = fag_metadata.AttentionProblem.from_metadata_args(*sizes, head_dim_v=case.dv, **arguments)
        words = fag_metadata.flash_attn_metadata(*sizes, head_dim_v=case.dv, target=target, **arguments)
        dtype = str(inputs.q.dtype).removeprefix("torch.")
        held = {name: guard(x, side) for name, x in inputs._asdict().items() if x is not None}
        held |= {"words": guard(words, side), "dlse": guard(dlse, side)}
        out_shape = tuple(inputs.dout.shape)
        sinks = held["sinks"].array.ctypes.data if "sinks" in held else 0
        for level in fag_kernel.abi.cpu_levels():
            fag_kernel.abi.set_cpu_level(level)
            for name, like in (("out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
                shape = out_shape if name == "out" else held[like].array.shape
                held[name] = Guarded(shape, held["q"].array.dtype, side)
            held["lse"] = Guarded(tuple(dlse.shape), np.float32, side)
            held["dsinks"] = Guarded((case.n1,), np.float32, side)
            refs = {name: reference(x.array, layout) for name, x in held.items() if x.array.ndim > 2}
            common = {"softmax_scale": call.scale(case.d), "num_threads": 2}
            fag_kernel.abi.forward(
                problem, held["words"].array, dtype, refs["q"], refs["k"], refs["v"], sinks, refs["out"],
                held["lse"].array.ctypes.data, **common,
            )  # fmt: skip
            fag_kernel.abi.backward(
                problem, held["words"].array, dtype, refs["q"], refs["k"], refs["v"], refs["dout"],
                refs["out"], held["lse"].array.ctypes.data, held["dlse"].array.ctypes.data, sinks, refs["dq"],
                refs["dk"], refs["dv"], held["dsinks"].array.ctypes.data if sinks else 0, **common,
            )  # fmt: skip
            calls += 2
            for name, x in held.items():
                x.assert_rest_untouched(f"{case.id} {level} {name}")
            for name in ("out", "dq", "dk", "dv"):
                values = held[name].array
                assert np.isfinite(values.astype(np.float32)).all(), (
                    f"{case.id} {level} {name}: not all written"
                )
    print(calls)


def touch(side: str) -> None:
    """Reads one byte beside an array: the process must not survive it."""
    held = Guarded((3, 5), np.int16, side)
    beside = held.array.ctypes.data + (held.array.nbytes if side == "end" else -1)
    print(ctypes.string_at(beside, 1))


if __name__ == "__main__":
    if sys.argv[1] == "touch":
        touch(sys.argv[2])
    else:
        main(sys.argv[1], sys.argv[2])
