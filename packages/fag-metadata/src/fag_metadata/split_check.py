"""Is a split right: is every visible block and tile in exactly one range, and every partial result merged?

Reads only the words, not how they were made, so that it holds for any split and for CANN's own tensors.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from .areas import TileGrid
from .forward_blocks import BlockSize, ForwardBlocks
from .forward_pack import BoolArray
from .layout import TILE, ForwardSplit, GradSplit, Int32Array, LayoutWord
from .problem import AttentionProblem
from .ranges import Int64Array
from .terms import Layout

_Numbers = Int64Array | Int32Array
_MOST_FINDINGS = 8
"""Of one kind; a corrupt tensor has thousands."""


class Finding(NamedTuple):
    """One thing that is wrong: in part "head", "forward" or "backward", in a field of a table of layout.py;
    and in words, what must hold and what was found.
    """

    part: str
    field: str
    text: str


_forward = partial(Finding, "forward")
_backward = partial(Finding, "backward")


def _find_gaps(start: _Numbers, end: _Numbers, total: int) -> list[tuple[int, int, int, str]]:
    """(range behind it, low, high, what is wrong) of every place that is not in exactly one range."""
    gaps = zip([0, *end.tolist()], [*start.tolist(), total], strict=True)
    return [
        (i, *sorted(gap), "in no range" if gap[0] < gap[1] else "in two ranges")
        for i, gap in enumerate(gaps)
        if gap[0] != gap[1]
    ]


class _Ranges(NamedTuple):
    """The FA rows that are used, in order: section, core, words, and blocks in front of start and end."""

    section: Int64Array
    core: Int64Array
    words: Int64Array
    start: Int64Array
    end: Int64Array


def find_forward_faults(forward: ForwardSplit, problem: AttentionProblem) -> list[Finding]:
    """Lists what is wrong with a forward split, at most a few findings of one kind."""
    if forward.m < 1 or forward.k < 1:
        return [_forward("m", f"a base block must have rows and keys, got m={forward.m}, k={forward.k}")]
    blocks = ForwardBlocks(problem, BlockSize(forward.m, forward.k))
    fa = forward.fa.astype(np.int64)
    is_used = np.asarray(fa[:, :, 3:6].any(axis=2), np.bool_)
    faults = _find_order_faults(fa, is_used)
    section, core = np.nonzero(is_used)
    words = fa[section, core]
    outside = _is_outside(blocks, words[:, 0:3]) | _is_outside(blocks, words[:, 3:6])
    for i in np.flatnonzero(outside)[:_MOST_FINDINGS].tolist():
        text = f"must be places of the problem, got {words[i, :6].tolist()}"
        faults.append(_forward("start_bn", f"section {section[i]} core {core[i]}: {text}"))
    if faults or not len(words):
        return faults
    start, end = blocks.blocks_at(*words[:, 0:3].T), blocks.blocks_at(*words[:, 3:6].T)
    ranges = _Ranges(section, core, words, start, end)
    return _find_cover_faults(blocks, ranges) or _find_merge_faults(blocks, forward, ranges)


def _find_order_faults(fa: Int64Array, is_used: BoolArray) -> list[Finding]:
    faults = []
    is_gap = is_used[:, 1:] & ~is_used[:, :-1]
    for section, core in np.argwhere(is_gap)[:_MOST_FINDINGS].tolist():
        text = f"section {section}: core {core} has no range but core {core + 1} has"
        faults.append(_forward("end_bn", text))
    is_stray = ~is_used & fa.any(axis=2)
    for section, core in np.argwhere(is_stray)[:_MOST_FINDINGS].tolist():
        text = f"no range, so all zero, got {fa[section, core, :7].tolist()}"
        faults.append(_forward("start_bn", f"section {section} core {core}: {text}"))
    return faults


def _is_outside(blocks: ForwardBlocks, places: Int64Array) -> BoolArray:
    head, row, key = places.T
    if not blocks.num_heads:
        return np.asarray(places.any(axis=1), np.bool_)
    entry = np.clip(head, 0, blocks.num_heads - 1) // blocks.heads_per_entry
    num_rows = -(-blocks.lengths_q[entry] * blocks.g // blocks.size.rows)
    num_keys = -(-blocks.lengths_kv[entry] // blocks.size.keys)
    is_begin = (row == 0) & (key == 0)
    is_inside = (row >= 0) & (row < num_rows) & (key >= 0) & (key <= num_keys)
    is_head = (head >= 0) & (head < blocks.num_heads)
    return np.asarray(~(is_head & (is_inside | is_begin) | (head == blocks.num_heads) & is_begin), np.bool_)


def _find_cover_faults(blocks: ForwardBlocks, ranges: _Ranges) -> list[Finding]:
    section, core, _, start, end = ranges
    faults = []
    for i in np.flatnonzero(end < start)[:_MOST_FINDINGS].tolist():
        text = f"must end behind its start, got blocks [{start[i]}, {end[i]})"
        faults.append(_forward("end_bn", f"section {section[i]} core {core[i]}: {text}"))
    for i, low, high, kind in _find_gaps(start, end, blocks.num_blocks)[:_MOST_FINDINGS]:
        where = f"before section {section[i]} core {core[i]}" if i < len(core) else "behind the last core"
        faults.append(_forward("start_bn", f"blocks [{low}, {high}) {where} are {kind}"))
    return faults


def _find_merge_faults(blocks: ForwardBlocks, forward: ForwardSplit, ranges: _Ranges) -> list[Finding]:
    expected, faults = _expected_merges(blocks, ranges)
    found = _found_merges(forward)
    has_fd = bool(found)
    if forward.has_fd != has_fd:
        faults.append(_forward("has_fd", f"must be {int(has_fd)}, got {int(forward.has_fd)}"))
    for key in sorted(expected.keys() | found.keys())[:_MOST_FINDINGS]:
        name = "section {} head {} row block {}: ".format(*key)
        if key not in found:
            text = f"{expected[key][1]} cores share it, but it has no merge task"
            faults.append(_forward("num_partials", name + text))
            continue
        if key not in expected:
            text = "has a merge task, but one core does all of it"
            faults.append(_forward("num_partials", name + text))
            continue
        slot, parts, num_rows = expected[key]
        pieces = found[key]
        wrong = [piece for piece in pieces if piece[:2] != (slot, parts)]
        if wrong:
            text = f"must merge {parts} results from slot {slot}, got {wrong[0][1]} from slot {wrong[0][0]}"
            faults.append(_forward("first_slot", name + text))
        if [0, *accumulate(piece[3] for piece in pieces)] != [*(piece[2] for piece in pieces), num_rows]:
            text = f"its pieces must hold rows 0 to {num_rows} once, in order"
            faults.append(_forward("row_start", name + text))
    return faults


_Key = tuple[int, int, int]  # section, head, row block


def _found_merges(forward: ForwardSplit) -> dict[_Key, list[tuple[int, int, int, int]]]:
    """(first slot, partial results, first row, rows) of the pieces of every row block with a merge task."""
    found: dict[_Key, list[tuple[int, int, int, int]]] = {}
    for section, core in np.argwhere(forward.fd[:, :, 5] != 0).tolist():
        head, row, *piece = forward.fd[section, core, :6].tolist()
        found.setdefault((section, head, row), []).append(tuple(piece))
    return found


def _expected_merges(
    blocks: ForwardBlocks, ranges: _Ranges
) -> tuple[dict[_Key, tuple[int, int, int]], list[Finding]]:
    """(first slot, partial results, rows) of every row block that cores share."""
    expected: dict[_Key, tuple[int, int, int]] = {}
    faults: list[Finding] = []
    works = ranges.end > ranges.start
    section, core, words, _, end = (column[works] for column in ranges)
    if not len(end):
        return expected, faults
    head, row, _, is_inside, _ = blocks.positions(np.minimum(end, blocks.num_blocks - 1))
    is_inside = is_inside & (end < blocks.num_blocks)
    for i in np.flatnonzero(is_inside).tolist():
        key = (int(section[i]), int(head[i]), int(row[i]))
        if key not in expected:
            # A core that first finishes another shared row block uses its slot word for that one.
            finishes_other = i > 0 and is_inside[i - 1] and (head[i - 1], row[i - 1]) != (head[i], row[i])
            num_rows = int(blocks.lengths_q[head[i] // blocks.heads_per_entry]) * blocks.g
            num_rows = min(num_rows - key[2] * blocks.size.rows, blocks.size.rows)
            expected[key] = (int(words[i, 6]) + int(finishes_other), 1, num_rows)
        slot, parts, num_rows = expected[key]
        if section[i + 1] != section[i]:
            text = f"must end at a head, ends inside row block {key[2]}"
            faults.append(_forward("end_bn", f"section {key[0]}: {text}"))
        elif words[i + 1, 6] != slot + parts:
            text = f"must write its first result to slot {slot + parts}, got {words[i + 1, 6]}"
            faults.append(_forward("first_slot", f"section {key[0]} core {core[i + 1]}: {text}"))
        expected[key] = (slot, parts + 1, num_rows)
    return expected, faults[:_MOST_FINDINGS]


def find_grad_faults(grad: GradSplit, problem: AttentionProblem) -> list[Finding]:
    """Lists what is wrong with a backward split."""
    faults = _find_word_faults(grad, problem)
    if faults:
        return faults  # the tiles cannot be counted without these
    grid = TileGrid(problem) if problem.is_variable else TileGrid(problem, grad.o1, grad.o2)
    faults = _find_range_faults(grad, grid)
    used = grad.used_cubes
    if problem.is_variable and used and not faults:
        entry = np.searchsorted(grid.tile_start, grad.start[:used], side="right") - 1
        entry[0] = 0
        for core in np.flatnonzero(grad.batch[:used] != entry)[:1].tolist():
            text = f"core {core} starts in batch entry {entry[core]}, got {grad.batch[core]}"
            faults.append(_backward("batch", text))
    faults += _find_row_faults("dq", grad.dq_rows, grad.dq_start, grad.dq_end, grad.used_vectors)
    faults += _find_row_faults("dkv", grad.dkv_rows, grad.dkv_start, grad.dkv_end, grad.used_vectors)
    return faults


def _find_word_faults(grad: GradSplit, problem: AttentionProblem) -> list[Finding]:
    is_bsnd = problem.layout is Layout.TND and not problem.is_variable
    expected = {
        "layout": int(LayoutWord["BSND" if is_bsnd else problem.layout]),
        "mask_mode": int(problem.mask_mode),
        "sparse_mode": int(problem.mask_mode),
        "win_left": problem.win_left,
        "win_right": problem.win_right,
        "o1": -(-grad.s1 // TILE),
        "o2": -(-grad.s2 // TILE),
    }
    faults = [
        _backward(name, f"must be {value}, got {getattr(grad, name)}")
        for name, value in expected.items()
        if getattr(grad, name) != value
    ]
    for name, bound, lengths in (("s1", grad.s1, problem.lengths_q), ("s2", grad.s2, problem.lengths_kv)):
        longest = int(lengths.max(initial=0))
        if bound < longest:
            faults.append(_backward(name, f"must be at least the longest sequence {longest}, got {bound}"))
    for name, used, most in (
        ("used_cubes", grad.used_cubes, len(grad.start)),
        ("used_vectors", grad.used_vectors, len(grad.dq_start)),
    ):
        if not 0 <= used <= most:
            faults.append(_backward(name, f"must be in 0..{most}, got {used}"))
    return faults


def _find_range_faults(grad: GradSplit, grid: TileGrid) -> list[Finding]:
    used, total = grad.used_cubes, grid.total_tiles
    start, end = grad.start[:used].astype(np.int64), grad.end[:used].astype(np.int64)
    faults = []
    if grad.start[used:].any() or grad.end[used:].any():
        faults.append(_backward("end", f"cores from {used} on must have no tiles"))
    if used == 0:
        if grid.total_area:
            text = f"must be positive for {grid.total_area} visible pairs, got 0"
            faults.append(_backward("used_cubes", text))
        return faults
    for core in np.flatnonzero((start < 0) | (end > total) | (end <= start))[:1].tolist():
        text = f"core {core} must have tiles inside [0, {total}), got [{start[core]}, {end[core]})"
        return [*faults, _backward("end", text)]
    for core, low, high, kind in _find_gaps(start, end, total):
        area = int(np.diff(grid.area_before(np.array([low, high])))[0])
        text = f"tiles [{low}, {high}) before core {core} are {kind} ({area} visible pairs)"
        faults.append(_backward("start", text))
    return faults


def _find_row_faults(name: str, rows: int, start: Int32Array, end: Int32Array, used: int) -> list[Finding]:
    if rows < 0:
        return [_backward(f"{name}_rows", f"must not be negative, got {rows}")]
    if used and (_find_gaps(start[:used], end[:used], rows) or start[used:].any() or end[used:].any()):
        text = f"the rows of {used} vector cores must follow each other from 0 to {rows}"
        return [_backward(f"{name}_start", text)]
    return []
