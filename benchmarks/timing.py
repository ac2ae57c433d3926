"""Fair timing on a machine that is not quiet: everything takes turns, and ratios are formed within a turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """Quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least two values."""
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


def take_turns(
    jobs: Mapping[str, Callable[[], object]], seconds: float, rounds: int, calls: int = 1
) -> dict[str, list[float]]:
    """Times every job once per round, in alternating order, for about `seconds` and at least `rounds` rounds.

    Args:
        jobs: What to time; whoever calls has run each before.
        seconds: Time after which no round begins.
        rounds: Fewest rounds, however long they take.
        calls: Calls of a job within its turn, for jobs of microseconds.

    Returns:
        For each job its times of one call in seconds; the i-th times of all jobs belong to one round.
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    order = list(jobs.items())
    begin = time.perf_counter()
    while min(map(len, times.values())) < rounds or time.perf_counter() - begin < seconds:
        for name, job in order:
            start = time.perf_counter()
            for _ in range(calls):
                job()
            times[name].append((time.perf_counter() - start) / calls)
        order.reverse()
    return times


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Spread of the ratio within each round."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


def differences(minuend: Sequence[float], subtrahend: Sequence[float]) -> Spread:
    """Spread of the difference within each round."""
    return Spread.of([a - b for a, b in zip(minuend, subtrahend, strict=True)])
