"""The stand-in fails on demand, and can be an installation that lacks something."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import raw_runtime as rt
from stub import Stub


@pytest.fixture(autouse=True)
def _device() -> None:
    rt.use_device(0)


def test_a_failure_comes_when_it_was_asked_for(stub: Stub) -> None:
    stub.fail("aclrtMalloc", code=207001, message="out of HBM", after=1, times=2)
    before = stub.live()
    first = rt.malloc(16)
    for _ in range(2):
        with pytest.raises(rt.RuntimeFault, match="aclrtMalloc: 207001 out of HBM"):
            rt.malloc(16)
    second = rt.malloc(16)
    assert (stub.live() - before)["allocations"] == 2
    rt.free(first)
    rt.free(second)


def test_a_message_is_read_once_and_on_its_thread(stub: Stub) -> None:
    stub.fail("aclrtSynchronizeDevice", message="bus error", times=1)
    other: list[str | None] = []
    assert rt.recent_message() is None
    with pytest.raises(rt.RuntimeFault) as caught:
        rt.call("aclrtSynchronizeDevice")
    assert caught.value.message == "bus error"
    assert rt.recent_message() is None, "raw_runtime has read it already"
    with pytest.raises(rt.RuntimeFault):
        rt.call("aclrtSetDevice", 99)
    thread = threading.Thread(target=lambda: other.append(rt.recent_message()))
    thread.start()
    thread.join()
    assert other == [None]


def test_failures_can_be_called_off(stub: Stub) -> None:
    stub.fail("aclrtMalloc", times=5)
    stub.clear_failures()
    rt.free(rt.malloc(16))


def test_a_descriptor_may_fail_too(stub: Stub) -> None:
    address = rt.malloc(16)
    stub.fail("aclCreateTensor", message="no descriptors left")
    assert rt.tensor(address, "float32", (4,)) == 0
    assert rt.recent_message() == "no descriptors left"
    rt.free(address)


def test_a_task_fails_on_the_device_and_the_next_synchronisation_says_so(stub: Stub) -> None:
    stream, target = rt.new_stream(), rt.malloc(16)
    stub.fail("aclrtMemsetAsync:task", code=507015, message="aicore exception")
    rt.call("aclrtMemsetAsync", target, 16, 0, 16, stream)
    rt.call("aclrtMemsetAsync", target, 8, 0, 8, stream)
    with pytest.raises(rt.RuntimeFault, match="507015 aicore exception"):
        rt.synchronize(stream)
    rt.synchronize(stream)
    assert rt.read(target, "uint8", (16,)).tolist() == [0] * 8 + [255] * 8
    rt.free(target)


def test_a_device_that_does_not_exist_is_refused(stub: Stub) -> None:
    stub.set_device_count(1)
    with pytest.raises(rt.RuntimeFault, match="device 1 does not exist"):
        rt.use_device(1)


FIND = "import ctypes, sys; getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])"


@pytest.mark.parametrize(
    ("library", "symbol"),
    [
        ("libascendcl.so", "rtKernelLaunch"),
        ("libcust_opapi.so", "aclnnInnerFlashAttnGrad"),
    ],
)
def test_a_variant_lacks_what_was_left_out(
    variant: Callable[..., dict[str, str]], library: str, symbol: str
) -> None:
    find = [sys.executable, "-c", FIND, library]
    subprocess.run([*find, symbol], check=True)
    lacking = subprocess.run(
        [*find, symbol], env=variant(without=[symbol]), check=False, capture_output=True, text=True
    )
    assert "undefined symbol" in lacking.stderr


def test_a_variant_may_lack_the_custom_package(variant: Callable[..., dict[str, str]]) -> None:
    find = [sys.executable, "-c", FIND, "libcust_opapi.so", "aclnnInnerFlashAttnGrad"]
    lacking = subprocess.run(
        find, env=variant(has_custom_package=False), check=False, capture_output=True, text=True
    )
    assert "cannot open shared object file" in lacking.stderr


def test_only_the_custom_package_has_flash_attention() -> None:
    find = [sys.executable, "-c", FIND, "libopapi.so", "aclnnInnerFlashAttnGrad"]
    assert subprocess.run(find, check=False, capture_output=True).returncode != 0
