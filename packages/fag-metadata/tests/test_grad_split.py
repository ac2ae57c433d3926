"""CANN's backward split: its examples, a slow re-implementation of the page's steps, section 7's faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fag_metadata import AttentionProblem, InvalidProblemError, Target, flash_attn_metadata
from fag_metadata.grad_check import find_grad_faults
from fag_metadata.grad_split import split_grad
from fag_metadata.layout import GRAD, GradSplit, grad_slices, grad_words

EXAMPLES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "cann_metadata_examples.json").read_text()
)["examples"]
INF = 2147483647
T36 = Target("Ascend", 36, 72)
LAYOUT_WORDS = {"BSND": 1, "BNSD": 3, "TND": 4}


def problem_of(config: dict[str, Any]) -> AttentionProblem:
    arguments = {key: value for key, value in config.items() if not key.endswith("core_num")}
    return AttentionProblem.from_metadata_args(**arguments)


def words_of(split: GradSplit) -> list[int]:
    slots = len(split.start)
    words = np.zeros(grad_words(slots), np.int64)
    for name, where in grad_slices(slots).items():
        words[where] = getattr(split, name)
    return words.tolist()


def assert_same_words(found: list[int], expected: list[int]) -> None:
    assert len(found) == len(expected)
    for field in GRAD:
        where = grad_slices(36)[field.name]
        assert found[where] == expected[where], field.name


@pytest.mark.parametrize(
    "example", [e for e in EXAMPLES if e["config"]["is_grad_enabled"]], ids=lambda e: str(e["id"])
)
def test_split_grad_equals_cann_example(example: dict[str, Any]) -> None:
    config, words = example["config"], example["metadata"]
    target = Target("Ascend", config["aic_core_num"], config["aiv_core_num"])
    split = split_grad(problem_of(config), target)
    assert_same_words(words_of(split), words[words[7] :])
    assert find_grad_faults(split, problem_of(config)) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: str(e["id"]))
def test_flash_attn_metadata_equals_cann_example(example: dict[str, Any]) -> None:
    config = dict(example["config"])
    target = Target("Ascend", config.pop("aic_core_num"), config.pop("aiv_core_num"))
    words = flash_attn_metadata(**config, target=target)
    expected = np.array(example["metadata"])
    written = len(expected)
    assert words.dtype == np.int32
    assert len(words) == max(8192, -(-written // 4096) * 4096)
    expected[8:16] = words[8:16]
    np.testing.assert_array_equal(words[:written], expected)
    assert not words[written:].any()


# ---- the page's steps G1 to G11, one tile at a time


def up(a: int, b: int) -> int:
    return -(-a // b)


def slow_fag(
    *, n1: int, n2: int, d: int, b: int, s1: int, s2: int, mask: int, left: int, right: int, layout: str,
    lens_q: list[int] | None, lens_kv: list[int] | None, aic: int,
) -> list[int]:  # fmt: skip
    """The FAG block for 36 slots; lists are the effective lengths of TND or seqused, None = not given."""
    g = n1 // n2
    t1, t2 = min(128, s1) or 1, min(128, s2) or 1  # G1
    o1, o2 = up(s1, t1), up(s2, t2)
    word5 = LAYOUT_WORDS[layout]  # G2
    variable = layout == "TND" or lens_q is not None or lens_kv is not None
    win_left, win_right = (INF if left == -1 else left), (INF if right == -1 else right)
    sparse = 0
    if mask == 3:
        win_left, win_right, sparse = INF, 0, 1
    elif mask == 4:
        sparse = int(s1 > win_left or s2 > win_right)
    if not variable and mask:
        win_left, win_right = win_left + s1 - s2, win_right + s2 - s1
    zero = False
    if variable:  # G3, G4
        lens_q = [s1] * b if lens_q is None else lens_q
        lens_kv = [s2] * b if lens_kv is None else lens_kv
        zero = 0 in lens_q or 0 in lens_kv
        if layout == "TND" and b and len(set(lens_q)) == 1 and len(set(lens_kv)) == 1:
            word5, variable = 1, False
            if mask:
                win_left, win_right = win_left + s1 - s2, win_right + s2 - s1
    longest = max(s1, s2)  # G5
    plain = n1 == n2 and d <= 128 and not zero
    single = s1 <= 128 and s2 <= 128 and plain
    enough = b * n1 >= 256 or (b * n1 >= 128 and s1 % 128 == 0 and s2 % 128 == 0)
    multi = not variable and 129 <= longest <= 640 and plain and enough

    # every tile of every head in order: (tile number, batch entry, counted?)
    heads = n2 * g
    starts: list[tuple[int, int]] = []  # of the counted tiles: (number, batch entry)
    total = 0
    unit = 1

    def covered(p: int, w: int, j: int, wl: int, wr: int) -> tuple[int, int]:
        low = max(0, t2 * j - wr)
        first = up(p, t1) if low > p else low // t1
        return first, up(min(p, max(0, min(t2 * (j + 1), w) + wl)), t1)

    if multi:  # G6: a head is one item of O1*O2 tiles
        unit = o1 * o2
        starts = [(head * unit, 0) for head in range(b * heads if unit else 0)]
        total = b * heads * unit
    elif variable:  # G9
        assert lens_q is not None
        assert lens_kv is not None
        for i, (p, w) in enumerate(zip(lens_q, lens_kv, strict=True)):
            wl, wr = (win_left + p - w, win_right + w - p) if mask else (win_left, win_right)
            rows, cols = up(p, t1), up(w, t2)
            for head in range(heads):
                for j in range(o2):
                    if t2 * j < w:
                        first, end = covered(p, w, j, wl, wr)
                        starts += [(total + head * rows * cols + j * rows + t, i) for t in range(first, end)]
            total += heads * rows * cols
    elif sparse:  # G8
        for head in range(b * heads):
            for j in range(o2):
                first, end = covered(s1, s2, j, win_left, win_right)
                starts += [((head * o2 + j) * o1 + t, 0) for t in range(first, end)]
        total = b * heads * o1 * o2
    else:  # G7
        total = b * heads * o1 * o2
        starts = [(t, 0) for t in range(total)]

    n = len(starts)
    per_core = up(n, aic)
    used = up(n, per_core) if n else 0
    words = [0] * 412
    words[0:8] = [int(single or multi), used, per_core * unit, o1, o2, word5, sparse, mask]
    for core in range(used):
        number, entry = starts[core * per_core]
        words[8 + core] = number if core else 0
        words[80 + core] = entry if core else 0
        words[44 + core] = starts[(core + 1) * per_core][0] if core + 1 < used else total
    words[116:121] = [mask, left, right, s1, s2]  # G11
    v = min(2 * used, 72)
    rows_q, rows_kv = b * s1 * n1, b * s2 * n2
    words[121:124] = [v, rows_q, rows_kv]
    for base, rows in ((124, rows_q), (268, rows_kv)):
        for i in range(v):
            q, r = divmod(rows, v)
            words[base + i] = i * q + min(i, r)
            words[base + 72 + i] = words[base + i] + q + (i < r)
    return words


@st.composite
def configs(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    n2 = draw(st.integers(1, 4))
    config: dict[str, Any] = {
        "num_heads_q": n2 * draw(st.sampled_from([1, 1, 2, 3])),
        "num_heads_kv": n2,
        "head_dim": draw(st.sampled_from([64, 128, 192])),
        "mask_mode": draw(st.sampled_from([0, 3, 4])),
    }
    if config["mask_mode"] == 4:
        window = st.one_of(st.just(-1), st.just(0), st.integers(0, 1200))
        config.update(win_left=draw(window), win_right=draw(window))
    b = draw(st.integers(1, 5))
    longest = draw(st.sampled_from([1, 40, 128, 200, 640, 1100]))
    length = st.one_of(st.just(0), st.integers(1, longest), st.just(longest))
    lists = st.lists(length, min_size=b, max_size=b)
    kind = draw(st.sampled_from(["BSND", "BNSD", "TND", "TND equal", "seqused"]))
    if kind in ("BSND", "BNSD"):
        if draw(st.booleans()):
            b = draw(st.sampled_from([1, 64, 130]))
        config.update(batch_size=b, layout_q=kind)
        config.update(max_seqlen_q=draw(st.integers(1, longest)), max_seqlen_kv=draw(st.integers(1, longest)))
    elif kind == "seqused":
        config.update(batch_size=b, max_seqlen_q=longest, max_seqlen_kv=longest, seqused_kv=draw(lists))
        if draw(st.booleans()):
            config.update(seqused_q=draw(lists))
    else:
        lens_q = draw(lists) if kind == "TND" else [draw(length)] * b
        lens_kv = draw(lists) if kind == "TND" else [draw(length)] * b
        config.update(layout_q="TND")
        for side, lens in (("q", lens_q), ("kv", lens_kv)):
            config[f"cu_seqlens_{side}"] = np.cumsum([0, *lens]).tolist()
            config[f"max_seqlen_{side}"] = max(lens) + draw(st.sampled_from([0, 0, 100]))
    return config, draw(st.sampled_from([36, 36, 32, 8, 1]))


@settings(max_examples=250, deadline=None)
@given(configs())
def test_split_grad_equals_slow_steps(case: tuple[dict[str, Any], int]) -> None:
    config, aic = case
    problem = AttentionProblem.from_metadata_args(**config)
    split = split_grad(problem, Target("Ascend", aic, 2 * aic))
    lens_q = problem.lengths_q.tolist() if problem.has_lengths_q else None
    lens_kv = problem.lengths_kv.tolist() if problem.has_lengths_kv else None
    expected = slow_fag(
        n1=problem.n1, n2=problem.n2, d=problem.d, b=problem.b, s1=config["max_seqlen_q"],
        s2=config["max_seqlen_kv"], mask=int(problem.mask_mode), left=problem.win_left,
        right=problem.win_right, layout=str(problem.layout), lens_q=lens_q, lens_kv=lens_kv, aic=aic,
    )  # fmt: skip
    assert_same_words(words_of(split), expected)
    assert find_grad_faults(split, problem) == []


# ---- section 7: what ours does where CANN's operator fails


def base(**changes: Any) -> dict[str, Any]:
    """The base config of section 7."""
    config: dict[str, Any] = {
        "num_heads_q": 8, "num_heads_kv": 8, "head_dim": 128, "batch_size": 2, "max_seqlen_q": 1000,
        "max_seqlen_kv": 1000, "mask_mode": 0, "is_grad_enabled": True,
    }  # fmt: skip
    config.update(changes)
    return config


def tnd(cu_q: list[int], cu_kv: list[int], **changes: Any) -> dict[str, Any]:
    config = base(layout_q="TND", cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, **changes)
    if "batch_size" not in changes:
        config["batch_size"] = len(cu_q) - 1
    return config


def split_of(config: dict[str, Any], target: Target = T36) -> tuple[GradSplit, AttentionProblem]:
    problem = problem_of(config)
    return split_grad(problem, target), problem


@pytest.mark.parametrize(
    "config",
    [
        tnd([0, 128, 128], [0, 0, 128], max_seqlen_q=128, max_seqlen_kv=128),
        base(seqused_q=[0, 0], seqused_kv=[100, 200]),
        tnd([0, 0], [0, 0], max_seqlen_q=0, max_seqlen_kv=128, mask_mode=3),
    ],
    ids=["tnd", "seqused", "tnd-causal"],
)
def test_fault_1_no_visible_tile_uses_no_core(config: dict[str, Any]) -> None:
    split, problem = split_of(config)
    assert split.used_cubes == 0
    assert not split.start.any()
    assert not split.end.any()
    assert find_grad_faults(split, problem) == []


@pytest.mark.parametrize(
    "config",
    [
        tnd([0, 100, 400], [0, 100, 400], max_seqlen_q=300, max_seqlen_kv=300),
        base(seqused_q=[100, 200], seqused_kv=[100, 200]),
        tnd([0, 200, 400], [0, 200, 400], max_seqlen_q=300, max_seqlen_kv=300),
    ],
    ids=["tnd", "seqused", "tnd-uniform"],
)
def test_fault_2_batch_size_comes_from_the_lists(config: dict[str, Any]) -> None:
    expected, _ = split_of(config)
    found, problem = split_of({**config, "batch_size": -1})
    assert problem.b == 2
    assert words_of(found) == words_of(expected)
    with pytest.raises(InvalidProblemError, match=r"(batch_size|seqused_q) must .*(3|2 elements)"):
        split_of({**config, "batch_size": 3})


@pytest.mark.parametrize("aic", [40, 128])
def test_fault_3_more_than_36_cores_get_more_slots(aic: int) -> None:
    split, problem = split_of(base(max_seqlen_q=4096, max_seqlen_kv=4096), Target("big", aic, 2 * aic))
    assert len(split.start) == aic
    tiles = 2 * 8 * 32 * 32
    assert split.end[0] == -(-tiles // aic)
    assert find_grad_faults(split, problem) == []
    words = flash_attn_metadata(
        8, 8, 64, batch_size=2, max_seqlen_q=4096, max_seqlen_kv=4096, is_grad_enabled=True,
        target=Target("big", aic, 2 * aic), split="cann",
    )  # fmt: skip
    block = words[words[7] :]
    assert block[grad_slices(aic)["used_cubes"]] == aic


@pytest.mark.parametrize("cu", [[0, 100, 400], [0, 200, 400]], ids=["ragged", "uniform"])
def test_fault_4_no_bound_means_the_true_maximum(cu: list[int]) -> None:
    found, problem = split_of(tnd(cu, cu, max_seqlen_q=-1, max_seqlen_kv=-1))
    longest = max(np.diff(cu))
    expected, _ = split_of(tnd(cu, cu, max_seqlen_q=int(longest), max_seqlen_kv=int(longest)))
    assert words_of(found) == words_of(expected)
    assert find_grad_faults(found, problem) == []


def test_fault_5_bound_below_a_real_length_is_refused() -> None:
    with pytest.raises(InvalidProblemError, match=r"max_seqlen_q must be -1 or at .* got 256 .*longest=1300"):
        split_of(tnd([0, 100, 1400], [0, 100, 1400], max_seqlen_q=256, max_seqlen_kv=1300))


def test_fault_6_uniform_tnd_keeps_cann_s_words_and_covers_the_real_tiles() -> None:
    split, problem = split_of(tnd([0, 100, 200], [0, 100, 200], max_seqlen_q=300, max_seqlen_kv=300))
    assert (split.o1, split.o2, split.end[split.used_cubes - 1]) == (3, 3, 2 * 8 * 9)
    assert find_grad_faults(split, problem) == []


def test_fault_6_bound_that_overflows_gives_way_to_the_true_maximum() -> None:
    split, problem = split_of(tnd([0, 100, 200], [0, 100, 200], max_seqlen_q=INF, max_seqlen_kv=INF))
    assert (split.o1, split.o2) == (1, 1)
    assert split.dq_rows == 200 * 8
    assert find_grad_faults(split, problem) == []


def test_fault_7_tnd_rows_keep_cann_s_words() -> None:
    split, _ = split_of(tnd([0, 1, 4097], [0, 1, 4097], max_seqlen_q=4096, max_seqlen_kv=4096))
    assert split.dq_rows == 65536
    balanced = flash_attn_metadata(
        **tnd([0, 1, 4097], [0, 1, 4097], max_seqlen_q=4096, max_seqlen_kv=4096), target=T36, split="balanced"
    )
    assert balanced[balanced[7] :][grad_slices(36)["dq_rows"]] == 32776


@pytest.mark.parametrize("b", [32, 64])
def test_fault_9_dense_rows_beyond_int32_are_refused(b: int) -> None:
    config = base(batch_size=b, num_heads_q=128, max_seqlen_q=524288, max_seqlen_kv=128)
    with pytest.raises(InvalidProblemError, match=r"number of dQ rows must be at most 2147483647, got \d+"):
        split_of(config)
    assert len(flash_attn_metadata(**{**config, "is_grad_enabled": False})) >= 8192


def test_fault_9_padded_tnd_rows_beyond_int32_are_the_real_rows() -> None:
    cu = [0, 524288, *(524288 + i for i in range(1, 32))]
    cu_kv = list(range(33))
    split, _ = split_of(tnd(cu, cu_kv, num_heads_q=128, max_seqlen_q=524288, max_seqlen_kv=1))
    assert split.dq_rows == cu[-1] * 128


def test_fault_9_tiles_beyond_int32_are_refused() -> None:
    with pytest.raises(InvalidProblemError, match="number of backward tiles must be at most 2147483647"):
        split_of(base(batch_size=1, max_seqlen_q=2**21, max_seqlen_kv=2**21, num_heads_kv=1))


def test_fault_10_tensor_is_long_enough_for_any_number_of_sections() -> None:
    words = flash_attn_metadata(**base(batch_size=8, max_seqlen_q=8192, max_seqlen_kv=8192), target=T36)
    assert words[0] == 6
    assert words[7] == 10384
    assert len(words) == 12288


def test_fault_15_window_that_hides_tiles_counts_as_dense_in_cann_s_split_only() -> None:
    config = base(
        batch_size=1,
        num_heads_q=9,
        num_heads_kv=9,
        max_seqlen_q=100,
        mask_mode=4,
        win_left=500,
        win_right=1000,
    )
    split, problem = split_of(config)
    assert split.is_sparse == 0
    assert find_grad_faults(split, problem) == []


def test_fault_17_single_tile_bn2_stays_in_word_0_for_tnd() -> None:
    cu = [0, 100, 105, 233, 242]
    split, _ = split_of(tnd(cu, cu, max_seqlen_q=128, max_seqlen_kv=128))
    assert split.split_axis == 1


def test_fault_18_missing_bounds_and_mask_mean_their_defaults() -> None:
    given_ = tnd([0, 100, 400], [0, 100, 400])
    for name in ("max_seqlen_q", "max_seqlen_kv", "mask_mode"):
        given_[name] = None
    split, problem = split_of(given_)
    assert problem.mask_mode == 0
    assert (split.s1, split.s2) == (300, 300)


def test_fault_20_lists_of_different_length_are_refused() -> None:
    with pytest.raises(
        InvalidProblemError, match=r"cu_seqlens_kv must describe the batch of cu_seqlens_q, got B=1"
    ):
        split_of(tnd([0, 100, 400], [0, 400], max_seqlen_q=400, max_seqlen_kv=400))
