"""Runs tests, or any script, with the genuine torch_npu on the stand-in for the CANN runtime.

    python tools/npu.py [--skip-without-packages] [options of pytest]
    python tools/npu.py --run SCRIPT [arguments]

tox's environment npu calls it; it holds torch_npu, triton-ascend and the built wheels. The loader reads
LD_LIBRARY_PATH when a process starts, so the stand-in is built here and used by a new process.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = ROOT / "tests" / "npu_runtime"
#: What is built lies in the environment, so that removing it removes all.
CANN = Path(sys.prefix) / "cann"


def environment() -> dict[str, str]:
    """The variables of a process on the stand-in."""
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(CANN),
        "ASCEND_OPP_PATH": str(CANN / "opp"),
        # Without this `import torch` alone loads torch_npu, and nobody could test that we do not.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TRITON_INTERPRET": "1",
        "FAG_HIVMC": str(CANN / "bin" / "hivmc-a5"),
        "FAG_CACHE_DIR": str(CANN / "objects-of-kernels"),
    }


def main(options: list[str]) -> int:
    """Builds the stand-in and runs the command; returns its exit status."""
    may_skip = "--skip-without-packages" in options
    options = [option for option in options if option != "--skip-without-packages"]
    if may_skip and importlib.util.find_spec("torch_npu") is None:
        print("npu: skipped, triton-ascend 3.2.0 has no wheel for this Python; with 3.11 it runs")
        return 0
    build = [sys.executable, str(RUNTIME / "build.py"), "--out", str(CANN)]
    status = subprocess.run(build, check=False).returncode
    if status != 0:
        return status
    if options[:1] == ["--run"]:
        command = [sys.executable, *options[1:]]
    else:
        command = [sys.executable, "-m", "pytest", str(ROOT / "tests" / "npu"), *options]
    return subprocess.run(command, env=environment(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
