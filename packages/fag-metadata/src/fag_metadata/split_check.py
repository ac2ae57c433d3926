"""Is a split right: is every visible block and tile in exactly one range, and every partial result merged?

Reads only the words, not how they were made, so that it holds for any split and for CANN's own tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .areas import TileGrid
from .forward_blocks import BlockSize, ForwardBlocks, Int64Array
from .forward_pack import BoolArray
from .layout import TILE, ForwardSplit, GradSplit, Int32Array, LayoutWord
from .problem import AttentionProblem
from .terms import Layout

_MOST_FINDINGS = 8
"""Of one kind; a corrupt tensor has thousands."""


class Finding(NamedTuple):
    """One thing that is wrong with a metadata tensor.

    Attributes:
        part: "head", "forward" or "backward".
        field: Name of the field, as in the tables of layout.py.
        text: What must hold, and what was found.
    """

    part: str
    field: str
    text: str


def find_forward_faults(forward: ForwardSplit, problem: AttentionProblem) -> list[Finding]:
    """Lists what is wrong with a forward split, at most a few findings of one kind.

    None if the ranges of the cube cores hold every valid block once and the merge tasks fit them.
    """
    if forward.m < 1 or forward.k < 1:
        return [_fault("m", f"a base block must have rows and keys, got m={forward.m}, k={forward.k}")]
    blocks = ForwardBlocks(problem, BlockSize(forward.m, forward.k))
    fa = forward.fa.astype(np.int64)
    is_used = np.asarray(fa[:, :, 3:6].any(axis=2), np.bool_)
    faults = _find_order_faults(fa, is_used)
    section, core = np.nonzero(is_used)
    rows = fa[section, core]
    outside = _is_outside(blocks, rows[:, 0:3]) | _is_outside(blocks, rows[:, 3:6])
    for i in np.flatnonzero(outside)[:_MOST_FINDINGS].tolist():
        text = f"must be places of the problem, got {rows[i, :6].tolist()}"
        faults.append(_fault("start_bn", f"section {section[i]} core {core[i]}: {text}"))
    if faults or not len(rows):
        return faults
    start, end = blocks.blocks_at(*rows[:, 0:3].T), blocks.blocks_at(*rows[:, 3:6].T)
    faults += _find_cover_faults(blocks, section, core, start, end)
    if not faults:
        faults += _find_merge_faults(blocks, forward, section, core, rows, start, end)
    return faults


def _fault(field: str, text: str) -> Finding:
    return Finding("forward", field, text)


def _find_order_faults(fa: Int64Array, is_used: BoolArray) -> list[Finding]:
    faults = []
    is_gap = is_used[:, 1:] & ~is_used[:, :-1]
    for section, core in np.argwhere(is_gap)[:_MOST_FINDINGS].tolist():
        faults.append(
            _fault("end_bn", f"section {section}: core {core} has no range but core {core + 1} has")
        )
    is_stray = ~is_used & fa.any(axis=2)
    for section, core in np.argwhere(is_stray)[:_MOST_FINDINGS].tolist():
        words = fa[section, core, :7].tolist()
        faults.append(
            _fault("start_bn", f"section {section} core {core}: no range, so all zero, got {words}")
        )
    return faults


def _is_outside(blocks: ForwardBlocks, places: Int64Array) -> BoolArray:
    head, row, key = places.T
    if not blocks.num_heads:
        return np.asarray(places.any(axis=1), np.bool_)
    entry = np.clip(head, 0, blocks.num_heads - 1) // blocks.heads_per_entry
    num_rows = -(-blocks.lengths_q[entry] * blocks.g // blocks.size.rows)
    num_keys = -(-blocks.lengths_kv[entry] // blocks.size.keys)
    is_end = (head == blocks.num_heads) & (row == 0) & (key == 0)
    is_inside = (head >= 0) & (head < blocks.num_heads) & (row >= 0) & (key >= 0) & (key <= num_keys)
    is_inside &= (row < num_rows) | ((row == 0) & (key == 0))
    return np.asarray(~(is_end | is_inside), np.bool_)


def _find_cover_faults(
    blocks: ForwardBlocks, section: Int64Array, core: Int64Array, start: Int64Array, end: Int64Array
) -> list[Finding]:
    faults = []
    for i in np.flatnonzero(end < start)[:_MOST_FINDINGS].tolist():
        text = f"must end behind its start, got blocks [{start[i]}, {end[i]})"
        faults.append(_fault("end_bn", f"section {section[i]} core {core[i]}: {text}"))
    before, after = np.append(0, end), np.append(start, blocks.num_blocks)
    for i in np.flatnonzero(before != after)[:_MOST_FINDINGS].tolist():
        low, high = sorted((int(before[i]), int(after[i])))
        kind = "in no range" if before[i] < after[i] else "in two ranges"
        where = f"before section {section[i]} core {core[i]}" if i < len(core) else "behind the last core"
        faults.append(_fault("start_bn", f"blocks [{low}, {high}) {where} are {kind}"))
    return faults


def _find_merge_faults(
    blocks: ForwardBlocks,
    forward: ForwardSplit,
    section: Int64Array,
    core: Int64Array,
    rows: Int64Array,
    start: Int64Array,
    end: Int64Array,
) -> list[Finding]:
    """Compares the row blocks that several cores share with the merge tasks."""
    expected, faults = _expected_merges(blocks, section, core, rows, start, end)
    found = _found_merges(forward)
    has_fd = bool(found)
    if forward.has_fd != has_fd:
        faults.append(_fault("has_fd", f"must be {int(has_fd)}, got {int(forward.has_fd)}"))
    for key in sorted(expected.keys() | found.keys())[:_MOST_FINDINGS]:
        name = f"section {key[0]} head {key[1]} row block {key[2]}"
        if key not in found:
            faults.append(
                _fault("num_partials", f"{name}: {expected[key][1]} cores share it, but it has no merge task")
            )
            continue
        if key not in expected:
            faults.append(_fault("num_partials", f"{name}: has a merge task, but one core does all of it"))
            continue
        slot, parts, num_rows = expected[key]
        pieces = found[key]
        for first_slot, num_partials, _, _ in pieces:
            if (first_slot, num_partials) != (slot, parts):
                text = (
                    f"must merge {parts} results from slot {slot}, got {num_partials} from slot {first_slot}"
                )
                faults.append(_fault("first_slot", f"{name}: {text}"))
                break
        begin = 0
        for _, _, row_start, row_count in pieces:
            if row_start != begin:
                break
            begin += row_count
        if begin != num_rows:
            text = f"its pieces must hold rows 0 to {num_rows} once, in order"
            faults.append(_fault("row_start", f"{name}: {text}"))
    return faults


_Key = tuple[int, int, int]


def _found_merges(forward: ForwardSplit) -> dict[_Key, list[tuple[int, int, int, int]]]:
    """(section, head, row block) -> (first slot, partial results, first row, rows) of its pieces."""
    found: dict[_Key, list[tuple[int, int, int, int]]] = {}
    for section, core in np.argwhere(forward.fd[:, :, 5] != 0).tolist():
        head, row, slot, parts, row_start, row_count = forward.fd[section, core, :6].tolist()
        found.setdefault((section, head, row), []).append((slot, parts, row_start, row_count))
    return found


def _expected_merges(
    blocks: ForwardBlocks,
    section: Int64Array,
    core: Int64Array,
    rows: Int64Array,
    start: Int64Array,
    end: Int64Array,
) -> tuple[dict[_Key, tuple[int, int, int]], list[Finding]]:
    """(section, head, row block) -> (first slot, partial results, rows) from the cores that share them."""
    expected: dict[_Key, tuple[int, int, int]] = {}
    faults: list[Finding] = []
    works = end > start
    section, core, rows, start, end = section[works], core[works], rows[works], start[works], end[works]
    if not len(end):
        return expected, faults
    place = blocks.positions(np.minimum(end, blocks.num_blocks - 1))
    is_inside = place.is_inside_row & (end < blocks.num_blocks)
    head, row = place.head, place.row
    for i in np.flatnonzero(is_inside).tolist():
        key = (int(section[i]), int(head[i]), int(row[i]))
        if key not in expected:
            # A core that first finishes another shared row block uses its slot word for that one.
            finishes_other = i > 0 and is_inside[i - 1] and (head[i - 1], row[i - 1]) != (head[i], row[i])
            entry = int(head[i]) // blocks.heads_per_entry
            num_rows = int(blocks.lengths_q[entry]) * blocks.g - key[2] * blocks.size.rows
            expected[key] = (int(rows[i, 6]) + int(finishes_other), 1, min(num_rows, blocks.size.rows))
        slot, parts, num_rows = expected[key]
        if section[i + 1] != section[i]:
            faults.append(
                _fault("end_bn", f"section {key[0]}: must end at a head, ends inside row block {key[2]}")
            )
        elif int(rows[i + 1, 6]) != slot + parts:
            text = f"must write its first result to slot {slot + parts}, got {int(rows[i + 1, 6])}"
            faults.append(_fault("first_slot", f"section {key[0]} core {core[i + 1]}: {text}"))
        expected[key] = (slot, parts + 1, num_rows)
    return expected, faults[:_MOST_FINDINGS]


def find_grad_faults(grad: GradSplit, problem: AttentionProblem) -> list[Finding]:
    """Lists what is wrong with a backward split, of any origin."""
    faults = [*_find_word_faults(grad, problem)]
    if faults:
        return faults  # the tiles cannot be counted without these
    is_own = problem.is_variable
    grid = TileGrid(problem) if is_own else TileGrid(problem, grad.o1, grad.o2)
    faults += _find_range_faults(grad, grid)
    if is_own and not faults and grad.used_cubes:
        starts = grad.start[: grad.used_cubes]
        entry = np.searchsorted(grid.tile_start, starts, side="right") - 1
        entry[0] = 0
        wrong = np.flatnonzero(grad.batch[: grad.used_cubes] != entry)
        if len(wrong):
            core = int(wrong[0])
            text = f"core {core} starts in batch entry {entry[core]}, got {grad.batch[core]}"
            faults.append(Finding("backward", "batch", text))
    faults += _find_row_faults("dq", grad.dq_rows, grad.dq_start, grad.dq_end, grad.used_vectors)
    faults += _find_row_faults("dkv", grad.dkv_rows, grad.dkv_start, grad.dkv_end, grad.used_vectors)
    return faults


def _find_word_faults(grad: GradSplit, problem: AttentionProblem) -> list[Finding]:
    """Compares the words that describe the problem with it."""
    is_tnd = problem.layout is Layout.TND and problem.is_variable
    layout = (
        LayoutWord.TND if is_tnd else LayoutWord.BNSD if problem.layout is Layout.BNSD else LayoutWord.BSND
    )
    expected = {
        "layout": int(layout),
        "mask_mode": int(problem.mask_mode),
        "sparse_mode": int(problem.mask_mode),
        "win_left": problem.win_left,
        "win_right": problem.win_right,
        "o1": -(-grad.s1 // TILE),
        "o2": -(-grad.s2 // TILE),
    }
    faults = [
        Finding("backward", name, f"must be {value}, got {getattr(grad, name)}")
        for name, value in expected.items()
        if getattr(grad, name) != value
    ]
    for name, bound, lengths in (("s1", grad.s1, problem.lengths_q), ("s2", grad.s2, problem.lengths_kv)):
        longest = int(lengths.max(initial=0))
        if bound < longest:
            text = f"must be at least the longest sequence {longest}, got {bound}"
            faults.append(Finding("backward", name, text))
    if not 0 <= grad.used_cubes <= len(grad.start):
        text = f"must be in 0..{len(grad.start)}, got {grad.used_cubes}"
        faults.append(Finding("backward", "used_cubes", text))
    if not 0 <= grad.used_vectors <= len(grad.dq_start):
        text = f"must be in 0..{len(grad.dq_start)}, got {grad.used_vectors}"
        faults.append(Finding("backward", "used_vectors", text))
    return faults


def _find_range_faults(grad: GradSplit, grid: TileGrid) -> list[Finding]:
    used = grad.used_cubes
    start, end = grad.start[:used].astype(np.int64), grad.end[:used].astype(np.int64)
    total = grid.total_tiles
    faults = []
    if grad.start[used:].any() or grad.end[used:].any():
        faults.append(Finding("backward", "end", f"cores from {used} on must have no tiles"))
    if used == 0:
        if grid.total_area:
            text = f"must be positive for {grid.total_area} visible pairs, got 0"
            faults.append(Finding("backward", "used_cubes", text))
        return faults
    if (start < 0).any() or (end > total).any() or (end <= start).any():
        core = int(np.argmax((start < 0) | (end > total) | (end <= start)))
        text = f"core {core} must have tiles inside [0, {total}), got [{start[core]}, {end[core]})"
        return [*faults, Finding("backward", "end", text)]
    # each boundary with its predecessor: [0] + ends against starts + [total]
    before, after = np.append(0, end), np.append(start, total)
    for core in np.flatnonzero(before != after).tolist():
        low, high = sorted((int(before[core]), int(after[core])))
        area = int(np.diff(grid.area_before(np.array([low, high])))[0])
        kind = "in no range" if before[core] < after[core] else "in two ranges"
        text = f"tiles [{low}, {high}) before core {core} are {kind} ({area} visible pairs)"
        faults.append(Finding("backward", "start", text))
    return faults


def _find_row_faults(name: str, rows: int, start: Int32Array, end: Int32Array, used: int) -> list[Finding]:
    if rows < 0:
        return [Finding("backward", f"{name}_rows", f"must not be negative, got {rows}")]
    if used == 0:
        return []
    chain = np.append(0, end[:used]) == np.append(start[:used], rows)
    if not chain.all() or start[used:].any() or end[used:].any():
        text = f"the rows of {used} vector cores must follow each other from 0 to {rows}"
        return [Finding("backward", f"{name}_start", text)]
    return []
