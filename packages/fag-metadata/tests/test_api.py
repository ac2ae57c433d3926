"""flash_attn_metadata and metadata_for: defaults, caches, targets, errors."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from typing import Any

import numpy as np
import pytest

import fag_metadata
from fag_metadata import (
    TARGETS,
    AttentionProblem,
    InvalidProblemError,
    InvalidTypeError,
    Split,
    Target,
    flash_attn_metadata,
    metadata_for,
    unpack,
)

SIZES: dict[str, Any] = {"batch_size": 2, "max_seqlen_q": 300, "max_seqlen_kv": 400}


def test_result_is_a_fresh_array_that_may_be_changed() -> None:
    first = flash_attn_metadata(8, 2, 64, **SIZES)
    first[:] = 7
    second = flash_attn_metadata(8, 2, 64, **SIZES)
    assert second[0] == 1
    assert second.flags.writeable


def test_metadata_for_is_shared_and_read_only() -> None:
    problem = AttentionProblem.from_metadata_args(8, 2, 64, **SIZES)
    words = metadata_for(problem, "cpu")
    assert words is metadata_for(AttentionProblem.from_metadata_args(8, 2, 64, **SIZES), "cpu")
    with pytest.raises(ValueError, match="read-only"):
        words[0] = 3
    np.testing.assert_array_equal(
        words, flash_attn_metadata(8, 2, 64, **SIZES, target="cpu", is_grad_enabled=True)
    )


def test_cache_does_not_confuse_equal_numbers_of_other_types() -> None:
    flash_attn_metadata(8, 1, 64, **SIZES)
    with pytest.raises(InvalidTypeError, match="num_heads_kv must be an int, got bool True"):
        flash_attn_metadata(8, True, 64, **SIZES)
    with pytest.raises(InvalidTypeError, match=r"num_heads_q must be an int, got float 8\.0"):
        flash_attn_metadata(8.0, 1, 64, **SIZES)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="max_seqlen_q must be an int, got list"):
        flash_attn_metadata(8, 1, 64, **{**SIZES, "max_seqlen_q": [300]})


def test_lists_arrays_and_names_give_the_same_words() -> None:
    cu = [0, 10, 300]
    options: dict[str, Any] = {"layout_q": "TND", "mask_mode": "causal", "is_grad_enabled": True}
    first = flash_attn_metadata(8, 2, 64, cu_seqlens_q=cu, cu_seqlens_kv=cu, **options)
    array = np.array(cu, np.int32)
    second = flash_attn_metadata(8, 2, 64, cu_seqlens_q=array, cu_seqlens_kv=array, **options)
    np.testing.assert_array_equal(first, second)
    array[1] = 20
    third = flash_attn_metadata(8, 2, 64, cu_seqlens_q=array, cu_seqlens_kv=array, **options)
    assert not np.array_equal(first, third)


@pytest.mark.parametrize(
    ("target", "split"),
    [
        ("Ascend950PR_9589", Split.CANN),
        ("cpu", Split.BALANCED),
        (Target("mine", cube_cores=24, vector_cores=48, l2_bytes=0), Split.BALANCED),
    ],
    ids=["ascend", "cpu", "mine"],
)
def test_default_split_depends_on_the_target(target: Any, split: Split) -> None:
    identity = unpack(flash_attn_metadata(8, 2, 64, **SIZES, target=target)).identity
    assert identity is not None
    assert identity.split is split


def test_default_target_is_a_32_core_ascend_950() -> None:
    words = flash_attn_metadata(8, 2, 64, **SIZES)
    assert words[4:6].tolist() == [32, 64]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"target": "Ascend910B"}, InvalidProblemError, "target must be a SoC name of .* got 'Ascend910B'"),
        ({"target": 3}, InvalidTypeError, 'target must be a SoC name, "cpu" or a Target, got int'),
        ({"split": "even"}, InvalidProblemError, 'split must be "cann", "balanced" or None, got \'even\''),
        ({"split": 0}, InvalidProblemError, 'split must be "cann", "balanced" or None, got 0'),
    ],
)
def test_refuses_unknown_target_and_split(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        flash_attn_metadata(8, 2, 64, **SIZES, **options)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 2), "cube_cores must be in 1..4096, got 0"),
        ((24, 50), r"vector_cores must be a multiple of cube_cores, got 50 \(cube_cores=24\)"),
        ((24, 48, -1), "l2_bytes must be in"),
    ],
)
def test_target_refuses_impossible_machines(arguments: tuple[int, ...], text: str) -> None:
    with pytest.raises(InvalidProblemError, match=text):
        Target("mine", *arguments)
    with pytest.raises(InvalidTypeError, match="cube_cores must be an int"):
        Target("mine", 2.0, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "cores"),
    [("Ascend950PR_950z", 4), ("Ascend950DT_950x", 8), ("Ascend950PR_9579", 28), ("Ascend950PR_957d", 28),
     ("Ascend950PR_9589", 32), ("Ascend950DT_9588", 32), ("Ascend950PR_9599", 36), ("Ascend950DT_95A1", 36),
     ("cpu", 64)],
)  # fmt: skip
def test_target_table(name: str, cores: int) -> None:
    assert TARGETS[name].cube_cores == cores
    assert TARGETS[name].vector_cores == 2 * cores


def test_target_ids_in_the_head_are_distinct() -> None:
    assert len({target.target_id for target in TARGETS.values()}) == len(TARGETS)


def test_every_public_name_exists_and_is_documented() -> None:
    for name in fag_metadata.__all__:
        value = getattr(fag_metadata, name)
        assert not callable(value) or value.__doc__, name


@pytest.mark.parametrize("module", [m.name for m in pkgutil.iter_modules(fag_metadata.__path__)])
def test_examples_in_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"fag_metadata.{module}"), verbose=False)
    assert result.failed == 0


@pytest.mark.parametrize("split", ["cann", "balanced"])
@pytest.mark.parametrize("target", ["cpu", "Ascend950PR_9589"])
def test_areas_stay_inside_int64(target: str, split: str) -> None:
    sizes = {"batch_size": 1, "max_seqlen_kv": 2**27, "target": target, "split": split}
    words = flash_attn_metadata(1, 1, 64, max_seqlen_q=2**26, **sizes)
    rows = words[16 : 16 + 16 * words[0] * words[4]].reshape(-1, 16)
    ends = rows[rows.any(axis=1), 3:6]
    assert ends[-1].tolist() == [1, 0, 0]
    with pytest.raises(InvalidProblemError, match=r"max_seqlen_q must keep N1 .* at most 2\^53"):
        flash_attn_metadata(2, 2, 64, max_seqlen_q=2**26, **sizes)
