"""Words of the operator contract as types: mask modes, layouts, tensor descriptions, length lists.

No rule about how they combine lives here; those are in `arguments.py` and `problem.py`.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import problem_error, type_error

INT32_MAX = 2**31 - 1


class MaskMode(IntEnum):
    """Which keys a query row may see; offset = s2 - s1 of the batch entry.

    Example:
        >>> MaskMode.parse("flash_attn", "causal")
        <MaskMode.CAUSAL: 3>
    """

    NO_MASK = 0
    """All keys."""
    CAUSAL = 3
    """Keys j <= i + offset (bottom-right aligned)."""
    SLIDING_WINDOW = 4
    """Keys i + offset - win_left <= j <= i + offset + win_right; -1 on a side means unbounded there."""

    @classmethod
    def parse(cls, op: str, value: object) -> MaskMode:
        """Returns the mode for an enum member, its int, or its name in any case.

        Args:
            op: Function the user called, for the message.
            value: What the user passed as mask_mode.

        Raises:
            InvalidProblemError: If there is no such mode.
            InvalidTypeError: If it is neither an int nor a name.
        """
        found: MaskMode | None = None
        if isinstance(value, str):
            found = cls.__members__.get(value.upper())
        elif isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_)):
            found = _MODES.get(int(value))
        else:
            raise type_error(
                op,
                "mask_mode",
                "must be a MaskMode, its int or its name",
                f"{type(value).__name__} {value!r:.60}",
            )
        if found is None:
            raise problem_error(op, "mask_mode", f"must be {_MODE_NAMES}", repr(value))
        return found


_MODES = {int(mode): mode for mode in MaskMode}
_MODE_NAMES = " or ".join(f"{mode.name} ({int(mode)})" for mode in MaskMode)


class Layout(str, Enum):
    """Order of the axes of q, k, v: batch b, sequence s, head n, head dim d, token t of a packed batch."""

    BSND = "BSND"
    BNSD = "BNSD"
    TND = "TND"

    def __str__(self) -> str:
        return self.value


class TensorSpec(NamedTuple):
    """What the rules need to know of a tensor: its shape and the name of its dtype, such as "bfloat16"."""

    shape: tuple[int, ...]
    dtype: str


class Lengths:
    """An immutable int32 list of lengths or offsets that can be hashed and compared cheaply.

    Attributes:
        values: The numbers as a read-only int64 array, shape (n,), so that arithmetic on them cannot
            overflow.
        raw: The same numbers as int32 bytes; hash and equality are those of the bytes.

    Example:
        >>> Lengths.parse("flash_attn", "seqused_q", [3, 0, 5]).values.tolist()
        [3, 0, 5]
    """

    __slots__ = ("raw", "values")

    raw: bytes
    values: NDArray[np.int64]

    def __init__(self, values: NDArray[np.int32]) -> None:
        wide = values.astype(np.int64)
        wide.flags.writeable = False
        self.values = wide
        self.raw = np.ascontiguousarray(values).tobytes()

    def __hash__(self) -> int:
        return hash(self.raw)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lengths) and self.raw == other.raw

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"Lengths({np.array2string(self.values, threshold=8, separator=', ')})"

    @classmethod
    def parse(cls, op: str, name: str, value: Any) -> Lengths:
        """Reads a list of lengths from a NumPy array, a sequence of ints, or a tensor on the host.

        Args:
            op: Function the user called, for the message.
            name: Argument name, for the message.
            value: int32 array or tensor of one dimension, or a list or tuple of ints.

        Raises:
            InvalidTypeError: If the values are not int32, or cannot be read on the host.
            InvalidProblemError: If it is not one-dimensional, or a number of a list does not fit into int32.
        """
        if isinstance(value, Lengths):
            return value
        if isinstance(value, (list, tuple)):
            return cls(_array_of_list(op, name, value))
        if not isinstance(value, np.ndarray) and not hasattr(value, "__array__"):
            raise type_error(op, name, "must be an int32 array, tensor or list of ints", type(value).__name__)
        try:
            array = np.asarray(value)
        except Exception as error:  # a tensor of a device, or without data, says why in its own words
            raise type_error(
                op, name, "must hold its values on the host", f"{type(value).__name__}: {error}"
            ) from error
        if array.dtype != np.int32:
            raise type_error(op, name, "must be int32", array.dtype)
        if array.ndim != 1:
            raise problem_error(op, name, "must have one dimension", f"shape {array.shape}")
        return cls(array)


def _array_of_list(op: str, name: str, value: list[Any] | tuple[Any, ...]) -> NDArray[np.int32]:
    if not value:
        return np.zeros(0, np.int32)
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths inside
        raise type_error(op, name, "must be a flat list of ints", repr(value)[:60]) from None
    if array.ndim != 1:
        raise problem_error(op, name, "must have one dimension", f"shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise type_error(op, name, "must hold ints", array.dtype)
    low, high = int(array.min()), int(array.max())
    if low < -INT32_MAX - 1 or high > INT32_MAX:
        raise problem_error(op, name, "must hold values that fit into int32", low if low < 0 else high)
    return array.astype(np.int32)
