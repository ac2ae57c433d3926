"""How even a metadata tensor is, whatever made it: the load of every core, in tiles and in visible area.

A visible (query, key) pair is D + Dv multiply-adds forward and 3 D + 2 Dv backward, so areas compare as times
do where most tiles are full. Merging is counted apart.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np

from .areas import ForwardAreas, TileGrid, TileRow
from .errors import InvalidProblemError, problem_error
from .forward_blocks import BlockSize, ForwardBlocks
from .layout import ForwardSplit, GradSplit
from .problem import AttentionProblem
from .ranges import Int64Array, cut_equal_rows, min_max_cuts
from .view import Metadata, unpack

_FEW_SIZES = 3
_MOST_TILES = 1000  # of a core, for which a sum of tiles is noticeably more than any number
_MOST_LISTED = 1 << 22  # tiles for which the bound of a perfect split is more than the mean
_MOST_SEARCHED = 1 << 21


@dataclass(frozen=True, eq=False)
class Load:
    """Work of the cube cores in one direction.

    Attributes:
        tiles: Tiles with visible pairs of every core, int64 (cores,).
        area: Visible (query, key) pairs of every core, int64 (cores,).
        perfect: Pairs of the heaviest core at least, however whole tiles are dealt out.
        in_order: The same with one range of tiles a core; exact up to two million tiles, else `perfect`.
    """

    tiles: Int64Array
    area: Int64Array
    perfect: int
    in_order: int

    @property
    def cores(self) -> int:
        """Cores of the target, idle ones too."""
        return len(self.area)

    @property
    def used_cores(self) -> int:
        """Cores with at least one visible pair."""
        return int((self.area > 0).sum())

    @property
    def idle_cores(self) -> int:
        """Cores without a visible pair."""
        return self.cores - self.used_cores

    @property
    def max_over_mean_tiles(self) -> float:
        """Tiles of the heaviest core over the mean of all; 1 is even."""
        return _ratio(int(self.tiles.max(initial=0)), self.tiles)

    @property
    def max_over_mean(self) -> float:
        """Visible pairs of the heaviest core over the mean of all; 1 is even."""
        return _ratio(int(self.area.max(initial=0)), self.area)

    @property
    def perfect_over_mean(self) -> float:
        """`perfect` over the mean."""
        return _ratio(self.perfect, self.area)

    @property
    def in_order_over_mean(self) -> float:
        """`in_order` over the mean."""
        return _ratio(self.in_order, self.area)

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        ratios = ("max_over_mean", "max_over_mean_tiles", "perfect_over_mean", "in_order_over_mean")
        return {
            **{name: getattr(self, name) for name in ("cores", "used_cores", "idle_cores")},
            "total_tiles": int(self.tiles.sum()),
            "total_area": int(self.area.sum()),
            **{name: round(getattr(self, name), 4) for name in ratios},
            "tiles": self.tiles.tolist(),
            "area": self.area.tolist(),
        }


@dataclass(frozen=True, eq=False)
class Balance:
    """Work of both passes.

    Attributes:
        forward: Forward pass.
        merge_rows: Rows times partial results that every vector core merges after it, int64 (vector cores,).
        grad: Backward pass, or None.
    """

    forward: Load
    merge_rows: Int64Array
    grad: Load | None

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        return {
            "forward": self.forward.to_dict(),
            "merge_rows": self.merge_rows.tolist(),
            "grad": self.grad and self.grad.to_dict(),
        }


def balance(metadata: Any, problem: AttentionProblem | None = None) -> Balance:
    """Measures how even a metadata tensor is, over all cores of its target.

    Args:
        metadata: What `unpack` takes, int32 (n,), or returns.
        problem: What it is for; None = as the head says, enough for dense layouts without seqused.

    Raises:
        InvalidProblemError: If the head does not say enough and no problem is given.
        MetadataError: If the tensor is truncated or not one of this format.
    """
    view = metadata if isinstance(metadata, Metadata) else unpack(metadata)
    if problem is None:
        problem = problem_of(view)
    merge_rows = view.forward.fd[:, :, 3].astype(np.int64) * view.forward.fd[:, :, 5]
    grad = None if view.grad is None else grad_load(view.grad, problem, view.aic)
    return Balance(forward_load(view.forward, problem), merge_rows.sum(axis=0), grad)


def problem_of(view: Metadata) -> AttentionProblem:
    """The problem as the head and, for numbers that are only folded there, the FAG block tell it."""
    head, grad = view.identity, view.grad
    if head is None:
        raise _missing("made by flash_attn_metadata of fag", "one without identity words")
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv"):
        if getattr(head, f"has_{name}"):
            raise _missing("of a dense problem", f"one made with {name}")
    numbers: dict[str, Any] = {"N1": head.n1, "N2": head.n2}
    for name in ("S1", "S2", "win_left", "win_right"):
        numbers[name] = getattr(grad or head, name.lower())
    for name, number in numbers.items():
        if number is None:
            raise _missing("of a problem with numbers below 32768", f"one with a larger {name}")
    n1, n2, s1, s2, left, right = numbers.values()
    return AttentionProblem.from_metadata_args(
        n1, n2, head.d, head_dim_v=head.dv, batch_size=head.b, max_seqlen_q=s1, max_seqlen_kv=s2,
        mask_mode=head.mask_mode, win_left=left, win_right=right, layout_q=head.layout, op="balance",
    )  # fmt: skip


def _missing(rule: str, got: str) -> InvalidProblemError:
    rule = f"must be {rule} when problem is None"
    return problem_error("balance", "metadata", rule, got, remedy="Pass problem=")


def forward_load(split: ForwardSplit, problem: AttentionProblem) -> Load:
    """Load of every cube core in a forward split, over all its sections."""
    blocks = ForwardBlocks(problem, BlockSize(split.m, split.k))
    areas = ForwardAreas(blocks)
    cores = split.fa.shape[1]
    perfect = in_order = -(-areas.total // cores)
    if int(blocks.head_blocks.sum()) <= _MOST_LISTED:
        parts = areas.parts_of(areas.rows_of(np.arange(blocks.num_entries)), 1)
        counts = np.full(len(parts.area), blocks.heads_per_entry, np.int64)
        in_order = perfect = perfect_split_bound(parts.area, counts, cores)
        if blocks.num_entries == 1:
            in_order = _lightest_of_equal(parts.area, blocks.num_heads, cores)
        elif blocks.num_blocks <= _MOST_SEARCHED:
            in_order = _lightest(areas.items(1).area, cores)
    words = split.fa.astype(np.int64)
    is_used = words[..., 3:6].any(axis=2)
    start, end = words[is_used, 0:3].T, words[is_used, 3:6].T
    tiles, area = np.zeros((2, *is_used.shape), np.int64)
    tiles[is_used] = blocks.blocks_at(*end) - blocks.blocks_at(*start)
    area[is_used] = areas.before(*end) - areas.before(*start)
    return Load(tiles.sum(axis=0), area.sum(axis=0), perfect, in_order)


def grad_load(split: GradSplit, problem: AttentionProblem, cores: int) -> Load:
    """Load of every cube core in a backward split."""
    grid = TileGrid(problem) if problem.is_variable else TileGrid(problem, split.o1, split.o2)
    visible = grid.visible_tiles()
    # Visible tiles in front of a tile: those of the groups and heads before, and in its own head.
    per_head = np.bincount(visible.group, minlength=len(grid.heads))
    before = np.append(0, np.cumsum(per_head * grid.heads))
    first = np.append(0, np.cumsum(per_head))
    rect = grid.rows * grid.cols
    rect_start = np.cumsum(rect) - rect
    order = visible.tile + rect_start[visible.group]  # ascending over all groups

    def count(tile: Int64Array) -> Int64Array:
        group = np.minimum(grid.tile_start.searchsorted(tile, "right") - 1, len(grid.heads) - 1)
        head, inside = np.divmod(tile - grid.tile_start[group], np.maximum(rect[group], 1))
        place = order.searchsorted(inside + rect_start[group])
        result: Int64Array = before[group] + head * per_head[group] + place - first[group]
        return np.where(tile < grid.total_tiles, result, before[-1])

    used = split.used_cubes
    tiles, area = np.zeros((2, cores), np.int64)
    start, end = split.start[:used].astype(np.int64), split.end[:used].astype(np.int64)
    tiles[:used] = count(end) - count(start)
    area[:used] = grid.area_before(end) - grid.area_before(start)
    in_order = perfect = perfect_split_bound(visible.area, grid.heads[visible.group], cores)
    if len(grid.heads) == 1:
        in_order = _lightest_of_equal(visible.area, int(grid.heads[0]), cores)
    elif int(before[-1]) <= _MOST_SEARCHED:
        in_order = _lightest(TileRow(grid).sums, cores)
    return Load(tiles, area, perfect, in_order)


def _lightest(sums: Int64Array, cores: int) -> int:
    """The lightest heaviest range, given the running sum of the areas of all tiles."""
    return int(np.diff(sums[min_max_cuts(sums, cores)]).max(initial=0))


def _lightest_of_equal(area: Int64Array, heads: int, cores: int) -> int:
    """The same for equal heads, given the areas of one."""
    return cut_equal_rows([0, *area.cumsum().tolist()], heads, cores).heaviest if len(area) * heads else 0


def _ratio(heaviest: int, loads: Int64Array) -> float:
    total = int(loads.sum())
    return heaviest * len(loads) / total if total else 1.0


def perfect_split_bound(sizes: Int64Array, counts: Int64Array, cores: int) -> int:
    """Returns a load that some core reaches however the tiles are dealt out; 0 without tiles.

    The largest of the mean rounded up (to a sum of tiles, where they have few sizes), the largest tile, and
    what counting proves: with load L, tiles above L - a need a core without any tile of size a or more, tiles
    above L / 2 one without each other, and a core holds at most L // a tiles of size a or more.
    """
    sizes, counts = sizes[counts > 0], counts[counts > 0]
    if not len(sizes):
        return 0
    sizes, inverse = np.unique(sizes, return_inverse=True)
    counts = np.bincount(inverse.reshape(-1), counts, len(sizes)).astype(np.int64)
    low = max(_next_sum(sizes, -(-int(sizes @ counts) // cores)), int(sizes[-1]))
    if _fits(sizes, counts, cores, low):
        return low
    # The largest tile and the mean together always fit.
    return bisect_left(range(2 * low), True, low + 1, key=lambda load: _fits(sizes, counts, cores, load))


def _fits(sizes: Int64Array, counts: Int64Array, cores: int, load: int) -> bool:
    """Whether counting leaves it open that the tiles fit."""
    small = sizes[: int(sizes.searchsorted(load // 2, "right"))]
    num_large = int(counts[len(small) :].sum())
    if num_large > cores or not len(small):
        return num_large <= cores
    above = sizes.searchsorted(load - small, "right")  # first tile size that shares no core with a small one
    tiles = np.append(0, counts.cumsum())
    num_small = tiles[len(small)] - tiles[: len(small)]
    num_shared = tiles[above] - tiles[len(small)]
    # Beside a large tile that shares there are at most (load - size) // small ones, and size > load // 2.
    room = num_shared * ((load - load // 2 - 1) // small)
    needed = num_large - (-np.maximum(num_small - room, 0) // (load // small))
    return bool((needed <= cores).all())


def _next_sum(sizes: Int64Array, load: int) -> int:
    """The smallest sum of tiles that is at least `load`; `load` itself if they have many sizes."""
    if len(sizes) > _FEW_SIZES or load // int(sizes[0]) > _MOST_TILES:
        return load
    others = np.zeros(1, np.int64)
    for size in sizes[1:].tolist():
        others = np.unique((others[:, None] + np.arange(-(-load // size) + 1) * size).ravel())
    missing = np.maximum(load - others, 0)
    return int((others - (-missing // int(sizes[0])) * int(sizes[0])).min())
