"""What arguments are made of, as types: mask modes, layouts, tensor descriptions, length lists, targets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from .errors import problem_error, type_error

INT32_MAX = 2**31 - 1
DEFAULT_TARGET = "Ascend950PR_9589"
CPU_TARGET = "cpu"


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
        """Returns the mode for a member, its int, or its name in any case.

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
            got = f"{type(value).__name__} {value!r:.60}"
            raise type_error(op, "mask_mode", "must be a MaskMode, its int or its name", got)
        if found is None:
            names = " or ".join(f"{mode.name} ({int(mode)})" for mode in cls)
            raise problem_error(op, "mask_mode", f"must be {names}", repr(value))
        return found


_MODES = {int(mode): mode for mode in MaskMode}


class Layout(str, Enum):
    """Order of the axes of q, k, v: batch, sequence, head, head dim, token of a packed batch."""

    BSND = "BSND"
    BNSD = "BNSD"
    TND = "TND"

    def __str__(self) -> str:
        return self.value


class TensorSpec(NamedTuple):
    """What the rules need to know of a tensor; `dtype` is a name such as "bfloat16"."""

    shape: tuple[int, ...]
    dtype: str


class Lengths:
    """An immutable int32 list of lengths or offsets that can be hashed and compared cheaply.

    Attributes:
        values: The numbers, read-only int64 (n,), so that arithmetic on them cannot overflow.
        raw: The same numbers as int32 bytes, which are hashed and compared.
    """

    __slots__ = ("raw", "values")

    raw: bytes
    values: NDArray[np.int64]

    def __init__(self, values: NDArray[np.int32]) -> None:
        self.values = values.astype(np.int64)
        self.values.flags.writeable = False
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
        """Reads lengths from an int32 array, a sequence of ints, or a tensor on the host.

        Raises:
            InvalidTypeError: If the values are not int32, or cannot be read on the host.
            InvalidProblemError: If it is not one-dimensional, or a number of a list does not fit into int32.
        """
        if isinstance(value, Lengths):
            return value
        is_list = isinstance(value, (list, tuple))
        if not is_list and not hasattr(value, "__array__"):
            raise type_error(op, name, "must be an int32 array, tensor or list of ints", type(value).__name__)
        try:
            array = np.asarray(value) if not is_list or value else np.zeros(0, np.int32)
        except Exception as error:
            if is_list:  # lists of different lengths inside
                raise type_error(op, name, "must be a flat list of ints", repr(value)[:60]) from None
            # A tensor of a device, or without data, says why in its own words.
            got = f"{type(value).__name__}: {error}"
            raise type_error(op, name, "must hold its values on the host", got) from error
        if not is_list and array.dtype != np.int32:
            raise type_error(op, name, "must be int32", array.dtype)
        if array.ndim != 1:
            raise problem_error(op, name, "must have one dimension", f"shape {array.shape}")
        if array.dtype.kind not in "iu":
            raise type_error(op, name, "must hold ints", array.dtype)
        low, high = int(array.min(initial=0)), int(array.max(initial=0))
        if low < -INT32_MAX - 1 or high > INT32_MAX:
            raise problem_error(op, name, "must hold values that fit into int32", low if low < 0 else high)
        return cls(array.astype(np.int32, copy=False))


@dataclass(frozen=True)
class Target:
    """The machine that a split is made for.

    Args:
        name: SoC name, "cpu", or any name of your own.
        cube_cores: Cores that do matrix products; each gets one range of tiles.
        vector_cores: Cores for merging, clearing and converting; a multiple of cube_cores.
        l2_bytes: Size of the shared cache, 0 = unknown.
    """

    name: str
    cube_cores: int
    vector_cores: int
    l2_bytes: int = 0

    def __post_init__(self) -> None:
        ranges = (("cube_cores", 1, 4096), ("vector_cores", 1, 65536), ("l2_bytes", 0, 1 << 62))
        for field, low, high in ranges:
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool):
                raise type_error("Target", field, "must be an int", repr(value))
            if not low <= value <= high:
                raise problem_error("Target", field, f"must be in {low}..{high}", value)
        if not isinstance(self.name, str):
            raise type_error("Target", "name", "must be a str", repr(self.name))
        if self.vector_cores % self.cube_cores:
            rule, cubes = "must be a multiple of cube_cores", self.cube_cores
            raise problem_error("Target", "vector_cores", rule, self.vector_cores, cube_cores=cubes)

    @property
    def vectors_per_cube(self) -> int:
        """Vector cores beside each cube core."""
        return self.vector_cores // self.cube_cores

    @property
    def is_ascend(self) -> bool:
        """Whether this is an Ascend SoC."""
        return self.name.startswith("Ascend")

    @property
    def default_split(self) -> str:
        """The split where none is asked for: "cann" for Ascend, else "balanced"."""
        return "cann" if self.is_ascend else "balanced"

    @property
    def target_id(self) -> int:
        """Low 16 bits of the CRC of the name."""
        return crc32(self.name.encode()) & 0xFFFF


# SoCs of the Ascend 950, as the vendor's public compiler describes them:
# family -> cube cores, each with two vector cores beside it, and last letters.
_FAMILIES = {
    "Ascend950PR_950": (4, "z"),
    "Ascend950DT_950": (8, "xy"),
    "Ascend950PR_957": (28, "123456789abcd"),
    "Ascend950DT_957": (28, "123456789abcd"),
    "Ascend950PR_958": (32, "123456789abcd"),
    "Ascend950DT_958": (32, "123456789abcd"),
    "Ascend950PR_959": (36, "1234569ab"),
    "Ascend950DT_959": (36, "1234569ab"),
    "Ascend950DT_95A": (36, "12"),
}
# Those that are published; elsewhere 0, which keeps L2 dependent choices off.
_L2_MIB = {"Ascend950PR_950z": 16, "Ascend950DT_950x": 32, "Ascend950PR_957d": 96, "Ascend950PR_9599": 128}

TARGETS: dict[str, Target] = {
    name: Target(name, cores, 2 * cores, _L2_MIB.get(name, 0) << 20)
    for family, (cores, letters) in _FAMILIES.items()
    for name in map(family.__add__, letters)
}
# 64 logical cores: two pulls for each of 32 threads, and every range stays large.
TARGETS[CPU_TARGET] = Target(CPU_TARGET, 64, 128)


def find_target(op: str, target: str | Target) -> Target:
    """Returns the target of that name, or the target itself.

    Raises:
        InvalidProblemError: If the name is unknown.
        InvalidTypeError: If it is neither a str nor a Target.
    """
    if isinstance(target, Target):
        return target
    if not isinstance(target, str):
        raise type_error(op, "target", 'must be a SoC name, "cpu" or a Target', type(target).__name__)
    if target not in TARGETS:
        rule = 'must be a SoC name of fag_metadata.TARGETS or "cpu"'
        remedy = "Pass Target(name=..., cube_cores=..., vector_cores=...) for any other machine"
        raise problem_error(op, "target", rule, repr(target), remedy=remedy)
    return TARGETS[target]
