"""The route table: which template, and why not the others."""

from __future__ import annotations

from typing import Any

import pytest

from fag_metadata import TARGETS, AttentionProblem, Route, Split, select_route
from fag_metadata.routes import ROUTES

T36 = TARGETS["Ascend950PR_9599"]


def problem_of(heads: tuple[int, int] = (8, 8), d: int = 128, **changes: Any) -> AttentionProblem:
    arguments: dict[str, Any] = {"batch_size": 32, "max_seqlen_q": 128, "max_seqlen_kv": 128}
    arguments.update(changes)
    return AttentionProblem.from_metadata_args(*heads, d, **arguments)


TND: dict[str, Any] = {
    "layout_q": "TND", "batch_size": None, "cu_seqlens_q": [0, 9, 20], "cu_seqlens_kv": [0, 9, 20],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "route"),
    [
        ({}, Route.BN2_SINGLE),
        ({"batch_size": 1}, Route.BN2_SINGLE),
        ({"seqused_q": [5] * 32}, Route.BN2_SINGLE),
        ({"seqused_q": [0] * 32}, Route.BN2GS1S2),
        ({"heads": (8, 4)}, Route.BN2GS1S2),
        ({"d": 129}, Route.BN2GS1S2),
        ({"max_seqlen_q": 0}, Route.BN2GS1S2),
        (TND, Route.BN2GS1S2),
        ({"max_seqlen_kv": 129}, Route.BN2_MULTIBLK),
        ({"max_seqlen_q": 640, "max_seqlen_kv": 100}, Route.BN2_MULTIBLK),
        ({"max_seqlen_q": 641}, Route.BN2GS1S2),
        ({"max_seqlen_kv": 129, "head_dim_v": 64}, Route.BN2GS1S2),
        ({"max_seqlen_kv": 129, "batch_size": 31}, Route.BN2GS1S2),
        ({"max_seqlen_kv": 256, "batch_size": 16}, Route.BN2_MULTIBLK),
        ({"max_seqlen_kv": 256, "batch_size": 15}, Route.BN2GS1S2),
        ({"max_seqlen_kv": 129, "seqused_kv": [5] * 32}, Route.BN2GS1S2),
    ],
    ids=str,
)
def test_select_route_of_cann_s_split(changes: dict[str, Any], route: Route) -> None:
    choice = select_route(problem_of(**changes), T36, Split.CANN)
    assert choice.route is route
    assert choice.trace[-1].verdict == "chosen"


def test_trace_tells_capability_from_preference_with_values() -> None:
    trace = select_route(problem_of(max_seqlen_kv=512, batch_size=1), T36).trace
    assert [(row.name, row.verdict) for row in trace] == [
        ("BN2_single", "capability"),
        ("BN2_multiblk", "preference"),
        ("BN2S2", "capability"),
        ("BN2GS1S2", "chosen"),
    ]
    assert trace[0].reason == "needs S1 and S2 <= 128, got S1=128, S2=512"
    assert trace[1].reason.endswith("got B*N1=8, S1=128, S2=512")


def test_balanced_split_does_not_want_whole_heads_where_they_are_uneven() -> None:
    problem = problem_of(heads=(37, 37), batch_size=4, max_seqlen_q=512, max_seqlen_kv=512)
    assert select_route(problem, T36, Split.CANN).route is Route.BN2_MULTIBLK
    choice = select_route(problem, T36, Split.BALANCED)
    assert choice.route is Route.BN2GS1S2
    assert choice.trace[1].reason.endswith("got max/mean=1.22")
    even = problem_of(heads=(36, 36), batch_size=4, max_seqlen_q=512, max_seqlen_kv=512)
    assert select_route(even, T36, Split.BALANCED).route is Route.BN2_MULTIBLK


def test_default_split_is_the_target_s() -> None:
    assert select_route(problem_of(), T36).split is Split.CANN
    assert select_route(problem_of(), TARGETS["cpu"]).split is Split.BALANCED


def test_last_row_takes_everything_and_every_row_has_evidence() -> None:
    assert not ROUTES[-1].can
    assert not ROUTES[-1].want
    assert all(row.evidence for row in ROUTES)
