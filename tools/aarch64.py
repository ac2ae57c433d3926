"""Builds fag-kernel for aarch64 on another machine and tests it under emulation; speed is not measured.

    python tools/aarch64.py [--only RUN] [options of pytest]
    python tools/aarch64.py --run SCRIPT [arguments]        # FAG_EMULATED_CPU: a CPU that qemu knows

tox's environment aarch64 calls it, in the environment that holds the built wheels and the build tools.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import emulated
from aarch64_root import FOLDER, LOG, PYTHON, check_programs, make_system, pip_install
from console import Failure, run_logged
from wheels import DIST, ROOT

WHEELS = FOLDER / "wheels"
BUILD = FOLDER / "build"
KERNEL_TESTS = "packages/fag-kernel/tests"
TORCH_TESTS = "tests/integration"
#: The emulator owns the address space and does not heed the limit that this test sets.
NOT_EMULATED = (
    f"{KERNEL_TESTS}/test_cpu_isolation.py::"
    "test_running_out_of_memory_is_an_exception_and_leaves_the_kernels_usable"
)


@dataclass(frozen=True)
class Run:
    """Tests on one emulated CPU."""

    cpu: str
    tests: tuple[str, ...]


#: max has all that qemu knows, FEAT_BF16 too; a Cortex-A57 is a plain ARMv8.0-A.
RUNS = {
    "levels": Run("max", ("tests/aarch64",)),
    "levels-a57": Run("cortex-a57", ("tests/aarch64",)),
    "kernel": Run("max", (KERNEL_TESTS,)),
    "kernel-a57": Run(
        "cortex-a57",
        (f"{KERNEL_TESTS}/test_cpu_grid.py::test_widths", f"{KERNEL_TESTS}/test_cpu_nonfinite.py"),
    ),
    "metadata": Run("max", ("packages/fag-metadata/tests",)),
    "torch": Run(
        "max",
        (
            f"{TORCH_TESTS}/test_determinism.py::test_every_level_is_dispatched_and_within_bound",
            f"{TORCH_TESTS}/test_newcomer.py::test_python_blocks_of_a_page_run_one_after_the_other",
        ),
    ),
}


def build_wheel() -> Path:
    """Cross-compiles fag-kernel into a wheel. Objects are kept: a change in one file compiles that file."""
    env = {
        **os.environ,
        "CMAKE_TOOLCHAIN_FILE": str(ROOT / "tools" / "aarch64.cmake"),
        "SKBUILD_BUILD_DIR": str(BUILD),
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
    }
    env.pop("CXX", None)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command = [*pip, "--wheel-dir", str(WHEELS), str(ROOT / "packages" / "fag-kernel")]
    run_logged("building fag-kernel for aarch64 (C++, a few minutes)", command, LOG, env)
    (wheel,) = WHEELS.glob("fag_kernel-*-linux_aarch64.whl")
    return wheel


def environment(cpu: str) -> dict[str, str]:
    """The variables of an emulated process."""
    return {
        **os.environ,
        "FAG_EMULATED_CPU": cpu,
        "FAG_OBJECTS": str(BUILD),
        "CXX": "aarch64-linux-gnu-g++",
        "PYTHONDONTWRITEBYTECODE": "1",
        # What the caller has installed is for this machine.
        "PYTHONPATH": "",
    }


def main(argv: list[str]) -> int:
    """Builds, installs and runs; returns the first exit status that is not 0."""
    wish = emulated.parse(__doc__, RUNS, argv)
    check_programs()
    make_system()
    wheel = build_wheel()
    pip_install(
        "the three wheels",
        [str(wheel), "fag-metadata", "fag-torch"],
        ["--no-deps", "--no-index", "--find-links", str(DIST), "--force-reinstall"],
    )
    if wish.script:
        cpu = os.environ.get("FAG_EMULATED_CPU", "max")
        return emulated.run_script(PYTHON, wish.script, environment(cpu))
    status = 0
    for name in wish.runs:
        run = RUNS[name]
        words = ("--deselect", NOT_EMULATED, *run.tests, *wish.options)
        title = f"aarch64: {name}, on an emulated {run.cpu}"
        code = emulated.run_tests(title, PYTHON, words, environment(run.cpu))
        status = status or code
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Failure as failure:
        sys.exit(f"\naarch64: {failure}")
