"""What a second thread brings: to us, and to a matrix product, which tells what the machine has to give."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from cases import Case
from contenders import Inputs
from machine import Gemm
from measure import OURS, Record
from timing import ratios, take_turns


def measure_threads(cases: Sequence[Case], seconds: float, rounds: int) -> list[Record]:
    """Speed of two threads over one, in turns; one record for a case and direction."""
    before = torch.get_num_threads()
    try:
        return [record for case in cases for record in _measure(case, seconds, rounds)]
    finally:
        torch.set_num_threads(before)


def _measure(case: Case, seconds: float, rounds: int) -> list[Record]:
    job = OURS.jobs(case, Inputs.of(case))
    gemm = Gemm(case.dtype)
    records = []
    for direction in ("forward", "backward"):
        call: Callable[[], object] = getattr(job, direction)
        results = {}
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results[threads] = call()
            gemm()
        times = take_turns(
            {f"{name}{threads}": _with(threads, run)
             for name, run in (("ours", call), ("gemm", gemm)) for threads in (1, 2)},
            seconds / 2, rounds,
        )  # fmt: skip
        records.append(
            {
                "case": case.name,
                "direction": direction,
                "rounds": len(times["ours1"]),
                "scaling": [round(v, 3) for v in ratios(times["ours1"], times["ours2"])],
                "gemm_scaling": [round(v, 3) for v in ratios(times["gemm1"], times["gemm2"])],
                "is_same_bits": _same_bits(results[1], results[2]),
            }
        )
    return records


def _with(threads: int, run: Callable[[], object]) -> Callable[[], object]:
    def call() -> object:
        torch.set_num_threads(threads)
        return run()

    return call


def _same_bits(a: object, b: object) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return all(map(_same_bits, a, b))
    assert isinstance(a, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
