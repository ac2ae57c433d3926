"""The native mirror of a problem: equal fields, cached, refused when a kernel could not index it safely."""

import inspect

import numpy as np
import pytest

from fag_kernel import _native, abi
from fag_metadata import AttentionProblem


def packed(**options):
    return AttentionProblem.from_metadata_args(
        6,
        2,
        40,
        head_dim_v=24,
        cu_seqlens_q=[0, 5, 5, 12],
        cu_seqlens_kv=[0, 0, 3, 9],
        layout_q="TND",
        **options,
    )


def dense(**options):
    return AttentionProblem.from_metadata_args(
        6, 2, 40, batch_size=3, max_seqlen_q=7, max_seqlen_kv=9, **options
    )


@pytest.mark.parametrize(
    "problem",
    [
        packed(),
        packed(mask_mode=3, seqused_q=[1, 0, 7]),
        dense(layout_q="BNSD", mask_mode=4, win_left=3),
        dense(),
    ],
)
def test_mirror_has_the_fields_of_the_problem(problem):
    native = abi.native_problem(problem)
    for name in (
        "b",
        "n1",
        "n2",
        "g",
        "d",
        "dv",
        "s1",
        "s2",
        "t1",
        "t2",
        "win_left",
        "win_right",
        "is_variable",
    ):
        assert getattr(native, name) == getattr(problem, name), name
    assert native.layout == ["BSND", "BNSD", "TND"].index(problem.layout)
    assert native.mask_mode == problem.mask_mode


def test_mirror_is_cached_by_problem():
    assert abi.native_problem(packed()) is abi.native_problem(packed())
    assert abi.native_problem(packed()) is not abi.native_problem(packed(mask_mode=3))


GOOD = {
    "layout": 2, "b": 2, "n1": 4, "n2": 2, "d": 8, "dv": 8, "s1": 5, "s2": 5, "t1": 8, "t2": 8,
    "mask_mode": 0, "win_left": -1, "win_right": -1, "has_cu_seqlens_q": True, "has_cu_seqlens_kv": True,
    "has_seqused_q": False, "has_seqused_kv": False, "is_variable": True,
    "max_seqlen_q": -1, "max_seqlen_kv": -1,
    "lengths_q": [3, 5], "lengths_kv": [3, 5], "starts_q": [0, 3], "starts_kv": [0, 3],
}  # fmt: skip


def native(**changes):
    arguments = GOOD | changes
    return _native.Problem(
        **{
            name: np.array(value, np.int64) if isinstance(value, list) else value
            for name, value in arguments.items()
        }
    )


def test_consistent_problem_is_accepted():
    assert native().t1 == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths_q": [3]}, "lengths_q must have b entries, got 1"),
        ({"starts_kv": [0, 3, 5]}, "starts_kv must have b entries, got 3"),
        ({"lengths_q": [3, 6], "s1": 6}, "lengths_q must be between 0 and the slot's length, got 6"),
        ({"lengths_kv": [-1, 5]}, "lengths_kv must be between 0 and the slot's length, got -1"),
        ({"starts_q": [4, 3]}, "starts_q must be non-decreasing from 0 to t, got 4"),
        ({"starts_q": [-1, 3]}, "starts_q must be non-decreasing from 0 to t, got -1"),
        ({"s1": 4}, "lengths_q must be at most s, got 5"),
        ({"n1": 3}, "n1 must be a multiple of n2=2, got 3"),
        ({"n2": 0}, "n2 must be at least 1, got 0"),
        ({"d": 0}, "d must be at least 1, got 0"),
        ({"dv": 9}, "dv must be at most d=8, got 9"),
        ({"layout": 3}, "layout must be 0, 1 or 2, got 3"),
        ({"mask_mode": 1}, "mask_mode must be 0, 3 or 4, got 1"),
        ({"win_left": -2}, "win_left must be at least -1, got -2"),
        ({"win_right": 3}, "win_left and win_right must be -1 without a window mask, got 3"),
        ({"layout": 0}, "t_q must be b \\* s, got 8"),
        ({"t1": 1 << 50}, "t1 must be between 0 and 2\\^48"),
        ({"s1": 1 << 50}, "s1 must be at most 2\\^40"),
    ],
)
def test_inconsistent_problem_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        native(**changes)


def test_sizes_that_overflow_are_refused():
    with pytest.raises(OverflowError, match="elements of a tensor must fit int64"):
        native(n1=1 << 36, n2=1 << 36, t1=1 << 40, starts_q=[0, 3])


def test_level_can_be_set_and_taken_back():
    before = abi.cpu_level()
    try:
        for level in abi.cpu_levels():
            abi.set_cpu_level(level)
            assert abi.cpu_level() == level
    finally:
        abi.set_cpu_level(None)
    assert abi.cpu_level() == before
    with pytest.raises(ValueError, match="avx9000"):
        abi.set_cpu_level("avx9000")


def test_signatures_are_those_that_kernel_abi_1_promises():
    """A change here needs a step of KERNEL_ABI."""
    arrays = "problem metadata dtype q k v"
    scalars = ["softmax_scale", "num_threads"]
    for function, positional in (
        (abi.forward, f"{arrays} sinks_ptr out lse_ptr"),
        (abi.backward, f"{arrays} dout attn_out lse_ptr dlse_ptr sinks_ptr dq dk dv dsinks_ptr"),
        (abi.prepare_forward, f"{arrays} out"),
        (abi.prepare_backward, f"{arrays} dout attn_out dq dk dv"),
    ):
        parameters = inspect.signature(function).parameters.values()
        kinds = {
            kind: [p.name for p in parameters if p.kind == kind] for kind in {p.kind for p in parameters}
        }
        expected = {inspect.Parameter.POSITIONAL_OR_KEYWORD: positional.split()}
        if not function.__name__.startswith("prepare_"):
            expected[inspect.Parameter.KEYWORD_ONLY] = scalars
        assert kinds == expected
