"""The goals as a table, and what a run has reached of them.

A figure is a median with its quartiles. For a geometric mean these are the geometric means of the cases'
medians and quartiles; the figure of the slowest case is that of the case whose median is lowest.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cases import BF16, FP16, FP32, MAIN

Document = dict[str, Any]
Record = dict[str, Any]


class Figure(NamedTuple):
    """A median, its quartiles, and which case it is of or how many."""

    low: float
    median: float
    high: float
    of: str


#: From a run and a peer to a figure, or to None where it was not measured. The peer "main" is the one that a
#: case is about, "best" the fastest one.
Find = Callable[[Document, str], "Figure | None"]


@dataclass(frozen=True)
class Goal:
    """One thing to reach.

    Attributes:
        line: The line of the issue that asks for it.
        what: In words.
        sense: ">=" or "<=".
        limit: What is wanted, in `unit`.
        unit: "x", "%", "us" or "" (yes or no).
        find: What was reached.
        has_best: Whether the figure is a ratio to a peer, so that it can be had for the fastest peer too.
    """

    line: int
    what: str
    sense: str
    limit: float
    unit: str
    find: Find
    has_best: bool = False

    def is_met(self, figure: Figure) -> bool:
        """Whether the median is on the right side."""
        return {">=": operator.ge, "<=": operator.le}[self.sense](figure.median, self.limit)


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


def speedups(records: Iterable[Record], peer: str) -> list[Figure]:
    """Time of the peer over ours, of each record."""
    return [Figure(*r["speedup"][r["main_peer"] if peer == "main" else peer], r["case"]) for r in records]


def mean(figures: Sequence[Figure]) -> Figure | None:
    """Geometric mean; None of nothing."""
    if not figures:
        return None
    low, median, high = (geometric_mean(f[i] for f in figures) for i in range(3))
    return Figure(low, median, high, f"{len(figures)} cases")


def lowest(figures: Sequence[Figure]) -> Figure | None:
    """The figure with the lowest median; None of nothing."""
    return min(figures, key=lambda f: f.median, default=None)


def highest(figures: Sequence[Figure]) -> Figure | None:
    """The figure with the highest median; None of nothing."""
    return max(figures, key=lambda f: f.median, default=None)


Combine = Callable[[Sequence[Figure]], "Figure | None"]
ALONE = (*MAIN, "one-head")


def _chosen(
    records: Iterable[Record],
    direction: str,
    groups: Sequence[str],
    dtype: str = "",
    s: int = 0,
    name: str = "",
) -> list[Record]:
    return [
        r
        for r in records
        if r["direction"] == direction
        and r["group"] in groups
        and r["dtype"].startswith(dtype)
        and r["s"] >= s
        and r["case"].startswith(name)
    ]


def _ratio(combine: Combine, *chosen: Any, section: str = "speed", **more: Any) -> Find:
    return lambda run, peer: combine(speedups(_chosen(run[section], *chosen, **more), peer))


def _share(*chosen: Any, **more: Any) -> Find:
    def find(run: Document, _: str) -> Figure | None:
        records = _chosen(run["speed"], *chosen, **more)
        return lowest(
            [
                Figure(*(100 * v for v in r["share_of_gemm"]), f"{r['case']}, {r['gemm_dtype']}")
                for r in records
            ]
        )

    return find


def _per_token(direction: str) -> Find:
    """How far the time per token strays from that of the shortest length, either way, in percent."""

    def find(run: Document, _: str) -> Figure | None:
        strays = []
        for r in run["window"]:
            if r["direction"] == direction:
                low, median, high = sorted(100 * abs(v - 1) for v in r["to_shortest"])
                strays.append(Figure(low, 100 * abs(r["to_shortest"][1] - 1), max(high, median), r["case"]))
        return highest(strays)

    return find


def _overhead(what: str) -> Find:
    def find(run: Document, _: str) -> Figure | None:
        found = [r for r in run["overhead"] if r["what"] == what and r["target"] == "cpu"]
        return Figure(*found[0]["microseconds"], f"{found[0]['rounds']} repetitions") if found else None

    return find


def _memory(run: Document, _: str) -> Figure | None:
    shares = [(100 * r["mib"]["fag"] / r["bound_mib"], r["case"]) for r in run["memory"]]
    return highest([Figure(share, share, share, case) for share, case in shares])


def _scaling(direction: str) -> Find:
    return lambda run, _: lowest(
        [Figure(*r["scaling"], r["case"]) for r in run["threads"] if r["direction"] == direction]
    )


def _same_bits(run: Document, _: str) -> Figure | None:
    equal = [float(r["is_same_bits"]) for r in run["threads"]]
    return Figure(min(equal), min(equal), min(equal), f"{len(equal)} results") if equal else None


def _capped(direction: str, dtype: str) -> Find:
    return _ratio(lowest, direction, MAIN, dtype, section="capped")


GOALS = (
    Goal(1, "bf16 backward, geometric mean", ">=", 2.0, "x", _ratio(mean, "backward", MAIN, BF16), True),
    Goal(1, "bf16 backward, slowest case", ">=", 1.5, "x", _ratio(lowest, "backward", MAIN, BF16), True),
    Goal(1, "bf16 backward, S 512 D 64", ">=", 2.5, "x",
         _ratio(lowest, "backward", ["short"], BF16, s=512), True),
    Goal(1, "bf16 backward, S 2048 D 128 dense, of the GEMM rate", ">=", 90, "%",
         _share("backward", ["dense"], BF16, name="dense-b1-n8-s2048-d128")),
    Goal(1, "bf16 backward, S 2048 D 64 dense, of the GEMM rate", ">=", 80, "%",
         _share("backward", ["dense"], BF16, name="dense-b1-n8-s2048-d64")),
    Goal(2, "fp16 backward, S >= 512, slowest case", ">=", 10, "x",
         _ratio(lowest, "backward", ALONE, FP16, s=512), True),
    Goal(2, "fp16 backward, S >= 512, of the GEMM rate, lowest case", ">=", 75, "%",
         _share("backward", ALONE, FP16, s=512)),
    Goal(2, "fp32 backward, geometric mean", ">=", 1.15, "x", _ratio(mean, "backward", MAIN, FP32), True),
    Goal(2, "fp32 backward, slowest case", ">=", 1.0, "x", _ratio(lowest, "backward", ALONE, FP32), True),
    Goal(3, "ragged backward, slowest case, beside the best of loop and padded", ">=", 1.5, "x",
         _ratio(lowest, "backward", ["ragged"])),
    Goal(3, "ragged forward, likewise", ">=", 1.5, "x", _ratio(lowest, "forward", ["ragged"])),
    Goal(3, "window 256 at S 4096, backward, beside masked", ">=", 8, "x",
         _ratio(lowest, "backward", ["window"], s=4096)),
    Goal(3, "window 256 at S 4096, forward, beside masked", ">=", 8, "x",
         _ratio(lowest, "forward", ["window"], s=4096)),
    Goal(3, "window backward, time per token, S 2048 to 16384, farthest from S 2048", "<=", 15, "%",
         _per_token("backward")),
    Goal(3, "window forward, likewise", "<=", 15, "%", _per_token("forward")),
    Goal(4, "forward, slowest case", ">=", 1.0, "x", _ratio(lowest, "forward", ALONE), True),
    Goal(4, "bf16 forward, geometric mean", ">=", 1.3, "x", _ratio(mean, "forward", MAIN, BF16), True),
    Goal(4, "fp16 forward, geometric mean", ">=", 1.5, "x", _ratio(mean, "forward", MAIN, FP16), True),
    Goal(5, "backward call beyond its kernel, B1 N1 S16 D64", "<=", 60, "us", _overhead("call")),
    Goal(5, "metadata and plan, cached", "<=", 10, "us", _overhead("cached")),
    Goal(5, "metadata and plan, new dense problem", "<=", 300, "us", _overhead("new dense")),
    Goal(5, "metadata and plan, 2048 new ragged sequences", "<=", 5000, "us", _overhead("new ragged")),
    Goal(6, "peak memory of a backward, of the bound, highest case", "<=", 100, "%", _memory),
    Goal(7, "two threads over one, backward, lowest case", ">=", 1.85, "x", _scaling("backward")),
    Goal(7, "two threads over one, forward, lowest case", ">=", 1.85, "x", _scaling("forward")),
    Goal(7, "one and two threads give the same bits", ">=", 1, "", _same_bits),
    Goal(8, "AVX2: bf16 backward, slowest case", ">=", 1.0, "x", _capped("backward", BF16), True),
    Goal(8, "AVX2: bf16 forward, slowest case", ">=", 1.0, "x", _capped("forward", BF16), True),
    Goal(8, "AVX2: fp32 backward, slowest case", ">=", 1.0, "x", _capped("backward", FP32), True),
    Goal(8, "AVX2: fp32 forward, slowest case", ">=", 1.0, "x", _capped("forward", FP32), True),
)  # fmt: skip
