"""Lengths and metadata that lie on the device: read once, remembered by tensor and version, then checked."""

from __future__ import annotations

import attention
import harness
import pytest
import torch
from attention import OPS, ROUTES
from harness import random_inputs
from oracle import Call
from stub import Stub

import fag_metadata
import fag_torch
from fag_torch import npu_memory

CALL = Call("TND", 0, cu_seqlens_q=(0, 5, 12), cu_seqlens_kv=(0, 9, 20))
SOC = "Ascend950PR_9589"


@pytest.fixture
def there() -> harness.Inputs:
    return attention.carry(random_inputs(CALL, n1=4, n2=2, d=64, dtype=torch.float16))


def metadata_of(call: Call, **extra: object) -> torch.Tensor:
    given = attention.lengths(call)
    layouts = {f"layout_{name}": call.layout for name in ("q", "kv", "out")}
    return fag_torch.flash_attn_metadata(
        4, 2, 64, **given, **layouts, mask_mode=call.mask_mode, is_grad_enabled=True, **extra
    )


def waits(stub: Stub) -> int:
    return sum(stub.syncs().values())


def test_lengths_are_read_once_per_tensor_and_version(there: harness.Inputs, stub: Stub) -> None:
    given = attention.arguments(CALL, 64)
    before = waits(stub)
    OPS.flash_attn(*there[:3], **given)
    assert waits(stub) == before + 1, "one wait for both lists"
    out, lse = OPS.flash_attn(*there[:3], **given, return_softmax_lse=True)
    OPS.flash_attn_grad(*there[:4], out, lse, **given)
    assert waits(stub) == before + 1
    given["cu_seqlens_q"].copy_(harness.int32((0, 7, 12)).pin_memory(), non_blocking=True)
    changed = harness.with_changes(CALL, cu_seqlens_q=(0, 7, 12))
    before = waits(stub)
    result = attention.Result(*OPS.flash_attn(*there[:3], **given, return_softmax_lse=True), *there[:3])
    assert waits(stub) == before + 1
    wanted = attention.run(changed, there)
    torch.npu.synchronize()
    assert torch.equal(result.out.cpu(), wanted.out.cpu())


def test_front_reads_lengths_once_for_forward_and_backward(there: harness.Inputs, stub: Stub) -> None:
    given = attention.lengths(CALL)
    leaves = [x.detach().clone().requires_grad_() for x in there[:3]]
    before = waits(stub)
    for _ in range(3):  # layers
        out = fag_torch.flash_attention(*leaves, layout="TND", **given)
        out.backward(there.dout)
    assert waits(stub) == before + 1


def test_metadata_reads_them_for_the_calls_that_follow(there: harness.Inputs, stub: Stub) -> None:
    given = attention.arguments(CALL, 64)
    layouts = {name: given[name] for name in ("layout_q", "layout_kv", "layout_out")}
    lists = {name: given[name] for name in ("cu_seqlens_q", "cu_seqlens_kv")}
    before = waits(stub)
    metadata = OPS.flash_attn_metadata(4, 2, 64, **lists, **layouts, is_grad_enabled=True)
    assert waits(stub) == before + 1
    out, lse = OPS.flash_attn(*there[:3], metadata=metadata, return_softmax_lse=True, **given)
    OPS.flash_attn_grad(*there[:4], out, lse, metadata=metadata, **given)
    assert waits(stub) == before + 1


def test_lengths_made_in_inference_mode_are_read_at_every_call(there: harness.Inputs, stub: Stub) -> None:
    """They have no version counter, so that an edit would go unnoticed."""
    with torch.inference_mode():
        given = attention.arguments(CALL, 64)
        for values in ((0, 5, 12), (0, 7, 12)):
            given["cu_seqlens_q"].copy_(harness.int32(values))
            got, _ = OPS.flash_attn(*there[:3], **given)
            wanted = attention.run(harness.with_changes(CALL, cu_seqlens_q=values), there).out
            assert torch.equal(got.cpu(), wanted.cpu())


@pytest.mark.parametrize(
    ("name", "values", "got"),
    [
        ("cu_seqlens_q", (1, 5, 12), "1"),
        ("cu_seqlens_q", (0, 5, 13), "13"),
        ("cu_seqlens_kv", (0, 21, 20), "21"),
        ("seqused_kv", (9, 12), "12"),
    ],
)
def test_bad_lengths_are_refused_by_name(
    name: str, values: tuple[int, ...], got: str, there: harness.Inputs
) -> None:
    given = attention.arguments(CALL, 64) | {name: harness.int32(values).to("npu")}
    with pytest.raises(RuntimeError, match=f"flash_attn: {name}.*{got}"):
        OPS.flash_attn(*there[:3], **given)


def test_lengths_of_another_dtype_are_refused_by_name(there: harness.Inputs) -> None:
    given = attention.arguments(CALL, 64) | {"cu_seqlens_q": torch.tensor([0, 5, 12]).to("npu")}
    with pytest.raises(RuntimeError, match="flash_attn: cu_seqlens_q must be int32, got int64"):
        OPS.flash_attn(*there[:3], **given)


# ---- metadata --------------------------------------------------------------------------------------------


def test_metadata_is_made_for_the_soc_of_the_device(stub: Stub) -> None:
    sizes = {"batch_size": 2, "max_seqlen_q": 300, "max_seqlen_kv": 300, "is_grad_enabled": True}
    before = waits(stub)
    made = {
        "default": OPS.flash_attn_metadata(8, 2, 64, **sizes),
        "device": fag_torch.flash_attn_metadata(8, 2, 64, **sizes, device="npu"),
        "host": fag_torch.flash_attn_metadata(8, 2, 64, **sizes, device="cpu"),
    }
    assert waits(stub) == before
    assert [x.device.type for x in made.values()] == ["npu", "npu", "cpu"]
    for name, target in (("default", SOC), ("device", SOC), ("host", "cpu")):
        wanted = fag_metadata.flash_attn_metadata(8, 2, 64, **sizes, target=target)
        assert torch.equal(made[name].cpu(), torch.from_numpy(wanted))


def test_metadata_from_lengths_on_the_device_and_on_the_host_are_equal() -> None:
    on_host = {name: x.cpu() for name, x in attention.lengths(CALL).items()}
    layouts = {f"layout_{name}": "TND" for name in ("q", "kv", "out")}
    from_host = fag_torch.flash_attn_metadata(
        4, 2, 64, **on_host, **layouts, is_grad_enabled=True, device="npu"
    )
    assert from_host.device.type == "npu"
    assert torch.equal(from_host.cpu(), metadata_of(CALL).cpu())


@pytest.mark.parametrize("route", ROUTES)
def test_own_and_foreign_metadata_give_the_bits_of_none(
    route: str, there: harness.Inputs, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is not known as ours: it is read once, and checked in full."""
    monkeypatch.setenv("FAG_NPU_ROUTE", route)
    given = attention.arguments(CALL, 64)
    wanted = attention.run(CALL, there, given)
    own = metadata_of(CALL)
    foreign = own.cpu().to("npu")
    for metadata, cost in ((own, 0), (foreign, 1), (foreign, 0)):
        before = waits(stub)
        result = attention.run(CALL, there, given, metadata=metadata)
        assert waits(stub) == before + cost
        attention.assert_same(result, wanted)


def corrupt(metadata: torch.Tensor) -> torch.Tensor:
    """A hole in the ranges of the gradient: core 0 ends a tile early."""
    words = metadata.cpu().clone()
    words[int(words[7]) + 44] -= 1
    return words.to("npu")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (corrupt, "metadata must hold ranges that cover every tile once, got backward end: core 0"),
        (lambda x: x[:100].clone(), "metadata must have 8192 words by its own head, got 100 words"),
        (lambda x: x.long(), "metadata must be int32, got int64"),
        (
            lambda x: metadata_of(harness.with_changes(CALL, mask_mode=3)),
            "metadata must be made for mask_mode=0",
        ),
        (
            lambda x: metadata_of(harness.with_changes(CALL, cu_seqlens_q=(0, 6, 12))),
            "metadata must be made for the same cu_seqlens_q, cu_seqlens_kv",
        ),
        (
            lambda x: torch.from_numpy(metadata_for_cpu()).to("npu"),
            "metadata must be made for the 32 cube and 64 vector cores of Ascend950PR_9589",
        ),
    ],
)  # fmt: skip
def test_wrong_metadata_is_refused_by_name(change: object, text: str, there: harness.Inputs) -> None:
    given = attention.arguments(CALL, 64)
    result = attention.run(CALL, there, given)
    metadata = change(metadata_of(CALL))  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=text):
        OPS.flash_attn_grad(*there[:4], result.out, result.lse, metadata=metadata, **given)


def metadata_for_cpu() -> object:
    layouts = {f"layout_{name}": "TND" for name in ("q", "kv", "out")}
    lists = {"cu_seqlens_q": CALL.cu_seqlens_q, "cu_seqlens_kv": CALL.cu_seqlens_kv}
    return fag_metadata.flash_attn_metadata(4, 2, 64, **lists, **layouts, is_grad_enabled=True, target="cpu")


def test_own_metadata_that_was_edited_is_read_again(there: harness.Inputs, stub: Stub) -> None:
    given = attention.arguments(CALL, 64)
    result = attention.run(CALL, there, given)
    metadata = metadata_of(CALL)
    OPS.flash_attn_grad(*there[:4], result.out, result.lse, metadata=metadata, **given)
    metadata.copy_(corrupt(metadata))
    with pytest.raises(RuntimeError, match="must hold ranges that cover every tile once"):
        OPS.flash_attn_grad(*there[:4], result.out, result.lse, metadata=metadata, **given)


def test_what_is_remembered_goes_with_the_tensors() -> None:
    before = len(npu_memory._lengths), len(npu_memory._words)
    for _ in range(20):
        metadata_of(CALL)
    assert len(npu_memory._lengths) == before[0]
    assert len(npu_memory._words) == before[1]


# ---- attn_mask -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
def test_attn_mask_is_optional_and_checked_once(
    route: str, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CANN wants its constant with masks; it is made here whether the caller has one or not."""
    monkeypatch.setenv("FAG_NPU_ROUTE", route)
    call = Call("BSND", 3)
    there = attention.carry(random_inputs(call, 1, 9, 11, 2, 1, 64, dtype=torch.float16))
    wanted = attention.run(call, there)
    ones = torch.ones(2048, 2048, dtype=torch.int8)
    mask = ones.triu(1).to("npu")
    first = attention.run(call, there, attn_mask=mask)
    before = waits(stub)
    second = attention.run(call, there, attn_mask=mask)
    assert waits(stub) == before
    attention.assert_same(first, wanted)
    attention.assert_same(second, wanted)
    with pytest.raises(RuntimeError, match=r"attn_mask must be CANN's constant.*got 1 at \[0, 0\]"):
        attention.run(call, there, attn_mask=ones.to("npu"))
