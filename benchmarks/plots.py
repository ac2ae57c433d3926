"""The pictures of a run. Needs matplotlib, which is imported when a picture is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goals import Document

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"bfloat16": "#3b6fb6", "float16": "#d9822b", "float32": "#5a9e5a"}
_PEER_COLORS = {"fag": "#3b6fb6", "loop": "#b0b0b0", "padded": "#d8b4a0", "flash": "#8c8c8c"}
_DIRECTIONS = ("backward", "forward")


def draw_all(run: Document, folder: Path) -> list[Path]:
    """Draws what the run has measurements for.

    Args:
        run: The document of a run.
        folder: Where the PNG files go.

    Returns:
        The files.

    Raises:
        ImportError: There is no matplotlib.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    drawings: dict[str, Callable[[Document], Figure | None]] = {
        "bench-speedup": SPEEDUP.draw,
        "bench-roofline": ROOFLINE.draw,
        "bench-ragged": _ragged,
        "bench-window": _window,
    }
    paths = []
    for name, draw in drawings.items():
        figure = draw(run)
        if figure is not None:
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=110)
    return paths


def _new(width: float, height: float, columns: int, **kwargs: Any) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, **kwargs)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _subtitle(figure: Figure, run: Document, title: str) -> None:
    m = run["machine"]
    figure.suptitle(
        f"{title}\n{m['cpu']}, level {m['cpu_level']}, {m['threads']} threads, PyTorch {m['torch']}",
        fontsize=11,
    )


def _label(ax: Axes, x: float, y: float, text: str) -> None:
    ax.annotate(
        text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
    )  # fmt: skip


@dataclass(frozen=True)
class Bars:
    """A picture with one bar for each case and direction.

    Attributes:
        title: Of the picture.
        xlabel: What the bars are.
        value: Quartiles of a record.
        reference: Where a dashed line stands.
        text: Format of the number beside a bar.
        ticks: On a logarithmic axis, whose bars begin at the reference; none: a linear one from zero.
    """

    title: str
    xlabel: str
    value: Callable[[dict[str, Any]], list[float]]
    reference: float
    text: str
    ticks: tuple[float, ...] = ()

    def draw(self, run: Document) -> Figure | None:
        """Draws the cases whose peer is flash; None if there is none."""
        records = [r for r in run["speed"] if r["main_peer"] == "flash"]
        if not records:
            return None
        names = list(dict.fromkeys(r["case"] for r in records))
        figure, axes = _new(12, 1.5 + 0.26 * len(names), 2, sharey=True)
        begin = self.reference if self.ticks else 0.0
        for ax, direction in zip(axes, _DIRECTIONS, strict=True):
            for record in (r for r in records if r["direction"] == direction):
                low, median, high = self.value(record)
                y = names.index(record["case"])
                ax.barh(y, median - begin, left=begin, color=_COLORS[record["dtype"]], height=0.7)
                ax.plot([low, high], [y, y], color="black", linewidth=1)
                _label(ax, max(high, self.reference if self.ticks else high), y, self.text.format(median))
            ax.axvline(self.reference, color="black", linewidth=0.8, linestyle="--")
            if self.ticks:
                ax.set_xscale("log")
                low, high = ax.get_xlim()
                ax.set_xlim(min(low, 0.9 * self.reference), 1.3 * high)
                ax.set_xticks(self.ticks, map("{:g}".format, self.ticks))
                ax.set_xticks((), minor=True)
                ax.set_xlim(min(low, 0.9 * self.reference), 1.3 * high)
            else:
                ax.margins(x=0.12)
            ax.set_title(direction, fontsize=10)
            ax.set_xlabel(self.xlabel)
        axes[0].set_yticks(range(len(names)), names, fontsize=8)
        axes[0].set_ylim(len(names) - 0.4, -0.6)
        _subtitle(figure, run, self.title)
        return figure


SPEEDUP = Bars(
    "Times faster than PyTorch's flash kernels (median and quartiles)", "times faster, logarithmic",
    lambda r: r["speedup"]["flash"], 1.0, "{:.2f}", (0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50, 100),
)  # fmt: skip
ROOFLINE = Bars(
    "Share of the rate of a 2048 x 2048 x 2048 matrix product (median and quartiles)", "% of the GEMM rate",
    lambda r: [100 * v for v in r["share_of_gemm"]], 100.0, "{:.0f} %",
)  # fmt: skip


def _ragged(run: Document) -> Figure | None:
    records = [r for r in run["speed"] if r["group"] == "ragged"]
    if not records:
        return None
    names = list(dict.fromkeys(r["case"] for r in records))
    figure, axes = _new(12, 1.6 + 0.7 * len(names), 2, sharey=True)
    for ax, direction in zip(axes, _DIRECTIONS, strict=True):
        for record in (r for r in records if r["direction"] == direction):
            times = record["milliseconds"]
            for i, (name, time) in enumerate(times.items()):
                y = names.index(record["case"]) + 0.26 * (i - 1)
                ax.barh(y, time / times["fag"], height=0.24, color=_PEER_COLORS[name])
                digits = max(0, 1 - math.floor(math.log10(time)))
                _label(ax, time / times["fag"], y, f"{name} {time:.{digits}f} ms")
        ax.axvline(1, color="black", linewidth=0.8, linestyle="--")
        ax.set_xlim(0, 1.3 * ax.get_xlim()[1])
        ax.set_title(direction, fontsize=10)
        ax.set_xlabel("time, ours = 1")
    axes[0].set_yticks(range(len(names)), names, fontsize=8)
    axes[0].invert_yaxis()
    _subtitle(figure, run, "Ragged batches: packed (fag), one call for each sequence (loop), padded")
    return figure


def _window(run: Document) -> Figure | None:
    if not run["window"]:
        return None
    figure, axes = _new(10, 4.2, 2)
    for ax, direction in zip(axes, _DIRECTIONS, strict=True):
        ours = [r for r in run["window"] if r["direction"] == direction]
        ax.plot(
            [r["s"] for r in ours],
            [r["nanoseconds_per_token"] / 1e3 for r in ours],
            "o-",
            color=_PEER_COLORS["fag"],
            label="fag",
        )
        pattern = ours[0]["case"].split("-s")[0], ours[0]["case"].rsplit("-", 1)[1]
        masked = [
            r for r in run["speed"]
            if r["group"] == "window" and r["direction"] == direction
            and (r["case"].split("-s")[0], r["dtype"]) == pattern
        ]  # fmt: skip
        ax.plot(
            [r["s"] for r in masked],
            [1e3 * r["milliseconds"]["flash"] / r["tokens"] for r in masked],
            "s--",
            color=_PEER_COLORS["flash"],
            label="PyTorch flash with a mask",
        )
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks([r["s"] for r in ours], [str(r["s"]) for r in ours])
        ax.yaxis.set_major_formatter("{x:g}")
        ax.set_ylim(bottom=0.5 * min(r["nanoseconds_per_token"] for r in ours) / 1e3)
        ax.set_title(direction, fontsize=10)
        ax.set_xlabel("sequence length")
        ax.set_ylabel("microseconds per token")
        ax.legend(frameon=False)
    _subtitle(
        figure, run, f"A window of 256 keys: time per token ({run['window'][0]['case'].split('-s')[0]}, D 64)"
    )
    return figure
