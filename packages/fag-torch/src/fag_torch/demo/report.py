"""The demo's picture: the loss, and for both kinds of layers which logical core computes which tiles.

Drawn from what the kernels were given: the metadata of the last batch, unpacked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")  # a file is written, no window opened

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

import fag_metadata
from fag_metadata import AttentionProblem, MaskMode
from fag_torch.demo.checks import Speed
from fag_torch.demo.data import Batch
from fag_torch.demo.model import Config
from fag_torch.demo.train import History

TILE = 128
PIXEL = 8  # tokens per pixel of a map
INK, QUIET, OURS = "#222222", "#8a8a8a", "#1f5fa8"
CORE_COLORS = (
    "#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#eeca3b", "#b279a2", "#ff9da6", "#9d755d",
)  # fmt: skip


class Tile(NamedTuple):
    """A tile of head 0: whose it is, and its tokens in the packed batch."""

    core: int
    queries: range
    keys: range


class Split(NamedTuple):
    """What the kernels were told for one kind of layer: tiles of head 0, and pairs per core of all heads."""

    tiles: list[Tile]
    loads: NDArray[np.int64]


def split_of(batch: Batch, config: Config, window: int | None) -> Split:
    """Takes the metadata apart that the kernels execute for this batch."""
    problem = AttentionProblem.from_metadata_args(
        config.n1,
        config.n2,
        config.d,
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        mask_mode=MaskMode.CAUSAL if window is None else MaskMode.SLIDING_WINDOW,
        win_left=-1 if window is None else window - 1,
        win_right=-1 if window is None else 0,
        layout_q="TND",
        layout_kv="TND",
        layout_out="TND",
    )
    words = fag_metadata.metadata_for(problem, "cpu")
    ranges = fag_metadata.unpack(words).tile_ranges
    ends = np.array([tiles.end for tiles in ranges])
    found, number = [], 0
    for begin, length in zip(batch.cu_seqlens.tolist(), batch.lengths, strict=False):
        parts = [range(begin + t, begin + min(t + TILE, length)) for t in range(0, length, TILE)]
        for keys in parts:
            for queries in parts:
                core = ranges[int(np.searchsorted(ends, number, side="right"))].core
                if _visible(np.array(queries), np.array(keys), window).any():
                    found.append(Tile(core, queries, keys))
                number += 1
        number += (config.n1 - 1) * len(parts) ** 2
    load = fag_metadata.balance(words, problem).grad
    assert load is not None  # metadata_for includes the gradient
    return Split(found, load.area[: len(ranges)])


def _visible(queries: NDArray[Any], keys: NDArray[Any], window: int | None) -> NDArray[np.bool_]:
    distance = queries[:, None] - keys[None]
    seen: NDArray[np.bool_] = (distance >= 0) & (distance < (window or 1 << 30))
    return seen


def draw(history: History, speed: Speed, grad_error: float, out: Path) -> None:
    """Writes the picture.

    Args:
        history: What training left behind.
        speed: Tokens per second, for the caption.
        grad_error: Largest relative error of the gradients, for the caption.
        out: File to write; its suffix chooses the format.
    """
    config, batch = history.model.config, history.batch
    style = {"font.size": 10, "axes.edgecolor": QUIET, "text.color": INK, "axes.labelcolor": INK}
    kinds = ((None, "causal"), (config.window, f"window of {config.window}"))
    with plt.rc_context(style):
        figure = plt.figure(figsize=(16, 6.6), layout="constrained")
        grid = figure.add_gridspec(2, 3, height_ratios=(4, 1), width_ratios=(1, 1, 1))
        _draw_loss(figure.add_subplot(grid[0, 0]), history)
        _draw_caption(figure.add_subplot(grid[1, 0]), history, speed, grad_error)
        for column, (window, title) in enumerate(kinds, start=1):
            split = split_of(batch, config, window)
            _draw_map(figure.add_subplot(grid[0, column]), batch, split.tiles, window, title)
            _draw_loads(figure.add_subplot(grid[1, column]), split.loads)
        figure.savefig(out, dpi=130)
        plt.close(figure)


def _draw_loss(axes: Any, history: History) -> None:
    losses = np.array(history.losses)
    axes.plot(losses, color=OURS, alpha=0.35, linewidth=1)
    steps = np.arange(len(losses))
    around = np.exp(-0.5 * (np.subtract.outer(steps, steps) / max(0.5, len(losses) / 40)) ** 2)
    axes.plot(around @ losses / around.sum(1), color=OURS, linewidth=2)
    half = history.first_loss / 2
    axes.axhline(half, color=QUIET, linewidth=1, linestyle=(0, (4, 4)))
    end = len(losses) - 1
    axes.annotate(
        "half of the first loss", (end, half), (0, 4), textcoords="offset points", ha="right", color=QUIET
    )
    axes.set(xlabel="step", ylabel="nats per byte", ylim=(0, None), xlim=(0, max(1, len(losses) - 1)))
    axes.set_title(f"Loss: {history.first_loss:.2f} to {history.last_loss:.2f}", loc="left", weight="bold")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_caption(axes: Any, history: History, speed: Speed, grad_error: float) -> None:
    axes.axis("off")
    text = (
        f"{len(history.losses)} steps of {len(history.batch.tokens)} bytes in {history.seconds:.0f} s\n"
        f"gradients against float64: largest relative error {grad_error:.1e}\n"
        f"forward and backward: fag_torch {speed.tokens_per_s:,.0f} tokens/s, "
        f"SDPA padded {speed.tokens_per_s_sdpa:,.0f}"
    )
    axes.text(0, 0.9, text, va="top", linespacing=1.6)


def _color(core: int) -> NDArray[Any]:
    return np.array(to_rgb(CORE_COLORS[core % len(CORE_COLORS)]))


def _draw_map(axes: Any, batch: Batch, tiles: list[Tile], window: int | None, title: str) -> None:
    size = len(batch.tokens)
    image = np.ones((-(-size // PIXEL),) * 2 + (3,))
    centers: dict[int, list[tuple[float, float]]] = {}
    for tile in tiles:
        rows, columns = (
            np.arange(-(-x.start // PIXEL), -(-x.stop // PIXEL)) for x in (tile.queries, tile.keys)
        )
        seen = _visible(rows * PIXEL, columns * PIXEL, window)[..., None]
        color = _color(tile.core)
        image[rows[:, None], columns[None]] = np.where(seen, color, 1 - (1 - color) * 0.18)
        centers.setdefault(tile.core, []).append((float(np.mean(tile.queries)), float(np.mean(tile.keys))))
    axes.imshow(image, extent=(0, size, size, 0), interpolation="nearest")
    for begin, length in zip(batch.cu_seqlens.tolist(), batch.lengths, strict=False):
        axes.add_patch(plt.Rectangle((begin, begin), length, length, fill=False, color=INK, linewidth=0.6))
    for core, points in centers.items():
        if len(points) < 2:
            continue
        row, column = np.mean(points, axis=0)
        if window is None:
            style = {"color": "white", "ha": "center", "weight": "bold"}
        else:  # the band is too narrow for a number
            column += TILE
            style = {"color": INK, "ha": "left"}
        axes.text(column, row, str(core), va="center", fontsize=8, **style)
    axes.set_title(f"Tiles by logical core: {title}", loc="left", weight="bold")
    axes.set(xlabel="key (pale: masked part of a tile)", ylabel="query, head 0")
    axes.locator_params(nbins=5)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_loads(axes: Any, loads: NDArray[np.int64]) -> None:
    cores = len(loads)
    axes.bar(np.arange(cores), loads / 1e6, color=[_color(core) for core in range(cores)], width=0.85)
    axes.axhline(loads.mean() / 1e6, color=INK, linewidth=1, linestyle=(0, (4, 4)))
    label = "logical core (all heads; dashed: mean)"
    axes.set(xlabel=label, ylabel="million pairs", xlim=(-0.6, cores - 0.4))
    axes.spines[["top", "right"]].set_visible(False)
