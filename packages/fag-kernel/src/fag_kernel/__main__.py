"""The command line: `fag-kernel plan`, `info`, `build` and `verify`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from fag_kernel._version import __version__
from fag_kernel.ascend950 import ArtefactError, CompilerError, cli
from fag_kernel.plan import plan
from fag_kernel.report import info_lines, info_values, plan_lines, plan_values
from fag_metadata.cli_arguments import Parser, add_problem_options, make_problem
from fag_metadata.terms import DEFAULT_TARGET

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; None = those of the process.

    Returns:
        Exit status: 0, 1 if shipped files or a compiler fail, or 2 for arguments that are refused.
    """
    arguments = make_parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (ValueError, TypeError, NotImplementedError, OverflowError) as refusal:
        print(refusal, file=sys.stderr)
        return 2
    except (ArtefactError, CompilerError) as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser with all sub-commands."""
    parser = Parser(
        prog="fag-kernel", description="Flash attention and its gradient: host tiling and CPU kernels."
    )
    parser.add_argument("--version", action="version", version=f"fag-kernel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    planner = commands.add_parser(
        "plan",
        help="how a device would run the gradient of a problem, and why",
        epilog="example: fag-kernel plan --heads 32/8 --seqlen 4096 --mask causal --target Ascend950PR_9599",
    )
    add_problem_options(planner, is_required=True)
    group = planner.add_argument_group("plan")
    group.add_argument(
        "--target", default=DEFAULT_TARGET, metavar="NAME", help=f"SoC name or cpu; default {DEFAULT_TARGET}"
    )
    group.add_argument("--split", choices=("cann", "balanced"), help="default: that of the target")
    group.add_argument(
        "--softmax-scale", type=float, metavar="X", help="factor of the scores; default 1/sqrt(D)"
    )
    group.add_argument(
        "--libapi-reserve-bytes",
        type=int,
        default=0,
        metavar="N",
        help="workspace that CANN's libapi keeps; default 0",
    )
    planner.add_argument("--json", action="store_true", help="one JSON object instead of text")
    planner.set_defaults(run=run_plan)

    informer = commands.add_parser("info", help="versions, instruction sets, what is shipped")
    informer.add_argument("--json", action="store_true", help="one JSON object instead of text")
    informer.set_defaults(run=run_info)
    cli.add_commands(commands, informer)
    return parser


def run_plan(arguments: argparse.Namespace) -> None:
    """Print the plan of the problem that the options describe."""
    tiling = plan(
        make_problem(arguments),
        arguments.target,
        softmax_scale=arguments.softmax_scale,
        split=arguments.split,
        libapi_reserve_bytes=arguments.libapi_reserve_bytes,
    )
    print(json.dumps(plan_values(tiling)) if arguments.json else "\n".join(plan_lines(tiling)))


def run_info(arguments: argparse.Namespace) -> None:
    """Print what this installation is."""
    if cli.run_info(arguments):
        return
    print(json.dumps(info_values()) if arguments.json else "\n".join(info_lines()))


if __name__ == "__main__":
    sys.exit(main())
