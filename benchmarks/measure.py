"""One case: our forward and backward beside all that compute the same, and beside a matrix product."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cases import MAIN, Case
from contenders import Contender, Fag, Inputs, TorchFlash, TorchMath
from machine import Gemm
from ragged import Padded, PerSequence
from timing import Spread, ratios, take_turns

OURS = Fag()
PEERS: tuple[Contender, ...] = (TorchFlash(), TorchMath(), PerSequence(), Padded())

#: Of the time of a direction, what the peers take part in; in the rest we take turns with the matrix product.
_PEERS_SHARE = 0.7

Record = dict[str, Any]


def main_peer(case: Case) -> str:
    """Whom the goals of a case are about: PyTorch's default where it has one, else whoever is fastest."""
    return "flash" if case.group in (*MAIN, "one-head") else "best"


def measure(case: Case, seconds: float, rounds: int, peers: Sequence[Contender] = PEERS) -> list[Record]:
    """Forward and backward of one case, one record each.

    Args:
        case: The problem.
        seconds: Time for both; slow peers take more, since `rounds` holds for them too.
        rounds: Fewest rounds.
        peers: Who else may take part.

    Returns:
        Records of plain values: see `_record`.
    """
    x = Inputs.of(case)
    gemm = Gemm(case.dtype)
    gemm()
    absent = {peer.name: why for peer in peers if (why := peer.why_not(case))}
    jobs = {c.name: c.jobs(case, x) for c in (OURS, *peers) if c.name not in absent}
    records = []
    for direction, flops in (("forward", case.forward_flops), ("backward", case.backward_flops)):
        calls: dict[str, Callable[[], Any]] = {name: getattr(job, direction) for name, job in jobs.items()}
        difference = 0.0
        ours = _results(calls[OURS.name]())
        for name, call in calls.items():  # warms up, too
            theirs = map(jobs[name].shown, _results(call()))
            difference = max(difference, *map(_difference, ours, theirs))
        times = take_turns(calls, _PEERS_SHARE * seconds / 2, rounds)
        beside_gemm = take_turns(
            {"ours": calls[OURS.name], "gemm": gemm}, (1 - _PEERS_SHARE) * seconds / 2, rounds
        )
        share = ratios([t * flops / gemm.flops for t in beside_gemm["gemm"]], beside_gemm["ours"])
        records.append(_record(case, direction, flops, times, difference))
        records[-1] |= {
            "share_of_gemm": _rounded(share),
            "gemm_dtype": gemm.dtype,
            "gemm_gflops": _gflops(gemm.flops, beside_gemm["gemm"]),
        }
    return records


def _record(
    case: Case, direction: str, flops: int, times: dict[str, list[float]], difference: float
) -> Record:
    """What was measured, as JSON values: ratios are quartiles of peer / ours within the rounds."""
    ours = times[OURS.name]
    speedup = {name: _rounded(ratios(t, ours)) for name, t in times.items() if name != OURS.name}
    fastest = [min(turns) for turns in zip(*(times[name] for name in speedup), strict=True)]
    speedup["best"] = _rounded(ratios(fastest, ours))
    return {
        "case": case.name,
        "group": case.group,
        "dtype": case.dtype,
        "s": case.s,
        "d": case.d,
        "tokens": case.tokens,
        "direction": direction,
        "rounds": len(ours),
        "milliseconds": {name: _short(1e3 * statistics.median(t)) for name, t in times.items()},
        "gflops": {name: _gflops(flops, t) for name, t in times.items()},
        "speedup": speedup,
        "main_peer": main_peer(case),
        "difference": _short(difference, 2),
    }


def _results(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def _gflops(flops: int, times: Sequence[float]) -> float:
    return _short(flops / statistics.median(times) / 1e9)


def _rounded(spread: Spread) -> list[float]:
    return [_short(value) for value in spread]


def _short(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")
