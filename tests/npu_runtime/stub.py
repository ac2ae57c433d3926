"""What tests ask of the stand-in for the CANN runtime, and tell it: calls, failures, accounting.

    from stub import load

    stub = load()
    stub.install_executors()
    stub.fail("aclrtMalloc", code=207001, message="no memory", times=3)
    ...
    assert stub.violations() == []

The library must be loaded already or be on LD_LIBRARY_PATH (see build.py). Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import ctypes
import json
from collections import Counter
from functools import lru_cache
from typing import Any, NamedTuple

__all__ = ["Call", "Stub", "load"]

LIBRARY = "libascendcl.so"

_EXECUTOR = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
#: aclError of a kernel that failed on the device.
_KERNEL_FAULT = 507015


class Call(NamedTuple):
    """One call of the runtime.

    Attributes:
        symbol: Name of the function.
        thread: System's id of the calling thread.
        device: Device of that thread's context; -1 before there is one.
        stream: Handle of the stream that the call names; 0 = none, or the default one.
        detail: Numbers that the function found worth recording, e.g. "bytes" of a copy.
    """

    symbol: str
    thread: int
    device: int
    stream: int
    detail: dict[str, int]


class Stub:
    """The loaded stand-in. All methods may be called from any thread, at any time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.fag_stub_report.restype = ctypes.c_char_p
        library.fag_stub_work_seconds.restype = ctypes.c_double
        library.fag_stub_host_seconds.restype = ctypes.c_double
        library.fag_stub_bytes_from.restype = ctypes.c_uint64
        library.fag_stub_bytes_from.argtypes = [ctypes.c_uint64, ctypes.c_int]
        self._executor: Any = None  # ctypes keeps no reference to a callback

    def _report(self, what: str) -> Any:
        return json.loads(self._library.fag_stub_report(what.encode()))

    def calls(self) -> list[Call]:
        """Calls since clear_calls(), oldest first; at most the last 200,000."""
        return [Call(**call) for call in self._report("calls")]

    def clear_calls(self) -> None:
        """Forgets the calls so far."""
        self._library.fag_stub_clear_calls()

    def live(self) -> Counter[str]:
        """Objects that exist now: allocations, host_allocations, streams, events, tensors, executors, ..."""
        return Counter(self._report("live"))

    def syncs(self) -> Counter[str]:
        """How often the host waited so far, by function: synchronisations, blocking copies and fills."""
        return Counter(self._report("syncs"))

    def violations(self) -> list[str]:
        """Misuse seen since clear_violations(), each kind once; compares all guard zones first."""
        found: list[str] = self._report("violations")
        return found

    def clear_violations(self) -> None:
        """Forgets the misuse so far."""
        self._library.fag_stub_clear_violations()

    def fail(
        self,
        symbol: str,
        code: int = 507000,
        message: str = "injected failure",
        after: int = 0,
        times: int = 1,
    ) -> None:
        """Makes calls of a function fail.

        Args:
            symbol: Function, or "function:task" to let the call succeed and its task on the stream fail: the
                next synchronisation reports it.
            code: What it returns.
            message: What aclGetRecentErrMsg then says, once, on the same thread.
            after: Calls that still succeed before.
            times: Calls that fail.
        """
        self._library.fag_stub_fail(symbol.encode(), code, message.encode(), after, times)

    def clear_failures(self) -> None:
        """No call fails on demand any more."""
        self._library.fag_stub_clear_failures()

    def set_soc_name(self, name: str) -> None:
        """What aclrtGetSocName says; "Ascend950PR_9589" at first."""
        self._library.fag_stub_set_soc_name(name.encode())

    def set_device_count(self, count: int) -> None:
        """How many devices there are; 2 at first, 16 at most."""
        self._library.fag_stub_set_device_count(count)

    def set_latency(self, microseconds: int) -> None:
        """How long each task waits before it runs, so that a missing synchronisation shows; 0 at first."""
        self._library.fag_stub_set_latency(microseconds)

    def work_seconds(self) -> float:
        """Time that the workers of all streams spent in tasks so far, without the latency."""
        seconds: float = self._library.fag_stub_work_seconds()
        return seconds

    def host_seconds(self) -> float:
        """Time that all threads spent inside of the stand-in's functions so far, waits included."""
        seconds: float = self._library.fag_stub_host_seconds()
        return seconds

    def wait(self) -> None:
        """Waits for all work on all devices, without counting as a synchronisation of the program."""
        self._library.fag_stub_wait()

    def bytes_from(self, address: int, device: int) -> int:
        """Bytes to the end of the live allocation that has the address; 0 if there is none.

        Args:
            address: Any address.
            device: Where the allocation must be; -1 = pinned memory of the host.
        """
        count: int = self._library.fag_stub_bytes_from(address, device)
        return count

    def install_executors(self, *, shortcut: bool = False) -> None:
        """Lets flash attention operators and our device kernels run; without it their tasks fail.

        Args:
            shortcut: Whether fag-kernel's CPU kernels stand in for the main device kernels, which Triton's
                interpreter would take long for. Arguments are checked all the same.
        """
        import run_kernel
        import run_operator

        kernels = run_kernel.Executor(self.bytes_from, shortcut=shortcut)

        def execute(text: bytes, message: int, size: int) -> int:
            request = json.loads(text)
            try:
                (kernels.run if "kernel" in request else run_operator.run)(request)
            except Exception as error:  # whatever it is: the stream reports it, as a device would
                reason = f"{type(error).__name__}: {error}".encode()[: size - 1]
                ctypes.memmove(message, reason + b"\0", len(reason) + 1)
                return _KERNEL_FAULT
            return 0

        callback = _EXECUTOR(execute)
        self.wait()
        self._library.fag_stub_set_executor(callback)
        self._executor = callback

    def install_idle_executors(self) -> None:
        """Flash attention operators and our device kernels succeed and do nothing: to measure the host."""
        self.remove_executors()
        self._library.fag_stub_set_idle_executor()

    def remove_executors(self) -> None:
        """Takes either of the above back, after all work is done."""
        self.wait()
        self._library.fag_stub_set_executor(None)
        self._executor = None


@lru_cache(maxsize=1)
def load() -> Stub:
    """The stand-in of this process.

    Raises:
        RuntimeError: LD_LIBRARY_PATH leads to no stand-in, or to a real CANN.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
        library.fag_stub_report  # noqa: B018
    except (OSError, AttributeError) as reason:
        raise RuntimeError(
            f"npu_runtime: {LIBRARY} must be the stand-in, got {reason}. Build it with "
            "tests/npu_runtime/build.py --out DIR and start Python with LD_LIBRARY_PATH=DIR."
        ) from None
    stub = Stub(library)
    atexit.register(stub.remove_executors)  # no worker may call into an interpreter that is shutting down
    return stub
