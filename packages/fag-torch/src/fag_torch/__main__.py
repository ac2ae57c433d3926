"""The command `fag-torch`: doctor and demo."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from importlib.util import find_spec


def main(argv: list[str] | None = None) -> int:
    """Runs `fag-torch`.

    Args:
        argv: Arguments without the program name; None takes those of the process.

    Returns:
        Exit status.
    """
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="fag-torch", description="Flash attention and its gradient for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what is installed, what fits, which route a call takes")
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of text")
    if find_spec("fag_torch.demo") is not None:
        commands.add_parser("demo", help="train a small language model on this machine", add_help=False)
        if arguments[:1] == ["demo"]:  # the demo has its own options
            return int(import_module("fag_torch.demo.main").main(arguments[1:]) or 0)
    options = parser.parse_args(arguments)
    from fag_torch.diagnosis import as_text
    from fag_torch.diagnosis import doctor as examine

    report = examine()
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
