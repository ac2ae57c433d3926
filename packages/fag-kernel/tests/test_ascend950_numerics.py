"""The Ascend 950 kernels, run by Triton's CPU interpreter, against float64.

The same sources that are compiled for the device, launched from the catalogue, fed with fag_metadata's
tensor and fag_kernel.plan's tiling data and nothing else. Runs in the tox environment `ascend950`, where
Triton is installed:

    tox run -e ascend950

Bound per output: ||x - reference|| / ||reference|| <= 1.2 * max(plain, rounding). `plain` is the error of a
plain NumPy implementation in the same precision (float32 sums, P and dS rounded to the type), `rounding`
that of rounding the reference. float32: 2 * max + 1e-6, the order of a sum being half of the error at that
size.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fag_kernel.ascend950.catalog import launch_tiling
from fag_kernel.plan import TilingPlan, plan
from fag_metadata import AttentionProblem, Target, metadata_for

ORACLE = Path(__file__).parents[3] / "tests" / "integration" / "oracle.py"
if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton and TRITON_INTERPRET=1: tox run -e ascend950", allow_module_level=True)
if not ORACLE.exists():
    pytest.skip("needs the checkout's tests/integration/oracle.py", allow_module_level=True)

spec = importlib.util.spec_from_file_location("oracle", ORACLE)
assert spec is not None
assert spec.loader is not None
oracle = importlib.util.module_from_spec(spec)
sys.modules.setdefault("oracle", oracle)
spec.loader.exec_module(oracle)

from fag_kernel.ascend950 import interpret  # noqa: E402 - after the skips: it imports Triton

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
FULL, CAUSAL, WINDOW = 0, 3, 4
FORMS = ("accumulate", "deterministic")


@dataclass(frozen=True)
class Case:
    """A problem on a target."""

    layout: str = "BSND"
    mask: int = FULL
    b: int = 1
    n1: int = 2
    n2: int = 2
    s1: int = 130
    s2: int = 200
    d: int = 16
    dv: int = 0
    win: tuple[int, int] = (-1, -1)
    cu_q: tuple[int, ...] | None = None
    cu_kv: tuple[int, ...] | None = None
    used_q: tuple[int, ...] | None = None
    used_kv: tuple[int, ...] | None = None
    sinks: bool = False
    dlse: bool = False
    cores: int = 3
    l2: int = 0
    soc: str | None = None
    split: str = "cann"
    bound: tuple[int, int] | None = None  # max_seqlen_q, max_seqlen_kv of a packed batch
    dtype: str = "float16"
    expect: str = ""  # a part of the key's name

    @property
    def id(self) -> str:
        mask = {FULL: "full", CAUSAL: "causal", WINDOW: f"window{self.win[0]},{self.win[1]}"}[self.mask]
        rows = f"cu{self.cu_q}x{self.cu_kv}" if self.cu_q else f"s{self.s1}x{self.s2}"
        parts = [self.layout.lower(), mask, f"b{self.b}n{self.n1}x{self.n2}", rows.replace(" ", "")]
        parts += [f"d{self.d}" + (f"v{self.dv}" if self.dv else ""), f"c{self.soc or self.cores}", self.dtype]
        parts += [f"used{self.used_q}x{self.used_kv}".replace(" ", "")] * bool(self.used_q or self.used_kv)
        parts += ["sinks"] * self.sinks + ["dlse"] * self.dlse
        parts += ["balanced"] * (self.split != "cann") + ["l2"] * bool(self.l2)
        parts += [f"max{self.bound[0]}x{self.bound[1]}"] if self.bound else []
        return "-".join(parts)

    @property
    def target(self) -> str | Target:
        return self.soc or Target(f"test{self.cores}", self.cores, 2 * self.cores, self.l2)

    @property
    def call(self) -> Any:
        return oracle.Call(
            self.layout, self.mask, *self.win, self.cu_q, self.cu_kv, self.used_q, self.used_kv
        )

    def lengths(self) -> dict[str, Any]:
        lists = {
            "cu_seqlens_q": self.cu_q,
            "cu_seqlens_kv": self.cu_kv,
            "seqused_q": self.used_q,
            "seqused_kv": self.used_kv,
        }
        return {name: np.array(value, np.int32) for name, value in lists.items() if value is not None}

    def problem(self) -> AttentionProblem:
        sizes: dict[str, int] = {"batch_size": self.b, "max_seqlen_q": self.s1, "max_seqlen_kv": self.s2}
        if self.layout == "TND":
            sizes = {}
            if self.bound:
                sizes = {"max_seqlen_q": self.bound[0], "max_seqlen_kv": self.bound[1]}
        return AttentionProblem.from_metadata_args(
            self.n1, self.n2, self.d, head_dim_v=self.dv or self.d, mask_mode=self.mask, win_left=self.win[0],
            win_right=self.win[1], layout_q=self.layout, layout_kv=self.layout, layout_out=self.layout,
            **sizes, **self.lengths(),
        )  # fmt: skip


def grid_cases() -> list[Case]:
    """All problems; together they meet every template, mask, layout and form
    (test_cases_cover_the_contract).
    """
    general = Case(n1=4, n2=2)  # GQA keeps a problem in template BN2GS1S2
    windows = [
        (WINDOW, (60, 10)),
        (WINDOW, (-1, 5)),
        (WINDOW, (30, -1)),
        (WINDOW, (0, 0)),
        (WINDOW, (2**31 - 1, 2**31 - 1)),
    ]
    masks: list[tuple[int, tuple[int, int]]] = [(FULL, (-1, -1)), (CAUSAL, (-1, -1)), *windows]
    cases = []
    # dense layouts x masks x shapes: rows without keys, keys without rows, tails, exact tiles
    for layout in ("BSND", "BNSD"):
        for mask, win in masks:
            for s1, s2 in ((130, 200), (300, 140)):
                cases.append(replace(general, layout=layout, mask=mask, win=win, s1=s1, s2=s2))
    for mask, win in masks[:3]:
        cases.append(replace(general, mask=mask, win=win, s1=256, s2=256, n1=2, n2=1, b=2))
        cases.append(replace(general, mask=mask, win=win, s1=1, s2=129, n1=6, n2=2))
        cases.append(replace(general, mask=mask, win=win, s1=257, s2=1, n1=2, n2=2, split="balanced"))
    # packed batches: ragged, empty entries, equal lengths, padded bounds
    ragged = Case("TND", n1=4, n2=2, cu_q=(0, 100, 130, 300), cu_kv=(0, 150, 150, 330), sinks=True)
    equal = Case("TND", n1=2, n2=1, cu_q=(0, 140, 280), cu_kv=(0, 150, 300))
    for mask, win in masks[:4]:
        cases += [
            replace(ragged, mask=mask, win=win),
            replace(equal, mask=mask, win=win),
            replace(equal, mask=mask, win=win, bound=(300, 400)),
            replace(ragged, mask=mask, win=win, bound=(500, 500), split="balanced"),
            replace(ragged, mask=mask, win=win, used_q=(90, 0, 170), used_kv=(150, 0, 20)),
            replace(ragged, mask=mask, win=win, cu_q=(0, 0, 1, 129, 129), cu_kv=(0, 3, 3, 260, 300), cores=5),
        ]
    cases += [  # nothing to do, but for zeros
        replace(ragged, cu_q=(0, 0, 0, 0)),
        replace(ragged, cu_kv=(0, 0, 0, 0), mask=CAUSAL),
        Case(b=2, n1=2, n2=1, s1=140, s2=130, used_q=(0, 0)),
        Case(b=2, n1=2, n2=2, s1=100, s2=130, used_kv=(0, 0), mask=CAUSAL),
    ]
    # seqused on dense layouts: one side, both, zeros
    used = Case(b=2, n1=2, n2=1, s1=300, s2=280)
    for mask, win in masks[:3]:
        cases += [
            replace(used, mask=mask, win=win, used_q=(0, 200), used_kv=(100, 280)),
            replace(used, mask=mask, win=win, used_kv=(129, 0), layout="BNSD", sinks=True),
            replace(used, mask=mask, win=win, used_q=(300, 1), split="balanced"),
        ]
    # the gradient through lse, and of the sinks: every template and mask, rows without keys, padding
    upstream = [
        *(replace(general, mask=mask, win=win, s1=300, s2=140) for mask, win in masks[:4]),
        *(replace(ragged, mask=mask, win=win, used_q=(90, 0, 170)) for mask, win in masks[:4]),
        replace(general, layout="BNSD", mask=WINDOW, win=(9, 0), s1=260, s2=130, d=72, dv=40, cores=7),
        replace(ragged, cu_kv=(0, 0, 150, 330), mask=CAUSAL, d=128),
        replace(used, mask=WINDOW, win=(60, 10), used_q=(300, 200), used_kv=(0, 280)),
        Case(n1=3, n2=3, b=2, s1=100, s2=33, mask=CAUSAL, expect="BN2-dense"),
        Case(n1=3, n2=3, b=2, s1=60, s2=120, used_q=(60, 7), used_kv=(0, 120), mask=WINDOW, win=(20, 5)),
        Case(b=2, n1=64, n2=64, s1=384, s2=128, d=8, mask=CAUSAL, expect="multiblk-zero"),
        Case(n1=2, n2=1, b=2, s1=300, s2=256, l2=1, cores=2, mask=CAUSAL, expect="swizzle"),
        replace(general, d=192, dv=192, n1=2, n2=1),
        replace(general, mask=CAUSAL, s1=300, s2=140, dtype="float32"),
    ]
    cases += [replace(case, dlse=True, sinks=True) for case in upstream]
    cases += [replace(case, dlse=True, sinks=False) for case in upstream[::4]]
    # head dims
    for d, dv in (
        (64, 40),
        (72, 72),
        (72, 64),
        (128, 100),
        (128, 128),
        (192, 128),
        (192, 160),
        (136, 8),
        (192, 192),
    ):
        cases.append(replace(general, n1=2, n2=1, s1=140, s2=150, d=d, dv=dv, mask=CAUSAL))
        cases.append(
            replace(general, n1=1, n2=1, s1=150, s2=130, d=d, dv=dv, mask=WINDOW, win=(70, 4), layout="BNSD")
        )
    cases += [replace(ragged, d=d, dv=dv, mask=CAUSAL) for d, dv in ((72, 40), (128, 128))]
    # template BN2, one tile a head
    single = Case(n1=3, n2=3, b=2, expect="BN2-dense")
    for mask, win in masks[:4]:
        cases += [
            replace(single, mask=mask, win=win, s1=128, s2=128),
            replace(single, mask=mask, win=win, s1=100, s2=33, layout="BNSD", sinks=True),
            replace(single, mask=mask, win=win, s1=60, s2=120, used_q=(60, 7), used_kv=(1, 120)),
            replace(single, mask=mask, win=win, s1=40, s2=128, d=128, dv=72, n1=2, n2=2, b=1),
        ]
    # template BN2, several tiles a head: 128 heads
    multi = Case(b=2, n1=64, n2=64, s1=128, s2=256, d=8, expect="multiblk")
    cases += [
        multi,
        replace(multi, mask=CAUSAL, layout="BNSD"),
        replace(multi, mask=CAUSAL, s1=384, s2=128, expect="multiblk-zero"),
        replace(multi, mask=WINDOW, win=(20, 0), s1=384, s2=128, expect="multiblk-zero"),
        replace(multi, mask=WINDOW, win=(40, 3), s1=256, s2=256),
        replace(multi, mask=WINDOW, win=(40, 3), s1=128, s2=256, d=72, sinks=True),
    ]
    # swizzle: an L2 of one byte makes every problem too large for it
    swizzle = Case(n1=2, n2=1, b=2, s1=300, s2=256, l2=1, cores=2, expect="swizzle")
    cases += [
        swizzle,
        replace(swizzle, mask=CAUSAL, layout="BNSD"),
        replace(swizzle, mask=WINDOW, win=(100, 0), cores=3),
        replace(swizzle, d=128, dv=72, cores=1),
        replace(swizzle, d=192, s1=260, s2=130),
    ]
    # cores, and the real parts
    for cores in (1, 2, 7, 36):
        cases += [replace(general, mask=CAUSAL, s1=260, s2=270, cores=cores), replace(ragged, cores=cores)]
    cases += [
        replace(general, soc=soc, mask=mask, win=win)
        for soc, (mask, win) in zip(
            (
                "Ascend950PR_950z",
                "Ascend950DT_950x",
                "Ascend950PR_9579",
                "Ascend950PR_9589",
                "Ascend950PR_9599",
            ),
            masks,
            strict=False,
        )
    ]
    # float32 through every template
    cases += [
        replace(case, dtype="float32")
        for case in (
            replace(general, mask=CAUSAL),
            replace(ragged, mask=WINDOW, win=(20, 3)),
            replace(single, s1=70, s2=90),
            replace(multi, mask=CAUSAL, s1=384, s2=128, expect="multiblk-zero"),
            swizzle,
            replace(general, d=192, dv=128, n1=2, n2=1),
            replace(used, used_q=(0, 200), used_kv=(100, 280)),
        )
    ]
    return list(dict.fromkeys(cases))


CASES = grid_cases()


@dataclass
class Run:
    """A case's tensors, references and tools."""

    case: Case
    seed: int = 0
    poison: bool = False  # NaN in padding and in rows without keys, but for a dlse that the sinks take
    arrays: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        case, dtype = self.case, np.dtype(self.case.dtype)
        rng = np.random.default_rng(self.seed)
        dv = case.dv or case.d
        rows = {
            "BSND": ((case.b, case.s1, case.n1), (case.b, case.s2, case.n2)),
            "BNSD": ((case.b, case.n1, case.s1), (case.b, case.n2, case.s2)),
            "TND": ((case.cu_q or (0,))[-1:] + (case.n1,), (case.cu_kv or (0,))[-1:] + (case.n2,)),
        }[case.layout]
        shapes = {
            "q": (*rows[0], case.d),
            "k": (*rows[1], case.d),
            "v": (*rows[1], dv),
            "dout": (*rows[0], dv),
        }
        self.arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
        self.sinks = rng.standard_normal(case.n1).astype(np.float32) if case.sinks else None
        self.problem = case.problem()
        self.metadata = metadata_for(self.problem, case.target, case.split, True)
        self.plan: TilingPlan = plan(self.problem, case.target, split=case.split)
        assert self.plan.key is not None
        assert case.expect in self.plan.key.name, self.plan.trace
        q, k, v = (self.arrays[name] for name in ("q", "k", "v"))
        self.out_reference, self.lse_reference = oracle.forward(q, k, v, case.call, self.sinks)
        self.arrays |= {
            "attn_out": self.out_reference.astype(dtype),
            "lse": self.lse_reference.astype(np.float32),
        }
        if case.dlse:
            self.arrays["dlse"] = rng.standard_normal(self.lse_reference.shape).astype(np.float32)
        self.reference = oracle.backward(*self._operands(), case.call, self.sinks, self.arrays.get("dlse"))
        if self.poison:
            self._poison()

    def _operands(self) -> list[Any]:
        return [self.arrays[name] for name in ("q", "k", "v", "dout", "attn_out", "lse")]

    def _poison(self) -> None:
        case = self.case
        real = {name: np.zeros(self.arrays[name].shape, bool) for name in self.arrays}
        for sequence in case.call.sequences(self.arrays["q"], self.arrays["k"]):
            seen = oracle.visible(case.call, sequence.used_q, sequence.used_kv)
            for head in range(case.n1):
                for name in ("q", "dout", "attn_out"):
                    oracle.rows(real[name], case.layout, sequence, head, "q")[...] = seen.any(1)[:, None]
                oracle.lse_rows(real["lse"], case.layout, sequence, head)[...] = seen.any(1)
                if case.dlse:
                    taking = seen.any(1) | case.sinks
                    oracle.lse_rows(real["dlse"], case.layout, sequence, head)[...] = taking
            for head in range(case.n2):
                for name in ("k", "v"):
                    oracle.rows(real[name], case.layout, sequence, head, "kv")[...] = seen.any(0)[:, None]
        for name, mask in real.items():
            self.arrays[name][~mask] = np.nan

    def backward(self, form: str) -> interpret.Gradients:
        return interpret.backward(
            self.plan, self.metadata, *self._operands(), dlse=self.arrays.get("dlse"), sinks=self.sinks,
            form=form, **self.case.lengths(),
        )  # fmt: skip

    def forward(self) -> tuple[Any, Any]:
        operands = [self.arrays[name] for name in ("q", "k", "v")]
        return interpret.forward(self.plan, self.metadata, *operands, sinks=self.sinks, **self.case.lengths())

    def plain(self) -> dict[str, Any]:
        """The gradient in plain NumPy, in the precision of a flash kernel."""
        case, dtype = self.case, np.dtype(self.case.dtype)
        q, k, v, dout, out, lse = (np.asarray(x, np.float32) for x in self._operands())
        dlse = self.arrays.get("dlse", np.zeros_like(lse))
        scale = np.float32(case.call.scale(case.d))
        dq, dk, dv = (
            np.zeros(q.shape, np.float32),
            np.zeros(k.shape, np.float32),
            np.zeros(v.shape, np.float32),
        )

        def rounded(x: Any) -> Any:
            return x.astype(dtype).astype(np.float32)

        for sequence in case.call.sequences(q, k):
            seen = oracle.visible(case.call, sequence.used_q, sequence.used_kv)
            for head in range(case.n1):
                kv = head // (case.n1 // case.n2)
                q_h, do_h, o_h = (oracle.rows(x, case.layout, sequence, head, "q") for x in (q, dout, out))
                k_h, v_h = (oracle.rows(x, case.layout, sequence, kv, "kv") for x in (k, v))
                lse_h = oracle.lse_rows(lse, case.layout, sequence, head)
                with np.errstate(invalid="ignore", over="ignore"):
                    p = np.where(
                        seen, np.exp(np.minimum(scale * (q_h @ k_h.T) - lse_h[:, None], 0)), np.float32(0)
                    )
                row_term = (do_h * o_h).sum(1) - oracle.lse_rows(dlse, case.layout, sequence, head)
                ds = rounded(p * (do_h @ v_h.T - row_term[:, None]))
                oracle.rows(dq, case.layout, sequence, head, "q")[...] += scale * (ds @ k_h)
                oracle.rows(dk, case.layout, sequence, kv, "kv")[...] += scale * (ds.T @ q_h)
                oracle.rows(dv, case.layout, sequence, kv, "kv")[...] += rounded(p).T @ do_h
        return {"dq": rounded(dq), "dk": rounded(dk), "dv": rounded(dv)}


def relative(x: Any, reference: Any) -> float:
    """||x - reference|| / ||reference||.

    Where the reference is identically zero (one key takes all probability: dP and sfmg are equal), the
    noise of float32 in their difference is allowed: 1e-5 on any element.
    """
    error = np.asarray(x, np.float64) - reference
    if not reference.any():
        return 0.0 if np.abs(error).max(initial=0.0) <= 1e-5 else float("inf")
    return float(np.linalg.norm(error) / np.linalg.norm(reference))


def allowed(plain: Any, reference: Any, dtype: str) -> float:
    base = max(relative(plain, reference), relative(reference.astype(dtype), reference))
    return 1.2 * base if dtype == "float16" else 2 * base + 1e-6


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradients_match_float64(case: Case) -> None:
    run = Run(case)
    plain = run.plain()
    for form in FORMS if run.plan.key is not None and run.plan.key.template == "BN2GS1S2" else FORMS[:1]:
        *gradients, dsinks = run.backward(form)
        for name, x in zip(plain, gradients, strict=True):
            reference = getattr(run.reference, name)
            assert x.dtype == case.dtype
            assert relative(x, reference) <= allowed(plain[name], reference, case.dtype), (form, name)
        if case.sinks:
            check_sink_gradients(run, dsinks)


def check_sink_gradients(run: Run, dsinks: Any) -> None:
    """float32: twice its rounding of a term, relative to the sum of the terms' sizes."""
    case = run.case
    assert dsinks.dtype == np.float32
    sizes = np.zeros(case.n1)
    dlse = run.arrays.get("dlse", np.zeros_like(run.arrays["lse"]))
    for sequence in case.call.sequences(run.arrays["q"], run.arrays["k"]):
        for head in range(case.n1):
            dout, out = (
                oracle.rows(run.arrays[name].astype(np.float64), case.layout, sequence, head, "q")
                for name in ("dout", "attn_out")
            )
            lse, upstream = (
                oracle.lse_rows(x.astype(np.float64), case.layout, sequence, head)
                for x in (run.arrays["lse"], dlse)
            )
            term = np.abs(dout * out).sum(1) + np.abs(upstream)
            # exp turns the rounding of its argument into a relative error of its value
            sizes[head] += (oracle.sink_probability(run.sinks[head], lse) * term * (1 + np.abs(lse))).sum()
    assert (np.abs(dsinks - run.reference.dsinks) <= 2 * np.finfo(np.float32).eps * sizes).all()


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.id)
def test_forward_matches_float64(case: Case) -> None:
    run = Run(case)
    out, lse = run.forward()
    rounding = relative(run.out_reference.astype(case.dtype), run.out_reference)
    # P is rounded to the type once more than the output is.
    assert relative(out, run.out_reference) <= (
        2 * rounding if case.dtype == "float16" else 4 * rounding + 1e-6
    )
    assert np.array_equal(np.isneginf(lse), np.isneginf(run.lse_reference))
    finite = np.isfinite(run.lse_reference)
    q, k = (np.abs(run.arrays[name].astype(np.float64)).max(initial=0.0) for name in ("q", "k"))
    bound = 2e-6 * (1 + case.call.scale(case.d) * case.d * q * k)
    assert np.abs(lse[finite] - run.lse_reference[finite]).max(initial=0.0) <= bound


UPSTREAM = {"dlse": True, "sinks": True}
DETERMINISTIC = [
    Case(n1=4, n2=2, mask=CAUSAL, s1=300, s2=270),
    Case(
        "TND", n1=2, n2=1, mask=WINDOW, win=(50, 3), cu_q=(0, 100, 130, 400), cu_kv=(0, 150, 150, 430),
        **UPSTREAM,
    ),
    Case("BNSD", b=2, n1=2, n2=1, s1=200, s2=180, used_q=(150, 200), used_kv=(130, 9), **UPSTREAM),
]  # fmt: skip


@pytest.mark.parametrize("case", DETERMINISTIC, ids=lambda case: case.id)
def test_deterministic_form_gives_the_same_bits_on_any_number_of_cores(case: Case) -> None:
    results = [
        Run(replace(case, cores=cores, split=split)).backward("deterministic")
        for cores, split in ((1, "cann"), (2, "cann"), (5, "balanced"), (36, "cann"))
    ]
    results.append(Run(replace(case, cores=4)).backward("deterministic"))
    for other in results[1:]:
        assert_same_bits(results[0], other)


def assert_same_bits(first: interpret.Gradients, second: interpret.Gradients) -> None:
    for x, y in zip(first, second, strict=True):
        assert (x is None) == (y is None)
        assert x is None or x.tobytes() == y.tobytes()


def test_swizzle_gives_the_same_bits_as_ranges_in_the_deterministic_form() -> None:
    case = Case(n1=2, n2=1, b=2, s1=300, s2=256, cores=2, mask=CAUSAL)
    dealt = Run(replace(case, l2=1, expect="swizzle")).backward("deterministic")
    assert_same_bits(dealt, Run(case).backward("deterministic"))


POISONED = [
    Case(n1=4, n2=2, mask=CAUSAL, s1=300, s2=140, dlse=True),
    Case(b=2, n1=2, n2=1, s1=150, s2=140, used_q=(100, 20), used_kv=(60, 140), **UPSTREAM),
    Case(
        "TND", n1=2, n2=1, mask=WINDOW, win=(20, 0), cu_q=(0, 200, 260), cu_kv=(0, 50, 180), used_q=(190, 9),
        **UPSTREAM,
    ),
    Case(b=2, n1=3, n2=3, mask=CAUSAL, s1=100, s2=64, used_q=(100, 7), used_kv=(50, 64), expect="BN2-dense"),
    Case(b=2, mask=WINDOW, win=(60, 10), s1=100, s2=64, used_q=(100, 0), used_kv=(0, 64), **UPSTREAM),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", POISONED, ids=lambda case: case.id)
def test_padding_and_rows_without_keys_do_not_leak(case: Case, form: str) -> None:
    assert_same_bits(Run(case).backward(form), Run(case, poison=True).backward(form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", POISONED[:3], ids=lambda case: case.id)
def test_a_dlse_of_zeros_gives_the_bits_of_none(case: Case, form: str) -> None:
    """Without dlse its buffer is one element of poison, and the flag is off."""
    run = Run(replace(case, dlse=False))
    without = run.backward(form)
    run.arrays["dlse"] = np.zeros_like(run.arrays["lse"])
    assert_same_bits(without, run.backward(form))


@pytest.mark.parametrize("form", FORMS)
def test_the_launch_flag_says_whether_dlse_is_read(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(replace(POISONED[0], dlse=False))
    without = run.backward(form)
    run.arrays["dlse"] = np.full_like(run.arrays["lse"], np.nan)
    monkeypatch.setattr(interpret, "launch_tiling", lambda plan, has_dlse: launch_tiling(plan, False))
    assert_same_bits(without, run.backward(form))


@pytest.mark.parametrize("sink", [-np.inf, np.inf, 80.0])
def test_extreme_sinks(sink: float) -> None:
    run = Run(Case(n1=2, n2=1, mask=CAUSAL, s1=140, s2=100, dlse=True))
    run.sinks = np.full(2, sink, np.float32)
    out, lse = run.forward()
    call = run.case.call
    reference, lse_reference = oracle.forward(
        *(run.arrays[name] for name in ("q", "k", "v")), call, run.sinks
    )
    assert np.allclose(lse, lse_reference, rtol=1e-5)
    assert np.abs(out - reference).max() <= 1e-3
    run.arrays |= {"attn_out": reference.astype(np.float16), "lse": lse_reference.astype(np.float32)}
    expected = oracle.backward(*run._operands(), call, run.sinks, run.arrays["dlse"])
    gradients = run.backward("accumulate")
    assert np.allclose(gradients.dsinks, expected.dsinks, rtol=1e-5)
    for name in ("dq", "dk", "dv"):
        assert np.allclose(getattr(gradients, name), getattr(expected, name), atol=2e-3)


def test_the_sum_of_a_long_sequence_keeps_the_precision_of_float32() -> None:
    """Every row adds the same number, so that what plain float32 loses adds up: 12 eps here.

    Half an eps is allowed for the sum of a lane, and for each of the 7 additions that halve 128 lanes to one.
    """
    case = Case(n1=1, n2=1, s1=20_000, s2=1, d=8, **UPSTREAM)
    run = Run(case)
    run.sinks = np.array([np.inf], np.float32)
    run.arrays["dlse"] = np.full_like(run.arrays["lse"], 0.1)
    run.arrays["dout"] = np.zeros_like(run.arrays["dout"])
    total = case.s1 * float(np.float32(0.1))
    dsinks = run.backward("deterministic").dsinks
    assert dsinks is not None
    assert abs(dsinks[0] - total) <= 4 * np.finfo(np.float32).eps * total


def test_cases_cover_the_contract() -> None:
    keys = [plan(case.problem(), case.target, split=case.split).key for case in CASES]
    assert len(CASES) >= 120
    names = {key.name for key in keys if key is not None}
    for part in ("BN2GS1S2", "BN2-", "tnd", "full", "causal", "window", "swizzle", "multiblk", "zero"):
        assert any(part in name for name in names), part
    for part in ("d64-dv128", "d128-dv128", "d192-dv128", "d192-dv192"):
        assert any(part in name for name in names), part
    assert {case.layout for case in CASES} == {"BSND", "BNSD", "TND"}
    assert {1, 36} <= {case.cores for case in CASES}


def test_addresses_of_a_long_sequence_do_not_overflow() -> None:
    import torch
    import triton
    import triton.language as tl

    from fag_kernel.ascend950.kernels.tiles import tile_address

    @triton.jit
    def probe(base, out, heads_at, row):
        at = tile_address(base, tl.load(out), tl.load(heads_at), row, 128, 4, 4)
        offs = tl.arange(0, 4)
        tl.store(out + offs[:, None] * 4 + offs[None, :], at.to(tl.int64))

    probe.fn.__globals__.update(tl=tl, tile_address=tile_address)
    base, heads = torch.zeros(1, dtype=torch.float16), torch.tensor([128], dtype=torch.int32)
    out = torch.full((4, 4), 5, dtype=torch.int64)
    probe[(1,)](base, out, heads, 600_000)
    expected = (5 + (600_000 + np.arange(4)[:, None]) * 128) * 128 + np.arange(4)
    assert (600_000 * 128 * 128) > 2**32
    assert np.array_equal(out.numpy() - base.data_ptr(), 2 * expected)
