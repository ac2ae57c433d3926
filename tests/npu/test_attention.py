"""Forward and gradients on an NPU by both routes, against float64, within the bound of the integration tests.

Our kernels run in Triton's interpreter here, so problems are small; their own tests have the large grid.
"""

from __future__ import annotations

import attention
import harness
import pytest
import torch
from attention import OPS, ROUTES
from harness import Inputs, random_inputs
from oracle import Call
from stub import Stub

import fag_torch
from fag_kernel.ascend950.launch import Launch

#: Problem -> (call, sizes of random_inputs, routes that take it). CANN's documented combinations are dense.
PROBLEMS: dict[str, tuple[Call, dict[str, object], tuple[str, ...]]] = {
    "bsnd": (Call("BSND"), {"b": 2, "s1": 17, "s2": 23, "n1": 4, "n2": 2, "d": 64}, ROUTES),
    "bnsd-one-head-tile": (Call("BNSD"), {"b": 2, "s1": 9, "s2": 7, "n1": 2, "n2": 2, "d": 64}, ROUTES),
    "tnd": (
        Call("TND", cu_seqlens_q=(0, 5, 12), cu_seqlens_kv=(0, 9, 20)), {"n1": 4, "n2": 1, "d": 64}, ROUTES,
    ),
    "bsnd-causal": (Call("BSND", 3), {"b": 1, "s1": 20, "s2": 33, "n1": 2, "n2": 1, "d": 128}, ROUTES[1:]),
    "bnsd-window": (
        Call("BNSD", 4, 3, 0), {"b": 1, "s1": 20, "s2": 33, "n1": 2, "n2": 1, "d": 72, "dv": 40}, ROUTES[1:],
    ),
    "tnd-causal-empty": (
        Call("TND", 3, cu_seqlens_q=(0, 5, 5, 12), cu_seqlens_kv=(0, 3, 9, 9)),
        {"n1": 4, "n2": 2, "d": 64}, ROUTES[1:],
    ),
    "bsnd-seqused": (
        Call("BSND", 3, seqused_q=(7, 0), seqused_kv=(4, 11)),
        {"b": 2, "s1": 9, "s2": 11, "n1": 2, "n2": 2, "d": 64}, ROUTES[1:],
    ),
    "bsnd-d192": (
        Call("BSND"), {"b": 1, "s1": 9, "s2": 11, "n1": 2, "n2": 1, "d": 192, "dv": 128}, ROUTES[1:],
    ),
}  # fmt: skip


BY_ROUTE = [(name, route) for name, (_, _, routes) in PROBLEMS.items() for route in routes]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("name", "route"), BY_ROUTE)
def test_gradients_are_within_the_bound(
    name: str, route: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAG_NPU_ROUTE", route)
    call, sizes, _ = PROBLEMS[name]
    inputs = random_inputs(call, dtype=dtype, **sizes)  # type: ignore[arg-type]
    result = attention.run(call, attention.carry(inputs))
    assert all(x.device.type == "npu" and x.is_contiguous() for x in result[:5])
    attention.assert_right(call, inputs, result)


@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("through_lse", [False, True])
def test_front_with_sinks_and_through_lse(layout: str, through_lse: bool) -> None:
    call = harness.uniform(layout, 2, 9, 11, mask_mode=3)
    inputs = random_inputs(call, 2, 9, 11, 4, 2, 64, dtype=torch.float16, with_sinks=True)
    there = attention.carry(inputs)
    dlse = torch.randn(attention.run(call, there).lse.shape) if through_lse else None
    result = attention.run_front(call, there, None if dlse is None else dlse.to("npu"))
    assert result.dsinks is not None
    attention.assert_right(call, inputs, result, dlse)


def test_gradient_of_the_lse_alone() -> None:
    call = Call("BSND")
    inputs = random_inputs(call, 1, 9, 11, 2, 2, 64, dtype=torch.float16)
    there = attention.carry(inputs)
    q, k, v = (x.clone().requires_grad_() for x in there[:3])
    out, lse = fag_torch.flash_attention(q, k, v, return_lse=True)
    dlse = torch.randn(lse.shape)
    lse.backward(dlse.to("npu"))
    zero = inputs._replace(dout=torch.zeros_like(inputs.dout))
    result = attention.Result(out.detach(), lse.detach(), q.grad, k.grad, v.grad)
    attention.assert_right(call, zero, result, dlse)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the kernels of our own that run, from problems not routed before."""
    names: set[str] = set()
    run = Launch.run

    def recording(launch: Launch, *arguments: object) -> None:
        names.update(launch.kernels)
        run(launch, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Launch, "run", recording)
    return names


@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_deterministic_mode_selects_the_kernels_without_atomics(
    layout: str, launched: set[str], stub: Stub
) -> None:
    call = harness.uniform(layout, 2, 33, 40)
    inputs = random_inputs(call, 2, 33, 40, 4, 2, 64, dtype=torch.float16)
    there = attention.carry(inputs)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (attention.run(call, there) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    attention.assert_same(first, second)
    attention.assert_right(call, inputs, first)
    assert not any("accumulate" in name for name in launched)
    assert any("columns" in name for name in launched)
    assert any("rows" in name for name in launched)
    assert "aclnnInnerFlashAttnGrad" not in {call.symbol for call in stub.calls()}


# ---- views ---------------------------------------------------------------------------------------------


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values with a step of 2 along the last axis, behind an offset."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), float("nan"), dtype=x.dtype)
    wide[..., 1::2] = x
    return wide.to("npu")[..., 1::2]


def offset(x: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, three elements behind the begin of their storage."""
    flat = torch.cat([torch.full((3,), float("nan"), dtype=x.dtype), x.flatten()])
    return flat.to("npu")[3:].view(x.shape)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The same values, stored with two axes swapped."""
    return x.transpose(0, 1).contiguous().to("npu").transpose(0, 1)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("view", [strided, offset, transposed])
def test_views_give_the_bits_of_their_copies(
    view: object, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAG_NPU_ROUTE", route)
    call = Call("BSND")
    inputs = random_inputs(call, 2, 9, 11, 4, 2, 64, dtype=torch.float16)
    wanted = attention.run(call, attention.carry(inputs))
    viewed = Inputs(*(None if x is None else view(x) for x in inputs))  # type: ignore[operator]
    got = attention.run(call, viewed)
    attention.assert_same(got, wanted)
    given = attention.arguments(call, 64)
    out, lse = view(wanted.out.cpu()), view(wanted.lse.cpu())  # type: ignore[operator]
    gradients = OPS.flash_attn_grad(*viewed[:4], out, lse, **given)
    attention.assert_same(got._replace(dq=gradients[0], dk=gradients[1], dv=gradients[2]), wanted)


def test_expanded_gradient_of_a_sum() -> None:
    """public case 04: out.sum().backward() hands over one element with strides of 0."""
    call = Call("BSND")
    inputs = random_inputs(call, 1, 9, 11, 2, 2, 64, dtype=torch.float16)
    there = attention.carry(inputs._replace(dout=torch.ones_like(inputs.dout)))
    one = torch.ones((), dtype=torch.float16).to("npu").expand(inputs.dout.shape)
    attention.assert_same(
        attention.run_front(call, there._replace(dout=one)), attention.run_front(call, there)
    )


@pytest.mark.parametrize("route", ROUTES)
def test_forward_takes_queries_bnsd_and_gives_bsnd(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAG_NPU_ROUTE", route)
    call = Call("BNSD")
    there = attention.carry(random_inputs(call, 2, 9, 11, 4, 2, 64, dtype=torch.float16))
    given = attention.arguments(call, 64)
    wanted, _ = OPS.flash_attn(*there[:3], **given)
    out, placeholder = OPS.flash_attn(*there[:3], **(given | {"layout_out": "BSND"}))
    assert out.is_contiguous()
    assert torch.equal(out.cpu(), wanted.transpose(1, 2).cpu())
    assert placeholder.cpu().tolist() == [0.0]


# ---- nothing to compute ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        Call("TND", cu_seqlens_q=(0, 0, 0), cu_seqlens_kv=(0, 3, 5)),
        Call("TND", 3, cu_seqlens_q=(0, 2, 5), cu_seqlens_kv=(0, 0, 0)),
        Call("TND", cu_seqlens_q=(0, 0), cu_seqlens_kv=(0, 0)),
    ],
    ids=["no-queries", "no-keys", "nothing"],
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_empty_problems(call: Call, with_sinks: bool) -> None:
    """public case 06: zeros of the right shape; dsinks counts what only the sink sees."""
    inputs = random_inputs(call, n1=4, n2=2, d=64, dtype=torch.float16, with_sinks=with_sinks)
    result = attention.run_front(call, attention.carry(inputs), through(call, inputs))
    attention.assert_right(call, inputs, result, through(call, inputs))
    for x, like in zip(result[2:5], inputs[:3], strict=True):
        assert x.shape == like.shape
        assert not x.cpu().any()


def through(call: Call, inputs: Inputs) -> torch.Tensor:
    """A gradient of the lse."""
    return torch.ones((4, inputs.q.shape[0])).to("npu")


@pytest.mark.parametrize(("b", "s1", "s2"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_dense_problems(b: int, s1: int, s2: int) -> None:
    call = Call("BSND")
    inputs = random_inputs(call, b, s1, s2, 4, 2, 64, dtype=torch.float16)
    result = attention.assert_right(call, inputs, attention.run(call, attention.carry(inputs)))
    assert not any(x.any() for x in (result.out, *result[2:5]))
    assert torch.equal(result.lse, torch.full((b, 4, s1), -torch.inf))
