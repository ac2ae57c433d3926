"""The command `fag-torch`: doctor and demo."""

from __future__ import annotations

import argparse
import json
import sys


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
    commands.add_parser("demo", help="train a small language model on this machine", add_help=False)
    if arguments[:1] == ["demo"]:  # it has its own options
        from fag_torch.demo.main import main as demo

        return demo(arguments[1:])
    options = parser.parse_args(arguments)
    from fag_torch.diagnosis import as_text
    from fag_torch.diagnosis import doctor as examine

    report = examine()
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
