"""The runtime's C functions, called without torch: what the tests of the stand-in itself use."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

H2D, D2H, D2D = 1, 2, 3
ND = 2
TYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "int64": 9, "bfloat16": 27}
MAGIC_MIX, MAGIC_VECTOR = 0x43554245, 0x41415246

_library = ctypes.CDLL("libascendcl.so")
_custom = ctypes.CDLL("libcust_opapi.so")
_library.aclGetRecentErrMsg.restype = ctypes.c_char_p
_library.aclCreateTensor.restype = ctypes.c_void_p
_library.aclCreateScalar.restype = ctypes.c_void_p
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class RuntimeFault(Exception):
    """A call that returned a code; the text is the runtime's own."""

    def __init__(self, symbol: str, code: int, message: str) -> None:
        super().__init__(f"{symbol}: {code} {message}")
        self.code = code
        self.message = message


def call(symbol: str, *arguments: Any, library: Any = None) -> None:
    """Calls a function that returns a code. ints go as 64-bit values, which all ABIs here read right."""
    function = getattr(library or _library, symbol)
    converted = [
        ctypes.c_uint64(value & (1 << 64) - 1) if isinstance(value, int) else value for value in arguments
    ]
    code = function(*converted)
    if code != 0:
        text = _library.aclGetRecentErrMsg()
        raise RuntimeFault(symbol, code, "" if text is None else text.decode())


def returned(symbol: str, *arguments: Any) -> int:
    """Calls a function whose first parameter is where it puts a handle or address."""
    value = ctypes.c_uint64()
    call(symbol, ctypes.byref(value), *arguments)
    return value.value


def recent_message() -> str | None:
    """What aclGetRecentErrMsg says on this thread; None for a null pointer."""
    text = _library.aclGetRecentErrMsg()
    return None if text is None else text.decode()


def use_device(device: int = 0) -> None:
    call("aclrtSetDevice", device)


def malloc(size: int) -> int:
    return returned("aclrtMalloc", size, 0)


def free(address: int) -> None:
    call("aclrtFree", address)


def new_stream() -> int:
    return returned("aclrtCreateStream")


def new_event() -> int:
    return returned("aclrtCreateEventWithFlag", 0)


def synchronize(stream: int) -> None:
    call("aclrtSynchronizeStream", stream)


def status(symbol: str, handle: int) -> int:
    """Answer of aclrtStreamQuery or aclrtQueryEventStatus."""
    value = ctypes.c_int(-1)
    call(symbol, handle, ctypes.byref(value))
    return value.value


def copy_async(target: int, source: int, size: int, kind: int, stream: int) -> None:
    call("aclrtMemcpyAsync", target, size, source, size, kind, stream)


def read(address: int, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    """A copy of device memory, as it is at this moment."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(address, count), dtype).reshape(shape).copy()


def write(address: int, data: np.ndarray | bytes) -> None:
    """Puts bytes at an address, past everything that the runtime checks."""
    raw = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
    ctypes.memmove(address, raw, len(raw))


def upload(array: np.ndarray) -> int:
    """New device memory with the bytes of an array."""
    address = malloc(max(array.nbytes, 1))
    write(address, array)
    return address


def host_function(stream: int, function: Callable[[], None]) -> Any:
    """Queues a Python function. The caller keeps what is returned until it has run."""
    callback = _HOST_FUNCTION(lambda _: function())
    call("aclrtLaunchHostFunc", stream, callback, None)
    return callback


def tensor(
    address: int,
    dtype: str,
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
    offset: int = 0,
    storage: Sequence[int] | None = None,
) -> int:
    """aclCreateTensor; 0 if it gives none."""
    if strides is None:
        strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    storage = shape if storage is None else storage
    view, steps, whole = ((ctypes.c_int64 * len(x))(*x) for x in (shape, strides, storage))
    numbers = ctypes.c_uint64(len(shape)), ctypes.c_uint64(len(storage))
    handle = _library.aclCreateTensor(
        view, numbers[0], TYPES[dtype], steps, ctypes.c_int64(offset), ND, whole, numbers[1],
        ctypes.c_void_p(address),
    )  # fmt: skip
    return handle or 0


def destroy(*tensors: int) -> None:
    for each in tensors:
        if each:
            call("aclDestroyTensor", each)


def prepare(symbol: str, *arguments: Any) -> tuple[int, int]:
    """Phase one of an operator: (workspace bytes, executor)."""
    size, executor = ctypes.c_uint64(), ctypes.c_uint64()
    where = (ctypes.byref(size), ctypes.byref(executor))
    call(f"{symbol}GetWorkspaceSize", *arguments, *where, library=_library_of(symbol))
    return size.value, executor.value


def run(symbol: str, workspace: int, size: int, executor: int, stream: int) -> None:
    """Phase two."""
    call(symbol, workspace, size, executor, stream, library=_library_of(symbol))


def _library_of(symbol: str) -> Any:
    return _custom if "FlashAttn" in symbol else _library


def register_object(text: bytes, magic: int) -> int:
    """rtDevBinaryRegister with the bytes of an object file."""
    data = ctypes.create_string_buffer(text, len(text))
    binary = struct.pack("<IIQQ", magic, 0, ctypes.addressof(data), len(text))
    return returned_second("rtDevBinaryRegister", ctypes.create_string_buffer(binary))


def returned_second(symbol: str, first: Any) -> int:
    value = ctypes.c_uint64()
    call(symbol, first, ctypes.byref(value))
    return value.value


def core_sync_address() -> int:
    address, length = ctypes.c_uint64(), ctypes.c_uint32()
    call("rtGetC2cCtrlAddr", ctypes.byref(address), ctypes.byref(length))
    return address.value
