"""The table of problems the grid test runs: layout x mask x head dims x dtype in full, everything else drawn
so that pairs meet.

Every (layout, mask, head dims) stands with bf16 and fp16, every second one with float32 too. Lengths, heads,
length lists, sinks and the origin of the metadata are drawn for each; test_grid.py proves that within a
layout every value of every property meets every value of every other. An id reads as the problem:
tnd-causal-s130.1.64x257.5.64-h6gqa3-d72v40-bf16-sinks.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import combinations, product
from random import Random

import torch
from harness import Inputs, random_inputs
from oracle import CAUSAL, LAYOUTS, NO_MASK, SLIDING_WINDOW, Call

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MASKS = {
    "full": (NO_MASK, -1, -1),
    "causal": (CAUSAL, -1, -1),
    "win16.8": (SLIDING_WINDOW, 16, 8),
    "win130.0": (SLIDING_WINDOW, 130, 0),
    "winopen.3": (SLIDING_WINDOW, -1, 3),
    "win0.open": (SLIDING_WINDOW, 0, -1),
}
HEAD_DIMS = (
    (64, 64), (128, 128), (40, 40), (72, 72), (96, 96), (192, 192), (256, 256),
    (192, 128), (128, 96), (72, 40), (33, 17), (8, 1), (200, 136),
)  # fmt: skip
HEADS = ((2, 2), (4, 1), (6, 2), (3, 1), (1, 1))
# Dense layouts: (batch, s1, s2).
DENSE_LENGTHS = (
    (2, 37, 51),
    (1, 128, 640),
    (2, 130, 257),
    (3, 1, 129),
    (3, 65, 33),
    (1, 300, 300),
    (2, 128, 128),
    (1, 257, 64),
)
# TND: one (q length, kv length) per sequence.
PACKED_LENGTHS = (
    ((37, 51),),
    ((128, 640),),
    ((130, 257), (1, 5), (64, 64)),
    ((1, 129), (0, 7), (5, 0), (33, 65)),
    ((300, 300), (17, 3), (0, 0)),
    ((128, 128), (128, 128)),
    ((257, 64), (2, 200)),
    ((5, 3), (5, 3), (31, 33), (1, 1), (7, 127)),
)
EXTRAS = ("", "seqused", "sinks", "seqused-sinks", "sequsedkv")
PLANS = (
    "none",
    "cpu",
    "ascend",
)  # where the metadata comes from: made inside, for target "cpu", for the default Ascend part
ASCEND_MAX_HEAD_DIM = 192


@dataclass(frozen=True)
class Case:
    """One problem; `call` and `inputs` make what the operators take."""

    layout: str
    mask: str
    lengths: tuple[tuple[int, int], ...]  # per batch entry: slot of q, slot of kv
    n1: int
    n2: int
    d: int
    dv: int
    dtype: str
    extra: str
    plan: str

    @property
    def id(self) -> str:
        if self.layout == "TND":
            lengths = (
                "s"
                + ".".join(str(q) for q, _ in self.lengths)
                + "x"
                + ".".join(str(kv) for _, kv in self.lengths)
            )
        else:
            lengths = f"b{len(self.lengths)}s{self.lengths[0][0]}x{self.lengths[0][1]}"
        heads = f"h{self.n1}gqa{self.n1 // self.n2}" if self.n1 != self.n2 else f"h{self.n1}"
        dims = f"d{self.d}v{self.dv}" if self.d != self.dv else f"d{self.d}"
        parts = [self.layout.lower(), self.mask, lengths, heads, dims, self.dtype, self.extra]
        parts.append("" if self.plan == "none" else f"{self.plan}plan")
        return "-".join(part for part in parts if part)

    @property
    def call(self) -> Call:
        mode, left, right = MASKS[self.mask]
        q_lengths, kv_lengths = zip(*self.lengths, strict=True)
        packed = self.layout == "TND"
        return Call(
            layout=self.layout,
            mask_mode=mode,
            win_left=left,
            win_right=right,
            cu_seqlens_q=cumulative(q_lengths) if packed else None,
            cu_seqlens_kv=cumulative(kv_lengths) if packed else None,
            seqused_q=partly_used(q_lengths, 1) if "seqused" in self.extra.split("-") else None,
            seqused_kv=partly_used(kv_lengths, 2) if "seqused" in self.extra else None,
        )

    @property
    def inputs(self) -> Inputs:
        return random_inputs(
            self.call,
            len(self.lengths),
            *self.lengths[0],
            self.n1,
            self.n2,
            self.d,
            self.dv,
            DTYPES[self.dtype],
            seed=zlib.crc32(self.id.encode()),
            with_sinks="sinks" in self.extra,
        )


def cumulative(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """cu_seqlens of these lengths."""
    total = [0]
    for length in lengths:
        total.append(total[-1] + length)
    return tuple(total)


def partly_used(slots: tuple[int, ...], phase: int) -> tuple[int, ...]:
    """How much of each slot is used: in turn two thirds, all but one, nothing, all of it."""
    choices = (lambda n: 2 * n // 3, lambda n: max(n - 1, 0), lambda n: 0, lambda n: n)
    return tuple(choices[(i + (0 if len(slots) == 1 else phase)) % 4](n) for i, n in enumerate(slots))


def dense(lengths: tuple[int, int, int]) -> tuple[tuple[int, int], ...]:
    batch, s1, s2 = lengths
    return ((s1, s2),) * batch


def make_cases() -> list[Case]:
    """The table: for every fixed row the draw, among a few dozen, that makes most pairs of properties meet
    for the first time."""
    table = []
    for layout in LAYOUTS:
        random = Random(layout)  # the same draws on every machine
        met: set[tuple[object, ...]] = set()
        all_lengths = PACKED_LENGTHS if layout == "TND" else tuple(map(dense, DENSE_LENGTHS))
        for row, (mask, (d, dv), dtype) in enumerate(product(MASKS, HEAD_DIMS, DTYPES)):
            if dtype == "fp32" and row % 2:
                continue
            best: tuple[int, Case, set[tuple[object, ...]]] | None = None
            for _ in range(40):
                plan = random.choice(PLANS)
                if plan == "ascend" and d > ASCEND_MAX_HEAD_DIM:
                    plan = "cpu"
                n1, n2 = random.choice(HEADS)
                case = Case(
                    layout,
                    mask,
                    random.choice(all_lengths),
                    n1,
                    n2,
                    d,
                    dv,
                    dtype,
                    random.choice(EXTRAS),
                    plan,
                )
                new = pairs(case) - met
                if best is None or len(new) > best[0]:
                    best = (len(new), case, new)
            assert best is not None
            table.append(best[1])
            met |= best[2]
    return table


def properties(case: Case) -> dict[str, object]:
    """What varies within a layout."""
    return {
        "mask": case.mask,
        "dims": (case.d, case.dv),
        "dtype": case.dtype,
        "heads": (case.n1, case.n2),
        "lengths": case.lengths,
        "extra": case.extra,
        "plan": case.plan,
    }


def pairs(case: Case) -> set[tuple[object, ...]]:
    """All pairs of properties of a case, each with the names of the two."""
    return {(a, x, b, y) for (a, x), (b, y) in combinations(properties(case).items(), 2)}


CASES = make_cases()
