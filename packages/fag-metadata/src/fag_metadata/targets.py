"""Targets: how many cores a split is made for.

One table, a row per SoC family of the Ascend 950 (as the vendor's public compiler describes them), and "cpu".
A target is only numbers; nothing here looks at a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from .errors import problem_error, type_error

MIB = 1 << 20
DEFAULT_TARGET = "Ascend950PR_9589"
CPU_TARGET = "cpu"


@dataclass(frozen=True)
class Target:
    """The machine that a split is made for.

    Args:
        name: SoC name, "cpu", or any name of your own.
        cube_cores: Cores that do matrix products; each gets one range of tiles.
        vector_cores: Cores for merging, clearing and converting; a multiple of cube_cores.
        l2_bytes: Size of the shared cache, 0 = unknown.

    Raises:
        InvalidProblemError: If a count is out of range.

    Example:
        >>> Target(name="mine", cube_cores=24, vector_cores=48, l2_bytes=0).vectors_per_cube
        2
    """

    name: str
    cube_cores: int
    vector_cores: int
    l2_bytes: int = 0

    def __post_init__(self) -> None:
        for field, low, high in (
            ("cube_cores", 1, 4096),
            ("vector_cores", 1, 65536),
            ("l2_bytes", 0, 1 << 62),
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool):
                raise type_error("Target", field, "must be an int", repr(value))
            if not low <= value <= high:
                raise problem_error("Target", field, f"must be in {low}..{high}", value)
        if not isinstance(self.name, str):
            raise type_error("Target", "name", "must be a str", repr(self.name))
        if self.vector_cores % self.cube_cores:
            raise problem_error(
                "Target",
                "vector_cores",
                "must be a multiple of cube_cores",
                self.vector_cores,
                cube_cores=self.cube_cores,
            )

    @property
    def vectors_per_cube(self) -> int:
        """Vector cores beside each cube core."""
        return self.vector_cores // self.cube_cores

    @property
    def is_ascend(self) -> bool:
        """Whether this is a SoC of the table: its default split is then CANN's."""
        return self.name.startswith("Ascend")

    @property
    def default_split(self) -> str:
        """The split where none is asked for: "cann" for Ascend targets, else "balanced"."""
        return "cann" if self.is_ascend else "balanced"

    @property
    def target_id(self) -> int:
        """Low 16 bits of the CRC of the name; stands in the metadata head for information."""
        return crc32(self.name.encode()) & 0xFFFF


# family -> (suffixes, cube cores); every cube core has two vector cores beside it
_FAMILIES: dict[str, tuple[int, tuple[str, ...]]] = {
    "Ascend950PR_950": (4, ("z",)),
    "Ascend950DT_950": (8, ("x", "y")),
    "Ascend950PR_957": (28, tuple("123456789abcd")),
    "Ascend950DT_957": (28, tuple("123456789abcd")),
    "Ascend950PR_958": (32, tuple("123456789abcd")),
    "Ascend950DT_958": (32, tuple("123456789abcd")),
    "Ascend950PR_959": (36, tuple("1234569ab")),
    "Ascend950DT_959": (36, tuple("1234569ab")),
    "Ascend950DT_95A": (36, ("1", "2")),
}
# Only the variants whose cache size is published; elsewhere 0, which keeps L2 dependent choices off.
_L2_BYTES: dict[str, int] = {
    "Ascend950PR_950z": 16 * MIB,
    "Ascend950DT_950x": 32 * MIB,
    "Ascend950PR_957d": 96 * MIB,
    "Ascend950PR_9599": 128 * MIB,
}

TARGETS: dict[str, Target] = {
    name: Target(name, cores, 2 * cores, _L2_BYTES.get(name, 0))
    for family, (cores, suffixes) in _FAMILIES.items()
    for name in (family + suffix for suffix in suffixes)
}
# 64 logical cores: enough to keep 32 threads busy with two pulls each, few enough that every range stays
# large.
TARGETS[CPU_TARGET] = Target(CPU_TARGET, 64, 128, 0)


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
    found = TARGETS.get(target)
    if found is None:
        raise problem_error(
            op,
            "target",
            'must be a SoC name of fag_metadata.TARGETS or "cpu"',
            repr(target),
            remedy="Pass Target(name=..., cube_cores=..., vector_cores=...) for any other machine",
        )
    return found
