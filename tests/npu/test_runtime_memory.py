"""The stand-in sees memory misuse, whether or not a call reports it."""

from __future__ import annotations

import numpy as np
import pytest
import raw_runtime as rt
from stub import Stub

pytestmark = pytest.mark.misuses_runtime


@pytest.fixture(autouse=True)
def _device() -> None:
    rt.use_device(0)


def test_fresh_memory_is_nan_in_every_type() -> None:
    address = rt.malloc(64)
    for dtype in (np.float16, np.float32, np.float64):
        assert np.isnan(rt.read(address, dtype, (8,))).all()
    assert (rt.read(address, np.int32, (16,)) == -1).all()
    rt.free(address)


@pytest.mark.parametrize("size", [1, 511, 512, 513])
@pytest.mark.parametrize(("place", "where"), [(-1, "in front of"), (0, "behind")])
def test_a_write_beside_an_allocation_is_seen(stub: Stub, size: int, place: int, where: str) -> None:
    address = rt.malloc(size)
    spot = address - 1 if place < 0 else address + size
    original = rt.read(spot, np.uint8, (1,))
    rt.write(spot, b"x")
    assert stub.violations() == [f"guard zone overwritten: {where} {size} bytes of device 0"]
    rt.write(spot, original)
    stub.clear_violations()
    rt.free(address)
    assert stub.violations() == []


def test_an_overwritten_guard_is_seen_when_the_memory_is_freed(stub: Stub) -> None:
    address = rt.malloc(16)
    rt.write(address + 16, b"x")
    rt.free(address)
    rt.write(address + 16, b"\xa7")  # as if it had never been
    assert stub.violations() == ["guard zone overwritten: behind 16 bytes of device 0"]


def test_a_write_inside_is_none_of_its_business(stub: Stub) -> None:
    address = rt.malloc(16)
    rt.write(address, bytes(16))
    rt.free(address)
    assert stub.violations() == []


def test_a_write_after_free_is_seen(stub: Stub) -> None:
    address = rt.malloc(16)
    rt.free(address)
    rt.write(address + 8, b"x")
    assert stub.violations() == ["write after free: to 16 bytes of device 0"]
    rt.write(address + 8, b"\xdd")


def test_a_double_free_is_refused_and_seen(stub: Stub) -> None:
    address = rt.malloc(16)
    rt.free(address)
    with pytest.raises(rt.RuntimeFault, match="free already"):
        rt.free(address)
    assert stub.violations() == ["double free: aclrtFree"]


def test_pinned_and_device_memory_are_not_mixed_up(stub: Stub) -> None:
    pinned = rt.returned("aclrtMallocHost", 16)
    with pytest.raises(rt.RuntimeFault, match="other kind"):
        rt.free(pinned)
    rt.call("aclrtFreeHost", pinned)
    assert stub.violations() == ["wrong kind of memory: aclrtFree of 16 bytes of host"]


def test_a_copy_of_memory_that_is_freed_before_its_turn_fails(stub: Stub) -> None:
    stub.set_latency(50_000)
    stream, source, target = rt.new_stream(), rt.malloc(16), rt.malloc(16)
    rt.copy_async(target, source, 16, rt.D2D, stream)
    rt.free(source)
    with pytest.raises(rt.RuntimeFault, match="freed before the copy ran") as caught:
        rt.synchronize(stream)
    assert caught.value.code == 507015
    assert stub.violations() == ["use after free: aclrtMemcpyAsync source, 16 bytes on device 0"]
    rt.free(target)
    rt.synchronize(stream)  # a failure is reported once


def test_a_copy_beyond_the_end_is_refused(stub: Stub) -> None:
    stream, target, source = rt.new_stream(), rt.malloc(16), np.zeros(32, np.uint8)
    with pytest.raises(rt.RuntimeFault, match="outside of live memory"):
        rt.call("aclrtMemcpyAsync", target, 32, source.ctypes.data, 32, rt.H2D, stream)
    with pytest.raises(rt.RuntimeFault, match="at most the destination's size"):
        rt.call("aclrtMemcpyAsync", target, 16, source.ctypes.data, 32, rt.H2D, stream)
    assert stub.violations() == [
        "beyond the end of the allocation: aclrtMemcpyAsync destination, 32 bytes on device 0"
    ]
    rt.free(target)


def test_a_copy_of_the_wrong_kind_is_refused(stub: Stub) -> None:
    stream, target, source = rt.new_stream(), rt.malloc(16), np.zeros(16, np.uint8)
    with pytest.raises(rt.RuntimeFault, match="kind of the copy"):
        rt.copy_async(target, source.ctypes.data, 16, rt.D2D, stream)
    assert any(text.startswith("wrong kind of memory: aclrtMemcpyAsync") for text in stub.violations())
    rt.free(target)


def test_memory_of_the_other_device_is_no_target(stub: Stub) -> None:
    target = rt.malloc(16)
    rt.use_device(1)
    stream = rt.new_stream()
    with pytest.raises(rt.RuntimeFault, match="outside of live memory"):
        rt.call("aclrtMemsetAsync", target, 16, 0, 16, stream)
    assert stub.violations() == ["wrong device (memory of device 0): aclrtMemsetAsync, 16 bytes on device 1"]
    rt.free(target)


def test_a_device_has_an_end(stub: Stub) -> None:
    with pytest.raises(rt.RuntimeFault, match="bytes left on device 0") as caught:
        rt.malloc(1 << 40)
    assert caught.value.code == 207001


def test_allocations_are_counted(stub: Stub) -> None:
    before = stub.live()
    address = rt.malloc(16)
    assert (stub.live() - before)["allocations"] == 1
    assert stub.bytes_from(address + 4, 0) == 12
    assert stub.bytes_from(address, 1) == 0
    rt.free(address)
    assert stub.live() == before
