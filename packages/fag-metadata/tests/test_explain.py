"""The explanation says what the split says: route, cores, balance, and what was rejected and why."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fag_metadata import TARGETS, AttentionProblem, Split, balance
from fag_metadata.__main__ import explain

ASCEND = TARGETS["Ascend950PR_9599"]


def dense(n1: int, n2: int, s1: int, s2: int, b: int = 1, mask: int = 0, **kwargs: int) -> AttentionProblem:
    return AttentionProblem.from_metadata_args(
        n1, n2, 128, batch_size=b, max_seqlen_q=s1, max_seqlen_kv=s2, mask_mode=mask, **kwargs
    )


def test_text_of_the_example_in_the_issue() -> None:
    cu = [0, 1, 18, 318, 4414]
    problem = AttentionProblem.from_metadata_args(
        32, 8, 128, cu_seqlens_q=cu, cu_seqlens_kv=cu, layout_q="TND", mask_mode="causal"
    )
    text = str(explain(problem, ASCEND))
    for line in (
        "32 query heads, 8 key-value heads, head dim 128, layout TND.",
        "4 packed sequences, queries and keys 1, 17, 300, 4096.",
        "Target Ascend950PR_9599: 36 cube cores, 72 vector cores. Split cann: CANN's own words.",
        "Route BN2GS1S2: the tiles of a head may be spread over cores.",
        "  rejected BN2_single (cannot): needs layout is not TND, got layout=TND",
        "Forward: base blocks of 128 rows x 128 keys (a row is a query of one of 4 heads).",
        "  36 of 36 cores work on 17056 blocks; the heaviest has 474 blocks.",
        "  33 row blocks are shared by 2 cores and merged by 66 vector cores.",
        "Backward: tiles of 128 queries x 128 keys of one query head.",
        "With split balanced the heaviest core would be: forward 1.00, backward 1.00 x the mean.",
        "Tensor: 8192 int32 words, format version 1.",
    ):
        assert line in text.split("\n")


def test_refused_merging_is_explained() -> None:
    text = str(explain(dense(1, 1, 640, 640, mask=3), ASCEND))
    line = "it would take the heaviest core from 5 blocks to 1; CANN asks for more than 10 saved."
    assert f"  rejected sharing row blocks between cores: {line}" in text


def test_sections_are_explained() -> None:
    text = str(explain(dense(16, 16, 8192, 8192, b=2, mask=3), ASCEND))
    assert "  3 sections: the heads of one fit the L2 cache." in text
    text = str(explain(dense(64, 64, 384, 384, mask=3), ASCEND, Split.BALANCED))
    assert "  2 sections: two ranges a core are more even." in text


def test_forward_only_and_windows_and_head_dims() -> None:
    problem = AttentionProblem.from_metadata_args(
        8,
        8,
        192,
        head_dim_v=128,
        batch_size=2,
        max_seqlen_q=300,
        max_seqlen_kv=500,
        mask_mode=4,
        win_left=100,
        win_right=-1,
    )
    text = str(explain(problem, TARGETS["cpu"], is_grad_enabled=False))
    assert "head dim 192, 128 for v" in text
    assert "2 batch entries, 300 queries, 500 keys each." in text
    assert "Sliding window, left 100, right open, aligned bottom-right." in text
    assert "Backward: not included." in text
    assert "Split balanced: even visible areas." in text


def test_long_lists_are_summed_up() -> None:
    cu = np.cumsum([0, *range(1, 100)]).tolist()
    problem = AttentionProblem.from_metadata_args(1, 1, 64, cu_seqlens_q=cu, cu_seqlens_kv=cu, layout_q="TND")
    assert "99 packed sequences, queries and keys 1 to 99, 4950 in all." in str(explain(problem, ASCEND))
    used = AttentionProblem.from_metadata_args(1, 1, 64, seqused_kv=[5, 9], max_seqlen_q=7)
    assert "2 batch slots, queries 7 each; keys 5, 9." in str(explain(used, ASCEND))


def test_nothing_to_compute_is_said() -> None:
    assert str(explain(dense(2, 2, 5, 0), ASCEND)).count("Nothing to compute: no query sees a key.") == 2


@pytest.mark.parametrize("split", [Split.CANN, Split.BALANCED])
def test_json_has_the_same_figures(split: Split) -> None:
    problem = dense(8, 8, 1000, 1000, b=2, mask=3)
    explanation = explain(problem, ASCEND, split)
    facts = json.loads(json.dumps(explanation.to_dict()))
    figures = balance(explanation.metadata, problem)
    assert figures.grad is not None
    assert facts["forward"]["area"] == figures.forward.area.tolist()
    assert facts["grad"]["max_over_mean"] == round(figures.grad.max_over_mean, 4)
    assert facts["split"] == split.name.lower()
    assert facts["other_split"]["split"] != facts["split"]
    assert facts["route"]["name"] == "BN2GS1S2"
    assert [row["verdict"] for row in facts["route"]["trace"]] == [*["capability"] * 3, "chosen"]
    assert facts["problem"]["lengths_q"] == [1000, 1000]
    assert facts["words"] == 8192
