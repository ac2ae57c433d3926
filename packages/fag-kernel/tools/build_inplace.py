"""Builds fag_kernel._native next to the Python sources, for development.

    python tools/build_inplace.py --build-dir DIR [--jobs 2] [--sanitize KINDS] [--output DIR]

Incremental; several processes may call it with the same build folder, they take turns. Needs CMake, a C++20
compiler and pybind11 in the environment of the calling Python. A wheel does not use this file.

A module with sanitizers (`address,undefined` or `thread`) needs their library and the C++ one from the start:

    LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so.6)" pytest ...

Tests that limit or measure memory fail under `address`, those that count threads under `thread`. An OpenMP
runtime is not instrumented: FAG_CPU_OPENMP=0 leaves its threads alone, whose work would look like races.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11

PACKAGE = Path(__file__).resolve().parent.parent


def main() -> None:
    """Parse the arguments, configure, build."""
    parser = argparse.ArgumentParser(description="Build fag_kernel._native in place.")
    parser.add_argument("--build-dir", type=Path, default=PACKAGE / "build" / "inplace")
    parser.add_argument(
        "--output", type=Path, default=PACKAGE / "src" / "fag_kernel", help="folder of the module"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sanitize", default="", help="sanitizers, as -fsanitize takes them")
    args = parser.parse_args()

    args.build_dir.mkdir(parents=True, exist_ok=True)
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake") or "cmake"
    with open(args.build_dir / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        configure = [
            cmake, "-S", str(PACKAGE), "-B", str(args.build_dir), "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DFAG_OUTPUT_DIR={args.output.resolve()}", f"-DFAG_SANITIZE={args.sanitize}",
        ]  # fmt: skip
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([cmake, "--build", str(args.build_dir), "--parallel", str(args.jobs)], check=True)


if __name__ == "__main__":
    main()
