"""Fair timing on a machine that is not quiet: everything takes turns, and ratios are formed within a turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Of at least two values."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high)


def take_turns(
    jobs: Mapping[str, Callable[[], object]], seconds: float, rounds: int
) -> dict[str, list[float]]:
    """Times every job once per round, in alternating order, for about `seconds` and at least `rounds` rounds.

    Args:
        jobs: What to time; each runs once before, untimed.
        seconds: Time after which no round begins.
        rounds: Fewest rounds.

    Returns:
        For each job its times in seconds; the i-th times of all jobs belong to one round.
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        job()
    order = list(jobs.items())
    begin = time.perf_counter()
    while min(map(len, times.values())) < rounds or time.perf_counter() - begin < seconds:
        for name, job in order:
            start = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - start)
        order.reverse()
    return times


def ratios(numerator: list[float], denominator: list[float]) -> Spread:
    """Spread of the ratio within each round."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])
