"""A run as Markdown: the goals first, then every measurement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from goals import GOALS, Document, Figure, Goal, geometric_mean, mean, speedups

SECTIONS = ("speed", "window", "threads", "overhead", "memory", "capped")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def machine_line(run: Document) -> str:
    """On what, and with what, in a sentence."""
    m = run["machine"]
    return (
        f"{m['cpu']}, {m['logical_cpus']} logical CPUs, {m['threads']} threads; level {m['cpu_level']} "
        f"(PyTorch: {m['torch_level']}); PyTorch {m['torch']}, Python {m['python']}, fag-kernel "
        f"{m['fag_kernel']}, fag-torch {m['fag_torch']}, commit {m['commit']}, {m['date']}, "
        f"load {m['load_before']} before."
    )


def goals_table(run: Document) -> str:
    """Each goal beside what was reached."""
    return table(
        ("line", "goal", "wanted", "reached", "quartiles", "met", "beside the fastest peer", "measured on"),
        (_goal_row(goal, run) for goal in GOALS),
    )


def _goal_row(goal: Goal, run: Document) -> tuple[object, ...]:
    wanted = f"{goal.sense} {_value(goal.limit, goal.unit)}" if goal.unit else "yes"
    figure = goal.find(run, "main")
    if figure is None:
        return goal.line, goal.what, wanted, "not measured", "", "", "", ""
    best = goal.find(run, "best") if goal.has_best else None
    return (
        goal.line,
        goal.what,
        wanted,
        f"**{_value(figure.median, goal.unit)}**",
        _quartiles(figure, goal.unit),
        "yes" if goal.is_met(figure) else "**no**",
        _value(best.median, goal.unit) if best else "",
        figure.of,
    )


def _quartiles(figure: Figure, unit: str) -> str:
    if not unit or figure.low == figure.high:
        return ""
    return f"{_value(figure.low, unit)} - {_value(figure.high, unit)}"


def _value(value: float, unit: str) -> str:
    if not unit:
        return "yes" if value else "no"
    if unit == "x":
        return f"{value:.2f}x" if value < 10 else f"{value:.1f}x"
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"


def groups_table(run: Document) -> str:
    """Geometric means of the cases of each group and type."""
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for r in run["speed"]:
        directions = groups.setdefault((r["group"], r["dtype"]), {"backward": [], "forward": []})
        directions[r["direction"]].append(r)
    columns = ("beside flash", "beside the fastest peer", "of GEMM")
    return table(
        (
            "group",
            "type",
            *(f"{direction} {column}" for direction in ("backward", "forward") for column in columns),
        ),
        (
            (*names, *(cell for records in directions.values() for cell in _group_cells(records)))
            for names, directions in groups.items()
        ),
    )


def _group_cells(records: list[dict[str, Any]]) -> tuple[str, str, str]:
    if not records:
        return "", "", ""
    flash = mean(speedups([r for r in records if r["main_peer"] == "flash"], "flash"))
    best = mean(speedups(records, "best"))
    assert best is not None
    share = geometric_mean(r["share_of_gemm"][1] for r in records)
    return _value(flash.median, "x") if flash else "", _value(best.median, "x"), f"{100 * share:.0f} %"


SPEED_HEAD = ("case", "direction", "fag GF/s", "peers GF/s", "faster", "quartiles", "than the fastest",
              "of GEMM", "rounds", "differ")  # fmt: skip


def speed_row(record: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table of cases."""
    low, median, high = record["speedup"][record["main_peer"]]
    peers = ", ".join(f"{name} {rate:.3g}" for name, rate in record["gflops"].items() if name != "fag")
    return (
        record["case"],
        record["direction"],
        f"{record['gflops']['fag']:.3g}",
        peers,
        _value(median, "x"),
        f"{low:.2f} - {high:.2f}",
        _value(record["speedup"]["best"][1], "x"),
        f"{100 * record['share_of_gemm'][1]:.0f} %",
        str(record["rounds"]),
        f"{record['difference']:.0e}",
    )


def markdown(run: Document) -> str:
    """The whole report."""
    parts = [
        "# Attention and its gradient on a CPU: results\n",
        machine_line(run) + "\n",
        "How it was measured and how to read it: [cpu-benchmarks.md](../../../docs/cpu-benchmarks.md).\n",
        "## Goals\n",
        goals_table(run),
        "Line 6 also asks for public cases 45, 46 and 47: they are tests, `test_pc45_*`, `test_pc46_*` and "
        "`test_pc47_*` in `tests/integration`.\n",
    ]
    for name, title, head, rows in _sections(run):
        if run[name]:
            parts += [f"## {title}\n", table(head, rows)]
    if run["speed"]:
        parts.insert(6, "## By group, geometric means\n\n" + groups_table(run))
    return "\n".join(parts)


def _sections(run: Document) -> list[tuple[str, str, Sequence[str], list[Sequence[object]]]]:
    return [
        ("speed", "Cases", SPEED_HEAD, [speed_row(r) for r in run["speed"]]),
        (
            "window", "A window along the length",
            ("case", "direction", "ns per token", "to the shortest", "quartiles", "rounds"),
            [(r["case"], r["direction"], r["nanoseconds_per_token"], f"{r['to_shortest'][1]:.3f}",
              f"{r['to_shortest'][0]:.3f} - {r['to_shortest'][2]:.3f}", r["rounds"]) for r in run["window"]],
        ),
        (
            "threads", "Two threads over one",
            ("case", "direction", "fag", "quartiles", "GEMM", "where GEMM has 1.75x", "least over least",
             "same bits", "rounds"),
            [(r["case"], r["direction"], f"{r['scaling'][1]:.2f}x",
              f"{r['scaling'][0]:.2f} - {r['scaling'][2]:.2f}", f"{r['gemm_scaling'][1]:.2f}x",
              f"{r['scaling_given'][1]:.2f}x in {r['rounds_given']}" if r["scaling_given"] else "",
              f"{r['scaling_of_least']:.2f}x" if "scaling_of_least" in r else "",
              "yes" if r["is_same_bits"] else "**no**", r["rounds"]) for r in run["threads"]],
        ),
        (
            "overhead", "Around the kernels, microseconds",
            ("what", "target", "median", "quartiles", "repetitions"),
            [(r["what"], r["target"], r["microseconds"][1],
              f"{r['microseconds'][0]} - {r['microseconds'][2]}", r["rounds"]) for r in run["overhead"]],
        ),
        (
            "memory", "Peak memory of a backward beyond its inputs, MiB",
            ("case", "fag", "bound", "of it outputs", "peer"),
            [(r["case"], r["mib"]["fag"], r["bound_mib"], r["outputs_mib"],
              f"{r['peer']} {r['mib'][r['peer']]}") for r in run["memory"]],
        ),
        ("capped", "Both sides limited to AVX2", SPEED_HEAD, [speed_row(r) for r in run["capped"]]),
    ]  # fmt: skip
