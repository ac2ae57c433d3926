"""What a second thread brings: to us, and to a matrix product, which tells what the machine has to give."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from cases import Case
from contenders import Inputs
from machine import Gemm
from measure import OURS, Record
from timing import ratios, take_turns

#: A turn lasts this long, in several calls if need be: the second thread sleeps while the first works alone,
#: and a program that calls us again and again does not wait for it to wake up in each call.
_TURN_SECONDS = 0.02
#: Small enough that its turns leave the time to ours.
_GEMM_SIZE = 1024
#: What the product gains in a round in which the machine has two cores to give: hypervisors take one away for
#: a while, or run both threads on one. Our gain in those rounds stands beside that in all, if there are some.
_GIVEN = 1.75
_FEWEST_GIVEN = 7


def measure_threads(cases: Sequence[Case], seconds: float, rounds: int) -> list[Record]:
    """Speed of two threads over one, in turns; one record for a case and direction."""
    before = torch.get_num_threads()
    try:
        return [record for case in cases for record in _measure(case, seconds, rounds)]
    finally:
        torch.set_num_threads(before)


def _measure(case: Case, seconds: float, rounds: int) -> list[Record]:
    job = OURS.jobs(case, Inputs.of(case))
    gemm = Gemm(case.dtype, _GEMM_SIZE)
    records = []
    for direction in ("forward", "backward"):
        call: Callable[[], object] = getattr(job, direction)
        results = {}
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results[threads] = call()
            gemm()
        calls = _calls_in_a_turn(call)
        times = take_turns(
            {f"{name}{threads}": _with(threads, run, count)
             for name, run, count in (("ours", call, calls), ("gemm", gemm, 1)) for threads in (1, 2)},
            seconds / 2, rounds,
        )  # fmt: skip
        every = range(len(times["gemm1"]))
        given = [i for i in every if times["gemm1"][i] >= _GIVEN * times["gemm2"][i]]
        records.append(
            {
                "case": case.name,
                "direction": direction,
                "rounds": len(every),
                "scaling": _spread(times, "ours", every),
                "gemm_scaling": _spread(times, "gemm", every),
                "rounds_given": len(given),
                "scaling_given": _spread(times, "ours", given) if len(given) >= _FEWEST_GIVEN else None,
                "scaling_of_least": round(min(times["ours1"]) / min(times["ours2"]), 3),
                "is_same_bits": _same_bits(results[1], results[2]),
            }
        )
    return records


def _calls_in_a_turn(call: Callable[[], object]) -> int:
    begin = time.perf_counter()
    call()
    return math.ceil(_TURN_SECONDS / (time.perf_counter() - begin))


def _with(threads: int, run: Callable[[], object], count: int) -> Callable[[], object]:
    def turn() -> None:
        torch.set_num_threads(threads)
        for _ in range(count):
            run()

    return turn


def _spread(times: dict[str, list[float]], name: str, rounds: Sequence[int]) -> list[float]:
    one, two = ([times[f"{name}{threads}"][i] for i in rounds] for threads in (1, 2))
    return [round(v, 3) for v in ratios(one, two)]


def _same_bits(a: object, b: object) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return all(map(_same_bits, a, b))
    assert isinstance(a, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
