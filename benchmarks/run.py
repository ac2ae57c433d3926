"""Our CPU forward and backward against PyTorch's, in one process, taking turns.

    python benchmarks/run.py            everything (python3 tools/dev.py bench, from anywhere)
    python benchmarks/run.py --quick    a few cases of everything, briefly
    python benchmarks/run.py --only gqa --seconds 10
    python benchmarks/run.py --render --out FOLDER    the report of a run again, from its results.json

Prints as it goes, then the goals; writes JSON, Markdown and pictures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from along_length import measure_window
from capped import measure_capped
from cases import CASES, THREAD_CASES
from goals import Document
from machine import describe
from measure import Record, measure
from memory import MEMORY_CASES, measure_memory
from overhead import measure_overhead
from plots import draw_all
from publish import PAGE, publish
from report import SECTIONS, SPEED_HEAD, goals_table, machine_line, markdown, speed_row
from threads import measure_threads

SCHEMA = 3
LOCAL = Path(__file__).parent / "results" / "local"
WIDTHS = (44, 9, 6, 22, 7, 14, 7, 6, 4, 6)

Sections = dict[str, Callable[[], Iterable[Record]]]


def chosen_sections(args: argparse.Namespace) -> Sections:
    """What is measured, in order: name of the section -> its records as they come."""
    threads = torch.get_num_threads()
    seconds = args.seconds or (0.8 if args.quick else 4.0)
    rounds = 2 if args.quick else 3
    cases = [c for c in CASES if (c.is_quick or not args.quick) and args.only in (None, c.group)]
    thread_cases = [c for c in THREAD_CASES if c.is_quick or not args.quick]
    memory_cases = [m for m in MEMORY_CASES if m.case.is_quick or not args.quick]
    sections: Sections = {
        "speed": lambda: (record for case in cases for record in measure(case, seconds, rounds)),
        "window": lambda: measure_window(2 * seconds, rounds),
        "threads": lambda: measure_threads(thread_cases, seconds, 7 if args.quick else 25),
        "overhead": lambda: measure_overhead(2 * seconds, 20),
        "memory": lambda: measure_memory(memory_cases, threads),
        "capped": lambda: measure_capped(seconds / 2, rounds, threads),
    }
    if args.only:
        return {name: s for name, s in sections.items() if name == args.only or (name == "speed" and cases)}
    if args.quick:
        del sections["capped"]
    if len(os.sched_getaffinity(0)) < 2:
        del sections["threads"]
    return sections


def measure_all(sections: Sections) -> dict[str, list[Record]]:
    """Runs the sections and prints each record."""
    begin = time.monotonic()
    measured: dict[str, list[Record]] = {name: [] for name in SECTIONS}
    for name, section in sections.items():
        print(f"\n{name}, after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        if name in ("speed", "capped"):
            print(_columns(SPEED_HEAD))
        for record in section():
            measured[name].append(record)
            is_speed = name in ("speed", "capped")
            print(_columns(speed_row(record)) if is_speed else _facts(record), flush=True)
    print(f"\nmeasured in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return measured


def _columns(cells: Iterable[str]) -> str:
    return " ".join(f"{text:<{width}}" for text, width in zip(cells, WIDTHS, strict=True))


def _facts(record: Record) -> str:
    return "  ".join(f"{name} {value}" for name, value in record.items())


def write(run: Document, folder: Path) -> None:
    """Writes the report of a run and, where there is matplotlib, its pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(run, indent=1) + "\n")
    (folder / "results.md").write_text(markdown(run))
    try:
        pictures = draw_all(run, folder)
    except ImportError as error:
        print(f"no pictures: {error}", file=sys.stderr)
        pictures = []
    names = [path.name for path in pictures]
    print(f"written to {folder}: {', '.join(['results.json', 'results.md', *names])}", file=sys.stderr)


def main() -> int:
    """Measures or reads a run, prints, writes."""
    args = _parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.render:
        run = json.loads((args.out / "results.json").read_text())
        if run["schema"] != SCHEMA:
            sys.exit(
                f"run.py: --out must hold results of schema {SCHEMA}, got {run['schema']}. Measure again."
            )
    else:
        run = {"schema": SCHEMA, "machine": describe()}
        print(machine_line(run), file=sys.stderr)
        run |= measure_all(chosen_sections(args))
    print(f"\n{goals_table(run)}")
    write(run, args.out)
    if args.update_docs:
        publish(run, args.out)
        print(f"updated: {PAGE}", file=sys.stderr)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases, about a second each")
    only = sorted({case.group for case in CASES} | set(SECTIONS) - {"speed", "window"})
    parser.add_argument("--only", choices=only, help="one group of cases, or one section of the report")
    parser.add_argument("--seconds", type=float, help="time per case (default: 4, quick: 0.8)")
    parser.add_argument("--threads", type=int, help="threads of both (default: PyTorch's)")
    parser.add_argument("--out", type=Path, default=LOCAL, help="folder")
    parser.add_argument(
        "--render", action="store_true", help="report the run in --out again; measure nothing"
    )
    parser.add_argument("--update-docs", action="store_true", help=f"put the run into docs/{PAGE.name}")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
