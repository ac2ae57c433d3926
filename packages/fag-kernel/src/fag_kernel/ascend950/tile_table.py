"""Tile sizes of the kernels: rows (BM) and keys (BN) of a block, per kernel family and head dims.

One table for all keys: a size is chosen once per (family, columns of q/k, columns of v) and holds for every
mask, layout and type. The build compiles all of them in the compiler's tuning mode, which refuses what does
not fit with its multi-buffering on instead of quietly dropping optimisations, and writes the measured use
beside each kernel in the manifest (`fag-kernel info` shows it).
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: On-chip memories of an Ascend 950 core in KiB (dav-c310).
MEMORY_KIB: Final = {"UB": 248, "L1": 512, "L0A": 64, "L0B": 64, "L0C": 256}

#: Elements that a pass (clear, cast) moves in one step.
PASS_CHUNK: Final = 8192


class Tile(NamedTuple):
    """Rows and keys of a block; both divide 128, the tile of the metadata."""

    bm: int
    bn: int


TILES: Final[dict[tuple[str, int, int], Tile]] = {
    ("accumulate", 64, 64): Tile(64, 128),
    ("accumulate", 128, 128): Tile(128, 64),
    ("accumulate", 192, 128): Tile(64, 64),
    ("accumulate", 192, 192): Tile(32, 64),
    ("columns", 64, 64): Tile(64, 128),
    ("columns", 128, 128): Tile(128, 64),
    ("columns", 192, 128): Tile(64, 64),
    ("columns", 192, 192): Tile(128, 64),
    ("rows", 64, 64): Tile(128, 64),
    ("rows", 128, 128): Tile(128, 64),
    ("rows", 192, 128): Tile(64, 128),
    ("rows", 192, 192): Tile(64, 128),
    ("bn2", 64, 64): Tile(128, 64),
    ("bn2", 128, 128): Tile(128, 32),
    ("bn2", 128, 192): Tile(128, 32),
    ("bn2_columns", 64, 64): Tile(64, 128),
    ("bn2_columns", 128, 128): Tile(128, 64),
    ("bn2_columns", 128, 192): Tile(64, 64),
    ("bn2_rows", 64, 64): Tile(128, 64),
    ("bn2_rows", 128, 128): Tile(128, 64),
    ("bn2_rows", 128, 192): Tile(64, 64),
    ("forward", 64, 64): Tile(64, 128),
    ("forward", 128, 128): Tile(64, 128),
    ("forward", 192, 128): Tile(64, 64),
    ("forward", 192, 192): Tile(64, 64),
}


def tile_sizes(family: str, da: int, dva: int) -> Tile:
    """Tile of a kernel family at these padded head dims.

    Example:
        >>> tile_sizes("accumulate", 64, 64)
        Tile(bm=64, bn=128)
    """
    return TILES[family, da, dva]
