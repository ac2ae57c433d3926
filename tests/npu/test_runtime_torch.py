"""The genuine torch_npu works on the stand-in: devices, streams, its allocator, copies, simple operators."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch_npu
from stub import Stub

MEGABYTE = 1 << 20


def test_it_is_the_public_package() -> None:
    assert torch_npu.__version__.startswith("2.13.0")
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 2


@pytest.mark.parametrize("device", ["npu:0", "npu:1"])
def test_tensors_go_there_and_back(device: str) -> None:
    x = torch.randn(3, 5)
    y = x.to(device)
    assert str(y.device) == device
    assert torch.equal(y.cpu(), x)


def test_tensors_go_from_device_to_device() -> None:
    x = torch.randn(3, 5)
    assert torch.equal(x.to("npu:0").to("npu:1").cpu(), x)


@pytest.mark.parametrize(
    "operate",
    [
        lambda x: x.t().contiguous(),
        lambda x: x[1:, ::2].contiguous(),
        lambda x: x.half(),
        lambda x: x.bfloat16().float(),
        lambda x: x + x,
        lambda x: x * 3 + 1,
        lambda x: torch.zeros_like(x),
        lambda x: torch.full_like(x, 2.5),
        lambda x: x.expand(2, 4, 6).clone(),
        lambda x: x.clone().add_(x, alpha=-0.5),
    ],
)
def test_simple_operators_are_those_of_the_cpu(operate: object) -> None:
    x = torch.arange(24, dtype=torch.float32).reshape(4, 6) / 7
    torch.testing.assert_close(operate(x.to("npu")).cpu(), operate(x), rtol=1e-6, atol=0)


def test_operators_do_not_make_the_host_wait(stub: Stub) -> None:
    x = torch.randn(64, 64).to("npu")
    before = stub.syncs()
    y = (x + x).t().contiguous().half()
    y.copy_(x)
    stub.wait()
    assert stub.syncs() == before
    assert torch.equal(y.cpu(), x.cpu().half())


def test_a_side_stream_waits_for_the_current_one(stub: Stub) -> None:
    stub.set_latency(20_000)
    side, source = torch.npu.Stream(), torch.ones(1000).pin_memory()
    x = source.to("npu", non_blocking=True)
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x + 1
    side.synchronize()
    assert (y.cpu() == 2).all()


def test_a_stream_that_does_not_wait_reads_too_early(stub: Stub) -> None:
    first, second = torch.npu.Stream(), torch.npu.Stream()
    x = torch.zeros(1000, device="npu")
    torch.npu.synchronize()
    stub.set_latency(50_000)
    with torch.npu.stream(first):
        for _ in range(4):
            x.add_(1)
    with torch.npu.stream(second):
        y = x + 0
    second.synchronize()
    early = y.cpu()[0].item()
    torch.npu.synchronize()
    assert early < 4
    assert x.cpu()[0].item() == 4


def test_memory_in_use_on_a_side_stream_is_not_given_out(stub: Stub) -> None:
    side = torch.npu.Stream()
    x = torch.empty(MEGABYTE, dtype=torch.uint8, device="npu")
    torch.npu.synchronize()
    stub.set_latency(100_000)
    with torch.npu.stream(side):
        x.zero_()
    x.record_stream(side)
    address = x.data_ptr()
    del x
    early = torch.empty(MEGABYTE, dtype=torch.uint8, device="npu")
    assert early.data_ptr() != address
    torch.npu.synchronize()
    torch.empty(1, device="npu")  # the allocator looks at its events when it is asked for memory
    late = torch.empty(MEGABYTE, dtype=torch.uint8, device="npu")
    assert late.data_ptr() == address


def test_eight_threads_on_two_devices() -> None:
    def work(index: int) -> None:
        torch.npu.set_device(index % 2)
        x = torch.full((100,), float(index))
        with torch.npu.stream(torch.npu.Stream()):
            for _ in range(10):
                y = x.to("npu")
                y.add_(1)
                sums.append((index, y.cpu()[50].item()))

    sums: list[tuple[int, float]] = []
    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sums) == [(index, index + 1.0) for index in range(8) for _ in range(10)]


def test_a_failed_allocation_is_torch_npus_error(stub: Stub) -> None:
    stub.fail("aclrtMallocAlign32", code=207001, message="out of HBM", times=10)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(64 << 20, dtype=torch.uint8, device="npu")
    stub.clear_failures()
    torch.empty(64 << 20, dtype=torch.uint8, device="npu")
    torch.npu.empty_cache()


def test_a_failed_task_is_reported_with_the_runtimes_message(stub: Stub) -> None:
    x = torch.zeros(4, device="npu")
    torch.npu.synchronize()
    stub.fail("aclnnInplaceAdds:task", code=507015, message="aicore exception of the test")
    x.add_(1)
    with pytest.raises(RuntimeError, match="aicore exception of the test"):
        torch.npu.synchronize()


GUARDED = """
import sys
sys.path.insert(0, sys.argv[1])
import ctypes, torch, torch_npu
from stub import load
x = torch.zeros(100, device="npu")
torch.npu.synchronize()
ctypes.memset(x.data_ptr() + x.nbytes + 40, 0, 1)  # behind the 32 bytes that torch_npu adds
del x
torch.npu.synchronize()
print(load().violations())
"""


def test_without_its_cache_every_tensor_has_guard_zones() -> None:
    runtime = Path(__file__).resolve().parent.parent / "npu_runtime"
    environment = {**os.environ, "PYTORCH_NO_NPU_MEMORY_CACHING": "1"}
    run = [sys.executable, "-c", GUARDED, str(runtime)]
    text = subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout
    assert "guard zone overwritten: behind" in text
