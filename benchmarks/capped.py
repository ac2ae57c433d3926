"""The comparison once more in a process of its own, with both sides limited to AVX2.

python benchmarks/capped.py SECONDS ROUNDS THREADS     what measure_capped runs; a record a line
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import torch
from cases import capped_cases
from contenders import TorchFlash, TorchMath
from machine import describe
from measure import Record, measure

LIMITS = {"FAG_CPU_LEVEL": "avx2", "ATEN_CPU_CAPABILITY": "avx2"}


def measure_capped(seconds: float, rounds: int, threads: int) -> Iterator[Record]:
    """Records of `measure`, as they come, each with the levels that both sides said they use."""
    command = [sys.executable, __file__, str(seconds), str(rounds), str(threads)]
    with subprocess.Popen(command, env=os.environ | LIMITS, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def main(seconds: str, rounds: str, threads: str) -> None:
    """Measures in this process."""
    torch.set_num_threads(int(threads))
    machine = describe()
    levels = {name: machine[name] for name in ("cpu_level", "torch_level")}
    for case in capped_cases():
        for record in measure(case, float(seconds), int(rounds), (TorchFlash(), TorchMath())):
            print(json.dumps(record | levels), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
