"""The way past the dispatcher: taken by plain calls on the CPU, and by nothing that somebody is to see."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fag_torch
from fag_torch import direct
from fag_torch.register import TABLE
from fag_torch.schema import CANN_SCHEMAS

RAW = torch.ops.cann_ops_transformer
FAG = torch.ops.fag


def flash_attn_grad(q, k, v, **options):
    """The gradient in the form of the others."""
    b, s, n, _ = q.shape
    lse = torch.zeros((b, n, s), dtype=torch.float32)
    dout, out = torch.ones_like(q), torch.zeros_like(q)
    return fag_torch.flash_attn_grad(q, k, v, dout, out, lse, **options)


#: Front -> the operator that it stands for.
FRONTS = {
    fag_torch.flash_attn: RAW.flash_attn,
    flash_attn_grad: RAW.flash_attn_grad,
    fag_torch.flash_attention: FAG.attention_forward,
}


@pytest.fixture(params=list(FRONTS), ids=lambda front: front.__name__)
def front(request):
    return request.param


@pytest.fixture
def direct_calls(monkeypatch):
    """Names of the implementations that were called without the dispatcher, in order."""
    calls = []

    def spy(name, implementation):
        def run(*args, **kwargs):
            calls.append(name)
            return implementation(*args, **kwargs)

        return run

    for served in (direct.OPERATORS, direct.FUNCTIONS):
        for name, implementation in served.items():
            monkeypatch.setitem(served, name, spy(name, implementation))
    return calls


def name_of(operator):
    return operator._qualified_op_name


def test_every_implementation_is_known():
    rows = {f"{row.namespace}::{row.op}" for row in TABLE if row.key == "CPU"}
    assert set(direct.OPERATORS) == set(direct.FUNCTIONS) == rows


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_plain_calls_are_direct(make_call, front, direct_calls, mode):
    call = make_call()
    with mode():
        q = call.q * 1.0  # under inference_mode a tensor of its own kind
        front(q, call.k, call.v)
    assert direct_calls == [name_of(FRONTS[front])]


def test_operators_called_by_name_skip_the_second_dispatch(make_call, direct_calls):
    call = make_call()
    out, lse = RAW.flash_attn(*call.qkv, return_softmax_lse=True)
    RAW.flash_attn_grad(*call.qkv, out, out, lse)
    leaf = call.requiring_grad()
    torch.autograd.grad(fag_torch.flash_attention(*leaf.qkv).sum(), leaf.q, create_graph=True)
    names = [RAW.flash_attn, RAW.flash_attn_grad, FAG.attention_forward, FAG.attention_backward]
    assert direct_calls == list(map(name_of, names))


def test_leaf_is_differentiated(make_call, front):
    call = make_call()
    out = front(call.q, call.k, call.v.clone().requires_grad_())
    assert (out[0] if isinstance(out, tuple) else out).requires_grad


class SeesOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **kwargs or {})


class SeesFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **kwargs or {})


def test_dispatch_mode_sees_the_operator(make_call, front):
    with SeesOperators() as mode:
        front(*make_call().qkv)
    assert FRONTS[front].default in mode.seen


def test_function_mode_sees_the_operator(make_call, front):
    with SeesFunctions() as mode:
        front(*make_call().qkv)
    assert FRONTS[front] in mode.seen


def test_profiler_sees_the_operator(make_call, front):
    call = make_call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        front(*call.qkv)
    assert name_of(FRONTS[front]) in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx_traces_the_operator(make_call, front, pre_dispatch):
    call = make_call()
    graph = make_fx(lambda *qkv: front(*qkv), pre_dispatch=pre_dispatch)(*call.qkv)
    assert FRONTS[front].default in {node.target for node in graph.graph.nodes}


def test_fake_tensors_stay_fake(make_call, front, direct_calls):
    with FakeTensorMode() as mode:
        out = front(*map(mode.from_tensor, make_call().qkv))
    for result in out if isinstance(out, tuple) else (out,):
        assert type(result).__name__ == "FakeTensor"
    assert not direct_calls


def test_functional_tensors_stay_functional(make_call, front, direct_calls):
    qkv = map(torch._to_functional_tensor, make_call().qkv)
    torch._enable_functionalization(reapply_views=True)
    try:
        out = front(*qkv)
    finally:
        torch._disable_functionalization()
    for result in out if isinstance(out, tuple) else (out,):
        assert torch._is_functional_tensor(result)
    assert not direct_calls


def test_pending_negation_is_done(make_call, front):
    call = make_call()
    want = front(-call.q, call.k, call.v)
    got = front(torch._neg_view(call.q), call.k, call.v)
    for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
        assert torch.equal(one, other)


class Wrapped(torch.Tensor):
    """A tensor that counts the functions it is passed to."""

    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclass_sees_the_operator(make_call, front):
    call = make_call()
    Wrapped.seen.clear()
    front(call.q.as_subclass(Wrapped), call.k, call.v)
    assert FRONTS[front] in Wrapped.seen


def test_broken_rule_is_the_same_error(make_call, front):
    """Direct, and under a mode that sees the operator."""
    call = make_call()
    messages = []
    for mode in (contextlib.nullcontext(), SeesOperators()):
        with mode, pytest.raises(ValueError, match="win_left must be -1 with mask_mode NO_MASK") as caught:
            front(*call.qkv, win_left=3)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


FOREIGN = f"""
import contextlib, torch
library = torch.library.Library("cann_ops_transformer", "FRAGMENT")
def foreign(q, *args, **kwargs):
    return torch.full_like(q, 7.0), q.new_zeros(1)
def define():
    library.define("flash_attn" + {CANN_SCHEMAS["flash_attn"]!r})
def implement():
    library.impl("flash_attn", foreign, "CPU")
"""
CALLS = """
q = torch.ones(1, 3, 1, 16)
for call in (fag_torch.flash_attn, torch.ops.cann_ops_transformer.flash_attn):
    print(call(q, q, q)[0][0, 0, 0, 0].item())
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("define(), implement()\nimport fag_torch", "7.0"),
        ("import fag_torch\nwith contextlib.suppress(RuntimeError): implement()  # torch 2.6 refuses", "1.0"),
    ],
    ids=["before", "after"],
)
def test_implementation_of_others_is_met_if_it_was_there_first(code, expected):
    command = [sys.executable, "-W", "ignore", "-c", FOREIGN + code + CALLS]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.split() == [expected, expected], result.stderr
