"""Shortcuts of the base blocks, against the lists that they save."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fag_metadata import AttentionProblem, forward_blocks
from fag_metadata.forward_blocks import BlockSize, ForwardBlocks

LENGTHS = st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), min_size=2, max_size=12)
SIZES = st.sampled_from(
    [BlockSize(*size) for size in ((128, 128), (64, 128), (64, 256), (32, 128), (192, 128))]
)


def ragged(lengths: list[tuple[int, int]], g: int, mask_mode: int = 3) -> AttentionProblem:
    cu_q, cu_kv = (np.cumsum([0, *side]).astype(np.int32) for side in zip(*lengths, strict=True))
    return AttentionProblem.from_metadata_args(
        2 * g, 2, 64, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, layout_q="TND", mask_mode=mask_mode
    )


@given(LENGTHS, SIZES, st.integers(1, 5), st.sampled_from([0, 3, 4]))
def test_counted_blocks_are_the_listed_ones(
    lengths: list[tuple[int, int]], size: BlockSize, g: int, mask_mode: int
) -> None:
    problem = ragged(lengths, g, mask_mode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_blocks, "_FEW_ROWS", 0)
        counted = ForwardBlocks(problem, size).head_blocks
    blocks = ForwardBlocks(problem, size)
    listed = [blocks.rows_of(np.array([entry])).before[-1] for entry in range(blocks.num_entries)]
    assert counted.tolist() == listed


@given(LENGTHS, SIZES, st.integers(1, 3))
def test_the_table_finds_what_a_search_finds(lengths: list[tuple[int, int]], size: BlockSize, g: int) -> None:
    searched, indexed = (ForwardBlocks(ragged(lengths, g), size) for _ in range(2))
    numbers = np.arange(searched.num_blocks)
    width = indexed.index_rows(lookups=searched.num_blocks)
    assert indexed._row_table is not None
    assert width.tolist() == [*np.diff(searched.all_rows().before), 0]
    for found, wanted in zip(indexed.positions(numbers), searched.positions(numbers), strict=True):
        assert found.tolist() == wanted.tolist()
    behind = np.array([searched.num_blocks])
    assert indexed.entries_of(behind).tolist() == [searched.num_entries]
