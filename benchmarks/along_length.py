"""Whether the cost of a window follows the window: time per token from short to long sequences."""

from __future__ import annotations

import statistics
from dataclasses import replace

from cases import CASES, WINDOW_LENGTHS
from contenders import Inputs
from measure import OURS, Record
from timing import ratios, take_turns


def measure_window(seconds: float, rounds: int) -> list[Record]:
    """Our time per token of one window at each length, in turns; one record for a length and direction."""
    pattern = next(case for case in CASES if case.group == "window")
    cases = [replace(pattern, s=s) for s in WINDOW_LENGTHS]
    jobs = [OURS.jobs(case, Inputs.of(case)) for case in cases]
    records = []
    for direction in ("forward", "backward"):
        calls = {case.name: getattr(job, direction) for case, job in zip(cases, jobs, strict=True)}
        for call in calls.values():
            call()
        times = take_turns(calls, seconds / 2, rounds)
        per_token = {case.s: [t / case.tokens for t in times[case.name]] for case in cases}
        records += [
            {
                "case": case.name,
                "direction": direction,
                "s": case.s,
                "rounds": len(per_token[case.s]),
                "nanoseconds_per_token": round(1e9 * statistics.median(per_token[case.s]), 1),
                "to_shortest": [round(v, 4) for v in ratios(per_token[case.s], per_token[WINDOW_LENGTHS[0]])],
            }
            for case in cases
        ]
    return records
