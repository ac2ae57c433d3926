"""What the numbers were measured on, and what its matrix products can do."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

import torch
from torch import Tensor

import fag_kernel.abi
import fag_torch


def describe() -> dict[str, object]:
    """CPU, threads, versions and commit, for the head of a report."""
    return {
        "cpu": _cpu_name(),
        "cpu_level": fag_kernel.abi.cpu_level(),
        "torch_level": torch.backends.cpu.get_cpu_capability(),
        "logical_cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fag_torch": fag_torch.__version__,
        "fag_kernel": fag_kernel.__version__,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _cpu_fields(*names: str) -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(names):
            return line.split(":", 1)[1].strip()
    return ""


def _cpu_name() -> str:
    return _cpu_fields("model name", "Model") or platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def gemm_dtype(dtype: str) -> str:
    """The type of the matrix product that a case is held against.

    Without instructions for it, PyTorch's 16-bit product is far slower than the float32 one (bfloat16 some
    hundred times): no measure of the machine. float16 always counts as float32, which it is computed in.
    """
    has_bfloat16 = {"avx512_bf16", "amx_bf16", "bf16"} & set(_cpu_fields("flags", "Features").split())
    is_capped = "ATEN_CPU_CAPABILITY" in os.environ
    return "bfloat16" if dtype == "bfloat16" and has_bfloat16 and not is_capped else "float32"


class Gemm:
    """A square matrix product of PyTorch: what this machine can do at most, measured in the same rounds."""

    def __init__(self, dtype: str, size: int = 2048) -> None:
        self.dtype = gemm_dtype(dtype)
        self.flops = 2 * size**3
        self._a, self._b = torch.randn(2, size, size).to(getattr(torch, self.dtype))

    def __call__(self) -> Tensor:
        """Runs it once."""
        return self._a @ self._b
