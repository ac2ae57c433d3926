"""The stand-in's streams and events are real: nothing runs before its turn, and a wait is a wait."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import raw_runtime as rt
from stub import Stub

NOT_READY = {"aclrtStreamQuery": 1, "aclrtQueryEventStatus": 0}


@pytest.fixture(autouse=True)
def _device() -> None:
    rt.use_device(0)


class Gate:
    """A task that keeps its stream busy until the test opens it."""

    def __init__(self, stream: int) -> None:
        self._event = threading.Event()
        self._callback = rt.host_function(stream, lambda: self._event.wait(30))

    def open(self) -> None:
        self._event.set()


def test_a_copy_runs_after_its_call_has_returned(stub: Stub) -> None:
    stub.set_latency(100_000)
    stream, source = rt.new_stream(), np.arange(4, dtype=np.float32)
    target = rt.upload(np.zeros(4, np.float32))
    rt.copy_async(target, source.ctypes.data, 16, rt.H2D, stream)
    assert rt.read(target, np.float32, (4,)).tolist() == [0, 0, 0, 0]
    rt.synchronize(stream)
    assert rt.read(target, np.float32, (4,)).tolist() == [0, 1, 2, 3]


def test_a_copy_reads_its_source_when_it_runs() -> None:
    stream = rt.new_stream()
    source = np.zeros(4, np.float32)
    target = rt.malloc(16)
    gate = Gate(stream)
    rt.copy_async(target, source.ctypes.data, 16, rt.H2D, stream)
    source[:] = 7
    gate.open()
    rt.synchronize(stream)
    assert rt.read(target, np.float32, (4,)).tolist() == [7, 7, 7, 7]


def test_a_blocked_stream_does_not_hold_up_another_one() -> None:
    first, second = rt.new_stream(), rt.new_stream()
    gate = Gate(first)
    ran = threading.Event()
    callback = rt.host_function(second, ran.set)
    rt.synchronize(second)
    assert ran.is_set()
    assert callback
    assert rt.status("aclrtStreamQuery", first) == NOT_READY["aclrtStreamQuery"]
    gate.open()
    rt.synchronize(first)


def test_an_event_orders_two_streams() -> None:
    first, second, event = rt.new_stream(), rt.new_stream(), rt.new_event()
    source = np.full(4, 3, np.float32)
    middle, last = rt.malloc(16), rt.malloc(16)
    gate = Gate(first)
    rt.copy_async(middle, source.ctypes.data, 16, rt.H2D, first)
    rt.call("aclrtRecordEvent", event, first)
    rt.call("aclrtStreamWaitEvent", second, event)
    rt.copy_async(last, middle, 16, rt.D2D, second)
    time.sleep(0.1)
    assert np.isnan(rt.read(last, np.float32, (4,))).all(), "the second stream ran ahead of the event"
    assert rt.status("aclrtQueryEventStatus", event) == NOT_READY["aclrtQueryEventStatus"]
    gate.open()
    rt.synchronize(second)
    assert rt.read(last, np.float32, (4,)).tolist() == [3, 3, 3, 3]


def test_a_wait_keeps_the_recording_of_its_time() -> None:
    first, second, event = rt.new_stream(), rt.new_stream(), rt.new_event()
    rt.call("aclrtRecordEvent", event, first)
    rt.synchronize(first)
    gate = Gate(first)
    rt.call("aclrtStreamWaitEvent", second, event)
    rt.call("aclrtRecordEvent", event, first)
    rt.synchronize(second)  # would wait for the gate if it took the later recording
    gate.open()
    rt.call("aclrtSynchronizeEvent", event)
    assert rt.status("aclrtQueryEventStatus", event) != NOT_READY["aclrtQueryEventStatus"]


def test_a_wait_for_an_event_that_was_never_recorded_passes() -> None:
    stream, event = rt.new_stream(), rt.new_event()
    rt.call("aclrtStreamWaitEvent", stream, event)
    rt.synchronize(stream)


def test_elapsed_time_is_that_between_the_tasks(stub: Stub) -> None:
    stream, start, end = rt.new_stream(), rt.new_event(), rt.new_event()
    stub.set_latency(0)
    rt.call("aclrtRecordEvent", start, stream)
    callback = rt.host_function(stream, lambda: time.sleep(0.05))
    rt.call("aclrtRecordEvent", end, stream)
    rt.synchronize(stream)
    assert callback
    elapsed = ctypes.c_float()
    rt.call("aclrtEventElapsedTime", ctypes.byref(elapsed), start, end)
    assert 50 <= elapsed.value < 5000


def test_device_synchronisation_waits_for_all_streams_of_the_device() -> None:
    streams = [rt.new_stream() for _ in range(3)]
    done = []
    callbacks = [rt.host_function(stream, lambda: (time.sleep(0.05), done.append(1))) for stream in streams]
    rt.call("aclrtSynchronizeDevice")
    assert len(done) == len(callbacks)


def test_device_synchronisation_leaves_the_other_device_alone() -> None:
    rt.use_device(1)
    other = rt.new_stream()
    gate = Gate(other)
    rt.use_device(0)
    rt.call("aclrtSynchronizeDevice")
    assert rt.status("aclrtStreamQuery", other) == NOT_READY["aclrtStreamQuery"]
    gate.open()
    rt.use_device(1)
    rt.synchronize(other)


def test_destroying_a_stream_lets_its_tasks_end() -> None:
    stream, ran = rt.new_stream(), threading.Event()
    callback = rt.host_function(stream, ran.set)
    rt.call("aclrtDestroyStream", stream)
    assert ran.wait(10)
    assert callback


@pytest.mark.misuses_runtime
def test_work_on_a_destroyed_stream_is_a_violation(stub: Stub) -> None:
    stream, target = rt.new_stream(), rt.malloc(16)
    rt.call("aclrtDestroyStream", stream)
    with pytest.raises(rt.RuntimeFault, match="stream does not exist"):
        rt.call("aclrtMemsetAsync", target, 16, 0, 16, stream)
    assert "destroyed stream: aclrtMemsetAsync" in stub.violations()


@pytest.mark.misuses_runtime
def test_work_on_a_stream_of_another_device_is_a_violation(stub: Stub) -> None:
    stream, event = rt.new_stream(), rt.new_event()
    rt.use_device(1)
    with pytest.raises(rt.RuntimeFault, match="107003") as caught:
        rt.call("aclrtRecordEvent", event, stream)
    assert caught.value.code == 107003
    assert any("wrong device: aclrtRecordEvent" in text for text in stub.violations())


@pytest.mark.misuses_runtime
def test_a_destroyed_event_is_a_violation(stub: Stub) -> None:
    stream, event = rt.new_stream(), rt.new_event()
    rt.call("aclrtDestroyEvent", event)
    with pytest.raises(rt.RuntimeFault):
        rt.call("aclrtStreamWaitEvent", stream, event)
    assert "unknown or destroyed event: aclrtStreamWaitEvent" in stub.violations()


def test_waits_of_the_host_are_counted_by_function(stub: Stub) -> None:
    stream, event, target = rt.new_stream(), rt.new_event(), rt.malloc(16)
    before = stub.syncs()
    rt.call("aclrtMemsetAsync", target, 16, 0, 16, stream)
    rt.call("aclrtRecordEvent", event, stream)
    stub.wait()
    assert stub.syncs() == before, "queueing work and looking at it from outside are no waits"
    rt.synchronize(stream)
    rt.call("aclrtSynchronizeEvent", event)
    rt.call("aclrtMemset", target, 16, 1, 16)
    assert dict(stub.syncs() - before) == {
        "aclrtSynchronizeStream": 1, "aclrtSynchronizeEvent": 1, "aclrtMemset": 1,
    }  # fmt: skip


def test_work_seconds_are_those_of_the_tasks(stub: Stub) -> None:
    stub.set_latency(50_000)
    stream, before = rt.new_stream(), stub.work_seconds()
    callback = rt.host_function(stream, lambda: time.sleep(0.02))
    rt.synchronize(stream)
    assert callback
    assert 0.02 <= stub.work_seconds() - before < 0.05


def test_calls_are_logged_with_thread_device_and_stream(stub: Stub) -> None:
    rt.use_device(1)
    stream, target = rt.new_stream(), rt.malloc(16)
    rt.call("aclrtMemsetAsync", target, 16, 0, 16, stream)
    rt.synchronize(stream)
    last = next(each for each in stub.calls() if each.symbol == "aclrtMemsetAsync")
    assert (last.thread, last.device, last.stream) == (threading.get_native_id(), 1, stream)
    assert last.detail == {"bytes": 16}


WAIT_WITH_THE_GIL = """
import ctypes, sys
sys.path[:0] = sys.argv[1:]
import raw_runtime as rt
rt.use_device(0)
stream = rt.new_stream()
callback = rt.host_function(stream, lambda: None)
holding = ctypes.PyDLL("libascendcl.so")  # keeps the GIL during the call, unlike CDLL
assert holding.aclrtSynchronizeStream(ctypes.c_uint64(stream)) == 0
"""


def test_a_wait_with_the_gil_lets_a_task_in_python_run() -> None:
    folders = [path for path in sys.path if path.endswith(("npu", "npu_runtime"))]
    subprocess.run([sys.executable, "-c", WAIT_WITH_THE_GIL, *folders], check=True, timeout=60)


def test_host_seconds_are_those_inside_of_the_runtime(stub: Stub) -> None:
    stub.set_latency(0)
    stream, before = rt.new_stream(), stub.host_seconds()
    callback = rt.host_function(stream, lambda: time.sleep(0.1))
    assert stub.host_seconds() - before < 0.05, "a call that queues does not wait"
    rt.synchronize(stream)
    assert callback
    assert 0.05 < stub.host_seconds() - before < 2
