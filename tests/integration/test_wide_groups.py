"""Groups of query heads whose rows do not fit a core's cache: the backward goes through them in another
order.

Found by random problems: with a window that hides a whole panel of keys, dk and dv held uninitialised memory.
"""

from __future__ import annotations

import bound
import harness
import pytest
import torch
from oracle import CAUSAL, NO_MASK, SLIDING_WINDOW

MASKS = {
    "full": (NO_MASK, -1, -1),
    "causal": (CAUSAL, -1, -1),
    "first-keys-hidden": (SLIDING_WINDOW, 27, 240),
    "last-keys-hidden": (SLIDING_WINDOW, -1, 0),
    "narrow": (SLIDING_WINDOW, 3, 3),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
@pytest.mark.parametrize(("n1", "n2", "d", "s1"), [(15, 3, 195, 141), (8, 1, 256, 260), (16, 1, 128, 300)])
def test_wide_groups(layout: str, n1: int, n2: int, d: int, s1: int, dtype: torch.dtype, mask: str) -> None:
    mode, left, right = MASKS[mask]
    call = harness.uniform(layout, 1, s1, 257, mask_mode=mode, win_left=left, win_right=right)
    inputs = harness.random_inputs(call, 1, s1, 257, n1, n2, d, dtype=dtype)
    with harness.threads(1):
        got = harness.run(harness.TORCH_OPS, call, inputs)
    bound.assert_gradients(call, inputs, got.out, got.lse, got[2:])
    for count in (2, 3):
        with harness.threads(count):
            harness.assert_same_bits(harness.run(harness.TORCH_OPS, call, inputs), got, f"{count} threads:")
