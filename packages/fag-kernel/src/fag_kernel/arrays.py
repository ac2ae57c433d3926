"""Array arguments of the NumPy functions: reading them, and describing them as pointers with strides.

Inputs are used where they lie whenever the kernels can: any strides, as long as the head dim is contiguous.
Everything else is copied, never refused.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fag_kernel import _native
from fag_metadata import InvalidTypeError, Layout, TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fag_kernel.abi import ArrayRef

# Axes of (batch, sequence, head) in each layout; None = there is no such axis.
_AXES: dict[Layout, tuple[int | None, int, int]] = {
    Layout.BSND: (0, 1, 2),
    Layout.BNSD: (0, 2, 1),
    Layout.TND: (None, 0, 1),
}


def read_array(op: str, name: str, value: Any) -> NDArray[Any]:
    """`value` as a NumPy array, without copying where that is possible.

    Args:
        op: Function the user called, for the message.
        name: Argument name, for the message.
        value: NumPy array, or an object with `__dlpack__` or `__array__` whose memory is on the CPU.

    Raises:
        InvalidTypeError: If it is none of these, lies on a device, or has bfloat16 elements and ml_dtypes is
            missing.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, np.generic) or not (hasattr(value, "__dlpack__") or hasattr(value, "__array__")):
        raise InvalidTypeError(f"{op}: {name} must be an array, got {type(value).__name__}.")
    try:
        if not hasattr(value, "__dlpack__"):
            return np.asarray(value)
        array, dtype = _native.array_from_dlpack(value.__dlpack__())
    except Exception as error:  # whatever the other framework raises; its words say why
        raise InvalidTypeError(
            f"{op}: {name} must be readable on the CPU, got {type(value).__name__} ({error})."
        ) from error
    return array.view(bfloat16(op, name)) if dtype == "bfloat16" else array


def bfloat16(op: str, name: str) -> np.dtype[Any]:
    """The NumPy dtype of bfloat16, which the package ml_dtypes defines."""
    try:
        import ml_dtypes
    except ImportError:
        raise InvalidTypeError(
            f"{op}: {name} must not be bfloat16 without the package ml_dtypes, got bfloat16. "
            'Run: pip install "fag-kernel[bfloat16]".'
        ) from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def spec_of(array: NDArray[Any]) -> TensorSpec:
    """Shape and dtype name, as the argument rules want them."""
    return TensorSpec(array.shape, dtype_name(array.dtype))


@lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name of a dtype; NumPy builds it anew every time, for the price of a small kernel."""
    return str(dtype.name)


def addressable(array: NDArray[Any]) -> NDArray[Any]:
    """`array` itself if kernels can read it in place, else a contiguous copy.

    In place means: native byte order, elements aligned, all strides whole elements, the last one contiguous.
    """
    item = array.itemsize
    strides = array.strides
    in_place = (
        (strides[-1] == item or array.shape[-1] <= 1)
        and array.flags.aligned
        and array.dtype.isnative
        and not any(stride % item for stride in strides[:-1])
    )
    return array if in_place else compact(array)


def compact(array: NDArray[Any]) -> NDArray[Any]:
    """`array` itself if it is C-contiguous, aligned and in native byte order, else a copy that is."""
    return np.require(array, array.dtype.newbyteorder("="), ["C", "A"])


def array_ref(array: NDArray[Any], layout: Layout) -> ArrayRef:
    """Address and element strides of an addressable array."""
    item = array.itemsize
    batch, sequence, head = _AXES[layout]
    strides = array.strides
    return array.ctypes.data, (
        0 if batch is None else strides[batch] // item,
        strides[sequence] // item,
        strides[head] // item,
    )
