"""The command `fag-metadata`: explain a split in plain words, plot it, check it.

Exit status: 0 = done, 1 = `check` found faults, 2 = wrong arguments or an unreadable file, 3 = something that
is needed is not installed. Errors are one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from . import __version__
from .api import metadata_for
from .cli_arguments import (
    Parser,
    add_problem_options,
    add_split_options,
    has_problem,
    make_problem,
    make_target,
)
from .errors import InvalidTypeError, MetadataError
from .identity import Report, check
from .layout import FORMAT_VERSION, Int32Array, Route, Split
from .loads import Balance, Load, balance, problem_of
from .problem import AttentionProblem
from .routes import RouteChoice, select_route
from .split_check import Finding
from .terms import MaskMode, Target
from .view import Metadata, unpack

OK, FAULTS, USAGE, MISSING = 0, 1, 2, 3

_ROUTES = {
    Route.BN2GS1S2: "the tiles of a head may be spread over cores",
    Route.BN2_SINGLE: "a core owns whole heads of one tile",
    Route.BN2_MULTIBLK: "a core owns whole heads of several tiles",
}
_VERDICTS = {"capability": "cannot", "preference": "not wanted"}
_NAMES: tuple[Literal["cann"], Literal["balanced"]] = ("cann", "balanced")
_SHOWN = 8  # sequences listed one by one


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, None = that of the process, and returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except ImportError as error:
        return _fail(error, MISSING)
    except (ValueError, TypeError, OSError) as error:
        return _fail(error, USAGE)


def _fail(error: BaseException, status: int) -> int:
    text = " ".join(str(error).split())
    print(text if text.startswith("fag-metadata") else f"fag-metadata: {text}", file=sys.stderr)
    return status


def _parser() -> Parser:
    parser = Parser(
        prog="fag-metadata", description="Explains, draws and checks the metadata of flash attention."
    )
    parser.add_argument("--version", action="version", version=f"fag-metadata {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("explain", help="say in plain words how the work of a problem is split")
    add_problem_options(command, is_required=True)
    add_split_options(command)
    command.add_argument("--json", action="store_true", help="as JSON")
    command.add_argument("--save", metavar="FILE.npy", help="also write the metadata tensor")
    command.set_defaults(run=_run_explain)

    command = commands.add_parser("plot", help="draw which core owns which tile, and the load of every core")
    add_problem_options(command, is_required=True)
    add_split_options(command)
    text = ".png, .svg or .pdf file to write"
    command.add_argument("-o", "--output", required=True, metavar="FILE", help=text)
    command.add_argument("--json", action="store_true", help="print the figures as JSON")
    command.set_defaults(run=_run_plot)

    text = "check metadata tensors: do they belong, do they cover every tile once"
    command = commands.add_parser("check", help=text)
    command.add_argument("files", nargs="+", metavar="FILE.npy", help="int32 tensors saved by numpy.save")
    add_problem_options(command, is_required=False)
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(run=_run_check)
    return parser


def _explain(arguments: argparse.Namespace) -> Explanation:
    split = arguments.split and Split[arguments.split.upper()]
    return explain(make_problem(arguments), make_target(arguments), split, not arguments.forward_only)


def _run_explain(arguments: argparse.Namespace) -> int:
    explanation = _explain(arguments)
    if arguments.save:
        np.save(arguments.save, explanation.metadata)
    _print(explanation.to_dict() if arguments.json else str(explanation))
    return OK


def _run_plot(arguments: argparse.Namespace) -> int:
    from .plot import draw, save

    explanation, path = _explain(arguments), arguments.output
    save(draw(explanation), path)
    _print({"file": path, **explanation.to_dict()} if arguments.json else f"wrote {path}")
    return OK


def _run_check(arguments: argparse.Namespace) -> int:
    reports: list[dict[str, Any]] = []
    for path in arguments.files:
        metadata = np.load(path, allow_pickle=False)
        report, figures = _check(metadata, make_problem(arguments) if has_problem(arguments) else None)
        findings = [finding._asdict() for finding in report.findings]
        reports.append({"file": path, "ok": report.is_ok, "findings": findings, "balance": figures})
        if not arguments.json:
            _print("\n".join(f"{path}: {line}" for line in str(report).split("\n")))
    if arguments.json:
        _print(reports)
    return OK if all(report["ok"] for report in reports) else FAULTS


def _check(metadata: Any, problem: AttentionProblem | None) -> tuple[Report, dict[str, Any] | None]:
    """The report of one tensor, and how even it is if it is right."""
    try:
        view = unpack(metadata)
    except (InvalidTypeError, MetadataError) as error:
        return Report((Finding("head", "metadata", str(error)),)), None
    problem = problem or problem_of(view)
    report = check(metadata, problem)
    return report, balance(view, problem).to_dict() if report.is_ok else None


def _print(output: Any) -> None:
    print(output if isinstance(output, str) else json.dumps(output, indent=2))


@dataclass(frozen=True, eq=False)
class Explanation:
    """What there is to say about the metadata of one problem: which route, who works, how evenly, what was
    rejected and why; str() of it is the text. `other` says how even the other split would be.
    """

    problem: AttentionProblem
    target: Target
    split: Split
    route: RouteChoice
    view: Metadata
    figures: Balance
    other: Balance
    metadata: Int32Array = field(repr=False)

    def __str__(self) -> str:
        parts = (self._what(), self._route(), self._forward(), self._backward(), self._end())
        return "\n\n".join(map("\n".join, parts))

    def to_dict(self) -> dict[str, Any]:
        """All facts and figures, ready for JSON."""
        problem, forward = self.problem, self.view.forward
        return {
            "problem": {
                "layout": problem.layout.value,
                **{name: getattr(problem, name) for name in ("b", "n1", "n2", "d", "dv")},
                "lengths_q": problem.lengths_q.tolist(),
                "lengths_kv": problem.lengths_kv.tolist(),
                "mask_mode": problem.mask_mode.name,
                "win_left": problem.win_left,
                "win_right": problem.win_right,
            },
            "target": {name: getattr(self.target, name) for name in ("name", "cube_cores", "vector_cores")},
            "split": self.split.name.lower(),
            "route": {
                "name": self.route.route.name,
                "trace": [verdict._asdict() for verdict in self.route.trace],
            },
            "forward": {
                "sections": forward.section_num,
                "block_rows": forward.m,
                "block_keys": forward.k,
                "merged_row_blocks": len(_merged(self.view)),
                "merging_vector_cores": len(self.view.merge_rows),
                **self.figures.forward.to_dict(),
            },
            "grad": self.figures.grad and self.figures.grad.to_dict(),
            "other_split": {
                "split": self._other_name,
                "forward_max_over_mean": round(self.other.forward.max_over_mean, 4),
                "grad_max_over_mean": self.other.grad and round(self.other.grad.max_over_mean, 4),
            },
            "words": len(self.metadata),
            "format_version": FORMAT_VERSION,
        }

    @property
    def _other_name(self) -> str:
        return _NAMES[1 - self.split]

    def _what(self) -> list[str]:
        problem, target = self.problem, self.target
        heads = f"{_count(problem.n1, 'query head')}, {_count(problem.n2, 'key-value head')}"
        dim = f"head dim {problem.d}" + ("" if problem.d == problem.dv else f", {problem.dv} for v")
        lines = [f"{heads}, {dim}, layout {problem.layout}.", _lengths(problem), _mask(problem)]
        cores = f"{_count(target.cube_cores, 'cube core')}, {_count(target.vector_cores, 'vector core')}"
        kind = "CANN's own words" if self.split is Split.CANN else "even visible areas"
        return [*lines, f"Target {target.name}: {cores}. Split {self.split.name.lower()}: {kind}."]

    def _route(self) -> list[str]:
        return [
            f"Route {self.route.route.name}: {_ROUTES[self.route.route]}.",
            *(
                f"  rejected {row.name} ({_VERDICTS[row.verdict]}): {row.reason}"
                for row in self.route.trace[:-1]
            ),
        ]

    def _forward(self) -> list[str]:
        split, load = self.view.forward, self.figures.forward
        rows = "" if self.problem.g == 1 else f" (a row is a query of one of {self.problem.g} heads)"
        why = "every core has one range"
        if split.section_num > 1:
            is_cann = self.split is Split.CANN
            why = "the heads of one fit the L2 cache" if is_cann else "two ranges a core are more even"
        return [
            f"Forward: base blocks of {split.m} rows x {split.k} keys{rows}.",
            *_load_lines(load, "block"),
            f"  {_count(split.section_num, 'section')}: {why}.",
            self._merging(),
        ]

    def _merging(self) -> str:
        view, load = self.view, self.figures.forward
        merged = _merged(view)
        if merged:
            parts = [row.num_partials for row in merged.values()]
            most = f"up to {max(parts)}" if max(parts) > 2 else "2"
            cores = _count(len(view.merge_rows), "vector core")
            verb = "is" if len(merged) == 1 else "are"
            return (
                f"  {_count(len(merged), 'row block')} {verb} shared by {most} cores and merged by {cores}."
            )
        heaviest, blocks = int(load.tiles.max(initial=0)), int(load.tiles.sum())
        even = -(-blocks // min(load.cores, max(blocks, 1)))
        if view.forward.section_num > 1 or heaviest <= even:
            return "  No row block is shared between cores, so nothing needs merging."
        is_cann = self.split is Split.CANN
        rule = "CANN asks for more than 10 saved" if is_cann else "whole row blocks are even enough"
        text = f"it would take the heaviest core from {_count(heaviest, 'block')} to {even}; {rule}"
        return f"  rejected sharing row blocks between cores: {text}."

    def _backward(self) -> list[str]:
        load = self.figures.grad
        if load is None:
            return ["Backward: not included."]
        return ["Backward: tiles of 128 queries x 128 keys of one query head.", *_load_lines(load, "tile")]

    def _end(self) -> list[str]:
        other = f"forward {self.other.forward.max_over_mean:.2f}"
        if self.other.grad is not None:
            other += f", backward {self.other.grad.max_over_mean:.2f}"
        return [
            f"With split {self._other_name} the heaviest core would be: {other} x the mean.",
            f"Tensor: {len(self.metadata)} int32 words, format version {FORMAT_VERSION}.",
        ]


def explain(
    problem: AttentionProblem, target: Target, split: Split | None = None, is_grad_enabled: bool = True
) -> Explanation:
    """Makes the metadata of a problem and gathers what there is to say about it."""
    if split is None:
        split = Split[target.default_split.upper()]
    metadata, other = (
        metadata_for(problem, target, name, is_grad_enabled)
        for name in (_NAMES if split is Split.CANN else _NAMES[::-1])
    )
    view, route = unpack(metadata), select_route(problem, target, split)
    figures = balance(view, problem), balance(other, problem)
    return Explanation(problem, target, split, route, view, *figures, metadata)


def _merged(view: Metadata) -> dict[tuple[int, int, int], Any]:
    """(section, head, row block) -> one of its merge rows."""
    return {(row.section, row.bn, row.row): row for row in view.merge_rows}


def _load_lines(load: Load, noun: str) -> list[str]:
    if not load.tiles.any():
        return ["  Nothing to compute: no query sees a key."]
    used = f"{load.used_cores} of {load.cores} cores work on {_count(int(load.tiles.sum()), noun)}"
    most = _count(int(load.tiles.max()), noun)
    ratio = (
        f"{load.max_over_mean:.2f} x the mean by visible area, {load.max_over_mean_tiles:.2f} x by {noun}s"
    )
    best = f"no split of whole {noun}s is below {load.perfect_over_mean:.2f} x"
    if load.in_order > 1.005 * load.perfect:
        best += f", none with one range a core below {load.in_order_over_mean:.2f} x"
    return [f"  {used}; the heaviest has {most}.", f"  Heaviest core: {ratio}; {best}."]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _lengths(problem: AttentionProblem) -> str:
    if not problem.has_lengths_q and not problem.has_lengths_kv:
        entries = "1 batch entry" if problem.b == 1 else f"{problem.b} batch entries"
        return f"{entries}, {problem.s1} queries, {problem.s2} keys each."
    noun = "packed sequence" if problem.layout.value == "TND" else "batch slot"
    q, kv = problem.lengths_q, problem.lengths_kv
    both = f"queries and keys {_some(q)}"
    lengths = both if np.array_equal(q, kv) else f"queries {_some(q)}; keys {_some(kv)}"
    return f"{_count(problem.b, noun)}, {lengths}."


def _some(lengths: Any) -> str:
    if len(lengths) > 1 and (lengths == lengths[0]).all():
        return f"{lengths[0]} each"
    if len(lengths) <= _SHOWN:
        return ", ".join(map(str, lengths.tolist())) or "none"
    return f"{int(lengths.min())} to {int(lengths.max())}, {int(lengths.sum())} in all"


def _mask(problem: AttentionProblem) -> str:
    if problem.mask_mode is MaskMode.NO_MASK:
        return "No mask."
    if problem.mask_mode is MaskMode.CAUSAL:
        return "Causal mask, aligned bottom-right."
    left, right = ("open" if size < 0 else size for size in (problem.win_left, problem.win_right))
    return f"Sliding window, left {left}, right {right}, aligned bottom-right."


if __name__ == "__main__":
    sys.exit(main())
