"""A model of the time of the kernels on a device: an estimate from the plan and the tile sizes, not a
measurement.

What is counted exactly, from the metadata's ranges: which core visits which blocks, and from the tile sizes
the multiply-adds, the elementwise operations and the bytes that each block moves. What is assumed is in
`Assumptions`, with its source. The result is a pair of times: `overlapped`, in which cube, vector and
memory of a core work at the same time without waiting, and `serial`, in which they take turns. A real
kernel lies between, nearer to the first the better the compiler pipelines it; nobody has run these kernels
on hardware.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fag_kernel.ascend950.catalog import Form, kernel_dims
from fag_kernel.ascend950.tile_table import tile_sizes
from fag_metadata import MaskMode, unpack

if TYPE_CHECKING:
    from fag_kernel.plan import TilingPlan

TILE: Final = 128


@dataclass(frozen=True)
class Assumptions:
    """What the model takes for granted of a device.

    Attributes:
        clock_hz: Clock of the cores. 36 cores at 1.65 GHz give 487 TFLOP/s in 16 bit: half of the 1 PFLOP/s
            in 8 bit that the vendor announces for the family.
        macs_per_cycle: Multiply-adds of a cube core: 16 x 16 x 16.
        lanes: float32 lanes of a vector core (256 bytes).
        vector_cores_used: Vector cores that work per cube core. The compiler (ascendnpu-ir 1.2.0) reports
            that it reverts the split of these kernels over the two, so one.
        l2_bytes_per_cycle: Between L2 and one core, each way.
        hbm_bytes_per_s: Device memory; announced: 1.6e12 for 950PR, 4e12 for 950DT.
        launch_s: Start and end of one launch.
        score_operations: Vector operations per score: scale, subtract, clamp, exp (4), subtract, multiply,
            two roundings, two moves to L1.
        mask_operations: More of them where a block is masked.
        moved_operations: Per element of dq, and of dout and attn_out for sfmg.
    """

    clock_hz: float = 1.65e9
    macs_per_cycle: int = 4096
    lanes: int = 64
    vector_cores_used: int = 1
    l2_bytes_per_cycle: int = 64
    hbm_bytes_per_s: float = 1.6e12
    launch_s: float = 5e-6
    score_operations: int = 13
    mask_operations: int = 7
    moved_operations: int = 2


class Work(NamedTuple):
    """What is done, summed over the cores or of the slowest one.

    Attributes:
        macs: Multiply-adds of the matrix products.
        vector_operations: Elementwise float32 operations.
        l2_bytes: Between the cores and L2.
    """

    macs: float
    vector_operations: float
    l2_bytes: float


@dataclass(frozen=True)
class Estimate:
    """The model's answer for one gradient.

    Attributes:
        total: Work of all cores in the main launches.
        slowest: Work of the core with the longest overlapped time.
        pass_bytes: Bytes of device memory that the clear and cast passes move.
        hbm_bytes: Bytes of device memory in the main launches: every tensor once, and again what L2 cannot
            hold.
        overlapped_s: Seconds if cube, vector and memory overlap perfectly.
        serial_s: Seconds if they take turns.
    """

    total: Work
    slowest: Work
    pass_bytes: float
    hbm_bytes: float
    overlapped_s: float
    serial_s: float


class Blocks(NamedTuple):
    """Blocks that each core visits: all, those with a mask, and columns (or rows) of blocks that it opens."""

    visited: NDArray[np.float64]
    masked: NDArray[np.float64]
    lines: NDArray[np.float64]


def _lines_of_core(plan: TilingPlan, metadata: NDArray[np.int32]) -> list[list[tuple[int, int, int, int]]]:
    """Per core (batch entry, column of tiles, first tile row, end tile row) that it owns, masked tiles
    included.
    """
    problem = plan.problem
    split = unpack(metadata).grad
    assert split is not None
    cores: list[list[tuple[int, int, int, int]]] = []
    s1, s2 = problem.lengths_q, problem.lengths_kv
    own = problem.is_variable
    grids = [
        (-(-int(s1[b]) // TILE), -(-int(s2[b]) // TILE)) if own else (split.o1, split.o2)
        for b in range(problem.b)
    ]
    bases = np.concatenate([[0], np.cumsum([problem.n1 * o1 * o2 for o1, o2 in grids])])
    if plan.is_swizzle:
        o1, o2 = grids[0]
        units = problem.b * problem.n1 * o2
        return [
            [(u // (problem.n1 * o2), u % o2, 0, o1) for u in range(core, units, plan.block_dim)]
            for core in range(plan.block_dim)
        ]
    for core in range(plan.block_dim):
        start, end = int(split.start[core]), int(split.end[core])
        lines: list[tuple[int, int, int, int]] = []
        for b, (o1, o2) in enumerate(grids):
            low, high = max(start - int(bases[b]), 0), min(end - int(bases[b]), problem.n1 * o1 * o2)
            units_of_entry = range(low // o1, -(-high // o1)) if low < high else range(0)
            lines += [
                (b, unit % o2, max(low - unit * o1, 0), min(high - unit * o1, o1)) for unit in units_of_entry
            ]
        cores.append(lines)
    return cores


def _count(plan: TilingPlan, metadata: NDArray[np.int32], bm: int, bn: int) -> Blocks:
    """Blocks of bm rows and bn keys per core."""
    cores = _lines_of_core(plan, metadata)
    visited, masked, lines = (np.zeros(len(cores)) for _ in range(3))
    known: dict[tuple[int, int, int, int], tuple[int, int, int]] = {}
    for core, owned in enumerate(cores):
        for line in owned:
            if line not in known:
                known[line] = _count_line(plan, line, bm, bn)
            for counter, value in zip((visited, masked, lines), known[line], strict=True):
                counter[core] += value
    return Blocks(visited, masked, lines)


def _count_line(plan: TilingPlan, line: tuple[int, int, int, int], bm: int, bn: int) -> tuple[int, int, int]:
    b, column, row_low, row_high = line
    problem = plan.problem
    s1, s2 = int(problem.lengths_q[b]), int(problem.lengths_kv[b])
    low, high = _shifts(plan, s1, s2)
    visited = masked = lines = 0
    for first in range(column * TILE, min((column + 1) * TILE, s2), bn):
        last = min(first + bn, s2) - 1
        begin, end = max(first - high, row_low * TILE, 0), min(last - low + 1, row_high * TILE, s1)
        if begin >= end:
            continue
        inner_begin, inner_end = max(last - high, 0), min(first - low + 1, s1)
        blocks = -(-end // bm) - begin // bm
        inner = 0
        if first + bn <= s2:
            inner = max(0, min(inner_end, end) // bm - -(-max(inner_begin, begin) // bm))
        visited += blocks
        masked += blocks - inner
        lines += 1
    return visited, masked, lines


def _shifts(plan: TilingPlan, s1: int, s2: int) -> tuple[int, int]:
    far = 1 << 40
    problem = plan.problem
    if problem.mask_mode == MaskMode.NO_MASK:
        return -far, far
    if problem.mask_mode == MaskMode.CAUSAL:
        return -far, s2 - s1
    low = -far if problem.win_left < 0 else s2 - s1 - problem.win_left
    return low, far if problem.win_right < 0 else s2 - s1 + problem.win_right


def estimate(
    plan: TilingPlan,
    metadata: NDArray[np.int32],
    *,
    form: Form = "accumulate",
    assumptions: Assumptions | None = None,
) -> Estimate:
    """Model the time of a gradient.

    Args:
        plan: Plan for an Ascend target.
        metadata: The tensor that the plan goes with.
        form: "accumulate" or "deterministic". The blocks of the deterministic form are counted with the
            ranges of the accumulate form: the same number, a little differently spread.
        assumptions: The device; None = those of the class.

    Example:
        >>> from fag_kernel.plan import plan as make_plan
        >>> from fag_metadata import AttentionProblem, metadata_for
        >>> problem = AttentionProblem.from_metadata_args(
        ...     8, 8, 128, batch_size=1, max_seqlen_q=8192, max_seqlen_kv=1024
        ... )
        >>> soc = "Ascend950PR_9599"
        >>> answer = estimate(make_plan(problem, soc), metadata_for(problem, soc))
        >>> answer.overlapped_s < answer.serial_s
        True
    """
    device = assumptions or Assumptions()
    key = plan.key
    assert key is not None
    da, dva = kernel_dims(key.d_align, key.dv_align)
    problem = plan.problem
    both = form == "deterministic" or key.is_multiblk
    if key.template == "BN2" and not key.is_multiblk:
        phases = [("bn2", 3 * da + 2 * dva, False)]
    elif both:
        names = ("bn2_columns", "bn2_rows") if key.is_multiblk else ("columns", "rows")
        phases = [(names[0], 2 * da + 2 * dva, False), (names[1], 2 * da + dva, False)]
    else:
        phases = [("accumulate", 3 * da + 2 * dva, True)]
    total = np.zeros(3)
    slowest = np.zeros(3)
    overlapped = serial = 0.0
    for family, depth, adds_dq in phases:
        bm, bn = tile_sizes(family, da, dva)
        blocks = _count(plan, metadata, bm, bn)
        macs = blocks.visited * bm * bn * depth
        vector = blocks.visited * (bm * bn * device.score_operations + bm * dva * 2 * device.moved_operations)
        vector = vector + blocks.masked * bm * bn * device.mask_operations
        query_bytes, key_bytes = bm * (da + 3 * dva) * 2, bn * (da + dva) * 2
        if family.endswith("rows"):
            # a row of blocks reads its queries once and the keys again and again; as many rows as columns
            # are opened
            l2 = blocks.visited * key_bytes + blocks.lines * query_bytes + blocks.lines * bm * da * 2
        else:
            l2 = blocks.visited * query_bytes + blocks.lines * (
                key_bytes + bn * (da + dva) * (4 if adds_dq else 2)
            )
        if adds_dq:
            vector = vector + blocks.visited * bm * da * device.moved_operations
            l2 = l2 + blocks.visited * bm * da * 4
        cycles = np.stack([
            macs / device.macs_per_cycle,
            vector / (device.lanes * device.vector_cores_used),
            l2 / device.l2_bytes_per_cycle,
        ])  # fmt: skip
        worst = int(np.argmax(cycles.max(0))) if cycles.size else 0
        total += [macs.sum(), vector.sum(), l2.sum()]
        if cycles.size:
            slowest += [macs[worst], vector[worst], l2[worst]]
            overlapped += float(cycles.max(0).max()) / device.clock_hz
            serial += float(cycles.sum(0).max()) / device.clock_hz
    query, keys = problem.t1 * problem.n1, problem.t2 * problem.n2
    compulsory = 2.0 * (query * (problem.d * 2 + problem.dv * 2) + keys * (problem.d + problem.dv) * 2)
    accumulators = 4.0 * (query * problem.d + keys * (problem.d + problem.dv))
    pass_bytes = 0.0
    if key.template == "BN2GS1S2":
        pass_bytes = 2.5 * accumulators if form == "accumulate" else accumulators / 2
    hbm = compulsory + _l2_miss(plan) * float(total[2])
    launches = len(phases) + (2 if pass_bytes and form == "accumulate" else 1 if pass_bytes else 0)
    passes = pass_bytes / device.hbm_bytes_per_s + launches * device.launch_s
    memory = hbm / device.hbm_bytes_per_s
    return Estimate(
        Work(*map(float, total)), Work(*map(float, slowest)), pass_bytes, hbm,
        max(overlapped, memory) + passes, serial + memory + passes,
    )  # fmt: skip


def _l2_miss(plan: TilingPlan) -> float:
    """Share of the traffic that L2 does not serve: by the bytes of the heads that the cores work on at one
    time.
    """
    problem, target = plan.problem, plan.target
    if not target.l2_bytes or not plan.block_dim:
        return 0.0
    heads = problem.b * problem.n1
    live = 1 if plan.is_swizzle else min(heads, plan.block_dim)
    per_head = 3 * problem.s1 * problem.d * 2 + problem.s1 * problem.d * 4
    per_head += 6 * problem.s2 * (problem.d + problem.dv) // (2 * problem.g) * 2
    return max(0.0, 1.0 - target.l2_bytes / (live * per_head))


#: (heads, s1, s2, linear us, swizzle us): timings that CANN's developers give for their own kernel on 36
#: cores, D = 128 (spec/host-tiling.md, swizzle). Theirs is another kernel: the table shows how far apart
#: the two are expected to be.
PUBLISHED: Final = (
    (8, 1024, 8192, 237, 250),
    (16, 1024, 8192, 492, 492),
    (32, 512, 8192, 629, 632),
    (12, 8192, 512, 195, 246),
    (12, 8192, 1024, 330, 353),
    (16, 8192, 512, 277, 264),
    (20, 8192, 1024, 782, 583),
    (24, 8192, 1024, 995, 699),
    (32, 8192, 512, 726, 523),
    (8, 8192, 8192, 1556, 1761),
    (10, 8192, 8192, 1904, 2007),
    (12, 8192, 8192, 2833, 2677),
    (16, 8192, 8192, 4121, 3550),
    (24, 8192, 8192, 6483, 4982),
)


def compare_with_published() -> list[str]:
    """The model beside the published timings, as lines of a table."""
    from fag_kernel.plan import plan as make_plan
    from fag_metadata import AttentionProblem, metadata_for

    target = "Ascend950PR_9599"
    lines = [
        "heads    S1    S2   published us (CANN's kernel)   MODEL us (these kernels)   swizzle",
        "                       linear  swizzle             overlapped    serial       chosen",
    ]
    for heads, s1, s2, linear, swizzle in PUBLISHED:
        problem = AttentionProblem.from_metadata_args(
            heads, heads, 128, batch_size=1, max_seqlen_q=s1, max_seqlen_kv=s2
        )
        tiling = make_plan(problem, target)
        answer = estimate(tiling, metadata_for(problem, target))
        lines.append(
            f"{heads:5} {s1:5} {s2:5} {linear:12} {swizzle:8} {answer.overlapped_s * 1e6:21.0f} "
            f"{answer.serial_s * 1e6:9.0f} {'yes' if tiling.is_swizzle else 'no':>12}"
        )
    return lines
