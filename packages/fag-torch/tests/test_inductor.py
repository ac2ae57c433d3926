"""Inductor must not write into what tensor_memo remembers: it reuses memory and counts no version."""

from __future__ import annotations

import re
import shutil
import sys

import pytest
import torch

from fag_torch import flash_attention, flash_attn, inductor, tensor_memo
from fag_torch.tensor_memo import TensorMemo, version_of

OVERLOAD = torch.ops.fag.attention_forward.default


def starts(lengths):
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def by_the_front(q, k, v, cu_seqlens):
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    return flash_attention(q, k, v, layout="TND", max_seqlen_q=64, max_seqlen_kv=64, **lengths)


def by_the_operator(q, k, v, cu_seqlens):
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    layouts = dict.fromkeys(("layout_q", "layout_kv", "layout_out"), "TND")
    return flash_attn(q, k, v, max_seqlen_q=64, max_seqlen_kv=64, **lengths, **layouts)[0]


def two_calls(attend):
    def whole(q, k, v, lengths):
        out = attend(q, k, v, starts(lengths))
        # the second lengths are known only after the first call, when nobody needs the first ones any more
        return attend(out, k, v, starts(lengths.flip(0) + (0 * out.sum()).int()))

    return whole


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ at run time: no g++ here")
@pytest.mark.filterwarnings("ignore")  # torch's own deprecations while it traces
@pytest.mark.parametrize("attend", [by_the_front, by_the_operator])
def test_generated_code_leaves_lengths_alone_that_an_operator_has_read(attend):
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    whole = two_calls(attend)
    q, k, v = (torch.randn(96, 2, 64) for _ in range(3))
    lengths = torch.tensor([32, 64])
    with torch.no_grad():
        out, (code,) = run_and_get_code(torch.compile(whole, fullgraph=True), q, k, v, lengths)
        assert torch.equal(out, whole(q, k, v, lengths))
    calls = re.findall(r"= torch\.ops\.(?:fag|cann_ops_transformer)\.\w+\.default\((.*)\)", code)
    assert len(calls) == 2
    read = {name for call in calls for name in re.findall(r"\bbuf\d+\b", call)}
    reused = set(re.findall(r"= (buf\d+); del \1  # reuse", code))
    integers = set(re.findall(r"(buf\d+) = empty_strided_cpu\(\(3, \), \(1, \), torch\.int32\)", code))
    assert len(read & integers) >= 2
    assert not read & integers & reused


def test_nothing_is_remembered_where_inductor_cannot_be_told(monkeypatch):
    lowering = pytest.importorskip("torch._inductor.lowering", reason="this torch has no Inductor")
    monkeypatch.setattr(tensor_memo, "_is_distrusted", False)
    monkeypatch.setattr(lowering, "lowerings", {})
    memo: TensorMemo[str] = TensorMemo()
    tensor = torch.zeros(3)
    memo.put(tensor, "zeros", version_of(tensor))
    assert memo.get(tensor) == "zeros"
    monkeypatch.delattr(lowering, "fallback_handler")
    inductor.keep_arguments("fag", "attention_forward")
    assert memo.get(tensor) is None


@pytest.fixture
def table(monkeypatch):
    """Inductor's module of lowerings, where the operator has ours until the end of this test."""
    lowering = pytest.importorskip("torch._inductor.lowering", reason="this torch has no Inductor")
    monkeypatch.setattr(tensor_memo, "_is_distrusted", False)
    inductor.keep_arguments("fag", "attention_forward")
    monkeypatch.setitem(lowering.lowerings, OVERLOAD, lowering.lowerings[OVERLOAD])
    monkeypatch.setitem(inductor._ours, OVERLOAD, inductor._ours[OVERLOAD])
    yield lowering
    lowering.fallbacks.discard(OVERLOAD)


def test_a_fallback_that_replaces_ours_is_replaced(table):
    """torch_npu makes fallbacks of all that it finds in the table and does not know."""
    ours = table.lowerings[OVERLOAD]
    table.make_fallback(OVERLOAD)
    assert table.lowerings[OVERLOAD] is not ours
    inductor.keep_arguments("fag", "attention_forward")
    again = table.lowerings[OVERLOAD]
    assert again.__module__ == inductor.__name__
    inductor.keep_arguments("fag", "attention_forward")
    assert table.lowerings[OVERLOAD] is again
    assert not tensor_memo._is_distrusted


def test_nothing_is_remembered_where_another_lowering_is_in_force(table):
    def theirs():
        pass

    table.lowerings[OVERLOAD] = theirs
    inductor.keep_arguments("fag", "attention_forward")
    assert table.lowerings[OVERLOAD] is theirs
    assert tensor_memo._is_distrusted


def test_nothing_is_done_before_inductor_is_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.lowering", raising=False)
    inductor.keep_arguments("fag", "attention_forward")
    assert "torch._inductor.lowering" not in sys.modules
