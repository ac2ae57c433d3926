"""The forward split: equal to CANN's examples and to a slow re-implementation of the format page's steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fag_metadata import AttentionProblem, ForwardSplit, Target, forward_split
from fag_metadata.forward_split import split_forward

EXAMPLES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "cann_metadata_examples.json").read_text()
)["examples"]
INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1


# ---- the page's steps F1 to F10, one block at a time


class Config(NamedTuple):
    """What the op sees: bounds are attributes, -1 = not given."""

    n1: int
    n2: int
    d: int
    dv: int
    b: int
    bound_q: int
    bound_kv: int
    mask: int
    left: int
    right: int
    is_bnsd: bool
    len_q: list[int] | None
    len_kv: list[int] | None
    aic: int
    aiv: int


def up(a: int, b: int) -> int:
    return -(-a // b)


def slow_forward(c: Config, budget: int = 96 * 2**20) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """(head words 0..5, FA rows, FD rows) by the page, with nothing clever."""
    g, ratio = c.n1 // c.n2, c.aiv // c.aic
    # F1
    q = INT32_MAX if c.bound_q == -1 else c.bound_q
    k = INT32_MAX if c.bound_kv == -1 else c.bound_kv
    left = UINT32_MAX if c.left == -1 else c.left
    right = UINT32_MAX if c.right == -1 else c.right
    m, keys = 64, 128
    if c.dv <= 128 and q <= 64 and k > 128:
        a = min(left, 0) if c.mask == 0 else left
        e = min(right, 0) if c.mask == 4 else right
        if a + e > 128:
            m, keys = 32, 256
    if c.dv == 256:
        m, keys = (32, 256) if g * q < 64 else (64, 128)
    m *= ratio
    # F2
    if c.bound_q <= 0 or c.bound_kv <= 0 or c.bound_q > c.aic * m // g:
        cores = c.aic
    else:
        cores = min(c.aic, c.b * c.n2 * up(c.bound_q * g, m) * up(c.bound_kv, keys))
    # F3
    lens = [
        (c.bound_q if c.len_q is None else c.len_q[i], c.bound_kv if c.len_kv is None else c.len_kv[i])
        for i in range(c.b)
    ]
    rows: list[list[tuple[int, int]]] = []
    bands = []
    for l1, l2 in lens:
        back, ahead = l1, l2 - l1 if c.mask == 3 else l2
        if c.mask == 4:
            back, ahead = l1 - l2 + left, l2 - l1 + right
        bands.append((back, ahead))
        ranges = []
        for r in range(up(l1 * g, m)):
            f, e = r * m, min(r * m + m, l1 * g) - 1
            if l2 == 0:
                ranges.append((0, 0))
                continue
            if c.mask == 0:
                ranges.append((0, up(l2, keys)))
                continue
            if c.is_bnsd:
                p0, p1 = (f % l1, e % l1) if f // l1 == e // l1 else (0, l1)
            else:
                p0, p1 = f // g, e // g
            lo, hi = p0 - back, p1 + ahead
            if lo >= l2 or hi < 0 or hi < lo:
                ranges.append((0, 0))
            else:
                lo, hi = min(max(lo, 0), l2 - 1), min(max(hi, 0), l2 - 1)
                ranges.append((lo // keys, hi // keys + 1))
        rows.append(ranges)
    counts = [sum(stop - first for first, stop in ranges) for ranges in rows]
    # F4
    sizes = []
    for (l1, l2), (back, ahead) in zip(lens, bands, strict=True):
        t1 = t2 = 0
        if back + ahead > 0 and back + l2 > 0 and ahead + l1 > 0:
            t1 = min(l1, l2 + back) - max(0, -ahead)
            t2 = min(l2, l1 + ahead) - max(0, -back)
        sizes.append(4 * t1 * c.d + 2 * t2 * (c.d + c.dv))
    ends = []
    total = 0
    for bn in range(c.b * c.n2):
        h = sizes[bn // c.n2]
        if total and total + h > budget:
            ends.append(bn)
            total = 0
        total += h
    if (
        not any(ranges and l2 for ranges, (_, l2) in zip(rows, lens, strict=True))  # F5
        or max(l1 * g for l1, _ in lens) <= m
        or max(sizes) <= budget // cores
    ):
        ends = []
    # F5 to F10
    fa: list[list[int]] = []
    fd: list[list[int]] = []
    has_fd = 0
    start, begin = (0, 0, 0), 0
    for end in [*ends, c.b * c.n2]:
        core_ends, slots, pieces = slow_section(begin, end, c, g, m, rows, counts, lens, cores)
        for i in range(c.aic):
            if i < len(core_ends):
                fa.append([*start, *core_ends[i], slots[i], *[0] * 9])
                start = core_ends[i]
            else:
                fa.append([0] * 16)
        fd += [[*piece, *[0] * 10] for piece in pieces] + [[0] * 16] * (c.aiv - len(pieces))
        has_fd |= int(bool(pieces))
        begin = end
    return [len(ends) + 1, has_fd, m, keys, c.aic, c.aiv], fa, fd


def slow_section(begin, end, c, g, m, rows, counts, lens, cores):  # type: ignore[no-untyped-def]
    """F5, F8 and F9 for one section."""
    num_blocks = sum(counts[bn // c.n2] for bn in range(begin, end))
    if not num_blocks:
        return [(end, 0, 0)], [0], []
    k = min(cores, num_blocks)
    plain, merged = (
        slow_assign(begin, end, c.n2, g, m, rows, counts, lens, num_blocks, k, fd) for fd in (False, True)
    )
    if not (plain[3] > 3 and plain[3] - 10 > merged[3]):
        return plain[0], [0] * len(plain[0]), []
    ends, slots, tasks, _ = merged
    vectors = cores * (c.aiv // c.aic)
    pieces = []
    if tasks:
        avg = up(sum(parts * n for _, _, _, parts, n in tasks), vectors)
        free = vectors - len(tasks)
        for bn, r, slot, parts, num_rows in tasks:
            if free == 0:
                pieces.append((bn, r, slot, parts, 0, num_rows))
                continue
            n = max(1, parts * num_rows // avg)
            per = up(num_rows, n)
            n = min(up(num_rows, per), free + 1)
            counts_of = [per] * (n - 1) + [num_rows - (n - 1) * per]
            pieces += [(bn, r, slot, parts, v * per, count) for v, count in enumerate(counts_of)]
            free -= n - 1
    return ends, slots, pieces


def slow_assign(begin, end, n2, g, m, rows, counts, lens, num_blocks, k, fd):  # type: ignore[no-untyped-def]
    """F7: head by head, row by row, block by block."""

    def load(bn: int) -> tuple[int, int, int]:
        if bn == end or not rows[bn // n2]:
            return 0, 0, 0
        first, stop = rows[bn // n2][0]
        return counts[bn // n2], stop - first, first

    bn, r = begin, 0
    h, w, s = load(bn)
    left, part, slot, worst = num_blocks, 1, 0, 0
    ends, slots, tasks = [], [], []
    for i in range(k):
        if bn == end or left == 0:
            break
        slots.append(slot + part - 1)
        limit = 3 * left // (k - i)
        if fd:
            limit = max(limit, 3) if w else limit
        else:
            limit = max(limit, 3 * w)
        used = 0
        while bn < end and (h == 0 or 3 * (used + h) <= limit + (1 if counts[bn // n2] else 0)):
            used += h
            bn, r = bn + 1, 0
            h, w, s = load(bn)
        if bn < end:
            ranges = rows[bn // n2]
            while 3 * (used + w) <= limit + (1 if ranges[r][1] > ranges[r][0] else 0):
                used, h, r = used + w, h - w, r + 1
                while ranges[r][1] == ranges[r][0]:
                    r += 1
                s, w = ranges[r][0], ranges[r][1] - ranges[r][0]
            while fd and w and 3 * (used + 1) <= limit + 1:
                used, s, h, w = used + 1, s + 1, h - 1, w - 1
        ends.append((bn, r, s) if bn < end else (end, 0, 0))
        left -= used
        worst = max(worst, used)
        if fd and i > 0 and part > 1 and ends[-1][:2] != ends[-2][:2]:
            row_bn, row, _ = ends[-2]
            ranges = rows[row_bn // n2]
            is_tail = row == len(ranges) - 1
            num_rows = lens[row_bn // n2][0] * g - row * m if is_tail else m
            tasks.append((row_bn, row, slot, part, num_rows))
            slot, part = slot + part, 1
        if fd and bn < end and rows[bn // n2][r][0] < s <= rows[bn // n2][r][1]:
            part += 1
    return ends, slots, tasks, worst


# ---- the same config as a problem


def lengths(used: list[int] | None, cu: list[int] | None) -> list[int] | None:
    if used is not None or cu is None:
        return used
    return np.diff(cu).tolist()


def example_config(config: dict[str, Any]) -> Config:
    len_q = lengths(config["seqused_q"], config["cu_seqlens_q"])
    return Config(
        n1=config["num_heads_q"],
        n2=config["num_heads_kv"],
        d=config["head_dim"],
        dv=config["head_dim"] if config["head_dim_v"] == -1 else config["head_dim_v"],
        b=config["batch_size"] if len_q is None else len(len_q),
        bound_q=config["max_seqlen_q"],
        bound_kv=config["max_seqlen_kv"],
        mask=config["mask_mode"],
        left=config["win_left"],
        right=config["win_right"],
        is_bnsd=config["layout_q"] == "BNSD",
        len_q=len_q,
        len_kv=lengths(config["seqused_kv"], config["cu_seqlens_kv"]),
        aic=config["aic_core_num"],
        aiv=config["aiv_core_num"],
    )


def make_problem(c: Config) -> AttentionProblem:
    """Lists become seqused, or cu_seqlens where both are given and the layout is not BNSD."""
    is_tnd = c.len_q is not None and c.len_kv is not None and not c.is_bnsd
    kwargs: dict[str, Any] = {}
    if is_tnd:
        kwargs["cu_seqlens_q"] = np.cumsum([0, *c.len_q]).astype(np.int32)
        kwargs["cu_seqlens_kv"] = np.cumsum([0, *c.len_kv]).astype(np.int32)
        layout = "TND"
    else:
        layout = "BNSD" if c.is_bnsd else "BSND"
        kwargs["batch_size"] = c.b
        kwargs["seqused_q"] = None if c.len_q is None else np.array(c.len_q, np.int32)
        kwargs["seqused_kv"] = None if c.len_kv is None else np.array(c.len_kv, np.int32)
    return AttentionProblem.from_metadata_args(
        c.n1,
        c.n2,
        c.d,
        head_dim_v=c.dv,
        max_seqlen_q=c.bound_q,
        max_seqlen_kv=c.bound_kv,
        mask_mode=c.mask,
        win_left=c.left,
        win_right=c.right,
        layout_q=layout,
        layout_kv=layout,
        layout_out=layout,
        **kwargs,
    )


def make_target(c: Config) -> Target:
    return Target(name="test", cube_cores=c.aic, vector_cores=c.aiv, l2_bytes=0)


def assert_equal_to_page(c: Config, split: ForwardSplit, budget: int = 96 * 2**20) -> None:
    head, fa, fd = slow_forward(c, budget)
    assert [split.section_num, split.has_fd, split.m, split.k] == head[:4]
    assert split.fa.reshape(-1, 16).tolist() == fa
    assert split.fd.reshape(-1, 16).tolist() == fd


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["id"])
def test_equals_cann_example(example: dict[str, Any]) -> None:
    words = example["metadata"]
    config = example_config(example["config"])
    split = split_forward(make_problem(config), make_target(config))
    assert [split.section_num, split.has_fd, split.m, split.k] == words[:4]
    written = [*split.fa.ravel().tolist(), *split.fd.ravel().tolist()]
    assert words[16 : 16 + len(written)] == written
    assert_equal_to_page(config, split)


SIZES = st.one_of(st.integers(0, 40), st.integers(0, 400), st.sampled_from([1, 128, 129, 512, 900]))
WINDOWS = st.sampled_from([-1, 0, 1, 2, 50, 128, 129, 500, 1000, INT32_MAX])


@st.composite
def configs(draw: st.DrawFn) -> Config:
    g = draw(st.sampled_from([1, 1, 2, 3, 5, 8, 16]))
    n2 = draw(st.integers(1, 4))
    d, dv = draw(st.sampled_from([(64, 64), (72, 72), (128, 128), (256, 256), (192, 128)]))
    mask = draw(st.sampled_from([0, 3, 4]))
    left, right = (draw(WINDOWS), draw(WINDOWS)) if mask == 4 else (-1, -1)
    b = draw(st.integers(1, 6))
    len_q = draw(st.none() | st.lists(SIZES, min_size=b, max_size=b))
    len_kv = draw(st.none() | st.lists(SIZES, min_size=b, max_size=b))
    if len_q is not None and draw(st.booleans()):
        len_kv = [s + 64 * i for i, s in enumerate(len_q)]
    bounds = [
        draw(st.integers(1, 900)) if lens is None else draw(st.sampled_from([-1, max(lens), max(lens) + 77]))
        for lens in (len_q, len_kv)
    ]
    aic = draw(st.sampled_from([1, 2, 7, 24, 28, 32, 36, 48]))
    ratio = draw(st.sampled_from([1, 2, 2]))
    return Config(
        g * n2, n2, d, dv, b, *bounds, mask, left, right, draw(st.booleans()), len_q, len_kv, aic, aic * ratio
    )  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(configs(), st.sampled_from([96 * 2**20, 2**20, 2**18, 2**16]), st.sampled_from([6, 1]))
def test_equals_page_on_random_configs(c: Config, budget: int, few_sections: int) -> None:
    # A smaller cache budget gives small problems the many sections that only large ones have.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_split, "_L2_BUDGET_BYTES", budget)
        patch.setattr(forward_split, "_FEW_SECTIONS", few_sections)
        split = split_forward(make_problem(c), make_target(c))
    assert_equal_to_page(c, split, budget)


def test_two_splits_of_one_problem_have_the_same_words() -> None:
    c = example_config(EXAMPLES[0]["config"])
    first, second = (split_forward(make_problem(c), make_target(c)) for _ in range(2))
    assert first.fa.tobytes() == second.fa.tobytes()
    assert first.fd.tobytes() == second.fd.tobytes()


def test_no_batch_is_one_core_without_work() -> None:
    c = Config(8, 8, 64, 64, 0, 128, 128, 0, -1, -1, False, None, None, 36, 72)
    split = split_forward(make_problem(c), make_target(c))
    assert (split.section_num, split.has_fd) == (1, False)
    assert not split.fa.any()
    assert not split.fd.any()


def test_no_keys_is_one_core_that_steps_over_all_heads() -> None:
    c = Config(8, 4, 64, 64, 2, -1, -1, 3, -1, -1, False, [5, 7], [0, 0], 36, 72)
    split = split_forward(make_problem(c), make_target(c))
    assert split.fa[0, 0, :7].tolist() == [0, 0, 0, 8, 0, 0, 0]
    assert not split.fa[0, 1:].any()
