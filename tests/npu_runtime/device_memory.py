"""NumPy views of the stand-in's device memory, which is host memory: nothing is copied."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def view(address: int, dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> Array:
    """Device memory as an array.

    Args:
        address: Address of the first element. The caller has checked that all elements lie in live memory.
        dtype: Name of the element type.
        shape: Extents.
        strides: Elements between neighbours along each axis; None = contiguous.
    """
    kind = dtype_of(dtype)
    if strides is None:
        strides = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
    if 0 in shape:
        return np.empty(shape, kind)
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    buffer = (ctypes.c_char * ((last + 1) * kind.itemsize)).from_address(address)
    flat = np.frombuffer(buffer, np.uint8).view(kind)
    return np.lib.stride_tricks.as_strided(flat, shape, [stride * kind.itemsize for stride in strides])
