"""Corrupts metadata at random and runs the operators with it: `fuzz_metadata.py LAYOUT TARGET COUNT`.

test_bad_metadata.py starts it as a process, so that a crash is an exit status and not the end of the suite.
Each corruption must be refused with a message that names the metadata, or give what the right metadata gives
within the public cases' tolerance. The last line printed is a JSON report.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import harness
import numpy as np
import oracle
import torch
from oracle import CAUSAL, SLIDING_WINDOW, Call

faulthandler.enable()

INTERESTING = (0, 1, -1, 2, 7, 127, 128, 129, 255, 4096, 65535, 2**31 - 1, -(2**31), 2**30, 36, 72)


def problems(layout: str) -> list[tuple[Call, harness.Inputs]]:
    """A masked ragged problem and one of a single tile per head, so that both routes are there."""
    made = []
    for lengths, mask in (
        (((130, 5, 260), (140, 7, 200)), {"mask_mode": CAUSAL}),
        (((300, 64, 1), (300, 129, 5)), {"mask_mode": SLIDING_WINDOW, "win_left": 33, "win_right": 4}),
        (((40, 40, 40), (50, 50, 50)), {}),
    ):
        if layout == "TND":
            call = harness.packed(*lengths, **mask)
        elif lengths[0][0] == lengths[0][1]:
            call = Call(layout, **mask)
        else:
            call = Call(layout, seqused_q=lengths[0], seqused_kv=lengths[1], **mask)
        n = 2 if lengths[0][0] == 40 else 4
        inputs = harness.random_inputs(call, 3, max(lengths[0]), max(lengths[1]), n, 2, 16)
        made.append((call, harness.fill_padding(call, inputs, float("nan"))))
    return made


def corrupt(metadata: torch.Tensor, rng: np.random.Generator) -> tuple[torch.Tensor, str]:
    """A damaged copy and what was done to it."""
    words = metadata.clone()
    written = int(torch.nonzero(words)[-1]) + 1
    kind = rng.choice(["word", "word", "word", "add", "bit", "swap", "block", "several", "head"])
    at = int(rng.integers(0, min(written + 8, len(words))))
    if kind == "head":
        at = int(rng.integers(0, 16))
    if kind in ("word", "head"):
        words[at] = int(rng.choice(INTERESTING))
    elif kind == "add":
        words[at] = (
            np.int64(words[at].item() + int(rng.choice([-128, -2, -1, 1, 2, 128]))).astype(np.int32).item()
        )
    elif kind == "bit":
        words[at] = int(np.int32(words[at].item()) ^ np.int32(1 << int(rng.integers(0, 31))))
    elif kind == "swap":
        other = int(rng.integers(0, written))
        words[at], words[other] = words[other].clone(), words[at].clone()
    elif kind == "block":
        end = min(len(words), at + int(rng.integers(1, 64)))
        words[at:end] = torch.from_numpy(rng.integers(-5, 600, end - at).astype(np.int32))
    elif kind == "several":
        for _ in range(4):
            words[int(rng.integers(16, written))] = int(rng.integers(-2, 500))
    return words, f"{kind} at {at}"


def main(layout: str, target: str, count: int) -> None:
    rng = np.random.default_rng(49)
    report: dict[str, object] = {"tried": 0, "refused": 0, "harmless": 0, "wrong": [], "unnamed": []}
    counts = {"tried": 0, "refused": 0, "harmless": 0}
    wrong, unnamed = [], []
    for call, inputs in problems(layout):
        metadata = harness.make_metadata(call, inputs.q, inputs.k, inputs.v, target=target)
        wanted = harness.run(harness.TORCH_OPS, call, inputs, metadata=metadata)
        for _ in range(count):
            words, what = corrupt(metadata, rng)
            for op in ("flash_attn", "flash_attn_grad"):
                counts["tried"] += 1
                try:
                    if op == "flash_attn":
                        got, right = (
                            harness.run_forward(harness.TORCH_OPS, call, inputs, metadata=words),
                            wanted[:2],
                        )
                    else:
                        got = harness.run_backward(
                            harness.TORCH_OPS, call, inputs, wanted.out, wanted.lse, metadata=words
                        )
                        right = wanted[2:]
                except RuntimeError as error:
                    counts["refused"] += 1
                    if f"{op}: metadata" not in str(error):
                        unnamed.append(f"{what}: {error}")
                    continue
                if all(is_right(a, b) for a, b in zip(got, right, strict=True)):
                    counts["harmless"] += 1
                else:
                    wrong.append(f"{op}, {call.mask_mode=}: {what}")
    print(json.dumps({**report, **counts, "wrong": wrong[:20], "unnamed": unnamed[:20]}))


def is_right(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    finite = torch.isfinite(wanted)
    if not torch.equal(finite, torch.isfinite(got)):
        return False
    a, b = (harness.to_float64(x[finite]) for x in (got, wanted))
    return oracle.relative_error(a, b) < 1e-2


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
