"""The case table: one row is one problem. Add a row here to measure something else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A dense or causal self-attention problem.

    Attributes:
        group: What the case stands for; `--only GROUP` runs one group.
        dtype: Name of a torch dtype.
        b: Batch size.
        n1: Query heads.
        n2: Key-value heads.
        s: Sequence length of queries and keys.
        d: Head dim, of values too.
        is_causal: Whether a query sees only the keys up to its own place.
        is_quick: Whether `--quick` runs it.
    """

    group: str
    dtype: str
    b: int
    n1: int
    n2: int
    s: int
    d: int
    is_causal: bool = False
    is_quick: bool = False

    @property
    def name(self) -> str:
        """The problem in words, such as causal-b1-n8-s2048-d128-bfloat16."""
        heads = f"n{self.n1}" if self.n1 == self.n2 else f"n{self.n1}kv{self.n2}"
        mask = "causal" if self.is_causal else "dense"
        return f"{mask}-b{self.b}-{heads}-s{self.s}-d{self.d}-{self.dtype}"

    @property
    def pairs(self) -> int:
        """Query-key pairs that the mask leaves, over all heads."""
        one_head = self.s * (self.s + 1) // 2 if self.is_causal else self.s * self.s
        return self.b * self.n1 * one_head

    @property
    def forward_flops(self) -> int:
        """Two matrix products, on visible pairs only."""
        return 2 * 2 * self.pairs * self.d

    @property
    def backward_flops(self) -> int:
        """Five matrix products: the scores again, dP, dV, dQ, dK."""
        return 5 * 2 * self.pairs * self.d


CASES = (
    Case("dense", "bfloat16", 1, 8, 8, 2048, 128, is_quick=True),
    Case("dense", "bfloat16", 1, 8, 8, 2048, 64),
    Case("dense", "bfloat16", 1, 4, 4, 4096, 128),
    Case("dense", "float16", 1, 8, 8, 1024, 128),
    Case("dense", "float32", 1, 8, 8, 2048, 128, is_quick=True),
    Case("dense", "float32", 1, 8, 8, 2048, 64),
    Case("causal", "bfloat16", 1, 8, 8, 2048, 128, is_causal=True, is_quick=True),
    Case("causal", "bfloat16", 1, 4, 4, 4096, 64, is_causal=True),
    Case("causal", "float16", 1, 8, 8, 1024, 64, is_causal=True),
    Case("causal", "float32", 1, 8, 8, 2048, 128, is_causal=True),
    Case("gqa", "bfloat16", 1, 8, 2, 2048, 128, is_causal=True, is_quick=True),
    Case("gqa", "bfloat16", 2, 16, 4, 1024, 64, is_causal=True),
    Case("short", "bfloat16", 16, 8, 8, 128, 64, is_quick=True),
    Case("short", "bfloat16", 8, 8, 8, 512, 64),
    Case("short", "bfloat16", 1, 1, 1, 64, 64),
    Case("short", "float32", 16, 8, 8, 128, 64),
)
