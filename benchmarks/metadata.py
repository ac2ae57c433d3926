"""How even and how fast the splits of fag-metadata are: the tables of docs/metadata.md.

    python benchmarks/metadata.py                    # the named problems
    python benchmarks/metadata.py --random 10000     # and that many random ones
    python benchmarks/metadata.py --speed            # time of one new tensor

Needs NumPy and fag-metadata only.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fag_metadata import TARGETS, AttentionProblem, Balance, Load, balance, flash_attn_metadata, metadata_for
from fag_metadata.api import clear_caches

TARGET = TARGETS["Ascend950PR_9599"]

#: Every figure has turns all over the run: a machine that others slow down for seconds has its speed in some.
_TURNS = 10
_TURN_NS = 50_000_000
SHORT = [1 + 37 * i % 200 for i in range(32)]


def dense(b: int, n1: int, s: int, mask: int = 0, **kwargs: Any) -> AttentionProblem:
    return AttentionProblem.from_metadata_args(
        n1, kwargs.pop("n2", n1), 128, batch_size=b, max_seqlen_q=s, max_seqlen_kv=s, mask_mode=mask, **kwargs
    )


def packed(n1: int, n2: int, lengths: list[int], mask: int = 0) -> AttentionProblem:
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    longest = max(lengths)
    return AttentionProblem.from_metadata_args(
        n1, n2, 128, cu_seqlens_q=cu, cu_seqlens_kv=cu, layout_q="TND", mask_mode=mask,
        max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip


NAMED: dict[str, Callable[[], AttentionProblem]] = {
    "causal S4096 B1 N8": lambda: dense(1, 8, 4096, 3),
    "causal S8192 B2 N16": lambda: dense(2, 16, 8192, 3),
    "causal S2048 B1 N4": lambda: dense(1, 4, 2048, 3),
    "causal S1000 B2 N8": lambda: dense(2, 8, 1000, 3),
    "window 512,0 S4096 B1 N8": lambda: dense(1, 8, 4096, 4, win_left=512, win_right=0),
    "packed [1,17,300,4096,64,2048] N8 causal": lambda: packed(8, 8, [1, 17, 300, 4096, 64, 2048], 3),
    "packed 8192 + 31x128 N4 causal": lambda: packed(4, 4, [8192, *[128] * 31], 3),
    "packed [2048,777,0,1500] 32/4 causal": lambda: packed(32, 4, [2048, 777, 0, 1500], 3),
    "packed 32 short (1..200) N2": lambda: packed(2, 2, SHORT),
    "no mask B1 N37 S128": lambda: dense(1, 37, 128),
    "no mask B5 N8 S256": lambda: dense(5, 8, 256),
    "causal B4 N37 S512": lambda: dense(4, 37, 512, 3),
    "causal B1 N64 S384": lambda: dense(1, 64, 384, 3),
    "decode B8 8/1, kv 8192,100..700": lambda: AttentionProblem.from_metadata_args(
        8, 1, 128, batch_size=8, max_seqlen_q=1, max_seqlen_kv=8192,
        seqused_kv=[8192, 100, 200, 300, 400, 500, 600, 700],
    ),
    "causal S640 B1 N1": lambda: dense(1, 1, 640, 3),
}  # fmt: skip


def random_problem(rng: random.Random) -> AttentionProblem:
    """Dense or ragged, any mask, grouped heads, lengths 0 to 4096."""
    n2, g = rng.choice([1, 2, 4, 8, 16]), rng.choice([1, 1, 2, 4, 8])
    kwargs: dict[str, Any] = {"mask_mode": rng.choice([0, 3, 3, 4])}
    if kwargs["mask_mode"] == 4:
        kwargs.update(win_left=rng.choice([-1, 0, 100, 512, 1024]), win_right=rng.choice([-1, 0, 0, 128]))
    top = rng.choice([64, 128, 300, 640, 1024, 2048, 4096])
    b = rng.choice([1, 1, 2, 3, 4, 8, 16, 32])
    if rng.random() < 0.5:
        s1 = rng.choice([top, rng.randint(1, top)])
        s2 = rng.choice([s1, s1, rng.randint(1, top)])
        layout = rng.choice(["BSND", "BNSD"])
        kwargs.update(layout_q=layout, batch_size=b, max_seqlen_q=s1, max_seqlen_kv=s2)
    else:
        lengths = [rng.choice([rng.randint(0, top), rng.randint(0, top), top, 1]) for _ in range(b)]
        keys = lengths if rng.random() < 0.7 else [rng.randint(0, top) for _ in lengths]
        kwargs.update(layout_q="TND")
        for side, values in (("q", lengths), ("kv", keys)):
            kwargs[f"cu_seqlens_{side}"] = np.cumsum([0, *values]).astype(np.int32)
            kwargs[f"max_seqlen_{side}"] = max(values)
    return AttentionProblem.from_metadata_args(n2 * g, n2, rng.choice([64, 128]), **kwargs)


def figures(problem: AttentionProblem, split: str) -> Balance:
    return balance(metadata_for(problem, TARGET, split), problem)  # type: ignore[arg-type]


def print_named() -> None:
    print(
        "| problem (D 128, 36 cores) | forward: cann | balanced | perfect "
        "| backward: cann | balanced | perfect |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, make in NAMED.items():
        problem = make()
        cann, ours = figures(problem, "cann"), figures(problem, "balanced")
        assert cann.grad is not None
        assert ours.grad is not None
        cells = [
            *(cann.forward.max_over_mean, ours.forward.max_over_mean, ours.forward.perfect_over_mean),
            *(cann.grad.max_over_mean, ours.grad.max_over_mean, ours.grad.perfect_over_mean),
        ]
        print(f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")


class Tally:
    """Counts of one direction over random problems."""

    def __init__(self) -> None:
        self.worse = self.better = self.total = 0
        # least tiles a core -> problems, above the bound, of these above 1.05 x a perfect split, their worst,
        # and how many of them one range a core could do lighter
        self.bounds: dict[int, list[float]] = {8: [0, 0, 0, 0.0, 0], 2: [0, 0, 0, 0.0, 0]}

    def add(self, cann: Load, ours: Load) -> None:
        if not ours.area.any():
            return
        self.total += 1
        self.worse += int(ours.area.max() > cann.area.max())
        self.better += int(ours.area.max() < 0.95 * cann.area.max())
        tiles = ours.tiles.sum() / ours.cores
        for least, bound in ((8, 1.05), (2, 1.25)):
            if tiles >= least:
                row = self.bounds[least]
                row[0] += 1
                if ours.max_over_mean > bound:
                    row[1] += 1
                    if ours.area.max() > 1.05 * ours.perfect:
                        row[2] += 1
                        row[3] = max(row[3], ours.max_over_mean)
                        row[4] += int(ours.area.max() > ours.in_order)
                break

    def print(self, name: str) -> None:
        print(
            f"{name}: {self.total} problems, heavier than cann {self.worse}, over 5 % lighter {self.better}"
        )
        for (least, row), bound in zip(self.bounds.items(), (1.05, 1.25), strict=True):
            print(
                f"  at least {least} tiles a core: {row[0]}; above {bound}: {row[1]}; "
                f"above 1.05 x a perfect split too: {row[2]}, the worst {row[3]:.2f}, "
                f"heavier than the lightest with one range a core: {row[4]}"
            )


def print_random(count: int, seed: int) -> None:
    rng = random.Random(seed)
    forward, backward = Tally(), Tally()
    for _ in range(count):
        problem = random_problem(rng)
        cann, ours = figures(problem, "cann"), figures(problem, "balanced")
        clear_caches()
        assert cann.grad is not None
        assert ours.grad is not None
        forward.add(cann.forward, ours.forward)
        backward.add(cann.grad, ours.grad)
    forward.print("forward")
    backward.print("backward")


def print_speed() -> None:
    rng = np.random.default_rng(0)
    ragged = {f"ragged B={b}, S 1..{top}": np.cumsum([0, *rng.integers(1, top + 1, b)]).astype(np.int32)
              for b, top in ((32, 200), (2048, 512), (2048, 4096), (65535, 200), (65535, 1024))}  # fmt: skip
    sizes: dict[str, dict[str, Any]] = {
        "dense causal B1 S4096": {"batch_size": 1, "max_seqlen_q": 4096, "max_seqlen_kv": 4096},
        "dense causal B2 S1000": {"batch_size": 2, "max_seqlen_q": 1000, "max_seqlen_kv": 1000},
        "dense causal B4 S128": {"batch_size": 4, "max_seqlen_q": 128, "max_seqlen_kv": 128},
        "dense causal B8 S8192, 6 sections": {"batch_size": 8, "max_seqlen_q": 8192, "max_seqlen_kv": 8192},
        **{name: {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "layout_q": "TND"} for name, cu in ragged.items()},
    }
    splits = (TARGET, "cann"), (TARGET, "balanced"), (TARGETS["cpu"], "balanced")
    best = {(name, which): float("inf") for name in sizes for which in range(len(splits) + 1)}
    for _ in range(_TURNS):
        for name, kwargs in sizes.items():
            for which, (target, split) in enumerate(splits):
                new = partial(
                    flash_attn_metadata, 8, 8, 128, mask_mode=3, is_grad_enabled=True, target=target,
                    split=split, **kwargs,
                )  # fmt: skip
                best[name, which] = min(best[name, which], _least_us(new, before=clear_caches))
            problem = AttentionProblem.from_metadata_args(8, 8, 128, mask_mode=3, **kwargs)
            cached = partial(metadata_for, problem, TARGET)
            cached()
            best[name, len(splits)] = min(best[name, len(splits)], _least_us(cached, calls=100))
    print(
        "| problem (8 heads, D 128, forward and backward) | new, cann | new, balanced | new, cpu | cached |"
    )
    print("|---|---|---|---|---|")
    for name in sizes:
        cells = (best[name, which] for which in range(len(splits) + 1))
        shown = (f"{cell / 1000:.1f} ms" if cell >= 1000 else f"{cell:.1f} us" for cell in cells)
        print(f"| {name} | {' | '.join(shown)} |")


def _least_us(call: Callable[[], Any], *, before: Callable[[], Any] | None = None, calls: int = 1) -> float:
    """Least processor time of a call, in one turn: of a clock around `calls` at a time."""
    least = float("inf")
    stop = time.process_time_ns() + _TURN_NS
    while (start := time.process_time_ns()) < stop:
        if before is not None:
            before()
            start = time.process_time_ns()
        for _ in range(calls):
            call()
        least = min(least, (time.process_time_ns() - start) / calls)
    return least / 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--random", type=int, default=0, metavar="N", help="also N random problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", action="store_true", help="times instead of balance")
    arguments = parser.parse_args()
    if arguments.speed:
        print_speed()
        return
    print_named()
    if arguments.random:
        print_random(arguments.random, arguments.seed)


if __name__ == "__main__":
    main()
