"""The benchmark's own arithmetic, and that all it compares compute the same. Nothing here measures speed."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = ("cases", "contenders", "goals", "machine", "measure", "memory", "overhead", "plots", "publish",
           "ragged", "report", "threads", "timing")  # fmt: skip


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The benchmark's modules, which are plain ones like this suite's and share a name with some of them."""
    hidden = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in MODULES})
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


def record(name: str, direction: str = "backward", **changes: Any) -> dict[str, Any]:
    """A record as `measure` makes it: twice as fast as flash, three times as fast as math."""
    values: dict[str, Any] = {
        "case": name, "group": "dense", "dtype": "bfloat16", "s": 1024, "d": 64, "tokens": 1024,
        "direction": direction, "rounds": 3, "milliseconds": {"fag": 1.0, "flash": 2.0, "math": 3.0},
        "gflops": {"fag": 60.0, "flash": 30.0, "math": 20.0},
        "speedup": {"flash": [1.5, 2.0, 2.5], "math": [2.5, 3.0, 3.5], "best": [1.5, 2.0, 2.5]},
        "main_peer": "flash", "difference": 1e-3, "share_of_gemm": [0.7, 0.8, 0.9],
        "gemm_dtype": "float32", "gemm_gflops": 75.0,
    }  # fmt: skip
    return values | changes


def document(**sections: list[dict[str, Any]]) -> dict[str, Any]:
    machine = {
        "cpu": "a CPU", "cpu_level": "avx2", "torch_level": "AVX2", "logical_cpus": 2, "threads": 2,
        "load_before": 0.0, "python": "3", "torch": "2", "fag_torch": "1", "fag_kernel": "1",
        "commit": "abc", "date": "2026-01-01",
    }  # fmt: skip
    empty = {name: [] for name in ("speed", "window", "threads", "overhead", "memory", "capped")}
    return {"schema": 3, "machine": machine, **empty, **sections}


def goal(bench: SimpleNamespace, start: str) -> Any:
    return next(goal for goal in bench.goals.GOALS if goal.what.startswith(start))


@pytest.mark.parametrize(
    ("is_causal", "window"), [(False, None), (True, None), (True, 0), (True, 3), (True, 50)]
)
@pytest.mark.parametrize("length", [1, 3, 4, 17])
def test_visible_pairs_are_those_counted_one_by_one(
    bench: SimpleNamespace, length: int, is_causal: bool, window: int | None
) -> None:
    case = bench.cases.Case("x", "float32", 1, 2, 1, length, 8, is_causal=is_causal, window=window)
    seen = [
        (i, j)
        for i in range(length)
        for j in range(length)
        if not is_causal or (j <= i and (window is None or i - j <= window))
    ]
    assert case.pairs == 2 * len(seen)


def test_flops_are_those_of_the_products(bench: SimpleNamespace) -> None:
    case = bench.cases.ragged("x", "float32", [2, 3], 1, 1, is_causal=False)
    case = replace(case, d=8, width_v=4)
    assert case.tokens == 5
    assert case.forward_flops == 2 * (4 + 9) * (8 + 4)
    assert case.backward_flops == 2 * (4 + 9) * (8 + 8 + 8 + 4 + 4)


def test_names_of_cases_are_unique(bench: SimpleNamespace) -> None:
    for cases in (bench.cases.CASES, bench.cases.THREAD_CASES, [m.case for m in bench.memory.MEMORY_CASES]):
        names = [case.name for case in cases]
        assert sorted(set(names)) == sorted(names)


def test_ratios_are_formed_within_rounds(bench: SimpleNamespace) -> None:
    """A machine that doubles its speed half way changes no ratio."""
    assert bench.timing.ratios([4, 4, 2, 2], [2, 2, 1, 1]) == (2, 2, 2)


def test_quartiles(bench: SimpleNamespace) -> None:
    assert bench.timing.Spread.of([5, 1, 4, 2, 3]) == (2, 3, 4)


def test_turns_alternate_and_every_job_has_as_many(bench: SimpleNamespace) -> None:
    order: list[str] = []
    jobs = {name: lambda name=name: order.append(name) for name in "ab"}
    times = bench.timing.take_turns(jobs, 0, 3)
    assert order == list("abbaab")
    assert [len(values) for values in times.values()] == [3, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_causal": True, "n2": 1},
        {"is_causal": True, "window": 5},
        {"width_v": 8},
        {"lengths": (3, 24, 1, 9), "b": 4},
        {"lengths": (3, 24, 1, 9), "b": 4, "is_causal": True, "n2": 1},
    ],
    ids=["dense", "causal-gqa", "window", "value-width", "ragged", "ragged-causal-gqa"],
)
def test_everyone_who_is_compared_computes_the_same(bench: SimpleNamespace, changes: dict[str, Any]) -> None:
    case = replace(bench.cases.Case("x", "float32", 2, 2, 2, 24, 16), **changes)
    records = bench.measure.measure(case, 0.0, 2)
    assert [r["direction"] for r in records] == ["forward", "backward"]
    for r in records:
        assert len(r["speedup"]) >= 2
        assert r["difference"] < 1e-5
        assert r["rounds"] == 2


def test_a_wrong_peer_shows(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    case = bench.cases.Case("x", "float32", 1, 2, 2, 24, 16, is_causal=True)
    flash = bench.contenders.TorchFlash()
    jobs = flash.jobs
    monkeypatch.setattr(flash, "jobs", lambda case, x: jobs(replace(case, is_causal=False), x))
    assert bench.measure.measure(case, 0.0, 2, [flash])[0]["difference"] > 0.1


def test_best_peer_is_chosen_within_rounds(bench: SimpleNamespace) -> None:
    case = bench.cases.Case("dense", "float32", 1, 1, 1, 8, 8)
    times = {"fag": [1.0, 1.0, 1.0], "flash": [2.0, 4.0, 4.0], "math": [3.0, 2.0, 3.0]}
    speedup = bench.measure._record(case, "forward", 8, times, 0.0)["speedup"]
    assert speedup["best"][1] == 2
    assert speedup["flash"][1] == 4


def test_goal_takes_the_geometric_mean_of_its_cases_alone(bench: SimpleNamespace) -> None:
    speed = [
        record("a"),
        record("b", speedup={"flash": [7, 8, 9], "best": [3, 4, 5]}),
        record("c", direction="forward", speedup={"flash": [99, 99, 99], "best": [99, 99, 99]}),
        record("d", dtype="float32", speedup={"flash": [99, 99, 99], "best": [99, 99, 99]}),
        record("e", group="ragged", main_peer="best", speedup={"best": [0.1, 0.1, 0.1]}),
    ]
    wanted = goal(bench, "bf16 backward, geometric mean")
    figure = wanted.find(document(speed=speed), "main")
    assert figure.median == pytest.approx(4)
    assert figure.low == pytest.approx((1.5 * 7) ** 0.5)
    assert figure.of == "2 cases"
    assert wanted.find(document(speed=speed), "best").median == pytest.approx(8**0.5)
    assert wanted.is_met(figure)
    slowest = goal(bench, "bf16 backward, slowest").find(document(speed=speed), "main")
    assert (slowest.median, slowest.of) == (2, "a")
    ragged = goal(bench, "ragged backward")
    assert not ragged.is_met(ragged.find(document(speed=speed), "main"))


def test_goal_on_time_per_token_sees_shrinking_and_growing(bench: SimpleNamespace) -> None:
    window = [
        {"case": f"s{s}", "direction": "backward", "s": s, "to_shortest": spread}
        for s, spread in ((1, [1, 1, 1]), (2, [0.7, 0.8, 0.9]), (4, [1.0, 1.1, 1.2]))
    ]
    figure = goal(bench, "window backward, time").find(document(window=window), "main")
    assert figure == (pytest.approx(10), pytest.approx(20), pytest.approx(30), "s2")


def test_goal_of_memory_is_the_case_nearest_to_its_bound(bench: SimpleNamespace) -> None:
    memory = [{"case": case, "peer": "flash", "mib": {"fag": mib, "flash": 9.0}, "bound_mib": 10.0}
              for case, mib in (("a", 5.0), ("b", 11.0))]  # fmt: skip
    peak = goal(bench, "peak memory")
    figure = peak.find(document(memory=memory), "main")
    assert (figure.median, figure.of) == (pytest.approx(110), "b")
    assert not peak.is_met(figure)


def test_memory_bound_is_outputs_accumulators_and_scratch(bench: SimpleNamespace) -> None:
    case = bench.cases.Case("x", "bfloat16", 1, 4, 2, 100, 16, width_v=8)
    memory = bench.memory.MemoryCase(case, "flash", cut_tokens=100)
    outputs = 2 * 100 * (4 * 16 + 2 * 16 + 2 * 8)
    assert memory.output_bytes == outputs
    assert memory.bound(threads=2) == outputs + 4 * 100 * 16 + 2 * 8 * 2**20


def test_every_line_of_the_issue_has_goals(bench: SimpleNamespace) -> None:
    assert {goal.line for goal in bench.goals.GOALS} == set(range(1, 9))


def test_what_was_not_measured_is_said(bench: SimpleNamespace) -> None:
    rows = bench.report.goals_table(document()).splitlines()[2:]
    assert len(rows) == len(bench.goals.GOALS)
    assert all("not measured" in row for row in rows)


def test_report_shows_goals_first_and_what_is_not_met(bench: SimpleNamespace) -> None:
    slow = record("slow-case", speedup={"flash": [0.8, 0.9, 1.0], "best": [0.8, 0.9, 1.0]})
    text = bench.report.markdown(document(speed=[record("a"), slow], capped=[slow]))
    assert text.index("## Goals") < text.index("## By group") < text.index("## Cases")
    row = next(line for line in text.splitlines() if "bf16 backward, slowest" in line)
    cells = ["1", "bf16 backward, slowest case", ">= 1.50x", "**0.90x**", "0.80x - 1.00x", "**no**", "0.90x"]
    assert row == f"| {' | '.join(cells)} | slow-case |"
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)
    json.dumps(document(speed=[slow]))


def test_page_gets_its_results_between_its_markers(bench: SimpleNamespace) -> None:
    begin, end = bench.publish.BEGIN, bench.publish.END
    page = bench.publish.replaced(f"before\n{begin}\nold\n{end}\nafter\n", "new\n")
    assert page == f"before\n{begin}\nnew\n{end}\nafter\n"
    assert bench.publish.replaced(page, "new\n") == page
    with pytest.raises(ValueError, match="must hold both markers"):
        bench.publish.replaced("no markers", "new")
    bench.publish.replaced(bench.publish.PAGE.read_text(), "new\n")


def test_pictures_are_drawn_of_what_there_is(bench: SimpleNamespace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    speed = [record("a"), record("a", direction="forward")]
    assert [path.name for path in bench.plots.draw_all(document(speed=speed), tmp_path)] == [
        "bench-speedup.png",
        "bench-roofline.png",
    ]
    assert bench.plots.draw_all(document(), tmp_path) == []


def test_overhead_and_threads_give_their_records(bench: SimpleNamespace) -> None:
    """That the kernel alone, with prepared arguments, gives what the operator gives is checked in there."""
    records = bench.overhead.measure_overhead(0.0, 2)
    assert [r["what"] for r in records] == ["call", *["cached", "new dense", "new ragged"] * 2]
    for r in records:
        assert sorted(r["microseconds"]) == r["microseconds"]
    case = bench.cases.Case("threads", "float32", 1, 1, 1, 300, 16)
    records = bench.threads.measure_threads([case], 0.0, 2)
    assert all(r["is_same_bits"] for r in records)
    assert statistics.median(r["rounds"] for r in records) == 2
