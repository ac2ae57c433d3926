"""Brings a run into docs/cpu-benchmarks.md: tables between the page's markers, pictures beside the others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from goals import Document
from report import goals_table, groups_table, machine_line

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cpu-benchmarks.md"
BEGIN, END = "<!-- results: benchmarks/run.py --update-docs writes from here -->", "<!-- to here -->"

_PICTURES = {
    "bench-speedup.png": "How many times faster than PyTorch's flash kernels, case by case",
    "bench-roofline.png": "Share of the rate of a large matrix product, case by case",
    "bench-ragged.png": "Times of ragged batches: packed, in a loop, padded",
    "bench-window.png": "Time per token of a window along the length of the sequence",
}


def publish(run: Document, folder: Path) -> None:
    """Rewrites the results of the page.

    Args:
        run: The document of a run.
        folder: Where its report and pictures are; inside the repository it is linked.
    """
    shown = []
    for name, caption in _PICTURES.items():
        if (folder / name).exists():
            shutil.copyfile(folder / name, PAGE.parent / "images" / name)
            shown.append(f"![{caption}](images/{name})\n")
    PAGE.write_text(replaced(PAGE.read_text(), results(run, folder, shown)))


def results(run: Document, folder: Path, pictures: list[str]) -> str:
    """What stands between the markers."""
    parts = [machine_line(run) + "\n", "### Goals\n", goals_table(run), "### Groups, geometric means\n"]
    parts += [groups_table(run), *pictures]
    if folder.resolve().is_relative_to(ROOT) and folder.name != "local":
        link = Path(os.path.relpath(folder.resolve(), PAGE.parent)).as_posix()
        parts.append(f"Every case: [{folder.name}]({link}/results.md).\n")
    return "\n".join(parts)


def replaced(page: str, text: str) -> str:
    """The page with `text` between its markers.

    Raises:
        ValueError: A marker is missing.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} must hold both markers, got none of: {BEGIN}, {END}.")
    return f"{before}{BEGIN}\n{text}{END}{after}"
