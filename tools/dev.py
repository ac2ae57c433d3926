"""Everything a developer does. Standard library only; needs Linux, Python 3.10 or newer and a C++ compiler.

    python3 tools/dev.py demo                 install into .venv and train a small language model
    python3 tools/dev.py test                 the whole test matrix (tox), as CI runs it
    python3 tools/dev.py run -- COMMAND ...   run anything inside the installed environment
    python3 tools/dev.py setup | bench | lint | clean

Nothing is written outside the checkout but pip's own cache.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - said before an import that an older Python does not understand
    sys.exit(
        "tools/dev.py needs Python 3.10 or newer, this is {}.{}.{} ({}). Call it with a newer one, for "
        "example: python3.11 tools/dev.py demo".format(*sys.version_info[:3], sys.executable)
    )

import argparse
import os
import shutil
import time

from console import Failure, say, seconds
from environments import CACHE, TESTS, USER, prepare, prepare_tools, run_in
from wheels import DIST, ROOT


def setup(rest: list[str]) -> int:
    start = time.monotonic()
    prepare(USER)
    say(f"ready in {seconds(time.monotonic() - start)}: python3 tools/dev.py run -- python ...")
    return 0


def demo(rest: list[str]) -> int:
    prepare(USER)
    return run_in(USER, ["python", "-m", "fag_torch", "demo", *rest])


def test(rest: list[str]) -> int:
    prepare_tools(USER)
    # The layouts' environments are named after the interpreter, as tox wants it: here the running one.
    os.environ["FAG_PY"] = f"py{sys.version_info.major}{sys.version_info.minor}"
    return run_in(USER, ["tox", "run", *rest])


def run(rest: list[str]) -> int:
    env = USER
    if rest[:1] == ["--tests"]:
        env, rest = TESTS, rest[1:]
    if rest[:1] == ["--"]:
        rest = rest[1:]
    if not rest:
        raise Failure(
            "run: which command? For example: python3 tools/dev.py run -- python -m fag_torch doctor"
        )
    prepare(env)
    return run_in(env, rest)


def bench(rest: list[str]) -> int:
    prepare(USER)
    return run_in(USER, ["python", str(ROOT / "benchmarks" / "run.py"), *rest])


def lint(rest: list[str]) -> int:
    prepare_tools(USER)
    return run_in(USER, ["tox", "run", "-e", "lint", *rest])


def clean(rest: list[str]) -> int:
    for path in (
        USER.path,
        ROOT / ".tox",
        DIST,
        ROOT / "build",
        CACHE,
        ROOT / ".mypy_cache",
        ROOT / ".ruff_cache",
    ):
        if path.exists():
            say(f"removing {path.relative_to(ROOT)}/")
            shutil.rmtree(path)
    return 0


COMMANDS = {
    "setup": (setup, "make .venv, build the three wheels and install them; instant when nothing changed"),
    "demo": (demo, "setup, then train the demo; options after it go to the demo (--steps, --seed, --out)"),
    "test": (test, "run tox's matrix; options after it go to tox (-e py311-bsnd, for example)"),
    "run": (
        run,
        "run a command in the installed environment (--tests: the tests' one): run -- python -c ...",
    ),
    "bench": (
        bench,
        "compare with PyTorch's kernels; options after it go to benchmarks/run.py (--quick)",
    ),
    "lint": (lint, "ruff and mypy, as in the matrix"),
    "clean": (clean, "remove every environment, wheel and cache that was made here"),
}


def main(argv: list[str]) -> int:
    """Parses the command line and runs one command; returns its exit status."""
    width = max(map(len, COMMANDS)) + 2
    parser = argparse.ArgumentParser(
        prog="dev.py",
        description="Build, try, test and measure FAG.",
        epilog="\n".join(["commands:", *(f"  {name:{width}}{text}" for name, (_, text) in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...")
    args = parser.parse_args(argv)
    if args.rest and args.command in ("setup", "clean"):
        parser.error(f"{args.command} takes no arguments, got {' '.join(args.rest)}")
    return COMMANDS[args.command][0](args.rest)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Failure as failure:
        sys.exit(f"\ndev.py: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)
