"""The route table: which kernel template a problem is split for. The first row that can and is wanted wins.

The conditions are those of CANN's host tiling and splitter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .layout import Route, Split
from .problem import AttentionProblem
from .terms import Layout, Target

SINGLE_TILE_MAX = 128
MULTI_BLOCK_MAX = 640
BN2_MAX_HEAD_DIM = 128
BALANCED_MAX_OVER_MEAN = 1.05


class Condition(NamedTuple):
    """What must hold for a row, and what to show if it does not: a format of the problem `p`, the number
    of `heads`, and their max/mean `ratio`.
    """

    text: str
    test: Callable[[AttentionProblem, Target, Split], bool]
    values: str


class RouteRow(NamedTuple):
    """One row: `route` is None for a template that no kernel provides; without `can` a template is wrong,
    without `want` another one is faster, by measured `evidence`.
    """

    name: str
    route: Route | None
    can: tuple[Condition, ...]
    want: tuple[Condition, ...]
    evidence: str


class RouteVerdict(NamedTuple):
    """What became of one row: "chosen", "capability" (cannot) or "preference" (not wanted), and why."""

    name: str
    verdict: str
    reason: str


@dataclass(frozen=True)
class RouteChoice:
    """The chosen route; `trace` says why the rows above it were rejected."""

    route: Route
    problem: AttentionProblem
    target: Target
    split: Split

    @cached_property
    def trace(self) -> tuple[RouteVerdict, ...]:
        """One verdict per row down to the chosen one."""
        last = next(i for i, row in enumerate(ROUTES) if row.route is self.route)
        return tuple(_judge(row, self.problem, self.target, self.split) for row in ROUTES[: last + 1])


def _whole_heads_ratio(problem: AttentionProblem, target: Target) -> float:
    """Max/mean of the heads per core when whole heads are dealt out as evenly as possible."""
    heads = problem.b * problem.n1
    return -(-heads // target.cube_cores) * target.cube_cores / heads if heads else 1.0


def _has_enough_heads(problem: AttentionProblem, target: Target, split: Split) -> bool:
    heads = problem.b * problem.n1
    return heads >= 256 or (heads >= 128 and problem.s1 % 128 == 0 and problem.s2 % 128 == 0)


_LENGTHS = "S1={p.s1}, S2={p.s2}"
_NOT_TND = Condition("layout is not TND", lambda p, t, s: p.layout is not Layout.TND, "layout={p.layout}")
_NO_GQA = Condition("N1 = N2", lambda p, t, s: p.n1 == p.n2, "N1={p.n1}, N2={p.n2}")
_SMALL_D = Condition(f"D <= {BN2_MAX_HEAD_DIM}", lambda p, t, s: p.d <= BN2_MAX_HEAD_DIM, "D={p.d}")
_NO_EMPTY = Condition(
    "no sequence has length 0", lambda p, t, s: not p.has_empty_sequence, "a sequence of length 0"
)

ROUTES: tuple[RouteRow, ...] = (
    RouteRow(
        "BN2_single",
        Route.BN2_SINGLE,
        can=(
            _NOT_TND,
            _NO_GQA,
            _SMALL_D,
            Condition(
                f"S1 and S2 <= {SINGLE_TILE_MAX}",
                lambda p, t, s: p.s1 <= SINGLE_TILE_MAX and p.s2 <= SINGLE_TILE_MAX,
                _LENGTHS,
            ),
            _NO_EMPTY,
        ),
        want=(),
        evidence="A head is one tile: no accumulator in memory is needed, so it always wins.",
    ),
    RouteRow(
        "BN2_multiblk",
        Route.BN2_MULTIBLK,
        can=(
            _NOT_TND,
            _NO_GQA,
            _SMALL_D,
            Condition("D = Dv", lambda p, t, s: p.d == p.dv, "D={p.d}, Dv={p.dv}"),
            Condition(
                f"S1 and S2 <= {MULTI_BLOCK_MAX}, one of them > {SINGLE_TILE_MAX}",
                lambda p, t, s: SINGLE_TILE_MAX < max(p.s1, p.s2) <= MULTI_BLOCK_MAX,
                _LENGTHS,
            ),
            Condition(
                "no seqused",
                lambda p, t, s: p.seqused_q is None and p.seqused_kv is None,
                "seqused given",
            ),
            _NO_EMPTY,
        ),
        want=(
            Condition(
                "B*N1 >= 256, or >= 128 with S1 and S2 multiples of 128",
                _has_enough_heads,
                "B*N1={heads}, " + _LENGTHS,
            ),
            Condition(
                f"whole heads load the cores evenly (max/mean <= {BALANCED_MAX_OVER_MEAN}), balanced split",
                lambda p, t, s: s is Split.CANN or _whole_heads_ratio(p, t) <= BALANCED_MAX_OVER_MEAN,
                "max/mean={ratio:.2f}",
            ),
        ),
        evidence="Thresholds of CANN's host tiling (36 cores); the balance condition is issue 3's bound.",
    ),
    RouteRow(
        "BN2S2",
        None,
        can=(Condition("a kernel", lambda p, t, s: False, "none (the name is reserved)"),),
        want=(),
        evidence="Reserved in CANN's tiling key; no kernel exists.",
    ),
    RouteRow("BN2GS1S2", Route.BN2GS1S2, can=(), want=(), evidence="Takes every valid problem."),
)


_CONDITIONS = {row.name: row.can + row.want for row in ROUTES}


def _failing(row: RouteRow, problem: AttentionProblem, target: Target, split: Split) -> Condition | None:
    for condition in _CONDITIONS[row.name]:
        if not condition.test(problem, target, split):
            return condition
    return None


def _judge(row: RouteRow, problem: AttentionProblem, target: Target, split: Split) -> RouteVerdict:
    failing = _failing(row, problem, target, split)
    if failing is None:
        return RouteVerdict(row.name, "chosen", row.evidence)
    heads, ratio = problem.b * problem.n1, _whole_heads_ratio(problem, target)
    values = failing.values.format(p=problem, heads=heads, ratio=ratio)
    verdict = "capability" if failing in row.can else "preference"
    return RouteVerdict(row.name, verdict, f"needs {failing.text}, got {values}")


def select_route(problem: AttentionProblem, target: Target, split: Split | None = None) -> RouteChoice:
    """Decides the kernel template for the gradient of a problem.

    `split` is what the ranges will come from; None = the target's default.

    Example:
        >>> from fag_metadata import TARGETS
        >>> sizes = dict(batch_size=2, max_seqlen_q=100, max_seqlen_kv=100)
        >>> problem = AttentionProblem.from_metadata_args(8, 2, 128, **sizes)
        >>> choice = select_route(problem, TARGETS["Ascend950PR_9589"])
        >>> choice.route.name, choice.trace[0].verdict, choice.trace[0].reason
        ('BN2GS1S2', 'capability', 'needs N1 = N2, got N1=8, N2=2')
    """
    if split is None:
        split = Split[target.default_split.upper()]
    for row in ROUTES:
        if row.route is not None and _failing(row, problem, target, split) is None:
            break
    assert row.route is not None  # the last row takes every problem
    return RouteChoice(row.route, problem, target, split)
