"""Tile sizes of the kernels: rows (BM) and keys (BN) of a block, per kernel family and head dims.

One table for all keys: a size is chosen once per (family, columns of q/k, columns of v) and holds for every
mask, layout and type. The build compiles all of them in the compiler's tuning mode, which refuses what does
not fit with its multi-buffering on instead of quietly dropping optimisations. The measured use stands
beside each size and, for each kernel, in the manifest (`fag-kernel info --kernels` shows it). What limits
is UB nearly everywhere.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: On-chip memories of an Ascend 950 core in KiB (dav-c310).
MEMORY_KIB: Final = {"UB": 248, "L1": 512, "L0A": 64, "L0B": 64, "L0C": 256}

#: Elements that a pass (clear, cast) moves in one step.
PASS_CHUNK: Final = 8192

#: Query rows that the gradient of the sinks reads in one step.
SINK_ROWS: Final = 128


class Tile(NamedTuple):
    """Rows and keys of a block; both divide 128, the tile of the metadata."""

    bm: int
    bn: int


class Use(NamedTuple):
    """KiB that the largest kernel of a row uses, as the compiler placed it; a test compares with the
    manifests.
    """

    ub: float
    l1: float
    l0c: float


TILES: Final[dict[tuple[str, int, int], tuple[Tile, Use]]] = {
    ("accumulate", 64, 64): (Tile(64, 128), Use(242, 144, 192)),
    ("accumulate", 128, 128): (Tile(128, 64), Use(242.5, 240, 256)),
    ("accumulate", 192, 128): (Tile(64, 64), Use(241, 184, 256)),
    ("accumulate", 192, 192): (Tile(32, 64), Use(208.75, 156, 240)),
    ("columns", 64, 64): (Tile(64, 128), Use(242.75, 128, 192)),
    ("columns", 128, 128): (Tile(128, 64), Use(228, 224, 192)),
    ("columns", 192, 128): (Tile(64, 64), Use(234, 176, 224)),
    ("columns", 192, 192): (Tile(128, 64), Use(243.5, 320, 256)),
    ("rows", 64, 64): (Tile(128, 64), Use(195.5, 112, 192)),
    ("rows", 128, 128): (Tile(128, 64), Use(243.25, 208, 192)),
    ("rows", 192, 128): (Tile(64, 128), Use(218.5, 256, 224)),
    ("rows", 192, 192): (Tile(64, 128), Use(218.5, 304, 224)),
    ("bn2", 64, 64): (Tile(128, 64), Use(227, 144, 128)),
    ("bn2", 128, 128): (Tile(128, 32), Use(242.75, 184, 160)),
    ("bn2", 128, 192): (Tile(128, 32), Use(234.625, 224, 176)),
    ("bn2_columns", 64, 64): (Tile(64, 128), Use(242.75, 128, 192)),
    ("bn2_columns", 128, 128): (Tile(128, 64), Use(228, 224, 192)),
    ("bn2_columns", 128, 192): (Tile(64, 64), Use(234, 176, 224)),
    ("bn2_rows", 64, 64): (Tile(128, 64), Use(195.5, 112, 192)),
    ("bn2_rows", 128, 128): (Tile(128, 64), Use(243.25, 208, 192)),
    ("bn2_rows", 128, 192): (Tile(64, 64), Use(185.75, 168, 128)),
    ("forward", 64, 64): (Tile(128, 128), Use(244.031, 128, 192)),
    ("forward", 128, 128): (Tile(128, 64), Use(243.531, 144, 192)),
    ("forward", 192, 128): (Tile(128, 64), Use(243.531, 192, 192)),
    ("forward", 192, 192): (Tile(64, 128), Use(202.781, 256, 160)),
}


def tile_sizes(family: str, da: int, dva: int) -> Tile:
    """Tile of a kernel family at these padded head dims.

    Example:
        >>> tile_sizes("accumulate", 64, 64)
        Tile(bm=64, bn=128)
    """
    return TILES[family, da, dva][0]
