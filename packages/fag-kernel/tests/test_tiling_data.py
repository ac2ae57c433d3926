"""The 192 bytes: offsets, views of the layouts, and what they say about the mask."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fag_kernel import _native
from fag_kernel.abi import native_problem
from fag_kernel.plan import plan
from fag_kernel.tiling_data import TilingData
from fag_metadata import AttentionProblem, Target

TARGET = Target(name="one", cube_cores=1, vector_cores=2, l2_bytes=0)
INT32_MAX = 2**31 - 1

# spec/host-tiling.md, "Tiling data": every field takes 8 bytes, scale_value with 4 bytes of padding.
NAMES = """
    b s1 s2 n1 n2 d dv scale_value g_size view_d0_q view_d2_q coef_b0_q view_d0_kv view_d2_kv coef_b0_kv
    coef_n0 coef_n2 mask_mode win_left win_right sparse_type s1_token s2_token total_per_batch_num
"""
OFFSETS = {name: 8 * index for index, name in enumerate(NAMES.split())}
PAGE = {"scale_value": 56, "g_size": 64, "coef_n2": 128, "total_per_batch_num": 184}


def problem_of(layout="BSND", *, n1=6, n2=2, d=40, dv=24, b=3, s1=100, s2=300, **options):
    sizes = {"batch_size": b, "max_seqlen_q": s1, "max_seqlen_kv": s2}
    if layout == "TND":
        sizes = {"cu_seqlens_q": np.arange(b + 1) * s1, "cu_seqlens_kv": np.arange(b + 1) * s2}
        sizes = {name: offsets.astype(np.int32) for name, offsets in sizes.items()}
    return AttentionProblem.from_metadata_args(n1, n2, d, head_dim_v=dv, layout_q=layout, **sizes, **options)


def test_offsets_are_those_of_the_page():
    fields = _native.tiling_data_fields()
    assert {name: offset for name, offset, _ in fields} == OFFSETS
    assert {name: OFFSETS[name] for name in PAGE} == PAGE
    assert [name for name, _, kind in fields if kind == "f"] == ["scale_value"]


def test_python_view_has_the_native_order():
    assert list(TilingData._fields) == [name for name, _, _ in _native.tiling_data_fields()]


def test_fields_lie_where_the_page_says():
    tiling = plan(problem_of(mask_mode=4, win_left=7, win_right=9), TARGET, softmax_scale=0.3)
    data = tiling.tiling_data
    assert len(data) == 192
    for name, offset in OFFSETS.items():
        kind = np.float32 if name == "scale_value" else np.int64
        assert np.frombuffer(data, kind, 1, offset)[0] == getattr(tiling.fields, name), name
    assert data[60:64] == bytes(4)


def test_sizes_and_scale():
    fields = plan(problem_of(mask_mode=4, win_left=7), TARGET, softmax_scale=0.3).fields
    assert fields[:7] == (3, 100, 300, 6, 2, 40, 24)
    assert fields.scale_value == np.float32(0.3)
    assert fields.g_size == 3
    assert (fields.mask_mode, fields.win_left, fields.win_right) == (4, 7, -1)


@pytest.mark.parametrize("scale", [None, 0.0])
def test_default_scale(scale):
    assert plan(problem_of(), TARGET, softmax_scale=scale).fields.scale_value == np.float32(1 / np.sqrt(40))


@pytest.mark.parametrize(("scale", "error"), [(float("nan"), ValueError), ("1", TypeError)])
def test_scale_must_be_a_finite_number(scale, error):
    with pytest.raises(error, match="plan: softmax_scale must be"):
        plan(problem_of(), TARGET, softmax_scale=scale)


def test_another_length_is_refused():
    with pytest.raises(ValueError, match="data must have 192 bytes, got 191"):
        TilingData.from_bytes(bytes(191))


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "TND"])
@pytest.mark.parametrize("side", ["q", "kv"])
def test_view_finds_every_element(layout, side):
    """index0, row, index2 of the compact view hit the element (b, s, n) of a tensor in the layout."""
    problem = problem_of(layout)
    fields = plan(problem, TARGET).fields
    heads, rows = (6, 100) if side == "q" else (2, 300)
    d0, d2, coef_b0 = (getattr(fields, f"{name}_{side}") for name in ("view_d0", "view_d2", "coef_b0"))
    canonical = np.arange(3 * rows * heads).reshape(3, rows, heads)  # (b, s, n)
    tensor = {"BSND": canonical, "BNSD": canonical.transpose(0, 2, 1), "TND": canonical.reshape(-1, heads)}[
        layout
    ]
    view = np.ascontiguousarray(tensor).reshape(d0, -1, d2)
    starts = problem.starts_q if side == "q" else problem.starts_kv
    for b, n in itertools.product(range(3), range(heads)):
        first = starts[b] if layout == "TND" else 0
        found = view[b * coef_b0 + n * fields.coef_n0, first : first + rows, n * fields.coef_n2]
        assert np.array_equal(found, canonical[b, :, n])


def test_coefficients_of_the_page():
    bsnd, bnsd = (plan(problem_of(layout), TARGET).fields for layout in ("BSND", "BNSD"))
    assert (bsnd.coef_b0_q, bsnd.coef_b0_kv, bsnd.coef_n0, bsnd.coef_n2) == (1, 1, 0, 1)
    assert (bnsd.coef_b0_q, bnsd.coef_b0_kv, bnsd.coef_n0, bnsd.coef_n2) == (6, 2, 1, 0)


# ---- sparse facts
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0, INT32_MAX, INT32_MAX)),
        ({"mask_mode": 3}, (1, INT32_MAX - 200, 200)),
        ({"mask_mode": 3, "s1": 300, "s2": 100}, (2, INT32_MAX + 200, -200)),
        ({"mask_mode": 4, "win_left": 50, "win_right": 0}, (2, -150, 200)),
        ({"mask_mode": 4, "win_left": 300, "win_right": 0, "s2": 100}, (1, 300, 0)),
        ({"mask_mode": 4, "win_left": 99, "win_right": 0, "s2": 100}, (2, 99, 0)),
        ({"mask_mode": 4, "win_left": -1, "win_right": 5}, (2, INT32_MAX - 200, 205)),
        ({"layout": "TND", "mask_mode": 3}, (2, INT32_MAX, 0)),
        ({"layout": "TND", "mask_mode": 4, "win_left": 3, "win_right": 4}, (2, 3, 4)),
        ({"layout": "TND"}, (0, INT32_MAX, INT32_MAX)),
    ],
)
def test_sparse_type_and_tokens(options, expected):
    fields = plan(problem_of(**options), TARGET).fields
    assert (fields.sparse_type, fields.s1_token, fields.s2_token) == expected


def visible_tiles(s1, s2, mask, left, right):
    """(row tiles, column tiles) bool: does a tile hold a visible pair? By looking at every pair."""
    i, j = np.arange(s1)[:, None] + s2 - s1, np.arange(s2)[None, :]
    seen = np.ones((s1, s2), bool)
    if mask == 3:
        seen = j <= i
    elif mask == 4:
        seen = (j >= i - (left if left >= 0 else 10**6)) & (j <= i + (right if right >= 0 else 10**6))
    t1, t2 = min(128, s1), min(128, s2)
    grid = np.zeros((-(-s1 // t1), -(-s2 // t2)), bool)
    for row, column in np.ndindex(grid.shape):
        grid[row, column] = seen[row * t1 : (row + 1) * t1, column * t2 : (column + 1) * t2].any()
    return grid


@settings(max_examples=150, deadline=None)
@given(
    s1=st.integers(1, 640),
    s2=st.integers(1, 640),
    mask=st.sampled_from([0, 3, 4]),
    left=st.integers(-1, 700),
    right=st.integers(-1, 700),
)
def test_valid_tiles_by_brute_force(s1, s2, mask, left, right):
    if mask != 4:
        left = right = -1
    problem = problem_of(
        b=1, n1=256, n2=256, d=24, s1=s1, s2=s2, mask_mode=mask, win_left=left, win_right=right
    )
    grid = visible_tiles(s1, s2, mask, left, right)
    tiling = plan(problem, TARGET)
    assert tiling.fields.total_per_batch_num == grid.sum()
    if tiling.key.is_multiblk:
        has_empty_line = not (grid.any(axis=0).all() and grid.any(axis=1).all())
        assert tiling.key.needs_zero == (mask != 0 and has_empty_line)


def test_tnd_has_no_number_of_tiles_per_head():
    assert plan(problem_of("TND", mask_mode=3), TARGET).fields.total_per_batch_num == 0


def test_windows_at_the_end_of_int32_do_not_overflow():
    problem = problem_of(s1=INT32_MAX, s2=1, mask_mode=4, win_left=INT32_MAX, win_right=INT32_MAX)
    fields = plan(problem, TARGET).fields
    assert (fields.s1_token, fields.s2_token) == (2 * INT32_MAX - 1, 1)


def test_equal_problems_have_equal_bytes():
    first, second = (_native.make_plan(**_arguments(problem_of())) for _ in range(2))
    assert first == second


def _arguments(problem):
    return {
        "problem": native_problem(problem),
        "route": 0,
        "cube_cores": 8,
        "vector_cores": 16,
        "l2_bytes": 0,
        "libapi_reserve_bytes": 0,
        "softmax_scale": 0.5,
    }
