"""Random problems for the property tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from fag_metadata import AttentionProblem


@st.composite
def problems(draw: st.DrawFn, longest: int = 1500) -> AttentionProblem:
    """Any valid problem: layouts, grouped heads, masks, ragged lengths with empty ones, bounds."""
    n2 = draw(st.integers(1, 4))
    arguments: dict[str, Any] = {"mask_mode": draw(st.sampled_from([0, 3, 4]))}
    if arguments["mask_mode"] == 4:
        window = st.one_of(st.just(-1), st.just(0), st.integers(0, longest), st.just(2**31 - 1))
        arguments.update(win_left=draw(window), win_right=draw(window))
    b = draw(st.integers(0, 6))
    top = draw(st.sampled_from([1, 128, 300, longest]))
    length = st.one_of(st.just(0), st.integers(0, top), st.just(top))
    lists = st.lists(length, min_size=b, max_size=b)
    kind = draw(st.sampled_from(["BSND", "BNSD", "TND", "equal TND", "seqused"]))
    if kind in ("BSND", "BNSD"):
        arguments.update(batch_size=b, layout_q=kind, max_seqlen_q=draw(length), max_seqlen_kv=draw(length))
    elif kind == "seqused":
        arguments.update(batch_size=b, max_seqlen_q=top, max_seqlen_kv=top, seqused_kv=draw(lists))
        if draw(st.booleans()):
            arguments.update(seqused_q=draw(lists))
    else:
        arguments.update(layout_q="TND")
        for side in ("q", "kv"):
            lengths = draw(lists) if kind == "TND" else [draw(length)] * b
            arguments[f"cu_seqlens_{side}"] = np.cumsum([0, *lengths]).tolist()
            if draw(st.booleans()):
                arguments[f"max_seqlen_{side}"] = max(lengths, default=0) + draw(st.sampled_from([0, 100]))
    g = draw(st.sampled_from([1, 1, 2, 3, 7]))
    d = draw(st.sampled_from([64, 128, 192]))
    return AttentionProblem.from_metadata_args(n2 * g, n2, d, **arguments)
