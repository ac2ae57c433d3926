"""The command `fag-torch`: doctor and demo."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from fag_metadata.cli_arguments import add_problem_options, has_problem, make_problem


def main(argv: list[str] | None = None) -> int:
    """Runs `fag-torch`.

    Args:
        argv: Arguments without the program name; None takes those of the process.

    Returns:
        Exit status: 0, or 2 for arguments that are refused.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["demo"]:  # it has its own options
        from fag_torch.demo.main import main as demo

        return demo(arguments[1:])
    options = _parser().parse_args(arguments)
    from fag_torch.diagnosis import as_text, doctor

    try:
        problem = make_problem(options) if has_problem(options) else None
        report = doctor(problem, **_call_options(options))
    except ValueError as refusal:
        print(refusal, file=sys.stderr)
        return 2
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fag-torch", description="Flash attention and its gradient for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="what is installed, what fits, which route a call takes",
        epilog="example: fag-torch doctor --heads 32/8 --seqlen 4096 --mask causal",
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of text")
    add_problem_options(doctor, is_required=False)
    group = doctor.add_argument_group("call", "what else decides about the route of the problem on an NPU")
    group.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="default bfloat16"
    )
    group.add_argument("--sinks", action="store_true", help="with sinks")
    group.add_argument("--dlse", action="store_true", help="with a gradient of the lse")
    group.add_argument(
        "--deterministic", action="store_true", help="under torch.use_deterministic_algorithms(True)"
    )
    group.add_argument("--target", metavar="SOC", help="SoC name; default that of this machine")
    commands.add_parser("demo", help="train a small language model on this machine", add_help=False)
    return parser


def _call_options(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "dtype": options.dtype,
        "has_sinks": options.sinks,
        "has_dlse": options.dlse,
        "is_deterministic": options.deterministic,
        "target": options.target,
    }


if __name__ == "__main__":
    sys.exit(main())
