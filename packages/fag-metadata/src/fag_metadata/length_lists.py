"""Length lists of a call: cu_seqlens and seqused, checked against each other, as lengths and starts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import arguments as rules
from .errors import problem_error
from .terms import Layout, Lengths

Int64Array = NDArray[np.int64]

Lists = tuple["Lengths | None", "Lengths | None", "Lengths | None", "Lengths | None"]


def parse_lists(op: str, cu_q: Any, cu_kv: Any, used_q: Any, used_kv: Any) -> Lists:
    """Reads the four lists, None where not given."""
    return (
        None if cu_q is None else Lengths.parse(op, "cu_seqlens_q", cu_q),
        None if cu_kv is None else Lengths.parse(op, "cu_seqlens_kv", cu_kv),
        None if used_q is None else Lengths.parse(op, "seqused_q", used_q),
        None if used_kv is None else Lengths.parse(op, "seqused_kv", used_kv),
    )


def batch_of_lists(op: str, layout: Layout, lists: Lists, b_given: int, b_name: str = "batch_size") -> int:
    """Returns B: what is given, or the length of the lists, which must agree."""
    cu_q, cu_kv, used_q, used_kv = lists
    if layout is Layout.TND:
        for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_kv", cu_kv)):
            if cu is None:
                raise problem_error(op, name, "must be given with layout TND", None)
            rules.check_cu_seqlens(op, name, cu, None)
        assert cu_q is not None
        assert cu_kv is not None
        b = len(cu_q) - 1
        if len(cu_kv) - 1 != b:
            raise problem_error(
                op,
                "cu_seqlens_kv",
                "must describe the batch of cu_seqlens_q",
                f"B={len(cu_kv) - 1}",
                cu_seqlens_q=f"B={b}",
            )
        if b_name == "batch_size" and b_given not in (-1, b):
            raise problem_error(
                op,
                "batch_size",
                "must be that of cu_seqlens_q",
                b_given,
                cu_seqlens_q=f"B={b}",
                remedy="Leave it out",
            )
        return b
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_kv", cu_kv)):
        if cu is not None:
            raise problem_error(
                op,
                name,
                f"must be None with layout {layout}",
                f"{len(cu)} elements",
                remedy="Use layout TND, or seqused",
            )
    if b_given != -1:
        rules.check_batch(op, b_name, b_given)
    elif used_q is None and used_kv is None:
        raise problem_error(op, b_name, f"must be given with layout {layout} without lengths", None)
    for name, used in (("seqused_q", used_q), ("seqused_kv", used_kv)):
        if used is not None and b_given == -1:
            b_given = len(used)
            rules.check_batch(op, name, b_given)
        elif used is not None and len(used) != b_given:
            raise problem_error(op, name, "must have B elements", f"{len(used)} elements", B=b_given)
    return b_given


def steps(offsets: Lengths) -> Int64Array:
    """Returns the differences of cu_seqlens, (b,)."""
    steps: Int64Array = offsets.values[1:] - offsets.values[:-1]
    return steps


def longest_of(used: Lengths | None, cu: Lengths | None) -> int:
    """Returns the longest real length of a side with lists, 0 for an empty batch."""
    if used is not None:
        return int(used.values.max(initial=0))
    assert cu is not None
    return int(steps(cu).max(initial=0))


def effective(used: Lengths | None, cu: Lengths | None, b: int, s: int) -> Int64Array:
    """Returns the real lengths of a side, (b,), read-only."""
    lengths = used.values if used is not None else steps(cu) if cu is not None else np.full(b, s, np.int64)
    lengths.flags.writeable = False
    return lengths


def starts(cu: Lengths | None, b: int, s: int) -> Int64Array:
    """Returns the first token of each batch entry, (b,), read-only."""
    first: Int64Array = cu.values[:-1] if cu is not None else np.arange(b, dtype=np.int64) * s
    first.flags.writeable = False
    return first
