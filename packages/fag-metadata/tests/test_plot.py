"""The picture: the maps are right tile by tile, and files are written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from problems import problems

from fag_metadata import TARGETS, AttentionProblem, InvalidProblemError, balance, metadata_for, unpack
from fag_metadata.__main__ import explain
from fag_metadata.plot import GAP, MASKED, HeadMap, arrange, core_colours, draw, forward_map, grad_map, save

ASCEND = TARGETS["Ascend950PR_9599"]
SMALL = AttentionProblem.from_metadata_args(
    4, 2, 64, batch_size=1, max_seqlen_q=300, max_seqlen_kv=400, mask_mode=3
)
PNG = b"\x89PNG\r\n\x1a\n"


@settings(max_examples=40, deadline=None)
@given(problems(longest=700))
def test_maps_hold_every_tile_of_every_core(problem: AttentionProblem) -> None:
    metadata = metadata_for(problem, ASCEND)
    view, figures = unpack(metadata), balance(metadata, problem)
    assert view.grad is not None
    assert figures.grad is not None
    forward = forward_map(problem, view.forward, most_heads=10_000)
    backward = grad_map(problem, view.grad, most_heads=10_000)
    assert forward.num_heads == len(forward.heads) == problem.b * problem.n2
    assert backward.num_heads == len(backward.heads) == problem.b * problem.n1
    for heads, tiles in ((forward.heads, figures.forward.tiles), (backward.heads, figures.grad.tiles)):
        owners = np.concatenate([np.zeros(0, np.int64), *(head.owner.ravel() for head in heads)])
        counts = np.bincount(owners[owners != MASKED], minlength=len(tiles))
        assert (counts <= tiles).all()  # CANN's row ranges of BNSD may hold blocks that no row sees
        if problem.layout.value != "BNSD" or problem.g == 1 or heads is backward.heads:
            assert counts.tolist() == tiles.tolist()


def test_map_of_a_small_problem() -> None:
    view = unpack(metadata_for(SMALL, ASCEND))
    forward = forward_map(SMALL, view.forward)
    assert [head.name for head in forward.heads] == ["b0 kv0", "b0 kv1"]
    # 600 merged rows of 2 query heads in blocks of 128, keys in blocks of 128; offset 100
    assert (forward.heads[0].owner == MASKED).tolist()[0] == [False, False, True, True]
    assert (forward.heads[0].owner == MASKED).tolist()[4] == [False] * 4
    assert forward.aspect == 0.5
    assert view.grad is not None
    backward = grad_map(SMALL, view.grad)
    assert [head.name for head in backward.heads] == ["b0 h0", "b0 h1", "b0 h2", "b0 h3"]
    assert backward.heads[0].owner.shape == (3, 4)


def test_few_heads_are_shown_of_many_or_long_ones() -> None:
    view = unpack(metadata_for(SMALL, ASCEND))
    assert len(forward_map(SMALL, view.forward, most_heads=1).heads) == 1
    long = AttentionProblem.from_metadata_args(
        8, 8, 64, batch_size=1, max_seqlen_q=100_000, max_seqlen_kv=100_000
    )
    shown = forward_map(long, unpack(metadata_for(long, ASCEND)).forward)
    assert (len(shown.heads), shown.num_heads) == (1, 8)


def test_heads_are_arranged_without_overlap_and_fill_the_panel() -> None:
    heads = [HeadMap(str(i), np.full((3 + i % 2, 4), i, np.int64)) for i in range(16)]
    canvas, places = arrange(heads, 1.0)
    for head, (y, x) in zip(heads, places, strict=True):
        height, width = head.owner.shape
        assert (canvas[y : y + height, x : x + width] == head.owner).all()
    assert (canvas == GAP).sum() == canvas.size - sum(head.owner.size for head in heads)
    assert 1.2 < canvas.shape[1] / canvas.shape[0] < 3.2


def test_neighbouring_cores_have_different_colours() -> None:
    colours = core_colours(64)
    for step in (1, 2):
        assert abs(colours[step:] - colours[:-step]).sum(axis=1).min() > 0.3


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_file_is_written_and_the_same_each_time(tmp_path: Path, suffix: str) -> None:
    contents = []
    for name in ("first", "second"):
        path = tmp_path / (name + suffix)
        save(draw(explain(SMALL, ASCEND)), path)
        contents.append(path.read_bytes())
    assert contents[0].startswith(PNG if suffix == ".png" else b"<?xml")
    assert contents[0] == contents[1]
    assert len(contents[0]) < 150_000 or suffix == ".svg"


def test_forward_only_and_empty_problems_are_drawn(tmp_path: Path) -> None:
    save(draw(explain(SMALL, ASCEND, is_grad_enabled=False)), tmp_path / "forward.png")
    empty = AttentionProblem.from_metadata_args(2, 2, 64, batch_size=0, max_seqlen_q=5, max_seqlen_kv=5)
    save(draw(explain(empty, ASCEND)), tmp_path / "empty.png")
    no_keys = AttentionProblem.from_metadata_args(2, 2, 64, batch_size=1, max_seqlen_q=5, max_seqlen_kv=0)
    save(draw(explain(no_keys, ASCEND)), tmp_path / "no_keys.png")
    assert {path.name for path in tmp_path.iterdir()} == {"forward.png", "empty.png", "no_keys.png"}


def test_other_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidProblemError, match=r"must end in \.png, \.svg, \.pdf, got '.*split\.bmp'"):
        save(draw(explain(SMALL, ASCEND)), tmp_path / "split.bmp")
