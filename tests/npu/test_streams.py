"""Order without waiting: streams, torch_npu's task queue, its allocator, and no hidden synchronisation.

Every task on a stream waits for 200 us before it runs, or much longer where a test says so. Whatever is not
ordered behind it reads memory that is not written yet, or was written anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import attention
import pytest
import torch
import torch_npu
from attention import OPS, ROUTES, Result
from harness import Inputs, random_inputs
from oracle import Call
from stub import Stub

import fag_torch
from fag_torch import npu_calls, npu_memory

CALL = Call("BSND")
SIZES = {"b": 1, "s1": 9, "s2": 11, "n1": 2, "n2": 1, "d": 64}
LONG_US = 20_000


@pytest.fixture(params=ROUTES, autouse=True)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FAG_NPU_ROUTE", request.param)
    return str(request.param)


def inputs_of(seed: int = 0, **changes: int) -> Inputs:
    return random_inputs(CALL, **{**SIZES, **changes}, dtype=torch.float16, seed=seed)


@pytest.fixture
def warm() -> tuple[Inputs, Inputs, Result]:
    """Inputs on the host and on the device, and their result, with everything cached."""
    inputs = inputs_of()
    there = attention.carry(inputs)
    return inputs, there, attention.assert_right(CALL, inputs, attention.run(CALL, there))


# ---- order -----------------------------------------------------------------------------------------------


def test_launches_lie_behind_what_torch_npu_has_queued(
    warm: tuple[Inputs, Inputs, Result], stub: Stub
) -> None:
    """Inputs are made by operators of torch_npu that are still in its queue when the launch is made."""
    inputs, there, _ = warm
    scratch = torch.zeros(1).to("npu")
    stub.set_latency(0)
    for _ in range(3000):  # the queue's thread is slower than we are
        scratch.add_(1)
    doubled = Inputs(*(None if x is None else x + x for x in there))
    result = attention.run(CALL, doubled)
    after = result.dq + result.dq  # and what comes after lies behind
    attention.assert_right(CALL, Inputs(*(None if x is None else x + x for x in inputs)), result)
    assert torch.equal(after.cpu(), 2 * result.dq.cpu())


def test_raw_stream_waits_for_the_queue_and_not_for_the_device(stub: Stub) -> None:
    """What npu_calls.raw_stream says of torch_npu."""
    x = torch.zeros(8).to("npu")
    x.add_(1)
    torch.npu.synchronize()
    stub.set_latency(LONG_US)
    for getter in (
        lambda: npu_calls.raw_stream(0),
        lambda: torch.npu.current_stream().npu_stream,
        lambda: torch.npu.current_stream()._as_parameter_.value,
    ):
        stub.clear_calls()
        syncs = stub.syncs()
        for _ in range(10):
            x.add_(1)
        handle = getter()
        launched = sum(call.symbol == "aclnnInplaceAdds" for call in stub.calls())
        assert launched == 10
        assert not torch.npu.current_stream().query()
        assert stub.syncs() == syncs
        assert handle == torch_npu._C._npu_getCurrentRawStreamNoWait(0)
        torch.npu.synchronize()


@pytest.mark.parametrize("seed", [1, 2])
def test_another_stream_orders_by_its_events_alone(seed: int, stub: Stub) -> None:
    """Everything on a stream of its own; the default one is idle. Constants may come from another stream."""
    inputs = inputs_of(seed)
    stream = torch.npu.Stream()
    stub.set_latency(LONG_US)
    with torch.npu.stream(stream):
        there = Inputs(*(None if x is None else x.pin_memory().to("npu", non_blocking=True) for x in inputs))
        result = attention.run(CALL, there)
        host = [x.to("cpu") for x in result[:5]]
    attention.assert_right(CALL, inputs, Result(*(x.to("npu") for x in host)))


@pytest.fixture
def no_constants(monkeypatch: pytest.MonkeyPatch) -> Callable[..., npu_memory.Constants]:
    """Device 0 begins anew with constants, while routes and kernels stay warm."""

    def begin(**options: int) -> npu_memory.Constants:
        torch.npu.synchronize()
        constants = npu_memory.Constants(torch.device("npu:0"), **options)
        monkeypatch.setitem(npu_memory._constants, 0, constants)
        return constants

    return begin


def test_a_constant_made_on_one_stream_is_waited_for_on_another(
    warm: tuple[Inputs, Inputs, Result], no_constants: Callable[..., npu_memory.Constants], stub: Stub
) -> None:
    """First use on stream a, whose copies take long; second use on b, which has nothing else to wait for."""
    inputs, there, _ = warm
    no_constants()
    a, b = torch.npu.Stream(), torch.npu.Stream()
    stub.set_latency(LONG_US)
    syncs = stub.syncs()
    with torch.npu.stream(a):
        first = attention.run(CALL, there)
    with torch.npu.stream(b):
        second = attention.run(CALL, there)
    assert stub.syncs() == syncs
    attention.assert_same(first, second)
    attention.assert_right(CALL, inputs, second)


def test_backward_runs_on_the_stream_of_its_forward(stub: Stub) -> None:
    inputs = inputs_of(4)
    there = attention.carry(inputs)
    torch.npu.synchronize()
    stream = torch.npu.Stream()
    attention.run_front(CALL, there)
    torch.npu.synchronize()
    stub.set_latency(LONG_US)
    stub.clear_calls()
    with torch.npu.stream(stream):
        result = attention.run_front(CALL, there)
        handle = npu_calls.raw_stream(0)
    attention.assert_right(CALL, inputs, result)
    symbols = ("rtKernelLaunch", "aclnnInnerFlashAttn", "aclnnInnerFlashAttnGrad")
    launches = [call for call in stub.calls() if call.symbol in symbols]
    assert launches
    assert {call.stream for call in launches} == {handle}


# ---- waiting ---------------------------------------------------------------------------------------------


def warm_calls(there: Inputs) -> dict[str, Callable[[], object]]:
    metadata = OPS.flash_attn_metadata(
        2, 1, 64, batch_size=1, max_seqlen_q=9, max_seqlen_kv=11, is_grad_enabled=True
    )
    return {
        "raw": lambda: attention.run(CALL, there),
        "raw with metadata": lambda: attention.run(CALL, there, metadata=metadata),
        "front": lambda: attention.run_front(CALL, there),
        "metadata": lambda: OPS.flash_attn_metadata(2, 1, 64, batch_size=1, max_seqlen_q=9, max_seqlen_kv=11),
    }


@pytest.mark.parametrize("name", ["raw", "raw with metadata", "front", "metadata"])
def test_a_warm_call_never_waits_for_the_device(
    name: str, warm: tuple[Inputs, Inputs, Result], stub: Stub
) -> None:
    run = warm_calls(warm[1])[name]
    run()
    torch.npu.synchronize()
    stub.set_latency(5 * LONG_US)  # longer than a busy machine keeps this thread from its five calls
    before = stub.syncs()
    for _ in range(5):
        run()
    assert torch.npu.current_stream().npu_stream  # what still is in torch_npu's queue goes to the device
    assert not torch.npu.current_stream().query(), "the device is still at work"
    assert stub.syncs() == before


def test_a_cold_call_never_waits_either(stub: Stub) -> None:
    there = attention.carry(inputs_of(5, s1=10))
    torch.npu.synchronize()
    before = stub.syncs()
    attention.run(CALL, there)
    assert stub.syncs() == before


# ---- memory ----------------------------------------------------------------------------------------------


def test_memory_freed_by_the_host_is_not_written_before_its_launch_has_run(stub: Stub) -> None:
    """The workspace is free for the host when the call returns, and inputs when the caller drops them."""
    inputs = inputs_of(6)
    torch.npu.synchronize()
    stub.set_latency(LONG_US)
    results = []
    for _ in range(4):
        there = Inputs(*(None if x is None else x.pin_memory().to("npu", non_blocking=True) for x in inputs))
        results.append(attention.run(CALL, there))
        del there
        junk = [torch.full((1 << size,), float("nan")).pin_memory() for size in (8, 10, 12, 14)]
        junk = [x.to("npu", non_blocking=True) for x in junk]
        del junk
    for result in results:
        attention.assert_same(result, results[0])
    attention.assert_right(CALL, inputs, results[0])


def test_constants_that_make_way_stay_until_their_launch_has_run(
    no_constants: Callable[..., npu_memory.Constants], stub: Stub
) -> None:
    """Room for one metadata tensor only: a call drops the constants of the one before, while a second stream
    that uses them too is far behind.
    """
    problems = [inputs_of(7, s1=9 + i) for i in range(4)]
    carried = [attention.carry(inputs) for inputs in problems]
    warm = [attention.run(CALL, there) for there in carried]
    constants = no_constants(limit_bytes=40_000)
    scratch = torch.zeros(1).to("npu")
    torch.npu.synchronize()
    ahead, behind = torch.npu.Stream(), torch.npu.Stream()
    stub.set_latency(2000)
    results = []
    with torch.npu.stream(behind):
        for _ in range(50):
            scratch.add_(1)
    for i, (there, (out, lse, *_)) in enumerate(zip(carried, warm, strict=True)):
        for stream in (ahead, behind):
            with torch.npu.stream(stream):
                results.append((i, OPS.flash_attn_grad(*there[:4], out, lse)))
    assert len(constants) <= 2
    for i, gradients in results:
        attention.assert_right(CALL, problems[i], Result(*warm[i][:2], *gradients))


def test_guard_zones_hold_without_the_caching_allocator(route: str) -> None:
    """One allocation per tensor: a byte too far, or a tensor freed too early, is seen by the stand-in."""
    code = """
import attention, torch
from harness import random_inputs
from oracle import Call
from stub import load
stub = load()
stub.install_executors()
stub.set_latency(200)
call = Call("TND", cu_seqlens_q=(0, 5, 12), cu_seqlens_kv=(0, 9, 20))
inputs = random_inputs(call, n1=4, n2=2, d=64, dtype=torch.float16)
for _ in range(2):
    attention.assert_right(call, inputs, attention.run(call, attention.carry(inputs)))
assert stub.violations() == [], stub.violations()
"""
    folders = [os.path.dirname(attention.__file__), *sys.path]
    environment = {**os.environ, "PYTORCH_NO_NPU_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(folders)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_dropped_metadata_is_forgotten() -> None:
    known = len(npu_memory._words)
    for _ in range(3):
        fag_torch.flash_attn_metadata(2, 1, 64, batch_size=1, max_seqlen_q=9, max_seqlen_kv=11)
    assert len(npu_memory._words) <= known + 1
