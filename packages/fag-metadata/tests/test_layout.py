"""The layout table against the format page, pack and unpack, and the generated C header."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problems

from fag_metadata import (
    FORMAT_VERSION,
    AttentionProblem,
    InvalidTypeError,
    Layout,
    MaskMode,
    MetadataError,
    Route,
    Split,
    flash_attn_metadata,
    get_include,
    metadata_for,
    unpack,
)
from fag_metadata.identity import fold16, unfold16
from fag_metadata.layout import HEAD, IDENTITY, grad_offset, grad_slices, grad_words, total_words

PAGE_OFFSETS = {
    "split_axis": 0, "used_cubes": 1, "tiles_per_core": 2, "o1": 3, "o2": 4, "layout": 5, "is_sparse": 6,
    "sparse_mode": 7, "start": 8, "end": 44, "batch": 80, "mask_mode": 116, "win_left": 117, "win_right": 118,
    "s1": 119, "s2": 120, "used_vectors": 121, "dq_rows": 122, "dkv_rows": 123, "dq_start": 124,
    "dq_end": 196,
    "dkv_start": 268, "dkv_end": 340,
}  # fmt: skip


def make(**changes: Any) -> np.ndarray:
    arguments: dict[str, Any] = {
        "num_heads_q": 8, "num_heads_kv": 2, "head_dim": 192, "head_dim_v": 128, "batch_size": 3,
        "max_seqlen_q": 300, "max_seqlen_kv": 500, "mask_mode": 4, "win_left": 70, "win_right": -1,
        "is_grad_enabled": True,
    }  # fmt: skip
    arguments.update(changes)
    return flash_attn_metadata(**arguments)


def test_grad_block_of_36_slots_is_the_page_s() -> None:
    assert {name: where.start for name, where in grad_slices(36).items()} == PAGE_OFFSETS
    assert grad_words(36) == 412
    assert grad_slices(36)["dkv_end"].stop == 412


def test_grad_block_grows_with_the_slots() -> None:
    assert grad_words(64) == 16 + 11 * 64
    slices = list(grad_slices(64).values())
    assert [where.start for where in slices[1:]] == [where.stop for where in slices[:-1]]


def test_head_has_16_words_and_bit_fields_do_not_overlap() -> None:
    assert len(HEAD) == 16
    taken = [(bits.word, bit) for bits in IDENTITY for bit in range(bits.shift, bits.shift + bits.width)]
    assert len(taken) == len(set(taken))
    assert all(9 <= word <= 14 and bit < 32 for word, bit in taken)


@pytest.mark.parametrize(
    ("sections", "is_grad", "words"), [(1, True, 8192), (4, True, 8192), (5, True, 12288), (6, True, 12288)]
)
def test_length_is_rounded_up(sections: int, is_grad: bool, words: int) -> None:
    assert total_words(sections, 36, 72, 36, is_grad) == words
    assert grad_offset(sections, 36, 72) == 16 + sections * 108 * 16


def test_unpack_reads_the_identity() -> None:
    metadata = unpack(make())
    identity = metadata.identity
    assert identity is not None
    assert identity.format_version == FORMAT_VERSION
    assert (identity.n1, identity.n2, identity.b, identity.d, identity.dv) == (8, 2, 3, 192, 128)
    assert (identity.s1, identity.s2, identity.win_left, identity.win_right) == (300, 500, 70, -1)
    assert (identity.layout, identity.mask_mode) == (Layout.BSND, MaskMode.SLIDING_WINDOW)
    assert (identity.route, identity.split) == (Route.BN2GS1S2, Split.CANN)
    assert identity.is_grad
    assert (metadata.aic, metadata.aiv, identity.cube_slots) == (32, 64, 36)


def test_unpack_gives_typed_rows() -> None:
    metadata = unpack(make())
    assert metadata.grad is not None
    assert metadata.forward_rows[0].start == (0, 0, 0)
    assert metadata.forward_rows[-1].end == (6, 0, 0)
    ranges = metadata.tile_ranges
    assert len(ranges) == metadata.grad.used_cubes
    assert ranges[0].start == 0
    assert [row.start for row in ranges[1:]] == [row.end for row in ranges[:-1]]
    assert unpack(make(is_grad_enabled=False)).tile_ranges == []
    split_rows = unpack(
        make(batch_size=1, num_heads_q=1, num_heads_kv=1, max_seqlen_kv=65536, mask_mode=0, win_left=-1)
    )
    assert split_rows.forward.has_fd
    assert all(row.num_partials > 1 and row.row_count > 0 for row in split_rows.merge_rows)


def test_unpack_is_frozen() -> None:
    metadata = unpack(make())
    with pytest.raises(ValueError, match="read-only"):
        metadata.forward.fa[0, 0, 0] = 1
    with pytest.raises(AttributeError):
        metadata.aic = 3  # type: ignore[misc]


@settings(max_examples=100, deadline=None)
@given(
    problems(),
    st.sampled_from(["cpu", "Ascend950PR_9599"]),
    st.sampled_from(["cann", "balanced"]),
    st.booleans(),
)
def test_unpack_round_trips(problem: AttentionProblem, target: str, split: Any, is_grad: bool) -> None:
    words = metadata_for(problem, target, split, is_grad)
    np.testing.assert_array_equal(unpack(words).pack(), words)


def test_unpack_reads_cann_s_own_tensor() -> None:
    words = make()
    words[8:16] = 0
    metadata = unpack(words)
    assert metadata.identity is None
    np.testing.assert_array_equal(metadata.pack(), words)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda words: words.astype(np.int64), InvalidTypeError, "must be int32, got int64"),
        (lambda words: words.reshape(2, -1), MetadataError, "must have one dimension"),
        (lambda words: words[:10], MetadataError, "must have at least 16 words, got 10 words"),
        (lambda words: words[:-1], MetadataError, "must have 8192 words by its own head, got 8191 words"),
        (lambda words: np.append(words, np.int32(0)), MetadataError, "must have 8192 words"),
        (lambda words: put(words, 0, 0), MetadataError, "must hold positive counts, got section_num=0"),
        (lambda words: put(words, 6, 1), MetadataError, "must have row_layout 0, got 1"),
        (lambda words: put(words, 7, 40), MetadataError, "must have grad_offset 0 or 1552, got 40"),
        (
            lambda words: put(words, 7, 0),
            MetadataError,
            "must have a grad_offset exactly with is_grad, got 0",
        ),
        (lambda words: put(words, 8, 77), MetadataError, "must have magic 0x31474146"),
        (lambda words: put(words, 9, words[9] + 1), MetadataError, "must have format version 1, got 2"),
        (lambda words: put(words, 9, words[9] | 7 << 8), MetadataError, "must hold a known route"),
    ],
)
def test_unpack_refuses(change: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        unpack(change(make()))


def put(words: np.ndarray, word: int, value: int) -> np.ndarray:
    words[word] = value
    return words


@given(st.integers(-1, 2**31 - 1))
def test_fold16_is_exact_for_small_numbers_and_says_so(value: int) -> None:
    folded = fold16(value)
    assert 0 <= folded < 65536
    assert unfold16(folded) == (value if value < 32768 else None)


# ---- the C header


def load_tool() -> ModuleType:
    path = Path(__file__).parents[1] / "tools" / "make_header.py"
    spec = importlib.util.spec_from_file_location("make_header", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_header_is_fresh() -> None:
    packaged = Path(get_include()) / "fag_metadata" / "layout.h"
    assert packaged.read_text() == load_tool().header_text(), "run packages/fag-metadata/tools/make_header.py"


def test_header_tool_writes_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = load_tool()
    monkeypatch.setattr(header, "HEADER", tmp_path / "fag_metadata" / "layout.h")
    assert header.main(["--check"]) == 1
    assert header.main([]) == 0
    assert header.main(["--check"]) == 0


@pytest.mark.parametrize(("compiler", "standard"), [("cc", "c99"), ("c++", "c++20")])
def test_header_compiles_and_agrees(tmp_path: Path, compiler: str, standard: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} on this machine")
    checks = [f"(FAG_GRAD_{name.upper()}(36) == {offset})" for name, offset in PAGE_OFFSETS.items()]
    checks += [f"(FAG_HEAD_{field.name.upper()} == {word})" for word, field in enumerate(HEAD)]
    checks += [f"(FAG_FORMAT_VERSION == {FORMAT_VERSION})", "(FAG_GRAD_WORDS(36) == 412)"]
    checks += [
        "(FAG_ROUTE_BN2_MULTIBLK == 2)",
        "(FAG_MASK_SLIDING_WINDOW == 4)",
        "(FAG_BWD_UNIT_KEYS == 256)",
    ]
    if compiler == "c++":
        checks.append("(fag::layout::grad_dkv_end(36) == 340)")
    source = tmp_path / ("probe.c" if compiler == "cc" else "probe.cpp")
    source.write_text(
        f'#include "fag_metadata/layout.h"\nint main(void) {{ return ({" && ".join(checks)}) ? 0 : 1; }}\n'
    )
    program = tmp_path / "probe"
    flags = [f"-std={standard}", "-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{get_include()}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)
    assert subprocess.run([str(program)], check=False).returncode == 0


def test_import_needs_neither_torch_nor_matplotlib() -> None:
    heavy = "{'torch', 'matplotlib', 'triton', 'scipy'}"
    code = f"import sys, fag_metadata; print(*sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == ""


def test_a_forward_split_is_frozen() -> None:
    view = unpack(flash_attn_metadata(8, 2, 64, batch_size=1, max_seqlen_q=9, max_seqlen_kv=9))
    with pytest.raises(FrozenInstanceError):
        view.forward.m = 64  # type: ignore[misc]
