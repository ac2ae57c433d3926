"""The command `fag-metadata`: explain, plot and check splits.

Exit status: 0 = done, 1 = `check` found faults, 2 = wrong arguments or an unreadable file, 3 = something that
is needed is not installed. Errors are one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import __version__
from .cli_arguments import (
    Parser,
    add_problem_options,
    add_split_options,
    has_problem,
    make_problem,
    make_target,
)
from .errors import InvalidTypeError, MetadataError
from .explain import Explanation, explain
from .identity import Report, check
from .layout import Split
from .loads import balance, problem_of
from .problem import AttentionProblem
from .split_check import Finding
from .view import unpack

OK, FAULTS, USAGE, MISSING = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status; without `argv`, that of the process."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except ImportError as error:
        return _fail(error, MISSING)
    except (ValueError, TypeError, OSError) as error:
        return _fail(error, USAGE)
    except BrokenPipeError:  # pragma: no cover - depends on the reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    return status


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
    command.add_argument(
        "-o", "--output", required=True, metavar="FILE", help=".png, .svg or .pdf file to write"
    )
    command.add_argument("--json", action="store_true", help="print the figures as JSON")
    command.set_defaults(run=_run_plot)

    command = commands.add_parser(
        "check", help="check metadata tensors: do they belong, do they cover every tile once"
    )
    command.add_argument("files", nargs="+", metavar="FILE.npy", help="int32 tensors saved by numpy.save")
    add_problem_options(command, is_required=False)
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(run=_run_check)
    return parser


def _explain(arguments: argparse.Namespace) -> Explanation:
    split = None if arguments.split is None else Split[arguments.split.upper()]
    return explain(make_problem(arguments), make_target(arguments), split, not arguments.forward_only)


def _run_explain(arguments: argparse.Namespace) -> int:
    explanation = _explain(arguments)
    if arguments.save:
        np.save(arguments.save, explanation.metadata)
    _print(explanation.to_dict() if arguments.json else str(explanation))
    return OK


def _run_plot(arguments: argparse.Namespace) -> int:
    from .plot import draw, save

    explanation = _explain(arguments)
    save(draw(explanation), arguments.output)
    _print(
        {"file": arguments.output, **explanation.to_dict()} if arguments.json else f"wrote {arguments.output}"
    )
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
    if problem is None:
        problem = problem_of(view)
    report = check(metadata, problem)
    return report, balance(view, problem).to_dict() if report.is_ok else None


def _print(output: Any) -> None:
    print(output if isinstance(output, str) else json.dumps(output, indent=2))


if __name__ == "__main__":
    sys.exit(main())
