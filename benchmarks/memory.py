"""How much memory a backward takes beyond its inputs, at its peak: each measurement is a process of its own.

python benchmarks/memory.py CASE CONTENDER THREADS     what measure_memory runs; prints MiB
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from cases import BF16, FP32, Case, ragged
from contenders import Inputs, TorchFlash
from measure import OURS, Record
from ragged import PerSequence

MIB = 1 << 20
_SCRATCH_OF_A_THREAD = 8 * MIB
_CONTENDERS = {contender.name: contender for contender in (OURS, TorchFlash(), PerSequence())}


@dataclass(frozen=True)
class MemoryCase:
    """A problem, and which of its heads are cut between threads.

    Attributes:
        case: The problem.
        peer: Name of whom it is compared with.
        cut_tokens: Query tokens of the query heads that several threads add up, in float32 rows of dQ: the
            last kv head of each thread, and heads too long for one. Others need none.
    """

    case: Case
    peer: str
    cut_tokens: int = 0

    @property
    def output_bytes(self) -> int:
        """dq, dk and dv."""
        c = self.case
        elements = c.tokens * (c.n1 * c.d + c.n2 * (c.d + c.dv))
        return elements * (4 if c.dtype == FP32 else 2)

    def bound(self, threads: int) -> int:
        """Bytes that a backward may take."""
        return self.output_bytes + 4 * self.cut_tokens * self.case.d + threads * _SCRATCH_OF_A_THREAD


MEMORY_CASES = (
    MemoryCase(Case("memory", BF16, 1, 1, 1, 8192, 64, is_causal=True, is_quick=True), "flash", 8192),
    MemoryCase(Case("memory", BF16, 1, 8, 8, 2048, 128), "flash", 2 * 2048),
    MemoryCase(Case("memory", FP32, 1, 8, 2, 2048, 128, is_causal=True), "flash", 8 * 2048),
    MemoryCase(Case("memory", BF16, 1, 2, 2, 16384, 128, is_causal=True), "flash", 2 * 16384),
    MemoryCase(Case("memory", BF16, 1, 8, 2, 8192, 64, is_causal=True), "flash", 8 * 8192),
    MemoryCase(ragged("ones", BF16, [4096, *[1] * 4096], 1, 1, is_causal=True), "loop", 4096),
)


def measure_memory(cases: Sequence[MemoryCase], threads: int) -> list[Record]:
    """Ours, the peer's and the bound, in MiB; one record for a case."""
    return [
        {
            "case": memory.case.name,
            "peer": memory.peer,
            "mib": {
                name: _in_a_process(memory.case.name, name, threads) for name in (OURS.name, memory.peer)
            },
            "outputs_mib": round(memory.output_bytes / MIB, 2),
            "bound_mib": round(memory.bound(threads) / MIB, 2),
        }
        for memory in cases
    ]


def _in_a_process(case: str, contender: str, threads: int) -> float:
    command = [sys.executable, __file__, case, contender, str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout))


def _growth(case: Case, contender: str) -> float:
    """Peak of the resident set during one backward, above what it was before, in MiB."""
    # A small call first: code, stacks and pools that exist once per process are not this call's memory.
    small = replace(case, s=8, b=1, lengths=(8,) if case.lengths else ())
    _CONTENDERS[contender].jobs(small, Inputs.of(small)).backward()
    backward = _CONTENDERS[contender].jobs(case, Inputs.of(case)).backward
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status_kib("VmRSS")
    results = backward()
    peak = _status_kib("VmHWM")
    del results
    return round((peak - before) / 1024, 2)


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise LookupError(field)


def main(name: str, contender: str, threads: str) -> None:
    """Measures one case in this process."""
    torch.set_num_threads(int(threads))
    case = next(memory.case for memory in MEMORY_CASES if memory.case.name == name)
    print(json.dumps(_growth(case, contender)))


if __name__ == "__main__":
    main(*sys.argv[1:])
