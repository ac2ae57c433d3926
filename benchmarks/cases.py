"""The case table: one row is one problem. Add a row here to measure something else."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A self-attention problem: as many keys as queries in every sequence.

    Attributes:
        group: What the case stands for; `--only GROUP` runs one group.
        dtype: Name of a torch dtype.
        b: Batch size.
        n1: Query heads.
        n2: Key-value heads.
        s: Sequence length; the longest one of a ragged batch.
        d: Head dim of queries and keys.
        width_v: Head dim of values; 0 is d.
        is_causal: Whether a query sees only the keys up to its own place.
        window: With is_causal, how many keys before its own place a query sees; None is all.
        lengths: Length of every sequence of a packed, ragged batch, else empty.
        label: Says in a name what a ragged batch is like.
        is_quick: Whether `--quick` runs it.
    """

    group: str
    dtype: str
    b: int
    n1: int
    n2: int
    s: int
    d: int
    width_v: int = 0
    is_causal: bool = False
    window: int | None = None
    lengths: tuple[int, ...] = ()
    label: str = ""
    is_quick: bool = False

    @property
    def dv(self) -> int:
        """Head dim of values."""
        return self.width_v or self.d

    @property
    def name(self) -> str:
        """The problem in words, such as causal-b1-n8-s2048-d128-bfloat16."""
        mask = "dense"
        if self.is_causal:
            mask = "causal" if self.window is None else f"window{self.window}"
        batch = f"{self.label}-b{self.b}" if self.lengths else f"b{self.b}"
        heads = f"n{self.n1}" if self.n1 == self.n2 else f"n{self.n1}kv{self.n2}"
        width = f"d{self.d}" if self.dv == self.d else f"d{self.d}v{self.dv}"
        return f"{mask}-{batch}-{heads}-s{self.s}-{width}-{self.dtype}"

    @property
    def tokens(self) -> int:
        """Query tokens of the batch."""
        return sum(self.sequences)

    @property
    def sequences(self) -> tuple[int, ...]:
        """Length of every sequence."""
        return self.lengths or (self.s,) * self.b

    @property
    def pairs(self) -> int:
        """Query-key pairs that the mask leaves, over all sequences and query heads."""
        return self.n1 * sum(self.pairs_of(length) for length in self.sequences)

    def pairs_of(self, length: int) -> int:
        """Pairs that the mask leaves in one head of one sequence."""
        if not self.is_causal:
            return length * length
        full = length if self.window is None else min(length, self.window + 1)
        return full * (full + 1) // 2 + (length - full) * full

    @property
    def forward_flops(self) -> int:
        """Two matrix products, on visible pairs only."""
        return 2 * self.pairs * (self.d + self.dv)

    @property
    def backward_flops(self) -> int:
        """Five matrix products: the scores again, dQ, dK; dP, dV."""
        return 2 * self.pairs * (3 * self.d + 2 * self.dv)


def ragged(
    label: str, dtype: str, lengths: list[int], n1: int, n2: int, *, is_causal: bool, is_quick: bool = False
) -> Case:
    """A packed batch of head dim 64."""
    return Case(
        "ragged", dtype, len(lengths), n1, n2, max(lengths), 64,
        is_causal=is_causal, lengths=tuple(lengths), label=label, is_quick=is_quick,
    )  # fmt: skip


def _mixed(count: int, low: int, high: int) -> list[int]:
    """Evenly spread lengths in a fixed random order."""
    lengths = [low + (high - low) * i // (count - 1) for i in range(count)]
    random.Random(0).shuffle(lengths)
    return lengths


BF16, FP16, FP32 = "bfloat16", "float16", "float32"

#: The groups that PyTorch's flash kernels compute as well as we do: goals on ratios are about these.
MAIN = ("dense", "causal", "gqa", "short", "long")

CASES = (
    Case("dense", BF16, 1, 8, 8, 2048, 128),
    Case("dense", BF16, 1, 8, 8, 2048, 64),
    Case("dense", BF16, 1, 8, 8, 1024, 128),
    Case("dense", FP16, 1, 8, 8, 1024, 128),
    Case("dense", FP32, 1, 8, 8, 2048, 128),
    Case("dense", FP32, 1, 8, 8, 2048, 64),
    Case("dense", FP32, 1, 8, 8, 1024, 128, is_quick=True),
    Case("causal", BF16, 1, 8, 8, 2048, 128, is_causal=True),
    Case("causal", BF16, 1, 8, 8, 1024, 64, is_causal=True, is_quick=True),
    Case("causal", FP16, 1, 8, 8, 1024, 64, is_causal=True),
    Case("causal", FP32, 1, 8, 8, 2048, 128, is_causal=True),
    Case("causal", FP32, 1, 8, 8, 1024, 64, is_causal=True),
    Case("gqa", BF16, 1, 8, 2, 2048, 128, is_causal=True),
    Case("gqa", BF16, 2, 16, 4, 1024, 64, is_causal=True),
    Case("gqa", FP16, 1, 8, 2, 1024, 64, is_causal=True),
    Case("gqa", FP32, 1, 8, 2, 1024, 128, is_causal=True),
    Case("short", BF16, 16, 8, 8, 128, 64, is_quick=True),
    Case("short", BF16, 2, 8, 8, 512, 64, is_quick=True),
    Case("short", BF16, 1, 1, 1, 64, 64),
    Case("short", FP16, 16, 8, 8, 128, 64),
    Case("short", FP16, 2, 8, 8, 512, 64),
    Case("short", FP32, 16, 8, 8, 128, 64, is_quick=True),
    Case("short", FP32, 2, 8, 8, 512, 64),
    Case("long", BF16, 1, 2, 2, 4096, 128),
    Case("long", BF16, 1, 2, 2, 8192, 64, is_causal=True),
    Case("long", FP32, 1, 2, 2, 8192, 64, is_causal=True),
    Case("one-head", BF16, 1, 1, 1, 512, 64),
    Case("one-head", BF16, 1, 1, 1, 2048, 64),
    Case("one-head", BF16, 1, 1, 1, 4096, 128, is_causal=True),
    Case("one-head", FP16, 1, 1, 1, 1024, 64),
    Case("one-head", FP32, 1, 1, 1, 2048, 64),
    Case("value-width", BF16, 1, 8, 8, 1024, 128, width_v=64, is_causal=True),
    Case("value-width", FP32, 1, 8, 8, 1024, 192, width_v=128, is_causal=True),
    ragged("mixed", BF16, _mixed(16, 64, 2048), 2, 2, is_causal=True),
    ragged("mixed", FP32, _mixed(32, 64, 2048), 4, 4, is_causal=True),
    ragged("mixed", FP32, _mixed(16, 64, 1024), 4, 2, is_causal=False),
    ragged("short", BF16, _mixed(256, 1, 128), 4, 4, is_causal=True, is_quick=True),
    ragged("tail", BF16, [128] * 31 + [2048], 4, 4, is_causal=True),
    Case("window", BF16, 1, 4, 4, 2048, 64, is_causal=True, window=256, is_quick=True),
    Case("window", BF16, 1, 4, 4, 4096, 64, is_causal=True, window=256),
    Case("window", FP32, 1, 4, 4, 4096, 64, is_causal=True, window=256),
)  # fmt: skip

#: Time per token along the length: as the last rows of CASES, longer.
WINDOW_LENGTHS = (2048, 4096, 8192, 16384)

#: One thread against two: lengths from 1024 on, one head alone as well.
THREAD_CASES = (
    Case("threads", BF16, 1, 8, 8, 1024, 64, is_quick=True),
    Case("threads", BF16, 1, 1, 1, 1024, 64),
    Case("threads", BF16, 1, 1, 1, 4096, 128, is_causal=True, is_quick=True),
    Case("threads", FP16, 1, 1, 1, 2048, 64),
    Case("threads", FP32, 1, 8, 2, 2048, 128, is_causal=True),
    Case("threads", FP32, 1, 1, 1, 1024, 64),
)


def capped_cases() -> tuple[Case, ...]:
    """What is measured once more with both sides limited to AVX2."""
    return tuple(c for c in CASES if c.group in MAIN and c.dtype != FP16 and 64 < c.s <= 1024)
