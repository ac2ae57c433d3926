"""Is a backward split consistent with its problem, and does it cover every visible tile exactly once?"""

from __future__ import annotations

import numpy as np

from .findings import Finding
from .layout import TILE, GradSplit, Int32Array, LayoutWord
from .problem import AttentionProblem
from .terms import Layout
from .tile_areas import TileGrid


def find_grad_faults(grad: GradSplit, problem: AttentionProblem) -> list[Finding]:
    """Checks the FAG block of a problem.

    Args:
        grad: Backward split, of any origin.
        problem: What it should be for.

    Returns:
        What is wrong, empty if nothing is.

    Example:
        >>> from fag_metadata import TARGETS
        >>> from fag_metadata.grad_split import split_grad
        >>> sizes = dict(batch_size=1, max_seqlen_q=300, max_seqlen_kv=300)
        >>> problem = AttentionProblem.from_metadata_args(2, 2, 64, **sizes)
        >>> find_grad_faults(split_grad(problem, TARGETS["Ascend950PR_9599"]), problem)
        []
    """
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
