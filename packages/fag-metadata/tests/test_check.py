"""Metadata of other calls, truncated, foreign or corrupt metadata: refused by name, reported in full."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from fag_metadata import (
    AttentionProblem,
    InvalidTypeError,
    MetadataError,
    check,
    check_metadata,
    flash_attn_metadata,
    metadata_for,
)
from fag_metadata.layout import grad_slices

OP = "flash_attn_grad"
BASE: dict[str, Any] = {
    "num_heads_q": 8, "num_heads_kv": 4, "head_dim": 64, "batch_size": 2, "max_seqlen_q": 300,
    "max_seqlen_kv": 400,
    "mask_mode": 4, "win_left": 100, "win_right": 20,
}  # fmt: skip


def problem_of(**changes: Any) -> AttentionProblem:
    return AttentionProblem.from_metadata_args(**{**BASE, **changes})


def metadata_of(**changes: Any) -> np.ndarray:
    return flash_attn_metadata(**{**BASE, "is_grad_enabled": True, **changes})


TND: dict[str, Any] = {"layout_q": "TND", "batch_size": None, "max_seqlen_q": None, "max_seqlen_kv": None}
TND.update(cu_seqlens_q=[0, 100, 300], cu_seqlens_kv=[0, 100, 300])


@pytest.mark.parametrize("changes", [{}, TND, {"seqused_kv": [1, 400]}], ids=["dense", "tnd", "seqused"])
@pytest.mark.parametrize("options", [{}, {"target": "cpu"}, {"split": "balanced"}], ids=str)
def test_matching_metadata_passes(changes: dict[str, Any], options: dict[str, Any]) -> None:
    metadata = metadata_of(**changes, **options)
    check_metadata(OP, metadata, problem_of(**changes), need_grad=True)
    report = check(metadata, problem_of(**changes))
    assert report.is_ok, report
    assert str(report).startswith("ok")


def test_bounds_do_not_matter() -> None:
    metadata = metadata_of(**{**TND, "max_seqlen_q": 5000})
    check_metadata(OP, metadata, problem_of(**{**TND, "max_seqlen_kv": 200}), need_grad=True)
    assert check(metadata, problem_of(**TND)).is_ok


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layout_q": "BNSD"}, "for layout_q=BNSD, got layout_q=BSND"),
        (TND, "for layout_q=TND, got layout_q=BSND"),
        ({"num_heads_q": 16}, "for num_heads_q=16, got num_heads_q=8"),
        ({"num_heads_kv": 2}, "for num_heads_kv=2, got num_heads_kv=4"),
        ({"head_dim": 72, "head_dim_v": 64}, "for head_dim=72, got head_dim=64"),
        ({"batch_size": 3}, "for batch_size=3, got batch_size=2"),
        ({"max_seqlen_q": 301}, "for max_seqlen_q=301, got max_seqlen_q=300"),
        ({"max_seqlen_kv": 40000}, "for max_seqlen_kv=40000, got max_seqlen_kv=400"),
        ({"mask_mode": 3, "win_left": -1, "win_right": -1}, "for mask_mode=3, got mask_mode=4"),
        ({"win_left": 101}, "for win_left=101, got win_left=100"),
        ({"win_right": -1}, "for win_right=-1, got win_right=20"),
        ({"seqused_q": [300, 300]}, "for seqused_q given, got seqused_q not given"),
    ],
)
def test_pc49_names_the_first_field_that_differs(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(MetadataError, match=re.escape(f"{OP}: metadata must be made {text}. Make it with")):
        check_metadata(OP, metadata_of(), problem_of(**changes), need_grad=True)
    assert not check(metadata_of(), problem_of(**changes)).is_ok


def test_pc49_head_dim_of_v_is_compared() -> None:
    text = "for head_dim_v=32, got head_dim_v=48"
    with pytest.raises(MetadataError, match=re.escape(f"{OP}: metadata must be made {text}. Make it with")):
        check_metadata(OP, metadata_of(head_dim_v=48), problem_of(head_dim_v=32), need_grad=True)


def test_metadata_of_cann_s_signature_fits_every_head_dim_of_v() -> None:
    """CANN's callers cannot say Dv, and no range depends on it."""
    for dv in (1, 32, 64):
        check_metadata(OP, metadata_of(), problem_of(head_dim_v=dv), need_grad=True)
        assert check(metadata_of(), problem_of(head_dim_v=dv)).is_ok
    with pytest.raises(MetadataError, match="for batch_size=3, got batch_size=2"):
        check_metadata(OP, metadata_of(), problem_of(head_dim_v=32, batch_size=3), need_grad=True)


def test_pc49_folded_values_are_not_shown_as_if_they_were_exact() -> None:
    metadata = metadata_of(max_seqlen_kv=2**20, mask_mode=0, win_left=-1, win_right=-1)
    plain = problem_of(mask_mode=0, win_left=-1, win_right=-1)
    with pytest.raises(MetadataError, match="for max_seqlen_kv=400, got another max_seqlen_kv >= 32768"):
        check_metadata(OP, metadata, plain, need_grad=True)


def test_pc49_folds_that_collide_are_found_by_the_fingerprint() -> None:
    from fag_metadata.identity import fold16

    values: dict[int, int] = {}
    pair = next(
        (values[fold16(value)], value)
        for value in range(32768, 200000)
        if values.setdefault(fold16(value), value) != value
    )
    options = {"mask_mode": 0, "win_left": -1, "win_right": -1}
    metadata = metadata_of(max_seqlen_kv=pair[0], **options)
    with pytest.raises(MetadataError, match="must be made for the same sizes, got fingerprint 0x"):
        check_metadata(OP, metadata, problem_of(max_seqlen_kv=pair[1], **options), need_grad=True)


def test_pc49_previous_batch_of_the_same_size_is_refused() -> None:
    other = problem_of(**{**TND, "cu_seqlens_q": [0, 101, 300]})
    with pytest.raises(
        MetadataError, match="must be made for the same cu_seqlens_q, cu_seqlens_kv, got fingerprint"
    ):
        check_metadata(OP, metadata_of(**TND), other, need_grad=True)
    with pytest.raises(MetadataError, match="must be made for the same seqused_kv, got fingerprint"):
        check_metadata(OP, metadata_of(seqused_kv=[1, 2]), problem_of(seqused_kv=[2, 1]), need_grad=True)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda words: words[:-1], MetadataError, "must have 8192 words by its own head, got 8191 words"),
        (
            lambda words: np.append(words, words),
            MetadataError,
            "must have 8192 words by its own head, got 16384",
        ),
        (lambda words: words[:15], MetadataError, "must have at least 16 words, got 15 words"),
        (lambda words: words[:0], MetadataError, "must have at least 16 words, got 0 words"),
        (lambda words: words.reshape(2, -1), MetadataError, "must have one dimension, got shape"),
        (lambda words: words.astype(np.int64), InvalidTypeError, "must be an int32 array, got int64"),
        (lambda words: words.tolist(), InvalidTypeError, "must be an int32 array, got list"),
        (
            lambda words: np.zeros_like(words),
            MetadataError,
            "must be made by flash_attn_metadata of fag, got word 8",
        ),
        (
            lambda words: set_word(words, 9, int(words[9]) + 1),
            MetadataError,
            "must have format version 1, got version 2",
        ),
        (lambda words: set_word(words, 0, 0), MetadataError, "must hold positive counts, got section_num=0"),
        (
            lambda words: set_word(words, 0, 99),
            MetadataError,
            "must have 155648 words by its own head, got 8192 words",
        ),
    ],
)
def test_pc49_refuses_damaged_metadata(change: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{OP}: metadata {text}"):
        check_metadata(OP, change(metadata_of()), problem_of(), need_grad=True)


def set_word(words: np.ndarray, word: int, value: int) -> np.ndarray:
    words[word] = value
    return words


def test_pc49_forward_only_metadata_is_refused_by_the_gradient() -> None:
    metadata = metadata_of(is_grad_enabled=False)
    check_metadata("flash_attn", metadata, problem_of(), need_grad=False)
    with pytest.raises(
        MetadataError, match="must be made with is_grad_enabled=True, got is_grad_enabled=False"
    ):
        check_metadata(OP, metadata, problem_of(), need_grad=True)


# ---- check: the backward half


def corrupt(field: str, change: Any, **changes: Any) -> str:
    metadata = metadata_of(**changes)
    block = metadata[metadata[7] :]
    words = block[grad_slices(36)[field]]
    change(words)
    return str(check(metadata, problem_of(**changes)))


@pytest.mark.parametrize(
    ("field", "change", "text"),
    [
        ("start", lambda w: w.__setitem__(3, w[3] + 1), "before core 3 are in no range"),
        ("start", lambda w: w.__setitem__(3, w[3] - 1), "before core 3 are in two ranges"),
        ("end", lambda w: w.__setitem__(1, 10**6), "core 1 must have tiles inside"),
        ("end", lambda w: w.__setitem__(1, 0), "core 1 must have tiles inside"),
        ("end", lambda w: w.__setitem__(35, 5), "must have no tiles"),
        ("used_cubes", lambda w: w.__setitem__(0, 40), "used_cubes: must be in 0..36, got 40"),
        ("used_vectors", lambda w: w.__setitem__(0, -1), "used_vectors: must be in 0..72, got -1"),
        ("layout", lambda w: w.__setitem__(0, 4), "layout: must be 1, got 4"),
        ("mask_mode", lambda w: w.__setitem__(0, 3), "mask_mode: must be 4, got 3"),
        ("o1", lambda w: w.__setitem__(0, 4), "o1: must be 3, got 4"),
        ("s1", lambda w: w.__setitem__(0, 200), "s1: must be at least the longest sequence 300, got 200"),
        ("dq_start", lambda w: w.__setitem__(2, 0), "dq_start: the rows of"),
        ("dkv_end", lambda w: w.__setitem__(2, 0), "dkv_start: the rows of"),
        ("dq_rows", lambda w: w.__setitem__(0, -4), "dq_rows: must not be negative, got -4"),
    ],
)
def test_check_reports_what_is_wrong_with_the_backward_split(field: str, change: Any, text: str) -> None:
    assert text in corrupt(field, change)


def test_check_reports_a_wrong_batch_entry() -> None:
    assert "core 5 starts in batch entry" in corrupt("batch", lambda w: w.__setitem__(5, w[5] + 1), **TND)


def test_check_reports_a_split_without_cores() -> None:
    report = corrupt("used_cubes", lambda w: w.__setitem__(0, 0))
    assert "used_cubes: must be positive for" in report


def test_check_reports_foreign_metadata_as_a_finding() -> None:
    report = check(metadata_of(), problem_of(batch_size=3))
    assert [(finding.part, finding.field) for finding in report.findings] == [("head", "metadata")]
    assert "batch_size=3" in str(report)


def test_check_takes_cann_s_own_tensor() -> None:
    metadata = metadata_of()
    metadata[8:16] = 0
    assert check(metadata, problem_of()).is_ok


def test_metadata_for_read_only_array_passes() -> None:
    check_metadata(OP, metadata_for(problem_of(), "cpu"), problem_of(), need_grad=True)
