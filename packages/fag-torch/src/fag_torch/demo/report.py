"""The demo's picture: the loss, and for both kinds of layers which logical core computes which tiles.

Drawn from what the kernels were given: the metadata of the last batch, unpacked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file is written, no window opened

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

import fag_metadata
from fag_torch import MaskMode, flash_attn_metadata
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


@dataclass(frozen=True)
class Tile:
    """One 128 x 128 tile of the backward: where it lies in the packed batch and who computes it."""

    core: int
    head: int
    rows: tuple[int, int]  # of the packed batch, begin and end
    columns: tuple[int, int]
    pairs: int  # that the mask leaves


def tiles_of(batch: Batch, config: Config, window: int | None) -> list[Tile]:
    """All tiles with anything to compute, from the metadata that the kernels execute for this batch."""
    words = flash_attn_metadata(
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
        is_grad_enabled=True,
    )
    split = fag_metadata.unpack(words.numpy()).grad
    assert split is not None  # is_grad_enabled above
    owners = [(int(split.start[core]), int(split.end[core]), core) for core in range(split.used_cubes)]
    tiles, number, owner = [], 0, 0
    for begin, length in zip(batch.cu_seqlens.tolist(), batch.lengths, strict=False):
        count = -(-length // TILE)
        for head in range(config.n1):
            for column in range(count):
                for row in range(count):
                    while owner < len(owners) - 1 and number >= owners[owner][1]:
                        owner += 1
                    rows = (row * TILE, min(length, (row + 1) * TILE))
                    columns = (column * TILE, min(length, (column + 1) * TILE))
                    pairs = int(_visible(np.arange(*rows), np.arange(*columns), window).sum())
                    if pairs:
                        shift = [(low + begin, high + begin) for low, high in (rows, columns)]
                        tiles.append(Tile(owners[owner][2], head, shift[0], shift[1], pairs))
                    number += 1
    return tiles


def _visible(rows: NDArray[Any], columns: NDArray[Any], window: int | None) -> NDArray[np.bool_]:
    distance = rows[:, None] - columns[None]
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
            tiles = tiles_of(batch, config, window)
            _draw_map(figure.add_subplot(grid[0, column]), batch, tiles, window, title)
            _draw_loads(figure.add_subplot(grid[1, column]), tiles)
        figure.savefig(out, dpi=130)
        plt.close(figure)


def _draw_loss(axes: Any, history: History) -> None:
    losses = np.array(history.losses)
    axes.plot(losses, color=OURS, alpha=0.35, linewidth=1)
    around = np.exp(-(np.subtract.outer(np.arange(len(losses)), np.arange(len(losses))) ** 2) / 18)
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
        if tile.head:
            continue
        rows = np.arange(-(-tile.rows[0] // PIXEL), -(-tile.rows[1] // PIXEL))
        columns = np.arange(-(-tile.columns[0] // PIXEL), -(-tile.columns[1] // PIXEL))
        seen = _visible(rows * PIXEL, columns * PIXEL, window)[..., None]
        color = _color(tile.core)
        image[rows[:, None], columns[None]] = np.where(seen, color, 1 - (1 - color) * 0.18)
        centers.setdefault(tile.core, []).append((float(np.mean(tile.rows)), float(np.mean(tile.columns))))
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


def _draw_loads(axes: Any, tiles: list[Tile]) -> None:
    cores = max(tile.core for tile in tiles) + 1
    loads = np.zeros(cores)
    for tile in tiles:
        loads[tile.core] += tile.pairs
    axes.bar(np.arange(cores), loads / 1e6, color=[_color(core) for core in range(cores)], width=0.85)
    axes.axhline(loads.mean() / 1e6, color=INK, linewidth=1, linestyle=(0, (4, 4)))
    label = "logical core (all heads; dashed: mean)"
    axes.set(xlabel=label, ylabel="million pairs", xlim=(-0.6, cores - 0.4))
    axes.spines[["top", "right"]].set_visible(False)
