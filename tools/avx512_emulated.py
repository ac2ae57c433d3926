"""Runs fag-kernel's AVX-512 and AMX levels on a CPU that lacks them, to test them; speed is not measured.

    python tools/avx512_emulated.py [--only RUN] [options of pytest]
    python tools/avx512_emulated.py --run SCRIPT [arguments]

The intrinsics are SIMDe's and ours (tests/avx512_emulated). tox's environment avx512-emulated calls it, in
the environment that holds the built wheels and the build tools.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
from pathlib import Path

import debian
import emulated
from console import Failure, run_logged, say
from environments import CACHE
from wheels import ROOT

FOLDER = CACHE / "avx512-emulated"
LOG = FOLDER / "log.txt"
BUILD = FOLDER / "build"
WHEELS = FOLDER / "wheels"
#: Goes before the environment's site-packages, which stay as they are.
INSTALLED = FOLDER / "installed"
SIMDE = FOLDER / "simde"
SIMDE_HEADER = SIMDE / "usr" / "include" / "simde" / "x86" / "avx512.h"
TESTS = "tests/avx512_emulated"
HEADER = ROOT / TESTS / "avx512_emulated.hpp"

KERNEL_TESTS = "packages/fag-kernel/tests"
TORCH_TESTS = "tests/integration"
#: All but isolation, which is about the object files and the choice of levels that users get.
CPU_TESTS = ("determinism", "grid", "memory", "metadata", "nonfinite", "threads")
#: Tests of one level say its name; the unit tests run those of the levels that this machine has.
ONLY_EMULATED = ("-k", "not portable and not avx2")
RUNS = {
    "levels": (TESTS,),
    "kernel": (*(f"{KERNEL_TESTS}/test_cpu_{name}.py" for name in CPU_TESTS), *ONLY_EMULATED),
    "torch": (
        f"{TORCH_TESTS}/test_determinism.py::test_every_level_is_dispatched_and_within_bound",
        f"{TORCH_TESTS}/test_memory_safety.py::test_arrays_between_forbidden_pages",
        *ONLY_EMULATED,
    ),
}


def reason_to_skip() -> str | None:
    """Why nothing is to be emulated here, in words; None where it is."""
    flags = Path("/proc/cpuinfo").read_text().split() if platform.machine() == "x86_64" else []
    if "amx_bf16" in flags:
        return "this CPU has AVX-512 and AMX with bfloat16 itself: unit-kernel runs these levels on it"
    if "avx2" not in flags:
        return "the emulation is made of AVX2, which this CPU lacks"
    return None


def fetch_simde() -> None:
    """Unpacks SIMDe, headers alone, unless it lies there already.

    Raises:
        Failure: It cannot be had; the message shows what apt said.
    """
    if SIMDE_HEADER.exists():
        return
    remedy = "The machine's apt sources must be those of Debian or Ubuntu (universe), and within reach."
    debian.unpack(["libsimde-dev"], "amd64", SIMDE, LOG, remedy)


def install_emulated_kernel() -> None:
    """Builds fag-kernel with the emulation and unpacks it apart. Objects are kept from build to build.

    Raises:
        Failure: The build's message.
    """
    options = [*shlex.split(os.environ.get("CMAKE_ARGS", "")), f"-DFAG_AVX512_EMULATION={HEADER}"]
    env = {
        **os.environ,
        "CMAKE_ARGS": shlex.join(options),
        "CXXFLAGS": f"-isystem {SIMDE / 'usr' / 'include'} {os.environ.get('CXXFLAGS', '')}",
        "SKBUILD_BUILD_DIR": str(BUILD),
    }
    shutil.rmtree(WHEELS, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(WHEELS)]
    kernel = str(ROOT / "packages" / "fag-kernel")
    run_logged("building fag-kernel with AVX-512 and AMX emulated (C++, minutes)", [*build, kernel], LOG, env)
    (wheel,) = WHEELS.glob("fag_kernel-*.whl")
    install = [*pip, "install", "--no-deps", "--no-index", "--upgrade", "--target", str(INSTALLED)]
    run_logged("installing it apart", [*install, str(wheel)], LOG, os.environ)


def environment() -> dict[str, str]:
    """The variables of a process with the emulated levels."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(INSTALLED), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "FAG_SIMDE": str(SIMDE / "usr" / "include"),
    }


def main(argv: list[str]) -> int:
    """Builds, installs and runs; returns the first exit status that is not 0."""
    wish = emulated.parse(__doc__, RUNS, argv)
    reason = reason_to_skip()
    if reason is None:
        try:
            fetch_simde()
        except Failure as failure:
            reason = f"SIMDe, whose headers emulate AVX-512, cannot be had: {failure}"
    if reason is not None:
        say(f"avx512-emulated: skipped, {reason}")
        return 0
    install_emulated_kernel()
    if wish.script:
        return emulated.run_script(sys.executable, wish.script, environment())
    status = 0
    for name in wish.runs:
        words = (*RUNS[name], *wish.options)
        code = emulated.run_tests(f"avx512-emulated: {name}", sys.executable, words, environment())
        status = status or code
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Failure as failure:
        sys.exit(f"\navx512-emulated: {failure}")
