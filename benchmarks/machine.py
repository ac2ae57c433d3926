"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

import fag_kernel.abi
import fag_torch


def describe() -> dict[str, object]:
    """CPU, threads, versions and commit, for the head of a report."""
    return {
        "cpu": _cpu_name(),
        "cpu_level": fag_kernel.abi.cpu_level(),
        "logical_cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fag_torch": fag_torch.__version__,
        "fag_kernel": fag_kernel.__version__,
        "commit": _commit(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
