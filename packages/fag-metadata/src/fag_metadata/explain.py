"""A split in plain words: what is computed, which route, who works, how evenly, and what was rejected and
why.

`explain` gathers facts and figures; `Explanation` shows them as text or as a dictionary for JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .api import metadata_for
from .layout import FORMAT_VERSION, Int32Array, Route, Split
from .loads import Balance, Load, balance
from .problem import AttentionProblem
from .routes import RouteChoice, select_route
from .targets import Target
from .terms import MaskMode
from .view import Metadata, unpack

_ROUTES = {
    Route.BN2GS1S2: "the tiles of a head may be spread over cores",
    Route.BN2_SINGLE: "a core owns whole heads of one tile",
    Route.BN2_MULTIBLK: "a core owns whole heads of several tiles",
}
_VERDICTS = {"capability": "cannot", "preference": "not wanted"}
_SHOWN = 8
"""Sequences listed one by one."""


@dataclass(frozen=True, eq=False)
class Explanation:
    """What there is to say about the metadata of one problem; str() of it is the text.

    `figures` say how even it is, `other` how even the other split would be.
    """

    problem: AttentionProblem
    target: Target
    split: Split
    route: RouteChoice
    view: Metadata
    figures: Balance
    other: Balance
    metadata: Int32Array = field(repr=False)

    def __str__(self) -> str:
        return "\n".join(
            (*self._what(), "", *self._route(), "", *self._forward(), *self._backward(), "", *self._end())
        )

    def to_dict(self) -> dict[str, Any]:
        """All facts and figures, ready for JSON."""
        problem, forward = self.problem, self.view.forward
        return {
            "problem": {
                "layout": problem.layout.value,
                "b": problem.b,
                "n1": problem.n1,
                "n2": problem.n2,
                "d": problem.d,
                "dv": problem.dv,
                "lengths_q": problem.lengths_q.tolist(),
                "lengths_kv": problem.lengths_kv.tolist(),
                "mask_mode": problem.mask_mode.name,
                "win_left": problem.win_left,
                "win_right": problem.win_right,
            },
            "target": {
                "name": self.target.name,
                "cube_cores": self.target.cube_cores,
                "vector_cores": self.target.vector_cores,
            },
            "split": self.split.name.lower(),
            "route": {
                "name": self.route.route.name,
                "trace": [verdict._asdict() for verdict in self.route.trace],
            },
            "forward": {
                "sections": forward.section_num,
                "block_rows": forward.m,
                "block_keys": forward.k,
                "merged_row_blocks": len(_merged(self.view)),
                "merging_vector_cores": len(self.view.merge_rows),
                **self.figures.forward.to_dict(),
            },
            "grad": None if self.figures.grad is None else self.figures.grad.to_dict(),
            "other_split": {
                "split": self._other_name,
                "forward_max_over_mean": round(self.other.forward.max_over_mean, 4),
                "grad_max_over_mean": self.other.grad and round(self.other.grad.max_over_mean, 4),
            },
            "words": len(self.metadata),
            "format_version": FORMAT_VERSION,
        }

    @property
    def _other_name(self) -> str:
        return "balanced" if self.split is Split.CANN else "cann"

    def _what(self) -> list[str]:
        problem, target = self.problem, self.target
        heads = f"{_count(problem.n1, 'query head')}, {_count(problem.n2, 'key-value head')}"
        dim = f"head dim {problem.d}" + ("" if problem.d == problem.dv else f", {problem.dv} for v")
        lines = [f"{heads}, {dim}, layout {problem.layout}.", _lengths(problem), _mask(problem)]
        cores = f"{_count(target.cube_cores, 'cube core')}, {_count(target.vector_cores, 'vector core')}"
        kind = "CANN's own words" if self.split is Split.CANN else "even visible areas"
        return [*lines, f"Target {target.name}: {cores}. Split {self.split.name.lower()}: {kind}."]

    def _route(self) -> list[str]:
        lines = [f"Route {self.route.route.name}: {_ROUTES[self.route.route]}."]
        lines += [
            f"  rejected {verdict.name} ({_VERDICTS[verdict.verdict]}): {verdict.reason}"
            for verdict in self.route.trace
            if verdict.verdict != "chosen"
        ]
        return lines

    def _forward(self) -> list[str]:
        split, load = self.view.forward, self.figures.forward
        rows = "" if self.problem.g == 1 else f" (a row is a query of one of {self.problem.g} heads)"
        lines = [f"Forward: base blocks of {split.m} rows x {split.k} keys{rows}."]
        lines += _load_lines(load, "block")
        why = "every core has one range"
        if split.section_num > 1:
            is_cann = self.split is Split.CANN
            why = "the heads of one fit the L2 cache" if is_cann else "two ranges a core are more even"
        lines.append(f"  {_count(split.section_num, 'section')}: {why}.")
        return [*lines, *self._merging()]

    def _merging(self) -> list[str]:
        view, load = self.view, self.figures.forward
        merged = _merged(view)
        if merged:
            parts = [row.num_partials for row in merged.values()]
            most = f"up to {max(parts)}" if max(parts) > 2 else "2"
            cores = _count(len(view.merge_rows), "vector core")
            verb = "is" if len(merged) == 1 else "are"
            return [
                f"  {_count(len(merged), 'row block')} {verb} shared by {most} cores and merged by {cores}."
            ]
        heaviest, blocks = int(load.tiles.max(initial=0)), int(load.tiles.sum())
        even = -(-blocks // min(load.cores, max(blocks, 1)))
        if view.forward.section_num > 1 or heaviest <= even:
            return ["  No row block is shared between cores, so nothing needs merging."]
        is_cann = self.split is Split.CANN
        rule = "CANN asks for more than 10 saved" if is_cann else "whole row blocks are even enough"
        text = f"it would take the heaviest core from {_count(heaviest, 'block')} to {even}; {rule}"
        return [f"  rejected sharing row blocks between cores: {text}."]

    def _backward(self) -> list[str]:
        grad, load = self.view.grad, self.figures.grad
        if grad is None or load is None:
            return ["", "Backward: not included."]
        return [
            "",
            "Backward: tiles of 128 queries x 128 keys of one query head.",
            *_load_lines(load, "tile"),
        ]

    def _end(self) -> list[str]:
        other = f"forward {self.other.forward.max_over_mean:.2f}"
        if self.other.grad is not None:
            other += f", backward {self.other.grad.max_over_mean:.2f}"
        size = f"{len(self.metadata)} int32 words, format version {FORMAT_VERSION}"
        return [
            f"With split {self._other_name} the heaviest core would be: {other} x the mean.",
            f"Tensor: {size}.",
        ]


def explain(
    problem: AttentionProblem, target: Target, split: Split | None = None, is_grad_enabled: bool = True
) -> Explanation:
    """Makes the metadata of a problem and gathers what there is to say about it."""
    if split is None:
        split = Split[target.default_split.upper()]
    name, other_name = ("cann", "balanced") if split is Split.CANN else ("balanced", "cann")
    metadata = metadata_for(problem, target, name, is_grad_enabled)  # type: ignore[arg-type]
    other = metadata_for(problem, target, other_name, is_grad_enabled)  # type: ignore[arg-type]
    view = unpack(metadata)
    return Explanation(
        problem,
        target,
        split,
        select_route(problem, target, split),
        view,
        balance(view, problem),
        balance(other, problem),
        metadata,
    )


def _merged(view: Metadata) -> dict[tuple[int, int, int], Any]:
    """(section, head, row block) -> one of its merge rows."""
    return {(row.section, row.bn, row.row): row for row in view.merge_rows}


def _load_lines(load: Load, noun: str) -> list[str]:
    if not load.tiles.any():
        return ["  Nothing to compute: no query sees a key."]
    used = f"{load.used_cores} of {load.cores} cores work on {_count(int(load.tiles.sum()), noun)}"
    most = _count(int(load.tiles.max()), noun)
    ratio = (
        f"{load.max_over_mean:.2f} x the mean by visible area, {load.max_over_mean_tiles:.2f} x by {noun}s"
    )
    best = f"no split of whole {noun}s is below {load.perfect_over_mean:.2f} x"
    if load.in_order > 1.005 * load.perfect:
        best += f", none with one range a core below {load.in_order_over_mean:.2f} x"
    return [f"  {used}; the heaviest has {most}.", f"  Heaviest core: {ratio}; {best}."]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _lengths(problem: AttentionProblem) -> str:
    if not problem.has_lengths_q and not problem.has_lengths_kv:
        entries = "1 batch entry" if problem.b == 1 else f"{problem.b} batch entries"
        return f"{entries}, {problem.s1} queries, {problem.s2} keys each."
    noun = "packed sequence" if problem.layout.value == "TND" else "batch slot"
    q, kv = problem.lengths_q, problem.lengths_kv
    text = f"{_count(problem.b, noun)}, "
    if np.array_equal(q, kv):
        return text + f"queries and keys {_some(q)}."
    return text + f"queries {_some(q)}; keys {_some(kv)}."


def _some(lengths: Any) -> str:
    if len(lengths) > 1 and (lengths == lengths[0]).all():
        return f"{lengths[0]} each"
    if len(lengths) <= _SHOWN:
        return ", ".join(map(str, lengths.tolist())) or "none"
    return f"{int(lengths.min())} to {int(lengths.max())}, {int(lengths.sum())} in all"


def _mask(problem: AttentionProblem) -> str:
    if problem.mask_mode is MaskMode.NO_MASK:
        return "No mask."
    if problem.mask_mode is MaskMode.CAUSAL:
        return "Causal mask, aligned bottom-right."
    sides = [
        f"{name} {'open' if size < 0 else size}"
        for name, size in (("left", problem.win_left), ("right", problem.win_right))
    ]
    return f"Sliding window, {', '.join(sides)}, aligned bottom-right."
