"""Whatever fails below a call: the error says what the runtime said, nothing leaks, the next call works."""

from __future__ import annotations

import attention
import pytest
import torch
from attention import OPS
from harness import Inputs, random_inputs
from oracle import Call
from stub import Stub

from fag_kernel.cann import CannError

CALL = Call("BSND")

#: Function of the runtime that fails -> (route, direction, what the error says).
DURING_A_CALL = {
    "aclCreateTensor": ("aclnn", "backward", "aclCreateTensor must succeed"),
    "aclnnInnerFlashAttnGetWorkspaceSize": ("aclnn", "forward", "got code 561103: told so"),
    "aclnnInnerFlashAttn": ("aclnn", "forward", "got code 561103: told so"),
    "aclnnInnerFlashAttnGradGetWorkspaceSize": ("aclnn", "backward", "got code 561103: told so"),
    "aclnnInnerFlashAttnGrad": ("aclnn", "backward", "got code 561103: told so"),
    "rtGetC2cCtrlAddr": ("ascend950", "backward", "got code 561103: told so"),
    "rtKernelLaunch": ("ascend950", "backward", "got code 561103: told so"),
    "aclrtMemsetAsync": ("ascend950", "forward", "got code 561103: told so"),
}


@pytest.fixture
def inputs() -> Inputs:
    return random_inputs(CALL, 1, 9, 11, 2, 1, 64, dtype=torch.float16)


@pytest.mark.parametrize("symbol", DURING_A_CALL)
def test_a_failing_call_of_the_runtime(
    symbol: str, inputs: Inputs, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    route, direction, text = DURING_A_CALL[symbol]
    monkeypatch.setenv("FAG_NPU_ROUTE", route)
    there = attention.carry(inputs)
    out, lse, *_ = attention.run(CALL, there)
    operate = {
        "forward": lambda: OPS.flash_attn(*there[:3], softmax_scale=0.125),
        "backward": lambda: OPS.flash_attn_grad(*there[:4], out, lse),
    }
    torch.npu.synchronize()
    allocated, live = torch.npu.memory_allocated(), stub.live()
    stub.fail(symbol, code=561103, message="told so")
    with pytest.raises(CannError, match=symbol) as caught:
        operate[direction]()
    assert text in str(caught.value)
    assert "told so" in str(caught.value)
    assert "\n" not in str(caught.value)
    caught = None  # it holds the frames of the call, and they its tensors
    torch.npu.synchronize()
    assert stub.live() == live
    assert torch.npu.memory_allocated() == allocated
    attention.assert_right(CALL, inputs, attention.run(CALL, there))


@pytest.mark.parametrize(
    ("symbol", "call", "sizes"),
    [
        ("rtDevBinaryRegister", Call("BSND", 4, 6, 0), {"b": 1, "s1": 9, "s2": 11, "d": 130, "dv": 65}),
        (
            "rtFunctionRegister",
            Call("TND", 4, 6, 0, cu_seqlens_q=(0, 5, 12), cu_seqlens_kv=(0, 9, 20)),
            {"d": 72, "dv": 65},
        ),
    ],
)
def test_a_kernel_that_cannot_be_registered(
    symbol: str, call: Call, sizes: dict[str, int], stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first use only, and no other test uses these kernels."""
    monkeypatch.setenv("FAG_NPU_ROUTE", "ascend950")
    inputs = random_inputs(call, n1=2, n2=1, **sizes, dtype=torch.bfloat16)
    there = attention.carry(inputs)
    live = stub.live()
    for _ in range(2):
        stub.fail(symbol, code=561103, message="told so")
        with pytest.raises(CannError, match=f"{symbol} must succeed, got code 561103: told so"):
            attention.run(call, there)
    torch.npu.synchronize()
    after = stub.live()
    for kind in ("tensors", "executors", "functions"):
        assert after[kind] == live[kind]
    attention.assert_right(call, inputs, attention.run(call, there))


@pytest.mark.parametrize("route", attention.ROUTES)
def test_no_memory(route: str, inputs: Inputs, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is torch's own, which programs know how to handle."""
    monkeypatch.setenv("FAG_NPU_ROUTE", route)
    q, k, out = (torch.empty((1, 10_000, 1, 64), dtype=torch.float16, device="npu") for _ in range(3))
    lse = torch.empty((1, 1, 10_000), dtype=torch.float32, device="npu")
    torch.npu.synchronize()
    for symbol in ("aclrtMalloc", "aclrtMallocAlign32"):
        stub.fail(symbol, code=207001, message="no memory", times=1000)
    filler = []
    while True:  # until torch_npu's allocator has nothing left of the size of a gradient
        try:
            filler.append(torch.empty_like(q))
        except torch.OutOfMemoryError:
            break
    live = stub.live()
    with pytest.raises(torch.OutOfMemoryError):
        OPS.flash_attn_grad(q, k, k, out, out, lse)
    after = stub.live()
    for kind in ("allocations", "tensors", "executors", "events"):
        assert after[kind] == live[kind]
    stub.clear_failures()
    del filler
    attention.assert_right(CALL, inputs, attention.run(CALL, attention.carry(inputs)))


@pytest.mark.parametrize(
    ("route", "symbol"), [("aclnn", "aclnnInnerFlashAttnGrad"), ("ascend950", "rtKernelLaunch")]
)
def test_a_task_that_fails_on_the_device(
    route: str, symbol: str, inputs: Inputs, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is too late for the call; the next one that waits reports it."""
    monkeypatch.setenv("FAG_NPU_ROUTE", route)
    there = attention.carry(inputs)
    out, lse, *_ = attention.run(CALL, there)
    torch.npu.synchronize()
    stub.fail(f"{symbol}:task", code=507015, message="aicore exception")
    OPS.flash_attn_grad(*there[:4], out, lse)
    with pytest.raises(RuntimeError, match="aicore exception"):
        torch.npu.synchronize()
    attention.assert_right(CALL, inputs, attention.run(CALL, there))


def test_without_pinned_memory_copies_wait(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch_npu gets no pinned memory it gives a tensor without any, and says nothing."""
    monkeypatch.setenv("FAG_NPU_ROUTE", "ascend950")
    call = Call("TND", cu_seqlens_q=(0, 6, 12), cu_seqlens_kv=(0, 9, 20))
    inputs = random_inputs(call, n1=2, n2=1, d=64, dtype=torch.float16)
    there = attention.carry(inputs)
    torch.npu.synchronize()
    stub.fail("aclrtMallocHost", code=207001, message="no pinned memory", times=1000)
    held = [
        torch.empty(size, dtype=torch.int32, pin_memory=True) for size in (3, 50, 8192) for _ in range(50)
    ]
    assert held[-1].data_ptr() == 0, "torch_npu's host allocator has nothing left of these sizes"
    result = attention.run(call, there)
    stub.clear_failures()
    attention.assert_right(call, inputs, result)
    del held
    torch.npu.host_empty_cache()  # it keeps the blocks without memory, and would hand them out again
