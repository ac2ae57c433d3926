"""How much the resident set grows at its peak during one call: `measure_memory.py WHAT OP`, prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import harness
import torch
from oracle import Call


def peak_and_now_kib() -> tuple[int, int]:
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = value
    return int(fields["VmHWM"].split()[0]), int(fields["VmRSS"].split()[0])


def problem(what: str) -> tuple[Call, harness.Inputs]:
    if what == "grouped":
        call = Call("BSND")
        return call, harness.random_inputs(call, 1, 16, 16384, 64, 1, 128)
    if what == "ragged":
        call = harness.packed((4096, *(1,) * 4096))
        return call, harness.random_inputs(call, n1=1, n2=1, d=64)
    call = Call("BSND")
    return call, harness.random_inputs(call, 1, 8192, 8192, 1, 1, 64)


def main(what: str, op: str) -> None:
    torch.set_num_threads(2)
    call, inputs = problem(what)
    out, lse = harness.run_forward(harness.TORCH_OPS, call, inputs)
    # A small call first: code, thread stacks and pools that exist once per process are not this call's
    # memory.
    small = harness.uniform("BSND", 1, 8, 8)
    harness.run(harness.TORCH_OPS, small, harness.random_inputs(small, 1, 8, 8, 1, 1, 64))
    Path("/proc/self/clear_refs").write_text("5")
    _, before = peak_and_now_kib()
    if what == "dense-buffer":
        results: object = torch.ones(8192, 8192)
        largest = 8192 * 8192
    elif op == "flash_attn":
        results = harness.run_forward(harness.TORCH_OPS, call, inputs)
        largest = max(x.numel() for x in results)
    else:
        results = harness.run_backward(harness.TORCH_OPS, call, inputs, out, lse)
        largest = max(x.numel() for x in results)
    peak, _ = peak_and_now_kib()
    del results
    print(json.dumps({"growth_mib": (peak - before) / 1024, "largest_output": largest}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
