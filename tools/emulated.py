"""The command line that the tools for emulated CPUs share: tests by name, or a script instead."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from console import say
from wheels import ROOT

PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", "auto")


@dataclass(frozen=True)
class Wish:
    """What was asked for.

    Attributes:
        runs: Names of the test runs, in order.
        script: A script and its arguments, to run instead of tests; or nothing.
        options: What is left, for pytest.
    """

    runs: tuple[str, ...]
    script: tuple[str, ...]
    options: tuple[str, ...]


def parse(description: str | None, runs: Collection[str], argv: Sequence[str]) -> Wish:
    """Reads `[--only RUN] [options of pytest]` or `--run SCRIPT [arguments]`.

    Args:
        description: The tool's docstring.
        runs: Names of all runs.
        argv: Words behind the tool's name.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=runs, help="one run instead of all")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help="a script instead of tests")
    args, options = parser.parse_known_args(argv)
    return Wish((args.only,) if args.only else tuple(runs), tuple(args.run or ()), tuple(options))


def run_script(python: str | Path, script: Sequence[str], env: Mapping[str, str]) -> int:
    """Runs a script with an interpreter and returns its exit status."""
    return subprocess.run([str(python), *script], env=env, check=False).returncode


def run_tests(title: str, python: str | Path, words: Iterable[str], env: Mapping[str, str]) -> int:
    """Runs tests in the checkout and returns pytest's exit status."""
    say(f"\n{title}")
    return subprocess.run([str(python), *PYTEST, *words], cwd=ROOT, env=env, check=False).returncode
