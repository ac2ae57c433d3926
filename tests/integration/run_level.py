"""Runs a few problems in this process and saves them with their results: `run_level.py OUTPUT`.

test_determinism.py starts it once per instruction-set level. Prints one JSON object: the level that ran, and
whether all numbers of threads gave the same bits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import harness
import torch
from oracle import CAUSAL, NO_MASK, SLIDING_WINDOW

import fag_kernel

SHAPES = ((130, 257, 64, 64), (33, 65, 40, 24), (65, 129, 128, 128))
MASKS = ((NO_MASK, -1, -1), (CAUSAL, -1, -1), (SLIDING_WINDOW, 20, 3))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def main(path: str) -> None:
    results = {}
    same = True
    for index, (s1, s2, d, dv) in enumerate(SHAPES):
        for shift, (mode, left, right) in enumerate(MASKS):
            for dtype in (DTYPES[(index + shift) % 3], DTYPES[(index + shift + 1) % 3]):
                call = harness.uniform("BSND", 2, s1, s2, mask_mode=mode, win_left=left, win_right=right)
                inputs = harness.random_inputs(call, 2, s1, s2, 4, 2, d, dv, dtype, with_sinks=True)
                torch.set_num_threads(1)
                got = harness.run(harness.TORCH_OPS, call, inputs)
                for count in (2, 3, 8):
                    torch.set_num_threads(count)
                    again = harness.run(harness.TORCH_OPS, call, inputs)
                    same = same and all(map(harness.same_bits, again, got))
                results[f"{s1}x{s2}-d{d}-{mode}-{dtype}"] = (call, tuple(inputs), tuple(got))
    torch.save(results, path)
    print(json.dumps({"level": fag_kernel.abi.cpu_level(), "same_for_all_threads": same}))


if __name__ == "__main__":
    main(sys.argv[1])
