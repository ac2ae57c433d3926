"""The plan as a whole: the route is verified, not decided; reasons are kept; errors name what is wrong."""

import itertools

import pytest

from fag_kernel import _native
from fag_kernel.abi import native_problem
from fag_kernel.plan import TraceRow, plan
from fag_metadata import (
    TARGETS,
    AttentionProblem,
    Route,
    Split,
    Target,
    UnsupportedError,
    flash_attn_metadata,
    unpack,
)
from fag_metadata.routes import ROUTES, select_route

ASCEND = "Ascend950PR_9589"


def dense(n1=8, n2=8, d=128, b=2, s1=1000, s2=1000, **options):
    return AttentionProblem.from_metadata_args(
        n1, n2, d, batch_size=b, max_seqlen_q=s1, max_seqlen_kv=s2, **options
    )


def packed(lengths, n1=8, n2=8, d=128, **options):
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return AttentionProblem.from_metadata_args(
        n1, n2, d, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, layout_q="TND", **options
    )


def test_example():
    tiling = plan(dense(64, 64, 64, 4, 512, 512, mask_mode="causal"), ASCEND)
    assert tiling.route is Route.BN2_MULTIBLK
    assert tiling.key.name == "BN2-dense-causal-d64-dv128-multiblk"
    assert tiling.tiling_key == tiling.key.encode() == 0b01000001001
    assert (tiling.block_dim, tiling.workspace_bytes) == (32, 0)
    assert len(tiling.tiling_data) == 192


def test_trace_tells_capability_from_preference():
    routes = [row for row in plan(dense(b=1, s1=640, s2=640), ASCEND).trace if row.stage == "route"]
    assert [(row.name, row.verdict) for row in routes] == [
        ("BN2_single", "capability"),
        ("BN2_multiblk", "preference"),
        ("BN2S2", "capability"),
        ("BN2GS1S2", "chosen"),
    ]
    assert "S1=640, S2=640" in routes[0].reason
    assert "B*N1=8" in routes[1].reason


def test_trace_ends_with_swizzle_and_key():
    trace = plan(dense(), ASCEND).trace
    assert [row.stage for row in trace[-2:]] == ["swizzle", "key"]
    assert trace[-1] == TraceRow("key", "BN2GS1S2-dense-full-d128-dv128", "chosen", "a valid key")


def test_route_is_that_of_fag_metadata():
    for problem, target, split in itertools.product(
        (dense(), dense(s1=100, s2=100), dense(37, 37, 64, 4, 512, 512), packed([100, 5])),
        (ASCEND, "cpu", Target("mine", 24, 48)),
        (None, "cann", "balanced"),
    ):
        machine = TARGETS.get(target, target) if isinstance(target, str) else target
        choice = select_route(problem, machine, None if split is None else Split[split.upper()])
        tiling = plan(problem, target, split=split)
        assert tiling.route is choice.route
        assert [row[1:] for row in tiling.trace if row.stage == "route"] == [
            tuple(verdict) for verdict in choice.trace
        ]


def grid():
    for b, (n1, n2), (d, dv), s1, s2 in itertools.product(
        (0, 3), ((4, 4), (4, 2)), ((64, 64), (128, 64), (192, 128)), (0, 1, 128, 129, 640, 641), (0, 100, 640)
    ):
        yield dense(n1, n2, d, b, s1, s2, head_dim_v=dv)
        for side, length in (("seqused_q", s1), ("seqused_kv", s2)):
            yield dense(n1, n2, d, b, s1, s2, head_dim_v=dv, **{side: [length // 2] * b})
            yield dense(n1, n2, d, b, s1, s2, head_dim_v=dv, **{side: [max(0, length - i) for i in range(b)]})
        yield packed([s1, s2], n1, n2, d, head_dim_v=dv)


@pytest.mark.parametrize("row", [row for row in ROUTES if row.route is not None], ids=lambda row: row.name)
def test_native_limits_are_the_capability_column_of_the_route_table(row):
    """The native check must neither refuse what fag_metadata can choose nor let anything else through."""
    target, split = TARGETS[ASCEND], Split.CANN
    seen = set()
    for problem in grid():
        can = all(condition.test(problem, target, split) for condition in row.can)
        assert (_native.why_infeasible(native_problem(problem), int(row.route)) == "") == can, problem
        seen.add(can)
    assert seen == ({True} if row.name == "BN2GS1S2" else {True, False})


@pytest.mark.parametrize(
    ("problem", "route", "reason"),
    [
        (packed([10, 20]), Route.BN2_SINGLE, "layout must not be TND"),
        (dense(8, 4, s1=10, s2=10), Route.BN2_SINGLE, "n1 must be n2, got n1=8, n2=4"),
        (dense(d=192, s1=10, s2=10), Route.BN2_SINGLE, "d must be at most 128, got d=192"),
        (dense(s1=10, s2=129), Route.BN2_SINGLE, "s1 and s2 must be at most 128, got s1=10, s2=129"),
        (dense(s1=10, s2=0), Route.BN2_SINGLE, "no sequence may be empty"),
        (dense(s1=300, head_dim_v=64), Route.BN2_MULTIBLK, "d must be dv, got d=128, dv=64"),
        (dense(s1=300, s2=300, seqused_q=[1, 2]), Route.BN2_MULTIBLK, "seqused must be absent"),
        (dense(s1=641), Route.BN2_MULTIBLK, "s1 and s2 must be at most 640"),
        (dense(s1=9, s2=128), Route.BN2_MULTIBLK, "s1 or s2 must be above 128, got s1=9, s2=128"),
    ],
)
def test_infeasible_route_is_refused_with_the_reason(problem, route, reason):
    with pytest.raises(UnsupportedError, match="plan: route must be one whose kernel can run") as caught:
        _native.make_plan(
            problem=native_problem(problem),
            route=int(route),
            cube_cores=8,
            vector_cores=16,
            l2_bytes=0,
            libapi_reserve_bytes=0,
            softmax_scale=1.0,
        )
    assert reason in str(caught.value)


def test_unknown_route_is_refused():
    assert _native.why_infeasible(native_problem(dense()), 7) == "route must be 0, 1 or 2, got route=7"


# ---- metadata
# ------------------------------------------------------------------------------------------------------------


def test_route_can_come_from_the_metadata():
    """148 heads on 36 cores are uneven: the balanced split does not want whole heads, CANN's does."""
    sizes = {"batch_size": 4, "max_seqlen_q": 512, "max_seqlen_kv": 512, "is_grad_enabled": True}
    problem = dense(37, 37, 128, 4, 512, 512)
    target = "Ascend950PR_9599"
    words = flash_attn_metadata(37, 37, 128, target=target, split="balanced", **sizes)
    tiling = plan(problem, target, metadata=words)
    assert tiling.route is Route.BN2GS1S2
    assert tiling.trace[0] == TraceRow("route", "BN2GS1S2", "chosen", "stands in the metadata")
    words = flash_attn_metadata(37, 37, 128, target=target, **sizes)
    assert plan(problem, target, metadata=words) == plan(problem, target)


def test_every_core_that_metadata_gives_tiles_is_launched():
    """36 tiles on 32 cores: CANN's host deals two each to 18, the balanced split uses all."""
    problem, target = dense(1, 1, 64, 1, 700, 700), "Ascend950PR_9589"
    words = {
        split: flash_attn_metadata(
            1, 1, 64, batch_size=1, max_seqlen_q=700, max_seqlen_kv=700, is_grad_enabled=True, target=target,
            split=split,
        )
        for split in ("cann", "balanced")
    }  # fmt: skip
    assert plan(problem, target).block_dim == 18
    assert plan(problem, target, metadata=words["cann"]).block_dim == 18
    assert unpack(words["balanced"]).grad.used_cubes == 32
    assert plan(problem, target, metadata=words["balanced"]).block_dim == 32


def test_metadata_of_another_problem_is_refused():
    words = flash_attn_metadata(
        8, 8, 128, batch_size=2, max_seqlen_q=1000, max_seqlen_kv=1000, is_grad_enabled=True
    )
    assert plan(dense(), metadata=words).route is Route.BN2GS1S2
    with pytest.raises(ValueError, match="plan: metadata .*mask_mode"):
        plan(dense(mask_mode="causal"), metadata=words)
    with pytest.raises(TypeError, match="plan: metadata must be"):
        plan(dense(), metadata="words")


def test_forward_only_metadata_is_refused():
    words = flash_attn_metadata(8, 8, 128, batch_size=2, max_seqlen_q=1000, max_seqlen_kv=1000)
    with pytest.raises(ValueError, match="is_grad_enabled"):
        plan(dense(), metadata=words)


# ---- limits, targets, caching
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (dense(d=256), "got D=256, Dv=256, layout=BSND \\(head dims end at 192\\)"),
        (packed([300], d=192), "got D=192, Dv=192, layout=TND \\(head dims above 128 need a dense layout\\)"),
    ],
)
def test_problems_without_compiled_kernel(problem, reason):
    with pytest.raises(UnsupportedError, match=f"compiled kernel on {ASCEND}, {reason}. Run it on the CPU"):
        plan(problem, ASCEND)
    tiling = plan(problem, "cpu")
    assert tiling.tiling_key is tiling.key is None
    assert (tiling.trace[-1].stage, tiling.trace[-1].verdict) == ("key", "capability")


def test_cpu_target_plans_its_logical_cores():
    tiling = plan(dense(), "cpu")
    assert tiling.block_dim == TARGETS["cpu"].cube_cores == 64
    assert not tiling.is_swizzle


def test_own_target():
    tiling = plan(dense(), Target(name="mine", cube_cores=24, vector_cores=48))
    assert (tiling.block_dim, tiling.target.name) == (24, "mine")


def test_same_arguments_give_the_same_object():
    assert plan(dense()) is plan(dense())
    assert plan(dense()) is plan(dense(), ASCEND, softmax_scale=0.0)
    assert plan(dense()) is not plan(dense(), softmax_scale=0.5)


def test_plan_cannot_be_changed():
    with pytest.raises(AttributeError):
        plan(dense()).block_dim = 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"target": "Ascend910"}, ValueError, "plan: target must be a SoC name .*got 'Ascend910'"),
        ({"target": 36}, TypeError, "plan: target must be a SoC name.*got int"),
        ({"split": "even"}, ValueError, "plan: split must be None, 'cann' or 'balanced', got 'even'"),
        ({"split": ["cann"]}, ValueError, "plan: split must be None.*got \\['cann'\\]"),
        ({"softmax_scale": float("inf")}, ValueError, "plan: softmax_scale must be finite"),
        ({"problem": "dense"}, TypeError, "plan: problem must be an AttentionProblem, got str"),
    ],
)
def test_rejects(arguments, error, message):
    with pytest.raises(error, match=message):
        plan(**({"problem": dense()} | arguments))


def test_bound_of_the_lengths_does_not_matter():
    exact = packed([100, 300])
    bounded = packed([100, 300], max_seqlen_q=4096, max_seqlen_kv=300)
    assert plan(exact).tiling_data == plan(bounded).tiling_data
    assert plan(exact).workspace_bytes == plan(bounded).workspace_bytes
