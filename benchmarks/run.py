"""Our CPU forward and backward against PyTorch's, in one process, taking turns.

    python benchmarks/run.py            all cases (python3 tools/dev.py bench, from anywhere)
    python benchmarks/run.py --quick    the few that --quick marks, briefly
    python benchmarks/run.py --only gqa --seconds 10

Prints a table and writes it as JSON and Markdown. A case is slower or faster by the median of the ratios
within the rounds; quartiles tell how sure that is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from cases import CASES, Case
from contenders import CONTENDERS, Gemm, Inputs
from machine import describe
from timing import ratios, take_turns

OURS, THEIRS = (contender.name for contender in CONTENDERS)
SCHEMA = 1


def measure(case: Case, seconds: float, rounds: int) -> list[dict[str, object]]:
    """Forward and backward of one case, one record each."""
    x = Inputs.of(case)
    gemm = Gemm(case.dtype)
    results = {contender.name: contender.forward(case, x) for contender in CONTENDERS}
    forward = {c.name: lambda c=c: c.forward(case, x) for c in CONTENDERS}
    backward = {c.name: lambda c=c: c.backward(case, x, *results[c.name]) for c in CONTENDERS}
    records = []
    for direction, jobs, flops in (
        ("forward", forward, case.forward_flops),
        ("backward", backward, case.backward_flops),
    ):
        ours, theirs = jobs[OURS](), jobs[THEIRS]()
        times = take_turns({**jobs, "gemm": gemm}, seconds / 2, rounds)
        ratio = ratios(times[THEIRS], times[OURS])
        share = ratios([t * flops / gemm.flops for t in times["gemm"]], times[OURS])
        records.append(
            {
                "case": case.name,
                "group": case.group,
                "direction": direction,
                "rounds": len(times[OURS]),
                "gflops": {name: round(flops / sorted(t)[len(t) // 2] / 1e9, 1) for name, t in times.items()}
                | {"gemm": round(gemm.flops / sorted(times["gemm"])[len(times["gemm"]) // 2] / 1e9, 1)},
                "milliseconds": {name: round(sorted(t)[len(t) // 2] * 1e3, 3) for name, t in times.items()},
                "speedup": [round(value, 3) for value in (ratio.low, ratio.median, ratio.high)],
                "share_of_gemm": round(share.median, 3),
                "gemm_dtype": gemm.dtype,
                "difference": max(_difference(a, b) for a, b in zip(ours, theirs, strict=True)),
            }
        )
    return records


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(f"{((a.double() - b.double()).norm() / b.double().norm()).item():.2g}")


HEAD = ("case", "direction", OURS, THEIRS, "gemm", "faster", "quartiles", "of gemm", "differ")


def row(record: dict) -> tuple[str, ...]:
    """One line of the table: rates in GF/s."""
    low, median, high = record["speedup"]
    rates = record["gflops"]
    return (
        record["case"],
        record["direction"],
        *(f"{rates[name]:.0f}" for name in (OURS, THEIRS, "gemm")),
        f"{median:.2f}x",
        f"{low:.2f}-{high:.2f}",
        f"{100 * record['share_of_gemm']:.0f}%",
        f"{record['difference']:.0e}",
    )


def markdown(machine: dict[str, object], records: list[dict]) -> str:
    """The report as Markdown."""
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    lines = [
        f"Rates in GF/s on visible pairs. {facts}",
        "",
        " | ".join(HEAD),
        " | ".join("---" for _ in HEAD),
    ]
    return "\n".join([*lines, *(" | ".join(row(record)) for record in records)]) + "\n"


def main() -> int:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases, about a second each")
    parser.add_argument("--only", choices=sorted({case.group for case in CASES}), help="one group of cases")
    parser.add_argument("--seconds", type=float, help="time per case (default: 6, quick: 1.5)")
    parser.add_argument("--threads", type=int, help="threads of both (default: PyTorch's)")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "local", help="folder"
    )
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    seconds = args.seconds or (1.5 if args.quick else 6)
    machine = describe()
    print(", ".join(f"{name} {value}" for name, value in machine.items()), file=sys.stderr)
    widths = (44, 9, 6, 6, 6, 7, 10, 8, 7)
    print(" ".join(f"{text:<{width}}" for text, width in zip(HEAD, widths, strict=True)))
    records = []
    for case in CASES:
        if (args.quick and not case.is_quick) or (args.only and case.group != args.only):
            continue
        for record in measure(case, seconds, rounds=3 if args.quick else 7):
            records.append(record)
            print(
                " ".join(f"{text:<{width}}" for text, width in zip(row(record), widths, strict=True)),
                flush=True,
            )
    args.out.mkdir(parents=True, exist_ok=True)
    document = {"schema": SCHEMA, "machine": machine, "records": records}
    (args.out / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    (args.out / "results.md").write_text(markdown(machine, records))
    print(f"written: {args.out / 'results.json'}, {args.out / 'results.md'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
