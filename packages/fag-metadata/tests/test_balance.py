"""Balance figures: against a count of every visible pair, and the table of the format page."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problems

from fag_metadata import (
    TARGETS,
    AttentionProblem,
    InvalidProblemError,
    Route,
    Split,
    Target,
    balance,
    flash_attn_metadata,
    metadata_for,
    select_route,
    unpack,
)

ASCEND = TARGETS["Ascend950PR_9599"]


def visible(problem: AttentionProblem, s1: int, s2: int) -> np.ndarray:
    diagonal = np.arange(s2) - np.arange(s1)[:, None] - (s2 - s1)
    seen = np.ones((s1, s2), bool)
    if problem.mask_mode == 3:
        seen = diagonal <= 0
    elif problem.mask_mode == 4:
        if problem.win_left >= 0:
            seen &= diagonal >= -problem.win_left
        if problem.win_right >= 0:
            seen &= diagonal <= problem.win_right
    return seen


def count_grad(problem: AttentionProblem, metadata: np.ndarray, cores: int) -> tuple[list[int], list[int]]:
    """Visible tiles and pairs of every core, tile by tile in the order of the format page."""
    split = unpack(metadata).grad
    assert split is not None
    tiles, area = [0] * cores, [0] * cores
    owner = {}
    for core in range(split.used_cubes):
        for tile in range(int(split.start[core]), int(split.end[core])):
            owner[tile] = core
    number = 0
    for s1, s2 in zip(problem.lengths_q.tolist(), problem.lengths_kv.tolist(), strict=True):
        o1, o2 = split.o1, split.o2
        if problem.is_variable:
            o1, o2 = -(-s1 // 128), -(-s2 // 128)
        seen = visible(problem, s1, s2)
        for _ in range(problem.n1):
            for col in range(o2):
                for row in range(o1):
                    pairs = int(seen[row * 128 : row * 128 + 128, col * 128 : col * 128 + 128].sum())
                    if pairs:
                        tiles[owner[number]] += 1
                        area[owner[number]] += pairs
                    number += 1
    return tiles, area


def count_forward(problem: AttentionProblem, metadata: np.ndarray) -> tuple[list[int], list[int]]:
    """Blocks and visible pairs of every core, block by block."""
    view = unpack(metadata)
    m, k, g = view.forward.m, view.forward.k, problem.g
    tiles, area = [0] * view.aic, [0] * view.aic
    for bn in range(problem.b * problem.n2):
        s1, s2 = int(problem.lengths_q[bn // problem.n2]), int(problem.lengths_kv[bn // problem.n2])
        seen = visible(problem, s1, s2)
        rows = np.tile(seen, (g, 1)) if problem.layout.value == "BNSD" else np.repeat(seen, g, axis=0)
        for r in range(-(-s1 * g // m)):
            for col in range(-(-s2 // k)):
                pairs = int(rows[r * m : r * m + m, col * k : col * k + k].sum())
                for row in view.forward_rows:
                    if pairs and row.start <= (bn, r, col) < row.end:
                        tiles[row.core] += 1
                        area[row.core] += pairs
    return tiles, area


@settings(max_examples=60, deadline=None)
@given(problems(longest=400), st.sampled_from([ASCEND, TARGETS["cpu"], Target("five", 5, 10)]), st.booleans())
def test_loads_equal_a_count_of_every_pair(problem: AttentionProblem, target: Target, is_cann: bool) -> None:
    metadata = metadata_for(problem, target, "cann" if is_cann else "balanced")
    figures = balance(metadata, problem)
    tiles, area = count_forward(problem, metadata)
    assert figures.forward.area.tolist() == area
    # CANN's row ranges of BNSD may hold blocks that no row sees.
    assert all(figures.forward.tiles >= tiles)
    if not (problem.layout.value == "BNSD" and problem.g > 1):
        assert figures.forward.tiles.tolist() == tiles
    assert figures.grad is not None
    tiles, area = count_grad(problem, metadata, target.cube_cores)
    assert figures.grad.area.tolist() == area
    assert figures.grad.tiles.tolist() == tiles
    for load in (figures.forward, figures.grad):
        assert load.area.max() >= load.perfect >= load.area.sum() / load.cores
        assert load.idle_cores == (load.area == 0).sum()


def backward_tiles(problem: AttentionProblem) -> list[int]:
    """Visible pairs of every tile that has some, in order."""
    areas = []
    for s1, s2 in zip(problem.lengths_q.tolist(), problem.lengths_kv.tolist(), strict=True):
        seen = visible(problem, s1, s2)
        head = [
            int(seen[row : row + 128, col : col + 128].sum())
            for col in range(0, s2, 128)
            for row in range(0, s1, 128)
        ]
        areas += head * problem.n1
    return [area for area in areas if area]


def lightest_contiguous(areas: list[int], cores: int) -> int:
    """The lightest heaviest of that many contiguous ranges: the least limit to fill them up to."""

    def fits(limit: int) -> bool:
        used, load = 1, 0
        for area in areas:
            if area > limit:
                return False
            used, load = (used, load + area) if load + area <= limit else (used + 1, area)
        return used <= cores

    low, high = 0, sum(areas)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


@settings(max_examples=150, deadline=None)
@given(problems(longest=600), st.sampled_from([36, 8, 5]))
def test_no_range_of_tiles_in_order_is_lighter_than_the_bound_and_balanced_reaches_it(
    problem: AttentionProblem, cores: int
) -> None:
    target = Target("mine", cores, 2 * cores)
    figures = balance(metadata_for(problem, target, "balanced"), problem)
    load = figures.grad
    assert load is not None
    areas = backward_tiles(problem)
    best = lightest_contiguous(areas, cores)
    assert load.in_order == best
    assert load.perfect <= best
    assert figures.forward.perfect <= figures.forward.in_order
    heaviest = int(load.area.max(initial=0))
    if select_route(problem, target, Split.BALANCED).route is Route.BN2_MULTIBLK:
        assert heaviest >= best  # whole heads
    else:
        # a split within 2 % of the mean is not searched any further
        assert best <= heaviest <= max(best, 1.02 * sum(areas) / cores)


@settings(max_examples=40, deadline=None)
@given(problems(longest=300))
def test_forward_bound_in_order_is_that_of_the_blocks(problem: AttentionProblem) -> None:
    metadata = metadata_for(problem, "Ascend950PR_9599", "cann", False)
    view = unpack(metadata)
    m, k, g = view.forward.m, view.forward.k, problem.g
    areas: list[int] = []
    for s1, s2 in zip(problem.lengths_q.tolist(), problem.lengths_kv.tolist(), strict=True):
        seen = visible(problem, s1, s2)
        rows = np.tile(seen, (g, 1)) if problem.layout.value == "BNSD" else np.repeat(seen, g, axis=0)
        head = [int(rows[r : r + m, c : c + k].sum()) for r in range(0, s1 * g, m) for c in range(0, s2, k)]
        areas += head * problem.n2
    best = lightest_contiguous([area for area in areas if area], 36)
    assert balance(metadata, problem).forward.in_order == best


# Section 8 of the format page: forward by blocks and by area, backward by tiles and by area.
PAGE = {
    "causal S4096 B1 N8": ((8, 8), {"s": 4096, "b": 1, "mask": 3}, 1.01, 1.02, 1.01, 1.02),
    "causal S2048 B1 N4": ((4, 4), {"s": 2048, "b": 1, "mask": 3}, 1.06, 1.09, 1.06, 1.09),
    "causal S1000 B2 N8": ((8, 8), {"s": 1000, "b": 2, "mask": 3}, 1.62, 1.66, 1.00, 1.08),
    "causal S8192 B2 N16": ((16, 16), {"s": 8192, "b": 2, "mask": 3}, 1.00, 1.01, 1.00, 1.00),
    "window 512,0 S4096": ((8, 8), {"s": 4096, "b": 1, "mask": 4, "win": (512, 0)}, 1.05, 1.05, 1.02, 1.03),
    "no mask B1 N37 S128": ((37, 37), {"s": 128, "b": 1, "mask": 0}, 1.95, 1.95, 1.95, 1.95),
    "no mask B5 N8 S256": ((8, 8), {"s": 256, "b": 5, "mask": 0}, 1.35, 1.35, 1.12, 1.12),
    "BN2 B4 N37 S512 causal": ((37, 37), {"s": 512, "b": 4, "mask": 3}, 1.14, 1.16, 1.22, 1.22),
    "causal S640 B1 N1": ((1, 1), {"s": 640, "b": 1, "mask": 3}, 12.0, 13.0, 2.40, 2.88),
    "ragged to 4096": ((8, 8), {"lengths": [1, 17, 300, 4096, 64, 2048], "mask": 3}, 1.00, 1.03, 1.00, 1.03),
    "ragged 8192 + 31x128": ((4, 4), {"lengths": [8192, *[128] * 31], "mask": 3}, 1.00, 1.02, 1.00, 1.02),
    "ragged 32/4 heads": ((32, 4), {"lengths": [2048, 777, 0, 1500], "mask": 3}, 1.00, 1.05, 1.00, 1.07),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGE)
def test_cann_split_has_the_figures_of_the_format_page(name: str) -> None:
    (n1, n2), case, *expected = PAGE[name]
    sizes: dict[str, Any] = {"mask_mode": case["mask"]}
    if "lengths" in case:
        cu = np.cumsum([0, *case["lengths"]]).tolist()
        longest = max(case["lengths"])
        sizes.update(
            cu_seqlens_q=cu, cu_seqlens_kv=cu, layout_q="TND", max_seqlen_q=longest, max_seqlen_kv=longest
        )
    else:
        sizes.update(batch_size=case["b"], max_seqlen_q=case["s"], max_seqlen_kv=case["s"])
    if "win" in case:
        sizes.update(win_left=case["win"][0], win_right=case["win"][1])
    problem = AttentionProblem.from_metadata_args(n1, n2, 128, **sizes)
    figures = balance(metadata_for(problem, ASCEND, "cann"), problem)
    assert figures.grad is not None
    found = [
        figures.forward.max_over_mean_tiles,
        figures.forward.max_over_mean,
        figures.grad.max_over_mean_tiles,
        figures.grad.max_over_mean,
    ]
    assert found == pytest.approx(expected, rel=0.006)


def test_dense_problem_is_read_from_the_head() -> None:
    sizes: dict[str, Any] = {"batch_size": 2, "max_seqlen_q": 300, "max_seqlen_kv": 500, "mask_mode": 4}
    sizes.update(win_left=100, win_right=0)
    metadata = flash_attn_metadata(8, 2, 192, head_dim_v=128, layout_q="BNSD", is_grad_enabled=True, **sizes)
    problem = AttentionProblem.from_metadata_args(8, 2, 192, head_dim_v=128, layout_q="BNSD", **sizes)
    assert balance(metadata).to_dict() == balance(metadata, problem).to_dict()
    assert balance(unpack(metadata)).to_dict() == balance(metadata).to_dict()


def test_numbers_too_large_for_the_head_are_read_from_the_grad_block() -> None:
    sizes = {"batch_size": 1, "max_seqlen_q": 40000, "max_seqlen_kv": 40000}
    metadata = flash_attn_metadata(1, 1, 64, is_grad_enabled=True, **sizes)
    assert int(balance(metadata).forward.area.sum()) == 40000**2
    with pytest.raises(
        InvalidProblemError, match=r"metadata must be .* below 32768 .* larger S1.* Pass problem="
    ):
        balance(flash_attn_metadata(1, 1, 64, **sizes))


@pytest.mark.parametrize("name", ["cu_seqlens_q", "seqused_kv"])
def test_lengths_need_a_problem(name: str) -> None:
    if name == "cu_seqlens_q":
        sizes: dict[str, Any] = {"cu_seqlens_q": [0, 5, 9], "cu_seqlens_kv": [0, 5, 9], "layout_q": "TND"}
    else:
        sizes = {"seqused_kv": [5, 9], "max_seqlen_q": 9}
    metadata = flash_attn_metadata(2, 2, 64, **sizes)
    with pytest.raises(
        InvalidProblemError, match=f"metadata must be of a dense problem .* got one made with {name}"
    ):
        balance(metadata)
    assert balance(metadata, AttentionProblem.from_metadata_args(2, 2, 64, **sizes)).grad is None


def test_tensor_of_cann_needs_a_problem() -> None:
    metadata = flash_attn_metadata(2, 2, 64, batch_size=1, max_seqlen_q=9, max_seqlen_kv=9)
    metadata[8:16] = 0
    with pytest.raises(InvalidProblemError, match="must be made by flash_attn_metadata of fag"):
        balance(metadata)


def test_figures_without_any_pair_are_even() -> None:
    problem = AttentionProblem.from_metadata_args(2, 2, 64, batch_size=0, max_seqlen_q=9, max_seqlen_kv=9)
    figures = balance(metadata_for(problem, ASCEND), problem)
    assert figures.grad is not None
    for load in (figures.forward, figures.grad):
        assert (load.max_over_mean, load.max_over_mean_tiles, load.perfect_over_mean) == (1.0, 1.0, 1.0)
        assert load.idle_cores == 36


def test_merge_rows_are_rows_times_partial_results() -> None:
    sizes = {"batch_size": 1, "max_seqlen_q": 1, "max_seqlen_kv": 65536}
    problem = AttentionProblem.from_metadata_args(1, 1, 128, **sizes)
    metadata = metadata_for(problem, "cpu", is_grad_enabled=False)
    assert balance(metadata, problem).merge_rows.sum() == 32


def test_figures_are_ready_for_json() -> None:
    metadata = flash_attn_metadata(
        8, 8, 64, batch_size=1, max_seqlen_q=999, max_seqlen_kv=999, is_grad_enabled=True
    )
    text = json.dumps(balance(metadata).to_dict())
    assert re.search(r'"max_over_mean": \d', text)
