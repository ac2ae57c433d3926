"""Compiles the Ascend 950 kernels with the vendor's compiler and runs their sources in Triton's interpreter.

    python tools/ascend950.py [--skip-without-toolchain] [options of `fag-kernel build`]

tox's environments ascend950 and ascend950-sample call it; they hold the toolchain and the built wheels.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "packages" / "fag-kernel" / "tests"


def main(options: list[str]) -> int:
    """Runs every check; returns the exit status of the first that fails."""
    may_skip = "--skip-without-toolchain" in options
    options = [option for option in options if option != "--skip-without-toolchain"]
    if may_skip and importlib.util.find_spec("triton") is None:
        print("ascend950: skipped, triton-ascend 3.2.0 has no wheel for this Python; with 3.11 it runs")
        return 0
    python = [sys.executable, "-m"]
    # The interpreter replaces the compiler, so the two kinds of tests have a process each.
    interpreter = {"TRITON_INTERPRET": "1"}
    checks: list[tuple[list[str], dict[str, str]]] = [
        ([*python, "fag_kernel", "verify"], {}),
        ([*python, "fag_kernel", "build", "--soc", "ascend950", "--compare", "--jobs", "2", *options], {}),
        ([*python, "pytest", str(TESTS / "test_ascend950_compile.py")], {}),
        ([*python, "pytest", str(TESTS / "test_ascend950_numerics.py")], interpreter),
    ]
    for command, extra in checks:
        print("$", *(f"{name}={value}" for name, value in extra.items()), *command[2:], flush=True)
        status = subprocess.run(command, env={**os.environ, **extra}, check=False).returncode
        if status != 0:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
