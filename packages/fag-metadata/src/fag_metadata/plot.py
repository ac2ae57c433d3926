"""A picture of a split: which core owns which tile, and how loaded every core is.

Every head is a small map, queries downwards and keys to the right; a tile has the colour of its core.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from .areas import ForwardAreas, TileGrid
from .errors import InvalidProblemError
from .forward_blocks import BlockSize, ForwardBlocks
from .layout import ForwardSplit, GradSplit
from .loads import Load
from .problem import AttentionProblem
from .ranges import Int64Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .__main__ import Explanation

_UNSTABLE = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}
"""What is left out of the files, so that pictures in a repository do not change without reason."""
MASKED, GAP = -1, -2

_MOST_HEADS = 48
_MOST_TILES = 1 << 20
_PANEL = (7.4, 3.7)  # inches of the maps
_FLATTEST = 0.12  # least ratio of the sides of a head
_GOLDEN = 0.381966  # hue step from core to core, which are neighbours in the map


class HeadMap(NamedTuple):
    """Owners of the tiles of one head, int64 (tiles along queries, tiles along keys): a core, or MASKED."""

    name: str
    owner: Int64Array


class SplitMap(NamedTuple):
    """Maps of the heads that are shown, how many there are in all, and height over width of a tile."""

    heads: list[HeadMap]
    num_heads: int
    aspect: float


def forward_map(problem: AttentionProblem, split: ForwardSplit, most_heads: int = _MOST_HEADS) -> SplitMap:
    """Maps the base blocks of the first key-value heads to the cube cores that own them.

    Fewer than `most_heads` where they have very many blocks, but one where there is any.
    """
    blocks = ForwardBlocks(problem, BlockSize(split.m, split.k))
    areas = ForwardAreas(blocks)
    words = split.fa.astype(np.int64)
    is_used = words[..., 3:6].any(axis=2)
    core = is_used.nonzero()[1]
    ends = blocks.blocks_at(*words[is_used, 3:6].T)

    def owner(head: int) -> Int64Array:
        entry = head // blocks.heads_per_entry
        num_rows = -(-int(blocks.lengths_q[entry]) * blocks.g // split.m)
        found = np.full((num_rows, -(-int(blocks.lengths_kv[entry]) // split.k)), MASKED, np.int64)
        if found.size:
            pieces = areas.parts_of(areas.rows_of(np.array([entry])), 1)
            block = blocks.before_head(np.array([head])) + pieces.done
            found[pieces.row, pieces.key] = core[ends.searchsorted(block, "right")]
        return found

    heads = _first_maps(owner, min(blocks.num_heads, most_heads), problem.n2, "kv")
    # With BSND and TND a row block holds the same queries of all query heads, with BNSD queries of one head.
    queries = split.m if blocks.is_bnsd else split.m / problem.g
    return SplitMap(heads, blocks.num_heads, queries / split.k)


def grad_map(problem: AttentionProblem, split: GradSplit, most_heads: int = _MOST_HEADS) -> SplitMap:
    """Maps the backward tiles of the first query heads in the same way."""
    grid = TileGrid(problem) if problem.is_variable else TileGrid(problem, split.o1, split.o2)
    ends = split.end[: split.used_cubes].astype(np.int64)
    num_heads = int(grid.heads.sum())
    first_head = np.append(0, np.cumsum(grid.heads))

    def owner(head: int) -> Int64Array:
        group = int(first_head.searchsorted(head, "right")) - 1
        rows, cols = int(grid.rows[group]), int(grid.cols[group])
        found = np.full((rows, cols), MASKED, np.int64)
        tile = grid.visible_tiles(np.array([group])).tile
        if len(tile):
            begin = int(grid.tile_start[group]) + (head - int(first_head[group])) * rows * cols
            found[tile % rows, tile // rows] = ends.searchsorted(begin + tile, "right")
        return found

    heads = _first_maps(owner, min(num_heads, most_heads), problem.n1, "h")
    return SplitMap(heads, num_heads, 1.0)


def _first_maps(owner: Callable[[int], Int64Array], count: int, per_batch: int, name: str) -> list[HeadMap]:
    heads: list[HeadMap] = []
    room = _MOST_TILES
    for head in range(count):
        found = owner(head)
        room -= found.size
        if heads and room < 0:
            break
        heads.append(HeadMap(f"b{head // per_batch} {name}{head % per_batch}", found))
    return heads


def draw(explanation: Explanation) -> Figure:
    """Draws the tile maps and load bars of a split.

    Raises:
        ImportError: If matplotlib is not installed.
        InvalidProblemError: If one head alone has too many tiles to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "fag-metadata plot: matplotlib must be installed. Run pip install 'fag-metadata[plot]'."
        ) from error
    problem, view, figures = explanation.problem, explanation.view, explanation.figures
    size = f"{view.forward.m} x {view.forward.k}"
    passes = [(f"Forward: tiles of {size}", forward_map(problem, view.forward), figures.forward)]
    if view.grad is not None and figures.grad is not None:
        passes.append(("Backward: tiles of 128 x 128", grad_map(problem, view.grad), figures.grad))
    figure = Figure(figsize=(13, 0.8 + 4.1 * len(passes)), dpi=100, layout="constrained")
    figure.suptitle(_title(explanation), fontsize=11)
    axes = figure.subplots(len(passes), 2, squeeze=False, width_ratios=(1.75, 1))
    for (left, right), (title, split_map, load) in zip(axes, passes, strict=True):
        if any(head.owner.size > 4 * _MOST_TILES for head in split_map.heads):
            raise InvalidProblemError("fag-metadata plot: a head must have at most 2048 x 2048 tiles.")
        _draw_map(left, title, split_map)
        _draw_bars(right, load)
    return figure


def save(figure: Figure, path: str | Path) -> None:
    """Writes a figure to a file, the same bytes for the same split.

    Raises:
        InvalidProblemError: If its name does not end in .png, .svg or .pdf.
    """
    from matplotlib import rc_context

    suffix = Path(path).suffix.lower()
    if suffix not in _UNSTABLE:
        raise InvalidProblemError(
            f"fag-metadata plot: the output file must end in {', '.join(_UNSTABLE)}, got {str(path)!r}."
        )
    with rc_context({"svg.hashsalt": "fag-metadata"}):
        figure.savefig(path, metadata={_UNSTABLE[suffix]: None})


def _title(explanation: Explanation) -> str:
    problem, target = explanation.problem, explanation.target
    is_ragged = problem.has_lengths_q or problem.has_lengths_kv
    lengths = f"{problem.b} sequences up to" if is_ragged else "S"
    mask = problem.mask_mode.name.lower().replace("_", " ")
    if problem.mask_mode == 4:
        mask += f" {problem.win_left},{problem.win_right}"
    heads = f"B {problem.b}, heads {problem.n1}/{problem.n2}"
    split = f"split {explanation.split.name.lower()}, route {explanation.route.route.name}"
    return f"{problem.layout} {heads}, {lengths} {problem.s1} x {problem.s2}, {mask} - {target.name}, {split}"


def core_colours(cores: int) -> npt.NDArray[np.float64]:
    """One RGB colour per core, (cores, 3): neighbours differ in hue, and every third is darker or paler."""
    from matplotlib.colors import hsv_to_rgb

    number = np.arange(cores)
    saturation, value = np.array([[0.55, 0.75, 0.4], [0.95, 0.75, 0.88]])[:, number % 3]
    hues = np.stack((number * _GOLDEN % 1.0, saturation, value), axis=1)
    return np.asarray(hsv_to_rgb(hues), np.float64)


def arrange(heads: list[HeadMap], aspect: float) -> tuple[Int64Array, list[tuple[int, int]]]:
    """Puts maps side by side, as large as the panel allows, on one map with GAP between them.

    Returns:
        That map, and the first (row, column) of each.
    """
    shapes = [head.owner.shape for head in heads]
    widest, total = max(width for _, width in shapes), sum(width + 1 for _, width in shapes)
    limits = np.unique(np.geomspace(max(widest, 1), max(2 * total, 2), 40).astype(np.int64)).tolist()
    _, size, places = max((_place(shapes, limit, aspect) for limit in limits), key=itemgetter(0))
    canvas = np.full(size, GAP, np.int64)
    for head, (y, x) in zip(heads, places, strict=True):
        canvas[y : y + head.owner.shape[0], x : x + head.owner.shape[1]] = head.owner
    return canvas, places


def _place(
    shapes: list[tuple[int, ...]], limit: int, aspect: float
) -> tuple[float, tuple[int, int], list[tuple[int, int]]]:
    """Inches of a tile, size and places with lines of at most `limit` tiles."""
    gap = max(1, limit // 40)
    gap_down = max(1, round(gap / aspect))
    places: list[tuple[int, int]] = []
    x = tallest = 0
    y, right = gap_down, 1
    for height, width in shapes:
        if x and x + width > limit:
            x, y, tallest = 0, y + tallest + gap_down, 0
        places.append((y, x))
        right = max(right, x + width)
        x, tallest = x + width + gap, max(tallest, height)
    bottom = y + max(tallest, 1)
    return min(_PANEL[0] / right, _PANEL[1] / (bottom * aspect)), (bottom, right), places


def _draw_map(axes: Axes, title: str, split_map: SplitMap) -> None:
    axes.set_axis_off()
    shown, total = len(split_map.heads), split_map.num_heads
    heads = f"{total} heads" if shown == total else f"first {shown} of {total} heads"
    title = f"{title} (queries down, keys right), coloured by core, {heads}"
    axes.set_title(title, fontsize=9, loc="left")
    shapes = [head.owner.shape for head in split_map.heads if head.owner.size]
    if not shapes:
        return
    # True to scale, but no head is drawn flatter or narrower than this.
    height, width = map(max, zip(*shapes, strict=True))
    aspect = min(max(split_map.aspect, _FLATTEST * width / height), width / height / _FLATTEST)
    canvas, places = arrange(split_map.heads, aspect)
    colours = core_colours(int(canvas.max(initial=0)) + 1)
    image = np.ones((*canvas.shape, 3))
    image[canvas == MASKED] = 0.9
    image[canvas >= 0] = colours[canvas[canvas >= 0]]
    axes.imshow(image, interpolation="nearest", aspect=aspect)
    axes.set_anchor("W")
    height, width = canvas.shape
    points = 72 * min(_PANEL[0] / width, _PANEL[1] / (height * aspect))  # width of a tile
    for head, (y, x) in zip(split_map.heads, places, strict=True):
        if head.owner.shape[1] * points > 3.8 * len(head.name):
            axes.text(x - 0.5, y - 0.6, head.name, fontsize=6, color="0.35", va="bottom")
        _write_cores(axes, head.owner, (y, x), points, points * aspect)


def _write_cores(axes: Axes, owner: Int64Array, place: tuple[int, int], width: float, height: float) -> None:
    """Writes every core's number on its part of a head, where it fits; a tile is width x height points."""
    from matplotlib.patheffects import withStroke

    outline = [withStroke(linewidth=1.2, foreground="white", alpha=0.8)]
    for core in np.unique(owner[owner >= 0]).tolist():
        rows, cols = np.nonzero(owner == core)
        # The tile of the core that is next to the middle of all its tiles.
        distance = ((rows - rows.mean()) * height) ** 2 + ((cols - cols.mean()) * width) ** 2
        nearest = int(distance.argmin())
        row, col = int(rows[nearest]), int(cols[nearest])
        in_row = cols[rows == row]
        wide, high = width * len(in_row), height * int((cols == col).sum())
        size = min(8.0, wide / (0.7 * len(str(core))), 0.9 * high)
        if size < 4:
            continue
        middle = float(in_row.mean())
        if owner[row, round(middle)] != core:
            middle = float(col)
        y, x = place[0] + row, place[1] + middle
        axes.text(x, y, str(core), fontsize=size, ha="center", va="center", path_effects=outline)


def _draw_bars(axes: Axes, load: Load) -> None:
    mean = float(load.area.mean()) or 1.0
    colours = core_colours(load.cores)
    axes.bar(np.arange(load.cores), load.area / mean, color=colours, width=0.85)
    axes.axhline(1.0, color="black", linewidth=0.8)
    title = f"heaviest core {load.max_over_mean:.2f} of the mean"
    if load.perfect_over_mean > 1.005:
        axes.axhline(load.perfect_over_mean, color="black", linewidth=0.8, linestyle=":")
        title += f", perfect {load.perfect_over_mean:.2f} (dotted)"
    if load.idle_cores:
        title += f", {load.idle_cores} idle"
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_ylim(0, max(1.2, 1.12 * load.max_over_mean))
    axes.set_xlim(-0.7, load.cores - 0.3)
    axes.set_xticks(np.arange(0, load.cores, 4 if load.cores <= 48 else 8))
    axes.tick_params(labelsize=7)
    axes.set_xlabel("core", fontsize=8)
    axes.set_ylabel("visible area / mean", fontsize=8)
